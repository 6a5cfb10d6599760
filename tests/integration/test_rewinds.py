"""Positions that a person moves, on a real replica set: what goes back, what ends, what is refused, and who did it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from bson import ObjectId, Timestamp
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery.bridge.listener.starts import open_position, read_starts
from mongo_celery.bridge.state.backlog import StoredChange
from mongo_celery.bridge.state.claims import Claim
from mongo_celery.bridge.state.dead_letters import ReplayRequest
from mongo_celery.bridge.state.positions import Positions
from mongo_celery.bridge.state.store import Store
from mongo_celery.errors import CommandRefusedError
from mongo_celery.mongo.oplog import earliest_token, read_oplog
from tests.fixtures.samples import IDENTITY
from tests.integration.test_replays import letter_of
from tests.rig.positions import HANDLER, NAME, PositionsRig, data_of, place_of, staged

Document = dict[str, Any]

REQUEST: Document = {"id": ObjectId(), "state": "requested", "partition": 0, "hash": 0, "overNewer": False}
"""A stored request for a replay, without its layout."""


@pytest.fixture
def stage(mongo_url: str, database: Database[Document], state_database: str) -> Iterator[PositionsRig]:
    """Give a stage that is led."""
    with staged(mongo_url, database, state_database) as made:
        yield made


def test_from_the_change_of_a_token_everything_runs_again_and_nothing_before_it(stage: PositionsRig) -> None:
    """P4: positions and watermark become the smaller of place and own; versions and fences grow, numbers stay."""
    stage.release()
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
    """All of that second, also changes that share their cluster time with nothing before."""
    stage.release()
    first = stage.events[0]["clusterTime"]
    stage.reset(first.as_datetime().isoformat())
    begins = max(Timestamp(first.time, 0), read_oplog(stage.data.client).first)  # of a server as young as the second
    for index in (0, 1):
        assert data_of(stage.partition(index)["resumeToken"]) == data_of(earliest_token(begins))
    stage.lead()
    assert all(stage.handle(event) for event in stage.events)


def test_the_pinned_start_goes_back_too(stage: PositionsRig) -> None:
    """Else what lies between would not be owed."""
    stage.release()
    assert stage.subscription["startAtOperationTime"] == stage.events[0]["clusterTime"]
    plan = stage.reset("oldest")
    assert stage.subscription["startAtOperationTime"] == place_of(plan) < stage.events[0]["clusterTime"]
    with pytest.raises(CommandRefusedError, match="has handled no change after"):
        stage.reset("oldest")


def test_what_stood_behind_the_place_is_over(stage: PositionsRig) -> None:
    """P1: a head that is left would let `skip` pass over everything between; a paused partition stays paused."""
    halting, parking = stage.of(0)[-1], stage.of(1)[-1]
    stage.release()
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
    with pytest.raises(CommandRefusedError, match="not halted"):
        stage.bridge.operations.skip(HANDLER, 0)
    stage.bridge.operations.pause(HANDLER, 1).run()
    stage.lead()
    assert stage.handle(stage.of(0)[0])
    assert not stage.handle(stage.of(1)[0]), "paused"


def _claim_second(stage: PositionsRig) -> tuple[Document, Claim]:
    """Claim the second change of a partition, and let the listener end meanwhile."""
    stage.release()
    stage.reset(data_of(stage.of(0)[0]["_id"]))
    stage.lead()
    event = stage.of(0)[1]
    claim = stage.claims_at(event)
    stage.release()
    return event, claim


def test_an_execution_of_before_is_refused(stage: PositionsRig) -> None:
    """P3: whoever runs while the position goes back can neither record an outcome nor go on."""
    event, claim = _claim_second(stage)
    plan = stage.reset("oldest")
    assert not any(
        each["state"] == "running" for each in plan.fields["partitions"] if each["partition"] != stage.index(event)
    )
    assert not stage.store.claims.handle(claim, claim.last, event["_id"])
    assert stage.store.claims.extend([claim]) == [claim]
    assert stage.claim(event) is None, "a message of before is not claimed"
    stage.lead()
    assert stage.claims_at(stage.of(0)[0]).fencing_token > claim.fencing_token


def test_an_execution_of_before_a_move_forward_is_refused(stage: PositionsRig) -> None:
    """P3, P4: its outcome would send the position back."""
    event, claim = _claim_second(stage)
    stage.reset("now")
    before = stage.partition(stage.index(event))
    assert not stage.store.claims.handle(claim, claim.last, event["_id"])
    assert stage.partition(stage.index(event)) == before


def test_what_was_handled_counts_before_it_goes_back(stage: PositionsRig) -> None:
    """A mark that nobody has committed yet lies behind the place, too."""
    stage.write(1)
    last = stage.events[-1]
    stage.release()
    stage.reset(data_of(stage.events[-2]["_id"]))
    stage.lead()
    claim = stage.claims_at(last)
    assert stage.store.claims.handle(claim, claim.last, last["_id"])
    stage.release()
    stage.reset(data_of(stage.events[-2]["_id"]))
    stage.lead()
    assert stage.handle(last)


def test_a_mark_that_was_reached_goes_and_one_that_lies_ahead_stays(stage: PositionsRig) -> None:
    """P13: nobody stores again what the first stood for; the second still promises what is stored."""
    backlog, partitions = stage.store.backlog, stage.store.partitions
    ahead = f"{data_of(stage.events[-1]['_id'])[:8]}FFFFFFFF"
    for index, to in ((0, data_of(stage.of(0)[0]["_id"])), (1, ahead)):
        backlog.insert(stage.partition_id(index), [StoredChange(to, b"x")], stage.version)
        assert partitions.mark_stored(stage.partition_id(index), stage.version, to, "halted")
    stage.release()
    stage.reset("oldest")
    assert stage.partition(0)["stored"] is None
    assert stage.partition(1)["stored"]["to"] == ahead
    assert stage.state["backlog"].count_documents({}) == 2, "what is stored stays"


def test_a_key_takes_its_partition_along_and_no_other(stage: PositionsRig) -> None:
    """The watermark goes back for all; what the others have handled counts as done."""
    stage.release()
    key = stage.of(0)[0]["documentKey"]["_id"]
    plan = stage.reset("oldest", key=str(key))
    assert ([each["partition"] for each in plan.fields["partitions"]], plan.fields["key"]) == ([0], repr(key))
    stage.lead()
    assert [stage.handle(event) for event in stage.events] == [stage.index(event) == 0 for event in stage.events]


@pytest.mark.parametrize("key", [False, True], ids=["all of it", "one key"])
def test_what_comes_again_knows_that_all_of_it_does(stage: PositionsRig, key: bool) -> None:
    """F5: stamps from before it refuse nothing then. Not where other partitions keep what they have written."""
    assert [stage.partition(index).get("rewound") for index in (0, 1)] == [None, None]
    stage.release()
    stage.reset("oldest", **({"key": str(stage.of(0)[0]["documentKey"]["_id"])} if key else {}))
    version = int((stage.store.leases.read() or {})["term"])
    stage.lead()
    assert stage.claims_at(stage.of(0)[0]).rewound == (0 if key else version)
    assert key or stage.claims_at(stage.of(1)[0]).rewound == version


def test_forward_passes_over_what_lies_between_and_notes_the_gap(stage: PositionsRig) -> None:
    """Nothing else goes forward; what is stored is counted, and never run."""
    stage.store.backlog.insert(stage.partition_id(0), [StoredChange(f"{data_of(stage.events[-1]['_id'])}0", b"x")], 1)
    marked = f"{data_of(stage.events[-1]['_id'])}0"
    assert stage.store.partitions.mark_stored(stage.partition_id(0), stage.version, marked, "halted")
    stage.data["orders"].insert_one({"_id": "unseen"})
    stage.release()
    plan = stage.reset("now")
    assert (plan.fields["forward"], [each["stored"] for each in plan.fields["partitions"]]) == (True, [1, 0])
    for index in (0, 1):
        document = stage.partition(index)
        assert (data_of(document["resumeToken"]), document["stored"]) == (plan.fields["token"], None)
    (gap,) = stage.subscription["gaps"]
    assert (gap["from"], gap["until"], gap["policy"]) == (stage.events[-1]["clusterTime"], place_of(plan), "now")
    assert stage.bridge.operations.history()[0]["command"] == f"reset {HANDLER} --to now"


def test_replays_behind_the_place_are_withdrawn_and_their_letters_stay(stage: PositionsRig) -> None:
    """A change that runs again is not replayed besides; one that is replayed at this moment is refused."""
    event = stage.of(0)[-1]
    place = {"_id": f"{NAME}/{HANDLER}/{event['_id']['_data']}", "resumeToken": event["_id"]}
    letter = {**letter_of(1, 1), **place, "bridge": NAME, "handler": HANDLER}
    stage.state["dead_letters"].insert_one({**letter, "replay": {**REQUEST, "partitioningTerm": stage.partitioning}})
    assert isinstance(stage.store.replays.find(letter["_id"]), ReplayRequest)
    claim = stage.store.claims.take_for_replay(stage.partition_id(0), letter["_id"], owner="me", term=stage.version)
    assert claim is not None
    assert stage.store.replays.start(claim, letter["_id"], 0)
    stage.release()
    plan = stage.reset("oldest")
    assert plan.fields["dead_letters"] == 1
    assert not stage.store.replays.succeed(claim, letter["_id"])
    assert (stage.store.replays.read(), stage.state["dead_letters"].count_documents({})) == ([], 1)


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("yesterday", "is neither a time nor a resume token"),
        ("{}", "is neither a time nor a resume token"),
        ("810000000000000001", "is not the resume token"),
        ("2001-01-01", "is before the oldest entry"),
        ("2099-01-01T00:00Z", "is in the future"),
        ("82FFFFFFFE000000012B022C", "is in the future"),
        ("820000000100000001~00000001", "is before the oldest entry"),
        ("3026-01-01", "no change can have"),
    ],
)
def test_what_is_no_place_is_refused_with_a_sentence_and_nothing_changes(
    stage: PositionsRig, to: str, said: str
) -> None:
    """P9: bad input, one sentence."""
    stage.release()
    before = stage.everything()
    with pytest.raises(CommandRefusedError, match=said) as refused:
        stage.reset(to)
    assert str(refused.value).count("\n") == 0
    assert stage.everything() == before


def test_nobody_is_sent_anywhere_while_a_listener_leads_or_has_led_since(stage: PositionsRig) -> None:
    """P9: refused, with who leads; what is begun in between is in conflict, and nothing changes."""
    plan = stage.plan("oldest")
    assert plan.fields["leader"] is not None
    with pytest.raises(CommandRefusedError, match=r"is running .* Stop all listeners"):
        plan.run()
    stage.release()
    seen = stage.plan("oldest")
    stage.lead()
    stage.release()
    before = stage.everything()
    with pytest.raises(CommandRefusedError, match="has changed meanwhile"):
        seen.run()
    assert stage.everything() == before


def test_a_listener_that_begins_within_a_rewind_waits_for_it_or_stops_it(
    stage: PositionsRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both write the lease: one of them is first, and the other sees what it did."""
    stage.release()
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


