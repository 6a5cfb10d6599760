"""One stream for 1, 10 and 60 handlers: what a change costs for each that gets it, and beside those that do not."""

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
COUNTS = (1, 10, 60)
_WARM_UP = 100
_CHAINS_PART = 10
"""A chain costs so many times what a change of a run does, and more."""


@dataclass(frozen=True, slots=True)
class Kind:
    """
    A way in which handlers share a stream.

    Attributes:
        name: as in figures.
        together: whether each change is for all of them, or for the first alone.
        run_size: of the bridge.
    """

    name: str
    together: bool
    run_size: int


KINDS = (Kind("chains of all", True, 1), Kind("runs of all", True, 200), Kind("runs of one", False, 200))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """
    One number of handlers.

    Attributes:
        kind: of `KINDS`.
        handlers: how many share the stream.
        changes: of one round.
        executions: commits per second, of all handlers.
        cpu_us: processor time for one change of one handler, in microseconds, by process; the median of the rounds.
        oplog_bytes: what the bridge has written to the oplog for one change of one handler; None where that cannot be
            read.
        listener_mb: the listener's memory at its highest.
    """

    kind: str
    handlers: int
    changes: int
    executions: float
    cpu_us: Mapping[str, float]
    oplog_bytes: float | None
    listener_mb: float


@dataclass(slots=True)
class HandlersResults:
    """What the suite has found, kind by kind."""

    shared: list[Shared] = field(default_factory=list)


def run_handlers(stage: Stage, sizes: Sizes, announce: Callable[[str], None]) -> HandlersResults:
    """Measure each number of handlers of each kind, all of them in each round."""
    found: dict[tuple[Kind, int], list[tuple[Measured, float]]] = {
        (kind, count): [] for kind in KINDS for count in COUNTS
    }
    for number in range(sizes.rounds):
        for (kind, count), measured in found.items():
            announce(f"{kind.name}, {count} handlers, round {number + 1} of {sizes.rounds}")
            with stage.scene("handlers", run_size=kind.run_size) as scene:
                measured.append(_measure(scene, kind, count, _changes(kind, count, sizes)))
    return HandlersResults([_shared(*key, measured, sizes) for key, measured in found.items()])


def _changes(kind: Kind, count: int, sizes: Sizes) -> int:
    """As many as make measurements of similar length."""
    wanted = sizes.reached // (_CHAINS_PART if kind.run_size == 1 else 1)
    return max(wanted // (count if kind.together else 1), 2)


def _measure(scene: Scene, kind: Kind, count: int, changes: int) -> tuple[Measured, float]:
    Wanted(count=count, together=kind.together).leave(scene.setting)
    each = count if kind.together else 1
    scene.worker(MANY_APP)
    listener = listen(scene, MANY_APP)
    warm_up = min(_WARM_UP, changes)
    write_orders(scene.orders, warm_up)
    scene.wait("the warm-up", lambda: scene.committed() >= warm_up * each, scene.committed)
    scene.stop(listener)
    write_orders(scene.orders, changes)
    measuring = Measuring(scene, changes * each)
    listener = listen(scene, MANY_APP)
    return measuring.end(), memory_mb(listener.pid)[1]


def _shared(kind: Kind, count: int, found: list[tuple[Measured, float]], sizes: Sizes) -> Shared:
    measured = [each for each, _ in found]
    written = [each.oplog_bytes for each in measured if each.oplog_bytes is not None]
    return Shared(
        kind=kind.name,
        handlers=count,
        changes=_changes(kind, count, sizes),
        executions=statistics.median(each.rate for each in measured),
        cpu_us={name: statistics.median(each.cpu_us[name] for each in measured) for name in measured[0].cpu_us},
        oplog_bytes=statistics.median(written) if written else None,
        listener_mb=max(memory for _, memory in found),
    )
