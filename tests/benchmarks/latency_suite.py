"""
From a write to the start of its handler, on an idle bridge; and how long a bridge stands still when its leader ends.

An insert is followed by the next one when it is handled, and after a pause of changing length, so that no poll falls
into step with them. A take-over has two listeners, a backlog and no worker. So each partition has one message in
flight, and the first message more is that of the next term.
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mongo_celery.bench.payload import make_order, write_orders
from mongo_celery.bench.run import APP
from mongo_celery.bench.stage import BenchError, Scene, Stage, pause
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.embedded.processes import ChildProcess
from tests.benchmarks.latency_app import NAIVE, WRITTEN
from tests.benchmarks.readings import MILLISECONDS, SECONDS, Reading, Tables, quantile, reading
from tests.benchmarks.sizes import Sizes

LATENCY_APP = "tests.benchmarks.latency_app"
MODES: dict[str, dict[str, Any]] = {
    NAIVE: {},
    "bridge_chain": {"run_size": 1},
    "bridge_inline": {"run_size": 1, "commit": "inline"},
}
_PAUSE_SECONDS = (0.06, 0.14)
_WARM_UP = 20
_ORDERS = 500
_STANDBY_SOCKETS = 3  # one to watch each server and one to ask: it polls the lease
_SETTLED_SECONDS = 1.5
_SLACK_SECONDS = 30.0


def run_latency(stage: Stage, sizes: Sizes, announce: Callable[[str], None]) -> Tables:
    found: dict[str, list[list[float]]] = {name: [] for name in MODES}
    for number in range(sizes.rounds):
        for name, waits in found.items():
            announce(f"latency of {name}, round {number + 1} of {sizes.rounds}")
            waits.append(_latencies(stage, name, sizes.live))
    waited: list[Reading] = []
    for words, part in (("p50", 0.5), ("p99", 0.99)):
        each = {name: [quantile(waits, part) * 1000 for waits in rounds] for name, rounds in found.items()}
        for name, values in each.items():
            reference = None if name == NAIVE else (f"{NAIVE}_{words}", each[NAIVE])
            waited.append(reading(f"{name}_{words}", MILLISECONDS, values, reference))
    announce("take-over")
    return {
        "From a write to the start of its handler": waited,
        f"From a leader's end to the next term's first message, lease_ttl={sizes.lease_ttl}": _take_overs(
            stage, sizes.lease_ttl, sizes.kills
        ),
    }


def _latencies(stage: Stage, mode: str, samples: int) -> list[float]:
    with stage.scene(mode, **MODES[mode]) as scene:
        scene.worker(LATENCY_APP)
        if mode == NAIVE:
            scene.program(LATENCY_APP, "watch")
        else:
            scene.listener(LATENCY_APP)
        write_orders(scene.orders, _WARM_UP)
        warmed, waited = scene.laps("warmed"), scene.laps("waited")
        scene.wait("the warm-up", lambda: warmed.count() >= _WARM_UP, warmed.count)
        for number in range(samples):
            pause(random.uniform(*_PAUSE_SECONDS))
            scene.orders.insert_one({**make_order(number), WRITTEN: time.monotonic()})
            scene.wait("a handler", lambda number=number: waited.count() > number)  # type: ignore[misc]
        return waited.times()


def _take_overs(stage: Stage, lease_ttl: float, repetitions: int) -> list[Reading]:
    """End the leader by SIGTERM and by SIGKILL, each time with a standby in place."""
    found: dict[signal.Signals, list[float]] = {signal.SIGTERM: [], signal.SIGKILL: []}
    # A run that nobody claims is dispatched again after this grace; not while we count messages.
    with stage.scene("takeover", lease_ttl=lease_ttl, dispatch_grace=600.0) as scene:
        write_orders(scene.orders, _ORDERS)
        listeners = [scene.listener(APP)]
        scene.wait("the first listener to dispatch", lambda: _queued(stage, scene) > 0)
        for number in list(found) * repetitions:
            found[number].append(_take_over(stage, scene, listeners, number, lease_ttl))
    return [reading(number.name, SECONDS, seconds, None) for number, seconds in found.items()]


def _take_over(
    stage: Stage, scene: Scene, listeners: list[ChildProcess], number: signal.Signals, lease_ttl: float
) -> float:
    listeners.append(scene.listener(APP))
    scene.wait("a standby", lambda: _count_sockets(listeners[-1].pid) >= _STANDBY_SOCKETS)
    leader = next(each for each in listeners if each.pid == scene.lease().get("pid"))
    before = _settled(stage, scene)
    began = time.monotonic()
    leader.send(number)
    while _queued(stage, scene) <= before:
        if time.monotonic() - began > lease_ttl + _SLACK_SECONDS:
            raise BenchError(f"no listener took over after {number.name}: {listeners[-1].last_words}")
        pause(0.005)
    taken = time.monotonic() - began
    listeners.remove(leader)
    scene.stop(leader)
    return taken


def _count_sockets(pid: int) -> int:
    count = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            count += str(descriptor.readlink()).startswith("socket:")
    return count


def _queued(stage: Stage, scene: Scene) -> int:
    with stage.broker.pipeline(transaction=False) as pipeline:
        for queue in BridgeOptions(name=scene.setting.name).queue_names():
            pipeline.llen(queue)
        return sum(pipeline.execute())


def _settled(stage: Stage, scene: Scene) -> int:
    """Return the messages in the queues once no more are added."""
    last, since = _queued(stage, scene), time.monotonic()
    while time.monotonic() - since < _SETTLED_SECONDS:
        pause(0.05)
        scene.check()
        now = _queued(stage, scene)
        if now != last:
            last, since = now, time.monotonic()
    return last
