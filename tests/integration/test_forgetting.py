"""`changes remove`, on a real replica set: everything of a handler goes, killed between any two steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pymongo.database import Database

from mongo_celery import Bridge
from mongo_celery.bridge.state.backlog import StoredChange
from mongo_celery.bridge.state.positions import Positions
from mongo_celery.errors import CommandRefusedError
from tests.integration.test_replays import letter_of
from tests.integration.test_rewinds import REQUEST
from tests.rig.positions import HANDLER, NAME, PositionsRig, bridge_on, data_of, staged

Document = dict[str, Any]

OTHER = "others"


@pytest.fixture
def stage(mongo_url: str, database: Database[Document], state_database: str) -> Iterator[PositionsRig]:
    """Give a stage that nobody leads, with something of everything: stored, halted, set aside, to be replayed."""
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
def emptied(stage: PositionsRig) -> Iterator[Bridge]:
    """Give the bridge of the code without the handler."""
    bridge = bridge_on(stage.bridge.wiring.url, stage.data, stage.bridge.options.database, OTHER)
    yield bridge
    bridge.client.close()


def ids(stage: PositionsRig, name: str) -> dict[str, set[str]]:
    """What lies under a name, without it."""
    prefix = f"{NAME}/{name}"
    found: dict[str, set[str]] = {}
    for collection in ("handlers", "partitions", "backlog", "dead_letters", "snapshots"):
        for each in stage.state[collection].find({"_id": {"$regex": f"^{prefix}(/|$)"}}):
            found.setdefault(collection, set()).add(each["_id"].removeprefix(prefix))
    return found


def test_a_handler_that_is_gone_is_forgotten(stage: PositionsRig, emptied: Bridge) -> None:
    """All of it, and nothing of others; not while the code has it, nor its dead letters unless they are named."""
    with pytest.raises(CommandRefusedError, match="is still a handler of this app"):
        stage.bridge.operations.remove(HANDLER)
    with pytest.raises(CommandRefusedError, match="--dead-letters"):
        emptied.operations.remove(HANDLER)
    PositionsRig(emptied, stage.data, OTHER).release()
    others = ids(stage, OTHER)
    plan = emptied.operations.remove(HANDLER, dead_letters=True)
    plan.run()
    assert not ids(stage, HANDLER)
    assert ids(stage, OTHER) == others
    assert [act["act"] for act in emptied.operations.history(HANDLER)] == ["remove"]
    with pytest.raises(CommandRefusedError, match="has no handler"):
        emptied.operations.remove(HANDLER, dead_letters=True)


def test_stamps_of_a_forgotten_handler_go_and_those_of_others_stay(stage: PositionsRig, emptied: Bridge) -> None:
    """Targets would keep one of each handler that ever was; it is repeated where only stamps are left."""
    mine, others = f"{NAME}/{HANDLER}", f"{NAME}/{OTHER}"
    totals = stage.data["totals"]
    stamps = {each: {"g": 1, "p": {"0": 5}} for each in (mine, others)}
    for _ in range(2):
        totals.replace_one({"_id": 1}, {"_id": 1, "sum": 3, "_fence": stamps}, upsert=True)
        plan = emptied.operations.remove(HANDLER, dead_letters=True, stamps=[totals.full_name])
        plan.run()
        assert totals.find_one() == {"_id": 1, "sum": 3, "_fence": {others: stamps[others]}}
    with pytest.raises(CommandRefusedError, match="--stamps"):
        emptied.operations.remove(HANDLER, dead_letters=True, stamps=["totals"])


def test_forgetting_goes_on_where_it_was_killed(
    stage: PositionsRig, emptied: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The subscription goes first: what is left is in force for nobody, and is found."""

    def dies(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Positions, "remove", dies)
        plan = emptied.operations.remove(HANDLER, dead_letters=True)
        with pytest.raises(KeyboardInterrupt):
            plan.run()
    assert ids(stage, HANDLER).keys() == {"backlog", "dead_letters"}
    emptied.operations.remove(HANDLER, dead_letters=True).run()
    assert not ids(stage, HANDLER)


def test_what_only_snapshots_are_left_of_is_forgotten(stage: PositionsRig, emptied: Bridge) -> None:
    """Else a handler that comes back would be given the rest of them."""
    stage.state["snapshots"].insert_one({"_id": f"{NAME}/former/one", "term": 1})
    plan = emptied.operations.remove("former")
    assert plan.fields["snapshots"] == 1
    plan.run()
    assert not ids(stage, "former")


def test_a_bridge_whose_last_position_is_forgotten_starts_for_the_first_time(
    stage: PositionsRig, emptied: Bridge
) -> None:
    """P1: a handler that comes later begins as `start_from` says then, and not at a start of long ago."""
    stage.state["leases"].update_one({}, {"$set": {"startAtOperationTime": stage.events[0]["clusterTime"]}})
    stage.state["handlers"].insert_one({**stage.subscription, "_id": f"{NAME}/former", "handler": "former"})
    for name, begun in (("former", True), (HANDLER, False)):
        plan = emptied.operations.remove(name, dead_letters=True)
        plan.run()
        assert bool((stage.store.leases.read() or {}).get("startAtOperationTime")) is begun


def test_a_handler_that_comes_back_meanwhile_keeps_what_it_has_begun(
    stage: PositionsRig, emptied: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is removed behind the transaction is bound by its version."""
    original = Positions.remove

    def late(self: Positions, *arguments: Any, **options: Any) -> Any:
        stage.lead()
        stage.write(1)
        stage.state["dead_letters"].insert_one(
            {"_id": f"{NAME}/{HANDLER}/82FE", "partitioningTerm": stage.partitioning}
        )
        stage.state["snapshots"].insert_one({"_id": f"{NAME}/{HANDLER}/82FE", "term": stage.version})
        stage.store.backlog.insert(stage.partition_id(0), [StoredChange("82FE", b"x")], stage.version)
        return original(self, *arguments, **options)

    monkeypatch.setattr(Positions, "remove", late)
    plan = emptied.operations.remove(HANDLER, dead_letters=True)
    plan.run()
    found = ids(stage, HANDLER)
    assert found["handlers"] == {""}
    assert found["backlog"] == {f"/{stage.partitioning}/0/82FE"}
    assert len(found["partitions"]) == 2
    assert (found["dead_letters"], found["snapshots"]) == ({"/82FE"}, {"/82FE"})


def test_a_listener_that_serves_it_keeps_it(stage: PositionsRig, emptied: Bridge) -> None:
    """This app may be another one than that which leads."""
    stage.lead()
    plan = emptied.operations.remove(HANDLER, dead_letters=True)
    with pytest.raises(CommandRefusedError, match="still has summarise"):
        plan.run()
    stage.state["leases"].update_one({}, {"$rename": {f"identity.handlers.{HANDLER}": f"identity.handlers.{OTHER}"}})
    plan.run()
    assert not ids(stage, HANDLER)
