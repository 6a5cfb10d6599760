"""What a listener counts of its own work, from images of partitions; and whether it is said to be alive."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mongo_celery.bridge.listener import activity as module
from mongo_celery.bridge.listener.activity import BUCKETS, Activity, HandlerActivity, Latencies
from mongo_celery.bridge.listener.dispatcher import Dispatch
from mongo_celery.bridge.listener.partition import GracePeriods, Partition
from mongo_celery.bridge.worker.envelope import Run
from tests.fixtures.samples import image

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


def dispatch(first: int = 1, last: int = 1, **changes: Any) -> Dispatch:
    run = Run("shop", "summarise", 0, 0, 1, first, last, **changes)
    return Dispatch(run, "shop.summarise", 0, "(a change)", "shop.0")


def sent(count: int) -> tuple[HandlerActivity, Partition]:
    """A partition to which a run of so many changes was sent at 100."""
    partition = Partition("shop/summarise/0/0", image(), 1, GracePeriods(15.0, 5.0), 99.0)
    partition.note_sent(100.0, count)
    return HandlerActivity(), partition


def ran(last: int, took: int = 300, claimed: float = 0.0, committed: float = 0.5) -> dict[str, Any]:
    """What a commit leaves: claimed and committed so many seconds after noon, the handler in milliseconds."""
    return {
        "last": last,
        "took": took,
        "claimed": NOON + timedelta(seconds=claimed),
        "at": NOON + timedelta(seconds=committed),
    }


def test_a_run_is_measured_by_one_clock_at_a_time() -> None:
    """Sent at 100 and read at 101 by mine; claimed 0.6 s before it was read, by the server's."""
    seen, partition = sent(1)
    seen.observe(partition, image(committed=1, ran=ran(1), read_at=NOON + timedelta(seconds=0.6)), 101.0)
    assert seen.committed == 1
    assert seen.handler.sum == pytest.approx(0.3)
    assert seen.commit.sum == pytest.approx(0.2)
    assert seen.claim.sum == pytest.approx(0.4)


def test_a_run_that_records_how_far_it_is_is_measured_where_it_ends() -> None:
    """The times of its claim are not lost with the first record."""
    seen, partition = sent(3)
    further = image(committed=2, claim={"first": 3}, live=True)
    seen.observe(partition, further, 101.0)
    partition.observe(further, 101.0)
    assert (seen.committed, seen.handler.sum, seen.claim.sum) == (2, 0, 0)
    seen.observe(partition, image(committed=3, ran=ran(3), read_at=NOON + timedelta(seconds=0.6)), 101.0)
    assert seen.committed == 3
    assert seen.handler.sum == pytest.approx(0.3)
    assert seen.claim.sum == pytest.approx(0.4)


@pytest.mark.parametrize(
    "left",
    [
        None,
        {},
        ran(1),
        {**ran(2), "took": None},
        {**ran(2), "took": "long"},
        {**ran(2), "claimed": "noon"},
        {"last": 2},
    ],
)
def test_what_is_passed_over_or_damaged_is_counted_and_not_measured(left: Any) -> None:
    """A dead letter, a skip, a field that somebody else has written."""
    seen, partition = sent(2)
    seen.observe(partition, image(committed=2, ran=left, read_at=NOON), 101.0)
    assert (seen.committed, sum(seen.handler.counts), sum(seen.claim.counts)) == (2, 0, 0)


def test_a_run_of_another_listener_has_no_time_of_its_sending() -> None:
    """One that was adopted at a take-over, or that was sent for another place."""
    for numbers in (range(0), range(7, 9)):
        seen, partition = sent(0)
        partition.sent = numbers, 100.0
        seen.observe(partition, image(committed=1, ran=ran(1), read_at=NOON), 101.0)
        assert (sum(seen.handler.counts), sum(seen.claim.counts)) == (1, 0)


def test_attempts_are_counted_as_they_are_seen() -> None:
    """Of the change at the head; when the position moves, those of the next one begin at 0."""
    seen, partition = sent(0)
    waiting = {"count": 2, "cause": "away"}
    states = [
        image(),
        image(retries=1),
        image(retries=3, crashes=1),
        image(retries=3, crashes=1, waiting=waiting),
        image(committed=1),
        image(committed=1, retries=1),
        image(committed=1),  # a person had it run again, its attempts counted anew
        image(committed=2, retries=2),
    ]
    for state in states:
        seen.observe(partition, state, 0.0)
        partition.image = state
    assert (seen.retries, seen.crashes, seen.waits, seen.committed) == (6, 1, 2, 2)


def test_what_is_sent_again_is_told_apart_and_a_replay_is_neither() -> None:
    seen = HandlerActivity()
    seen.note_sent(dispatch(1, 3), again=False)
    seen.note_sent(dispatch(1, 3), again=True)
    seen.note_sent(dispatch(4, 4, dead_letter="letter"), again=False)
    assert (seen.dispatched, seen.dispatched_again) == (6, 3)


def test_latencies_fall_into_the_first_bucket_that_has_room() -> None:
    latencies = Latencies()
    for seconds in (-1.0, 0.005, 0.0051, BUCKETS[-1] + 1):
        latencies.add(seconds)
    assert latencies.counts == [2, 1, *[0] * (len(BUCKETS) - 2), 1]
    assert latencies.sum == pytest.approx(0.0101 + BUCKETS[-1] + 1)


def test_reopenings_of_several_terms_add_up() -> None:
    """A term counts its own from 0; the process never goes back."""
    activity = Activity("shop", ["summarise"], 15.0)
    for counts in ([0, 2, 2, 3], [0, 1]):
        activity.note_term_begin()
        for count in counts:
            activity.note_sweep(count)
        activity.note_term_end()
    assert (activity.reopenings, activity.takeovers, activity.sweeps) == (4, 2, 6)


def test_a_loop_that_does_not_turn_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is known to rest, as one that has failed does before it is started again."""
    monkeypatch.setattr(module, "STALLED_SECONDS", -math.inf)
    resting = Activity("shop", [], -1.0)
    resting.note_turn(60.0)
    assert [each.is_alive for each in (Activity("shop", [], -1.0), resting, Activity("shop", [], 15.0))] == [
        False,
        True,
        True,
    ]


def test_a_listener_is_ready_while_it_leads_or_stands_by() -> None:
    """Not before it has reached its servers, and not while it rests after a failure."""
    activity = Activity("shop", [], 15.0)
    found = [activity.is_ready]
    for step in (
        activity.note_standby,
        activity.note_term_begin,
        activity.note_term_end,
        lambda: activity.note_failure(60.0),
    ):
        step()
        found.append(activity.is_ready)
    assert found == [False, True, True, True, False]
    assert activity.is_alive


def test_counts_of_stored_and_undeliverable_changes_are_taken_once() -> None:
    seen, counted = HandlerActivity(), [3, 1]
    seen.add_counts(counted)
    seen.add_counts(counted)
    assert (seen.stored, seen.undeliverable, counted) == (3, 1, [0, 0])


def test_an_image_is_the_same_whenever_it_was_read() -> None:
    """The partition compares images to see whether somebody has written."""
    assert image(read_at=NOON) == replace(image(), read_at=None)


def test_a_rate_is_that_of_the_last_ten_seconds() -> None:
    """Whoever asks more often than once a second gets the same samples."""
    seen = HandlerActivity()
    assert seen.sample_rate(100.0) is None
    seen.committed = 30
    assert [seen.sample_rate(at) for at in (100.5, 103.0)] == [None, 10.0]
    assert [seen.sample_rate(at) for at in (106.0, 112.5, 130.0)] == [5.0, 0.0, None]
