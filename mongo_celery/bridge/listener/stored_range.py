"""
The stored changes of one partition, as one term knows them: up to where they may run, and which are next.

Pure: no client, no clock. Stored changes run like buffered ones, in order and one run at a time, but only

1. behind the committed position, and up to `to`, the mark on the partition: nothing is promised behind it;
2. as far as this term has read the stream, or has stored itself. An earlier term may have stored less than this one
   reads: what is read at or below the mark is stored again first, and meanwhile nothing of the partition runs.

Memory has the tokens and hashes of the next changes, and no bytes: the worker reads these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mongo_celery.bridge.state.backlog import StoredChange


@dataclass(slots=True)
class StoredRange:
    """
    The stored changes of one partition.

    Attributes:
        to: comparable part of the last one's token, as it is marked on the partition.
        read_to: up to where they are in memory, or committed.
        ahead: those in memory, in order.
        read_at: monotonic time before which nothing more is read.
        missing: whether nothing was found although the mark promises it.
    """

    to: str
    read_to: str = ""
    ahead: deque[StoredChange] = field(default_factory=deque)
    read_at: float = 0.0
    missing: bool = False

    def complete(self, data: str) -> None:
        """Let go of what is committed."""
        while self.ahead and self.ahead[0].data <= data:
            self.ahead.popleft()
        self.read_to = max(self.read_to, data)

    def forget(self, data: str) -> None:
        """Have nothing in memory of what lies behind this committed place. It is read again."""
        self.ahead.clear()
        self.read_to = data

    def head(self, limit: int, max_bytes: int) -> list[StoredChange]:
        """Return the next changes: at least one where there is one, within both limits."""
        taken: list[StoredChange] = []
        size = 0
        for change in self.ahead:
            size += change.size
            if len(taken) >= limit or (taken and size > max_bytes):
                break
            taken.append(change)
        return taken

    def add(self, changes: Sequence[StoredChange]) -> None:
        """Take in what was found behind `read_to`."""
        self.missing = False
        self.ahead.extend(changes)
        self.read_to = changes[-1].data
