"""How busy the machine is with other things: what keeps this process from running befalls the bridge's as well."""

from __future__ import annotations

import os
import threading
import time
from typing import Self

from tests.chaos.facts import Fault
from tests.chaos.kinds import STALL

_TICK_SECONDS = 0.2
_LEAST_SECONDS = 0.8


class Machine:
    """
    Watches the machine while it is entered: a context manager.

    Attributes:
        stalls: times in which this process did not run, like faults that nobody has planned.
        load: the largest number of processes that wanted a core, on an average of a minute; at least 1.
    """

    def __init__(self) -> None:
        self.stalls: list[Fault] = []
        self.load = 1.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="chaos-machine", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        before = time.time()
        while not self._ended.wait(_TICK_SECONDS):
            now = time.time()
            if now - before > _TICK_SECONDS + _LEAST_SECONDS:
                self.stalls.append(Fault(STALL.name, before, now))
            before = now
            self.load = max(self.load, os.getloadavg()[0] / (os.cpu_count() or 1))
