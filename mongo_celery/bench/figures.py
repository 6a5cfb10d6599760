"""What becomes of measurements: medians of rounds, and their ratios to one mode."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mongo_celery.bench.rates import Measured

REFERENCE = "raw_chain"


@dataclass(frozen=True, slots=True)
class Figure:
    """
    A mode's medians, and their relation to those of `raw_chain`.

    Attributes:
        rate: changes per second.
        ratio: how many times the rate of `raw_chain`; None where that was not measured.
        cpu_ratio: how many changes it handles with the processor time of one of `raw_chain`; None where that, or the
            time of a server, is not known.
        rounds: the rate of each round.
        cpu_us: processor time for one change, by process.
    """

    changes: int
    rate: float
    ratio: float | None
    rounds: tuple[float, ...]
    cpu_us: Mapping[str, float]
    cpu_ratio: float | None = None

    @property
    def cpu_total_us(self) -> float:
        """Processor time of all processes for one change."""
        return sum(self.cpu_us.values())


def figures_of(measured: Mapping[str, Sequence[Measured]], *, counted: bool = True) -> dict[str, Figure]:
    """
    The figures of all modes that were measured, from the measurements of each.

    Args:
        measured: by mode.
        counted: whether the processor time of all processes is known; else no ratio is made of it.
    """
    rates = {name: statistics.median(each.rate for each in found) for name, found in measured.items()}
    cpu = {
        name: {
            process: statistics.median(each.cpu_us.get(process, 0.0) for each in found) for process in found[0].cpu_us
        }
        for name, found in measured.items()
    }
    rate, used = rates.get(REFERENCE), sum(cpu.get(REFERENCE, {}).values())
    return {
        name: Figure(
            found[0].changes,
            rates[name],
            rates[name] / rate if rate else None,
            tuple(each.rate for each in found),
            cpu[name],
            used / own if counted and used and (own := sum(cpu[name].values())) else None,
        )
        for name, found in measured.items()
    }


def others_share(measured: Mapping[str, Sequence[Measured]]) -> float | None:
    """Which share of the cores went to processes that are none of the run's; None where nothing was measured."""
    found = [each for rounds in measured.values() for each in rounds]
    total = sum(each.total for each in found)
    return sum(each.others for each in found) / total if total else None
