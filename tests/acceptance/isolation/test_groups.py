"""A slow handler has its share of the workers that it has in common with others, and no more."""

from __future__ import annotations

from tests.fixtures.process import wait_for
from tests.rig.deployment import MakeDeployment

QUICK, SLOW = "plain", "other"
_RUNS = 4  # of the slow handler, while the other one is counted


def test_a_noop_keeps_its_share_of_workers_beside_a_slow_handler(deployment: MakeDeployment) -> None:
    """
    P12: one of two slots is enough for many runs of it in a second.

    Beside each other in one queue both finish about as many. A busy machine leaves little of the other slot.
    """
    shop = deployment(QUICK, SLOW)
    shop.data[QUICK].insert_many([{"_id": str(n), "n": 1} for n in range(2000)])
    shop.data[SLOW].insert_many([{"_id": str(n), "n": 1, "do": {"seconds": 1.0}} for n in range(40)])
    shop.both()

    def done(handler: str) -> int:
        return sum(int(each["committed"]) for each in shop.state["partitions"].find({"handler": handler}))

    wait_for(lambda: done(SLOW) >= 8)  # four were sent before it was known that they are slow
    slow, quick = done(SLOW), done(QUICK)
    wait_for(lambda: done(SLOW) >= slow + _RUNS)
    assert done(QUICK) - quick >= _RUNS
