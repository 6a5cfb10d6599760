"""Documents that exist, delivered by a snapshot: how fast beside as many inserts, and what live changes wait for it."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mongo_celery.bench.payload import make_order, write_orders
from mongo_celery.bench.stage import BenchError, Scene, Stage, pause
from mongo_celery.bench.stopwatch import Laps
from mongo_celery.embedded.processes import ChildProcess
from tests.benchmarks.commits import Measured, Measuring, listen
from tests.benchmarks.readings import RATE, Reading, quantile, reading
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.snapshot_app import PROBE

SNAPSHOT, LIVE = "snapshot", "live"
SAME, OTHER = "same handler", "other handler"
SNAPSHOT_APP = "tests.benchmarks.snapshot_app"

_OPTIONS = {"run_size": 200}
_WARM_UP = 100
_LOOK_SECONDS = 0.02
_SAMPLE_PAUSE_SECONDS = (0.03, 0.07)


@dataclass(frozen=True, slots=True)
class Waited:
    """Milliseconds from the write of a live change to the start of its handler."""

    samples: int
    p50: float
    p99: float
    longest: float


@dataclass(slots=True)
class SnapshotResults:
    """
    What the suite has found.

    Attributes:
        documents: of one snapshot.
        delivered: documents per second, from the first start to the last commit; the ratio is to live inserts.
        cpu_us: processor time for one document, in microseconds, by how it came and by process.
        alone: what live changes wait, by handler, while nothing else happens.
        beside: the same while a snapshot runs.
    """

    documents: int = 0
    delivered: list[Reading] = field(default_factory=list)
    cpu_us: dict[str, dict[str, float]] = field(default_factory=dict)
    alone: dict[str, Waited] = field(default_factory=dict)
    beside: dict[str, Waited] = field(default_factory=dict)


def run_snapshot(stage: Stage, sizes: Sizes, announce: Callable[[str], None]) -> SnapshotResults:
    """Measure snapshots beside live inserts, and live inserts beside a snapshot."""
    results = SnapshotResults(documents=sizes.existing)
    rates: dict[str, list[float]] = {SNAPSHOT: [], LIVE: []}
    used: dict[str, list[Mapping[str, float]]] = {SNAPSHOT: [], LIVE: []}
    for number in range(sizes.snapshots):
        with stage.scene(SNAPSHOT, **_OPTIONS) as scene:
            for name, measured in _both(scene, sizes.existing, f"round {number + 1} of {sizes.snapshots}", announce):
                rates[name].append(measured.rate)
                used[name].append(measured.cpu_us)
    results.delivered = [
        reading(LIVE, RATE, rates[LIVE], None),
        reading(SNAPSHOT, RATE, rates[SNAPSHOT], (LIVE, rates[LIVE])),
    ]
    results.cpu_us = {
        name: {process: quantile([each[process] for each in found], 0.5) for process in found[0]}
        for name, found in used.items()
    }
    results.alone, results.beside = _latencies(stage, sizes, announce)
    return results


def _both(scene: Scene, documents: int, which: str, announce: Callable[[str], None]) -> list[tuple[str, Measured]]:
    """One after the other in one scene, through the same handler."""
    announce(f"{documents} documents, {which}")
    listener = _prepare(scene, documents)
    announce(f"a snapshot of {documents} documents, {which}")
    measuring = Measuring(scene, documents)
    order_snapshot(scene)
    found = [(SNAPSHOT, measuring.end())]
    scene.wait("the snapshot's end", lambda: _is_done(scene))
    scene.stop(listener)
    announce(f"{documents} live inserts, {which}")
    write_orders(scene.orders, documents)
    measuring = Measuring(scene, documents)
    listen(scene, SNAPSHOT_APP)
    return [*found, (LIVE, measuring.end())]


def _prepare(scene: Scene, documents: int) -> ChildProcess:
    """A listener behind so many documents, and a worker that has done everything once."""
    write_orders(scene.orders, documents - _WARM_UP)
    scene.begin_now()
    scene.worker(SNAPSHOT_APP)
    listener = listen(scene, SNAPSHOT_APP)
    write_orders(scene.orders, _WARM_UP)
    scene.wait("the warm-up", lambda: scene.committed() >= _WARM_UP, scene.committed)
    return listener


def order_snapshot(scene: Scene) -> None:
    """Order a snapshot for the handler, as a person does."""
    command = scene.program("celery", "-A", SNAPSHOT_APP, "changes", "snapshot", "start", "handler", "--yes")
    scene.wait("the command", lambda: command.returncode is not None)
    scene.check()
    scene.stop(command)


def _is_done(scene: Scene) -> bool:
    found = scene.state["snapshots"].find_one({}, sort=[("$natural", -1)])
    return bool(found and found["state"] == "done")


def _latencies(
    stage: Stage, sizes: Sizes, announce: Callable[[str], None]
) -> tuple[dict[str, Waited], dict[str, Waited]]:
    """Single live inserts, alone, and for as long as a snapshot runs."""
    with stage.scene("stall", **_OPTIONS) as scene:
        _prepare(scene, sizes.existing)
        sampling = _Sampling(scene)
        announce("live changes alone")
        alone = sampling.take(lambda taken: taken < sizes.live)
        announce("live changes beside a snapshot")
        order_snapshot(scene)
        beside = sampling.take(lambda _: not _is_done(scene))
        if any(not each.samples for each in beside.values()):
            raise BenchError("the snapshot was over before a live change; give more documents.")
        return alone, beside


class _Sampling:
    """Live changes, one at a time: of the handler whose snapshot runs, and of another one, in turns."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._laps: dict[str, Laps] = {SAME: scene.laps("probed"), OTHER: scene.laps("beside")}
        self._targets = {SAME: scene.orders, OTHER: scene.data["beside"]}
        self._numbers = itertools.count()

    def take(self, goes_on: Callable[[int], bool]) -> dict[str, Waited]:
        """Write, and wait for the handler, as long as a condition on the number of changes holds."""
        found: dict[str, list[float]] = {SAME: [], OTHER: []}
        while goes_on(len(found[OTHER])):
            for name, seconds in found.items():
                seconds.append(self._one(name))
        return {name: _waited(seconds) for name, seconds in found.items()}

    def _one(self, name: str) -> float:
        pause(random.uniform(*_SAMPLE_PAUSE_SECONDS))
        laps = self._laps[name]
        before, written = laps.count(), time.monotonic()
        self._targets[name].insert_one({**make_order(next(self._numbers)), PROBE: True})
        self._scene.wait("a live change", lambda: laps.count() > before)
        return laps.times()[-1] - written


def _waited(seconds: list[float]) -> Waited:
    if not seconds:
        return Waited(0, 0.0, 0.0, 0.0)
    p50, p99, longest = (quantile(seconds, part) * 1000 for part in (0.5, 0.99, 1.0))
    return Waited(len(seconds), p50, p99, longest)
