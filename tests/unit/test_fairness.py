"""What each subscription of a group gets of its workers, in simulated time: the rules alone, on real partitions."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, cast

import pytest

from mongo_celery.bridge.listener.fairness import PATIENCE_SECONDS, Fairness
from mongo_celery.bridge.listener.partition import GracePeriods, Partition
from tests.fixtures.samples import image

_TICK = 0.005
_OVERHEAD = 0.004
"""Of a run, before its claim and behind its commit: the slot is in use, and no claim shows it."""
_FENCES = 1 << 32  # they count in cluster time
_CLAIM = {"owner": "a", "first": 1, "last": 1, "ttl": 10_000, "until": "later"}
NOOP = 0.004
FAR = 10_000.0
WARM_UP = 10.0
SPAN = 20.0


class Led:
    """A subscription with a change due in each partition that is free, as long as its backlog lasts."""

    def __init__(self, name: str, seconds: float, partitions: int = 16, backlog: float = math.inf) -> None:
        self.name = name
        self.seconds = seconds
        self.backlog = backlog
        self.done = 0
        graces = GracePeriods(FAR, FAR)
        self.partitions = {
            index: Partition(f"shop/{name}/0/{index}", image(index=index), 1, graces, 0.0)
            for index in range(partitions)
        }

    has_replays = False

    @property
    def candidates(self) -> bool:
        return self.backlog > 0

    @property
    def in_flight(self) -> list[Partition]:
        return [partition for partition in self.partitions.values() if partition.in_flight is not None]

    def due(self, now: float) -> Iterator[tuple[Partition, tuple[Led, int]]]:
        for index, partition in self.partitions.items():
            if partition.in_flight is None and partition.ready_at <= now and self.backlog > 0:
                self.backlog -= 1
                yield partition, (self, index)

    def next_due(self) -> float:
        return min((partition.ready_at for partition in self.partitions.values() if self.backlog > 0), default=math.inf)


@dataclass
class Running:
    """A run in a slot of a worker."""

    led: Led
    index: int
    claimed_at: float
    ended_at: float
    free_at: float


@dataclass
class Simulation:
    """A leader's turns, and workers that take runs in the order in which they were sent."""

    slots: int
    led: list[Led]
    fair: bool = True
    dead: set[int] = field(default_factory=set)
    """Partitions whose queue nobody consumes."""

    now: float = 0.0

    def __post_init__(self) -> None:
        groups = {each.name: "shared" if self.fair else each.name for each in self.led}
        self.fairness = Fairness(groups)
        self.images = {(each.name, index): image(index=index) for each in self.led for index in each.partitions}
        self.subscriptions = cast("dict[str, Any]", {each.name: each for each in self.led})
        self.queue: deque[tuple[Led, int]] = deque()
        self.running: list[Running] = []
        self.moved_at = self.looked_at = 0.0

    def run(self, seconds: float) -> dict[str, int]:
        """How many runs each subscription finished in so many seconds."""
        before = {each.name: each.done for each in self.led}
        until = self.now + seconds
        while self.now < until:
            self.now += _TICK
            self._work()
            pause = min(max((self.now - self.moved_at) / 4, 0.03), 0.25)
            if self.now - self.looked_at >= pause:
                self._look()
                self._dispatch()
        return {each.name: each.done - before[each.name] for each in self.led}

    def _work(self) -> None:
        for each in list(self.running):
            place = each.led.name, each.index
            if each.claimed_at <= self.now and not self.images[place].live and each.ended_at > self.now:
                known = self.images[place]
                self.images[place] = replace(
                    known, claim=_CLAIM, live=True, fencing_token=known.fencing_token + _FENCES
                )
            if each.ended_at <= self.now:
                known = self.images[place]
                taken = known.fencing_token + _FENCES * (not known.live)
                done = known.committed + 1
                self.images[place] = replace(known, claim=None, live=False, fencing_token=taken, committed=done)
                each.led.done += 1
                each.ended_at = math.inf
            if each.free_at <= self.now:
                self.running.remove(each)
        while self.queue and len(self.running) < self.slots:
            led, index = self.queue.popleft()
            if index not in self.dead:
                claimed_at = self.now + _OVERHEAD / 2
                ended_at = claimed_at + led.seconds
                self.running.append(Running(led, index, claimed_at, ended_at, ended_at + _OVERHEAD / 2))

    def _look(self) -> None:
        self.looked_at = self.now
        for led in self.led:
            for partition in led.in_flight:
                index, committed = partition.image.index, partition.image.committed
                run = partition.in_flight
                assert run is not None
                is_held = run.left_at is None
                partition.observe(self.images[led.name, index], self.now)
                if is_held and run.left_at is not None and run.taken_at is not None:
                    self.fairness.note_run(led.name, run.left_at - run.taken_at)
                if partition.image.committed != committed:
                    self.moved_at = self.now

    def _dispatch(self) -> None:
        for partition, run in cast("list[Any]", self.fairness.due(self.subscriptions, self.now)):
            partition.note_sent(self.now)
            self.queue.append(run)
            self.moved_at = self.now
        assert self.fairness.next_due(self.subscriptions) > self.now, "the leader would turn and turn"


