"""One run: rounds of all modes, then latency, memory and take-over."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mongo_celery.bench.latency import Latency, measure_latency
from mongo_celery.bench.memory import Memory, measure_memory
from mongo_celery.bench.modes import MODES, Measured, measure
from mongo_celery.bench.sizes import BenchSizes
from mongo_celery.bench.stage import Stage
from mongo_celery.bench.takeover import TakeOver, measure_takeover

REFERENCE = "raw_chain"
IDLE_MODES = ("watch_delay", "bridge_chain")


@dataclass(frozen=True, slots=True)
class Figure:
    """A mode's changes per second: the median of its rounds, and its relation to that of `raw_chain`."""

    changes: int
    rate: float
    ratio: float | None
    rounds: tuple[float, ...]
    cpu_us: Mapping[str, float]


@dataclass(slots=True)
class Results:
    """What a run has found; parts that were not asked for are empty."""

    seconds: float = 0.0
    figures: dict[str, Figure] = field(default_factory=dict)
    latency: dict[str, Latency] = field(default_factory=dict)
    memory: Memory | None = None
    take_over: TakeOver | None = None


def run(stage: Stage, sizes: BenchSizes, announce: Callable[[str], None]) -> Results:
    """
    Measure what the sizes ask for.

    Args:
        stage: the servers, started.
        sizes: how much, and of what.
        announce: called with a line about what is being measured now.
    """
    began = time.monotonic()
    results = Results()
    results.figures = _figures(_rounds(stage, sizes, announce))
    if sizes.wants("latency"):
        for name in IDLE_MODES:
            announce(f"latency of {name}")
            results.latency[name] = measure_latency(stage, MODES[name], sizes.samples, sizes.warm_up)
    if sizes.wants("memory"):
        announce("the listener's memory under a backlog")
        results.memory = measure_memory(stage, sizes.backlog)
    if sizes.wants("take_over"):
        announce("take-over")
        results.take_over = measure_takeover(stage, sizes.lease_ttl, sizes.takeovers)
    results.seconds = time.monotonic() - began
    return results


def _rounds(stage: Stage, sizes: BenchSizes, announce: Callable[[str], None]) -> dict[str, list[Measured]]:
    """Every mode once, then every mode once more: a machine that slows down slows all of them."""
    measured: dict[str, list[Measured]] = {name: [] for name in MODES if sizes.wants(name)}
    for number in range(sizes.rounds):
        for name, found in measured.items():
            announce(f"round {number + 1} of {sizes.rounds}: {name}")
            mode = MODES[name]
            found.append(measure(stage, mode, max(int(sizes.changes * mode.scale), 2), sizes.warm_up))
    return measured


def _figures(measured: Mapping[str, Sequence[Measured]]) -> dict[str, Figure]:
    rates = {name: statistics.median(each.rate for each in found) for name, found in measured.items()}
    reference = rates.get(REFERENCE)
    return {
        name: Figure(
            found[0].changes,
            rates[name],
            rates[name] / reference if reference else None,
            tuple(each.rate for each in found),
            {process: statistics.median(each.cpu_us[process] for each in found) for process in found[0].cpu_us},
        )
        for name, found in measured.items()
    }
