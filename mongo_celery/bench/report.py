"""The results, for people and as JSON."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from rich.console import Console
from rich.table import Table

from mongo_celery.bench.payload import order_bytes
from mongo_celery.bench.run import REFERENCE, Figure, Results
from mongo_celery.bench.sizes import BenchSizes

_PACKAGES = ("celery", "kombu", "pymongo", "redis")
_AIMS = {"bridge_chain": 0.65, "bridge_inline": 0.95, "bridge_runs": 25.0, "bridge_bulk": 60.0}
_LATENCY_AIM = 3.0


def as_json(results: Results, sizes: BenchSizes) -> dict[str, Any]:
    """One object; parts that were not measured are null or empty."""
    memory, take_over = results.memory, results.take_over
    return {
        "seconds": round(results.seconds, 1),
        "machine": machine(),
        "payload_bytes": order_bytes(),
        "rounds": sizes.rounds,
        "modes": {name: _figure(figure) for name, figure in results.figures.items()},
        "latency_ms": {
            name: {"samples": each.samples, "p50": round(each.p50, 2), "p99": round(each.p99, 2)}
            for name, each in results.latency.items()
        },
        "listener_memory_mb": None
        if memory is None
        else {
            "backlog": memory.backlog,
            "start": round(memory.start, 1),
            "steps": [round(step, 1) for step in memory.steps],
            "peak": round(memory.peak, 1),
        },
        "take_over_seconds": None
        if take_over is None
        else {
            "lease_ttl": take_over.lease_ttl,
            "sigkill": [round(each, 3) for each in take_over.sigkill],
            "sigterm": [round(each, 3) for each in take_over.sigterm],
        },
        "aims": aims(results),
    }


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{package: version(package) for package in _PACKAGES},
    }


def aims(results: Results) -> dict[str, dict[str, Any]]:
    """The project's aims that this run can judge."""
    found = {}
    for name, aim in _AIMS.items():
        figure = results.figures.get(name)
        if figure is not None and figure.ratio is not None:
            found[f"{name} / {REFERENCE}"] = _aim(figure.ratio, aim, met=figure.ratio >= aim)
    if {"watch_delay", "bridge_chain"} <= set(results.latency):
        ratio = results.latency["bridge_chain"].p50 / results.latency["watch_delay"].p50
        found["idle latency, bridge_chain / watch_delay"] = _aim(ratio, _LATENCY_AIM, met=ratio <= _LATENCY_AIM)
    return found


def show(results: Results, console: Console) -> None:
    """Tables and sentences."""
    if results.figures:
        console.print(_table(results.figures))
    for name, latency in results.latency.items():
        console.print(
            f"write to handler, idle, {name}: median {latency.p50:.1f} ms, p99 {latency.p99:.1f} ms "
            f"({latency.samples} writes)"
        )
    if results.memory is not None:
        steps = ", ".join(f"{step:.0f}" for step in results.memory.steps)
        console.print(
            f"listener's memory: {results.memory.start:.0f} MB at start; {steps} MB after each quarter of "
            f"{results.memory.backlog} changes that nobody handles; peak {results.memory.peak:.0f} MB"
        )
    if results.take_over is not None:
        for signal in ("sigterm", "sigkill"):
            seconds = getattr(results.take_over, signal)
            console.print(
                f"take-over after {signal.upper()} with lease_ttl={results.take_over.lease_ttl:g}: median "
                f"{statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s"
            )
    for name, aim in aims(results).items():
        console.print(f"{name}: {aim['value']} (aim {aim['aim']}: {'met' if aim['met'] else 'missed'})")
    console.print(f"{results.seconds:.0f} s in all")


def _table(figures: Mapping[str, Figure]) -> Table:
    table = Table(title="Changes per second")
    table.add_column("mode")
    for column in ("changes/s", f"x {REFERENCE}", "lowest", "highest", "CPU us/change"):
        table.add_column(column, justify="right")
    for name, figure in figures.items():
        ratio = "-" if figure.ratio is None else f"{figure.ratio:.2f}"
        cpu = f"{sum(figure.cpu_us.values()):,.0f}"
        rates = (f"{rate:,.0f}" for rate in (min(figure.rounds), max(figure.rounds)))
        table.add_row(name, f"{figure.rate:,.0f}", ratio, *rates, cpu)
    return table


def _figure(figure: Figure) -> dict[str, Any]:
    return {
        "changes": figure.changes,
        "changes_per_second": round(figure.rate, 2),
        f"ratio_to_{REFERENCE}": None if figure.ratio is None else round(figure.ratio, 4),
        "rounds": [round(rate, 2) for rate in figure.rounds],
        "cpu_us_per_change": {name: round(used) for name, used in figure.cpu_us.items()},
    }


def _aim(value: float, aim: float, *, met: bool) -> dict[str, Any]:
    return {"value": round(value, 2), "aim": aim, "met": met}
