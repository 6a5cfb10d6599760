"""A slow handler has its own workers, or its share of those that it has in common with others, and no more."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fixtures.process import wait_for
from tests.rig.deployment import Deployment, MakeDeployment

Document = dict[str, Any]

QUICK, SLOW = "plain", "grouped"
_RUNS = 4  # of the slow handler, while the other one is counted
_TIMES_AS_MANY = 1
"""Beside each other in one queue both handlers finish about as many; a busy machine leaves little of its other slot."""


class Shop(Deployment):
    """A handler that does nothing, and one that takes a second."""

    def fill(self, quick: int, slow: int) -> None:
        self.data[QUICK].insert_many([{"_id": str(n), "n": 1} for n in range(quick)])
        self.data[SLOW].insert_many([{"_id": str(n), "n": 1, "do": {"seconds": 1.0}} for n in range(slow)])

    def queues(self, *arguments: str) -> str:
        done = self.run("changes", "queues", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def done(self, handler: str) -> int:
        found = self.state["partitions"].find({"handler": handler}, {"committed": 1})
        return sum(int(each["committed"]) for each in found)

    def wait_committed(self, handler: str, count: int) -> None:
        wait_for(lambda: self.done(handler) >= count, message=lambda: f"{count} of {handler}: {self.done(handler)}")

    def quick_while_slow(self, runs: int) -> int:
        until, before = self.done(SLOW) + runs, self.done(QUICK)
        self.wait_committed(SLOW, until)
        return self.done(QUICK) - before


def test_a_noop_keeps_its_share_of_workers_beside_a_slow_handler(deployment: MakeDeployment) -> None:
    """P12: one of two slots is enough for many runs of it in a second."""
    shop = deployment(QUICK, SLOW, kind=Shop)
    shop.fill(quick=2000, slow=40)
    shop.both()
    shop.wait_committed(SLOW, 8)  # four were sent before it was known that they are slow
    assert shop.quick_while_slow(_RUNS) >= _TIMES_AS_MANY * _RUNS


@pytest.mark.slow
def test_a_slow_handler_has_workers_of_its_own(deployment: MakeDeployment) -> None:
    """P12: neither worker takes what is the other's, and the quick handler does not wait for the slow one."""
    shop = deployment(QUICK, SLOW, kind=Shop, environment={"SCRIPTED_GROUP": "slow"})
    shop.fill(quick=2000, slow=40)
    own = shop.worker("-Q", shop.queues("--group", "slow"), name="own", concurrency=1)
    rest = shop.worker("-Q", shop.queues("--without-group"), name="rest", concurrency=1)
    shop.listener()
    shop.wait_committed(SLOW, 1)
    assert shop.quick_while_slow(_RUNS) >= _TIMES_AS_MANY * _RUNS
    assert f"handlers.{QUICK}[" not in own.text
    assert f"handlers.{SLOW}[" not in rest.text
