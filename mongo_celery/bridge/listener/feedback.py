"""
Detection of handlers that trigger themselves: each of their writes is the next change that they get.

If a change was written while the change before it, of the same key, was being handled, it may come from the handler
itself. By chance this happens a few times in a row. Users who write faster or slower than the handler soon write before
the run begins or after it ends. Both times are the server's. Before MongoDB 6.0 the time of a change is unknown, and
nothing is reported.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from bson.datetime_ms import DatetimeMS

from mongo_celery.bridge.change import describe
from mongo_celery.bridge.raw_event import RawEvent

if TYPE_CHECKING:
    from mongo_celery.bridge.state.partitions import Image
    from mongo_celery.bridge.window import PendingChange

ROUNDS = 200
"""If this many changes of one key in a row were written during the run before, it is not chance."""

_KEYS = 256
_RECENT_SECONDS = 60.0
_COUNTED_BY = 100


@dataclass(slots=True, eq=False)
class SentKey:
    """The changes of one key: its last run, and how many in a row were written during the run before."""

    ran: tuple[int, int] | None = None
    count: int = 0
    since: datetime = field(default_factory=lambda: datetime.now(UTC))
    data: str = ""
    sent_at: float = 0.0
    label: str = ""

    def note_end(self, image: Image) -> None:
        """Note when the run was claimed and committed, if known."""
        ran = image.ran if image.ran is not None and image.ran.get("last") == image.committed else None
        claimed, at = (None, None) if ran is None else (ran.get("claimed"), ran.get("at"))
        self.ran = None
        if isinstance(claimed, datetime) and isinstance(at, datetime):
            self.ran = (int(DatetimeMS(claimed)), int(DatetimeMS(at)))


class Feedback:
    """One handler's recently sent keys."""

    def __init__(self) -> None:
        self._keys: dict[int, SentKey] = {}

    def note_dispatch(self, change: PendingChange) -> SentKey:
        """Return the key of a run's first change, before the run is sent."""
        key = self._keys.pop(change.hash, None) or SentKey()
        self._keys[change.hash] = key
        if len(self._keys) > _KEYS:
            del self._keys[next(iter(self._keys))]
        if key.ran is not None and key.data != change.data:
            self._count(key, change.raw)
        key.data, key.sent_at = change.data, time.monotonic()
        return key

    def report(self) -> dict[str, Any] | None:
        """Return the key that triggers the handler most, rounded, so that reports do not always differ."""
        recent = time.monotonic() - _RECENT_SECONDS
        found = [key for key in list(self._keys.values()) if key.count >= ROUNDS and key.sent_at > recent]
        if not found:
            return None
        most = max(found, key=lambda key: key.count)
        return {"key": most.label, "count": max(most.count // _COUNTED_BY * _COUNTED_BY, ROUNDS), "since": most.since}

    def _count(self, key: SentKey, raw: bytes) -> None:
        event = RawEvent(raw)
        written, ran = event.get("wallTime"), key.ran
        if ran is None or not isinstance(written, DatetimeMS) or not ran[0] <= int(written) <= ran[1]:
            key.count = 0
            return
        if not key.count:
            key.since, key.label = datetime.now(UTC), describe(event)
        key.count += 1
