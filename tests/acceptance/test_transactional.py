"""`transactional=True`: effects and the mark that they are done are there together, or not at all."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest

from tests.fixtures.failpoint import Failpoint
from tests.fixtures.process import wait_for
from tests.rig.deployment import Deployment, MakeDeployment
from tests.rig.history import Due


@pytest.fixture
def chain(deployment: MakeDeployment) -> Deployment:
    return deployment("together", options={"partitions": 1, "transaction_seconds": 8})


def _effects(chain: Deployment) -> Counter[Due]:
    return Counter(effect.due for effect in chain.effects())


@pytest.mark.parametrize("variables", [{}, {"SCRIPTED_ASYNC": "1"}], ids=["plain", "async"])
def test_effects_are_exactly_once_when_the_worker_dies_inside(chain: Deployment, variables: dict[str, str]) -> None:
    """
    P6 and more: killed after its write and before the mark; nothing of the first attempt is seen.

    What it has locked is free as soon as its claim has lapsed, not when the server's own limit of a minute is reached.
    """
    chain.environment |= variables
    _, worker = chain.both()
    item = chain.write("together", "a", 1, late_gate="open")
    successor = chain.write("together", "a", 2)
    start = chain.wait_started(item)
    assert start.pid in worker.children()
    os.kill(start.pid, signal.SIGKILL)
    assert chain.effects() == []
    chain.open_gate("open")
    chain.wait_started(item, 2)
    chain.wait_done()
    chain.allow(item, 9)  # its body is repeated while the lock lasts
    chain.judge()
    assert _effects(chain) == {item: 1, successor: 1}
    assert any("that an earlier worker left open" in text for text in chain.logs.values())


def test_a_lost_answer_of_the_commit_repeats_no_effect(chain: Deployment, failpoint: Failpoint) -> None:
    """The transaction is committed, the answer is cut off; the driver asks again."""
    chain.both()
    cut = {"failCommands": ["commitTransaction"], "appName": chain.app_name("worker"), "closeConnection": True}
    with failpoint(mode={"times": 1}, **cut):
        item = chain.write("together", "d", 1)
        chain.wait_done()
    assert _effects(chain) == {item: 1}
    assert chain.letters("together") == []


def test_a_transaction_that_was_taken_over_cannot_commit(chain: Deployment) -> None:
    """P3: an operator's retry raises the fence while it runs; its mark is refused, and all of it with it."""
    chain.both()
    item = chain.write("together", "f", 1, late_gate="open")
    start = chain.wait_started(item)
    wait_for(lambda: chain.of(item)["claim"])
    chain.state["partitions"].update_one(
        {"_id": chain.of(item)["_id"]}, {"$inc": {"fencingToken": 1}, "$set": {"claim": None}}
    )
    chain.wait_started(item, 2)
    chain.open_gate("open")
    chain.wait_done()
    assert _effects(chain) == {item: 1}
    assert chain.effects()[0].fence > start.fence
