"""The processes of a measurement: their names in tables, their memory and sockets."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

_PARTS = {"worker_parent": "worker", "worker_children": "worker"}


def with_pool(cpu_us: Mapping[str, float]) -> dict[str, float]:
    """The same times, that of a worker's pool in the worker's."""
    found: dict[str, float] = {}
    for process, used in cpu_us.items():
        name = _PARTS.get(process, process)
        found[name] = found.get(name, 0.0) + used
    return found


def memory_mb(pid: int) -> tuple[float, float]:
    """Return the resident memory of a process in MB (2^20): now, and at its highest."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name in {"VmRSS", "VmHWM"}:
            found[name] = int(value.split()[0]) / 1024
    return found["VmRSS"], found["VmHWM"]


def sockets(pid: int) -> int:
    """Return how many sockets a process has open."""
    count = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            count += str(descriptor.readlink()).startswith("socket:")
    return count
