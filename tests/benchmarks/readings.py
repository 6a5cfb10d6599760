"""Figures of the suites beside the bridge's: a number with its unit, and its relation to another."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

RATE = "1/s"
MILLISECONDS = "ms"
SECONDS = "s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """
    One figure.

    Attributes:
        name: as in the report.
        unit: what the value counts.
        rounds: one value a round; the median counts.
        ratio: to the reading named by `ratio_to`; the median of the rounds' ratios.
        ratio_to: the reference; None where there is none.
    """

    name: str
    unit: str
    rounds: tuple[float, ...]
    ratio: float | None = None
    ratio_to: str | None = None

    @property
    def value(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rounds)

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        found: dict[str, Any] = {
            "unit": self.unit,
            "value": round(self.value, 3),
            "rounds": [round(each, 3) for each in self.rounds],
        }
        if self.ratio is not None:
            found[f"ratio_to_{self.ratio_to}"] = round(self.ratio, 3)
        return found


def reading(name: str, unit: str, rounds: Sequence[float], reference: tuple[str, Sequence[float]] | None) -> Reading:
    """A reading, in relation to another whose rounds were measured beside its own."""
    if reference is None:
        return Reading(name=name, unit=unit, rounds=tuple(rounds))
    ratio_to, others = reference
    ratio = statistics.median(own / other for own, other in zip(rounds, others, strict=True))
    return Reading(name=name, unit=unit, rounds=tuple(rounds), ratio=ratio, ratio_to=ratio_to)


def quantile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that is not exceeded by this part of all values."""
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]
