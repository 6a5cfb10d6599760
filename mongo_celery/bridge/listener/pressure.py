"""
A full buffer, and partitions that have nothing to do behind it.

Pure: what is measured comes in, with the time. A normal backlog stays in memory, and the stream waits for it: storing
it would cost the state database twice what the changes cost anyway. But a partition that has nothing to do while the
buffer is full of others waits for changes that nobody reads. As soon as one has been idle for two seconds, the largest
are stored until the buffer is half empty: in a minute no more than the buffer has, twice. So most of a backlog of a few
busy keys does not take the way through the state database.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable

_IDLE_SECONDS = 2.0
_MINUTE = 60.0


class Pressure:
    """
    The buffer of one bridge, as far as others are kept waiting by it.

    Args:
        bound: the buffer's bytes.

    Attributes:
        is_full: whether it was full, and has not been half empty since.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._idle: dict[Hashable, float] = {}
        self.is_full = self._is_storing = False
        self._credit = 2.0 * bound
        self._observed_at: float | None = None

    def observe(self, size: int, idle: Collection[Hashable], now: float) -> None:
        """
        Take in how many bytes the buffer has, and which flowing partitions have nothing to do.

        Args:
            idle: those that have had something to do before. Empty where the stream has nothing more to give.
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
        """Return True if changes are to be stored until the buffer is half empty."""
        return self._is_storing and self._credit > 0

    def note_stored(self, size: int, left: int) -> None:
        """So many bytes were taken out of the buffer and stored, which has so many left."""
        self._credit -= size
        if left < self._bound / 2:
            self.is_full = self._is_storing = False
