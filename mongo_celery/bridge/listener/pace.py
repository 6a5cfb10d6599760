"""
The pace of a snapshot: how many documents its next chunk has, and when that may begin.

As many as workers handle in a second or two, so that changes behind them do not wait for long. Judged by the chunk's
own part of each partition, whatever was buffered in front of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.verdicts import is_outage, is_unanswered

if TYPE_CHECKING:
    from mongo_celery.bridge.listener.chunks import Chunk

FIRST_SIZE, LARGEST_SIZE = 200, 5000
"""Documents of a chunk."""

ATTEMPTS_MAX = 20
"""Chunks that fail one after the other although all servers answer; then the snapshot has failed."""

PAUSES = Pauses(first=0.5, longest=30.0, jitter=0.2)
"""Between two attempts that fail."""

_SMALL_SIZE = 100  # below it, the fixed cost of a chunk counts most
_QUICK_SECONDS, _SLOW_SECONDS = 1.5, 6.0


@dataclass(slots=True)
class ChunkPace:
    """
    The pace of one snapshot in this term.

    Attributes:
        size: of its next chunk.
        ready_at: monotonic time from which that may begin.
        failures: chunks that have failed, one after the other.
        errors: of these, those for which no outage can be the reason.
        error: why the last one has failed, in words. None where it has not.
    """

    size: int
    ready_at: float = 0.0
    failures: int = 0
    errors: int = 0
    error: str | None = None

    @property
    def is_hopeless(self) -> bool:
        """Return True if there is no point in trying again."""
        return self.errors >= ATTEMPTS_MAX

    def limit_size(self, rate: float | None) -> int:
        """Of the next chunk, where so many documents a second are allowed."""
        return self.size if rate is None else max(1, min(self.size, int(rate)))

    def note_read(self, chunk: Chunk, room: int) -> None:
        """A chunk was read. `room` is how many bytes it should have at most."""
        self.failures, self.errors, self.error = 0, 0, None
        if chunk.weight > room:
            self.size = max(1, chunk.size * room // chunk.weight)

    def note_handled(self, chunk: Chunk) -> None:
        """All of a chunk is done."""
        if chunk.seconds < _QUICK_SECONDS and chunk.size == self.size:
            self.size = min(2 * self.size, LARGEST_SIZE)
        elif chunk.seconds > _SLOW_SECONDS:
            self.size = max(self.size // 2, min(self.size, _SMALL_SIZE))
        if chunk.snapshot.rate:
            self.ready_at = max(self.ready_at, chunk.sent_at + chunk.count / chunk.snapshot.rate)

    def note_failure(self, error: Exception, text: str, size: int, now: float) -> float:
        """
        A chunk of this size has failed.

        Returns:
            Seconds to the next attempt.
        """
        self.failures += 1
        self.errors += not (is_unanswered(error) or is_outage(error))
        self.error = text
        self.size = max(size // 2, 1)
        pause = PAUSES.nth(self.failures - 1)
        self.ready_at = now + pause
        return pause
