"""A subscription in a term: what it takes in, and which runs it hands out with which numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import bson
import pytest
from bson import Timestamp

from mongo_celery.bridge.change import Change
from mongo_celery.bridge.handlers import make_handler
from mongo_celery.bridge.listener.dispatcher import Dispatch
from mongo_celery.bridge.listener.feedback import ROUNDS
from mongo_celery.bridge.listener.partition import GracePeriods, Partition, Step
from mongo_celery.bridge.listener.subscription import Subscription, TermFacts
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.partitioning import Partitioner, document_hash
from mongo_celery.bridge.state.backlog import StoredChange
from mongo_celery.bridge.state.partitions import Image
from mongo_celery.bridge.state.subscriptions import Layout
from mongo_celery.bridge.stream.items import ChangeEvent
from mongo_celery.bridge.window import Mark, PendingChange, Refusal
from tests.fixtures.samples import event, image, mark, token_data

NOW = 1000.0
VERSION = 1
PARTITIONS = 4


def handle(_change: Change) -> None:
    """A handler."""


def id_of(document: Mapping[str, Any]) -> int:
    """The partition is the `_id` itself: tests choose it."""
    found: int = document["documentKey"]["_id"]
    return found


class Chosen(Partitioner):
    """A partitioner whose hash is the partition that the test wants."""

    __slots__ = ()

    def hash(self, event: Mapping[str, Any]) -> int:
        found: int = self.key(event)
        assert found < PARTITIONS
        return found


def subscription(
    *,
    start: int = 0,
    watermark: Mark | None = None,
    images: Mapping[int, Image] | None = None,
    transactional: bool = False,
    commit: str | None = None,
    batch_size: int | None = None,
    bridges_commit: str = "chain",
    **options: Any,
) -> Subscription:
    made = BridgeOptions(name="shop", partitions=PARTITIONS, commit=bridges_commit, **options)
    handler = make_handler(
        handle,
        ("shop.orders",),
        made,
        task_name="shop.handle",
        given={"transactional": transactional, "commit": commit},
        batch_size=batch_size,
    )
    plan = TermFacts(
        handler,
        handler.selector(None),
        Chosen("test", id_of),
        Layout(3, PARTITIONS, "blake2b-64:_id"),
        VERSION,
        Timestamp(1000, start),
        watermark,
    )
    found = {index: (images or {}).get(index, image(index=index)) for index in range(PARTITIONS)}
    partitions = {
        index: Partition(f"shop/handle/3/{index}", seen, VERSION, GracePeriods(8.0, 3.0), NOW)
        for index, seen in found.items()
    }
    return Subscription(made, plan, partitions)


def change(number: int, index: int = 0, ns: str = "shop.orders", **fields: Any) -> ChangeEvent:
    """The change with this place in the stream, of this partition."""
    document = event("insert", ns, documentKey={"_id": index}, fullDocument={"n": number}, **fields)
    document["_id"] = {"_data": token_data(number)}
    return ChangeEvent(mark(number), document, bson.encode(document))


def committed(index: int, count: int, number: int, **changes: Any) -> Image:
    """A partition that has so many committed changes, the last at this place."""
    data = token_data(number)
    return image(index=index, committed=count, token={"_data": data}, data=data, fencing_token=11, **changes)


def due(one: Subscription, now: float = NOW) -> list[Dispatch]:
    """What is due, published as the listener does."""
    found = []
    for partition, dispatch in one.due(now):
        found.append(dispatch)
        partition.note_sent(now)
    return found


def outlined(change: PendingChange) -> StoredChange:
    """A change as it is read back after it was stored."""
    return StoredChange(change.data, b"", change.hash, change.refusal, change.token, len(change.raw))


def numbers(dispatch: Dispatch) -> list[int]:
    """Places in the stream of the changes of a run, which travel or are stored."""
    if dispatch.run.stored:
        return [int(token[10:18], 16) for token in dispatch.run.stored]
    return [bson.decode(raw)["fullDocument"]["n"] for raw in dispatch.run.changes]


def taken(one: Subscription) -> str | None:
    """How far the watermark is."""
    return one.window.watermark.data if one.window.watermark else None


# Taking in


def test_a_change_that_is_wanted_waits_for_its_turn_with_the_bytes_of_the_server() -> None:
    """P11: what is dispatched is what was read."""
    one = subscription()
    one.ingest_item(change(1, index=2))
    assert one.window.count == 1
    (run,) = due(one)
    assert run.run.changes == [change(1, index=2).raw]
    assert (run.run.partition_id, run.run.version) == ("shop/handle/3/2", VERSION)
    assert (run.task_name, run.attempt) == ("shop.handle", 0)
    assert run.label == "(shop.orders insert 2 seq=1)"


def test_a_change_that_is_not_wanted_moves_the_watermark() -> None:
    """P5: a quiet subscription beside a busy one never falls off the oplog."""
    one = subscription()
    one.ingest_item(change(1, ns="shop.invoices"))
    one.ingest_item(mark(2))
    assert (taken(one), one.window.count, one.in_flight) == (token_data(2), 0, [])


def test_what_a_reopened_stream_repeats_is_not_taken_in_twice() -> None:
    """P6: the reader may begin again at an earlier time."""
    one = subscription()
    for number in (1, 2, 1, 2, 3):
        one.ingest_item(change(number))
    assert one.window.count == 3
    one.ingest_item(mark(2))
    assert due(one)[0].run.first == 1
    assert taken(one) is None


def test_what_lies_before_the_watermark_is_not_taken_in() -> None:
    """P6: the stream is opened at the smallest position of all subscriptions."""
    one = subscription(watermark=mark(5))
    for number in (4, 5, 6):
        one.ingest_item(change(number))
    assert one.window.count == 1
    assert numbers(due(one)[0]) == [6]


def test_what_its_partition_has_committed_is_done() -> None:
    """P6: positions of partitions are ahead of the watermark."""
    one = subscription(images={0: committed(0, 7, 5)})
    one.ingest_item(change(4, index=0))
    one.ingest_item(change(5, index=0))
    assert (one.window.count, taken(one)) == (0, token_data(5))
    one.ingest_item(change(6, index=0))
    one.ingest_item(change(7, index=1))
    assert {run.run.index: run.run.first for run in due(one)} == {0: 8, 1: 1}


def test_what_lies_before_the_start_is_not_owed() -> None:
    """P1: from the recorded start point; the start itself is inside."""
    one = subscription(start=3)
    for number in (1, 2, 3):
        one.ingest_item(change(number))
    assert numbers(due(one)[0]) == [3]
    assert taken(one) == token_data(2)


def test_what_lies_before_a_start_that_was_moved_is_not_owed() -> None:
    """P12: also where it was read beyond its start before, and the stream is read again for others."""
    one = subscription(start=1)
    one.ingest_item(change(1))
    one.lost = True
    one.move(Timestamp(1000, 4))
    for number in (3, 4):
        one.ingest_item(change(number))
    assert (one.lost, one.has_gap, one.stored, one.window.count) == (False, True, None, 2)
    assert one.plan.start == Timestamp(1000, 4)


def test_an_event_without_a_time_is_owed() -> None:
    """P1: rather once too often."""
    one = subscription(start=3)
    one.ingest_item(replace(change(1), mark=Mark({"_data": token_data(1)}, token_data(1), None)))
    assert one.window.count == 1


def test_nothing_is_taken_in_while_partitions_drain() -> None:
    """P1, P2, P5: what lies behind belongs to the next partitioning; neither a change nor a marker may pass it."""
    one = subscription()
    for item in (change(1), change(2)):
        one.ingest_item(item)
    one.is_draining = True
    one.ingest_item(change(2))
    assert not one.has_left, "it was read before"
    for later in (change(3), mark(4)):
        one.ingest_item(later)
    assert (one.window.count, one.has_left) == (2, True)
    one.observe(committed(0, 1, 1), NOW)
    one.observe(committed(0, 2, 2), NOW)
    due(one)
    assert (taken(one), one.window.count) == (token_data(2), 0)


# Stored changes


def stored(number: int, refusal: Refusal | None = None) -> StoredChange:
    """The change with this place in the stream, as it is read back."""
    token = {"_data": token_data(number)} if refusal is not None else None
    return StoredChange(token_data(number), refusal=refusal, token=token, size=100)


def spilled(to: int, count: int = 0, number: int = 0, **changes: Any) -> Image:
    """A partition that is marked up to this place, with so many committed changes, the last at the other place."""
    mark_ = {"to": token_data(to), "since": None, "reason": "halted"}
    if not count:
        return image(index=0, spilled=mark_, **changes)
    return committed(0, count, number, spilled=mark_, **changes)


def test_stored_changes_run_only_as_far_as_the_stream_was_read() -> None:
    """P2: an earlier change may be read again, which was not stored: then nothing runs before it is stored, too."""
    one = subscription(images={0: spilled(5)}, watermark=mark(1))
    (partition, backlog) = one.backlogs[0]
    assert one.last_readable_place(partition) == token_data(1)
    one.ingest_item(mark(2))
    assert one.last_readable_place(partition) == token_data(2)
    one.ingest_item(change(3))
    assert (one.last_readable_place(partition), partition.must_store_again) == ("", True)
    one.note_stored(partition, token_data(3), 1)
    assert (one.last_readable_place(partition), partition.must_store_again) == (token_data(3), False)
    one.ingest_item(change(7))
    assert (one.last_readable_place(partition), backlog.to) == (token_data(5), token_data(5))


def test_while_anything_stored_is_not_committed_the_buffer_waits() -> None:
    """P2: what is buffered lies behind what is stored."""
    one = subscription(images={0: spilled(2)}, watermark=mark(2), run_size=10)
    one.ingest_item(change(3))
    assert due(one) == []
    one.add_stored(one.partitions[0], [stored(1), stored(2)])
    assert [numbers(run) for run in due(one)] == [[1, 2]]
    one.observe(spilled(2, 2, 2), NOW)
    (run,) = due(one)
    assert (numbers(run), run.run.first) == ([3], 3)


def test_stored_changes_run_like_all_others() -> None:
    """P2, P6: numbered at dispatch, within the limits, one at a time after an unclean end, a refused one alone."""
    one = subscription(images={0: spilled(9, 4, 1, single=6)}, watermark=mark(9), run_size=3)
    changes = [
        stored(2),
        stored(3),
        stored(4),
        stored(5),
        stored(6, Refusal("no key", lasts=True)),
        stored(7),
        stored(8),
        stored(9),
    ]
    one.add_stored(one.partitions[0], changes)
    seen = []
    for count in (5, 6, 8, 9, 12):
        (run,) = due(one)
        seen.append((run.run.first, numbers(run), run.run.token))
        one.observe(spilled(9, count, count - 3, single=6), NOW)
    assert seen == [
        (5, [2], None),
        (6, [3], None),
        (7, [4, 5], None),
        (9, [6], mark(6).token),
        (10, [7, 8, 9], None),
    ]
    assert one.backlogs == []


def test_what_was_stored_holds_no_watermark_and_runs_once_it_is_read_back() -> None:
    """P5, P2: what comes next, without a gap; and what is stored behind it meanwhile comes afterwards."""
    one = subscription(run_size=2)
    for number in range(1, 4):
        one.ingest_item(change(number))
    partition = one.partitions[0]
    one.note_stored(partition, token_data(3), 3)
    assert (one.window.count, taken(one), due(one)) == (0, token_data(3), [])
    one.add_stored(partition, [stored(1), stored(2)])
    one.ingest_item(change(4))
    one.note_stored(partition, token_data(4), 1)
    (run,) = due(one)
    assert numbers(run) == [1, 2]
    one.observe(spilled(4, 2, 2), NOW)
    assert (due(one), one.last_readable_place(partition)) == ([], token_data(4))
    one.add_stored(partition, [stored(3), stored(4)])
    (run,) = due(one)
    assert (numbers(run), run.run.first, run.run.changes) == ([3, 4], 3, [])


def test_a_run_of_stored_changes_is_bounded_by_the_bytes_of_their_events() -> None:
    """A worker has them all in memory, whatever they take in the collection."""
    one = subscription(images={0: spilled(9)}, watermark=mark(9), run_size=10, run_bytes=250)
    one.add_stored(one.partitions[0], [stored(number) for number in range(1, 6)])
    (run,) = due(one)
    assert numbers(run) == [1, 2]


def test_a_change_whose_partition_rule_fails_is_refused_in_its_turn() -> None:
    """P12: never an error of the listener, never skipped; what stands behind it in its partition waits."""
    one = subscription()
    bad = change(1, index=9)  # no such partition: the rule fails
    one.ingest_item(bad)
    index = document_hash(bad.document) % PARTITIONS
    one.ingest_item(change(2, index=index))
    one.ingest_item(change(3, index=(index + 1) % PARTITIONS))

    assert due(one) == []  # nothing that was read after it runs before it is stored
    assert one.next_due() == math.inf
    (first,) = one.partitions[index].queue.head(1, 1 << 20)
    one.note_stored(one.partitions[index], first.data, 1)
    one.add_stored(one.partitions[index], [outlined(first)])

    refused, other = sorted(due(one), key=lambda run: numbers(run)[0])
    assert (numbers(refused), refused.run.index, refused.run.token) == ([1], index, bad.mark.token)
    assert refused.run.refusal is not None
    assert refused.run.refusal.reason.startswith("partition_by of handler handle failed: AssertionError")
    assert not refused.run.refusal.halts
    assert (numbers(other), other.run.refusal) == ([3], None)


def test_a_refused_change_is_a_run_of_its_own() -> None:
    """Neighbours keep their runs, and the order of the partition."""
    one = subscription(run_size=10)
    index = document_hash(change(1, index=9).document) % PARTITIONS
    for number in range(1, 6):
        one.ingest_item(change(number, index=9 if number == 3 else index))
    first = one.partitions[index].queue.head(3, 1 << 20)
    one.note_stored(one.partitions[index], first[-1].data, 3)
    one.add_stored(one.partitions[index], [outlined(each) for each in first])
    tokens = []
    for expected in ([1, 2], [3], [4, 5]):
        (run,) = due(one)
        assert numbers(run) == expected
        assert (run.run.refusal is not None) is (expected == [3])
        tokens.append(run.run.token)
        one.observe(committed(index, expected[-1], expected[-1]), NOW)
    assert tokens == [None, mark(3).token, None]


# Handing out


def test_one_run_is_out_in_a_partition_and_partitions_are_independent() -> None:
    """P2: window 1. What one partition waits for does not hold the others."""
    one = subscription()
    for number, index in enumerate([0, 0, 1, 1, 2], start=1):
        one.ingest_item(change(number, index=index))
    assert sorted(numbers(run) for run in due(one)) == [[1], [3], [5]]
    assert due(one, NOW + 1) == []
    assert one.observe(committed(1, 1, 3), NOW + 1) is Step.ENDED
    assert [numbers(run) for run in due(one, NOW + 1)] == [[4]]
    assert len(one.in_flight) == 3


def test_a_handler_that_may_send_one_run_at_a_time_serves_all_its_partitions() -> None:
    """P12: fairness lets a slow handler send a few; the partition that was sent longest ago is next."""
    one = subscription()
    for number in range(1, 13):
        one.ingest_item(change(number, index=number % PARTITIONS))
    served = []
    for turn in range(1, 9):
        partition, dispatch = next(iter(one.due(NOW + turn)))
        served.append(dispatch.run.index)
        partition.note_sent(NOW + turn)
        count = partition.image.committed + 1
        one.observe(committed(dispatch.run.index, count, numbers(dispatch)[-1]), NOW + turn)
    assert sorted(served[:4]) == sorted(served[4:]) == list(range(PARTITIONS))


def test_numbers_are_given_at_dispatch_against_what_is_committed_then() -> None:
    """P2, P4: a change that was finished elsewhere between reading and dispatch takes its number with it."""
    one = subscription(images={0: image(index=0, claim={"owner": "a"}, live=True, fencing_token=11)})
    for number in (1, 2, 3):
        one.ingest_item(change(number))
    assert due(one) == []
    one.observe(committed(0, 2, 2), NOW)
    (run,) = due(one)
    assert (run.run.first, run.run.last, numbers(run)) == (3, 3, [3])
    assert one.window.count == 1


def test_a_position_that_moved_without_a_run_of_ours_is_seen_at_dispatch() -> None:
    """P6: an operator's skip, or the last commit of the term before."""
    one = subscription()
    one.ingest_item(change(1))
    one.ingest_item(change(2))
    assert one.observe(committed(0, 1, 1), NOW) is Step.WAIT
    (run,) = due(one)
    assert (run.run.first, numbers(run)) == (2, [2])
    assert taken(one) == token_data(1)


