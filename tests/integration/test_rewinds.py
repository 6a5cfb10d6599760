"""Positions that a person moves, on a real replica set: what goes back, what ends, what is refused, and who did it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import click
import pytest
from bson import ObjectId, Timestamp
from click.testing import CliRunner, Result
from pymongo import MongoClient
from pymongo.database import Database
from pymongo.errors import PyMongoError

from mongo_celery import Bridge
from mongo_celery.bridge.listener.starts import open_position, read_starts
from mongo_celery.bridge.state import positions
from mongo_celery.bridge.state.backlog import StoredChange
from mongo_celery.bridge.state.dead_letters import ReplayRequest
from mongo_celery.bridge.state.positions import Positions
from mongo_celery.bridge.state.store import Store
from mongo_celery.cli.steering import history, reset
from mongo_celery.errors import CommandRefusedError
from mongo_celery.mongo.locked import is_lock
from mongo_celery.mongo.oplog import earliest_token, read_oplog
from tests.fixtures.samples import IDENTITY
from tests.rig.changes import Document, letter_of
from tests.rig.positions import HANDLER, NAME, PositionsRig, bridge_on, data_of, place_of, staged
from tests.rig.term import KilledError, around, open_transaction

REQUEST: Document = {"id": ObjectId(), "state": "requested", "partition": 0, "hash": 0, "overNewer": False}
"""A stored request for a replay, without its layout."""


@pytest.fixture
def stage(mongo_url: str, database: Database[Document], state_database: str) -> Iterator[PositionsRig]:
    with staged(mongo_url, database, state_database) as made:
        made.release()
        yield made


def test_from_the_change_of_a_token_everything_runs_again_and_nothing_before_it(stage: PositionsRig) -> None:
    before = {index: stage.partition(index) for index in (0, 1)}
    plan = stage.reset(data_of(stage.events[3]["_id"]), reason="the summary was wrong")
    place = earliest_token(stage.events[3]["clusterTime"])
    for index, old in before.items():
        new = stage.partition(index)
        assert data_of(new["resumeToken"]) == min(data_of(old["resumeToken"]), data_of(place))
        assert new["committed"] == old["committed"]
        assert new["term"] > old["term"]
    assert [each["partition"] for each in plan.fields["partitions"]] == [
        index for index in (0, 1) if data_of(before[index]["resumeToken"]) > data_of(place)
    ]
    document = stage.subscription
    assert (data_of(document["resumeToken"]), document["fingerprint"]) == (data_of(place), None)
    assert document["clusterTime"] == stage.events[3]["clusterTime"]
    stage.lead()
    starts = read_starts(stage.store, [HANDLER], stage.version)
    assert open_position(starts, "f").token is None, "a place opens no stream"
    assert [stage.handle(event) for event in stage.events] == [False] * 3 + [True] * (len(stage.events) - 3)
    (act,) = stage.bridge.operations.history()
    assert (act["act"], act["reason"], act["handlers"]) == ("reset", "the summary was wrong", [HANDLER])
    assert "@" in act["by"]
    assert act["at"]


def test_a_time_is_the_place_in_front_of_its_changes(stage: PositionsRig) -> None:
    first = stage.events[0]["clusterTime"]
    stage.reset(first.as_datetime().isoformat())
    begins = max(Timestamp(first.time, 0), read_oplog(stage.data.client).first)  # of a server as young as the second
    for index in (0, 1):
        assert data_of(stage.partition(index)["resumeToken"]) == data_of(earliest_token(begins))
    stage.lead()
    assert all(stage.handle(event) for event in stage.events)


def test_the_pinned_start_goes_back_too(stage: PositionsRig) -> None:
    """Else what lies between would not be owed."""
    assert stage.subscription["startAtOperationTime"] == stage.events[0]["clusterTime"]
    plan = stage.reset("oldest")
    assert stage.subscription["startAtOperationTime"] == place_of(plan) < stage.events[0]["clusterTime"]
    with pytest.raises(CommandRefusedError):
        stage.reset("oldest")


def test_what_stood_behind_the_place_is_over(stage: PositionsRig) -> None:
    """P1: a head that is left would let `skip` pass over everything between; a paused partition stays paused."""
    halting, parking = stage.of(0)[-1], stage.of(1)[-1]
    stage.reset(data_of(stage.events[0]["_id"]))
    stage.lead()
    assert all(stage.handle(event) for event in stage.events[1:] if event not in (halting, parking))
    halted, parked = stage.claims_at(halting), stage.claims_at(parking)
    assert stage.store.claims.halt(halted, halting["_id"], "orders insert 1", "ValueError: no")
    assert stage.store.claims.park(parked, delay=3600, not_before=None, error="later")
    stage.release()
    plan = stage.reset("oldest")
    blocked = [(each["state"], each["key"]) for each in plan.fields["partitions"]]
    assert blocked == [("halted", "orders insert 1"), ("retrying", None)]
    for index in (0, 1):
        document = stage.partition(index)
        assert (document["state"], document["halted"], document["retry"]) == ("flowing", None, None)
    with pytest.raises(CommandRefusedError):
        stage.bridge.operations.skip(HANDLER, 0)
    stage.bridge.operations.pause(HANDLER, 1).run()
    stage.lead()
    assert stage.handle(stage.of(0)[0])
    assert not stage.handle(stage.of(1)[0]), "paused"


@pytest.mark.parametrize("to", ["oldest", "now"])
def test_an_execution_of_before_is_refused(stage: PositionsRig, to: str) -> None:
    """P3, P4: whoever runs while the position moves can neither record an outcome nor go on."""
    stage.reset(data_of(stage.of(0)[0]["_id"]))
    stage.lead()
    event = stage.of(0)[1]
    claim = stage.claims_at(event)
    stage.release()
    stage.reset(to)
    before = stage.partition(stage.index(event))
    assert not stage.store.claims.handle(claim, claim.last, event["_id"])
    assert stage.store.claims.extend([claim]) == [claim]
    assert stage.claim(event) is None, "a message of before is not claimed"
    assert stage.partition(stage.index(event)) == before
    stage.lead()
    assert to == "now" or stage.claims_at(stage.of(0)[0]).fencing_token > claim.fencing_token


def test_what_was_handled_counts_before_it_goes_back(stage: PositionsRig) -> None:
    """A mark that nobody has committed yet lies behind the place, too."""
    stage.write(1)
    last = stage.events[-1]
    stage.reset(data_of(stage.events[-2]["_id"]))
    stage.lead()
    claim = stage.claims_at(last)
    assert stage.store.claims.handle(claim, claim.last, last["_id"])
    stage.release()
    stage.reset(data_of(stage.events[-2]["_id"]))
    stage.lead()
    assert stage.handle(last)


def test_a_mark_that_was_reached_goes_and_one_that_lies_ahead_stays(stage: PositionsRig) -> None:
    backlog, partitions = stage.store.backlog, stage.store.partitions
    ahead = f"{data_of(stage.events[-1]['_id'])[:8]}FFFFFFFF"
    for index, to in ((0, data_of(stage.of(0)[0]["_id"])), (1, ahead)):
        backlog.insert(stage.partition_id(index), [StoredChange(to, b"x")], stage.version)
        assert partitions.mark_stored(stage.partition_id(index), stage.version, to, "halted")
    stage.reset("oldest")
    assert stage.partition(0)["stored"] is None
    assert stage.partition(1)["stored"]["to"] == ahead
    assert stage.state["backlog"].count_documents({}) == 2, "what is stored stays"


def test_a_key_takes_its_partition_along_and_no_other(stage: PositionsRig) -> None:
    key = stage.of(0)[0]["documentKey"]["_id"]
    plan = stage.reset("oldest", key=str(key))
    assert ([each["partition"] for each in plan.fields["partitions"]], plan.fields["key"]) == ([0], repr(key))
    stage.lead()
    assert [stage.handle(event) for event in stage.events] == [stage.index(event) == 0 for event in stage.events]


@pytest.mark.parametrize("key", [False, True], ids=["all of it", "one key"])
def test_what_comes_again_knows_that_all_of_it_does(stage: PositionsRig, key: bool) -> None:
    """F5: stamps from before it refuse nothing then. Not where other partitions keep what they have written."""
    assert [stage.partition(index).get("rewound") for index in (0, 1)] == [None, None]
    stage.reset("oldest", **({"key": str(stage.of(0)[0]["documentKey"]["_id"])} if key else {}))
    version = int((stage.store.leases.read() or {})["term"])
    stage.lead()
    assert stage.claims_at(stage.of(0)[0]).rewound == (0 if key else version)
    assert key or stage.claims_at(stage.of(1)[0]).rewound == version


def test_forward_passes_over_what_lies_between_and_notes_the_gap(stage: PositionsRig) -> None:
    stage.store.backlog.insert(stage.partition_id(0), [StoredChange(f"{data_of(stage.events[-1]['_id'])}0", b"x")], 1)
    marked = f"{data_of(stage.events[-1]['_id'])}0"
    assert stage.store.partitions.mark_stored(stage.partition_id(0), stage.version, marked, "halted")
    stage.data["orders"].insert_one({"_id": "unseen"})
    plan = stage.reset("now")
    assert (plan.fields["forward"], [each["stored"] for each in plan.fields["partitions"]]) == (True, [1, 0])
    for index in (0, 1):
        document = stage.partition(index)
        assert (data_of(document["resumeToken"]), document["stored"]) == (plan.fields["token"], None)
    (gap,) = stage.subscription["gaps"]
    assert (gap["from"], gap["until"], gap["policy"]) == (stage.events[-1]["clusterTime"], place_of(plan), "now")
    assert stage.bridge.operations.history()[0]["command"] == f"reset {HANDLER} --to now"


@pytest.mark.parametrize(("back", "left"), [(0, []), (3, [3])], ids=["all of it", "the later half"])
def test_a_gap_that_comes_back_is_a_gap_no_longer(stage: PositionsRig, back: int, left: list[int]) -> None:
    """P16: what a handler gets after all is not reported as skipped."""
    stage.reset(data_of(stage.events[0]["_id"]))
    stage.reset("now")
    times = [event["clusterTime"] for event in stage.events]
    assert [gap["from"] for gap in stage.subscription["gaps"]] == times[:1]
    stage.reset(data_of(stage.events[back]["_id"]))
    assert [(gap["from"], gap["until"]) for gap in stage.subscription.get("gaps", [])] == [
        (times[0], times[until]) for until in left
    ]
    (handler,) = stage.bridge.operations.read_status().handlers
    assert len(handler.gaps) == len(left)


def test_a_partition_that_comes_back_alone_leaves_the_gap_of_the_others(stage: PositionsRig) -> None:
    stage.reset(data_of(stage.events[0]["_id"]))
    stage.reset("now")
    before = stage.subscription["gaps"]
    stage.reset("oldest", key=str(stage.of(0)[0]["documentKey"]["_id"]))
    assert stage.subscription["gaps"] == before


def test_the_printed_undo_of_one_key_moves_its_partition_only(stage: PositionsRig) -> None:
    """P6: otherwise the other partitions handle all their changes again."""
    bridge, key = stage.bridge, str(stage.of(0)[0]["documentKey"]["_id"])
    stage.reset(data_of(stage.events[0]["_id"]))
    source = f"{stage.data.name}.orders"
    done = run(bridge, reset, HANDLER, "--to", "now", "--key", key, "--source", source, "--yes")
    (printed,) = [line for line in done.output.splitlines() if "changes reset" in line]
    words = shlex.split(printed)
    undo = words[words.index("reset") + 1 :]
    before = [stage.partition(index) for index in (0, 1)]
    again = plain(bridge, reset, *undo, "--yes")
    assert (again["forward"], again["moved"]) == (False, [0])
    assert data_of(stage.partition(0)["resumeToken"]) < data_of(before[0]["resumeToken"])
    assert data_of(stage.partition(1)["resumeToken"]) == data_of(before[1]["resumeToken"])


def test_replays_behind_the_place_are_withdrawn_and_their_letters_stay(stage: PositionsRig) -> None:
    event = stage.of(0)[-1]
    place = {"_id": f"{NAME}/{HANDLER}/{event['_id']['_data']}", "resumeToken": event["_id"]}
    letter = {**letter_of(1, 1), **place, "bridge": NAME, "handler": HANDLER}
    stage.state["dead_letters"].insert_one({**letter, "replay": {**REQUEST, "partitioningTerm": stage.partitioning}})
    assert isinstance(stage.store.replays.find(letter["_id"]), ReplayRequest)
    claim = stage.store.claims.take_for_replay(stage.partition_id(0), letter["_id"], owner="me", term=stage.version)
    assert claim is not None
    assert stage.store.replays.start(claim, letter["_id"], 0)
    plan = stage.reset("oldest")
    assert plan.fields["dead_letters"] == 1
    assert not stage.store.replays.succeed(claim, letter["_id"])
    assert (stage.store.replays.read(), stage.state["dead_letters"].count_documents({})) == ([], 1)


def test_killed_in_the_middle_nothing_is_changed(stage: PositionsRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1, P4: one transaction, so all of it happens, or nothing."""
    before = stage.everything()

    def die() -> None:
        raise KilledError

    around(monkeypatch, (Positions, "_move_partitions"), die, behind=True)
    with pytest.raises(KilledError):
        stage.reset("oldest")
    assert stage.everything() == before


