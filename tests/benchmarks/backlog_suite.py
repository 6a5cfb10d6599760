"""Backlogs that a listener finds at its start: the cost of a change, by their length and by the number of handlers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bson import Timestamp
from pymongo.errors import OperationFailure

from mongo_celery.bench.payload import present_time, write_orders
from mongo_celery.bench.stage import BenchError, Scene, Stage, pause
from mongo_celery.bench.stopwatch import cpu_us_per_change
from mongo_celery.embedded.processes import ChildProcess
from tests.benchmarks.many_app import Wanted
from tests.benchmarks.readings import BYTES, MEGABYTES, MICROSECONDS, RATE, Reading, Tables
from tests.benchmarks.sizes import Sizes

_APP = "tests.benchmarks.many_app"
_LOOK_SECONDS = 0.02
_LIST = 500
"""Changes of a list: the bridge's quickest way, so that the listener is what works hardest."""
_PARTS = (100, 10, 1)
_SHORTEST = 4000
"""Changes; of fewer the listener has read most before the first one is committed."""
_REPEATED_UP_TO = 100_000
_COUNTS = (1, 10, 60)
_WAYS = (("chains of all", True, 1), ("runs of all", True, 200), ("runs of one", False, 200))
"""The ways in which handlers share a stream: a name, whether each change is for all of them, and the run size."""
_CHAINS_PART = 10
"""A chain costs so many times what a change of a run does, and more."""

Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A backlog that is measured; ``warm_up``: changes before it."""

    title: str
    handlers: Wanted
    changes: int
    warm_up: int
    options: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Measured:
    """
    One measurement.

    Attributes:
        rate: commits per second.
        cpu_us: processor time for one of them, in microseconds, by process.
        oplog_bytes: what the library has written to the oplog for one of them; None where it cannot be read.
        memory: of the listener in MB, at its start and at its highest.
    """

    rate: float
    cpu_us: Mapping[str, float]
    oplog_bytes: float | None
    memory: tuple[float, float]


def run_backlog(stage: Stage, sizes: Sizes, announce: Announce) -> Tables:
    lengths = [length for part in _PARTS if (length := sizes.owed // part) >= _SHORTEST]
    ways = {"A change of a backlog of": Wanted(lists=_LIST)}
    ways["A document of a snapshot of"] = Wanted(lists=_LIST, begin_with_existing=True)
    return _measure_all(stage, sizes, announce, (
        Case(title=f"{name} {each:,}", handlers=handlers, changes=each, warm_up=1000, options={})
        for each in lengths
        for name, handlers in ways.items()
    ))  # fmt: skip


def run_handlers(stage: Stage, sizes: Sizes, announce: Announce) -> Tables:
    def make_case(name: str, count: int, run_size: int, *, together: bool) -> Case:
        wanted = sizes.reached // (_CHAINS_PART if run_size == 1 else 1)
        changes = max(wanted // (count if together else 1), 2)
        title = f"A change of {changes:,} for one handler, {name}, {count} handlers"
        handlers, options = Wanted(count=count, together=together), {"run_size": run_size}
        return Case(title=title, handlers=handlers, changes=changes, warm_up=min(100, changes), options=options)

    ways = ((*way, count) for way in _WAYS for count in _COUNTS)
    cases = (make_case(name, count, run_size, together=together) for name, together, run_size, count in ways)
    return _measure_all(stage, sizes, announce, cases)


def _measure_all(stage: Stage, sizes: Sizes, announce: Announce, cases: Iterable[Case]) -> Tables:
    """Measure all in each round, but for backlogs that take long: these once."""
    found: dict[str, list[Measured]] = {}
    chosen = list(cases)
    for number in range(sizes.rounds):
        for case in chosen:
            if number == 0 or case.changes <= _REPEATED_UP_TO:
                announce(f"{case.title}, round {number + 1} of {sizes.rounds}")
                with stage.scene("backlog", **case.options) as scene:
                    found.setdefault(case.title, []).append(_measure(scene, case))
    return {title: _make_readings(rounds) for title, rounds in found.items()}


def _measure(scene: Scene, case: Case) -> Measured:
    case.handlers.leave(scene.setting)
    each = case.handlers.count if case.handlers.together else 1
    if case.handlers.begin_with_existing:
        write_orders(scene.orders, case.changes)
        scene.begin_now()
    scene.worker(_APP)
    if not case.handlers.begin_with_existing:
        listener = _listen(scene)
        write_orders(scene.orders, case.warm_up)
        scene.wait("the warm-up", lambda: scene.committed() >= case.warm_up * each, scene.committed)
        scene.stop(listener)
        write_orders(scene.orders, case.changes)
    first = scene.committed()
    last = first + case.changes * each
    listener = _listen(scene)
    started, _ = _read_memory(listener.pid)

    def is_over() -> bool:
        pause(_LOOK_SECONDS)  # looked at seldom: this is measured
        return scene.committed() >= last

    scene.wait("the first commit", lambda: scene.committed() > first)
    since = present_time(scene.state.client)
    began, ahead, before = time.monotonic(), scene.committed(), scene.cpu_seconds()
    scene.wait("the last commit", is_over, scene.committed)
    if ahead >= last:
        raise BenchError("all changes were committed before they could be measured; give more of them.")
    count, seconds = last - ahead, time.monotonic() - began
    written, memory = _count_oplog_bytes(scene, since), (started, _read_memory(listener.pid)[1])
    used = cpu_us_per_change(before, scene.cpu_seconds(), count)
    return Measured(count / seconds, used, None if written is None else written / count, memory)


def _make_readings(rounds: list[Measured]) -> list[Reading]:
    """Return the rate, and what one commit costs; the processor time of a worker's pool is in the worker's."""
    used: dict[str, list[float]] = {}
    for each in rounds:
        for name in dict.fromkeys(process.partition("_")[0] for process in each.cpu_us):
            total = sum(time for process, time in each.cpu_us.items() if process.partition("_")[0] == name)
            used.setdefault(name, []).append(total)
    written = tuple(each.oplog_bytes for each in rounds if each.oplog_bytes is not None)
    return [
        Reading(name="commits", unit=RATE, rounds=tuple(each.rate for each in rounds)),
        *(Reading(name=name, unit=MICROSECONDS, rounds=tuple(times)) for name, times in used.items()),
        *([Reading(name="oplog", unit=BYTES, rounds=written)] if written else []),
        Reading(name="listener at its start", unit=MEGABYTES, rounds=tuple(each.memory[0] for each in rounds)),
        Reading(name="listener at its highest", unit=MEGABYTES, rounds=tuple(each.memory[1] for each in rounds)),
    ]


def _listen(scene: Scene) -> ChildProcess:
    before = scene.lease().get("term", 0)
    listener = scene.listener(_APP)

    def leads() -> bool:
        lease = scene.lease()
        return bool(lease.get("state") == "leading" and lease["term"] > before)

    scene.wait("a listener to lead", leads)
    return listener


def _read_memory(pid: int) -> tuple[float, float]:
    """Return the resident memory of a process in MB (2^20): now, and at its highest."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found = {name: int(size) / 1024 for name, size in re.findall(r"(VmRSS|VmHWM):\s+(\d+)", status)}
    return found["VmRSS"], found["VmHWM"]


def _count_oplog_bytes(scene: Scene, since: Timestamp) -> int | None:
    """Of all entries since then for the state of the scene's bridge; a user may lack the right."""
    place = {"ts": {"$gte": since}, "ns": {"$regex": f"^{re.escape(scene.setting.state_database)}[.]"}}
    group = {"_id": None, "bytes": {"$sum": {"$bsonSize": "$$ROOT"}}}
    try:
        found = list(scene.state.client["local"]["oplog.rs"].aggregate([{"$match": place}, {"$group": group}]))
    except OperationFailure:
        return None
    return int(found[0]["bytes"]) if found else 0
