"""A subscription in a term: what it takes in, and which runs it hands out with which numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import bson
import pytest
from bson import Timestamp

from mongo_celery.bridge.change import Change
from mongo_celery.bridge.handlers import make_handler
from mongo_celery.bridge.listener.partition import GracePeriods, Partition, Step
from mongo_celery.bridge.listener.subscription import Dispatch, Subscription, TermFacts
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.partitioning import Partitioner
from mongo_celery.bridge.state.backlog import StoredChange
from mongo_celery.bridge.state.partitions import Image
from mongo_celery.bridge.state.subscriptions import Layout
from mongo_celery.bridge.stream.items import ChangeEvent
from mongo_celery.bridge.window import Mark, Refusal
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
    for dispatch in one.due(now):
        found.append(dispatch)
        dispatch.partition.note_sent(now)
    return found


def numbers(dispatch: Dispatch) -> list[int]:
    """Places in the stream of the changes of a run, which travel or are stored."""
    if dispatch.run.stored:
        return [int(token[10:18], 16) for token in dispatch.run.stored]
    return [bson.decode(raw)["fullDocument"]["n"] for raw in dispatch.run.changes]


def taken(one: Subscription) -> str | None:
    """How far the watermark is."""
    return one.window.watermark.data if one.window.watermark else None


# Taking in


def elsewhere(number: int) -> ChangeEvent:
    """A change of a collection that the handler does not listen to."""
    return change(number, ns="shop.invoices")


@pytest.mark.parametrize(
    ("given", "read", "due_changes", "watermark"),
    [
        ({}, [elsewhere(1), mark(2)], [], 2),
        ({}, [change(1), change(2), change(1), change(2), change(3), mark(2)], [1, 2, 3], None),
        ({"watermark": mark(5)}, [change(4), change(5), change(6)], [6], 5),
        ({"images": {0: committed(0, 7, 5)}}, [change(4), change(5), change(6)], [6], 5),
        ({"start": 3}, [change(1), change(2), change(3)], [3], 2),
    ],
    ids=["not wanted", "a reopened stream repeats", "before the watermark", "committed", "before the start"],
)
def test_each_change_that_is_owed_is_dispatched_once_and_the_watermark_passes_all_others(
    given: dict[str, Any], read: list[ChangeEvent | Mark], due_changes: list[int], watermark: int | None
) -> None:
    """P1, P5, P6: the stream may begin before a watermark, and again at an earlier time."""
    one = subscription(run_size=10, **given)
    for item in read:
        one.ingest_item(item)
    assert [number for run in due(one) for number in numbers(run)] == due_changes
    assert one.window.count == len(due_changes)
    assert taken(one) == (None if watermark is None else token_data(watermark))


# Stored changes


def stored(number: int, refusal: Refusal | None = None) -> StoredChange:
    """The change with this place in the stream, as it is read back."""
    token = {"_data": token_data(number)} if refusal is not None else None
    return StoredChange(token_data(number), refusal=refusal, token=token, size=100)


def spilled(to: int, count: int = 0, number: int = 0, **changes: Any) -> Image:
    """A partition that is marked up to this place, with so many committed changes, the last at the other place."""
    mark_ = {"to": token_data(to), "since": None, "reason": "halted"}
    if not count:
        return image(index=0, stored=mark_, **changes)
    return committed(0, count, number, stored=mark_, **changes)


def test_stored_changes_run_like_all_others() -> None:
    """P2, P6: numbered at dispatch, within the limits, one at a time after an unclean end, a refused one alone."""
    one = subscription(images={0: spilled(9, 4, 1, one_by_one_until=6)}, watermark=mark(9), run_size=3)
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
        one.observe(spilled(9, count, count - 3, one_by_one_until=6), NOW)
    assert seen == [
        (5, [2], None),
        (6, [3], None),
        (7, [4, 5], None),
        (9, [6], mark(6).token),
        (10, [7, 8, 9], None),
    ]
    assert one.backlogs == []


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
        dispatch = next(iter(one.due(NOW + turn)))
        partition = dispatch.partition
        served.append(dispatch.run.index)
        partition.note_sent(NOW + turn)
        count = partition.image.committed + 1
        one.observe(committed(dispatch.run.index, count, numbers(dispatch)[-1]), NOW + turn)
    assert sorted(served[:4]) == sorted(served[4:]) == list(range(PARTITIONS))


@pytest.mark.parametrize(
    "seen",
    [image(index=0, claim={"owner": "a"}, live=True, fencing_token=11), image(index=0, state="halted")],
    ids=["by the term before", "by a person's skip"],
)
def test_numbers_are_given_at_dispatch_against_what_is_committed_then(seen: Image) -> None:
    """P2, P4, P6: a change that was finished elsewhere between reading and dispatch takes its number with it."""
    one = subscription(images={0: seen})
    for number in (1, 2, 3):
        one.ingest_item(change(number))
    assert due(one) == []
    one.observe(committed(0, 2, 2), NOW)
    (run,) = due(one)
    assert (run.run.first, run.run.last, numbers(run)) == (3, 3, [3])
    assert one.window.count == 1


def test_a_run_carries_as_many_changes_as_the_options_allow() -> None:
    """
    At least one, then as many as fit into both limits, numbered without gaps, with the bytes that were read.

    One where a transaction is one change and its mark, or where an unclean end is not passed yet.
    """
    one = subscription(run_size=3)
    for number in range(1, 6):
        one.ingest_item(change(number))
    (run,) = due(one)
    assert (run.run.first, run.run.last) == (1, 3)
    assert run.run.changes == [change(number).raw for number in (1, 2, 3)]
    assert run.label == "(shop.orders insert 0 seq=1 and 2 more)"
    size = len(change(1).raw)
    for options, expected in (
        ({"run_bytes": 1}, [1]),
        ({"run_bytes": 2 * size}, [1, 2]),
        ({"max_message_bytes": 3 * size - 1}, [1, 2]),
        ({"transactional": True}, [1]),
        ({"images": {0: image(index=0, one_by_one_until=2)}}, [1]),
    ):
        small = subscription(run_size=3, **options)
        for number in range(1, 6):
            small.ingest_item(change(number))
        assert numbers(due(small)[0]) == expected


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
    single = subscription(batch_size=3, images={0: image(index=0, one_by_one_until=5)})
    for number in range(1, 4):
        single.ingest_item(change(number))
    (run,) = due(single)
    assert (numbers(run), run.run.hashes) == ([1], ())


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
