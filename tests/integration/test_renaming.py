"""Names of handlers, on a real replica set: everything goes over or goes, killed between any two steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pymongo.database import Database

from mongo_celery import Bridge, CommandRefusedError
from mongo_celery.bridge.operations import commands, letter_commands, renaming, snapshot_commands
from mongo_celery.bridge.operations.places import parse_place
from mongo_celery.bridge.operations.rewinding import read_history
from mongo_celery.bridge.state.dead_letters import Selection
from mongo_celery.bridge.state.names import BEGINNING, Names
from mongo_celery.bridge.state.spill import StoredChange
from mongo_celery.bridge.state.subscriptions import Layout
from tests.integration.positions_rig import HANDLER, NAME, Stage, bridge_on, data_of, staged
from tests.integration.test_replays import letter_of

Document = dict[str, Any]

NEW = "totals"
OTHER = "others"


@pytest.fixture
def stage(mongo_url: str, database: Database[Document], state_database: str) -> Iterator[Stage]:
    """Give a stage that nobody leads, with something of everything: stored, halted, set aside, to be replayed."""
    with staged(mongo_url, database, state_database) as made:
        to = f"{data_of(made.events[-1]['_id'])}0"
        made.store.spill.insert(made.partition_id(0), [StoredChange(to, b"x" * 50)], made.version)
        assert made.store.partitions.mark_spilled(made.partition_id(0), made.version, to, "halted")
        token = data_of(made.of(1)[-1]["_id"])
        letter = {**letter_of(1, 1), "_id": f"{NAME}/{HANDLER}/{token}", "subscription": HANDLER}
        made.state["dead_letters"].insert_one(letter)
        counts = dict.fromkeys(("starts", "crashes", "retries", "waits", "doubts"), 0)
        request = {"subscription": HANDLER, "generation": made.generation, "partition": 1, "key": "k", "fence": None}
        made.state["replays"].insert_one(
            {"_id": letter["_id"], **request, **counts, "overNewer": False, "failed": False}
        )
        made.state["snapshots"].insert_one({"_id": f"{NAME}/{HANDLER}/random", "epoch": 1})
        made.release()
        yield made


@pytest.fixture
def renamed(stage: Stage) -> Iterator[Bridge]:
    """Give the bridge of the code with the new name."""
    bridge = bridge_on(stage.bridge.wiring.url, stage.data, stage.bridge.options.database, NEW)
    yield bridge
    bridge.client.close()


@pytest.fixture
def emptied(stage: Stage) -> Iterator[Bridge]:
    """Give the bridge of the code without the handler."""
    bridge = bridge_on(stage.bridge.wiring.url, stage.data, stage.bridge.options.database, OTHER)
    yield bridge
    bridge.client.close()


def rename(bridge: Bridge, old: str = HANDLER, new: str = NEW) -> renaming.NamePlan:
    plan = renaming.plan_rename(bridge.wiring, old, new)
    renaming.rename(bridge.wiring, plan, "it says what it does")
    return plan


def ids(stage: Stage, name: str) -> dict[str, set[str]]:
    """What lies under a name, without it."""
    prefix = f"{NAME}/{name}"
    found: dict[str, set[str]] = {}
    for collection in ("subscriptions", "partitions", "spill", "dead_letters", "replays", "snapshots"):
        for each in stage.state[collection].find({"_id": {"$regex": f"^{prefix}(/|$)"}}):
            found.setdefault(collection, set()).add(each["_id"].removeprefix(prefix))
    return found


def test_everything_goes_over_to_the_new_name(stage: Stage, renamed: Bridge) -> None:
    """Positions, layout, stored changes, dead letters, replays, snapshots; the old name has nothing."""
    before, partition = ids(stage, HANDLER), stage.partition(0)
    plan = rename(renamed)
    assert (plan.holdings.stored, plan.holdings.letters, plan.holdings.replays) == (1, 1, 1)
    assert ids(stage, NEW) == before
    assert not ids(stage, HANDLER)
    after = stage.state["partitions"].find_one({"_id": partition["_id"].replace(HANDLER, NEW)}) or {}
    kept = ("committed", "resumeToken", "spilled", "state", "head", "retry")
    assert {name: after[name] for name in kept} == {name: partition[name] for name in kept}
    assert after["epoch"] > partition["epoch"]
    assert after["fence"] > partition["fence"]
    assert (stage.state["dead_letters"].find_one() or {})["subscription"] == NEW
    assert [each.subscription for each in stage.store.replays.read()] == [NEW]
    (act,) = read_history(renamed.wiring)
    assert (act["act"], act["subscription"], act["to"]) == ("rename", HANDLER, NEW)


def test_targets_know_it_by_its_first_name(stage: Stage, renamed: Bridge) -> None:
    """P3: else a late execution of the old name could write over the new one; a later layout inherits it."""
    rename(renamed)
    made = Stage(renamed, stage.data, NEW)
    claim = made.store.claims.take_for_replay(made.partition_id(0), "letter", owner="me", version=made.version)
    assert claim is not None
    assert claim.fenced_as == HANDLER
    layout = Layout(made.version, 1, "blake2b-64:_id")
    made.store.partitions.prepare({NEW: None}, {NEW: layout}, made.version)
    document = made.state["partitions"].find_one({"_id": f"{NAME}/{NEW}/{made.version}/0"}) or {}
    assert document["fencedAs"] == HANDLER


@pytest.mark.parametrize("step", ["copy", "put_in_force", "remove"])
def test_killed_between_steps_it_is_repeated(
    stage: Stage, renamed: Bridge, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One name is in force at each moment; nothing is there twice in the end."""
    before = ids(stage, HANDLER)

    def dies(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Names, step, dies)
        with pytest.raises(KeyboardInterrupt):
            rename(renamed)
    in_force = NEW if step == "remove" else HANDLER
    assert [each["_id"] for each in stage.state["subscriptions"].find()] == [f"{NAME}/{in_force}"]
    rename(renamed)
    assert ids(stage, NEW) == before
    assert not ids(stage, HANDLER)


