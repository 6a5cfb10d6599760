"""From the first commit of many changes to the last: for measurements in which commits are what is done."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bson import Timestamp
from pymongo.errors import OperationFailure

from mongo_celery.bench.payload import present_time
from mongo_celery.bench.stage import BenchError, Scene, pause
from mongo_celery.bench.stopwatch import cpu_us_per_change
from mongo_celery.embedded.processes import ChildProcess
from tests.benchmarks.processes import with_pool
from tests.benchmarks.readings import BYTES, MICROSECONDS, RATE, Reading

_LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Measured:
    """
    One measurement.

    Attributes:
        rate: commits per second.
        cpu_us: processor time for one of them, in microseconds, by process.
        oplog_bytes: what the library has written to the oplog for one of them; None where it cannot be read.
    """

    rate: float
    cpu_us: Mapping[str, float]
    oplog_bytes: float | None


class Measuring:
    """
    From the first commit to the last.

    Args:
        scene: the first of its changes is yet to come.
        count: how many commits there will be.
    """

    def __init__(self, scene: Scene, count: int) -> None:
        self._scene = scene
        self._before = scene.committed()
        self._last = self._before + count

    def end(self) -> Measured:
        """Wait until all are committed."""
        scene = self._scene
        scene.wait("the first commit", lambda: scene.committed() > self._before)
        since = present_time(scene.state.client)
        began, ahead, before = time.monotonic(), scene.committed(), scene.cpu_seconds()
        scene.wait("the last commit", self._is_over, scene.committed)
        if ahead >= self._last:
            raise BenchError("all changes were committed before they could be measured; give more of them.")
        count, seconds = self._last - ahead, time.monotonic() - began
        cpu_us = cpu_us_per_change(before, scene.cpu_seconds(), count)
        written = _oplog_bytes(scene, since)
        return Measured(count / seconds, cpu_us, None if written is None else written / count)

    def _is_over(self) -> bool:
        pause(_LOOK_SECONDS)  # looked at seldom: this is measured
        return self._scene.committed() >= self._last


def measured_readings(rounds: Sequence[Measured]) -> list[Reading]:
    """Return the rate, and the processor time and the oplog's bytes of one commit."""
    used = [with_pool(each.cpu_us) for each in rounds]
    written = tuple(each.oplog_bytes for each in rounds if each.oplog_bytes is not None)
    return [
        Reading(name="commits", unit=RATE, rounds=tuple(each.rate for each in rounds)),
        *(Reading(name=name, unit=MICROSECONDS, rounds=tuple(each[name] for each in used)) for name in used[0]),
        *([Reading(name="oplog", unit=BYTES, rounds=written)] if written else []),
    ]


def listen(scene: Scene, app: str) -> ChildProcess:
    """Start a listener, and wait until it leads."""
    before = scene.lease().get("term", 0)
    listener = scene.listener(app)

    def leads() -> bool:
        lease = scene.lease()
        return bool(lease.get("state") == "leading" and lease["term"] > before)

    scene.wait("a listener to lead", leads)
    return listener


def _oplog_bytes(scene: Scene, since: Timestamp) -> int | None:
    """Of all entries since then for the state of the scene's bridge; a user may lack the right."""
    place = {"ts": {"$gte": since}, "ns": {"$regex": f"^{re.escape(scene.setting.state_database)}[.]"}}
    group = {"_id": None, "bytes": {"$sum": {"$bsonSize": "$$ROOT"}}}
    try:
        found = list(scene.state.client["local"]["oplog.rs"].aggregate([{"$match": place}, {"$group": group}]))
    except OperationFailure:
        return None
    return int(found[0]["bytes"]) if found else 0
