"""The rule for handlers that share workers. `tests/acceptance/isolation/test_groups.py` shows what it does for them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from mongo_celery.bridge.listener.fairness import (
    CONTENTION_SECONDS,
    DELAYED_SECONDS,
    LEAST_UNCLAIMED,
    LONG_SECONDS,
    PATIENCE_SECONDS,
    Fairness,
)
from mongo_celery.bridge.listener.partition import GracePeriods, Partition
from tests.fixtures.samples import image

PARTITIONS = 16
NOW = 1000.0


class Led:
    candidates, has_replays = True, False

    def __init__(self, name: str) -> None:
        graces = GracePeriods(1e6, 1e6)
        self.name = name
        self.partitions = [Partition(f"shop/{name}/0/{n}", image(index=n), 1, graces, 0.0) for n in range(PARTITIONS)]

    @property
    def in_flight(self) -> list[Partition]:
        return [each for each in self.partitions if each.in_flight is not None]

    def due(self, _now: float) -> Iterator[str]:
        return (self.name for each in self.partitions if each.in_flight is None)

    def next_due(self) -> float:
        return NOW

    def send(self, count: int, at: float, *, running: bool = False) -> None:
        for each in [each for each in self.partitions if each.in_flight is None][:count]:
            each.note_sent(at)
            if running:
                each.image = replace(each.image, live=True, fencing_token=each.image.fencing_token + 1)


class Group:
    def __init__(self, *limited: str) -> None:
        self.led: dict[str, Any] = {name: Led(name) for name in ("slow", "slower", "quick")}
        self.fairness = Fairness(dict.fromkeys(self.led), set(limited))
        for name, seconds in (("slow", LONG_SECONDS), ("slower", 60.0), ("quick", 0.004)):
            self.fairness.note_run(name, seconds)

    def due(self, now: float = NOW) -> dict[str, int]:
        names: list[Any] = self.fairness.due(self.led, now)
        return {name: names.count(name) for name in self.led}


def test_long_handlers_have_few_unclaimed_runs_and_share_them() -> None:
    """P12: a queue full of a slow handler's runs would give a quick one the speed of the slow one."""
    group = Group()
    assert group.due() == {"slow": 1, "slower": LEAST_UNCLAIMED - 1, "quick": PARTITIONS}
    group.led["slow"].send(8, NOW, running=True)
    assert group.due() == {"slow": 0, "slower": 4, "quick": PARTITIONS}, "half as many as are running, fewest first"
    group.led["slower"].send(4, NOW)
    assert group.due()["slower"] == 0
    group.led["quick"].send(PARTITIONS, NOW)
    assert group.fairness.next_due({name: group.led[name] for name in ("slow", "slower")}) == math.inf


def test_while_quick_runs_wait_long_ones_have_half_of_the_workers() -> None:
    group = Group()
    group.led["slow"].send(6, NOW, running=True)
    group.led["quick"].send(1, NOW)
    group.led["quick"].send(6, NOW, running=True)
    assert group.due(NOW + DELAYED_SECONDS / 2)["slower"] == 3
    assert group.due(NOW + DELAYED_SECONDS)["slower"] == 0
    for each in (*group.led["slow"].partitions, *group.led["quick"].partitions[1:]):
        each.in_flight = None
    one = group.due(NOW + DELAYED_SECONDS)
    assert one["slow"] + one["slower"] == 1
    group.led["quick"].partitions[0].in_flight = None
    two = group.due(NOW + DELAYED_SECONDS + CONTENTION_SECONDS + 0.1)
    assert two["slow"] + two["slower"] == LEAST_UNCLAIMED


@pytest.mark.parametrize(("limited", "seconds"), [(("quick",), 1.0), ((), PATIENCE_SECONDS)])
def test_runs_without_a_worker_or_a_token_delay_no_other(limited: tuple[str, ...], seconds: float) -> None:
    """P12: what waits in a queue that nobody consumes, or for its rate limit, is helped by no free worker."""
    group = Group(*limited)
    group.led["slow"].send(6, NOW, running=True)
    group.led["quick"].send(1, NOW)
    assert group.due(NOW + seconds)["slower"] == 3
    group.led["slower"].send(3, NOW)
    assert group.due(NOW + PATIENCE_SECONDS)["slower"] == 3
