"""Changes per second of each mode, by the one rule of the package's docstring."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mongo_celery.bench.payload import write_orders
from mongo_celery.bench.stage import Scene, Stage, pause
from mongo_celery.embedded.crew import ChildProcess

BRIDGE_APP = "mongo_celery.bench.bridge_app"
_BULK_APP = "mongo_celery.bench.bulk_app"
_RAW_APP = "mongo_celery.bench.raw_app"
_PROGRAMS = "mongo_celery.bench.programs"
_LAST_COMMIT_LOOK_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Mode:
    """
    A way to turn changes into handler calls.

    Attributes:
        name: as in figures.
        feeder: starts what feeds the worker, or does everything itself, for a number of changes.
        app: the worker's module; None for a mode without a worker.
        reads: whether changes are documents, written beforehand.
        ends: which times say that a change is done: `started`, `ended`, or `committed` (the partitions' documents).
        bridge: options of the bridge.
        scale: how many times the changes of `raw_chain` make a measurement of similar length.
    """

    name: str
    feeder: Callable[[Scene, int], ChildProcess]
    app: str | None = None
    reads: bool = True
    ends: str = "started"
    bridge: Mapping[str, object] = field(default_factory=dict)
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Measured:
    """
    One measurement.

    Attributes:
        cpu_us: processor time for one change, in microseconds, by process.
    """

    changes: int
    rate: float
    cpu_us: Mapping[str, float]


def _program(name: str) -> Callable[[Scene, int], ChildProcess]:
    return lambda scene, count: scene.program(_PROGRAMS, name, str(count))


def _listener(scene: Scene, count: int) -> ChildProcess:
    del count
    return scene.listener(BRIDGE_APP)


def _bulk_listener(scene: Scene, count: int) -> ChildProcess:
    del count
    return scene.listener(_BULK_APP)


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("raw_stream", _program("raw_stream"), scale=10),
        Mode("raw_task", _program("publish_tasks"), _RAW_APP, reads=False, scale=2),
        Mode("raw_chain", _program("publish_chains"), _RAW_APP, reads=False, ends="ended"),
        Mode("watch_delay", _program("watch_delay"), _RAW_APP, scale=2),
        Mode("watch_loop", _program("watch_loop"), ends="ended"),
        Mode("bridge_chain", _listener, BRIDGE_APP, ends="committed", bridge={"run_size": 1}),
        Mode("bridge_inline", _listener, BRIDGE_APP, ends="committed", bridge={"run_size": 1, "commit": "inline"}),
        Mode("bridge_runs", _listener, BRIDGE_APP, ends="committed", bridge={"run_size": 200}, scale=10),
        Mode("bridge_bulk", _bulk_listener, _BULK_APP, ends="committed", scale=20),
    )
}
"""All modes, in the order of a round."""


def measure(stage: Stage, mode: Mode, changes: int, warm_up: int) -> Measured:
    """Measure a mode once, with processes of its own."""
    with stage.scene(mode.name.replace("_", "-"), **mode.bridge) as scene:
        done = 0
        if mode.app is not None:
            scene.worker(mode.app)
            scene.stop(_Feeding(scene, mode, 0, warm_up).feeder)
            done = warm_up
        feeding = _Feeding(scene, mode, done, changes)
        first = scene.started.times()[done]
        last = feeding.committed_at if mode.ends == "committed" else scene.laps(mode.ends).times()[-1]
        return Measured(changes, (changes - 1) / (last - first), feeding.cpu_us)


class _Feeding:
    """
    Feed a number of changes to a mode and wait until they are done; all of it happens at construction.

    Attributes:
        feeder: the process that fed them.
        committed_at: when the partitions' documents said that all are committed; 0 for other ends.
        cpu_us: processor time for one change from the first handler's start on, by process.
    """

    def __init__(self, scene: Scene, mode: Mode, done: int, count: int) -> None:
        scene.begin_now()
        if mode.reads:
            write_orders(scene.orders, count)
        self.feeder = mode.feeder(scene, count)
        self.committed_at = 0.0
        started, total = scene.started, done + count
        scene.wait("the first handler", lambda: started.count() > done)
        before = scene.cpu_seconds()
        ended = started if mode.ends == "committed" else scene.laps(mode.ends)
        scene.wait("the last handler", lambda: ended.count() >= total, ended.count)
        if mode.ends == "committed":
            self._await_commits(scene, total)
        after = scene.cpu_seconds()
        self.cpu_us = {name: (used - before[name]) / count * 1e6 for name, used in after.items()}

    def _await_commits(self, scene: Scene, total: int) -> None:
        """Looked at often, but only once the last handler has started: looking costs the server something."""
        pending = total - scene.committed()
        while pending > 0:
            pause(_LAST_COMMIT_LOOK_SECONDS)
            pending = total - scene.committed()
        self.committed_at = time.monotonic()
