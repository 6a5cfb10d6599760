"""One stream for 1, 10 and 60 handlers: what a change costs for each that gets it, and beside those that do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mongo_celery.bench.payload import write_orders
from mongo_celery.bench.stage import Scene, Stage
from tests.benchmarks.commits import Measured, Measuring, listen, measured_readings
from tests.benchmarks.many_app import Wanted
from tests.benchmarks.processes import memory_mb
from tests.benchmarks.readings import MEGABYTES, Reading, Tables
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


def run_handlers(stage: Stage, sizes: Sizes, announce: Callable[[str], None]) -> Tables:
    """Measure each number of handlers of each kind, all of them in each round."""
    found: dict[tuple[Kind, int], list[tuple[Measured, float]]] = {
        (kind, count): [] for kind in KINDS for count in COUNTS
    }
    for number in range(sizes.rounds):
        for (kind, count), measured in found.items():
            announce(f"{kind.name}, {count} handlers, round {number + 1} of {sizes.rounds}")
            with stage.scene("handlers", run_size=kind.run_size) as scene:
                measured.append(_measure(scene, kind, count, _changes(kind, count, sizes)))
    return {
        f"A change of {_changes(kind, count, sizes):,} for one handler, {kind.name}, {count} handlers": [
            *measured_readings([each for each, _ in measured]),
            Reading(name="listener at its highest", unit=MEGABYTES, rounds=tuple(memory for _, memory in measured)),
        ]
        for (kind, count), measured in found.items()
    }


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
