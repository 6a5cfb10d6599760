"""Processor time of processes, as /proc shows it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return the processor time, user and system, of processes of this host; ended ones count nothing."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def cpu_us_per_change(before: Mapping[str, float], after: Mapping[str, float], count: int) -> dict[str, float]:
    """Return the microseconds that each process used for a change, between two moments with so many changes."""
    return {name: (seconds - before.get(name, 0.0)) / count * 1e6 for name, seconds in after.items()}
