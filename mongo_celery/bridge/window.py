"""
The window of a subscription: the changes that were read and are not yet done.

The module is pure: no client, no clock, no threads. Each window belongs to one subscription in one term.

Two views of the same changes:

- `order`, in stream order, decides the low watermark: the last token of the completed *prefix*. The largest completed
  token could be after an unfinished change (invariant P5).
- a `Queue` for each partition decides what may run next. Its head is in flight.

A change counts as completed if the subscription does not match it or its partition has already committed it. Completed
neighbours fold into one, so a quiet subscription beside a busy one advances at no cost. From time to time, completed
changes after an unfinished one fold too, so a blocked partition beside busy ones does not make the window grow. A
post-batch token is an item at its place in the stream. As a separate variable it would overtake changes in flight.

A token identifies a change, never a number from reading. Dispatch assigns numbers, after the committed ones.

Changes that are stored and marked in the state database count as completed here. Only their partition still waits for
them.
"""

from __future__ import annotations

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
    The reason why one change is refused. Create it with `because`.

    Attributes:
        reason: a sentence for people, short enough to store.
        halts: True if the partition halts under every failure policy. The cause is then the bridge's configuration, not
            the change. Skipping it, or moving it to the dead letters, would drop every change that the configuration
            affects.
        lasts: True if the read event is incomplete. The refusal then remains, and the event is not checked again.
    """

    reason: str
    halts: bool = False
    lasts: bool = False

    @classmethod
    def because(cls, reason: str, *, halts: bool = False, lasts: bool = False) -> Refusal:
        """Return a refusal whose reason is short enough to store."""
        return cls(storable(reason[:_CHARS]), halts, lasts)


OVERHEAD_BYTES = 200
"""Memory of a change in addition to its bytes."""

_FOLD_FACTOR = 4
_FOLD_SLACK = 1000


@dataclass(slots=True)
class Mark:
    """A place in the stream: a resume token, its comparable part, and the cluster time if known."""

    token: Mapping[str, Any]
    data: str
    cluster_time: Timestamp | None


@dataclass(slots=True, eq=False)
class PendingChange:
    """
    One change of one partition that is not yet committed. A refused change is not given to its handler.

    Attributes:
        hash: the hash of its partition key. It determines the index, unless another partition stores the change.
    """

    mark: Mark
    index: int
    raw: bytes
    refusal: Refusal | None = None
    hash: int = 0
    done: bool = False

    @property
    def data(self) -> str:
        """Comparable part of the token."""
        return self.mark.data

    @property
    def token(self) -> Mapping[str, Any] | None:
        """The whole token of a refused change, if its bytes lack it. None for all others."""
        return self.mark.token if self.refusal is not None else None

    @property
    def weight(self) -> int:
        """Bytes that the change takes in memory."""
        return len(self.raw) + OVERHEAD_BYTES


@dataclass(slots=True, eq=False)
class _Completed:
    mark: Mark
    done: bool = True


class Queue:
    """
    The unfinished changes of one partition, in stream order.

    Attributes:
        changes: the changes, for reading only.
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
        """The first change. None if there is none."""
        return self.changes[0] if self.changes else None

    def add(self, change: PendingChange) -> None:
        """Append a change."""
        changes, data = self.changes, change.mark.data
        assert not changes or changes[-1].mark.data < data, "changes come in stream order"
        changes.append(change)
        self.size += len(change.raw) + OVERHEAD_BYTES

    def head(self, limit: int, max_bytes: int) -> list[PendingChange]:
        """Return the next changes within both limits, but at least one if there is one."""
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
    The unfinished changes that a subscription has read.

    Attributes:
        watermark: the last place before which everything is done. None before the first.
        count: changes that are not done.
        size: bytes that they take in memory.
        seen: comparable part of the last place that was added. Empty before the first.
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
        """The first unfinished change, which holds the watermark. None if all are done."""
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
        Append an existing document. Its token is not in the stream, and comes after everything that was read.

        It does not hold the watermark, which cannot be there. The caller learns from its partition when it is done.
        """
        queue.add(change)
        self.count += 1
        self.size += len(change.raw) + OVERHEAD_BYTES

    def pass_over(self, mark: Mark) -> None:
        """Record a place without a change for the handler: an unmatched change or a post-batch token."""
        if mark.data <= self.seen:
            return
        self.seen = mark.data
        if not opens_stream(mark.data):
            return  # wait for the next place
        if not self._order:
            self.watermark = mark
        elif isinstance(self._order[-1], _Completed):
            self._order[-1].mark = mark
        else:
            self._order.append(_Completed(mark))

    def complete(self, queue: Queue, data: str) -> int:
        """
        Record that everything of a partition up to this token is committed, or stored and marked.

        Returns:
            The number of changes removed from the queue. The watermark has advanced as far as the prefix allows.
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
        """Keep only the last place of completed neighbours, so the window is at most twice the unfinished places."""
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
