"""What stands costs its own partition and nothing else: how fast the others are beside it, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bson import Timestamp

from mongo_celery.bench.stage import BenchError, Stage
from mongo_celery.embedded import MongoReplicaSet
from tests.benchmarks.readings import RATE, Reading, reading
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.spill_costs import Cost, measure_costs
from tests.benchmarks.spill_handover import Handover, measure_handover
from tests.benchmarks.spill_rig import PARTITIONS, SpillRig

ACTS = ("hot", "parked", "halted")
"""What takes most of the writes: a document that is handled as fast as the others, and two that stand."""

_REFERENCE = "alone"
_SECONDS = 0.004
_CHANGE_BYTES = 750
"""About what one of the changes takes in memory."""

_BUFFERS = 8
_BUFFER_BYTES_MIN = 2 * 10 * PARTITIONS * _CHANGE_BYTES
"""Two runs of each partition."""

_FEW_KEYS = 3
_PADDING = "x" * 100_000
_ROOMY_MB = 990.0
_OPTIONS = {"run_size": 10}


@dataclass(frozen=True, slots=True)
class Stored:
    """
    A backlog that flows.

    Attributes:
        changes: how many were written.
        buffered: how many of them the buffer can have.
        inserted: how many were stored in the state database.
    """

    changes: int
    buffered: int
    inserted: int


@dataclass(slots=True)
class SpillResults:
    """
    What the suite has found.

    Attributes:
        others: changes per second of the other partitions; the ratio is to the same load alone. `later` are those of
            its second half, `small` with a buffer that would be filled many times over, `rolled` after the oplog has
            rolled over what stands, and the listener was started anew.
        standing: changes beside which that was, of the partition that stands.
        beside: changes of the others.
        backlogs: backlogs that flow, by their keys.
        costs: of storing and of reading back one change, by its bytes.
        handovers: take-over and memory, by how much is stored.
    """

    others: list[Reading] = field(default_factory=list)
    standing: int = 0
    beside: int = 0
    backlogs: dict[str, Stored] = field(default_factory=dict)
    costs: dict[int, Cost] = field(default_factory=dict)
    handovers: list[Handover] = field(default_factory=list)


def run_spill(stage: Stage, sizes: Sizes, announce: Callable[[str], None]) -> SpillResults:
    """Measure what is stored, and beside whom."""
    results = SpillResults(standing=sizes.standing, beside=sizes.beside)
    small = _buffer_bytes(sizes.standing)
    for name, options in (("", _OPTIONS), ("small_", {**_OPTIONS, "buffer_bytes": small})):
        announce(f"others beside what stands, with {options.get('buffer_bytes', 'all')} bytes of memory")
        found = _rounds(sizes, (_REFERENCE, *ACTS), partial(_beside, stage, sizes, options))
        results.others += _readings(name, found)
    announce("others beside what stands, past a rolled oplog")
    found = _rounds(sizes, (_REFERENCE, "halted"), partial(_rolled, stage, sizes))
    results.others += _readings("rolled_", found)
    for name, keys in (("all partitions", 150), (f"{_FEW_KEYS} keys", _FEW_KEYS)):
        announce(f"a backlog of {name}")
        results.backlogs[name] = _backlog(stage, keys, sizes)
    results.costs = measure_costs(stage, sizes, announce)
    results.handovers = [measure_handover(stage, count, announce) for count in (0, sizes.spilled)]
    return results


Rates = dict[str, list[tuple[float, float]]]


def _rounds(sizes: Sizes, acts: tuple[str, ...], measure: Callable[[str], tuple[float, float]]) -> Rates:
    """All of them once, then once more: a machine that slows down slows all of them."""
    found: Rates = {act: [] for act in acts}
    for _ in range(sizes.rounds):
        for act, rates in found.items():
            rates.append(measure(act))
    return found


def _readings(prefix: str, found: Rates) -> Iterator[Reading]:
    for place, suffix in enumerate(("", "_later")):
        reference = f"{prefix}{_REFERENCE}{suffix}", [rates[place] for rates in found[_REFERENCE]]
        for act, rates in found.items():
            beside = None if act == _REFERENCE else reference
            yield reading(f"{prefix}{act}{suffix}", RATE, [each[place] for each in rates], beside)


@contextmanager
def _rig(stage: Stage, mode: str, options: dict[str, Any]) -> Iterator[SpillRig]:
    with stage.scene(mode, partitions=PARTITIONS, **options) as scene:
        yield SpillRig(scene)


def _beside(stage: Stage, sizes: Sizes, options: dict[str, Any], act: str) -> tuple[float, float]:
    """The others' changes per second, of all of them and of their second half: a backlog that a new listener finds."""
    with _rig(stage, act, options) as rig:
        rig.start(act if act in ACTS[1:] else None)
        rig.stop_listening()
        return _rate(rig, act, sizes)


