"""What a write with its tasks costs beside a plain write and `delay()`, and the project's aims for it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery import Celery

from mongo_celery import Outbox
from mongo_celery.bench.stage import Scene, Stage
from mongo_celery.embedded import RedisServer
from tests.benchmarks.answers import answers, ask, give_sign, ready
from tests.benchmarks.readings import MILLISECONDS, Reading, reading
from tests.benchmarks.sizes import Sizes

_PROGRAMS = "tests.benchmarks.outbox_cost_programs"
_HOT_PROCESSES = 2
_HOT_THREADS = 4
_FROZEN_THREADS = 8
_HOT = "hot"

AIMS = {
    "paced_insert_caller": 0.8,
    "paced_update_caller": 1.0,
    "insert_caller": 1.1,
    "update_caller": 1.1,
    "insert_cpu": 1.2,
    "update_cpu": 1.3,
    "bulk_100_cpu": 1.2,
    "bulk_1000_cpu": 1.3,
    "bulk_100_operators_cpu": 1.2,
    "bulk_1000_operators_cpu": 1.3,
    "hot_p99": 1.3,
    "hot_longest": 1.3,
    "frozen_longest": 1.0,
}
"""The largest ratio to the plain way: to a plain write and `delay()`, of `frozen` to the write alone."""


@dataclass(slots=True)
class OutboxCosts:
    """
    What was found.

    Attributes:
        readings: milliseconds of a write, of the caller or of all processes' processors; with their ratios.
        undelivered: how many documents still had entries when the frozen broker was back and had its time.
    """

    readings: list[Reading] = field(default_factory=list)
    undelivered: int = 0

    def aims(self) -> Iterator[tuple[str, float, float]]:
        """Name, ratio that was found, and the largest that is aimed at."""
        for each in self.readings:
            if each.name in AIMS and each.ratio is not None:
                yield each.name, each.ratio, AIMS[each.name]


def measure_costs(stage: Stage, sizes: Sizes, announce: Callable[[str], None]) -> OutboxCosts:
    """Measure all of it; processor time only where the servers are this run's own."""
    found = OutboxCosts()
    for name, size, count, paced in (
        ("paced_", 1, sizes.writes // 3, True),
        ("", 1, sizes.writes, False),
        ("bulk_100_", 100, max(sizes.writes // 75, 1), False),
        ("bulk_1000_", 1000, 1, False),
    ):
        announce(f"costs of writes, {name or 'saturated'}")
        found.readings += _costs(stage, sizes, name, (size, count), paced=paced)
    announce("a hot document")
    found.readings += _hot(stage, sizes)
    announce("a frozen broker")
    readings, found.undelivered = _frozen(stage, sizes)
    found.readings += readings
    return found


def _costs(stage: Stage, sizes: Sizes, name: str, of: tuple[int, int], *, paced: bool) -> Iterator[Reading]:
    size, count = of
    pids = [str(pid) for pid in stage.server_pids.values()]
    with stage.scene("outbox-costs") as scene:
        arguments = (str(sizes.rounds), str(max(count, 1)), str(size), str(int(paced)), *pids)
        found = ask(scene, _PROGRAMS, "costs", *arguments)
    kinds = ("",) if size > 1 else ("insert_", "update_")
    ways = ("plain", "outbox", "operators") if size > 1 else ("plain", "outbox")
    for what, seconds in found.items():
        if what == "cpu" and (len(pids) < 2 or paced):
            continue
        for kind in kinds:
            times = {way: [each * 1000 for each in seconds[f"{kind}{way}"]] for way in ways}
            reference, plain = f"{name}{kind}{what}_plain", times.pop("plain")
            yield reading(reference, MILLISECONDS, plain, None)
            for way, own in times.items() if min(plain) > 0 else ():  # processor time has steps of 10 ms
                words = "" if way == "outbox" else f"{way}_"
                yield reading(f"{name}{kind}{words}{what}", MILLISECONDS, own, (reference, plain))


def _hot(stage: Stage, sizes: Sizes) -> Iterator[Reading]:
    """p99 and longest write to one document, by several processes with several threads each, in turns."""
    times: dict[str, list[list[float]]] = {"plain": [], "outbox": []}
    for _ in range(sizes.rounds):
        for way, rounds in times.items():
            with stage.scene(f"outbox-hot-{way}") as scene:
                rounds.append(_hot_turn(scene, way, sizes.writes))
    yield from _worst("hot", times, "plain")


def _hot_turn(scene: Scene, way: str, count: int) -> list[float]:
    scene.orders.insert_one({"_id": _HOT, "number": 0})
    each = str(max(count // _HOT_THREADS, 1))
    for _ in range(_HOT_PROCESSES):
        scene.program(_PROGRAMS, "hot", way, str(_HOT_THREADS), each, _HOT)
    scene.wait("the writers", lambda: ready(scene.setting) == _HOT_PROCESSES)
    give_sign(scene.setting)

    def written() -> Any:
        document = scene.orders.find_one({"_id": _HOT})
        return document and document["number"]

    scene.wait("the last write", lambda: len(answers(scene.setting)) == _HOT_PROCESSES, written)
    return [seconds for found in answers(scene.setting) for seconds in found["seconds"]]


def _frozen(stage: Stage, sizes: Sizes) -> tuple[list[Reading], int]:
    """p99 and longest insert while a broker of its own is stopped; then whether everything is delivered."""
    with RedisServer() as broker, stage.scene("outbox-frozen") as scene:
        scene.program(
            _PROGRAMS, "frozen", str(sizes.rounds), str(_FROZEN_THREADS), str(max(sizes.writes // 4, 1)), broker.url
        )
        scene.wait("the writer", lambda: ready(scene.setting) == 1)
        broker.pause()
        try:
            give_sign(scene.setting)
            scene.wait("the last write", lambda: answers(scene.setting), scene.orders.estimated_document_count)
            (found,) = answers(scene.setting)
        finally:
            broker.resume()
        undelivered = _deliver(scene, broker.url)
    times = {name: [seconds] for name, seconds in found.items()}
    return list(_worst("frozen", times, "alone")), undelivered


def _deliver(scene: Scene, broker: str) -> int:
    """Sweep what the writer has left; how many documents still hold something in the end."""
    app = Celery("mongo_celery_bench", broker=broker)
    app.conf.task_default_queue = scene.setting.name
    outbox = Outbox(app, scene.orders, database=scene.setting.state_database, sweep_every=None, foreign_tasks=True)

    def left() -> int:
        outbox.sweep(older_than=0)
        return outbox.status().documents

    scene.wait("the deliveries", lambda: not left(), left)
    outbox.publisher.close()
    return outbox.status().documents


def _worst(name: str, times: dict[str, list[list[float]]], reference: str) -> Iterator[Reading]:
    for word, judge in (("p99", _p99), ("longest", max)):
        plain, own = ([judge(each) * 1000 for each in times[way]] for way in (reference, "outbox"))
        yield reading(f"{name}_{word}_{reference}", MILLISECONDS, plain, None)
        yield reading(f"{name}_{word}", MILLISECONDS, own, (f"{name}_{word}_{reference}", plain))


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[-1] if len(values) > 1 else values[0]
