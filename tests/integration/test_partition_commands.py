"""Commands on partitions against a real replica set: what they change, what they refuse, and what they never do."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from bson import Timestamp
from pymongo.errors import PyMongoError, WTimeoutError

from mongo_celery.bridge.operations.operations import Operations
from mongo_celery.bridge.operations.preflight import check
from mongo_celery.bridge.state.partitions import Partitions
from mongo_celery.bridge.state.subscriptions import parse_name
from mongo_celery.errors import CommandRefusedError, ServerUnavailableError
from mongo_celery.mongo.locked import is_lock
from mongo_celery.mongo.table import Table
from mongo_celery.plan import Plan
from tests.integration.conftest import MakeBridge
from tests.rig.led import LedBridge, stored_change, token
from tests.rig.term import around, mark_at, open_transaction


def handle(change: object) -> None:
    """A handler."""


def parts_of(plan: Plan) -> list[dict[str, Any]]:
    return list(plan.run().fields["parts"])


def results_of(plan: Plan) -> list[str]:
    return [each["result"] for each in parts_of(plan)]


def test_commands_without_a_name_act_on_all_that_fit(led: LedBridge) -> None:
    led.halt(2)
    plan = led.operations.pause()
    assert [(each["result"], each["state"]) for each in parts_of(plan)] == [
        ("done", "paused"), ("done", "paused"), ("unfit", "halted"),
    ]  # fmt: skip
    assert led.operations.pause().seen != plan.seen != ""
    assert results_of(led.operations.pause()) == ["unchanged", "unchanged", "unfit"]
    assert results_of(led.operations.resume()) == ["done", "done", "unfit"]
    assert led.operations.pause().seen == plan.seen


def test_a_retry_of_what_nothing_would_run_is_refused(led: LedBridge, make_bridge: MakeBridge) -> None:
    both = make_bridge()
    both.on_change("shop.carts", name="audit")(handle)
    led.store.leases.release(led.term, "idle", None)
    again = LedBridge(both)
    again.halt()
    again.park(1)
    again.halt(handler="audit")
    other = make_bridge(handler="audit").operations
    for named in (("summarise", 0), ("summarise",)):
        with pytest.raises(CommandRefusedError):
            other.retry(*named).run()
    found = {(each["handler"], each["partition"]): (each["result"], each["state"]) for each in parts_of(other.retry())}
    assert found == {
        ("audit", 0): ("done", "flowing"),
        ("audit", 1): ("unfit", "flowing"),
        ("audit", 2): ("unfit", "flowing"),
        ("summarise", 0): ("unfit", "halted"),
        ("summarise", 1): ("unfit", "retrying"),
        ("summarise", 2): ("unfit", "flowing"),
    }


def test_a_retry_of_a_change_that_nobody_has_any_more_is_refused(led: LedBridge) -> None:
    """P16: it would flow on as if nothing were lost; unless the listener says that the change is in its buffer."""
    led.halt()
    later = Timestamp(9, 1)
    head = {"$set": {"halted.resumeToken": mark_at(Timestamp(6, 1)).token}}
    led.state["partitions"].update_one({"_id": led.image.id}, head)
    led.lose_history(later)
    with pytest.raises(CommandRefusedError):
        led.operations.retry("summarise", 0).run()
    assert led.store.subscriptions.move_start("summarise", led.version, later, "oldest")
    with pytest.raises(CommandRefusedError):
        led.operations.retry("summarise", 0).run()
    assert led.partition().state == "halted"
    led.report(held=[{"subscription": "summarise", "partition": 0}])
    led.operations.retry("summarise", 0).run()
    assert led.partition().state == "flowing"


def test_the_plan_of_a_retry_only_reads_and_its_run_marks_the_stored_change(storing: LedBridge) -> None:
    """P1: the execution that halted has stored its change without a mark, and no listener has it any more."""
    storing.state["partitions"].update_one({"_id": storing.image.id}, {"$unset": {"stored": ""}})
    storing.halt()
    storing.lose_history(Timestamp(9, 1))
    before = storing.image
    plan = storing.operations.retry("summarise", 0)
    assert (storing.image, storing.image.stored) == (before, None)
    assert results_of(plan) == ["done"]
    assert storing.image.stored is not None
    assert (storing.image.state, storing.image.stored["to"]) == ("flowing", token(1)["_data"])


@pytest.mark.parametrize(
    ("then", "result", "state"),
    [("stored", "done", "flowing"), ("gone", "refused", "halted"), ("skipped", "refused", "flowing")],
)
def test_a_change_of_a_listener_that_ends_before_the_retry_is_looked_for_again(
    storing: LedBridge, then: str, result: str, state: str
) -> None:
    """P1: at the plan's time the listener had it in its buffer."""
    storing.state["partitions"].update_one({"_id": storing.image.id}, {"$unset": {"stored": ""}})
    storing.halt()
    storing.lose_history(Timestamp(9, 1))
    storing.report(held=[{"subscription": "summarise", "partition": 0}])
    plan = storing.operations.retry("summarise")
    storing.store.leases.release(storing.term, "idle", None)
    if then != "stored":
        storing.state["backlog"].delete_many({})
    if then == "skipped":
        storing.operations.skip("summarise", 0, discard=True).run()
    part, *_ = parts_of(plan)
    assert (part["result"], part["state"], storing.image.state) == (result, state, state)
    assert (storing.image.stored is not None) == (then == "stored")


