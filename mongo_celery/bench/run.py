"""One run: rounds of all modes, then latency, memory and take-over."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mongo_celery.bench.latency import Latency, measure_latency
from mongo_celery.bench.memory import Memory, measure_memory
from mongo_celery.bench.modes import MODES, Measured, measure
from mongo_celery.bench.plan import Plan
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


def run(stage: Stage, plan: Plan, tell: Callable[[str], None]) -> Results:
    """
    Measure what the plan asks for.

    Args:
        stage: the servers, started.
        plan: the sizes.
        tell: called with a line about what is being measured now.
    """
    began = time.monotonic()
    results = Results()
    results.figures = _figures(_rounds(stage, plan, tell))
    if plan.wants("latency"):
        for name in IDLE_MODES:
            tell(f"latency of {name}")
            results.latency[name] = measure_latency(stage, MODES[name], plan.samples, plan.warm_up)
    if plan.wants("memory"):
        tell("the listener's memory under a backlog")
        results.memory = measure_memory(stage, plan.backlog)
    if plan.wants("take_over"):
        tell("take-over")
        results.take_over = measure_takeover(stage, plan.lease_ttl, plan.takeovers)
    results.seconds = time.monotonic() - began
    return results


def _rounds(stage: Stage, plan: Plan, tell: Callable[[str], None]) -> dict[str, list[Measured]]:
    """Every mode once, then every mode once more: a machine that slows down slows all of them."""
    measured: dict[str, list[Measured]] = {name: [] for name in MODES if plan.wants(name)}
    for number in range(plan.rounds):
        for name, found in measured.items():
            tell(f"round {number + 1} of {plan.rounds}: {name}")
            mode = MODES[name]
            found.append(measure(stage, mode, max(int(plan.changes * mode.scale), 2), plan.warm_up))
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
