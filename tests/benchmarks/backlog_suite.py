"""Backlogs that a listener finds at its start: its memory and what a change costs, by the length of the backlog."""

from __future__ import annotations

from collections.abc import Callable

from mongo_celery.bench.payload import write_orders
from mongo_celery.bench.stage import Scene, Stage
from tests.benchmarks.commits import Measured, Measuring, listen, measured_readings
from tests.benchmarks.many_app import Wanted
from tests.benchmarks.processes import memory_mb
from tests.benchmarks.readings import MEGABYTES, Reading, Tables
from tests.benchmarks.sizes import Sizes

MANY_APP = "tests.benchmarks.many_app"
LIST = 500
"""Changes of a list: the bridge's quickest way, so that the listener is what works hardest."""

_WARM_UP = 1000
_PARTS = (100, 10, 1)
_SHORTEST = 4000
"""Changes; of fewer the listener has read most before the first one is committed."""
_REPEATED_UP_TO = 100_000


def run_backlog(stage: Stage, sizes: Sizes, announce: Callable[[str], None]) -> Tables:
    """Measure each length; what takes long once, the others in every round."""
    lengths = [length for part in _PARTS if (length := sizes.owed // part) >= _SHORTEST]
    found: dict[int, list[tuple[Measured, float, float]]] = {length: [] for length in lengths}
    for number in range(sizes.rounds):
        for length, measured in found.items():
            if number and length > _REPEATED_UP_TO:
                continue
            announce(f"a backlog of {length:,}, round {number + 1} of {sizes.rounds}")
            with stage.scene("backlog") as scene:
                measured.append(_measure(scene, length))
    return {f"A change of a backlog of {length:,}": _readings(rounds) for length, rounds in found.items()}


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


def _readings(found: list[tuple[Measured, float, float]]) -> list[Reading]:
    return [
        *measured_readings([measured for measured, _, _ in found]),
        Reading(name="listener at its start", unit=MEGABYTES, rounds=tuple(started for _, started, _ in found)),
        Reading(name="listener at its highest", unit=MEGABYTES, rounds=tuple(peak for _, _, peak in found)),
    ]
