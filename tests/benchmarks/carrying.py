"""
What workers, listeners and servers carry together, computed from what a change costs each of them.

`mongo-celery bench --json > bench.json` measures the costs, and `python -m tests.benchmarks.carrying bench.json` prints
the two tables of docs/scale.md from them: the measured one, and the one that follows. `tests/unit/test_scale.py` holds
the page to the same rule.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODES = {"bridge_chain": "chain", "bridge_inline": "inline", "bridge_runs": "runs", "bridge_bulk": "lists"}
"""The bench's modes, and what the page calls them."""

SIZES = ((1, 1), (1, 10), (1, 100), (10, 1), (10, 10), (10, 100))
"""Bridges and workers of the computed table."""

SHARE = 0.7
"""How much of a core is reckoned with: the rest is for peaks, and for what the machine does besides."""

MONGODB_CORES = 4
"""Of the primary, for the bridge's part of its work."""

_PROCESSES = ("worker", "listener", "redis", "mongodb")
_MICROSECONDS = 1_000_000


@dataclass(frozen=True, slots=True)
class Costs:
    """Processor time for one change, in microseconds, by process."""

    worker: float
    listener: float
    redis: float
    mongodb: float


@dataclass(frozen=True, slots=True)
class Carried:
    """
    What a size carries.

    Attributes:
        rate: changes per second.
        limit: what is full first.
    """

    rate: float
    limit: str

    def __str__(self) -> str:
        return f"{rounded(self.rate)} ({self.limit})"


def carried(costs: Costs, bridges: int, workers: int) -> Carried:
    """
    What so many bridges and workers carry: as much as the first of them that has no more of its core.

    A worker is a core's worth of worker processes; each bridge has one listener, which uses one core; Redis uses one
    core, and MongoDB's primary `MONGODB_CORES`, for all bridges together.
    """
    core = SHARE * _MICROSECONDS
    limits = {
        "workers": workers * core / costs.worker,
        "listener" if bridges == 1 else "listeners": bridges * core / costs.listener,
        "Redis": core / costs.redis,
        "MongoDB": MONGODB_CORES * core / costs.mongodb,
    }
    limit = min(limits, key=lambda name: limits[name])
    return Carried(limits[limit], limit)


def hours_of_oplog(size: float, changes: float, entry: float, written: Mapping[str, float]) -> dict[str, float]:
    """
    How far back an oplog reaches, by way, with one handler.

    Args:
        size: of the oplog, in bytes.
        changes: a second.
        entry: bytes of a change's own entry.
        written: bytes that the bridge writes for one change, by way.
    """
    return {way: size / (changes * (entry + each)) / 3600 for way, each in written.items()}


def rounded(value: float) -> str:
    """Two digits: no more is known."""
    digits = len(str(int(value))) - 2
    return f"{round(value, -digits):,.0f}" if digits > 0 else f"{value:.0f}"


def costs_table(costs: Mapping[str, Costs]) -> list[str]:
    """The measured table, line by line."""
    rows = [[name, *(f"{getattr(each, process):,.0f}" for process in _PROCESSES)] for name, each in costs.items()]
    return _table(["way", *_PROCESSES], rows)


def carried_table(costs: Mapping[str, Costs]) -> list[str]:
    """The computed table, line by line."""
    rows = [
        [str(bridges), str(workers), *(str(carried(each, bridges, workers)) for each in costs.values())]
        for bridges, workers in SIZES
    ]
    return _table(["bridges", "workers", *costs], rows)


def costs_of(bench: Mapping[str, Any]) -> dict[str, Costs]:
    """The costs in what `mongo-celery bench --json` prints."""
    found = {}
    for mode, name in MODES.items():
        used = bench["modes"][mode]["cpu_us_per_change"]
        found[name] = Costs(**{process: used[process] for process in _PROCESSES})
    return found


def costs_in(lines: Iterable[str]) -> dict[str, Costs]:
    """The costs in the lines of a measured table."""
    found = {}
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in MODES.values():
            found[cells[0]] = Costs(*(float(cell.replace(",", "")) for cell in cells[1:]))
    return found


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_row(titles), "|---|" + "---:|" * (len(titles) - 1), *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    measured = costs_of(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    sys.stdout.write("\n".join([*costs_table(measured), "", *carried_table(measured), ""]))
