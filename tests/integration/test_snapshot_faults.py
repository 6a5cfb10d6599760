"""
Listeners that end, or sleep and wake too late, between any two steps of a snapshot.

P1, P2: every document is given, and none goes back; P3: who wakes too late moves nothing; P6: a document starts once
more a fault.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import bson
import pytest

from mongo_celery.bridge.existing import DocumentId
from mongo_celery.bridge.listener.chunks import ChunkReader
from mongo_celery.bridge.operations.operations import Operations
from mongo_celery.bridge.state.dead_letters import Selection
from mongo_celery.bridge.state.snapshots import Snapshots
from mongo_celery.bridge.state.subscriptions import Subscriptions
from mongo_celery.errors import LeaseLostError
from tests.fixtures.process import wait_for
from tests.rig.snapshots import HANDLER, Document, SnapshotWorld
from tests.rig.term import KilledError, around

STEPS: list[tuple[type, str]] = [
    (Snapshots, "insert"),
    (Subscriptions, "note_snapshot"),
    (Snapshots, "take_over"),
    (Snapshots, "prepare"),
    (Snapshots, "begin"),
    (ChunkReader, "read"),
    (Snapshots, "mark_read_end"),
    (Snapshots, "move"),
    (Snapshots, "finish"),
]
_NAMES = [name for _, name in STEPS]
_DOCUMENTS = 9
_LATER_TURNS = 40


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("step", STEPS, ids=_NAMES)
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "wakes late"])
def test_a_listener_that_is_killed_or_wakes_late_at_any_step_has_lost_nothing(
    world: SnapshotWorld, monkeypatch: pytest.MonkeyPatch, is_killed: bool, step: tuple[type, str], behind: bool
) -> None:
    """P1, P2, P3, P6, F1: the next one reads all of it; what is written late is refused, or nobody's."""
    world.orders.insert_many([{"_id": number, "v": 1} for number in range(_DOCUMENTS)])
    for number in range(3):
        world.write(number, 2)
    term = world.term(run_size=3)
    records: list[Document] = []

    def write() -> None:
        world.write(_DOCUMENTS - 1, 3)

    def succeed() -> None:
        world.term(run_size=3).begin().finish(write)
        records.append(world.record)

    def kill() -> None:
        term.is_killed.set()
        if term.has_begun:
            term.leader.snapshots.thread.close()  # its thread is killed, too
        raise KilledError

    with monkeypatch.context() as patch:
        around(patch, step, kill if is_killed else succeed, behind=behind)
        with suppress(KilledError, LeaseLostError):  # behind its last step, the end may have been seen
            term.begin().until(lambda: records, write if is_killed else None)
        if is_killed:
            wait_for(term.is_killed.is_set)
            term.close()
            succeed()
        wait_for(lambda: records)
        for _ in range(_LATER_TURNS if term.has_begun and not is_killed else 0):
            term.leader.snapshots.turn(room=1 << 20, may_begin=True)
            threading.Event().wait(0.01)
    assert world.record == records[0]
    assert world.record["state"] == "done"
    world.judge()
    assert all(1 <= world.snapshots_of(number) <= 2 for number in range(3, _DOCUMENTS - 1))


@pytest.mark.parametrize("writes", [True, False], ids=["another", "itself"])
def test_an_existing_document_that_waits_and_was_not_stored_keeps_nobody_waiting(
    world: SnapshotWorld, writes: bool
) -> None:
    """P14: the next term reads it again, behind what has come meanwhile; neither waits for its retry."""
    world.orders.insert_many([{"_id": number, "v": 1} for number in range(2)])
    term = world.term(partitions=1, spill_after=600.0).begin()
    term.postponing = [0]
    term.until(lambda: any(image.parked for image in term.images()))
    term.close()
    if writes:
        world.write(7, 1)
    later = world.term(partitions=1, spill_after=600.0).begin()
    later.finish()
    world.judge()
    assert [each.key for each in world.seen] == ([7, 0, 1, 7] if writes else [0, 1]), "the first one, before its chunk"


