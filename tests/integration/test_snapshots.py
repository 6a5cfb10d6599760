"""
Existing documents between the changes, on a real replica set: each once, exactly at its place.

P1 to P13 are the design's invariants, F1 to F15 the findings of `tests/property/snapshot_variants.py`.
"""

from __future__ import annotations

import datetime as dt
import itertools
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import bson
import pytest
from bson import Binary, Decimal128, Int64, MaxKey, MinKey, ObjectId, Timestamp
from bson.raw_bson import RawBSONDocument
from pymongo.errors import AutoReconnect, OperationFailure

from mongo_celery.bridge.existing import DocumentId
from mongo_celery.bridge.listener import chunks, snapshot_thread
from mongo_celery.bridge.listener.chunks import Chunk, ChunkReader
from mongo_celery.bridge.operations.operations import Operations
from mongo_celery.bridge.operations.snapshot_reader import read_snapshot
from mongo_celery.bridge.state.dead_letters import Selection
from mongo_celery.bridge.state.partitions import Partitions
from mongo_celery.bridge.state.snapshots import Snapshot, Snapshots
from mongo_celery.bridge.state.subscriptions import Subscriptions
from mongo_celery.bridge.worker.envelope import Run
from mongo_celery.errors import CommandRefusedError, LeaseLostError
from tests.fixtures.process import wait_for
from tests.rig.snapshots import HANDLER, Document, SnapshotWorld, keys_of
from tests.rig.term import KilledError, around

MIXED = [
    1, 2.5, Int64(7), float("nan"), Decimal128("3.3"), "abc", "ABC", "$abc", "", ObjectId(), {"a": 1}, {"b": [1, 2]},
    None, True, False, dt.datetime(2026, 1, 1, tzinfo=dt.UTC), Timestamp(1, 2), Binary(b"x"), Binary(b"y" * 16, 4),
    MinKey(), MaxKey(),
]  # fmt: skip


def ask(world: SnapshotWorld, term: Any, **given: Any) -> str:
    store = term.wiring.store.snapshots
    snapshot_id: str = store.make_id(HANDLER)
    store.insert([{"_id": snapshot_id, "source": world.source, **given}])
    return snapshot_id


def test_documents_of_all_types_of_ids_come_once_by_the_index(world: SnapshotWorld) -> None:
    """P1, P6: comparisons of one type would end at the first other type."""
    world.orders.insert_many([{"_id": key, "v": 1} for key in MIXED])
    broken = bson.encode({"_id": "broken"}).replace(b"broken", b"\xff\xfeoken")
    world.orders.insert_one(RawBSONDocument(broken))
    term = world.term().begin()
    term.finish()
    assert world.record["done"] == len(MIXED) + 1
    assert all(world.snapshots_of(key) == 1 for key in MIXED)
    assert len(world.seen) == len(MIXED) + 1
    assert world.record["estimated"] == len(MIXED) + 1
    assert world.record["begun"] == world.record["moved"] + 1 >= 5
    assert all(each.token[18] == "~" for each in world.seen)
    assert world.record["untilId"] == MaxKey()


def test_an_empty_collection_and_one_that_is_not_there_are_done_at_once(world: SnapshotWorld) -> None:
    term = world.term().begin()
    term.finish()
    world.write(1, 1)
    term.until(world.is_equal)
    assert [each.operation for each in world.seen] == ["insert"]