def test_killed_in_the_middle_nothing_is_changed(stage: PositionsRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One transaction: all of it, or nothing."""
    stage.release()
    before = stage.everything()

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Positions, "_move_partitions", dies)
    with pytest.raises(KeyboardInterrupt):
        stage.reset("oldest")
    assert stage.everything() == before


def test_unknown_handlers_and_lost_ones_are_refused(stage: PositionsRig) -> None:
    """P9: a misspelt name is answered with the nearest one; lost history is decided elsewhere."""
    with pytest.raises(CommandRefusedError, match=r"no handler 'sumarise' \(did you mean 'summarise'\?\)"):
        stage.bridge.operations.reset("sumarise", "oldest")
    stage.store.subscriptions.mark_lost(HANDLER, stage.version, stage.events[-1]["clusterTime"], None, "it is gone")
    with pytest.raises(CommandRefusedError, match=r"reset summarise --to oldest.*reset summarise --to now"):
        stage.plan(data_of(stage.events[0]["_id"]))


def test_a_change_that_is_halted_or_running_where_nothing_was_committed_is_read_again(stage: PositionsRig) -> None:
    """P1, P16: a rewind frees a partition that was halted by its first change."""
    for index in (0, 1):
        stage.state["partitions"].update_one({"_id": stage.partition_id(index)}, {"$set": {"resumeToken": None}})
    halting, running = stage.of(0)[-1], stage.claims_at(stage.of(1)[-1])
    assert stage.store.claims.halt(stage.claims_at(halting), halting["_id"], "orders insert 1", "no")
    stage.release()
    plan = stage.reset(data_of(stage.events[1]["_id"]))
    assert [each["state"] for each in plan.fields["partitions"]] == ["halted", "running"]
    assert not stage.store.claims.handle(running, running.last, stage.of(1)[-1]["_id"])
    for index in (0, 1):
        document = stage.partition(index)
        kept = [document[name] for name in ("resumeToken", "state", "head", "claim")]
        assert kept == [None, "flowing", None, None], "it is sent nowhere: what is owed to it lies before the place"
    stage.lead()
    assert all(stage.handle(event) for event in stage.events[2:])