def test_a_run_carries_as_many_changes_as_the_options_allow() -> None:
    """At least one, then as many as fit into both limits, numbered without gaps."""
    one = subscription(run_size=3)
    for number in range(1, 6):
        one.ingest_item(change(number))
    (run,) = due(one)
    assert (run.run.first, run.run.last, numbers(run)) == (1, 3, [1, 2, 3])
    assert run.label == "(shop.orders insert 0 seq=1 and 2 more)"
    size = len(change(1).raw)
    for limit, expected in ((1, [1]), (2 * size, [1, 2]), (3 * size - 1, [1, 2])):
        for small in (
            subscription(run_size=3, run_bytes=limit),
            subscription(run_size=3, max_message_bytes=max(limit, size)),
        ):
            for number in range(1, 6):
                small.ingest_item(change(number))
            assert numbers(due(small)[0]) == expected


def test_a_change_that_is_too_large_for_a_message_is_stored_before_it_runs() -> None:
    """It takes nothing with it that a message can hold."""
    one = subscription(run_size=3, max_message_bytes=1000)
    for number, size in enumerate((0, 2000, 0, 0), 1):
        one.ingest_item(change(number, text="x" * size))
    (run,) = due(one)
    assert (numbers(run), one.too_large) == ([1], set())
    one.observe(committed(0, 1, 1), NOW)
    assert (due(one), one.too_large) == ([], {one.partitions[0]})
    (large,) = one.partitions[0].queue.head(1, 1)
    one.note_stored(one.partitions[0], large.data, 1)
    one.add_stored(one.partitions[0], [outlined(large)])
    (run,) = due(one)
    assert (numbers(run), run.run.changes, one.too_large) == ([2], [], set())
    one.observe(committed(0, 2, 2), NOW)
    (run,) = due(one)
    assert (numbers(run), run.run.stored) == ([3, 4], ())


