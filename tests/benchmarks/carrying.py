"""
What workers, listeners and servers carry together, computed from what a change costs each of them.

`mongo-celery bench --json > bench.json` measures the costs, and `python -m tests.benchmarks.carrying bench.json` prints
the first two tables of docs/scale.md from them: the measured one, and the one that follows. With what
`python -m tests.benchmarks backlog handlers --json > suites.json` measures, as a second file, it prints all of the
page's tables, in their order. `tests/unit/test_scale.py` holds the page to the same rule.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mongo_celery.bench.errors import BenchError
from tests.benchmarks.processes import with_pool

MODES = {"bridge_chain": "chain", "bridge_inline": "inline", "bridge_runs": "runs", "bridge_bulk": "lists"}
"""The bench's modes, and what the page calls them."""

SIZES = ((1, 1), (1, 10), (1, 100), (10, 1), (10, 10), (10, 100))
"""Bridges and workers of the computed table."""

SHARE = 0.7
"""How much of a core is reckoned with: the rest is for peaks, and for what the machine does besides."""

MONGODB_CORES = 4
"""Of the primary, for the bridge's part of its work."""

EXAMPLE = (50e9, 200, 1000)
"""Of the oplog's reach: its size, changes a second, and the bytes of a change's own entry."""

WRITTEN = {"chains of all": "chain", "runs of all": "runs"}
"""Kinds of the suite `handlers`, with one handler, and what the page calls them where it tells the oplog's bytes."""

_SHARED = {"chains of all": "chain, all", "runs of all": "runs, all", "runs of one": "runs, one"}
_PROCESSES = ("worker", "listener", "redis", "mongod")
_MICROSECONDS = 1_000_000
_DIGITS = 3
"""As many as a measured figure has at most that a page tells."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Processor time for one change, in microseconds, by process."""

    worker: float
    listener: float
    redis: float
    mongod: float


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
        "MongoDB": MONGODB_CORES * core / costs.mongod,
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


def hours_told(written: Mapping[str, float]) -> str:
    """The page's sentence about the example."""
    hours = hours_of_oplog(*EXAMPLE, written)
    return f"{hours['chain']:.0f} hours beside one handler of chains, and {hours['runs']:.0f} hours beside one of runs"


def rounded(value: float, digits: int = 2) -> str:
    """So many digits: no more is known."""
    beyond = len(str(int(value))) - digits
    return f"{round(value, -beyond):,.0f}" if beyond > 0 else f"{value:.0f}"


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
    """
    The costs in what `mongo-celery bench --json` prints, of those modes that it has.

    Raises:
        BenchError: servers were given, so their processor time is not known.
    """
    if bench["cpu_without"]:
        without = " and ".join(bench["cpu_without"])
        raise BenchError(f"The bench has not measured {without}: run it without --mongo-url and --redis-url.")
    found = {}
    for mode, name in MODES.items():
        if mode in bench["modes"]:
            used = with_pool(bench["modes"][mode]["cpu_us_per_change"])
            found[name] = Costs(**{process: round(used[process]) for process in _PROCESSES})  # as they are printed
    return found


def missing(bench: Mapping[str, Any]) -> list[str]:
    """Modes of the page that a run has left out."""
    return [mode for mode in MODES if mode not in bench["modes"]]


def backlog_table(suites: Mapping[str, Any]) -> list[str]:
    """What the suite `backlog` has found."""
    rows = [
        [
            f"{each['changes']:,}",
            rounded(each["cpu_us"]["listener"], _DIGITS),
            *(f"{each[part]:.0f}" for part in ("started_mb", "peak_mb")),
        ]
        for each in suites["backlog"]
    ]
    return _table(["changes that waited", "listener, us", "start, MB", "peak, MB"], rows)


def handlers_table(suites: Mapping[str, Any]) -> list[str]:
    """What the suite `handlers` has found."""
    processes, rows = ("listener", "worker", "mongod"), []
    for each in suites["handlers"]["shared"]:
        used = with_pool(each["cpu_us"])
        costs = (rounded(used[process], _DIGITS) for process in processes)
        rows.append([_SHARED[each["kind"]], str(each["handlers"]), *costs, f"{each['listener_mb']:.0f}"])
    return _table(["", "handlers", *processes, "listener's peak, MB"], rows)


def oplog_table(suites: Mapping[str, Any]) -> list[str]:
    """What one change of one handler has in the oplog, and the example's sentence."""
    shared = suites["handlers"]["shared"]
    written = {WRITTEN[each["kind"]]: each["oplog_bytes"] for each in shared if _is_written(each)}
    told = {way: rounded(each, _DIGITS) for way, each in written.items()}
    rows = [[way, each] for way, each in told.items()]
    table = _table(["oplog", "P: bytes written for one change of one handler"], rows)
    return [*table, "", hours_told({way: float(each.replace(",", "")) for way, each in told.items()})]


def _is_written(shared: Mapping[str, Any]) -> bool:
    return shared["handlers"] == 1 and shared["kind"] in WRITTEN


def costs_in(lines: Iterable[str]) -> dict[str, Costs]:
    """The costs in the lines of a measured table."""
    found = {}
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in MODES.values():
            found[cells[0]] = Costs(*(float(cell.replace(",", "")) for cell in cells[1:]))
    return found


def tables(bench: Mapping[str, Any], suites: Mapping[str, Any] | None = None) -> list[str]:
    """The page's tables, line by line: of the bench alone the first two, else all."""
    costs = costs_of(bench)
    found = [*costs_table(costs), "", *carried_table(costs)]
    if suites is not None:
        absent = [suite for suite in ("backlog", "handlers") if suite not in suites]
        if absent:
            raise BenchError(
                f"The second file lacks the suite {absent[0]}: run both with --json, on servers of their own."
            )
        for table in (oplog_table, backlog_table, handlers_table):
            found += ["", *table(suites)]
    return found


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_row(titles), "|---|" + "---:|" * (len(titles) - 1), *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return "".join(["|", *(f" {cell} |" if cell else " |" for cell in cells)])


def _main(*files: str) -> None:
    try:
        bench, *suites = map(_read, files)
        lines = tables(bench, *suites)
    except BenchError as error:
        sys.exit(str(error))
    if missing(bench):
        sys.stderr.write(f"Left out, since the run did not measure them: {', '.join(missing(bench))}.\n")
    sys.stdout.write("\n".join([*lines, ""]))


def _read(file: str) -> Mapping[str, Any]:
    try:
        return cast("Mapping[str, Any]", json.loads(Path(file).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise BenchError(f"{file} is no file with figures in JSON: {error}.") from error


if __name__ == "__main__":
    if len(sys.argv) not in {2, 3}:
        sys.exit(
            "Give the file of `mongo-celery bench --json`, and that of the suites backlog and handlers if there is one."
        )
    _main(*sys.argv[1:])