def test_a_handler_whose_collections_cannot_be_listed_keeps_no_other_snapshot_waiting(
    world: SnapshotWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P12, P16: only what begins with these collections waits, and says so; with the right it begins."""
    world.orders.insert_many([{"_id": number, "v": 1} for number in range(6)])
    refuses = True

    def find(*given: Any) -> Any:
        if refuses:
            raise OperationFailure("not authorized", 13)
        return chunks.find_collections(*given)

    monkeypatch.setattr(snapshot_thread, "find_collections", find)
    term = world.term(sources=(f"{world.data}.*",)).begin()
    ask(world, term)
    term.finish()
    term.until(lambda: term.leader.report()["unrequestedSnapshots"])
    (found,) = term.leader.report()["unrequestedSnapshots"]
    assert (found["subscription"], found["source"]) == (HANDLER, f"{world.data}.*")
    assert "snapshot_not_started" in {getattr(record, "event", None) for record in caplog.records}
    assert "snapshots_unread" not in {getattr(record, "event", None) for record in caplog.records}
    refuses = False
    term.until(lambda: len(world.records) == 2)
    term.finish()
    assert term.leader.report()["unrequestedSnapshots"] == []


def test_inserts_that_are_faster_than_its_rate_keep_no_snapshot_from_ending(world: SnapshotWorld) -> None:
    """P1, P12: what is larger than all at the first T comes as an insert alone, also when another term goes on."""
    world.orders.insert_many([{"_id": number, "v": 1} for number in range(12)])
    keys, begun = itertools.count(12), set[int]()

    def outrun() -> None:
        """More documents than a chunk has, for each that is begun."""
        if world.record["begun"] not in begun:
            begun.add(world.record["begun"])
            world.orders.insert_many([{"_id": next(keys), "v": 1} for _ in range(6)])

    term = world.term(start_from="now").begin()
    ask(world, term, rate=30.0)
    term.until(lambda: world.record["moved"] >= 1, outrun)
    until = world.record["untilId"]
    term.close()
    later = world.term(start_from="now").begin()
    later.until(lambda: world.record["state"] == "done", outrun)
    later.until(world.is_equal)
    world.judge()
    record, count = world.record, next(keys)
    assert record["untilId"] == until < count - 6
    assert record["done"] == until + 1
    assert all(world.snapshots_of(key) >= 1 for key in range(until + 1))
    assert all(world.snapshots_of(key) == 0 for key in range(until + 1, count))


TIMES = [dt.datetime(2026, 1, day, tzinfo=dt.UTC) for day in (1, 2)]
NATURAL = {"collation": {"locale": "en", "strength": 2, "numericOrdering": True}}
CLUSTERED = {"clusteredIndex": {"key": {"_id": 1}, "unique": True}}


@pytest.mark.parametrize(
    ("options", "there", "behind"),
    [
        ({}, [None], [0]),
        (NATURAL, ["n1", "N2", "n3", "n9", "N10"], ["n11", "N100"]),
        pytest.param(
            CLUSTERED, [1, "a", "b", "c", TIMES[0]], [TIMES[1]], marks=pytest.mark.needs_mongodb(5, 3)
        ),
    ],
    ids=["null", "a collation", "clustered"],
)  # fmt: skip
def test_the_largest_id_is_that_of_the_collections_own_order(
    world: SnapshotWorld,
    monkeypatch: pytest.MonkeyPatch,
    options: Document,
    there: list[Any],
    behind: list[Any],
) -> None:
    orders = world.client[world.data].create_collection(world.name, **options)
    orders.insert_many([{"_id": key, "v": 1} for key in reversed(there)])
    begin = Snapshots.begin

    def begin_later(self: Snapshots, record: Snapshot, term: int) -> Timestamp | None:
        if record.begun == 1:  # before the second chunk
            orders.insert_many([{"_id": key, "v": 1} for key in behind])
        return begin(self, record, term)

    monkeypatch.setattr(Snapshots, "begin", begin_later)
    term = world.term(start_from="now").begin()
    ask(world, term)
    term.finish()
    assert [world.snapshots_of(key) for key in (*there, *behind)] == [1] * len(there) + [0] * len(behind)


def test_a_chunk_has_no_more_bytes_than_it_has_room_for(world: SnapshotWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROWS", "MOST_ROWS"):
        monkeypatch.setattr(chunks, name, 100)
    sizes = [1] * 5 + [40_000] * 6 + [200_000] + [1] * 5
    world.orders.insert_many([{"_id": number, "v": 1, "x": "x" * size} for number, size in enumerate(sizes)])
    done, move = [0], Snapshots.move

    def note(self: Snapshots, *arguments: Any) -> bool:
        is_moved = move(self, *arguments)
        done.append(world.record["done"])
        return is_moved

    monkeypatch.setattr(Snapshots, "move", note)
    term = world.term(buffer_bytes=1 << 20, match={"$ne": ["$fullDocument._id", 3]}).begin()
    term.until(lambda: world.records and world.record["state"] == "done")
    assert [each.key for each in sorted(world.seen, key=lambda each: each.key)] == [*range(3), *range(4, len(sizes))]
    assert len(done) > 3
    for before, after in pairwise(done):
        assert after - before == 1 or sum(sizes[before:after]) <= (1 << 20) / 8


@pytest.mark.parametrize("ends", [False, True], ids=["one term", "two terms"])
def test_the_next_chunk_is_read_meanwhile_and_recorded_in_its_turn(world: SnapshotWorld, ends: bool) -> None:
    """P1, P4, P5: workers finish the second chunk first. No third one begins."""
    first = keys_of(0, world, 4)
    second = [key for key in keys_of(1, world, 40) if key > max(first)][:4]
    third = [max(second) + 1]
    world.orders.insert_many([{"_id": key, "v": 1} for key in (*first, *second, *third)])
    term = world.term().begin()
    run, held = term.run, list[Run]()
    term.run = lambda run_: held.append(run_) if run_.index == 0 else run(run_)  # type: ignore[assignment, method-assign]
    turns = itertools.count()
    term.until(lambda: all(world.snapshots_of(key) for key in second) and next(turns) > 20)
    assert (world.record["begun"], world.record["moved"], world.record["done"]) == (2, 0, 0)
    assert "lastId" not in world.record
    if ends:
        term.close()
        term = world.term().begin()
    else:
        term.run = run  # type: ignore[method-assign]
        for each in held:
            run(each)
    term.finish()
    assert [world.snapshots_of(key) for key in (*first, *second, *third)] == [1] * 4 + [1 + ends] * 4 + [1]
    assert world.record["done"] == 9


def test_snapshots_of_one_handler_take_turns_also_if_it_has_enough_when_one_is_chosen(
    world: SnapshotWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P12: the one that may not begin now is the next to begin."""
    world.orders.insert_many([{"_id": number, "v": 1} for number in range(80)])
    term = world.term(start_from="now").begin()
    thread, read_one = term.leader.snapshots.thread, Snapshots.read_one

    def read_late(self: Snapshots, snapshot_id: str) -> Any:
        if len(thread.appended) > 1:
            wait_for(lambda: not thread.allowed or not any(each.ends for each in list(thread.appended)))
        return read_one(self, snapshot_id)

    monkeypatch.setattr(Snapshots, "read_one", read_late)
    for _ in range(3):
        ask(world, term)
    wait_for(lambda: len(thread.records) == 3)  # none begins before the first turn
    gaps = list[int]()

    def compare() -> None:
        begun = [each["begun"] for each in world.records]
        gaps.append(max(begun) - min(begun))

    term.until(lambda: any(each["state"] == "done" for each in world.records), compare)
    assert max(gaps) <= 2


def test_only_what_matches_comes_and_chunks_of_which_nothing_does_move_on(world: SnapshotWorld) -> None:
    world.orders.insert_many([{"_id": number, "v": number, "odd": number % 2 == 1} for number in range(40)])
    term = world.term(start_from="now", match={"$eq": ["$operationType", "insert"]}).begin()
    ask(world, term, match='{"$and": ["$fullDocument.odd", {"$gte": ["$fullDocument.v", 35]}]}')
    term.until(lambda: world.record["state"] == "done")
    assert sorted((each.key, each.value) for each in world.seen) == [(n, n) for n in (35, 37, 39)], "in any partition"
    assert world.record["done"] == 40


@pytest.mark.parametrize(
    "match",
    ['{"$foo": 1}', '{"$divide": [1, {"$subtract": ["$fullDocument.v", 1]}]}', "{"],
    ids=["unknown", "of some documents", "no JSON"],
)
def test_a_condition_that_nobody_can_judge_fails_the_snapshot_and_no_partition(
    world: SnapshotWorld, match: str
) -> None:
    """P12: a slip in it is no document's fault, and no handler's; also where only some documents show it."""
    world.orders.insert_many([{"_id": number, "v": 2 - number // 2} for number in range(4)])
    term = world.term(start_from="now").begin()
    ask(world, term, match=match)
    term.until(lambda: world.record["state"] == "failed")
    world.write(1, 9)
    term.until(lambda: world.seen)
    assert {image.state for image in term.images()} == {"flowing"}


def by_number(event: Document) -> int:
    """A rule that looks at the operation, as one may, and fails on one document."""
    if event["operationType"] == "insert":
        return int(event["fullDocument"]["group"])
    return int(event["documentKey"]["_id"]) % 3


def test_a_document_whose_key_cannot_be_told_is_refused_alone(world: SnapshotWorld) -> None:
    world.orders.insert_many([{"_id": number, "v": 1, "group": number % 3} for number in range(12)])
    world.orders.update_one({"_id": 5}, {"$set": {"group": "none"}})
    term = world.term(partition_by=by_number, spill_after=0.2, run_size=5).begin()
    term.until(lambda: world.records and world.record["state"] == "done")
    assert sum(image.state == "halted" for image in term.images()) == 1
    assert 5 not in {each.key for each in world.seen}


def load(world: SnapshotWorld, keys: int, seed: int, writes: int) -> Any:
    chance, left, value = random.Random(seed), [writes], [10]

    def write() -> None:
        for _ in range(chance.randrange(3)):
            if left[0] > 0:
                left[0] -= 1
                value[0] += 1
                world.write(chance.randrange(keys), -1 if chance.random() < 0.2 else value[0])

    return write


@pytest.mark.parametrize("partitions", [(3, 1), (1, 4)], ids=["narrower", "wider"])
def test_a_new_layout_in_the_middle_loses_nothing(world: SnapshotWorld, partitions: tuple[int, int]) -> None:
    world.orders.insert_many([{"_id": number, "v": 1} for number in range(40)])
    write = load(world, 45, 4, 150)
    before, after = partitions
    term = world.term(partitions=before).begin()
    term.until(lambda: world.records and world.record["done"] >= 9, write)
    term.works = False
    for _ in range(4):
        write()
        term.step()
    term.close()
    world.term(partitions=after).begin().finish(write)
    world.judge()
    assert sorted(world.terms[-1].leader.subscriptions[HANDLER].partitions) == list(range(after))


def test_a_chunk_that_is_read_slowly_keeps_no_change_waiting(
    world: SnapshotWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.orders.insert_many([{"_id": number, "v": 1} for number in range(3)])
    term = world.term(start_from="now").begin()
    handled = threading.Event()

    def delay() -> None:
        world.write(0, 7)
        world.write(9, 7)
        assert handled.wait(30)

    def see() -> None:
        if {0, 9} <= {each.key for each in world.seen}:
            handled.set()

    around(monkeypatch, (ChunkReader, "read"), delay, behind=True)
    ask(world, term)
    term.until(handled.is_set, see)
    term.finish()
    world.judge()
    assert [world.snapshots_of(number) for number in (0, 1, 2, 9)] == [0, 1, 1, 0]


def by_group(event: Document) -> Any:
    """A rule by a field, as far as the event has the document."""
    return (event.get("fullDocument") or {}).get("group", 0)


def change_one(world: SnapshotWorld, kind: str) -> None:
    if kind == "delete":
        world.orders.delete_one({"_id": 1})
    elif kind == "anew":
        world.orders.delete_one({"_id": 1})
        world.orders.insert_one({"_id": 1, "v": 5})
    elif kind == "moves":
        world.orders.replace_one({"_id": 1}, {"_id": 1, "v": 5, "group": 1})
    else:
        world.orders.update_one({"_id": 1}, {"$set": {"v": 5}})


@pytest.mark.parametrize("moment", ["begin", "read", "mark_read_end"])
@pytest.mark.parametrize(
    ("kind", "options", "given"),
    [
        ("update", {}, ["update"]),
        ("delete", {}, ["delete"]),
        ("anew", {}, ["delete", "insert"]),
        ("moves", {"partition_by": by_group}, ["replace"]),
        ("update", {"full_document": None}, ["update", "snapshot"]),
        ("update", {"operations": ("insert", "delete")}, ["snapshot"]),
        ("update", {"match": {"$lt": ["$fullDocument.v", 5]}}, ["snapshot"]),
    ],
    ids=["update", "delete", "anew", "moves", "no document", "operations", "match"],
)
def test_a_document_that_changes_in_the_window_comes_as_its_change(
    world: SnapshotWorld, monkeypatch: pytest.MonkeyPatch, kind: str, options: Document, given: list[str], moment: str
) -> None:
    """P1, P2: behind the begin, between two reads, behind the reading; again where the change brings no document."""
    world.orders.insert_many([{"_id": number, "v": 1, "group": 0} for number in range(3)])
    term = world.term(start_from="now", **options).begin()
    step = (ChunkReader if moment == "read" else Snapshots, moment)
    around(monkeypatch, step, lambda: change_one(world, kind), behind=moment != "mark_read_end")
    ask(world, term)
    if moment == "begin" and "match" in options:  # when it is read, the document does not match any more
        given = []

    def operations() -> list[str]:
        return [each.operation for each in world.seen if each.key == 1]

    term.until(lambda: world.record["state"] == "done" and len(operations()) >= len(given))
    assert operations() == given
    assert [world.snapshots_of(number) for number in (0, 2)] == [1, 1]
    rows = [each for each in world.seen if each.key == 1 and each.operation == "snapshot"]
    assert all(each.value == 5 for each in rows if "full_document" in options)


def test_a_move_of_another_collection_repeats_no_row(world: SnapshotWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: also where a part of the chunk was appended, and the rest is read again."""
    world.orders.insert_many([{"_id": number, "v": 1} for number in range(3)])
    invoices = world.client[world.data]["invoices"]
    invoices.insert_one({})
    reading = (ChunkReader, "read")

    def rename() -> None:
        invoices.rename("bills")

    def write() -> None:
        world.write(1, 5)
        around(monkeypatch, reading, rename)

    around(monkeypatch, reading, write, behind=True)
    sources = (world.source, invoices.full_name)
    term = world.term(sources=sources, start_from="now", full_document=None, operations="*").begin()
    ask(world, term)
    term.until(lambda: world.record["state"] == "done")
    assert [world.snapshots_of(number) for number in range(3)] == [1, 1, 1]
    assert world.record["done"] == 3


def test_a_chunk_that_was_too_large_is_followed_by_small_ones(
    world: SnapshotWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P17: else each chunk would begin with what cannot be read in time."""
    world.orders.insert_many([{"_id": number, "v": 1} for number in range(8)])
    read = ChunkReader.read

    def slow(self: ChunkReader, chunk: Chunk) -> None:
        if chunk.rows > 3:
            message = "operation exceeded time limit"
            raise OperationFailure(message, 50)
        read(self, chunk)

    monkeypatch.setattr(ChunkReader, "read", slow)
    term = world.term().begin()
    term.finish()
    assert world.record["done"] == 8


def test_a_document_that_is_changed_faster_than_it_is_read_says_so_and_comes_when_there_is_a_pause(
    world: SnapshotWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P9, P17: where changes bring no document, it is read again and again, with others beside it."""
    world.orders.insert_many([{"_id": number, "v": 1} for number in range(3)])
    term = world.term(start_from="now", full_document=None).begin()
    monkeypatch.setattr(snapshot_thread, "_ROUNDS_MAX", 2)
    read, values = ChunkReader.read, iter(range(2, 6))

    def beside(self: ChunkReader, chunk: Chunk) -> None:
        read(self, chunk)
        value = next(values, None)
        if value is not None:
            world.write(1, value)

    monkeypatch.setattr(ChunkReader, "read", beside)
    ask(world, term)
    reported: list[str] = []
    term.until(
        lambda: world.record["state"] == "done",
        lambda: reported.extend(each["error"] for each in term.leader.snapshots.report()),
    )
    assert reported
    rows = [each for each in world.seen if each.key == 1 and each.operation == "snapshot"]
    assert [each.value for each in rows] == [5]
    assert all(world.snapshots_of(number) >= 1 for number in (0, 2))


def test_a_halted_partition_holds_no_snapshot_and_its_documents_run_when_it_is_retried(world: SnapshotWorld) -> None:
    first, other = keys_of(0, world, 8), keys_of(1, world, 8)
    world.orders.insert_many([{"_id": key, "v": 1} for key in (*first, *other)])
    term = world.term(spill_after=0.2).begin()
    term.failing = [min(first)]
    term.until(lambda: world.records and world.record["state"] == "done")
    assert {each.key for each in world.seen} == {*other}
    for key in first:
        world.write(key, 2)
    term.failing = []
    (halted,) = [image for image in term.images() if image.state == "halted"]
    assert term.wiring.store.partitions.retry(halted)
    term.until(world.is_equal)
    world.judge()
    assert all(world.snapshots_of(key) == 1 for key in first)


def test_the_record_waits_for_the_mark(world: SnapshotWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: what was inserted and is not marked is nobody's yet."""
    first = keys_of(0, world, 3)
    world.orders.insert_many([{"_id": key, "v": 1} for key in first])
    term = world.term(spill_after=0.1).begin()
    term.failing = [min(first)]

    def refuse(*_: Any, **__: Any) -> bool:
        raise AutoReconnect("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(Partitions, "mark_stored", refuse)
        term.until(lambda: term.wiring.store.backlog.next_partition() is not None)
        for _ in range(5):
            term.step()
        assert world.record["moved"] == 0
    term.until(lambda: world.record["moved"] >= 1)


def make_anew(world: SnapshotWorld) -> None:
    world.orders.drop()
    world.orders.insert_many([{"_id": number, "v": 3} for number in range(30)])


def test_a_source_that_is_dropped_renamed_or_made_anew_is_gone_loudly(world: SnapshotWorld) -> None:
    """F6, P9: else nothing would be left, and all be done. Resumed, it gives nothing of the collection in its place."""
    for move in (
        world.orders.drop,
        lambda: world.orders.rename("elsewhere", dropTarget=True),
        lambda: make_anew(world),
    ):
        world.client[world.state]["snapshots"].delete_many({})
        world.orders.drop()
        world.orders.insert_many([{"_id": number, "v": 1} for number in range(30)])
        term = world.term(start_from="now", sources=(world.source, f"{world.data}.other")).begin()
        snapshot_id, store = ask(world, term), term.wiring.store.snapshots
        term.until(lambda: world.record["done"] >= 3)
        move()
        term.until(lambda: world.record["state"] != "running")
        assert world.record["state"] == "source gone"
        assert store.stop(snapshot_id)
        assert store.resume(snapshot_id)
        term.until(lambda: world.record["state"] == "source gone")
        term.close()
    assert {each.value for each in world.seen if each.operation == "snapshot"} == {1}


@pytest.mark.parametrize("change", ["dropped", "made anew", "taken over"])
def test_a_chunk_whose_collection_or_record_has_changed_is_not_used(
    world: SnapshotWorld, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """F6, P1: the stream has passed the move before the chunk begins, or the next term reads the chunk again."""
    world.orders.insert_many([{"_id": number, "v": 1} for number in range(3)])
    other = world.client[world.data]["other"]
    term = world.term(start_from="now", sources=(world.source, other.full_name)).begin()
    has_moved, changed = change != "taken over", threading.Event()

    def has_passed(key: str) -> bool:
        return key in [each.key for each in world.seen]

    def act() -> None:
        if has_moved:
            world.orders.drop() if change == "dropped" else make_anew(world)
            other.insert_one({"_id": "moved"})
            wait_for(lambda: has_passed("moved"))
        else:  # its first write, while the partitions are still those of this term
            term.wiring.store.snapshots.take_over(world.record["term"] + 1)
        changed.set()

    around(monkeypatch, (Snapshots, "prepare" if has_moved else "mark_read_end"), act, behind=has_moved)
    ask(world, term)
    term.until(lambda: changed.is_set() and term.leader.snapshots.thread.is_idle)
    other.insert_one({"_id": "end"})
    term.until(lambda: has_passed("end") and (world.record["state"] == "source gone") == has_moved)
    assert "snapshot" not in [each.operation for each in world.seen]
    assert (world.record["state"], world.record["done"]) == ("source gone" if has_moved else "running", 0)


@pytest.mark.needs_mongodb(5, 0)
def test_a_collection_that_can_have_none_fails_alone(world: SnapshotWorld) -> None:
    """P9: capped collections, views and time series, with a sentence; the handler's changes flow."""
    data = world.client[world.data]
    data.create_collection("capped", capped=True, size=10_000)
    data.create_collection("view", viewOn="orders", pipeline=[])
    data.create_collection("series", timeseries={"timeField": "at"})
    term = world.term(start_from="now").begin()
    for name in ("capped", "view", "series"):
        ask(world, term)
        newest = max(world.records, key=lambda each: each["since"])["_id"]
        world.client[world.state]["snapshots"].update_one({"_id": newest}, {"$set": {"source": f"{world.data}.{name}"}})
    term.until(lambda: all(each["state"] == "failed" for each in world.records))
    world.write(1, 1)
    term.until(world.is_equal)


def test_the_command_refuses_what_cannot_be_and_stores_nothing(world: SnapshotWorld) -> None:
    world.orders.insert_many([{"_id": number, "v": 1} for number in range(3)])
    capped = f"{world.data}.capped"
    world.client[world.data].create_collection("capped", capped=True, size=10_000)
    operations = Operations(world.term(start_from="now", sources=(world.source, capped)).begin().wiring)
    refused: list[Document] = [
        {"sources": [capped]},
        {"sources": [f"{world.data}.ordrs"]},
        {"match": '{"v": 1}'},
        {"rate": float("nan")},
        {"match": '{"$foo": 1}', "sources": [world.source]},
        {},
        {"handler": "copi"},
    ]
    for given in refused:
        with pytest.raises(CommandRefusedError):
            operations.start_snapshot(**{"handler": HANDLER, **given})
    named = '{"$gt": [{"$strLenCP": "$ns.coll"}, {"$strLenCP": {"$toString": "$documentKey._id"}}]}'
    (planned,) = operations.start_snapshot(sources=[world.source], match=named).fields["parts"]
    assert (planned["source"], planned["estimated"], planned["result"]) == (world.source, 3, "planned")
    assert world.records == []
    missing = world.term(start_from="now", sources=(f"{world.data}.missing",)).wiring
    with pytest.raises(CommandRefusedError):
        Operations(missing).start_snapshot(HANDLER)


def test_the_command_begins_stops_and_resumes_one(world: SnapshotWorld) -> None:
    world.orders.insert_many([{"_id": number, "v": 1} for number in range(12)])
    term = world.term(start_from="now").begin()
    operations = Operations(term.wiring)

    def is_refused(act: Callable[..., object], handler: str = HANDLER, **given: Any) -> None:
        with pytest.raises(CommandRefusedError):
            act(handler, **given)

    start = operations.start_snapshot(HANDLER, match='{"$gte": ["$fullDocument.v", 1]}')
    assert start.question is not None
    assert start.run().fields["done"] == 1
    is_refused(operations.start_snapshot)
    term.until(lambda: world.record["done"] >= 3)
    late = operations.stop_snapshot(HANDLER)
    assert operations.stop_snapshot(HANDLER).run().fields["done"] == 1
    assert len(late.run().refused) == 1, "it has changed meanwhile"
    assert world.record["state"] == "stopped"
    is_refused(operations.stop_snapshot)
    is_refused(operations.resume_snapshot, sources=["shop.nothing"])
    assert operations.resume_snapshot(HANDLER, sources=[world.source]).question is None
    plan = operations.resume_snapshot(HANDLER)
    assert plan.question is not None
    assert plan.plain()["question"] == plan.question
    assert plan.run().fields["done"] == 1
    term.finish()
    (found,) = read_snapshot(term.wiring).snapshots
    assert (found.state, found.done, found.estimated) == ("done", 12, 12)
    is_refused(operations.stop_snapshot, "nothing")
    is_refused(operations.resume_snapshot)


# -- listeners that end, or wake too late, and documents that come again ------------------------------


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
            wait_for(lambda: [each for each in world.seen if each.value == 5])  # before L
        return begin(self, *arguments)

    monkeypatch.setattr(Snapshots, "begin", begin_late)
    ask(world, term)
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
        if len(letters) == 1:
            ask(world, term)
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
    writes = [(4, 1, 0), (5, 2, 1), (5, 1, 0), (5, 1, 0)]
    assert [store.move(snapshot_id, *each, end, 7, end) for each in writes] == [False, False, True, True]
    after: Any = store.read_one(snapshot_id)
    assert (after.last, after.until, after.done) == (end, end, 7)
    assert store.begin(after, 5) is not None
    assert not store.move(snapshot_id, 5, 2, 1, larger, 1, larger)
    assert [store.move(snapshot_id, 5, 2, 1, larger, 1) for _ in range(2)] == [True, True]
    assert store.mark_read_end(snapshot_id, 4, 2) is None
    stopped: Any = store.read_one(snapshot_id)
    assert (stopped.last, stopped.done) == (larger, 8)
    assert store.begin(stopped, 5) is not None
    assert store.stop(snapshot_id)
    assert store.take_over(6) == 6, "it may be resumed"
    assert not store.move(snapshot_id, 5, 3, 2, larger, 1), "the chunk of the term before"
    assert store.resume(snapshot_id)
    taken: Any = store.read_one(snapshot_id)
    assert (taken.term, taken.last, taken.done) == (6, stopped.last, stopped.done)
    assert [store.begin(taken, term) is not None for term in (5, 6)] == [False, True]
    assert [store.finish(snapshot_id, 6, 4, last) for last in (1, 2)] == [False, True]