def test_after_an_unclean_end_runs_are_one_change_each_until_it_is_passed() -> None:
    """P6: only the guilty change is charged with the crash."""
    one = subscription(run_size=10, images={0: image(index=0, committed=3, single=5)})
    for number in range(1, 8):
        one.ingest_item(change(number))
    (run,) = due(one)
    assert (run.run.first, run.run.last) == (4, 4)
    one.observe(committed(0, 4, 1, single=5), NOW)
    (run,) = due(one)
    assert (run.run.first, run.run.last) == (5, 5)
    one.observe(committed(0, 5, 2, single=5), NOW)
    (run,) = due(one)
    assert (run.run.first, run.run.last, numbers(run)) == (6, 10, [3, 4, 5, 6, 7])


def test_a_run_whose_claim_has_lapsed_is_sent_again_change_by_change() -> None:
    """P6: `single` is written only by the next claim, so the lapsed claim itself says how far to go singly."""
    one = subscription(run_size=10)
    for number in range(1, 5):
        one.ingest_item(change(number))
    assert numbers(due(one)[0]) == [1, 2, 3, 4]

    lapsed = image(index=0, fencing_token=11, claim={"owner": "x", "first": 1, "last": 4, "ttl": 10_000, "until": None})
    one.observe(lapsed, NOW + 1)
    one.observe(lapsed, NOW + 60)

    assert numbers(due(one, NOW + 60)[0]) == [1]


