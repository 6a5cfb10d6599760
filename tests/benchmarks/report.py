"""The figures of all suites, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from mongo_celery.bench.command import describe_machine
from tests.benchmarks.readings import Reading, Tables

_WHOLE = 100  # from here on digits behind the point say nothing


def as_json(results: Mapping[str, Tables], seconds: float) -> dict[str, Any]:
    """Return one object with one key for each suite."""
    suites = {
        suite: {title: {each.name: each.plain() for each in readings} for title, readings in tables.items()}
        for suite, tables in results.items()
    }
    return {"seconds": round(seconds, 1), "machine": describe_machine(), **suites}


def show(results: Mapping[str, Tables], seconds: float, console: Console) -> None:
    """Print a table for each title."""
    for tables in results.values():
        for title, readings in tables.items():
            console.print(_table(title, readings))
    console.print(f"{seconds:.0f} s in all")


def _table(title: str, readings: Sequence[Reading]) -> Table:
    table = Table(title=title)
    table.add_column("", no_wrap=True)
    for column in ("median", "lowest", "highest", "ratio", "to"):
        table.add_column(column, justify="left" if column == "to" else "right")
    for each in readings:
        median, lowest, highest = (_number(value) for value in (each.value, min(each.rounds), max(each.rounds)))
        ratio = "" if each.ratio is None else f"{each.ratio:.2f}"
        table.add_row(each.name, f"{median} {each.unit}", lowest, highest, ratio, each.ratio_to or "")
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= _WHOLE else f"{value:,.2f}"
