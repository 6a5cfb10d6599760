"""Chains without faults: each handler starts once, in the order of its partition."""

from __future__ import annotations

from tests.rig.deployment import MakeDeployment
from tests.rig.history import started_out_of_sequence


def test_slow_handlers_behind_a_deep_prefetch_start_once(deployment: MakeDeployment) -> None:
    """P1, P2, P6: messages wait, prefetched, longer than the grace of the sweep; their repetitions are dropped."""
    chain = deployment("plain", "other", start="both")
    chain.write_many("plain", [f"a{number}" for number in range(10)], 2)
    for handler in ("plain", "other"):
        for index in range(chain.partitions):
            chain.write(handler, next(chain.keys(handler, index, "b")), 1, seconds=1.2)
    chain.wait_done()
    assert started_out_of_sequence(chain.judge()) == []
