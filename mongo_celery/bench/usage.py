"""What a process uses: processor time, memory, sockets, as /proc tells it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pids: Sequence[int]) -> float:
    """Processor time, user and system, of processes of this host; those that have ended count nothing."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def memory_mb(pid: int) -> tuple[float, float]:
    """Resident memory of a process in MB (2^20): now, and at its highest."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name in {"VmRSS", "VmHWM"}:
            found[name] = int(value.split()[0]) / 1024
    return found["VmRSS"], found["VmHWM"]


def sockets(pid: int) -> int:
    """How many sockets a process has open."""
    count = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            count += str(descriptor.readlink()).startswith("socket:")
    return count