def test_a_transactional_handler_gets_one_change_at_a_time() -> None:
    """One transaction is one change and its mark."""
    one = subscription(run_size=10, transactional=True)
    for number in range(1, 4):
        one.ingest_item(change(number))
    assert numbers(due(one)[0]) == [1]


@pytest.mark.parametrize(
    ("handlers", "bridges", "commits"),
    [(None, "chain", True), (None, "inline", False), ("inline", "chain", False), ("chain", "inline", True)],
)
def test_no_commit_task_follows_a_run_that_commits_inline(handlers: str | None, bridges: str, commits: bool) -> None:
    """By the handler's own option, else by the bridge's."""
    one = subscription(commit=handlers, bridges_commit=bridges)
    one.ingest_item(change(1))
    assert [dispatch.commits for dispatch in due(one)] == [commits]


@pytest.mark.parametrize("transactional", [True, False])
def test_a_bulk_handler_gets_runs_of_its_own_size_with_the_keys_of_all(transactional: bool) -> None:
    """P6: any of them may become the one that fails, and its policy needs its key."""
    one = subscription(run_size=1, batch_size=3, transactional=transactional)
    for number in range(1, 6):
        one.ingest_item(change(number))
    (run,) = due(one)
    assert (numbers(run), run.run.hashes) == ([1, 2, 3], (0, 0, 0))
    single = subscription(batch_size=3, images={0: image(index=0, single=5)})
    for number in range(1, 4):
        single.ingest_item(change(number))
    (run,) = due(single)
    assert (numbers(run), run.run.hashes) == ([1], ())


