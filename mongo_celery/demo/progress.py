"""How far a run is, as the bridge's own state and the writer's record show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pymongo import MongoClient

from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.state.partitions import Image
from mongo_celery.bridge.state.store import Store
from mongo_celery.bridge.state.subscriptions import layouts_in_force
from mongo_celery.demo.record import Record
from mongo_celery.demo.setting import NAME_INTO_ORDER, DemoSetting


@dataclass(frozen=True, slots=True)
class Progress:
    """
    One look at a run.

    Attributes:
        phase: what the demo is doing.
        seconds: since its start.
        total: writes that are planned.
        written: writes that the writer has recorded.
        committed: of these, how many all their handlers have finished.
        changes_per_second: that were committed while nothing was broken, None until it is known.
        holder: process id of the listener that holds the lease now, None while nobody does.
        version: of the lease.
        takeover_seconds: from the kill of the leading listener to the next acquisition.
        events: what has happened, a sentence each.
    """

    phase: str
    seconds: float = 0.0
    total: int = 0
    written: int = 0
    committed: int = 0
    changes_per_second: float | None = None
    holder: int | None = None
    version: int | None = None
    takeover_seconds: float | None = None
    events: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BridgeState:
    """The bridge's own state: the lease, and what partitions have committed."""

    lease: Mapping[str, Any] | None
    committed: Mapping[str, int]
    standing: tuple[Image, ...] = field(default=())

    @property
    def version(self) -> int:
        """The lease's version; 0 before the first acquisition."""
        return int(self.lease["term"]) if self.lease else 0

    @property
    def holder(self) -> int | None:
        """Process id of the listener that holds the lease now."""
        return int(self.lease["pid"]) if self.lease and self.lease["live"] else None

    def missing(self, record: Record) -> dict[str, int]:
        """For each handler the changes that were recorded and are not committed."""
        return {name: max(due - self.committed.get(name, 0), 0) for name, due in record.due.items()}

    def done(self, record: Record) -> int:
        """How many recorded writes their handlers have finished: at most, and exact when nothing is missing."""
        missing = self.missing(record)
        again = missing.pop(NAME_INTO_ORDER)  # inserts of orders, which `summarise` handles too
        return len(record.writes) - max(sum(missing.values()), again)


class StateReader:
    """Reads the state of a run's bridge."""

    def __init__(self, client: MongoClient[dict[str, Any]], setting: DemoSetting) -> None:
        self._store = Store(client, BridgeOptions(**setting.bridge_options))

    def read(self) -> BridgeState:
        """One look."""
        lease = self._store.leases.read()
        committed: Counter[str] = Counter()
        if lease is None:
            return BridgeState(None, committed)
        layouts = layouts_in_force(self._store.subscriptions.read_all())
        images = self._store.partitions.of({name: layout.generation for name, layout in layouts.items()})
        for image in images:
            committed[image.subscription] += image.committed
        return BridgeState(lease, committed, tuple(image for image in images if image.state != "flowing"))
