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
        """Write so many changes for each handler."""
        self.data[QUICK].insert_many([{"_id": str(n), "n": 1} for n in range(quick)])
        self.data[SLOW].insert_many([{"_id": str(n), "n": 1, "do": {"seconds": 1.0}} for n in range(slow)])

    def queues(self, *arguments: str) -> str:
        """What `changes queues` prints."""
        done = self.run("changes", "queues", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def done(self, handler: str) -> int:
        """How many changes of a handler are committed."""
        found = self.state["partitions"].find({"handler": handler}, {"committed": 1})
        return sum(int(each["committed"]) for each in found)

    def wait_committed(self, handler: str, count: int) -> None:
        """Wait until so many changes of a handler are committed."""
        wait_for(lambda: self.done(handler) >= count, message=lambda: f"{count} of {handler}: {self.done(handler)}")

    def quick_while_slow(self, runs: int) -> int:
        """How many quick changes are committed while the slow handler finishes so many more."""
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


@pytest.mark.slow
def test_a_deploy_with_other_queues_leaves_nothing_behind(deployment: MakeDeployment) -> None:
    """P1: what lies in queues that the new workers do not consume is dispatched again; a plain worker consumes all."""
    shop = deployment(QUICK, SLOW, kind=Shop, options={"partitions": 8, "queues": 8})
    shop.fill(quick=100, slow=4)
    old = shop.listener("old")

    def in_flight() -> int:
        lease: Document = shop.state["leases"].find_one({"_id": "chain"}) or {}
        return int((lease.get("report") or {}).get("inFlight", 0))

    wait_for(lambda: in_flight() > 8, message="runs of both are out, in all queues")
    new: Any = {"options": {"queues": 2}, "SCRIPTED_GROUP": "slow"}
    assert old.terminate() == 0
    shop.listener("new", **new)
    shop.worker(**new)
    shop.wait_committed(QUICK, 100)
    shop.wait_committed(SLOW, 4)
