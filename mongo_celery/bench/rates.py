"""Changes per second of a mode, and what they cost, by the one rule of the package's docstring."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from mongo_celery.bench.modes import Mode
from mongo_celery.bench.payload import write_orders
from mongo_celery.bench.stage import Scene, Stage, pause
from mongo_celery.bench.usage import Usage
from mongo_celery.embedded.crew import ChildProcess

_LAST_COMMIT_LOOK_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Measured:
    """
    One measurement.

    Attributes:
        cpu_us: processor time for one change, in microseconds, by process.
        others: seconds of the cores that went to processes which have nothing to do with it.
        total: all seconds of the cores meanwhile.
    """

    changes: int
    rate: float
    cpu_us: Mapping[str, float]
    others: float = 0.0
    total: float = 0.0


def measure(stage: Stage, mode: Mode, changes: int, warm_up: int, *, rough: bool = False) -> Measured:
    """
    Measure a mode once, with processes of its own.

    Args:
        stage: the servers.
        mode: which.
        changes: how many are counted.
        warm_up: how many a worker handles before.
        rough: let one listener feed both, which saves its start. What a publisher has sent before the first change
            that counts would be in no figure, and that is most: so it is started anew in any case.
    """
    with stage.scene(mode.name.replace("_", "-"), mode.handler, **mode.bridge) as scene:
        if mode.ends == "delivered":
            return _deliveries(scene, mode, changes)
        done, at_once = 0, rough and mode.is_bridge
        if mode.app is not None:
            scene.worker(mode.app)
            done = warm_up
            if not at_once:
                scene.stop(_Feeding(scene, mode, 0, warm_up).feeder)
        feeding = _Feeding(scene, mode, done, changes, ahead=done if at_once else 0)
        first = scene.started.times()[done]
        last = feeding.committed_at if mode.ends == "committed" else scene.laps(mode.ends).times()[-1]
        return _measured(feeding.usage, changes, (changes - 1) / (last - first), _roles(feeding.feeder, mode))


class _Feeding:
    """
    Feed a number of changes to a mode and wait until they are done; all of it happens at construction.

    Args:
        scene: whose processes take part.
        mode: what is measured.
        done: how many changes come before those that are counted.
        count: how many are counted.
        ahead: how many of those before are still to be fed.

    Attributes:
        feeder: the process that fed them.
        committed_at: when the partitions' documents said that all are committed; 0 for other ends.
        usage: processor time from the first handler's start on.
    """

    def __init__(self, scene: Scene, mode: Mode, done: int, count: int, ahead: int = 0) -> None:
        scene.begin_now()
        if mode.reads:
            write_orders(scene.orders, ahead + count)
        self.feeder = mode.feeder(scene, ahead + count)
        self.committed_at = 0.0
        started, total = scene.started, done + count
        scene.wait("the first handler", lambda: started.count() > done)
        before = scene.usage()
        ended = started if mode.ends == "committed" else scene.laps(mode.ends)
        scene.wait("the last handler", lambda: ended.count() >= total, ended.count)
        if mode.ends == "committed":
            self._await_commits(scene, total)
        self.usage = scene.usage().since(before)

    def _await_commits(self, scene: Scene, total: int) -> None:
        """Looked at often, but only once the last handler has started: looking costs the server something."""
        pending = total - scene.committed()
        while pending > 0:
            pause(_LAST_COMMIT_LOOK_SECONDS)
            pending = total - scene.committed()
        self.committed_at = time.monotonic()


def _deliveries(scene: Scene, mode: Mode, changes: int) -> Measured:
    """
    How fast a listener takes changes in that nobody handles, by what MongoDB has given to its stream.

    It asks for a batch when it has taken in the one before, so batches tell its pace without asking the listener.
    """
    write_orders(scene.orders, changes)
    feeder = mode.feeder(scene, changes)
    scene.wait("the first batch", lambda: scene.deliveries() > 0)
    total = changes
    while scene.deliveries() >= total:  # so few that all came before the first look
        write_orders(scene.orders, changes)
        total += changes
    before, first, began = scene.usage(), scene.deliveries(), time.monotonic()
    scene.wait("the last batch", lambda: scene.deliveries() >= total, scene.deliveries)
    ended, usage = time.monotonic(), scene.usage().since(before)
    count = max(total - first, 1)
    return _measured(usage, count, count / (ended - began), _roles(feeder, mode))


def _roles(feeder: ChildProcess, mode: Mode) -> dict[str, str]:
    return {} if mode.role is None else {feeder.name: mode.role}


def _measured(usage: Usage, count: int, rate: float, roles: Mapping[str, str]) -> Measured:
    cpu = {roles.get(name, name): seconds / count * 1e6 for name, seconds in usage.by_process.items()}
    return Measured(count, rate, cpu, usage.others, usage.total)
