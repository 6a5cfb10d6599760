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
from mongo_celery.bridge.listener.subscription import Dispatch, Subscription
from mongo_celery.bridge.listener.term_facts import TermFacts
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.partitioning import Partitioner
from mongo_celery.bridge.state.partitions import Image
from mongo_celery.bridge.state.subscriptions import Layout
from mongo_celery.bridge.stream.items import ChangeEvent
from mongo_celery.bridge.window import Mark
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
    batch_size: int | None = None,
    delay: float | None = None,
    coalesce: bool = False,
    **options: Any,
) -> Subscription:
    made = BridgeOptions(name="shop", partitions=PARTITIONS, **options)
    given = {"transactional": transactional, "delay": delay, "coalesce": coalesce}
    handler = make_handler(handle, ("shop.orders",), made, task_name="shop.handle", given=given, batch_size=batch_size)
    layout, begin = Layout(3, PARTITIONS, "blake2b-64:_id"), Timestamp(1000, start)
    plan = TermFacts(handler, handler.selector(None), Chosen("test", id_of), layout, VERSION, begin, watermark)
    partitions = {
        index: Partition(
            f"shop/handle/3/{index}",
            (images or {}).get(index, image(index=index)),
            VERSION,
            GracePeriods(8.0, 3.0),
            NOW,
        )
        for index in range(PARTITIONS)
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


@pytest.mark.parametrize(
    ("given", "read", "due_changes", "watermark"),
    [
        ({}, [change(1, ns="shop.invoices"), mark(2)], [], 2),
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


# Handing out


def test_one_run_is_out_in_a_partition_and_partitions_are_independent() -> None:
    """P2: window 1. P1, P5: a blocked partition holds its changes, no others, and the watermark."""
    one = subscription(images={2: image(index=2, state="halted")}, commit="inline")
    for number, index in enumerate([0, 0, 1, 1, 2], start=1):
        one.ingest_item(change(number, index=index))
    sent = due(one)
    assert sorted(numbers(run) for run in sent) == [[1], [3]]
    assert not any(run.commits for run in sent), "each of them commits inline"
    assert due(one, NOW + 1) == []
    assert one.observe(committed(1, 1, 3), NOW + 1) is Step.ENDED
    assert [numbers(run) for run in due(one, NOW + 1)] == [[4]]
    assert taken(one) is None
    one.observe(committed(0, 1, 1), NOW + 1)
    assert taken(one) == token_data(1)
    one.observe(image(index=2), NOW + 2)
    assert [5] in [numbers(run) for run in due(one, NOW + 2)]


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


@pytest.mark.parametrize("transactional", [True, False])
def test_a_bulk_handler_gets_runs_of_its_own_size_with_the_keys_of_all(transactional: bool) -> None:
    """P6: any of them may become the one that fails, and its policy needs its key."""
    for images, sent, hashes in (
        ({}, [1, 2, 3], (0, 0, 0)),
        ({0: image(index=0, one_by_one_until=5)}, [1], ()),
    ):
        one = subscription(run_size=1, batch_size=3, transactional=transactional, images=images)
        for number in range(1, 6):
            one.ingest_item(change(number))
        (run,) = due(one)
        assert (numbers(run), run.run.hashes) == (sent, hashes)


# Delays


def delayed(at: float, **options: Any) -> Subscription:
    """A subscription with a delay of ten seconds, whose server shows this time. Its changes are of the time 1000."""
    one = subscription(delay=10, **options)
    assert one.delay is not None
    one.delay.observe(at - NOW, float("inf"))
    return one


def test_a_delayed_partition_is_next_when_its_change_is_due() -> None:
    """P17: nothing polls for it, and a command that passes the change ends its wait."""
    one = delayed(1003)
    one.ingest_item(change(1))
    one.ingest_item(change(2, 1))
    assert due(one) == []
    assert one.next_due() == NOW + 8
    assert one.report_delayed() is not None
    one.observe(committed(0, 1, 1), NOW)
    assert one.partitions[0].delayed_until == 0
    assert [numbers(each) for each in due(one, NOW + 8)] == [[2]]
    assert one.report_delayed() is None


def test_a_change_that_was_tried_does_not_wait_for_later_ones() -> None:
    """Its own retry time decides, and it is alone as its counts are."""
    one = delayed(1012, coalesce=True, run_size=5, images={0: image(retry={"count": 1}, retries=1)})
    one.ingest_item(change(1))
    later = change(2)
    data = f"82{1009:08x}{2:08x}2b02"
    one.ingest_item(ChangeEvent(Mark({"_data": data}, data, Timestamp(1009, 2)), later.document, later.raw))
    assert [numbers(each) for each in due(one)] == [[1]]
