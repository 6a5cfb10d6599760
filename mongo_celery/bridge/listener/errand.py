"""
Errands: calls that the leading thread has made by another one, so that it never waits for a server.

One at a time, in the order in which they were sent. What became of one is asked for, in a later turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


class Errand:
    """
    One call.

    Attributes:
        is_done: whether it has ended; `result` or `error` are what it did.
    """

    def __init__(self, act: Callable[[], Any], settle: Callable[[Errand], None]) -> None:
        self.is_done = False
        self.result: Any = None
        self.error: Exception | None = None
        self._act = act
        self._settle = settle

    def run(self) -> None:
        """Make the call, in whatever thread this is."""
        try:
            self.result = self._act()
        except Exception as error:  # noqa: BLE001 - whoever has sent it judges it
            self.error = error
        self.is_done = True

    def settle(self) -> None:
        """Do what follows, in the thread that has sent it."""
        self._settle(self)


class Errands:
    """
    The thread that runs errands, begun at the first one.

    Args:
        name: of the thread.
        done: called in it after each errand.
    """

    def __init__(self, name: str, done: Callable[[], None]) -> None:
        self._name = name
        self._done = done
        self._queue: SimpleQueue[Errand | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, errand: Errand) -> None:
        """Have it run."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put(errand)

    def close(self) -> None:
        """Run no more. Does not wait: a call that is under way has a limit."""
        self._queue.put(None)

    def _run(self) -> None:
        while (errand := self._queue.get()) is not None:
            errand.run()
            self._done()
