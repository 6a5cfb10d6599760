"""
The progress of snapshots, and why one that runs does not move: what blocks its handler blocks it.

Pure. The rate is that of the whole way so far: documents that were scanned, over the time since the start. The listener
begins a chunk by the same rules (`listener/snapshotting.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from bson import Timestamp

from mongo_celery.bridge.operations.bridge_snapshot import SnapshotStatus, to_plain
from mongo_celery.bridge.state.partitions import Image, is_mostly_blocked, visible_state
from mongo_celery.bridge.state.snapshots import FAILED, GONE, RUNNING, Snapshot
from mongo_celery.bridge.state.subscriptions import parse_lost_history, parse_name
from mongo_celery.command_line import ANY_APP, CommandLine

_SHOWN_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Surroundings:
    """
    What is around the snapshots of a bridge.

    Attributes:
        is_led: whether somebody leads.
        registered: the handlers of this app.
        served: those of the listener that leads; None where none is running.
        report: of the term that leads.
        lost: the subscriptions whose history is lost.
        images: the partitions of the layouts in force.
        line: beginning of the commands that it prints.
    """

    is_led: bool
    registered: Collection[str]
    served: Collection[str] | None = None
    report: Mapping[str, Any] = field(default_factory=dict)
    lost: Collection[str] = ()
    images: Sequence[Image] = ()
    line: CommandLine = ANY_APP

    def hindrance(self, snapshot: Snapshot) -> str | None:
        """What lets no chunk of a running one begin; None where nothing does."""
        if snapshot.state != RUNNING:
            return None
        why = self._keeps(snapshot.subscription)
        return None if why is None else f"waits: {why}"

    def tried(self, snapshot: Snapshot) -> str | None:
        """What the listener says of its last attempts, where these have failed."""
        if snapshot.state != RUNNING:
            return None
        tries = (each for each in self.report.get("snapshots", ()) if each["id"] == snapshot.id)
        return next((f"tried {each['attempts']} times in a row: {each['error']}" for each in tries), None)

    def _keeps(self, name: str) -> str | None:
        return self._absent(name) or self._standing(name)

    def _absent(self, name: str) -> str | None:
        """Nobody leads it."""
        if self.served is not None and name not in self.served:
            return "the listener that leads does not have its handler"
        if self.served is None and name not in self.registered:
            return "its handler is not in this app"
        return None if self.is_led else "nobody leads"

    def _standing(self, name: str) -> str | None:
        """It is led, and stands."""
        if name in self.lost:
            oldest, now = (self.line.changes("reset", name, "--to", place) for place in ("oldest", "now"))
            return f"its handler has lost its history: decide (`{oldest}` or `{now}`)"
        images = [image for image in self.images if image.subscription == name]
        states = Counter(map(visible_state, images))
        if not is_mostly_blocked(images):
            return None
        if states["paused"] == len(images):
            return f"its handler is paused (`{self.line.changes('resume', name)}`)"
        standing = ", ".join(f"{count} {state}" for state, count in sorted(states.items()) if state != "flowing")
        return f"{len(images) - states['flowing']} of {len(images)} partitions of its handler stand ({standing})"


def surroundings(
    lease: Mapping[str, Any] | None,
    registered: Collection[str],
    subscriptions: Sequence[Mapping[str, Any]],
    images: Sequence[Image],
    line: CommandLine,
) -> Surroundings:
    """What is around the snapshots, from the lease with its verdict, the app's handlers, and what is stored."""
    held = lease or {}
    is_led = bool(held.get("live")) and held.get("listenerId") is not None
    return Surroundings(
        is_led=is_led,
        registered=registered,
        served=(held.get("identity") or {}).get("handlers") if is_led else None,
        report=(is_led and held.get("report")) or {},
        lost={parse_name(each) for each in subscriptions if parse_lost_history(each)},
        images=images,
        line=line,
    )


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
