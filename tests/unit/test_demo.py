"""The demo's verdict finds bad summaries, and lets good ones pass."""

from __future__ import annotations

import pytest

from mongo_celery.demo.app import VARIABLE, DemoSetting
from mongo_celery.demo.run import REWRITES, find_lost, find_out_of_order, plan_writes

KEYS = ["a", "b"]
GOOD = {key: list(range(REWRITES + 1)) for key in KEYS}


def test_good_summaries_pass() -> None:
    """Also where a change took effect twice."""
    assert find_lost(KEYS, GOOD) == []
    assert find_out_of_order(GOOD) == []
    assert find_out_of_order({"a": [0, 1, 1, 2]}) == []


def test_a_change_without_an_effect_is_lost() -> None:
    """Whichever it is, and also where there is no summary at all (P1)."""
    for missing in range(REWRITES + 1):
        summaries = {**GOOD, "a": [n for n in GOOD["a"] if n != missing]}
        (finding,) = find_lost(KEYS, summaries)
        assert f"a n={missing}" in finding
    assert len(find_lost(KEYS, {})) == len(list(plan_writes(KEYS)))


def test_an_effect_that_goes_back_is_out_of_order() -> None:
    """One finding for each step back, of whichever order (P2)."""
    assert len(find_out_of_order({**GOOD, "b": [0, 1, 2, 1, 2, 3]})) == 1
    assert len(find_out_of_order({"a": [1, 0], "b": [2, 1, 0]})) == 3


def test_the_writes_of_an_order_are_in_order() -> None:
    """Each number once, rising, with other orders between."""
    writes = list(plan_writes([f"order-{number}" for number in range(25)]))

    for key in {key for key, _ in writes}:
        assert [n for each, n in writes if each == key] == list(range(REWRITES + 1))
    assert [key for key, _ in writes[:3]] == ["order-0", "order-1", "order-2"]


def test_the_setting_reaches_the_processes_without_celerys_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """`CELERY_BROKER_URL` would win over the demo's broker."""
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://elsewhere")
    setting = DemoSetting("mongodb://a", "redis://b", "demo_1", (7, 8))

    found = setting.environment()

    assert DemoSetting.from_environment(found) == setting
    assert not [name for name in found if name.startswith("CELERY_")]
    assert DemoSetting.from_environment({}) == DemoSetting()
    assert VARIABLE in found
