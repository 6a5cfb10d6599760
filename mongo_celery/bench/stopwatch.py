"""
Times from other processes, at the cost of a memory write, and their CPU times from /proc.

Each process maps its own file in a shared directory and appends monotonic times, whose clock all processes of a host
share. The bench reads the files while they grow. Nothing is sent, locked or waited for, so the effect on the measured
processes is tiny.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_LAPS_MAX = 1 << 19
_BYTES = 8 * (_LAPS_MAX + 1)
_TICKS = os.sysconf("SC_CLK_TCK")


class Stopwatch:
    """
    Notes times in this process. A forked child begins a separate file.

    Args:
        directory: shared with the reader.
        kind: the kind of times, such as `started`.
    """

    def __init__(self, directory: str, kind: str) -> None:
        self._directory = directory
        self._kind = kind
        self._view: memoryview[float] | None = None
        self._count = 0
        os.register_at_fork(after_in_child=self._forget)

    def lap(self) -> float:
        """Note the current time, and return it."""
        now = time.monotonic()
        self.note(now)
        return now

    def note(self, value: float) -> None:
        """Note a time or a duration. One thread of a process may call it."""
        view = self._view
        if view is None:
            view = self._open()
        self._count = count = self._count + 1
        view[count] = value
        view[0] = count  # last, because the reader trusts this count

    def _forget(self) -> None:
        self._view = None
        self._count = 0

    def _open(self) -> memoryview[float]:
        with (Path(self._directory) / f"{os.getpid()}.{self._kind}").open("w+b") as file:
            file.truncate(_BYTES)  # sparse: only used parts take space
            self._view = memoryview(mmap.mmap(file.fileno(), _BYTES)).cast("B").cast("d")
        return self._view


class Laps:
    """Reads the times of one kind from all processes."""

    def __init__(self, directory: Path, kind: str) -> None:
        self._directory = directory
        self._kind = kind
        self._views: dict[Path, memoryview[float]] = {}

    def count(self) -> int:
        """Return the number of measured times so far."""
        self._look()
        return sum(int(view[0]) for view in self._views.values())

    def times(self) -> list[float]:
        """Return all measured times so far, in order."""
        self._look()
        return sorted(time for view in self._views.values() for time in view[1 : int(view[0]) + 1])

    def _look(self) -> None:
        for path in self._directory.glob(f"*.{self._kind}"):
            if path not in self._views and path.stat().st_size == _BYTES:
                with path.open("rb") as file:
                    view = mmap.mmap(file.fileno(), _BYTES, access=mmap.ACCESS_READ)
                self._views[path] = memoryview(view).cast("d")


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the CPU time, user and system, of processes on this host. Ended ones count as 0."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def cpu_us_per_change(before: Mapping[str, float], after: Mapping[str, float], count: int) -> dict[str, float]:
    """Return each process's microseconds per change between two moments, for this number of changes."""
    return {name: (seconds - before.get(name, 0.0)) / count * 1e6 for name, seconds in after.items()}
