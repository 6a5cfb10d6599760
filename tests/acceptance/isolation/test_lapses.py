"""What counts as a crash of a change: a worker that ends with its handler, not one that is slow or cut off."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.rig.deployment import Deployment, MakeDeployment, frozen

Document = dict[str, Any]


@pytest.fixture
def chain(deployment: MakeDeployment) -> Deployment:
    return deployment("plain", options={"partitions": 1, "max_crashes": 1})


def _crashes(state: Document) -> int:
    return int((state["retry"] or {}).get("crashes", 0))


def test_a_frozen_worker_that_wakes_is_no_crash(chain: Deployment) -> None:
    """P14: a machine that was asleep; its successor runs meanwhile, and loses nothing by the withdrawal."""
    _, worker = chain.both()
    item = chain.allow(chain.write("plain", "frozen", 1, gate="open"))
    zombie = chain.wait_started(item)
    with frozen(worker, zombie.pid):
        chain.wait_started(item, 2)
        assert _crashes(chain.of(item)) == 1, "nobody could know yet"
    state = chain.wait_state(item, lambda state: _crashes(state) == 0)
    assert state["claim"]["owner"], "the successor still runs"
    chain.open_gate("open")
    chain.wait_done()
    chain.judge()


@pytest.mark.parametrize("pool", ["prefork", pytest.param("threads", marks=pytest.mark.slow)])
def test_a_deploy_that_kills_long_handlers_is_no_crash(chain: Deployment, pool: str) -> None:
    """P14: SIGTERM to the worker's main process, and SIGKILL to all of it when the supervisor's patience ends."""
    chain.listener()
    worker = chain.worker("-P", pool, name="deployed")
    item = chain.allow(chain.write("plain", "long", 1, gate="open"))
    chain.wait_started(item)
    worker.send(signal.SIGTERM)
    chain.wait_state(item, lambda state: (state["claim"] or {}).get("leaving"))
    worker.send_group(signal.SIGKILL)
    chain.worker(name="next")
    chain.wait_started(item, 2)
    assert _crashes(chain.of(item)) == 0
    chain.open_gate("open")
    chain.wait_done()
    chain.judge()
