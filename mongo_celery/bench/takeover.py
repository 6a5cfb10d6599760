"""
How long a bridge stands still when its leading listener ends.

Two listeners, a backlog and no worker: so each partition has one message out, and the first message more
is the new term's. The time runs from the signal until that message lies in its queue.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

from mongo_celery.bench.errors import BenchError
from mongo_celery.bench.modes import BRIDGE_APP
from mongo_celery.bench.payload import write_orders
from mongo_celery.bench.stage import Scene, Stage, pause
from mongo_celery.bench.usage import sockets
from mongo_celery.embedded.crew import ChildProcess

_ORDERS = 500
_LOOK_SECONDS = 0.005
_STANDBY_SOCKETS = 3  # one to watch each server and one to ask: it polls the lease
_SETTLED_SECONDS = 1.5
_SLACK_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Seconds of each repetition."""

    lease_ttl: float
    sigkill: tuple[float, ...]
    sigterm: tuple[float, ...]


def measure_takeover(stage: Stage, lease_ttl: float, repetitions: int) -> TakeOver:
    """End the leader by SIGTERM and by SIGKILL, each time with a standby in place."""
    # A run that nobody claims is dispatched again after this grace; not while we count messages.
    with stage.scene("takeover", lease_ttl=lease_ttl, dispatch_grace=600.0) as scene:
        write_orders(scene.orders, _ORDERS)
        listeners = [scene.listener(BRIDGE_APP)]
        scene.wait("the first listener to dispatch", lambda: scene.queued() > 0)
        found: dict[signal.Signals, list[float]] = {signal.SIGTERM: [], signal.SIGKILL: []}
        for number in list(found) * repetitions:
            found[number].append(_one(scene, listeners, number, lease_ttl))
        return TakeOver(lease_ttl, tuple(found[signal.SIGKILL]), tuple(found[signal.SIGTERM]))


def _one(scene: Scene, listeners: list[ChildProcess], number: signal.Signals, lease_ttl: float) -> float:
    listeners.append(scene.listener(BRIDGE_APP))
    scene.wait("a standby", lambda: sockets(listeners[-1].pid) >= _STANDBY_SOCKETS)
    leader = next(each for each in listeners if each.pid == scene.lease().get("pid"))
    before = _settled(scene)
    began = time.monotonic()
    leader.send(number)
    while scene.queued() <= before:
        if time.monotonic() - began > lease_ttl + _SLACK_SECONDS:
            raise BenchError(f"no listener took over after {number.name}: {listeners[-1].last_words}")
        pause(_LOOK_SECONDS)
    taken = time.monotonic() - began
    listeners.remove(leader)
    scene.stop(leader)
    return taken


def _settled(scene: Scene) -> int:
    """Messages in the queues once no more are added."""
    last, since = scene.queued(), time.monotonic()
    while time.monotonic() - since < _SETTLED_SECONDS:
        pause(_LOOK_SECONDS * 10)
        scene.check()
        now = scene.queued()
        if now != last:
            last, since = now, time.monotonic()
    return last
