"""The ways to turn changes into handler calls that are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mongo_celery.bench.stage import Scene
from mongo_celery.embedded.crew import ChildProcess

BRIDGE_APP = "mongo_celery.bench.bridge_app"
_BULK_APP = "mongo_celery.bench.bulk_app"
_RAW_APP = "mongo_celery.bench.raw_app"
_PROGRAMS = "mongo_celery.bench.programs"

_WITHOUT_BOUNDS = {"buffer_bytes": 1 << 30, "spill_after": 3600.0, "dispatch_grace": 600.0, "batch_size": 200}
"""Options of a listener that takes in all there is while no worker takes anything from it, in batches to count by."""


@dataclass(frozen=True, slots=True)
class Mode:
    """
    A way to turn changes into handler calls.

    Attributes:
        name: as in figures.
        feeder: starts what feeds the worker, or does everything itself, for a number of changes.
        role: what figures call the feeder, where that is not the name of its process.
        app: the worker's module; None for a mode without a worker.
        reads: whether changes are documents, written beforehand.
        ends: what says that a change is done: the times `started` or `ended`, `committed` (the partitions'
            documents), or `delivered` (MongoDB's cursor).
        bridge: options of the bridge.
        handler: options of the handler's decorator.
        scale: how many times the changes of `raw_chain` make a measurement of similar length.
        longer: how many times as long it is measured: what a listener has read before the first handler starts is in
            no figure, and has to be little beside the rest.
    """

    name: str
    feeder: Callable[[Scene, int], ChildProcess]
    role: str | None = None
    app: str | None = None
    reads: bool = True
    ends: str = "started"
    bridge: Mapping[str, Any] = field(default_factory=dict)
    handler: Mapping[str, Any] = field(default_factory=dict)
    scale: float = 1.0
    longer: float = 1.0

    @property
    def is_bridge(self) -> bool:
        """Whether a listener feeds a worker."""
        return self.ends == "committed"

    def changes(self, of_raw_chain: int) -> int:
        """How many are counted where so many are those of `raw_chain`."""
        return max(int(of_raw_chain * self.scale * self.longer), 2)


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
        Mode("raw_stream", _program("raw_stream"), "reader", scale=25),
        Mode("raw_task", _program("publish_tasks"), "publisher", _RAW_APP, reads=False, scale=2),
        Mode("raw_chain", _program("publish_chains"), "publisher", _RAW_APP, reads=False, ends="ended"),
        Mode("watch_delay", _program("watch_delay"), "publisher", _RAW_APP, scale=2),
        Mode("watch_loop", _program("watch_loop"), "reader", ends="ended", scale=2),
        Mode("listener_alone", _listener, ends="delivered", bridge={"run_size": 200, **_WITHOUT_BOUNDS}, scale=25),
        Mode("bridge_chain", _listener, app=BRIDGE_APP, ends="committed", bridge={"run_size": 1}),
        Mode("bridge_inline", _listener, app=BRIDGE_APP, ends="committed", bridge={"run_size": 1, "commit": "inline"}),
        Mode("bridge_transactional", _listener, app=BRIDGE_APP, ends="committed", handler={"transactional": True}),
        Mode("bridge_runs", _listener, app=BRIDGE_APP, ends="committed", bridge={"run_size": 200}, scale=20, longer=4),
        Mode("bridge_bulk", _bulk_listener, app=_BULK_APP, ends="committed", scale=40, longer=2),
    )
}
"""All modes, in the order of a round."""
