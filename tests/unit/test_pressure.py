"""Changes that are stored since the buffer is full: P12, and a normal backlog that costs nothing."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from mongo_celery.bridge.listener.partition import GracePeriods, Partition, Rejection
from mongo_celery.bridge.listener.pressure import Pressure
from mongo_celery.bridge.listener.storing import block_reason
from tests.fixtures.samples import image

BOUND = 1000
FULL, HALF = BOUND, BOUND // 2
IDLE = ["quiet"]


def make_partition(rejected: bool = False, **changes: Any) -> Partition:
    """A partition that is as said."""
    found = Partition("shop/record/0/0", image(**changes), 1, GracePeriods(8.0, 3.0), 0.0)
    if rejected:
        found.note_rejected(Rejection("a", 1, "too large", datetime.now(UTC), 1, 1.0))
    return found


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"state": "halted"}, "halted"),
        ({"state": "paused"}, "paused"),
        ({"due_in": 3.0}, "retrying"),
        ({"claim": {"owner": "x", "last": 1}, "live": True}, "running"),
        ({"rejected": True}, "rejected"),
    ],
)
def test_a_partition_is_blocked_where_no_further_worker_would_run_it(changes: dict[str, Any], why: str | None) -> None:
    """P12: a partition that waits for a worker is plain backlog."""
    assert block_reason(make_partition(**changes)) == why


def test_changes_are_stored_once_a_partition_is_idle_for_two_seconds_of_a_full_buffer() -> None:
    """P12: and until the buffer is half empty."""
    pressure, found = Pressure(BOUND), []
    for size, now in ((FULL - 1, 0.0), (FULL - 1, 5.0), (FULL, 10.0), (FULL - 1, 11.9), (FULL - 1, 12.0)):
        pressure.observe(size, IDLE, now)
        found.append(pressure.must_store)
    for left in (HALF, HALF - 1):
        pressure.note_stored(100, left)
        found.append(pressure.must_store)
    pressure.observe(HALF - 1, IDLE, 20.0)
    assert [*found, pressure.must_store] == [False, False, False, False, True, True, False, False]


def test_who_was_fed_meanwhile_is_not_idle_for_long() -> None:
    """Time counts without a pause, for each partition of its own."""
    pressure = Pressure(BOUND)
    for second in range(10):
        pressure.observe(FULL, [f"partition {second}"], float(second))
    assert not pressure.must_store


def test_a_buffer_that_was_half_empty_begins_anew() -> None:
    """Only a full buffer keeps somebody waiting."""
    pressure = Pressure(BOUND)
    pressure.observe(FULL, IDLE, 0.0)
    pressure.observe(HALF - 1, IDLE, 1.5)
    pressure.observe(FULL, IDLE, 1.6)
    pressure.observe(FULL, IDLE, 3.0)
    assert not pressure.must_store
    pressure.observe(FULL, IDLE, 3.6)
    assert pressure.must_store


def test_two_buffers_a_minute_are_stored_at_most() -> None:
    """Most of a backlog of a few busy keys does not take the way through the state database."""
    pressure, stored = Pressure(BOUND), 0
    for second in range(600):
        pressure.observe(FULL, IDLE, float(second))
        while pressure.must_store:
            pressure.note_stored(100, FULL)
            stored += 100
    assert 20 * BOUND <= stored <= 22 * BOUND
