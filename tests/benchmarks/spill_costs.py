"""What it costs to store a change and to read it back: processor time, beside changes that stay in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mongo_celery.bench.stage import Stage, pause
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.spill_rig import PARTITIONS, SpillRig

CHANGE_BYTES = (1_000, 10_000)
_NEVER = 3600.0
_AT_ONCE = 0.2
_RUN_SIZE = 100
_BUFFER_BYTES = 1 << 30
_LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Cost:
    """
    Microseconds of processor time for one change, by process: what it takes more than one that stays in memory.

    Attributes:
        storing: from the write until it is stored.
        reading_back: from there until it is handled, committed and removed.
    """

    storing: Mapping[str, float]
    reading_back: Mapping[str, float]


def measure_costs(stage: Stage, sizes: Sizes, announce: Callable[[str], None]) -> dict[int, Cost]:
    """Changes of a partition that stands, stored and kept in memory."""
    found = {}
    for size in CHANGE_BYTES:
        count = max(sizes.stored // (1 + size // 5_000), 1)
        announce(f"the cost of storing {count} changes of {size} bytes")
        kept, stored = (_measure(stage, size, count, spill_after) for spill_after in (_NEVER, _AT_ONCE))
        storing, reading_back = (
            {name: (more[name] - less[name]) / count * 1e6 for name in more}
            for less, more in zip(kept, stored, strict=True)
        )
        found[size] = Cost(storing, reading_back)
    return found


def _measure(stage: Stage, size: int, count: int, spill_after: float) -> list[dict[str, float]]:
    """Processor seconds until all is stored, or in memory, and from there until all is done."""
    options = {"spill_after": spill_after, "run_size": _RUN_SIZE, "buffer_bytes": _BUFFER_BYTES}
    with stage.scene("cost", partitions=PARTITIONS, **options) as scene:
        rig = SpillRig(scene)
        rig.start("halted")
        looks = [_used(rig)]
        rig.write(rig.document("standing", padding=size) for _ in range(count))
        while not _settled(rig, count, is_stored=spill_after == _AT_ONCE):
            scene.check()
            pause(_LOOK_SECONDS)
        looks.append(_used(rig))
        rig.cure()
        rig.await_standing()
        rig.await_removed()
        looks.append(_used(rig))
        return [{name: after[name] - before[name] for name in after} for before, after in itertools.pairwise(looks)]


def _settled(rig: SpillRig, count: int, *, is_stored: bool) -> bool:
    report = rig.report
    if is_stored:
        return bool(rig.stored >= count and not report.get("buffered"))
    return bool(report.get("buffered", 0) >= count)


def _used(rig: SpillRig) -> dict[str, float]:
    """Of the listener, and of the server where it is embedded."""
    names = ("listener", "mongod")
    return {name: used for name, used in rig.scene.cpu_seconds().items() if name in names}