def test_a_lost_history_is_passed_once_and_leaves_a_record(led: LedBridge) -> None:
    """P12: it is decided once, beside a listener. A second decision finds that it has changed."""
    operations = led.operations
    led.lose_history()
    with pytest.raises(CommandRefusedError):
        operations.reset("summarise", "2026-01-01")
    first, second = operations.reset("summarise", "now", reason="why"), operations.reset("summarise", "oldest")
    assert first.fields["from"] == Timestamp(5, 1).as_datetime().isoformat()
    before = led.store.leases.read() or {}
    to = first.run().fields["to"]
    with pytest.raises(CommandRefusedError):
        second.run()
    (document,) = [each for each in led.store.subscriptions.read_all() if parse_name(each) == "summarise"]
    start = document["startAtOperationTime"]
    assert start.as_datetime().isoformat() == to
    assert not document.keys() & {"lost", "resumeToken"}
    assert [(each["policy"], each["until"]) for each in document["gaps"]] == [("now", start)]
    lease = led.store.leases.read() or {}
    assert (lease["term"], lease["live"]) == (before["term"], before["live"]), "the term continues"
    (record,) = operations.history()
    assert (record["command"], record["reason"]) == ("reset summarise --to now", "why")


def test_a_skip_passes_over_the_change_that_was_seen(led: LedBridge) -> None:
    led.halt()
    with pytest.raises(CommandRefusedError):
        led.operations.skip("summarise", 0).run()
    assert led.partition().state == "halted"
    plan = led.operations.skip("summarise", 0, discard=True)
    (halted,) = plan.fields["halted"]
    assert (halted["key"], halted["token"] in plan.seen) == ("shop.orders insert 1", True)
    assert results_of(plan) == ["done"]
    shown = led.partition()
    assert (shown.committed, shown.state, shown.token) == (1, "flowing", token(1)["_data"])
    assert led.claim(number=1) is None
    assert led.claim(number=2) is not None


@pytest.mark.parametrize(
    ("command", "discard"), [("pause", None), ("retry", None), ("skip", False), ("skip", True)], ids=str
)
def test_a_locked_partition_is_not_taken_for_a_silent_server(
    storing: LedBridge, command: str, discard: bool | None
) -> None:
    """P9: a worker died within its transaction, so the command does nothing, and can be repeated after its end."""
    if command != "pause":
        storing.halt()
    before = storing.image
    plan = getattr(storing.operations, command)("summarise", 0, **({} if discard is None else {"discard": discard}))
    with (
        open_transaction(storing.bridge.client, storing.bridge.options.database, before.id),
        pytest.raises(CommandRefusedError) as refused,
    ):
        plan.run()
    assert isinstance(refused.value.__cause__, PyMongoError)
    assert is_lock(refused.value.__cause__)
    assert storing.image == before
    assert results_of(plan) == ["done"]


@pytest.mark.parametrize("command", ["pause", "retry", "skip"])
def test_a_locked_partition_does_not_stop_a_command_on_the_others(led: LedBridge, command: str) -> None:
    """P12: the operator sees which partitions are done, and repeats the command for the locked one."""
    if command != "pause":
        for index in range(3):
            led.halt(index)
    options = {"discard": True} if command == "skip" else {}
    plan = getattr(led.operations, command)("summarise", **options)
    with open_transaction(led.bridge.client, led.bridge.options.database, led.image.id):
        assert results_of(plan) == ["refused", "done", "done"]
    (record,) = led.operations.history()
    assert record["effect"] == {"partitions": 2}
    assert results_of(getattr(led.operations, command)("summarise", **options))[0] == "done"


