"""Many stored changes behind a retry of an hour: the next term, and the listener's memory meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mongo_celery.bench.stage import Stage
from tests.benchmarks.processes import memory_mb, sockets
from tests.benchmarks.spill_rig import PARTITIONS, SPILL_APP, SpillRig

_STANDBY_SOCKETS = 3
_LOOK_SECONDS = 0.01
_SECONDS_MAX = 300.0
_OPTIONS = {"spill_after": 0.5, "run_size": 100, "buffer_bytes": 8 << 20}


@dataclass(frozen=True, slots=True)
class Handover:
    """
    Attributes:
        stored: how many changes were stored.
        take_over: seconds from the leader's SIGTERM, with a standby in place, until the next handler has started.
        memory_mb: the listener's (2^20), resident: at the start, and the highest while they were stored, while the
            next term led with them, and while they were read back.
    """

    stored: int
    take_over: float
    memory_mb: Mapping[str, float]


def measure_handover(stage: Stage, count: int, announce: Callable[[str], None]) -> Handover:
    """Store so many changes behind a parked one, and go on with them; nothing is lost."""
    with stage.scene("handover", partitions=PARTITIONS, **_OPTIONS) as scene:
        rig = SpillRig(scene)
        rig.start("parked")
        memory = {"start": memory_mb(rig.listener.pid)[1]}
        announce(f"storing {count} changes behind a parked one")
        rig.write(rig.document("standing") for _ in range(count))
        rig.await_stored(count)
        memory["storing"] = memory_mb(rig.listener.pid)[1]
        announce(f"take-over with {count} stored changes")
        take_over = _take_over(rig)
        memory["next_term"] = memory_mb(rig.listener.pid)[1]
        announce(f"reading {count} changes back")
        rig.scene.worker(SPILL_APP)
        rig.cure()
        rig.await_standing()
        rig.await_removed()
        memory["reading_back"] = memory_mb(rig.listener.pid)[1]
        return Handover(count, take_over, memory)


def _take_over(rig: SpillRig) -> float:
    scene, leader = rig.scene, rig.listener
    rig.listener = scene.listener(SPILL_APP)
    scene.wait("a standby", lambda: sockets(rig.listener.pid) >= _STANDBY_SOCKETS)
    began = time.monotonic()
    scene.stop(leader)
    rig.write([rig.document("others", key=rig.keys(1)[0])])
    rig.await_others()
    return time.monotonic() - began
