"""
Why a snapshot that runs does not move: what keeps its handler keeps it.

Pure: from what `status` reads anyway. The listener begins a chunk by the same rules (`listener/snapshotting.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mongo_celery.bridge.state.partitions import Image, is_mostly_blocked, visible_state
from mongo_celery.bridge.state.snapshots import RUNNING, Snapshot
from mongo_celery.bridge.state.subscriptions import parse_lost_history, parse_name
from mongo_celery.command_line import ANY_APP, CommandLine


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
