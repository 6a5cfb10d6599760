"""The modes, and their measurement in rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mongo_celery.bench.payload import write_orders
from mongo_celery.bench.setting import BRIDGE_BULK, RAW_CHAIN
from mongo_celery.bench.stage import Scene, Stage, pause
from mongo_celery.bench.stopwatch import cpu_us_per_change
from mongo_celery.embedded.processes import ChildProcess

APP = "mongo_celery.bench.app"
WARM_UP = 100
_COMMIT_POLL_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Mode:
    """
    A way to turn changes into handler calls.

    Attributes:
        bridge: the bridge's options.
        scale: the number of changes relative to `raw_chain`. A listener reads up to 2,000 changes before the first
            handler starts, which no figure includes. So a fast mode gets many more.
    """

    name: str
    bridge: Mapping[str, Any] = field(default_factory=dict)
    scale: int = 1

    def start_feeder(self, scene: Scene, count: int) -> ChildProcess:
        """Start the process that feeds `count` changes to the worker."""
        if self.name == RAW_CHAIN:
            return scene.program(APP, "publisher", str(count))
        write_orders(scene.orders, count)
        return scene.listener(APP)


MODES = {
    mode.name: mode
    for mode in (
        Mode(RAW_CHAIN),
        Mode("bridge_chain", {"run_size": 1}),
        Mode("bridge_inline", {"run_size": 1, "commit": "inline"}),
        Mode("bridge_runs", {"run_size": 200}, scale=80),
        Mode(BRIDGE_BULK, scale=80),
    )
}
"""All modes, in the order of a round."""


@dataclass(slots=True)
class Figure:
    """
    The measurements of a mode.

    Attributes:
        changes: the changes of one measurement.
        rates: changes per second, for each round.
        costs: CPU time per change in microseconds, by process, for each round.
    """

    changes: int
    rates: list[float] = field(default_factory=list)
    costs: list[Mapping[str, float]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """The median of the rates."""
        return statistics.median(self.rates)

    @property
    def cpu_us(self) -> dict[str, float]:
        """The median CPU time of one change, by process."""
        return {each: statistics.median(cost.get(each, 0.0) for cost in self.costs) for each in self.costs[0]}

    def ratios(self, reference: Figure | None) -> tuple[float | None, float | None]:
        """
        Return the ratios to another figure: by rate, and by changes per CPU time.

        Both are None without a reference.
        """
        if reference is None:
            return None, None
        used = sum(self.cpu_us.values())
        return self.rate / reference.rate, sum(reference.cpu_us.values()) / used if used else None


def measure_rounds(
    stage: Stage, names: Sequence[str], rounds: int, changes: int, announce: Callable[[str], None]
) -> dict[str, Figure]:
    """
    Measure each mode once, then all again in each round, so that a slower machine slows all of them.

    Args:
        names: the modes.
        changes: the changes of `raw_chain` in a round.
        announce: called with a line about the current measurement.
    """
    figures = {name: Figure(changes * mode.scale) for name, mode in MODES.items() if name in names}
    for number in range(rounds):
        for name, figure in figures.items():
            announce(f"round {number + 1} of {rounds}: {name}")
            _measure(stage, MODES[name], figure)
    return figures


def _measure(stage: Stage, mode: Mode, figure: Figure) -> None:
    """Measure a mode once. Another feeder warms up the worker first, so the measured one starts with an idle worker."""
    with stage.scene(mode.name, **mode.bridge) as scene:
        scene.worker(APP)
        _feed(scene, mode, 0, WARM_UP)
        rate, cost = _feed(scene, mode, WARM_UP, figure.changes)
    figure.rates.append(rate)
    figure.costs.append(cost)


def _feed(scene: Scene, mode: Mode, done: int, count: int) -> tuple[float, dict[str, float]]:
    """Feed `count` changes to a mode that has already done some. Return their rate, and the CPU time per change."""
    scene.begin_now()
    feeder = mode.start_feeder(scene, count)
    started, total = scene.started, done + count
    scene.wait("the first handler", lambda: started.count() > done)
    before = scene.cpu_seconds()
    if mode.name == RAW_CHAIN:
        ended = scene.laps("ended")
        scene.wait("the last task", lambda: ended.count() >= total, ended.count)
        last = ended.times()[-1]
    else:
        scene.wait("the last handler", lambda: started.count() >= total, started.count)
        while scene.committed() < total:  # only after the last start, because a poll uses server time
            pause(_COMMIT_POLL_SECONDS)
        last = time.monotonic()
    cost = cpu_us_per_change(before, scene.cpu_seconds(), count)
    scene.stop(feeder)
    return (count - 1) / (last - started.times()[done]), cost
