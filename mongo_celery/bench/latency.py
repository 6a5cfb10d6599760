"""
From a write to the start of its handler: while nothing else happens, and at half of what a mode carries.

Single inserts, each with the time just before it is called, so that the insert itself is in it, for all modes
alike. The handler compares that with its own start, so it does not matter in which order handlers start. While
idle an insert waits until the one before is handled, and then for a pause of changing length, so that no polling
can fall into step with them; under load the pauses alone decide, whatever is handled.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from mongo_celery.bench.handler_work import WRITTEN, HandlerWork
from mongo_celery.bench.modes import Mode
from mongo_celery.bench.payload import order, write_orders
from mongo_celery.bench.stage import Scene, Stage, pause

_PAUSE_SECONDS = (0.06, 0.14)


@dataclass(frozen=True, slots=True)
class Latency:
    """
    Milliseconds from write to handler start.

    Attributes:
        per_second: writes a second.
    """

    samples: int
    p50: float
    p99: float
    per_second: float = 0.0


def measure_latency(stage: Stage, mode: Mode, samples: int, warm_up: int) -> Latency:
    """Latencies of an idle mode; its worker and its feeder have done some changes before."""
    return _latency(stage, mode, samples, warm_up, rate=None)


def measure_latency_under_load(stage: Stage, mode: Mode, samples: int, warm_up: int, rate: float) -> Latency:
    """
    Latencies of a mode that gets so many changes a second.

    Args:
        stage: the servers.
        mode: one with a worker that reads.
        samples: how many writes.
        warm_up: changes before.
        rate: writes a second, on average.
    """
    return _latency(stage, mode, samples, warm_up, rate=rate)


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest value that is not exceeded by this part of all values."""
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def _latency(stage: Stage, mode: Mode, samples: int, warm_up: int, rate: float | None) -> Latency:
    assert mode.app is not None, "latency is that of a worker's handler"
    name = f"{mode.name.replace('_', '-')}-{'idle' if rate is None else 'loaded'}"
    with stage.scene(name, mode.handler, HandlerWork().plain(), **mode.bridge) as scene:
        scene.worker(mode.app)
        write_orders(scene.orders, warm_up)
        mode.feeder(scene, warm_up + samples)
        scene.wait("the warm-up", lambda: scene.started.count() >= warm_up, scene.started.count)
        waited = scene.laps("waited")
        began = time.monotonic()
        for number in range(samples):
            pause(random.uniform(*_PAUSE_SECONDS) if rate is None else _interval(began, number, rate))  # noqa: S311
            _write(scene, number)
            if rate is None:
                scene.wait("a handler", lambda number=number: waited.count() > number)  # type: ignore[misc]
        seconds = time.monotonic() - began
        scene.wait("the last handler", lambda: waited.count() >= samples, waited.count)
        found = waited.times()
    return Latency(samples, quantile(found, 0.5) * 1000, quantile(found, 0.99) * 1000, samples / seconds)


def _interval(began: float, number: int, rate: float) -> float:
    """Until the next write: around its place in an even row, so that one late write does not delay all others."""
    due = began + (number + random.uniform(0.5, 1.5)) / rate  # noqa: S311 - against resonance, not a secret
    return max(due - time.monotonic(), 0.0)


def _write(scene: Scene, number: int) -> None:
    document = order(number)
    document[WRITTEN] = time.monotonic()
    scene.orders.insert_one(document)
