"""The batches that the reader has handed over and the leader has not taken in yet."""

from __future__ import annotations

from collections.abc import Sequence
from queue import Empty, SimpleQueue

from mongo_celery.bridge.stream.items import Item


class Inbox:
    """The batches of one reader, in order. The leader takes in their items one by one."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Sequence[Item]] = SimpleQueue()
        self._batch: Sequence[Item] = ()
        self._at = 0

    def add_batch(self, batch: Sequence[Item]) -> None:
        """Hand over a batch. An empty one ends a wait. Callable from any thread."""
        self._queue.put(batch)

    def peek(self) -> Item | None:
        """Return the next item, which stays the next until it is taken. None if there is none."""
        while not self._batch:
            try:
                self._batch = self._queue.get_nowait()
            except Empty:
                return None
        return self._batch[self._at]

    def take(self) -> Sequence[Item]:
        """Take the next item. Return its batch if it was the last of it, else nothing."""
        self._at += 1
        if self._at < len(self._batch):
            return ()
        batch, self._batch, self._at = self._batch, (), 0
        return batch

    def wait(self, seconds: float) -> None:
        """Wait for a batch, unless an item is there already."""
        if not self._batch:
            try:
                self._batch = self._queue.get(timeout=seconds)
            except Empty:
                return
