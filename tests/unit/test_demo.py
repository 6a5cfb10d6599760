"""The demo's verdict finds bad summaries, and lets good ones pass."""

from __future__ import annotations

from mongo_celery.demo.run import REWRITES, find_lost, find_out_of_order, plan_writes

KEYS = ["a", "b"]
GOOD = {key: list(range(REWRITES + 1)) for key in KEYS}


def test_good_summaries_pass() -> None:
    """Also where a change took effect twice."""
    assert find_lost(KEYS, GOOD) == []
    assert find_out_of_order({**GOOD, "b": [0, 1, 1, 2]}) == []


def test_a_change_without_an_effect_is_lost() -> None:
    """P1: whichever it is, and also where there is no summary at all."""
    for missing in range(REWRITES + 1):
        (finding,) = find_lost(KEYS, {**GOOD, "a": [n for n in GOOD["a"] if n != missing]})
        assert f"a n={missing}" in finding
    assert len(find_lost(KEYS, {})) == len(list(plan_writes(KEYS)))


def test_an_effect_that_goes_back_is_out_of_order() -> None:
    """P2: one finding for each step back, of whichever order."""
    assert len(find_out_of_order({**GOOD, "b": [0, 1, 2, 1, 2, 3]})) == 1
    assert len(find_out_of_order({"a": [1, 0], "b": [2, 1, 0]})) == 3
