"""Chains without faults: each handler starts once, in the order of its partition."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rig.deployment import Deployment, MakeDeployment
from tests.rig.history import started_out_of_sequence

Document = dict[str, Any]


@pytest.fixture(scope="module")
def chain(shared_deployment: MakeDeployment) -> Deployment:
    """Give one listener and one worker with two processes, for all tests of this module without faults."""
    return shared_deployment("plain", "other", "limited", start="both")


def test_slow_handlers_behind_a_deep_prefetch_start_once(chain: Deployment) -> None:
    """P1, P2, P6: messages wait, prefetched, longer than the grace of the sweep; their repetitions are dropped."""
    chain.write_many("plain", [f"a{number}" for number in range(10)], 2)
    for handler in ("plain", "other"):
        for index in range(chain.partitions):
            chain.write(handler, next(chain.keys(handler, index, "b")), 1, seconds=1.2)
    chain.wait_done()
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


def test_a_run_carries_what_has_piled_up_and_a_retry_inside_it_counts_from_there(deployment: MakeDeployment) -> None:
    """One claim and one token for several changes, each started once; `request.retries` is 0 at its own place."""
    options = {"run_size": 10, "run_seconds": 1.5, "partitions": 1}
    chain = deployment("auto", options=options, start="both")
    chain.wait_started(chain.write("auto", "first", 1, gate="first"))
    items = [chain.write("auto", "run", n, **({"act": "raise", "times": 2} if n == 5 else {})) for n in range(1, 9)]
    chain.allow(items[4], 2)
    chain.wait_read(9)
    chain.open_gate("first")
    chain.wait_done()
    chain.judge()
    assert [start.retries for start in chain.starts(items[4])] == [0, 1, 2]
    tokens = [start.fence for start in chain.starts(*items[:4])]
    assert len(tokens) == 4
    assert len({*tokens}) < 4, "several are one run"
