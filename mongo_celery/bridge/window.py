"""
The window of a subscription: what has been read and is not yet done.

Pure: no client, no clock, no threads. One window belongs to one subscription in one term.

Two views of the same changes:

- `order`, in stream order, decides the low watermark: the last token of the completed *prefix*. A
  maximum over what is done would pass a change that is not (invariant P5).
- a `Queue` for each partition decides what may run next. Its head is what is in flight.

A change that the subscription does not match, or that its partition has already committed, is a
completed item; neighbours fold into one, so that a quiet subscription beside a busy one moves on and
costs nothing. Changes that are done behind one that is not fold too, from time to time, so that a partition
that is blocked beside busy ones does not make the window grow. A post-batch token is an item too, at its
place in the stream; read as a variable beside the window it would pass changes that are still under way.

Changes are known by their token, never by a number given at reading: numbers are given at dispatch,
against what is committed then.

What is stored in the state database, and marked there, is completed here like what is committed: nothing but its
partition waits for it any more.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bson import Timestamp

from mongo_celery.bridge.existing import END, opens_stream
from mongo_celery.mongo.verdicts import storable

_CHARS = 1000


@dataclass(frozen=True, slots=True)
class Refusal:
    """
    The reason for which one change is refused. Make it with `because`.

    Attributes:
        reason: a sentence for people, bounded and storable.
        halts: whether the partition halts under every failure policy, since the cause is the bridge's configuration
            and not the change: to move to the dead letters or to skip would drop every change that the
            configuration spoils.
        lasts: whether the event was read with less than was asked for: its bytes are never judged again.
    """

    reason: str
    halts: bool = False
    lasts: bool = False

    @classmethod
    def because(cls, reason: str, *, halts: bool = False, lasts: bool = False) -> Refusal:
        """A refusal with as much of a reason as can be stored."""
        return cls(storable(reason[:_CHARS]), halts, lasts)


OVERHEAD_BYTES = 200
"""The memory that a change takes beside its own bytes."""

_two_numbers = struct.Struct("<II").unpack
_FOLD_FACTOR = 4
_FOLD_SLACK = 1000


class Mark:
    """
    A place in the stream: a resume token, its comparable part, and its cluster time.

    There are as many as changes, and of most only the comparable part is ever read. So the rest may be given as
    what it is made of.

    Args:
        token: whole; None for one that has nothing but its comparable part.
        data: its comparable part.
        cluster_time: as such, or as the eight bytes that BSON has for it.
    """

    __slots__ = ("_time", "_token", "data")

    def __init__(self, token: Mapping[str, Any] | None, data: str, cluster_time: Timestamp | bytes | None) -> None:
        self.data = data
        self._token = token
        self._time = cluster_time

    @property
    def token(self) -> Mapping[str, Any]:
        """The whole token."""
        return {"_data": self.data} if self._token is None else self._token

    @property
    def cluster_time(self) -> Timestamp | None:
        """The cluster time; None where it is not known."""
        if isinstance(self._time, bytes):
            increment, seconds = _two_numbers(self._time)
            self._time = Timestamp(seconds, increment)
        return self._time

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mark):
            return NotImplemented
        return (self.data, self.token, self.cluster_time) == (other.data, other.token, other.cluster_time)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Mark({dict(self.token)!r}, {self.cluster_time!r})"


@dataclass(slots=True, eq=False)
class PendingChange:
    """
    One change of one partition that is not yet committed; a refused one is not given to its handler.

    Attributes:
        hash: of its partition key; the index follows from it, unless the change is stored in another partition.
    """

    mark: Mark
    index: int
    raw: bytes
    refusal: Refusal | None = None
    hash: int = 0
    done: bool = False

    @property
    def data(self) -> str:
        """Comparable part of its token."""
        return self.mark.data

    @property
    def token(self) -> Mapping[str, Any] | None:
        """The whole token of a refused change, whose bytes may not give it; None for all others."""
        return self.mark.token if self.refusal is not None else None

    @property
    def weight(self) -> int:
        """Bytes that it takes in memory."""
        return len(self.raw) + OVERHEAD_BYTES


@dataclass(slots=True, eq=False)
class _Completed:
    mark: Mark
    done: bool = True


class Queue:
    """
    The changes of one partition that were read and are not done, in stream order.

    Attributes:
        changes: to be read alone.
        size: bytes that they take in memory.
    """

    __slots__ = ("changes", "size")

    def __init__(self) -> None:
        self.size = 0
        self.changes: deque[PendingChange] = deque()

    def __len__(self) -> int:
        return len(self.changes)

    @property
    def first(self) -> PendingChange | None:
        """The first change; None if there is none."""
        return self.changes[0] if self.changes else None

    def add(self, change: PendingChange) -> None:
        """Append a change."""
        changes, data = self.changes, change.mark.data
        assert not changes or changes[-1].mark.data < data, "changes come in stream order"
        changes.append(change)
        self.size += len(change.raw) + OVERHEAD_BYTES

    def head(self, limit: int, max_bytes: int) -> list[PendingChange]:
        """Return the next changes: at least one if there is one, within both limits."""
        taken: list[PendingChange] = []
        size = 0
        for change in self.changes:
            size += len(change.raw)
            if len(taken) >= limit or (taken and size > max_bytes):
                break
            taken.append(change)
        return taken


@dataclass(slots=True)
class Window:
    """
    The changes that a subscription has read and not finished.

    Attributes:
        watermark: the last place before which everything is done; None until the first.
        count: changes that are not done.
        size: bytes that they take in memory.
        seen: comparable part of the last place that was taken in; empty before the first.
    """

    watermark: Mark | None = None
    count: int = 0
    size: int = 0
    seen: str = ""
    _order: deque[PendingChange | _Completed] = field(default_factory=deque)

    def __post_init__(self) -> None:
        if self.watermark is not None:
            self.seen = self.watermark.data

    @property
    def oldest(self) -> PendingChange | None:
        """The first change that is not done, which holds the watermark; None when nothing is left to do."""
        head = self._order[0] if self._order else None
        return head if isinstance(head, PendingChange) else None

    def add(self, change: PendingChange, queue: Queue) -> None:
        """Append a change to the stream and to the queue of its partition. Its token must be new, in stream order."""
        data = change.mark.data
        assert data > self.seen, "changes come in stream order"
        self.seen = data
        self._order.append(change)
        self.add_existing(change, queue)

    def add_existing(self, change: PendingChange, queue: Queue) -> None:
        """
        Append an existing document: its token is none of the stream's, and lies behind all that was read.

        It holds no watermark, which cannot be there; whoever has appended it knows by its partition when it is done.
        """
        queue.add(change)
        self.count += 1
        self.size += len(change.raw) + OVERHEAD_BYTES

    def pass_over(self, mark: Mark) -> None:
        """Record a place at which nothing is owed: an unmatched change or a post-batch token."""
        if mark.data <= self.seen:
            return
        self.seen = mark.data
        if not opens_stream(mark.data):
            return  # the next place counts
        if not self._order:
            self.watermark = mark
        elif isinstance(self._order[-1], _Completed):
            self._order[-1].mark = mark
        else:
            self._order.append(_Completed(mark))

    def complete(self, queue: Queue, data: str) -> int:
        """
        Everything of a partition up to this token is committed, or stored and marked.

        Returns:
            How many changes that took out of its queue. The watermark has moved as far as the prefix allows.
        """
        count, size, changes = 0, 0, queue.changes
        while changes and changes[0].mark.data <= data:
            change = changes.popleft()
            count, size = count + 1, size + len(change.raw) + OVERHEAD_BYTES
            change.done, change.raw = True, b""
        queue.size -= size
        self.count -= count
        self.size -= size
        order = self._order
        while order and order[0].done:
            mark = order.popleft().mark
            if END not in mark.data:  # a stream can be opened there
                self.watermark = mark
        if len(order) > _FOLD_FACTOR * self.count + _FOLD_SLACK:
            self._fold()
        return count

    def _fold(self) -> None:
        """Of neighbours that are done only the last place counts: what is left is at most twice what is not done."""
        folded: deque[PendingChange | _Completed] = deque()
        for item in self._order:
            if not item.done:
                folded.append(item)
            elif folded and folded[-1].done:
                if opens_stream(item.mark.data):
                    folded[-1] = _Completed(item.mark)
            else:
                folded.append(_Completed(item.mark))
        self._order = folded
