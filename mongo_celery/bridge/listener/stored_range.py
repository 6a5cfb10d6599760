"""
One term's knowledge of a partition's stored changes: the next ones, and the place up to which they may run.

The module is pure: no client, no clock. Stored changes run like buffered ones, in order and one run at a time. Two
limits apply. They must be

1. after the committed position, and up to `to`, the mark on the partition: nothing is promised after it;
2. within this term's reading of the stream, or stored by this term. An earlier term may have stored less than this one
   reads. So changes at or below the mark are stored again first, and meanwhile nothing of the partition runs.

Memory contains the tokens and hashes of the next changes, but no bytes, which the worker reads.
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
        to: comparable part of the last one's token, from the partition's mark.
        read_to: the place up to which they are in memory or committed.
        ahead: the changes in memory, in order.
        read_at: monotonic time before which nothing more is read.
        missing: True if nothing was found although the mark promises it.
    """

    to: str
    read_to: str = ""
    ahead: deque[StoredChange] = field(default_factory=deque)
    read_at: float = 0.0
    missing: bool = False

    def complete(self, data: str) -> None:
        """Forget committed changes."""
        while self.ahead and self.ahead[0].data <= data:
            self.ahead.popleft()
        self.read_to = max(self.read_to, data)

    def forget(self, data: str) -> None:
        """Drop changes after this committed place from memory. They are read again."""
        self.ahead.clear()
        self.read_to = data

    def head(self, limit: int, max_bytes: int) -> list[StoredChange]:
        """Return the next changes within both limits, but at least one if there is one."""
        taken: list[StoredChange] = []
        size = 0
        for change in self.ahead:
            size += change.size
            if len(taken) >= limit or (taken and size > max_bytes):
                break
            taken.append(change)
        return taken

    def add(self, changes: Sequence[StoredChange]) -> None:
        """Add the changes found after `read_to`."""
        self.missing = False
        self.ahead.extend(changes)
        self.read_to = changes[-1].data
