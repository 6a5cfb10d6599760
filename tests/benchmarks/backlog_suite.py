"""Backlogs that a listener finds at its start: its memory and what a change costs, by the length of the backlog."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mongo_celery.bench.payload import write_orders
from mongo_celery.bench.stage import Scene, Stage
from tests.benchmarks.commits import Measured, Measuring, listen
from tests.benchmarks.many_app import Wanted
from tests.benchmarks.processes import memory_mb
from tests.benchmarks.sizes import Sizes

MANY_APP = "tests.benchmarks.many_app"
LIST = 500
"""Changes of a list: the bridge's quickest way, so that the listener is what works hardest."""

_WARM_UP = 1000
_REPEATED_UP_TO = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """
    One length of backlog.

    Attributes:
        changes: that waited when the listener started.
        rounds: how often it was measured; the figures are medians, the memory the highest of all.
        rate: commits per second.
        cpu_us: processor time for one change, in microseconds, by process.
        started_mb: the listener's memory when it led.
        peak_mb: the highest until all was committed.
    """

    changes: int
    rounds: int
    rate: float
    cpu_us: Mapping[str, float]
    started_mb: float
    peak_mb: float


@dataclass(slots=True)
class BacklogResults:
    """What the suite has found, by length."""

    backlogs: list[Backlog] = field(default_factory=list)


def run_backlog(stage: Stage, sizes: Sizes, announce: Callable[[str], None]) -> BacklogResults:
    """Measure each length; what takes long once, the others in every round."""
    found: dict[int, list[tuple[Measured, float, float]]] = {length: [] for length in sizes.owed}
    for number in range(sizes.rounds):
        for length, measured in found.items():
            if number and length > _REPEATED_UP_TO:
                continue
            announce(f"a backlog of {length:,}, round {number + 1} of {sizes.rounds}")
            with stage.scene("backlog") as scene:
                measured.append(_measure(scene, length))
    return BacklogResults([_backlog(length, measured) for length, measured in found.items()])


def _measure(scene: Scene, length: int) -> tuple[Measured, float, float]:
    Wanted(lists=LIST).leave(scene.setting)
    scene.worker(MANY_APP)
    listener = listen(scene, MANY_APP)
    write_orders(scene.orders, _WARM_UP)
    scene.wait("the warm-up", lambda: scene.committed() >= _WARM_UP, scene.committed)
    scene.stop(listener)
    write_orders(scene.orders, length)
    measuring = Measuring(scene, length)
    listener = listen(scene, MANY_APP)
    started, _ = memory_mb(listener.pid)
    return measuring.end(), started, memory_mb(listener.pid)[1]


def _backlog(length: int, found: list[tuple[Measured, float, float]]) -> Backlog:
    measured = [each for each, _, _ in found]
    return Backlog(
        changes=length,
        rounds=len(found),
        rate=statistics.median(each.rate for each in measured),
        cpu_us={name: statistics.median(each.cpu_us[name] for each in measured) for name in measured[0].cpu_us},
        started_mb=max(started for _, started, _ in found),
        peak_mb=max(peak for _, _, peak in found),
    )
