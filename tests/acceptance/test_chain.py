"""Chains without faults: each handler starts once, in the order of its partition."""

from __future__ import annotations

import functools
import operator
import re
from typing import Any

import pytest

from tests.rig.deployment import Deployment, MakeDeployment
from tests.rig.history import started_out_of_sequence

Document = dict[str, Any]


@pytest.fixture(scope="module")
def chain(shared_deployment: MakeDeployment) -> Deployment:
    """Give one listener and one worker with two processes, for all tests of this module without faults."""
    return shared_deployment("plain", "other", "limited", start="both")


def test_each_change_starts_its_handler_once_and_in_order(chain: Deployment) -> None:
    """P1, P2, P6: a plain flow over all partitions, two processes."""
    chain.write_many("plain", [f"a{number}" for number in range(10)], 6)
    chain.wait_done()
    assert started_out_of_sequence(chain.judge()) == []


def test_slow_handlers_behind_a_deep_prefetch_start_once(chain: Deployment) -> None:
    """P6: messages wait, prefetched, longer than the grace of the sweep; their repetitions are dropped."""
    for n in range(1, 8):  # that one is repeated is likely each time, and never sure: it hangs on what was seen when
        for handler in ("plain", "other"):
            for index in range(chain.partitions):
                chain.write(handler, next(chain.keys(handler, index, "b")), n, seconds=1.2)
        chain.wait_done()
        if any(re.search(r"\[chain\.\w+\.\d\.\d+\.d1\.\w+\] received", text) for text in chain.logs.values()):
            break
    else:
        pytest.skip("no message was repeated, seven times: there was nothing to drop")
    assert started_out_of_sequence(chain.judge()) == []


def test_a_rate_limited_handler_starts_once_for_each_change(chain: Deployment) -> None:
    """P6: a worker holds messages back for the rate limit; others are not hindered meanwhile."""
    items = chain.write_many("limited", [f"c{number}" for number in range(4)], 4)
    free = chain.write("plain", "beside-the-limited", 1)
    chain.wait_done()
    chain.judge()
    starts = chain.starts(*items)
    assert (starts[-1].at - starts[0].at) / 1e9 > 2.0
    assert chain.starts(free)[0].at < starts[-1].at


def test_two_handlers_of_different_collections_do_not_wait_for_each_other(chain: Deployment) -> None:
    """A slow handler holds its own partition, not the same partition of another subscription."""
    slow = chain.write("other", "d-slow", 1, gate="d-slow")
    chain.wait_started(slow)
    index = chain.partition_of("other", "d-slow")
    quick = chain.write("plain", next(chain.keys("plain", index, "d")), 1)
    chain.wait_started(quick)
    chain.wait_done(handlers=["plain"])
    chain.open_gate("d-slow")
    chain.wait_done()
    chain.judge()


def test_tasks_carry_their_change_in_id_and_label_but_not_its_contents(chain: Deployment) -> None:
    """Task ids name bridge, subscription, partition and number; argsrepr names the document's key."""
    item = chain.write("plain", "e-labelled", 1, secret="contents")
    chain.wait_done()
    start = chain.starts(item)[0]
    worker = next(text for name, text in chain.logs.items() if "worker" in name)
    assert f"[chain.plain.{start.partition}.{start.seq}" in worker
    assert "contents" not in worker


@pytest.fixture(scope="module")
def run_chain(shared_deployment: MakeDeployment) -> Deployment:
    """Give a bridge of one partition whose runs carry up to ten changes, for at most one and a half seconds."""
    options = {"run_size": 10, "run_seconds": 1.5, "partitions": 1}
    return shared_deployment("plain", "letters", "auto", options=options, start="both")


def _behind_a_gate(chain: Deployment, handler: str, name: str) -> None:
    """Let changes pile up behind one that waits, so that the next run is full."""
    chain.wait_started(chain.write(handler, name, 1, gate=name))


def _runs(chain: Deployment, handler: str, prefix: str) -> list[list[int]]:
    """Numbers of the changes that started under one token each, in order."""
    tokens: dict[int, list[int]] = {}
    for start in chain.starts():
        if start.handler == handler and start.key.startswith(prefix):
            tokens.setdefault(start.fence, []).append(start.n)
    return [numbers for _, numbers in sorted(tokens.items())]


def test_a_run_carries_the_changes_that_have_piled_up(run_chain: Deployment) -> None:
    """One claim, one token, each handler once, committed together."""
    _behind_a_gate(run_chain, "plain", "r-first")
    for n in range(1, 11):
        run_chain.write("plain", "r-run", n)
    run_chain.wait_read(11)
    run_chain.open_gate("r-first")
    run_chain.wait_done()
    run_chain.judge()
    runs = _runs(run_chain, "plain", "r-run")
    assert functools.reduce(operator.iadd, runs, []) == list(range(1, 11))
    assert max(map(len, runs)) >= 5


def test_a_retry_inside_a_run_counts_from_there(run_chain: Deployment) -> None:
    """request.retries is 0 at the change's place in the run, and each attempt is one."""
    _behind_a_gate(run_chain, "auto", "t-first")
    before = [run_chain.write("auto", "t-run", n) for n in (1, 2)]
    failing = run_chain.write("auto", "t-run", 3, act="raise", times=2)
    after = run_chain.write("auto", "t-run", 4)
    run_chain.wait_read(5)
    run_chain.open_gate("t-first")
    run_chain.wait_done()
    run_chain.allow(failing, 2)
    run_chain.judge()
    assert [start.retries for start in run_chain.starts(failing)] == [0, 1, 2]
    assert [start.due for start in run_chain.starts(*before, after)] == [*before, after]
