"""What the reader has handed over and the leader has not taken in yet."""

from __future__ import annotations

from collections.abc import Sequence
from queue import Empty, SimpleQueue

from mongo_celery.bridge.stream.items import Item


class Inbox:
    """
    One reader's, in order. Items come some at a time, and are taken in one by one.

    Attributes:
        held: the next item, once it was looked at; None while none is known to be there.
    """

    def __init__(self) -> None:
        self.held: Item | None = None
        self._queue: SimpleQueue[Sequence[Item]] = SimpleQueue()
        self._items: Sequence[Item] = ()
        self._at = 0
        self._from = 0

    def put(self, items: Sequence[Item]) -> None:
        """Hand over, none to end a wait. Callable from any thread."""
        self._queue.put(items)

    def look(self) -> Item | None:
        """The next item, which stays the next until it is taken; None where there is none."""
        while self.held is None:
            try:
                self._hold(self._queue.get_nowait())
            except Empty:
                return None
        return self.held

    def wait(self, seconds: float) -> None:
        """Wait for an item, or until somebody ends it."""
        try:
            self._hold(self._queue.get(timeout=seconds) if seconds else self._queue.get_nowait())
        except Empty:
            return

    def take(self) -> bool:
        """The next item is taken in; whether it was the last of those that came with it."""
        self._at += 1
        is_last = self._at >= len(self._items)
        self.held = None if is_last else self._items[self._at]
        return is_last

    def taken(self) -> Sequence[Item]:
        """What was taken in since this was asked, of what came together."""
        taken, self._from = self._items[self._from : self._at], self._at
        if self.held is None:
            self._items, self._at, self._from = (), 0, 0  # nobody keeps them for longer than they are of use
        return taken

    def _hold(self, items: Sequence[Item]) -> None:
        if items:  # else it is a wake-up
            self._items, self._at, self._from = items, 0, 0
            self.held = items[0]
