"""
The window of a subscription: what has been read and is not yet done.

Pure: no client, no clock, no threads. One window belongs to one subscription in one term.

Two views of the same changes:

- `order`, in stream order, decides the low watermark: the last token of the completed *prefix*. A
  maximum over what is done would pass a change that is not (invariant P5).
- `buffers`, one per partition, decide what may run next. Their heads are what is outstanding.

A change that the subscription does not match, or that its partition has already committed, is a
completed item; neighbours fold into one, so that a quiet subscription beside a busy one moves on and
costs nothing. Changes that are done behind one that is not fold too, from time to time, so that a partition
that stands still beside busy ones does not make the window grow. A post-batch token is an item too, at its
place in the stream; read as a variable beside the window it would pass changes that are still under way.

Changes are known by their token, never by a number given at reading: numbers are given at dispatch,
against what is committed then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bson import Timestamp

from mongo_celery.bridge.refusal import Refusal

_FOLD_FACTOR = 4
_FOLD_SLACK = 1000


@dataclass(slots=True, frozen=True)
class Mark:
    """A place in the stream: a resume token, its comparable part, and its cluster time."""

    token: Mapping[str, Any]
    data: str
    cluster_time: Timestamp | None


@dataclass(slots=True, eq=False)
class PendingChange:
    """One change of one partition that is not yet committed; a refused one is not given to its handler."""

    mark: Mark
    index: int
    raw: bytes
    refusal: Refusal | None = None
    done: bool = False


@dataclass(slots=True, eq=False)
class _Completed:
    mark: Mark
    done: bool = True


@dataclass(slots=True)
class Window:
    """
    What a subscription has read and not finished.

    Attributes:
        watermark: the last place before which everything is done; None until the first.
        count: changes that are not done.
        refused: how many of these are refused.
        size: their bytes.
    """

    watermark: Mark | None = None
    count: int = 0
    refused: int = 0
    size: int = 0
    _seen: str = ""
    _order: deque[PendingChange | _Completed] = field(default_factory=deque)
    _buffers: dict[int, deque[PendingChange]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.watermark is not None:
            self._seen = self.watermark.data

    @property
    def seen(self) -> str:
        """Comparable part of the last place that was taken in; empty before the first."""
        return self._seen

    @property
    def oldest(self) -> PendingChange | None:
        """The first change that is not done, which holds the watermark; None when nothing is left to do."""
        head = self._order[0] if self._order else None
        return head if isinstance(head, PendingChange) else None

    def is_new(self, data: str) -> bool:
        """Whether a token lies after everything that was read; a reopened stream may repeat itself."""
        return data > self._seen

    def add(self, change: PendingChange) -> None:
        """Append a change. Its token must be new, in stream order."""
        assert change.mark.data > self._seen, "changes come in stream order"
        self._seen = change.mark.data
        self._order.append(change)
        self._buffers.setdefault(change.index, deque()).append(change)
        self.count += 1
        self.refused += change.refusal is not None
        self.size += len(change.raw)

    def pass_over(self, mark: Mark) -> None:
        """Record a place at which nothing is owed: an unmatched change or a post-batch token."""
        if mark.data <= self._seen:
            return
        self._seen = mark.data
        if not self._order:
            self.watermark = mark
        elif isinstance(self._order[-1], _Completed):
            self._order[-1].mark = mark
        else:
            self._order.append(_Completed(mark))

    def complete(self, index: int, data: str) -> int:
        """
        Everything of a partition up to this token is committed.

        Returns:
            How many changes that finished. The watermark has moved as far as the prefix allows.
        """
        buffer = self._buffers.get(index)
        finished = 0
        while buffer and buffer[0].mark.data <= data:
            change = buffer.popleft()
            change.done = True
            self.refused -= change.refusal is not None
            self.size -= len(change.raw)
            change.raw = b""
            finished += 1
        self.count -= finished
        self._advance()
        if len(self._order) > _FOLD_FACTOR * self.count + _FOLD_SLACK:
            self._fold()
        return finished

    def head(self, index: int, limit: int, max_bytes: int) -> list[PendingChange]:
        """The next changes of a partition: at least one where there is one, within both limits."""
        taken: list[PendingChange] = []
        size = 0
        for change in self._buffers.get(index, ()):
            size += len(change.raw)
            if len(taken) >= limit or (taken and size > max_bytes):
                break
            taken.append(change)
        return taken

    def waiting(self) -> Iterator[int]:
        """Indexes of the partitions that have changes."""
        return (index for index, buffer in self._buffers.items() if buffer)

    def depth(self, index: int) -> int:
        """Number of changes of one partition."""
        return len(self._buffers.get(index, ()))

    def _advance(self) -> None:
        while self._order and self._order[0].done:
            self.watermark = self._order.popleft().mark

    def _fold(self) -> None:
        """Of neighbours that are done only the last place counts: what is left is at most twice what is not done."""
        folded: deque[PendingChange | _Completed] = deque()
        for item in self._order:
            if not item.done:
                folded.append(item)
            elif folded and folded[-1].done:
                folded[-1] = _Completed(item.mark)
            else:
                folded.append(_Completed(item.mark))
        self._order = folded
