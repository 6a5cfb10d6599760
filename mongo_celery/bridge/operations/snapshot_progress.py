"""
The progress of a snapshot, and the reason if it does not advance. A blocked handler also blocks its snapshot.

The functions are pure. The rate is the average so far: scanned documents over the time since the start. The listener
begins a chunk by the same rules (`listener/snapshotting.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from mongo_celery.bridge.operations.bridge_snapshot import NOT_STARTED, BridgeSnapshot, SnapshotStatus
from mongo_celery.bridge.operations.times import to_time
from mongo_celery.bridge.state.snapshots import RUNNING, Snapshot


def describe_snapshot(snapshot: Snapshot, seen: BridgeSnapshot, tried: str | None = None) -> SnapshotStatus:
    """
    Return a snapshot's progress, and the reason if it waits.

    Args:
        seen: the bridge of the snapshots.
        tried: the listener's report of its last attempts, if they failed.
    """
    runs = snapshot.state == RUNNING
    hindrance = _find_hindrance(snapshot.subscription, seen) if runs else None
    begun, moved = to_time(snapshot.started_at or snapshot.since), to_time(snapshot.moved_at)
    seconds = (moved - begun).total_seconds() if begun is not None and moved is not None else 0.0
    rate = snapshot.done / seconds if seconds > 0 and snapshot.done else None
    left = None if snapshot.estimated is None else max(snapshot.estimated - snapshot.done, 0)
    moves = runs and hindrance is None and rate is not None and left is not None
    return SnapshotStatus(
        id=snapshot.id,
        handler=snapshot.subscription,
        source=snapshot.source,
        state=snapshot.state,
        done=snapshot.done,
        estimated=snapshot.estimated,
        per_second=None if rate is None else round(rate, 1),
        remaining_seconds=round((left or 0) / (rate or 1)) if moves else None,
        since=to_time(snapshot.since),
        moved_at=moved,
        by=snapshot.by,
        reason=snapshot.sentence or hindrance or (tried if runs else None),
    )


def describe_unrequested(reported: Mapping[str, Any]) -> SnapshotStatus:
    """Return a handler's initial snapshots that the listener cannot start yet, from its report."""
    return SnapshotStatus(
        id=reported["subscription"],
        handler=reported["subscription"],
        source=reported["source"],
        state=NOT_STARTED,
        done=0,
        estimated=None,
        per_second=None,
        remaining_seconds=None,
        since=None,
        by="start_from='snapshot'",
        reason=f"tried {reported['attempts']} times: {reported['error']}",
    )


def _find_hindrance(name: str, seen: BridgeSnapshot) -> str | None:
    """Return the reason why no chunk of a running snapshot can begin. None if there is no reason."""
    handler = next((each for each in seen.handlers if each.name == name and each.is_registered), None)
    if seen.leader is None:
        return f"waits: {'no listener is running' if handler is not None else 'its handler is not in this app'}"
    if name not in seen.leader.handlers:
        return "waits: the running listener does not have its handler"
    if handler is None:
        return None
    if handler.lost is not None:
        return "waits: its handler has lost its history"
    if handler.is_mostly_blocked:
        states = Counter(each.state for each in handler.partitions if each.is_blocked)
        blocked = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        return f"waits: of its handler's {len(handler.partitions)} partitions, {blocked}"
    return None