@pytest.mark.parametrize(("options", "counts"), [({}, True), ({"fields": {"v"}}, False)], ids=["all", "some"])
def test_an_update_that_was_looked_up_before_the_window_leaves_its_document_out(
    world: SnapshotWorld, monkeypatch: pytest.MonkeyPatch, options: Document, counts: bool
) -> None:
    """F9: it may show what came behind T. Where some changes are not the handler's, no other may bring that."""
    world.orders.insert_many([{"_id": number, "v": 1} for number in range(3)])
    term = world.term(start_from="now", **options).begin()
    begin = Snapshots.begin

    def begin_late(self: Snapshots, *arguments: Any) -> Any:
        if world.orders.count_documents({"v": 5}) == 0:
            world.write(1, 5)
            taken = len(world.seen)
            wait_for(lambda: len(world.seen) > taken)  # before L
        return begin(self, *arguments)

    monkeypatch.setattr(Snapshots, "begin", begin_late)
    store = term.wiring.store.snapshots
    store.insert([{"_id": store.make_id(HANDLER), "source": world.source}])
    term.until(lambda: world.record["state"] == "done")
    assert [world.snapshots_of(number) for number in range(3)] == [1, int(not counts), 1]
    world.judge()


def test_an_existing_document_that_is_set_aside_twice_is_one_dead_letter(world: SnapshotWorld) -> None:
    """Read again it has another token; it is named by its key, and stands before all others."""
    world.orders.insert_many([{"_id": number, "v": 1} for number in range(_DOCUMENTS)])
    term = world.term(failure_policy="dead_letter", spill_after=0.2).begin()
    term.failing = [5]
    term.until(lambda: world.records and world.record["state"] == "done")
    letters = []
    for _ in range(2):
        (halted,) = [image for image in term.images() if image.state == "halted"] or [None]  # type: ignore[list-item]
        if halted is not None:
            Operations(term.wiring).skip(HANDLER, halted.index).run()
        letters.append(term.wiring.store.dead_letters.find(Selection(), [HANDLER], 0))
        store = term.wiring.store.snapshots
        if len(letters) == 1:
            store.insert([{"_id": store.make_id(HANDLER), "source": world.source}])
            term.until(lambda: len(world.records) == 2 and all(each["state"] == "done" for each in world.records))
            term.until(lambda: any(image.state == "halted" for image in term.images()))
    assert [len(each) for each in letters] == [1, 1]
    assert letters[0][0].id == letters[1][0].id
    assert letters[0][0].id.startswith("00")


def test_a_write_of_a_chunk_counts_once_and_for_its_term_alone(world: SnapshotWorld) -> None:
    """P3, P4: also where an answer was lost, and it is asked again; what is to be scanned is set once."""
    store = world.term().wiring.store.snapshots
    snapshot_id = store.make_id(HANDLER)
    for source in (world.source, "other.place"):
        store.insert([{"_id": snapshot_id, "source": source}])
    assert (store.take_over(5), store.take_over(4)) == (5, 5), "a later term has it"
    found: Any = store.read_one(snapshot_id)
    assert found.source == world.source
    assert [store.begin(found, term) is not None for term in (4, 5, 5)] == [False, True, False]
    keys: Any = [DocumentId.of(bson.encode({"_id": key})) for key in (None, 9)]
    end, larger = keys
    writes = [(4, 1), (5, 2), (5, 1), (5, 1)]
    assert [store.move(snapshot_id, *each, end, 7, end) for each in writes] == [False, False, True, False]
    after: Any = store.read_one(snapshot_id)
    assert (after.last, after.until, after.done) == (end, end, 7)
    assert store.begin(after, 5) is not None
    assert not store.move(snapshot_id, 5, 2, larger, 1, larger)
    assert [store.move(snapshot_id, 5, 2, larger, 1) for _ in range(2)] == [True, False]
    assert store.mark_read_end(snapshot_id, 4, 2) is None
    assert store.stop(snapshot_id)
    store.take_over(6)
    taken: Any = store.read_one(snapshot_id)
    assert taken.term == 6, "it may be resumed"