def both(slots: int, *durations: float, **options: Any) -> Simulation:
    """Handlers of these durations on the same workers, when what was sent in ignorance is done."""
    led = [Led(f"led{number}", seconds) for number, seconds in enumerate(durations)]
    simulation = Simulation(slots, led, **options)
    simulation.run(WARM_UP)
    return simulation


def parts(simulation: Simulation, seconds: float = SPAN) -> list[float]:
    """What each handler finishes in the next seconds, as a part of what it would finish alone."""
    done = simulation.run(seconds)
    return [done[each.name] / (rate_alone(simulation.slots, each.seconds) * seconds) for each in simulation.led]


@cache
def rate_alone(slots: int, seconds: float) -> float:
    """Runs a second of a handler that has the workers for itself."""
    simulation = Simulation(slots, [Led("alone", seconds)])
    simulation.run(2.0)
    span = max(5.0, 4 * seconds)
    return simulation.run(span)["alone"] / span


@pytest.mark.parametrize("slots", [2, 8])
def test_a_noop_beside_a_slow_handler_keeps_its_share_and_so_does_the_slow_one(slots: int) -> None:
    """P12: about half of the workers each, also after workers have left. Without fairness a noop has the slow speed."""
    simulation = both(slots, NOOP, 1.0)
    noop, slow = parts(simulation)
    assert noop >= 0.35
    assert slow >= 0.4
    if slots == 8:
        simulation.slots = 2
        simulation.run(WARM_UP + 10)
        assert parts(simulation)[0] >= 0.4
    else:
        assert parts(both(slots, NOOP, 1.0, fair=False))[0] < 0.05


def test_a_backlog_of_one_handler_does_not_delay_a_single_change_of_another() -> None:
    """P12: 128 partitions of a slow handler have something due; the change waits for a few runs of it, and no more."""
    slow, quick = Led("slow", 1.0, partitions=128), Led("quick", NOOP, backlog=0)
    simulation = Simulation(2, [slow, quick])
    simulation.run(80.0)  # the first 128 were sent before anybody could know
    quick.backlog = 1
    done = simulation.run(2.5)
    assert done["quick"] == 1
    assert done["slow"] >= 4, "and it has all slots while nobody else needs them"


def test_queues_without_a_worker_do_not_hold_back_the_others() -> None:
    """P12: what waits there counts for some seconds; then it is as if it were not out."""
    slow = Led("slow", 1.0, partitions=16)
    simulation = Simulation(4, [slow, Led("noop", NOOP)], dead=set(range(8)))
    simulation.run(WARM_UP + 2 * PATIENCE_SECONDS)
    done = simulation.run(20.0)
    assert done["slow"] > 0.25 * 20 * rate_alone(4, 1.0)
    assert done["noop"] > 0


def test_a_handler_with_a_rate_limit_is_not_taken_for_delayed() -> None:
    """Its runs wait for their tokens inside the worker, and no slot of another would help them."""
    slow, limited = Led("slow", 1.0), Led("limited", NOOP)
    simulation = Simulation(4, [slow, limited])
    simulation.fairness = Fairness({"slow": None, "limited": None}, {"limited"})
    simulation.run(WARM_UP)
    assert simulation.run(20.0)["slow"] > 0.85 * 20 * rate_alone(4, 1.0)
