"""
The listener's memory while changes pile up and no worker takes any.

Its buffers have bounds, and when they are full the stream is not read: so its memory must grow up to
them and no further, however long the backlog.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from mongo_celery.bench.modes import BRIDGE_APP
from mongo_celery.bench.payload import write_orders
from mongo_celery.bench.stage import Scene, Stage, pause
from mongo_celery.bench.usage import memory_mb

_STEPS = 4
_SETTLED_SECONDS = 2.0
_SETTLING_SECONDS_MAX = 60.0
_LOOK_SECONDS = 0.2
_SAME_MB = 0.5


@dataclass(frozen=True, slots=True)
class Memory:
    """
    The listener's resident memory in MB (2^20).

    Attributes:
        start: when it led and nothing had been written.
        steps: when each quarter of the backlog was written and the listener had settled.
        peak: the highest at any time.
    """

    backlog: int
    start: float
    steps: tuple[float, ...]
    peak: float


def measure_memory(stage: Stage, backlog: int) -> Memory:
    """Write a backlog before the eyes of a listener without a worker."""
    with stage.scene("memory") as scene:
        listener = scene.listener(BRIDGE_APP)
        scene.wait("the listener to lead", lambda: scene.lease().get("state") == "leading")
        start = _settled(scene, listener.pid)
        steps = []
        for _ in range(_STEPS):
            write_orders(scene.orders, backlog // _STEPS)
            steps.append(_settled(scene, listener.pid))
        return Memory(backlog // _STEPS * _STEPS, start, tuple(steps), memory_mb(listener.pid)[1])


def _settled(scene: Scene, pid: int) -> float:
    """Memory once it has not changed for some seconds."""
    last, since = memory_mb(pid)[0], time.monotonic()
    until = since + _SETTLING_SECONDS_MAX
    while time.monotonic() < min(since + _SETTLED_SECONDS, until):
        pause(_LOOK_SECONDS)
        scene.check()
        now = memory_mb(pid)[0]
        if abs(now - last) > _SAME_MB:
            last, since = now, time.monotonic()
    return last
