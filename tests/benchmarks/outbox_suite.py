"""The outbox: writes beside plain ones, entries through each path, the sweep's query, and recovery after a kill."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from celery import Celery

from mongo_celery import Outbox
from mongo_celery.bench.stage import BenchError, Scene, Stage, pause
from mongo_celery.bridge.options import BridgeOptions
from tests.benchmarks.answers import ask
from tests.benchmarks.outbox_costs import OutboxCosts, measure_costs
from tests.benchmarks.pending_query import PendingQuery, measure_pending_query
from tests.benchmarks.readings import MILLISECONDS, RATE, SECONDS, Reading, reading
from tests.benchmarks.sizes import Sizes

_PROGRAMS = "tests.benchmarks.outbox_programs"
_WATCHED_APP = "tests.benchmarks.watched_app"
_MANY = 10
_WRITTEN = 50
_KILLS_MAX = 20
_LOOK_SECONDS = 0.1
_SLACK_SECONDS = 60.0
_BESIDE = {
    "insert_outbox": "insert_delay",
    "insert_later": "insert_delay",
    "update_outbox": "update_delay",
    "update_later": "update_delay",
    "insert_10_outbox": "insert_10_delays",
}
"""Which plain way each kind of write is set in relation to."""


@dataclass(slots=True)
class OutboxResults:
    """
    What the suite has found.

    Attributes:
        costs: of a write beside the plain way, and the aims.
        writes: milliseconds of one write with what follows it.
        entries: per second, through each path.
        query: of the sweep; None where it was left out.
        recovery: seconds from a writer's SIGKILL until a sweep has delivered what it left.
        left: how many entries the killed writers had left pending, by repetition.
    """

    costs: OutboxCosts = field(default_factory=OutboxCosts)
    writes: list[Reading] = field(default_factory=list)
    entries: list[Reading] = field(default_factory=list)
    query: PendingQuery | None = None
    recovery: Reading | None = None
    left: list[int] = field(default_factory=list)


def run_outbox(stage: Stage, sizes: Sizes, announce: Callable[[str], None]) -> OutboxResults:
    """Measure the outbox."""
    results = OutboxResults(costs=measure_costs(stage, sizes, announce))
    announce("writes with a task")
    with stage.scene("outbox-writes") as scene:
        seconds = ask(scene, _PROGRAMS, "writes", str(sizes.rounds), str(sizes.writes))
    results.writes = _writes(seconds)
    results.entries = _entries(stage, sizes, seconds, announce)
    if sizes.documents:
        results.query = measure_pending_query(stage, sizes.documents, announce)
    announce("recovery after a writer's end")
    results.recovery, results.left = _recovery(stage, sizes)
    return results


def _writes(seconds: dict[str, list[float]]) -> list[Reading]:
    times = {name: [each * 1000 for each in found] for name, found in seconds.items()}
    return [
        reading(name, MILLISECONDS, found, (_BESIDE[name], times[_BESIDE[name]]) if name in _BESIDE else None)
        for name, found in times.items()
    ]


def _entries(
    stage: Stage, sizes: Sizes, seconds: dict[str, list[float]], announce: Callable[[str], None]
) -> list[Reading]:
    """One by one through the fast path, and through the sweep, beside `delay()` in the sweeping process."""
    found = [
        reading("at_once", RATE, [1 / each for each in seconds["insert_outbox"]], None),
        reading("at_once_10_a_write", RATE, [_MANY / each for each in seconds["insert_10_outbox"]], None),
    ]
    for each, name in ((1, "sweep"), (_MANY, "sweep_10_a_document")):
        rounds = []
        for number in range(sizes.rounds):
            announce(f"{name}, round {number + 1} of {sizes.rounds}")
            with stage.scene(name.replace("_", "-")) as scene:
                rounds.append(ask(scene, _PROGRAMS, "sweep", str(sizes.entries), str(each)))
        delays = [answer["delay"] for answer in rounds]
        found.append(reading(name, RATE, [answer["sweep"] for answer in rounds], ("delay", delays)))
    rates = []
    for number in range(sizes.rounds):
        announce(f"listener, round {number + 1} of {sizes.rounds}")
        rates.append(_watched(stage, sizes.entries))
    return [*found, reading("listener", RATE, rates, None)]


def _watched(stage: Stage, entries: int) -> float:
    """Entries per second by a bridge's listener and a worker of two processes, without the first tenth of them."""
    with stage.scene("outbox-watched") as scene:

        def delivered() -> int:  # the workers take none of these
            count: Any = stage.broker.llen(scene.setting.name)
            return int(count)

        scene.worker(_WATCHED_APP, ",".join(BridgeOptions(name=scene.setting.name).queue_names()))
        scene.begin_now()
        ask(scene, _PROGRAMS, "leave", str(entries))
        scene.listener(_WATCHED_APP)
        scene.wait(
            "the first deliveries",
            lambda: delivered() >= max(entries // 10, 1),
            delivered,
        )
        began, done = time.monotonic(), delivered()
        scene.wait("the last delivery", lambda: delivered() >= entries, delivered)
        return (entries - done) / (time.monotonic() - began)


def _recovery(stage: Stage, sizes: Sizes) -> tuple[Reading, list[int]]:
    options: dict[str, Any] = {"claim_ttl": sizes.claim_ttl, "sweep_after": sizes.sweep_after}
    taken: list[float] = []
    left: list[int] = []
    while len(taken) < sizes.kills:
        for _ in range(_KILLS_MAX):
            with stage.scene("outbox-kill", **options) as scene:
                seconds, pending = _kill_and_sweep(stage, scene, options)
            if pending:
                break
        else:
            raise BenchError(f"{_KILLS_MAX} writers were killed, and none had left anything pending.")
        taken.append(seconds)
        left.append(pending)
    return Reading(name="recovery", unit=SECONDS, rounds=tuple(taken)), left


def _kill_and_sweep(stage: Stage, scene: Scene, options: dict[str, Any]) -> tuple[float, int]:
    """Seconds from a writer's end until nothing is pending, with a sweep every tenth of a second; and what was left."""
    app = Celery("mongo_celery_bench", broker=stage.redis_url)
    app.conf.task_default_queue = scene.setting.name
    given: dict[str, Any] = {"database": scene.setting.state_database, "sweep_every": None, "foreign_tasks": True}
    outbox = Outbox(app, scene.orders, **given, **options)
    outbox.backing.relay  # noqa: B018 - makes the index and the connections before the clock runs
    writer = scene.program(_PROGRAMS, "write_on")
    written = scene.laps("written")
    scene.wait("a writer", lambda: written.count() >= _WRITTEN, written.count)
    writer.send(signal.SIGKILL)
    killed = time.monotonic()
    left = status = outbox.status()
    while status.pending:
        if time.monotonic() - killed > options["claim_ttl"] + options["sweep_after"] + _SLACK_SECONDS:
            raise BenchError(f"{status.pending} entries were not delivered after the writer's end.")
        pause(_LOOK_SECONDS)
        outbox.sweep()
        status = outbox.status()
    seconds = time.monotonic() - killed
    outbox.publisher.close()
    scene.stop(writer)
    return seconds, left.pending
