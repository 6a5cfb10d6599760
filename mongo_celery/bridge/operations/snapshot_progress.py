"""
How far snapshots are, as people and JSON see it.

Pure. The rate is that of the whole way so far: documents that were scanned, over the time since the start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from bson import Timestamp

from mongo_celery.bridge.operations.bridge_snapshot import SnapshotStatus, to_plain
from mongo_celery.bridge.operations.snapshot_waits import Surroundings
from mongo_celery.bridge.state.snapshots import FAILED, GONE, RUNNING, Snapshot

_SHOWN_SECONDS = 3600


def snapshots_shown(snapshots: Sequence[Snapshot], now: Timestamp, around: Surroundings) -> tuple[SnapshotStatus, ...]:
    """Return those that run, that have failed, and that have ended within the last hour."""
    shown = [each for each in snapshots if each.state in (RUNNING, FAILED, GONE) or _is_recent(each, now)]
    return tuple(describe_snapshot(each, around) for each in shown)


def progress_of(snapshot: Snapshot, around: Surroundings) -> dict[str, Any]:
    """Return the progress of one as JSON."""
    found: dict[str, Any] = to_plain(describe_snapshot(snapshot, around))
    return found


def describe_snapshot(snapshot: Snapshot, around: Surroundings) -> SnapshotStatus:
    """Return the progress of one, and what it waits for."""
    hindrance = around.hindrance(snapshot)
    moves = snapshot.state == RUNNING and hindrance is None
    rate = _rate(snapshot)
    left = None if snapshot.estimated is None else max(snapshot.estimated - snapshot.done, 0)
    return SnapshotStatus(
        id=snapshot.id,
        handler=snapshot.subscription,
        source=snapshot.source,
        state=snapshot.state,
        done=snapshot.done,
        estimated=snapshot.estimated,
        per_second=None if rate is None else round(rate, 1),
        remaining_seconds=round(left / rate) if rate and left is not None and moves else None,
        since=None if snapshot.since is None else _aware(snapshot.since),
        by=snapshot.by,
        reason=snapshot.sentence or hindrance or around.tried(snapshot),
    )


def short_names(ids: Iterable[str]) -> dict[str, str]:
    """
    As much of each `_id` as tells it from the others: its end, or the handler and its end.

    Handlers that begin with snapshots of one collection at the same moment have the same end there.
    """
    known = list(ids)
    ends = Counter(each.rpartition("/")[2] for each in known)
    return {each: each.split("/", 2 if ends[each.rpartition("/")[2]] == 1 else 1)[-1] for each in known}


def named(snapshot_id: str, name: str) -> bool:
    """Whether somebody who says this may mean it: all of its `_id`, the handler and its end, or its end."""
    return name in {snapshot_id.split("/", split)[-1] for split in range(3)}


def _rate(snapshot: Snapshot) -> float | None:
    since, until = snapshot.started_at or snapshot.since, snapshot.moved_at
    if since is None or until is None or not snapshot.done:
        return None
    seconds = (until - since).total_seconds()
    return snapshot.done / seconds if seconds > 0 else None


def _is_recent(snapshot: Snapshot, now: Timestamp) -> bool:
    ended = snapshot.moved_at or snapshot.since
    return ended is not None and now.time - _aware(ended).timestamp() < _SHOWN_SECONDS


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