def test_a_listener_that_begins_meanwhile_keeps_the_old_name_in_force(
    stage: Stage, renamed: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has led since then is not lost."""
    original = Names.put_in_force

    def late(self: Names, *arguments: Any) -> Any:
        stage.lead()
        stage.release()
        return original(self, *arguments)

    monkeypatch.setattr(Names, "put_in_force", late)
    with pytest.raises(CommandRefusedError, match="A listener of bridge shop has begun meanwhile"):
        rename(renamed)
    assert f"{NAME}/{HANDLER}" in {each["_id"] for each in stage.state["subscriptions"].find()}


def test_what_does_not_fit_is_refused_with_a_sentence_and_nothing_changes(
    stage: Stage, renamed: Bridge, emptied: Bridge
) -> None:
    """P9: names that are not there, that are in the code, that have handled changes; who leads, and who runs."""
    stage.lead()
    assert stage.handle({**stage.of(1)[-1], "_id": {"_data": f"{data_of(stage.events[-1]['_id'])}1"}})
    running = stage.claims_at({**stage.of(1)[-1], "_id": {"_data": f"{data_of(stage.events[-1]['_id'])}2"}})
    before = {name: found for name, found in stage.everything().items() if name != "leases"}
    for bridge, old, new, said in (
        (renamed, HANDLER, "total", r"has no handler 'total' \(did you mean 'totals'\?\)"),
        (stage.bridge, HANDLER, HANDLER, "is the name that it has"),
        (bridge_on(renamed.wiring.url, stage.data, renamed.options.database, HANDLER, NEW), HANDLER, NEW, "itself"),
        (renamed, "sumarise", NEW, r"\(did you mean 'summarise'\?\)"),
        (renamed, HANDLER, NEW, "is led by process"),
    ):
        with pytest.raises(CommandRefusedError, match=said):
            rename(bridge, old, new)
    with pytest.raises(CommandRefusedError, match=r"summarise is a handler of this app.* leave the bridge in it"):
        renaming.plan_forget(stage.bridge.wiring, HANDLER, letters=False)
    with pytest.raises(CommandRefusedError, match="1 dead letters of summarise are left"):
        renaming.plan_forget(emptied.wiring, HANDLER, letters=False)
    stage.release()
    with pytest.raises(CommandRefusedError, match="A handler of summarise runs at this moment"):
        rename(renamed)
    assert {name: found for name, found in stage.everything().items() if name != "leases"} == before
    assert stage.store.claims.relinquish(running.partition_id, running.owner)
    touched = Stage(renamed, stage.data, NEW)
    touched.write(1)
    touched.release()
    with pytest.raises(CommandRefusedError, match="totals has handled changes of its own") as refused:
        rename(renamed)
    rewind, forget, _ = re.findall(r"`celery -A APP changes (.+?)`", str(refused.value))
    place = parse_place(rewind.removeprefix(f"rewind {NEW} --to "))
    assert place.time is not None
    assert place.time.time == stage.subscription["clusterTime"].time
    assert forget == f"forget {HANDLER}"


def test_a_name_that_has_handled_nothing_gives_way(stage: Stage, renamed: Bridge) -> None:
    """A listener of the new code may have begun before the command was thought of."""
    Stage(renamed, stage.data, NEW).release()
    before = ids(stage, HANDLER)
    rename(renamed)
    assert ids(stage, NEW) == before


def test_a_name_with_something_of_its_own_is_refused(
    stage: Stage, renamed: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was asked for under it would be lost; what a killed attempt has left there is told apart from that."""

    def dies(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Names, "put_in_force", dies)
        with pytest.raises(KeyboardInterrupt):
            rename(renamed)
    assert ids(stage, NEW).keys() == {"spill", "dead_letters"}, "what runs by itself is not copied before"
    asked = {"_id": f"{NAME}/{NEW}/mine", "state": "running", "by": "somebody"}
    for collection, said in (
        ("dead_letters", "1 dead letters"),
        ("replays", "1 replays"),
        ("snapshots", "1 snapshots"),
    ):
        stage.state[collection].insert_one(asked)
        before = stage.everything()
        with pytest.raises(CommandRefusedError, match=f"{NEW} has {said} of its own.*nothing is changed"):
            rename(renamed)
        assert stage.everything() == before
        stage.state[collection].delete_one({"_id": asked["_id"]})
    original = Names.put_in_force

    def late(self: Names, *arguments: Any) -> Any:
        stage.state["snapshots"].replace_one({"_id": asked["_id"]}, asked, upsert=True)
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Names, "put_in_force", late)
        with pytest.raises(CommandRefusedError, match="1 snapshots of its own"):
            rename(renamed)
    assert [each["_id"] for each in stage.state["subscriptions"].find()] == [f"{NAME}/{HANDLER}"]
    stage.state["snapshots"].update_one({"_id": asked["_id"]}, {"$set": {"by": BEGINNING}})
    before_it = ids(stage, HANDLER)
    rename(renamed)
    assert ids(stage, NEW) == before_it, "that with which it begins gives way"


