"""What a process uses: processor time, memory, sockets, as /proc tells it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)  # idle and waiting for disks: places among a processor's figures
_OWN = 8  # behind these come guests' times, which are counted already


@dataclass(frozen=True, slots=True)
class Usage:
    """
    Processor seconds up to a moment.

    Attributes:
        by_process: by the names of processes.
        busy: of this process's cores, whoever used them.
        total: the same with what nobody used.
    """

    by_process: Mapping[str, float]
    busy: float
    total: float

    def since(self, before: Usage) -> Usage:
        """What was used between two moments; of a process that started meanwhile all."""
        used = {name: seconds - before.by_process.get(name, 0.0) for name, seconds in self.by_process.items()}
        return Usage(used, self.busy - before.busy, self.total - before.total)

    @property
    def others(self) -> float:
        """Seconds of the cores that went to none of these processes, and were not idle."""
        return max(self.busy - sum(self.by_process.values()), 0.0)


def cpu_seconds(pids: Sequence[int]) -> float:
    """Processor time, user and system, of processes of this host; those that have ended count nothing."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def machine_seconds() -> tuple[float, float]:
    """Of the cores that this process may use: seconds in use since the machine started, and all seconds."""
    cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    busy = total = 0
    for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
        name, *figures = line.split()
        if name in cores:
            spent = [int(figure) for figure in figures[:_OWN]]
            total += sum(spent)
            busy += sum(spent) - sum(spent[place] for place in _IDLE)
    return busy / _TICKS, total / _TICKS


def memory_mb(pid: int) -> tuple[float, float]:
    """Resident memory of a process in MB (2^20): now, and at its highest."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name in {"VmRSS", "VmHWM"}:
            found[name] = int(value.split()[0]) / 1024
    return found["VmRSS"], found["VmHWM"]


def available_mb() -> float:
    """Memory in MB (2^20) that programs could still be given."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) / 1024
    return 0.0


def sockets(pid: int) -> int:
    """How many sockets a process has open."""
    count = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            count += str(descriptor.readlink()).startswith("socket:")
    return count
