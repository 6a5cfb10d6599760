"""The cost of storing a change and of reading it back: processor time, beside changes that stay in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

from pymongo import ReplaceOne

from mongo_celery.bench.stage import Scene, Stage, pause
from tests.benchmarks.commits import listen
from tests.benchmarks.readings import MICROSECONDS, Reading, Tables
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.spill_app import FIXED

SPILL_APP = "tests.benchmarks.spill_app"
CHANGE_BYTES = (1_000, 10_000)
PHASES = ("storing", "reading back")
_NEVER = 3600.0
_SOON = 0.2
_OPTIONS = {"partitions": 16, "run_size": 100, "buffer_bytes": 1 << 30}
_BATCH = 500
_LOOK_SECONDS = 0.2
_HEX = "0123456789abcdef"

Used = list[dict[str, float]]
"""Processor seconds by process, for each of the phases."""


def run_spill(stage: Stage, sizes: Sizes, announce: Callable[[str], None]) -> Tables:
    """Measure changes of a blocked partition, stored and kept in memory."""
    found: dict[str, list[Reading]] = {}
    for size in CHANGE_BYTES:
        count = max(sizes.stored // (1 + size // 5_000), 1)
        announce(f"the cost of storing {count} changes of {size} bytes")
        kept, stored = (_measure(stage, size, count, spill_after) for spill_after in (_NEVER, _SOON))
        for phase, less, more in zip(PHASES, kept, stored, strict=True):
            found[f"CPU time of {phase} a change of {size:,} bytes"] = [
                Reading(name=name, unit=MICROSECONDS, rounds=((more[name] - less[name]) / count * 1e6,))
                for name in more
            ]
    return found


def _measure(stage: Stage, size: int, count: int, spill_after: float) -> Used:
    """Return what is used until all is stored, or in memory, and from there until all is done."""
    with stage.scene("cost", spill_after=spill_after, **_OPTIONS) as scene:
        scene.worker(SPILL_APP)
        listen(scene, SPILL_APP)
        _write(scene, [0], size)
        scene.wait("a blocked partition", lambda: scene.state["partitions"].count_documents({"state": "halted"}))
        looks = [_used(scene)]
        _write(scene, range(1, count + 1), size)
        while not _is_settled(scene, count, is_stored=spill_after == _SOON):
            scene.check()
            pause(_LOOK_SECONDS)
        looks.append(_used(scene))
        _retry(scene)
        handled = scene.laps("handled")
        scene.wait("all handlers", lambda: handled.count() > count, handled.count)
        scene.wait("an empty backlog", lambda: not _stored(scene), lambda: _stored(scene))
        looks.append(_used(scene))
        return [{name: after[name] - before[name] for name in after} for before, after in itertools.pairwise(looks)]


def _write(scene: Scene, numbers: range | list[int], size: int) -> None:
    """Write one document again and again."""
    padding = _padding(size)
    documents = [{"_id": "blocked", "n": number, "padding": padding} for number in numbers]
    for first in range(0, len(documents), _BATCH):
        batch = documents[first : first + _BATCH]
        scene.orders.bulk_write([ReplaceOne({"_id": "blocked"}, document, upsert=True) for document in batch])


def _padding(size: int) -> str:
    """Return text that can be compressed to somewhat more than a half."""
    state, digits = 1, []
    for _ in range(size):
        state = state * 48271 % 0x7FFFFFFF
        digits.append(_HEX[state & 15])
    return "".join(digits)


def _is_settled(scene: Scene, count: int, *, is_stored: bool) -> bool:
    buffered = (scene.lease().get("report") or {}).get("buffered", 0)
    return bool(_stored(scene) >= count and not buffered) if is_stored else bool(buffered >= count)


def _stored(scene: Scene) -> int:
    return scene.state["backlog"].estimated_document_count()


def _retry(scene: Scene) -> None:
    """Fix the handler, and retry the blocked partition, as an operator does."""
    (Path(scene.setting.clock) / FIXED).touch()
    done = scene.program("celery", "-A", SPILL_APP, "changes", "retry", "--yes")
    scene.wait("the command", lambda: done.returncode is not None)
    scene.stop(done)


def _used(scene: Scene) -> dict[str, float]:
    """Return the processor seconds of the listener, and of the server where it is embedded."""
    names = ("listener", "mongod")
    return {name: used for name, used in scene.cpu_seconds().items() if name in names}