def test_a_lost_run_is_handed_out_again_with_the_same_numbers() -> None:
    """P8: under another task id, so that a revoke hits one dispatch only."""
    one = subscription()
    one.ingest_item(change(1))
    (first,) = due(one)
    one.observe(image(index=0), NOW + 8)
    (second,) = due(one, NOW + 8)
    assert second.run == first.run
    assert (first.attempt, second.attempt) == (0, 1)


def test_a_retry_waits_for_its_time_and_says_when() -> None:
    """The listener sleeps until then, and no longer."""
    one = subscription()
    one.ingest_item(change(1))
    one.ingest_item(change(2, index=1))
    due(one)
    one.observe(image(index=0, fencing_token=11, retries=1, due_in=30.0), NOW + 1)
    assert due(one, NOW + 30.9) == []
    assert one.next_due() == NOW + 31
    assert [numbers(run) for run in due(one, NOW + 31)] == [[1]]
    assert one.next_due() == float("inf")


def test_a_partition_that_stands_still_holds_its_changes_and_no_others() -> None:
    """P1, P9: the head stays, with everything behind it in order."""
    one = subscription(images={0: image(index=0, state="halted")})
    for number, index in enumerate([0, 1, 0], start=1):
        one.ingest_item(change(number, index=index))
    assert [numbers(run) for run in due(one)] == [[2]]
    one.observe(committed(1, 1, 2), NOW)
    assert taken(one) is None
    one.observe(image(index=0), NOW + 1)
    assert [numbers(run) for run in due(one, NOW + 1)] == [[1]]


