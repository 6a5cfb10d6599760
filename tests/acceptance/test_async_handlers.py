"""Workers with `async def` handlers: limits, pools, shutdowns and kills end them as they end plain ones."""

from __future__ import annotations

import re
import signal

import pytest

from tests.rig.deployment import Deployment, MakeDeployment


@pytest.fixture
def chain(deployment: MakeDeployment) -> Deployment:
    """Give a bridge with coroutine handlers."""
    names = ("plain", "auto", "soft", "hard", "together")
    return deployment(*names, options={"partitions": 1}, environment={"SCRIPTED_ASYNC": "1"})


def test_limits_end_a_coroutine_and_a_blocked_loop_keeps_its_claim(chain: Deployment) -> None:
    """P14: the soft limit cancels, the hard one kills; and a heartbeat needs no loop."""
    chain.both()
    blocking = chain.write("plain", "blocking", 1, seconds=4, on_loop=True)
    soft = chain.give_up(chain.write("soft", "soft", 1, awaits=60))
    hard = chain.give_up(chain.allow(chain.write("hard", "hard", 1, awaits=60)))
    chain.wait_done()
    assert [chain.letters(item.handler)[0]["error"].partition(":")[0] for item in (soft, hard)] == [
        "SoftTimeLimitExceeded",
        "HandlerCrashedError",
    ]
    assert "soft" in chain.facts["canceled"].distinct("key")
    assert len(chain.starts(blocking)) == 1
    chain.judge()


@pytest.mark.parametrize("pool", ["threads", pytest.param("solo", marks=pytest.mark.slow)])
def test_other_pools_run_coroutines(chain: Deployment, pool: str) -> None:
    """P1, P2: handlers of several threads share the loop of their process. A pool without one refuses to start."""
    refused = chain.worker("-P", "gevent", name="refused", awaited="the worker ends")
    assert refused.wait() == 1
    chain.listener()
    worker = chain.worker("-P", pool, concurrency=2)
    chain.write_many("plain", ["a", "b", "c"], 3, seconds=0.05)
    chain.write_many("together", ["a", "b"], 2)
    chain.allow(chain.write("auto", "again", 1, act="raise", times=2), 2)
    chain.wait_done()
    assert {start.pid for start in chain.starts()} == {worker.pid}
    assert worker.terminate() == 0
    assert not re.search(r"never (retrieved|awaited)|was destroyed|Unclosed", worker.text)
    chain.judge()


def test_a_warm_shutdown_awaits_a_coroutine_and_a_cold_one_cancels_it(chain: Deployment) -> None:
    """P6, P14: what is canceled runs again, and is no crash of its handler."""
    _, worker = chain.both()
    warm = chain.write("plain", "warm", 1, awaits=1.5)
    chain.wait_started(warm)
    assert worker.terminate() == 0
    worker = chain.worker(name="cold")
    cold = chain.allow(chain.write("plain", "cold", 1, awaits=2, gate="again"))
    chain.wait_started(cold)
    worker.send(signal.SIGQUIT)
    worker.wait()
    assert chain.facts["canceled"].distinct("key") == ["cold"]
    chain.worker(name="last")
    chain.wait_started(cold, 2)
    assert not (chain.of(cold)["retry"] or {}).get("crashes")
    chain.open_gate("again")
    chain.wait_done()
    assert len(chain.starts(warm)) == 1
    chain.judge()
