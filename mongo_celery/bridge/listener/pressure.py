"""
Detection of partitions that are idle because the buffer is full of changes of other partitions.

The module is pure: its input is measurements and the time. A normal backlog stays in memory, and the stream waits:
storing it would cost the state database twice the cost of the changes. But while the buffer is full of some partitions'
changes, an idle partition waits for changes that are not read. When one has been idle for two seconds, the largest
partitions are stored until the buffer is half empty, at most the buffer's size twice a minute. So most of a backlog of
a few busy keys bypasses the state database.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable

_IDLE_SECONDS = 2.0
_MINUTE = 60.0


class Pressure:
    """
    The fill level of a bridge's buffer, and whether it keeps partitions idle.

    Args:
        bound: size limit of the buffer in bytes.

    Attributes:
        is_full: True if it was full, and has not been half empty since.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._idle: dict[Hashable, float] = {}
        self.is_full = self._is_storing = False
        self._credit = 2.0 * bound
        self._observed_at: float | None = None

    def observe(self, size: int, idle: Collection[Hashable], now: float) -> None:
        """
        Take in the size of the buffer, and the flowing partitions without work.

        Args:
            idle: partitions that may get the next changes. Empty if the stream has no more changes.
        """
        if self._observed_at is not None:
            earned = 2.0 * self._bound * (now - self._observed_at) / _MINUTE
            self._credit = min(self._credit + earned, 2.0 * self._bound)
        self._observed_at = now
        if size >= self._bound:
            self.is_full = True
        elif size < self._bound / 2:
            self.is_full = self._is_storing = False
        self._idle = {each: self._idle.get(each, now) for each in idle} if self.is_full else {}
        if any(now - since >= _IDLE_SECONDS for since in self._idle.values()):
            self._is_storing = True

    @property
    def must_store(self) -> bool:
        """Return True if changes must be stored until the buffer is half empty."""
        return self._is_storing and self._credit > 0

    def note_stored(self, size: int, left: int) -> None:
        """Note the number of bytes that were stored from the buffer, and of those that are left."""
        self._credit -= size
        if left < self._bound / 2:
            self.is_full = self._is_storing = False