def test_an_observed_commit_moves_the_watermark_over_the_prefix_only() -> None:
    """P5: a later partition that is done does not carry it past an earlier one that is not."""
    one = subscription()
    one.ingest_item(change(1, index=0))
    one.ingest_item(change(2, index=1))
    one.ingest_item(mark(3))
    due(one)
    one.observe(committed(1, 1, 2), NOW)
    assert taken(one) is None
    one.observe(committed(0, 1, 1), NOW)
    assert (taken(one), one.window.count, one.in_flight) == (token_data(3), 0, [])


def test_a_newer_term_is_reported_and_changes_nothing() -> None:
    """P3: the leader steps down; nothing is counted as done by it."""
    one = subscription()
    one.ingest_item(change(1))
    due(one)
    assert one.observe(replace(committed(0, 1, 1), term=VERSION + 1), NOW) is Step.SUPERSEDED
    assert one.window.count == 1


def test_a_message_that_is_sent_again_is_due_at_once() -> None:
    """It waited for the next reading of all partitions, up to a second."""
    one = subscription()
    one.ingest_item(change(1))
    assert [each.run.first for each in due(one)] == [1]
    one.partitions[0].note_sent(NOW)
    assert due(one) == []  # from now on nobody looks for it

    one.repeat(one.partitions[0], NOW)

    assert [each.run.first for each in due(one)] == [1]


# -- a handler that feeds itself -------------------------------------------------------------------


def _handle_rounds(one: Subscription, count: int, written: Callable[[int], int]) -> None:
    """
    Handle changes of one document.

    Args:
        written: milliseconds from the claim of the run before until the change was written; a run takes 50 of each 100.
    """
    for number in range(1, count + 1):
        before, claimed = BASE + timedelta(milliseconds=100 * (number - 1)), BASE + timedelta(milliseconds=100 * number)
        one.ingest_item(change(number, wallTime=before + timedelta(milliseconds=written(number))))
        list(one.due(NOW))  # it may be made out several times before it is published
        assert len(due(one)) == 1
        ran = {"last": number, "took": 40, "claimed": claimed, "at": claimed + timedelta(milliseconds=50)}
        one.observe(committed(0, number, number, ran=ran), NOW)


BASE = datetime(2024, 1, 1, tzinfo=UTC)


def test_a_handler_whose_changes_are_written_while_it_handles_the_one_before_seems_to_feed_itself() -> None:
    """P16: it loops for ever; so many in a row are no chance."""
    one = subscription()
    _handle_rounds(one, ROUNDS, lambda _: 10)
    assert one.feedback.report() is None
    one = subscription()
    _handle_rounds(one, ROUNDS + 1, lambda _: 50)
    found = one.feedback.report()
    assert found is not None
    assert found["count"] == ROUNDS
    assert found["key"].startswith("shop.orders")


@pytest.mark.parametrize(
    "written",
    [lambda _: 60, lambda _: -1, lambda _: 90, lambda number: 10 if number % (ROUNDS - 1) else 60],
    ids=["after the run", "before the run", "much later", "nearly always in it"],
)
def test_a_document_that_users_change_often_is_no_such_sign(written: Callable[[int], int]) -> None:
    """However often: a change that waited before the run, or came after it, is somebody else's."""
    one = subscription()
    _handle_rounds(one, 2 * ROUNDS, written)
    assert one.feedback.report() is None