def test_a_pause_that_another_operator_has_ended_is_not_made_again(
    led: LedBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first write was applied, but its wait for a majority ended."""

    def resume_and_end_wait() -> None:
        assert results_of(led.operations.resume("summarise", 0)) == ["done"]
        raise WTimeoutError("waiting for replication timed out", code=64)

    plan = led.operations.pause("summarise", 0)
    around(monkeypatch, (Table, "update"), resume_and_end_wait, behind=True)
    with pytest.raises(ServerUnavailableError):
        plan.run()
    assert led.partition().state == "flowing"


@pytest.mark.parametrize("command", ["skip", "retry"])
def test_a_command_does_not_touch_a_change_that_its_operator_has_not_seen(led: LedBridge, command: str) -> None:
    plans: dict[str, Callable[[], Plan]] = {
        "skip": lambda: led.operations.skip("summarise", 0, discard=True),
        "retry": lambda: led.operations.retry("summarise", 0),
    }
    led.halt()
    plan = plans[command]()
    assert plan.seen == plans[command]().seen != ""
    plans["skip"]().run()
    led.halt(number=2)
    with pytest.raises(CommandRefusedError):
        plan.run()
    assert (led.partition().committed, led.partition().state) == (1, "halted")
    assert plans[command]().seen != plan.seen


def test_a_partition_that_is_halted_no_more_does_not_refuse_the_others(led: LedBridge) -> None:
    led.halt(1)
    led.halt(2)
    plan = led.operations.skip("summarise", discard=True)
    assert [each["partition"] for each in plan.fields["halted"]] == [1, 2]
    led.operations.retry("summarise", 1).run()
    result = plan.run()
    assert [each["result"] for each in result.fields["parts"]] == ["unfit", "refused", "done"]
    assert len(result.refused) == 1
    idle = led.operations.skip("summarise")
    assert (idle.question, idle.act, idle.contents) == (None, None, []), "there is no change to give up"


@pytest.mark.parametrize(
    "command",
    [
        lambda operations: operations.retry("summarise", 1),
        lambda operations: operations.skip("summarise", 1),
        lambda operations: operations.pause("summarise", 0),
        lambda operations: operations.resume("summarise", 0),
        lambda operations: operations.retry("summarise", 2),
        lambda operations: operations.pause("summarize"),
        lambda operations: operations.reset("summarize", "now"),
        lambda operations: operations.history("summarize"),
        lambda operations: operations.pause("summarise", 9),
    ],
)
def test_a_command_that_does_not_fit_is_refused(led: LedBridge, command: Callable[[Operations], Plan]) -> None:
    led.halt(0)
    led.run(2)
    before = list(led.state["partitions"].find())
    with pytest.raises(CommandRefusedError):
        command(led.operations).run()
    assert list(led.state["partitions"].find()) == before


def test_a_bridge_that_was_never_led_has_nothing_to_command(make_bridge: MakeBridge) -> None:
    with pytest.raises(CommandRefusedError):
        make_bridge().operations.pause().run()


def test_a_lost_race_is_decided_by_a_second_reading(led: LedBridge, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first reading saw is gone: the command reads again. Of a command on all the others are done."""
    led.halt(0)
    led.halt(1)
    stale = led.images()
    led.operations.retry("summarise", 0).run()
    monkeypatch.setattr(Partitions, "of", lambda *_: stale)
    with pytest.raises(CommandRefusedError):
        led.operations.retry("summarise", 0).run()
    led.operations.pause("summarise", 2).run()
    assert results_of(led.operations.pause("summarise", 2)) == ["unchanged"]
    led.halt(0)
    assert results_of(led.operations.retry()) == ["refused", "done", "unfit"]


def test_commands_work_on_a_partition_with_stored_changes(storing: LedBridge) -> None:
    """P13: retry and skip act on the head; mark and changes stay, so that what follows is run from there, in order."""
    operations = storing.operations
    storing.halt()
    assert results_of(operations.retry("summarise", 0)) == ["done"]
    storing.halt()
    plan = operations.skip("summarise", 0)
    assert json.loads("\n".join(plan.contents))["fullDocument"]["_id"] == 1
    assert results_of(plan) == ["done"]
    assert results_of(operations.pause("summarise", 0)) == ["done"]
    assert storing.claim(number=2) is None
    assert results_of(operations.resume("summarise", 0)) == ["done"]
    assert (storing.image.committed, storing.partition().stored.to) == (1, token(3)["_data"])  # type: ignore[union-attr]
    assert storing.stored == [token(2)["_data"], token(3)["_data"]]
    assert storing.claim(number=2) is not None


@pytest.mark.parametrize("marked", [True, False])
def test_a_retry_of_a_stored_change_outlives_its_history(storing: LedBridge, *, marked: bool) -> None:
    """P13: also where its execution alone has stored it; then the mark lets the next listener find it."""
    number = 3 if marked else 4
    storing.store_changes(stored_change(number), mark=False)
    storing.commit(number - 1)
    storing.halt(number=number)
    storing.lose_history()
    (halted,) = [each for each in check(storing.bridge.wiring) if each.code == "halted"]
    assert halted.commands[0] == f"celery -A operations changes {'retry' if marked else 'skip'} summarise 0"
    assert results_of(storing.operations.retry("summarise", 0)) == ["done"]
    assert storing.image.stored is not None
    assert (storing.image.stored["to"], storing.image.stored["reason"]) == (token(number)["_data"], "halted")
    assert storing.stored == [token(number)["_data"]]


def test_what_is_stored_is_named_before_lost_history_is_given_up(storing: LedBridge) -> None:
    storing.lose_history()
    assert storing.operations.reset("summarise", "oldest").fields["stored"] == [0]
