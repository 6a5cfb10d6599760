"""Why a partition is blocked: P12."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from mongo_celery.bridge.listener.partition import GracePeriods, Partition, Rejection
from mongo_celery.bridge.listener.storing import block_reason
from tests.fixtures.samples import image


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
