"""
Times from other processes, at the cost of a memory write.

Every process that takes part maps a file of its own in a shared directory and appends monotonic times to
it; that clock is the same for all processes of a host. The bench reads the files while they grow. Nothing
is sent, locked or waited for, so the measured processes hardly notice it.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

_LAPS_MAX = 1 << 19
_BYTES = 8 * (_LAPS_MAX + 1)


class Stopwatch:
    """
    Notes times in this process; a forked child begins a file of its own.

    Args:
        directory: shared with the reader.
        kind: which times these are, such as `started`.
    """

    def __init__(self, directory: str, kind: str) -> None:
        self._directory = directory
        self._kind = kind
        self._view: memoryview[float] | None = None
        self._count = 0
        os.register_at_fork(after_in_child=self._forget)

    def lap(self) -> float:
        """Note the present time, and return it."""
        now = time.monotonic()
        self.note(now)
        return now

    def note(self, value: float) -> None:
        """Note a time, or how long something took. Used by one thread of a process."""
        view = self._view
        if view is None:
            view = self._open()
        self._count = count = self._count + 1
        view[count] = value
        view[0] = count  # last: the reader trusts what this counts

    def _forget(self) -> None:
        self._view = None
        self._count = 0

    def _open(self) -> memoryview[float]:
        with (Path(self._directory) / f"{os.getpid()}.{self._kind}").open("w+b") as file:
            file.truncate(_BYTES)  # sparse: only what is used takes room
            self._view = memoryview(mmap.mmap(file.fileno(), _BYTES)).cast("B").cast("d")
        return self._view


class Laps:
    """Reads the times of one kind that all processes have noted."""

    def __init__(self, directory: Path, kind: str) -> None:
        self._directory = directory
        self._kind = kind
        self._views: dict[Path, memoryview[float]] = {}

    def count(self) -> int:
        """Return how many times were noted so far."""
        self._look()
        return sum(int(view[0]) for view in self._views.values())

    def times(self) -> list[float]:
        """Return all times so far, in order."""
        self._look()
        return sorted(time for view in self._views.values() for time in view[1 : int(view[0]) + 1])

    def _look(self) -> None:
        for path in self._directory.glob(f"*.{self._kind}"):
            if path not in self._views and path.stat().st_size == _BYTES:
                with path.open("rb") as file:
                    view = mmap.mmap(file.fileno(), _BYTES, access=mmap.ACCESS_READ)
                self._views[path] = memoryview(view).cast("d")