def test_a_partition_that_an_open_transaction_locks_is_named_as_the_cause(
    stage: PositionsRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P9: the server answers all the time. The cause is a lock, and the cure is to wait for its end."""
    before, plan = stage.everything(), stage.plan("oldest")
    monkeypatch.setattr(positions, "_SECONDS", 3.0)
    with (
        open_transaction(stage.bridge.client, stage.bridge.options.database, stage.partition_id(1)),
        pytest.raises(CommandRefusedError) as refused,
    ):
        plan.run()
    assert isinstance(refused.value.__cause__, PyMongoError)
    assert is_lock(refused.value.__cause__)
    assert refused.value.__cause__.__cause__ is None, "a chain of causes has an end"
    assert stage.everything() == before
    plan.run()


@pytest.mark.parametrize(
    "to",
    [
        *("yesterday", "{}", "810000000000000001", "2001-01-01", "2099-01-01T00:00Z", "82FFFFFFFE000000012B022C"),
        *("820000000100000001~00000001", "3026-01-01"),
    ],
)
def test_what_is_no_place_is_refused_and_nothing_changes(stage: PositionsRig, to: str) -> None:
    before = stage.everything()
    with pytest.raises(CommandRefusedError):
        stage.reset(to)
    assert stage.everything() == before


def test_nobody_is_sent_anywhere_while_a_listener_leads_or_has_led_since(stage: PositionsRig) -> None:
    stage.lead()
    plan = stage.plan("oldest")
    assert plan.fields["leader"] is not None
    with pytest.raises(CommandRefusedError):
        plan.run()
    stage.release()
    seen = stage.plan("oldest")
    stage.lead()
    stage.release()
    before = stage.everything()
    with pytest.raises(CommandRefusedError):
        seen.run()
    assert stage.everything() == before


def test_a_listener_that_begins_within_a_rewind_waits_for_it_or_stops_it(
    stage: PositionsRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both write the lease: one of them is first, and the other sees what it did."""
    plan = stage.plan("oldest")
    original = Positions._move_partitions
    begun: list[object] = []

    def slow(self: Positions, *arguments: Any) -> Any:
        with MongoClient[Document](stage.bridge.wiring.url, timeoutMS=1000) as other:
            try:
                begun.append(Store(other, stage.bridge.options).leases.acquire(IDENTITY))
            except Exception as error:  # noqa: BLE001 - it waits for the lock until its time is over
                begun.append(error)
        return original(self, *arguments)

    monkeypatch.setattr(Positions, "_move_partitions", slow)
    plan.run()
    assert isinstance(begun[0], Exception)
    stage.lead()
    assert stage.handle(stage.events[0])


def test_a_change_that_is_halted_or_running_where_nothing_was_committed_is_read_again(stage: PositionsRig) -> None:
    """P1, P16: a rewind frees a partition that was halted by its first change."""
    for index in (0, 1):
        stage.state["partitions"].update_one({"_id": stage.partition_id(index)}, {"$set": {"resumeToken": None}})
    halting, running = stage.of(0)[-1], stage.claims_at(stage.of(1)[-1])
    assert stage.store.claims.halt(stage.claims_at(halting), halting["_id"], "orders insert 1", "no")
    plan = stage.reset(data_of(stage.events[1]["_id"]))
    assert [each["state"] for each in plan.fields["partitions"]] == ["halted", "running"]
    assert not stage.store.claims.handle(running, running.last, stage.of(1)[-1]["_id"])
    for index in (0, 1):
        document = stage.partition(index)
        kept = [document[name] for name in ("resumeToken", "state", "head", "claim")]
        assert kept == [None, "flowing", None, None], "it is sent nowhere: what is owed to it lies before the place"
    stage.lead()
    assert all(stage.handle(event) for event in stage.events[2:])


def run(bridge: Bridge, command: click.Command, *arguments: str, answer: str = "") -> Result:
    app = SimpleNamespace(app=bridge.wiring.app, no_color=True)
    found = CliRunner().invoke(command, list(arguments), obj=app, input=answer)
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    assert "Traceback" not in found.output
    return found


def plain(bridge: Bridge, command: click.Command, *arguments: str) -> Document:
    found: Document = json.loads(run(bridge, command, *arguments, "--json").stdout)
    return found


def test_a_reset_shows_what_it_does_asks_and_is_remembered(stage: PositionsRig) -> None:
    stage.lead()
    bridge, place = stage.bridge, data_of(stage.events[0]["_id"])
    led = run(bridge, reset, HANDLER, "--to", place)
    assert (led.exit_code, "[y/N]" in led.output) == (1, False)
    stage.release()
    before = stage.everything()
    dry = run(bridge, reset, HANDLER, "--to", place, "--dry-run")
    assert dry.exit_code == 0
    assert plain(bridge, reset, HANDLER, "--to", place, "--dry-run")["dry_run"]
    unwatched = run(bridge, reset, HANDLER, "--to", place, "--key", "k", "--source", "others.orders", "--dry-run")
    assert unwatched.exit_code == 1
    no = run(bridge, reset, HANDLER, "--to", place, answer="n\n")
    assert (no.exit_code, "[y/N]" in no.output) == (1, True)
    assert stage.everything() == before
    yes = run(bridge, reset, HANDLER, "--to", place, "--reason", "a wrong sum", answer="y\n")
    assert yes.exit_code == 0
    again = run(bridge, reset, HANDLER, "--to", place, "--yes")
    assert again.exit_code == 1
    forward = plain(bridge, reset, HANDLER, "--to", "now", "--yes")
    assert (forward["forward"], forward["moved"], forward["withdrawn"], forward["leader"]) == (True, [0, 1], 0, None)
    assert "a wrong sum" in run(bridge, history).stdout
    assert [each["act"] for each in plain(bridge, history, HANDLER)["audit_records"]] == ["reset", "reset"]


# -- `changes remove` ------------------------------------------------------------------------------


OTHER = "others"


@pytest.fixture
def full(mongo_url: str, database: Database[Document], state_database: str) -> Iterator[PositionsRig]:
    """Give a full that nobody leads, with something of everything: stored, halted, set aside, to be replayed."""
    with staged(mongo_url, database, state_database) as made:
        to = f"{data_of(made.events[-1]['_id'])}0"
        made.store.backlog.insert(made.partition_id(0), [StoredChange(to, b"x" * 50)], made.version)
        assert made.store.partitions.mark_stored(made.partition_id(0), made.version, to, "halted")
        token = data_of(made.of(1)[-1]["_id"])
        letter = {**letter_of(1, 1), "_id": f"{NAME}/{HANDLER}/{token}", "handler": HANDLER}
        request = {**REQUEST, "partitioningTerm": made.partitioning}
        made.state["dead_letters"].insert_one({**letter, "replay": request})
        made.state["snapshots"].insert_one({"_id": f"{NAME}/{HANDLER}/random", "term": 1})
        made.release()
        yield made


@pytest.fixture
def emptied(full: PositionsRig) -> Iterator[Bridge]:
    bridge = bridge_on(full.bridge.wiring.url, full.data, full.bridge.options.database, OTHER)
    yield bridge
    bridge.client.close()


def ids(full: PositionsRig, name: str) -> dict[str, set[str]]:
    """What lies under a name, without it."""
    prefix = f"{NAME}/{name}"
    found: dict[str, set[str]] = {}
    for collection in ("handlers", "partitions", "backlog", "dead_letters", "snapshots"):
        for each in full.state[collection].find({"_id": {"$regex": f"^{prefix}(/|$)"}}):
            found.setdefault(collection, set()).add(each["_id"].removeprefix(prefix))
    return found


def test_a_handler_that_is_gone_is_forgotten(full: PositionsRig, emptied: Bridge) -> None:
    with pytest.raises(CommandRefusedError):
        full.bridge.operations.remove(HANDLER)
    with pytest.raises(CommandRefusedError):
        emptied.operations.remove(HANDLER)
    PositionsRig(emptied, full.data, OTHER).release()
    others = ids(full, OTHER)
    plan = emptied.operations.remove(HANDLER, dead_letters=True)
    assert plan.question is not None
    plan.run()
    assert not ids(full, HANDLER)
    assert ids(full, OTHER) == others
    assert [act["act"] for act in emptied.operations.history(HANDLER)] == ["remove"]
    with pytest.raises(CommandRefusedError):
        emptied.operations.remove(HANDLER, dead_letters=True)


def test_stamps_of_a_forgotten_handler_go_and_those_of_others_stay(full: PositionsRig, emptied: Bridge) -> None:
    mine, others = f"{NAME}/{HANDLER}", f"{NAME}/{OTHER}"
    totals = full.data["totals"]
    stamps = {each: {"g": 1, "p": {"0": 5}} for each in (mine, others)}
    for _ in range(2):
        totals.replace_one({"_id": 1}, {"_id": 1, "sum": 3, "_fence": stamps}, upsert=True)
        plan = emptied.operations.remove(HANDLER, dead_letters=True, stamps=[totals.full_name])
        plan.run()
        assert totals.find_one() == {"_id": 1, "sum": 3, "_fence": {others: stamps[others]}}
    with pytest.raises(CommandRefusedError):
        emptied.operations.remove(HANDLER, dead_letters=True, stamps=["totals"])


def test_forgetting_goes_on_where_it_was_killed(
    full: PositionsRig, emptied: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The subscription goes first: what is left is in force for nobody, and is found."""

    def dies(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Positions, "remove", dies)
        plan = emptied.operations.remove(HANDLER, dead_letters=True)
        with pytest.raises(KeyboardInterrupt):
            plan.run()
    assert ids(full, HANDLER).keys() == {"backlog", "dead_letters"}
    emptied.operations.remove(HANDLER, dead_letters=True).run()
    assert not ids(full, HANDLER)


def test_what_only_snapshots_are_left_of_is_forgotten(full: PositionsRig, emptied: Bridge) -> None:
    """Else a handler that comes back would be given the rest of them."""
    full.state["snapshots"].insert_one({"_id": f"{NAME}/former/one", "term": 1})
    plan = emptied.operations.remove("former")
    assert plan.fields["snapshots"] == 1
    plan.run()
    assert not ids(full, "former")


def test_a_bridge_whose_last_position_is_forgotten_starts_for_the_first_time(
    full: PositionsRig, emptied: Bridge
) -> None:
    """P1: a handler that comes later begins as `start_from` says then, and not at a start of long ago."""
    full.state["leases"].update_one({}, {"$set": {"startAtOperationTime": full.events[0]["clusterTime"]}})
    full.state["handlers"].insert_one({**full.subscription, "_id": f"{NAME}/former", "handler": "former"})
    for name, begun in (("former", True), (HANDLER, False)):
        plan = emptied.operations.remove(name, dead_letters=True)
        plan.run()
        assert bool((full.store.leases.read() or {}).get("startAtOperationTime")) is begun


def test_a_handler_that_comes_back_meanwhile_keeps_what_it_has_begun(
    full: PositionsRig, emptied: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is removed behind the transaction is bound by its version."""
    original = Positions.remove

    def late(self: Positions, *arguments: Any, **options: Any) -> Any:
        full.lead()
        full.write(1)
        full.state["dead_letters"].insert_one({"_id": f"{NAME}/{HANDLER}/82FE", "partitioningTerm": full.partitioning})
        full.state["snapshots"].insert_one({"_id": f"{NAME}/{HANDLER}/82FE", "term": full.version})
        full.store.backlog.insert(full.partition_id(0), [StoredChange("82FE", b"x")], full.version)
        return original(self, *arguments, **options)

    monkeypatch.setattr(Positions, "remove", late)
    plan = emptied.operations.remove(HANDLER, dead_letters=True)
    plan.run()
    found = ids(full, HANDLER)
    assert found["handlers"] == {""}
    assert found["backlog"] == {f"/{full.partitioning}/0/82FE"}
    assert len(found["partitions"]) == 2
    assert (found["dead_letters"], found["snapshots"]) == ({"/82FE"}, {"/82FE"})


def test_a_listener_that_serves_it_keeps_it(full: PositionsRig, emptied: Bridge) -> None:
    full.lead()
    plan = emptied.operations.remove(HANDLER, dead_letters=True)
    with pytest.raises(CommandRefusedError):
        plan.run()
    full.state["leases"].update_one({}, {"$rename": {f"identity.handlers.{HANDLER}": f"identity.handlers.{OTHER}"}})
    plan.run()
    assert not ids(full, HANDLER)
