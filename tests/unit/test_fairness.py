"""Shares of handlers with the same workers, in simulated time. `acceptance/isolation/test_groups.py` has real ones."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from mongo_celery.bridge.listener.fairness import PATIENCE_SECONDS, Fairness
from mongo_celery.bridge.listener.partition import GracePeriods, Partition
from tests.fixtures.samples import image

QUICK = 0.05
_TICK = 0.01
_LOOK_TICKS = 3
_FENCES = 1 << 32


class Led:
    """A handler, its runs of so many seconds, and changes that are due in every free partition."""

    has_replays = False

    def __init__(self, name: str, seconds: float, changes: float = math.inf, partitions: int = 16) -> None:
        graces = GracePeriods(1e6, 1e6)
        self.name, self.seconds, self.changes, self.done = name, seconds, changes, 0
        self.partitions = [Partition(f"{name}/{n}", image(index=n), 1, graces, 0.0) for n in range(partitions)]

    @property
    def candidates(self) -> bool:
        return self.changes > 0

    @property
    def in_flight(self) -> list[Partition]:
        return [each for each in self.partitions if each.in_flight is not None]

    def due(self, _now: float) -> Iterator[tuple[Led, Partition]]:
        for each in self.partitions:
            if each.in_flight is None and self.changes > 0:
                self.changes -= 1
                yield self, each


class Workers:
    """A leader's turns, and workers that take runs in the order in which they were sent."""

    def __init__(self, slots: int, *led: Led, fair: bool = True, limited: tuple[str, ...] = ()) -> None:
        self.slots, self.led, self.now = slots, led, 0.0
        self.dead: set[int] = set()
        self.fairness: Any = Fairness({each.name: "shared" if fair else each.name for each in led}, set(limited))
        self.images = {each.partition_id: each.image for one in led for each in one.partitions}
        self.queue, self.running = deque[tuple[Led, Partition]](), list[tuple[float, Led, Partition]]()

    def run(self, seconds: float) -> list[float]:
        """Return the part of all workers' time that each handler has had."""
        before = [each.done for each in self.led]
        for tick in range(round(seconds / _TICK)):
            self.now += _TICK
            self._work()
            if tick % _LOOK_TICKS == 0:
                self._look()
        spans = [(each.done - done) * each.seconds for each, done in zip(self.led, before, strict=True)]
        return [each / (self.slots * seconds) for each in spans]

    def _work(self) -> None:
        for ended in [each for each in self.running if each[0] <= self.now]:
            _, led, partition = ended
            self.running.remove(ended)
            led.done += 1
            known = self.images[partition.partition_id]
            self.images[partition.partition_id] = replace(known, live=False, committed=known.committed + 1)
        while self.queue and len(self.running) < self.slots:
            led, partition = self.queue.popleft()
            if partition.image.index not in self.dead:
                known = self.images[partition.partition_id]
                taken = replace(known, live=True, fencing_token=known.fencing_token + _FENCES)
                self.images[partition.partition_id] = taken
                self.running.append((self.now + led.seconds, led, partition))

    def _look(self) -> None:
        for led in self.led:
            for partition in led.in_flight:
                run: Any = partition.in_flight
                was_held = run.left_at is None
                partition.observe(self.images[partition.partition_id], self.now)
                if was_held and run.left_at is not None:
                    self.fairness.note_run(led.name, run.left_at - run.taken_at)
        for sent in self.fairness.due({each.name: each for each in self.led}, self.now):
            sent[1].note_sent(self.now)
            self.queue.append(sent)


def test_a_quick_handler_beside_slow_ones_keeps_its_share_and_so_do_they() -> None:
    """P12: about half of the workers each, also after workers have left. Without fairness, quick ones are as slow."""
    workers = Workers(8, Led("quick", QUICK), Led("slow", 1.0), Led("slower", 4.0))
    workers.run(30.0)
    for _ in range(2):
        quick, slow, slower = workers.run(40.0)
        assert quick >= 0.4
        assert min(slow, slower) >= 0.15
        assert slow + slower >= 0.4
        workers.slots = 4
        workers.run(30.0)
    unfair = Workers(8, Led("quick", QUICK), Led("slow", 1.0), fair=False)
    unfair.run(30.0)
    assert unfair.run(20.0)[0] < 0.1


def test_a_backlog_of_one_handler_does_not_delay_a_single_change_of_another() -> None:
    """P12: the change waits for a few runs. The slow handler has all workers while nobody else needs them."""
    slow, quick = Led("slow", 1.0, partitions=128), Led("quick", QUICK, changes=0)
    workers = Workers(2, slow, quick)
    workers.run(80.0)  # the first 128 were sent before anybody could know
    assert workers.run(10.0)[0] > 0.9
    quick.changes = 1
    workers.run(2.5)
    assert quick.done == 1


@pytest.mark.parametrize("is_limited", [True, False], ids=["rate limit", "no worker"])
def test_runs_without_a_worker_or_a_token_delay_no_other(is_limited: bool) -> None:
    """P12: what waits for its rate limit, or in a queue that nobody consumes, is helped by no free worker."""
    workers = Workers(4, Led("slow", 1.0), Led("quick", QUICK), limited=("quick",) * is_limited)
    workers.dead = set() if is_limited else set(range(8))
    workers.run(10.0 + 2 * PATIENCE_SECONDS)
    slow, quick = workers.run(20.0)
    assert slow > (0.6 if is_limited else 0.25)
    assert quick > 0
