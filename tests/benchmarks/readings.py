"""Figures of the suites: a number with its unit, and its ratio to another; as tables and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from mongo_celery.bench.command import describe_machine
from mongo_celery.bench.stage import Stage
from tests.benchmarks.sizes import Sizes

RATE = "1/s"
MILLISECONDS = "ms"
MICROSECONDS = "us"
SECONDS = "s"
MEGABYTES = "MB"
BYTES = "bytes"

_WHOLE = 100  # from here on digits behind the point say nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """
    One figure.

    Attributes:
        rounds: one value for each round. The median counts.
        ratio: the ratio to the reading named by `ratio_to`: the median of the rounds' ratios.
        ratio_to: the reference, or None.
    """

    name: str
    unit: str
    rounds: tuple[float, ...]
    ratio: float | None = None
    ratio_to: str | None = None

    @property
    def value(self) -> float:
        return statistics.median(self.rounds)

    def plain(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "unit": self.unit,
            "value": round(self.value, 3),
            "rounds": [round(each, 3) for each in self.rounds],
        }
        if self.ratio is not None:
            found[f"ratio_to_{self.ratio_to}"] = round(self.ratio, 3)
        return found


Tables = Mapping[str, Sequence[Reading]]
"""The readings of a suite, by the title of their table."""

Suite = Callable[[Stage, Sizes, Callable[[str], None]], Tables]
"""Measures on a stage; the last argument gets a line about what is being measured."""


def reading(name: str, unit: str, rounds: Sequence[float], reference: tuple[str, Sequence[float]] | None) -> Reading:
    """Return a reading, with its ratio to another whose rounds were measured beside its own."""
    if reference is None:
        return Reading(name=name, unit=unit, rounds=tuple(rounds))
    ratio_to, others = reference
    ratio = statistics.median(own / other for own, other in zip(rounds, others, strict=True))
    return Reading(name=name, unit=unit, rounds=tuple(rounds), ratio=ratio, ratio_to=ratio_to)


def readings(unit: str, rounds: Mapping[str, Sequence[float]], references: Mapping[str, str | None]) -> list[Reading]:
    """Return a reading for each name, with its ratio to the reading that `references` names for it."""
    found = []
    for name, values in rounds.items():
        to = references.get(name)
        found.append(reading(name, unit, values, None if to is None else (to, rounds[to])))
    return found


def quantile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def as_json(results: Mapping[str, Tables], seconds: float) -> dict[str, Any]:
    suites = {
        suite: {title: {each.name: each.plain() for each in readings} for title, readings in tables.items()}
        for suite, tables in results.items()
    }
    return {"seconds": round(seconds, 1), "machine": describe_machine(), **suites}


def show(results: Mapping[str, Tables], seconds: float, console: Console) -> None:
    for tables in results.values():
        for title, readings in tables.items():
            table = Table("", "median", "lowest", "highest", "ratio", "to", title=title)
            for each in readings:
                values = (_number(value) for value in (each.value, min(each.rounds), max(each.rounds)))
                ratio = "" if each.ratio is None else f"{each.ratio:.2f}"
                table.add_row(f"{each.name}, {each.unit}", *values, ratio, each.ratio_to or "")
            console.print(table)
    console.print(f"{seconds:.0f} s in all")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= _WHOLE else f"{value:,.2f}"
