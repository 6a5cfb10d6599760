"""The demo's verdict finds bad summaries, and lets good ones pass."""

from __future__ import annotations

from mongo_celery.demo.run import REWRITES, find_lost, find_out_of_order, plan_writes

KEYS = ["a", "b"]
GOOD = {key: list(range(REWRITES + 1)) for key in KEYS}


def test_a_change_without_an_effect_is_lost_and_a_step_back_is_out_of_order() -> None:
    """P1, P2: whichever it is. A change may take effect twice."""
    assert find_lost(KEYS, GOOD) == find_out_of_order({**GOOD, "b": [0, 1, 1, 2]}) == []
    for missing in range(REWRITES + 1):
        assert len(find_lost(KEYS, {**GOOD, "a": [n for n in GOOD["a"] if n != missing]})) == 1
    assert len(find_lost(KEYS, {})) == len(list(plan_writes(KEYS)))
    assert len(find_out_of_order({"a": [1, 0], "b": [0, 1, 2, 1, 2, 3]})) == 2
