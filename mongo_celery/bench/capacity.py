"""
What this machine carries of a user's own changes: measured with few workers, computed for more.

Each measurement writes documents of the given content, lets handlers take the given time, and counts handlers
for some seconds while more waits than can be handled. One partition alone tells how fast one run can follow
another; one worker, and then several, tell the rest. More workers than the cores can feed are not started: what
they would carry follows from what a change costs, in `limits`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mongo_celery.bench.errors import BenchError
from mongo_celery.bench.limits import CORES, WORKERS, Costs, limits, lowest
from mongo_celery.bench.modes import MODES, Mode
from mongo_celery.bench.payload import write_documents
from mongo_celery.bench.stage import Scene, Stage, pause
from mongo_celery.bench.usage import Usage, available_mb
from mongo_celery.bench.workload import Workload
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.embedded.crew import ChildProcess

CAPACITY_MODES = tuple(mode.name for mode in MODES.values() if mode.is_bridge)
DEFAULT_MODES = ("bridge_chain", "bridge_inline", "bridge_runs")
WORKER_COUNTS = (1, 4, 16)
WORKER_PROCESSES = 2

_WARM_UP_CHANGES = 60
_SHORT_SECONDS = 0.05
"""Of a handler: there is time for the whole warm-up; of longer ones two in each process have to do."""

_HANDLINGS_MIN = 3
"""An observation takes as long as so many handlers in a row at least."""

_BACKLOG_BYTES = 256 << 20
_BACKLOG_MIN = 200
_BACKLOG_BYTES_MAX = 1 << 30
"""Also of the fewest: half of the oplog of a server that the bench starts."""

_RATE_EXPECTED = 500
"""Changes per second of a mode with the scale 1 and a handler that does nothing, on a fast machine."""

_FULL_SHARE = 0.9
"""Of the cores: who finds less than the rest waits for it."""

_MEASURED_WORKERS = 4
_WORKER_MB = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """
    What so many workers carry.

    Attributes:
        rate: changes per second with all processes on this machine.
        measured: whether that was measured; else it is computed.
        limit: where it has its limit.
        apart: changes per second with each worker and server on a machine of its own, computed.
        apart_limit: where that has its limit.
    """

    workers: int
    rate: float
    measured: bool
    limit: str
    apart: float
    apart_limit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeCapacity:
    """
    One mode's part.

    Attributes:
        carried: by the number of workers.
        limits: changes per second at which each part of it is full, workers excepted.
        cpu_us: processor time for one change, in microseconds, by process.
    """

    carried: tuple[Carried, ...]
    limits: dict[str, float]
    cpu_us: dict[str, float]


@dataclass(slots=True)
class Capacity:
    """What was found, by mode."""

    workload: Workload
    modes: dict[str, ModeCapacity] = field(default_factory=dict)
    seconds: float = 0.0
    others: float | None = None
    uncounted: tuple[str, ...] = ()
    rough: bool = False


@dataclass(frozen=True, slots=True)
class Observation:
    """Handlers that started within some seconds, and what was used meanwhile."""

    rate: float
    count: int
    usage: Usage


def measure_capacity(
    stage: Stage,
    workload: Workload,
    modes: Sequence[str],
    workers: Sequence[int],
    seconds: float,
    announce: Callable[[str], None],
) -> Capacity:
    """
    Measure what can be measured here, and compute the rest.

    Args:
        stage: the servers, started.
        workload: the user's.
        modes: names of modes with a bridge.
        workers: how many.
        seconds: how long handlers are counted, at least.
        announce: called with a line about what is being measured now.
    """
    began = time.monotonic()
    capacity = Capacity(workload, uncounted=stage.uncounted)
    found: list[Observation] = []
    for name in modes:
        measuring = _Measuring(stage, MODES[name], workload, seconds, announce)
        capacity.modes[name] = measuring.mode_capacity(sorted(set(workers)))
        found += measuring.observed.values()
    total = sum(each.usage.total for each in found)
    capacity.others = sum(each.usage.others for each in found) / total if total else None
    capacity.seconds = time.monotonic() - began
    return capacity


class _Measuring:
    """The measurements of one mode, by the number of workers."""

    def __init__(
        self, stage: Stage, mode: Mode, workload: Workload, seconds: float, announce: Callable[[str], None]
    ) -> None:
        self.observed: dict[int, Observation] = {}
        self._stage = stage
        self._mode = mode
        self._workload = workload
        self._seconds = max(seconds, _HANDLINGS_MIN * workload.work.seconds)
        self._announce = announce

    def mode_capacity(self, counts: Sequence[int]) -> ModeCapacity:
        """Measure one partition, one worker and as many more as fit, in this order."""
        self._announce(f"{self._mode.name}: one partition")
        alone = self._observe(1, partitions=1)
        costs = self._costs(alone)
        for count in sorted({1, *counts}):
            if count == 1 or self._fits(costs, count):
                self._announce(f"{self._mode.name}: {count} worker{'s' * (count > 1)}")
                self.observed[count] = self._observe(count)
                costs = self._costs(alone)
        return ModeCapacity(
            carried=tuple(self._carried(costs, count) for count in counts),
            limits={part: rate for part, rate in limits(costs, 1, here=True).items() if part != WORKERS},
            cpu_us={process: used * 1e6 for process, used in costs.cpu.items()},
        )

    def _carried(self, costs: Costs, count: int) -> Carried:
        apart_limit, apart = lowest(limits(costs, count, here=False))
        limit, rate = lowest(limits(costs, count, here=True))
        seen = self.observed.get(count)
        if seen is not None:
            rate = seen.rate
            if _fills_cores(seen.usage):
                limit = CORES
        return Carried(
            workers=count,
            rate=rate,
            measured=seen is not None,
            limit=limit,
            apart=apart,
            apart_limit=apart_limit,
        )

    def _costs(self, alone: Observation) -> Costs:
        """By the fastest observation: what a listener does by time costs a change less the more there are of them."""
        fastest = max((alone, *self.observed.values()), key=lambda each: each.rate)
        one = self.observed.get(1, alone)
        cpu = {process: seconds / fastest.count for process, seconds in fastest.usage.by_process.items()}
        return Costs(
            cpu=cpu,
            worker_rate=one.rate,
            partition_rate=alone.rate,
            partitions=BridgeOptions().partitions,
            cores=_cores(),
        )

    def _fits(self, costs: Costs, count: int) -> bool:
        """Whether so many workers are worth starting: few always are, more while cores and memory are left for them."""
        if count <= _MEASURED_WORKERS:
            return True
        _, rate = lowest(limits(costs, count, here=False))
        enough_cores = rate * sum(costs.cpu.values()) <= _cores() * _FULL_SHARE
        return enough_cores and available_mb() >= count * _WORKER_MB

    def _observe(self, workers: int, **bridge: int) -> Observation:
        mode, workload = self._mode, self._workload
        work = workload.work.plain()
        options = {**mode.bridge, **bridge}
        with self._stage.scene(f"{mode.name.replace('_', '-')}-own", mode.handler, work, **options) as scene:
            assert mode.app is not None, "a mode of a bridge has a worker"
            started = [
                scene.worker(mode.app, processes=WORKER_PROCESSES, number=number + 1) for number in range(workers)
            ]
            backlog = backlog_of(mode, workload, self._seconds, workers)
            write_documents(scene.orders, workload.document, backlog)
            processes = workers * WORKER_PROCESSES
            scene.wait("the workers", lambda: _pools(started) >= processes, lambda: _pools(started))
            mode.feeder(scene, backlog)
            warm_up = min(self._warm_up(workers), backlog // 2)
            scene.wait("the first handlers", lambda: scene.started.count() >= warm_up, scene.started.count)
            return self._count(scene, backlog)

    def _count(self, scene: Scene, backlog: int) -> Observation:
        """Handlers of some seconds, or until all is handled."""
        before, first = scene.usage(), scene.started.count()
        until = time.monotonic() + self._seconds
        while time.monotonic() < until and scene.started.count() < backlog:
            scene.check()
            pause(min(0.05, self._seconds / 10))
        usage, times = scene.usage().since(before), scene.started.times()
        inside = times[first - 1 :]
        if len(inside) < 2 or inside[-1] == inside[0]:  # noqa: PLR2004 - a rate lies between two
            raise BenchError(
                f"{self._mode.name}: too few handlers in {self._seconds:.0f} s; try it with a shorter time."
            )
        return Observation((len(inside) - 1) / (inside[-1] - inside[0]), len(inside) - 1, usage)

    def _warm_up(self, workers: int) -> int:
        """How many handlers start before any is counted."""
        return _WARM_UP_CHANGES if self._workload.work.seconds < _SHORT_SECONDS else 2 * workers * WORKER_PROCESSES


def backlog_of(mode: Mode, workload: Workload, seconds: float, workers: int) -> int:
    """More changes than can be handled in these seconds, as long as an oplog has room for them."""
    work, slots, size = workload.work.seconds, workers * WORKER_PROCESSES, workload.document_bytes
    rate = _RATE_EXPECTED * mode.scale
    if work:
        rate = min(rate, slots / work)
    wanted = int(rate * (seconds + 2) * 1.5) + _WARM_UP_CHANGES + 2 * slots
    return max(min(wanted, _BACKLOG_BYTES // size), min(_BACKLOG_MIN, _BACKLOG_BYTES_MAX // size))


def _fills_cores(usage: Usage) -> bool:
    """Whether the cores were full, and mostly of the run's own processes: of others the run says how much they took."""
    return usage.busy >= usage.total * _FULL_SHARE and usage.others < usage.busy / 2


def _pools(workers: Sequence[ChildProcess]) -> int:
    """How many processes the workers have to run handlers in."""
    return sum(len(each.children()) for each in workers)


def _cores() -> int:
    return len(os.sched_getaffinity(0))
