"""
From a write to the start of its handler, while nothing else happens.

Single inserts, with pauses of changing length so that no polling can fall into step with them. The time
runs from just before the insert is called, so that the insert itself is in it, for all modes alike.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from mongo_celery.bench.modes import Mode
from mongo_celery.bench.payload import order, write_orders
from mongo_celery.bench.stage import Scene, Stage, pause

_PAUSE_SECONDS = (0.06, 0.14)


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds from write to handler start."""

    samples: int
    p50: float
    p99: float


def measure_latency(stage: Stage, mode: Mode, samples: int, warm_up: int) -> Latency:
    """Latencies of an idle mode; its worker and its feeder have done some changes before."""
    assert mode.app is not None, "latency is that of a worker's handler"
    with stage.scene(f"{mode.name.replace('_', '-')}-idle", **mode.bridge) as scene:
        scene.worker(mode.app)
        write_orders(scene.orders, warm_up)
        mode.feeder(scene, warm_up + samples)
        scene.wait("the warm-up", lambda: scene.started.count() >= warm_up, scene.started.count)
        seconds = [_one(scene, number) for number in range(samples)]
    return Latency(samples, quantile(seconds, 0.5) * 1000, quantile(seconds, 0.99) * 1000)


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest value that is not exceeded by this part of all values."""
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def _one(scene: Scene, number: int) -> float:
    pause(random.uniform(*_PAUSE_SECONDS))  # noqa: S311 - against resonance, not a secret
    before = scene.started.count()
    written = time.monotonic()
    scene.orders.insert_one(order(number))
    scene.wait("a handler", lambda: scene.started.count() > before)
    return scene.started.times()[-1] - written