def test_commands_wait_until_it_has_its_name(stage: Stage, renamed: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they wrote to a copied letter would be lost, or undone; killed, they wait on, or for a listener."""
    before = ids(stage, HANDLER)
    wiring = stage.bridge.wiring
    letters = letter_commands.find(wiring, Selection(subscription=HANDLER), 0).letters
    acts: list[Callable[[], object]] = [
        lambda: letter_commands.discard(wiring, letters, dry_run=False),
        lambda: letter_commands.replay(wiring, letters, over_newer=True, dry_run=False),
        lambda: snapshot_commands.start(wiring, HANDLER),
        lambda: snapshot_commands.start(renamed.wiring, NEW),
        lambda: snapshot_commands.stop(wiring, f"{NAME}/{HANDLER}/random"),
        lambda: snapshot_commands.resume(wiring, f"{NAME}/{HANDLER}/random"),
        lambda: commands.pause(wiring, HANDLER, 1),
    ]

    def refused() -> None:
        for act in acts:
            with pytest.raises(CommandRefusedError, match="summarise is being renamed to totals: nothing is changed"):
                act()

    def dies(*_: Any, **__: Any) -> None:
        refused()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Names, "put_in_force", dies)
        with pytest.raises(KeyboardInterrupt):
            rename(renamed)
    refused()
    stage.lead()
    assert [each.result for each in commands.pause(wiring, HANDLER, 1)] == ["done"]
    stage.release()
    rename(renamed)
    assert ids(stage, NEW) == before
    assert [each.result for each in commands.resume(renamed.wiring, NEW, 1)] == ["done"]


def test_a_handler_that_is_gone_is_forgotten(stage: Stage, emptied: Bridge) -> None:
    """All of it, and nothing of others; also where it was killed in the middle."""
    Stage(emptied, stage.data, OTHER).release()
    others = ids(stage, OTHER)
    plan = renaming.plan_forget(emptied.wiring, HANDLER, letters=True)
    renaming.forget(emptied.wiring, plan, letters=True, reason=None)
    assert not ids(stage, HANDLER)
    assert ids(stage, OTHER) == others
    assert [act["act"] for act in read_history(emptied.wiring, HANDLER)] == ["forget"]
    with pytest.raises(CommandRefusedError, match="has no subscription"):
        renaming.plan_forget(emptied.wiring, HANDLER, letters=True)


def test_forgetting_goes_on_where_it_was_killed(stage: Stage, emptied: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The subscription goes first: what is left is in force for nobody, and is found."""

    def dies(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Names, "remove", dies)
        plan = renaming.plan_forget(emptied.wiring, HANDLER, letters=True)
        with pytest.raises(KeyboardInterrupt):
            renaming.forget(emptied.wiring, plan, letters=True, reason=None)
    assert ids(stage, HANDLER).keys() == {"spill", "dead_letters"}
    renaming.forget(
        emptied.wiring, renaming.plan_forget(emptied.wiring, HANDLER, letters=True), letters=True, reason=None
    )
    assert not ids(stage, HANDLER)


def test_what_only_snapshots_are_left_of_is_forgotten(stage: Stage, emptied: Bridge) -> None:
    """Else a handler that comes back would be given the rest of them."""
    stage.state["snapshots"].insert_one({"_id": f"{NAME}/former/one", "epoch": 1})
    plan = renaming.plan_forget(emptied.wiring, "former", letters=False)
    assert plan.holdings.snapshots == 1
    renaming.forget(emptied.wiring, plan, letters=False, reason=None)
    assert not ids(stage, "former")


def test_a_handler_that_comes_back_meanwhile_keeps_what_it_has_begun(
    stage: Stage, emptied: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is removed behind the transaction is bound by its version."""
    original = Names.remove

    def late(self: Names, *arguments: Any, **options: Any) -> Any:
        stage.lead()
        stage.write(1)
        new, old = {"generation": stage.generation}, {"generation": 0, "layout": stage.generation}
        for name, fields in (("82FE", new), ("82FF", old)):
            stage.state["dead_letters"].insert_one({"_id": f"{NAME}/{HANDLER}/{name}", **fields})
        for name in ("replays", "snapshots"):
            stage.state[name].insert_one({"_id": f"{NAME}/{HANDLER}/82FE", "epoch": stage.version})
        stage.store.spill.insert(stage.partition_id(0), [StoredChange("82FE", b"x")], stage.version)
        return original(self, *arguments, **options)

    monkeypatch.setattr(Names, "remove", late)
    plan = renaming.plan_forget(emptied.wiring, HANDLER, letters=True)
    renaming.forget(emptied.wiring, plan, letters=True, reason=None)
    found = ids(stage, HANDLER)
    assert found["subscriptions"] == {""}
    assert found["spill"] == {f"/{stage.generation}/0/82FE"}
    assert len(found["partitions"]) == 2
    assert {name: found[name] for name in ("dead_letters", "replays", "snapshots")} == {
        "dead_letters": {"/82FE", "/82FF"},
        "replays": {"/82FE"},
        "snapshots": {"/82FE"},
    }


def test_a_listener_that_serves_it_keeps_it(stage: Stage, emptied: Bridge) -> None:
    """This app may be another one than that which leads."""
    stage.lead()
    plan = renaming.plan_forget(emptied.wiring, HANDLER, letters=True)
    with pytest.raises(CommandRefusedError, match="serves summarise"):
        renaming.forget(emptied.wiring, plan, letters=True, reason=None)
    stage.state["leases"].update_one({}, {"$rename": {f"identity.handlers.{HANDLER}": f"identity.handlers.{OTHER}"}})
    renaming.forget(emptied.wiring, plan, letters=True, reason=None)
    assert not ids(stage, HANDLER)