def _rate(rig: SpillRig, act: str, sizes: Sizes) -> tuple[float, float]:
    done = rig.others.count()
    rig.write(rig.load(sizes.beside, 0 if act == _REFERENCE else sizes.standing, seconds=_SECONDS))
    rig.listen()
    rig.await_others()
    times = rig.others.times()[done : done + sizes.beside]
    half = times[len(times) // 2 :]
    return _per_second(times), _per_second(half)


def _per_second(times: list[float]) -> float:
    return (len(times) - 1) / (times[-1] - times[0])


def _rolled(stage: Stage, sizes: Sizes, act: str) -> tuple[float, float]:
    """As before, behind an oplog that has rolled over all that stands; in the end that goes on, and nothing is lost."""
    with (
        MongoReplicaSet(oplog_mb=1, sync_delay=1) as server,
        Stage(server.url, stage.redis_url) as rolling,
        _rig(rolling, act, _OPTIONS) as rig,
    ):
        rig.start(act if act != _REFERENCE else None)
        if act != _REFERENCE:
            stored = sizes.standing // 10
            rig.write(rig.document("standing") for _ in range(stored))
            rig.await_stored(stored)
        _roll(rig)
        rig.stop_listening()
        rates = _rate(rig, act, sizes)
        if act != _REFERENCE:
            rig.cure()
            rig.await_standing()
            rig.await_removed()
        return rates


def _roll(rig: SpillRig) -> None:
    """Roll the oplog over all that was written, beside others' changes; what is in it then is kept."""
    client = rig.scene.data.client
    written = client.admin.command("ping")["operationTime"]
    while _oldest(rig) <= written:
        rig.scene.data["padding"].insert_many([{"padding": _PADDING} for _ in range(10)])
        _write_one(rig)  # the stream itself is not overtaken
    client.admin.command("replSetResizeOplog", size=_ROOMY_MB)
    _write_one(rig)
    rig.scene.wait("a watermark in the oplog", lambda: rig.watermark > _oldest(rig))


def _oldest(rig: SpillRig) -> Timestamp:
    """Time of the oldest oplog entry."""
    found = rig.scene.data.client["local"]["oplog.rs"].find_one(sort=[("$natural", 1)]) or {}
    time: Timestamp = found["ts"]
    return time


def _write_one(rig: SpillRig) -> None:
    rig.write([rig.document("others", key=rig.keys(1)[0])])
    rig.await_others()


def _backlog(stage: Stage, keys: int, sizes: Sizes) -> Stored:
    """How much of a backlog that flows is stored, where the buffer can have a part of it only."""
    buffer_bytes = _buffer_bytes(sizes.backlog)
    with _rig(stage, "backlog", {**_OPTIONS, "buffer_bytes": buffer_bytes}) as rig:
        rig.start()
        rig.stop_listening()
        rig.write(rig.load(sizes.backlog, 0, keys=keys, seconds=_SECONDS / 4))
        rig.listen()
        rig.await_others()
        if rig.report.get("bufferedBytes", 0) > 2 * buffer_bytes:
            raise BenchError(f"the buffer had {rig.report['bufferedBytes']} bytes, of {buffer_bytes}.")
        return Stored(sizes.backlog, buffer_bytes // _CHANGE_BYTES, rig.inserted)


def _buffer_bytes(changes: int) -> int:
    """A buffer that so many changes would fill several times."""
    return max(changes * _CHANGE_BYTES // _BUFFERS, _BUFFER_BYTES_MIN)
