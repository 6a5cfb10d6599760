"""
A partition whose changes are stored, as one term knows it: how far it may run from what is stored, and what is read.

Pure: no client, no clock. Stored changes are run like buffered ones, in order and one run at a time, but only

1. behind what is committed, and up to `to`, the mark on the partition: what lies behind it is not promised to be there;
2. as far as this term knows that all of them are there, which is how far it has read the stream itself: what it reads
   at or below the mark may be more than what an earlier term has stored. It is stored again, and then run.

Memory has the next changes only. They are those that follow what is committed, without a gap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mongo_celery.bridge.state.spill import StoredChange
from mongo_celery.bridge.window import OVERHEAD_BYTES, PendingChange


class Limit(NamedTuple):
    """Up to where stored changes may be run: a comparable part of a token, and whether that place is inside."""

    place: str
    inclusive: bool


@dataclass(slots=True)
class Spilled:
    """
    The stored changes of one partition.

    Attributes:
        to: comparable part of the last one's token, as it is marked on the partition.
        read_to: up to where they are in memory, or committed.
        ahead: those in memory, in order.
        size: bytes that these take.
        exhausted: the limit up to which nothing more was found behind `read_to`; never the mark itself, which promises
            that there is something.
        missing: whether nothing was found although the mark promises it.
    """

    to: str
    read_to: str = ""
    ahead: deque[StoredChange] = field(default_factory=deque)
    size: int = 0
    exhausted: Limit | None = None
    missing: bool = False

    def limit(self, unread: str | None, seen: str) -> Limit:
        """
        Up to where they may be run.

        Args:
            unread: comparable part of the token of the first change that was read and is not stored; None without one.
            seen: that of the last place that was read.
        """
        if unread is not None and unread <= self.to:
            return Limit(unread, inclusive=False)
        return Limit(min(self.to, seen) if unread is None else self.to, inclusive=True)

    def complete(self, data: str) -> None:
        """Let go of what is committed."""
        while self.ahead and self.ahead[0].data <= data:
            self.size -= _weight(self.ahead.popleft())
        self.read_to = max(self.read_to, data)

    def forget(self, data: str) -> None:
        """Have nothing in memory of what lies behind this committed place; it is read again."""
        self.ahead.clear()
        self.read_to, self.size, self.exhausted = data, 0, None

    def head(self, limit: int, max_bytes: int) -> list[StoredChange]:
        """The next changes in memory: at least one where there is one, within both limits."""
        taken: list[StoredChange] = []
        size = 0
        for change in self.ahead:
            size += len(change.raw)
            if len(taken) >= limit or (taken and size > max_bytes):
                break
            taken.append(change)
        return taken

    def wants(self, limit: Limit, count: int) -> bool:
        """Whether fewer than so many changes are in memory, and more may be found."""
        return len(self.ahead) < count and self.has_more(limit)

    def has_more(self, limit: Limit) -> bool:
        """Whether anything may be found behind what is in memory."""
        return self.read_to < limit.place and self.exhausted != limit

    @property
    def known_to(self) -> str:
        """Up to where it is known what is stored."""
        return max(self.read_to, self.exhausted.place if self.exhausted is not None else "")

    def found(self, changes: Sequence[StoredChange], limit: Limit) -> None:
        """Take in what a search behind `read_to` has found up to a limit; nothing, if there is nothing."""
        if not changes:
            self.exhausted = limit if limit != Limit(self.to, inclusive=True) else None
            return
        self.missing = False
        self._take(changes)

    def stored(self, changes: Sequence[StoredChange], *, count: int, max_bytes: int) -> None:
        """
        Changes were stored, and the mark is behind them. The first ones stay in memory, if they are what comes next.

        Args:
            changes: in order, all that there are up to the last of them.
            count: how many changes may stay in memory.
            max_bytes: how many bytes.
        """
        comes_next = self.read_to >= self.to
        self.to = max(self.to, changes[-1].data)
        self.exhausted = None
        if comes_next:
            self._take(_first(changes, count - len(self.ahead), max_bytes - self.size))

    def _take(self, changes: Iterable[StoredChange]) -> None:
        for change in changes:
            if change.data > self.read_to:
                self.ahead.append(change)
                self.size += _weight(change)
                self.read_to = change.data


def stored_change(change: PendingChange) -> StoredChange:
    """A change as it is stored."""
    return StoredChange(change.data, change.raw, change.hash, change.refusal, change.token)


def _weight(change: StoredChange) -> int:
    return len(change.raw) + OVERHEAD_BYTES


def _first(changes: Sequence[StoredChange], count: int, max_bytes: int) -> Iterable[StoredChange]:
    for change in changes[: max(count, 0)]:
        max_bytes -= _weight(change)
        if max_bytes < 0:
            return
        yield change
