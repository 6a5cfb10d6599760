"""What runs would bring a handler that is late: the figure, when it is said, and when it is not."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from mongo_celery.bridge.operations.run_gain import LEAST_GAIN, RunGain, run_gain
from mongo_celery.bridge.operations.snapshot_reader import shape
from mongo_celery.bridge.options import BridgeOptions
from tests.unit.test_status import NOON, facts, image

OPTIONS = BridgeOptions(name="shop")


def gain(handler: float, whole: float, *, takes_runs: bool = True, **options: Any) -> RunGain | None:
    return run_gain(handler, whole, BridgeOptions(name="shop", **options), takes_runs=takes_runs)


def test_a_quick_handler_gains_what_the_protocol_takes() -> None:
    """2 of 22 ms are its own, at most 2.5: with 100 changes a run, a hundredth of the others is left for each."""
    found = gain(0.002, 0.022)
    assert found is not None
    assert found.size == 100
    assert found.factor == pytest.approx(0.022 / (0.0025 + 0.000195))
    assert found.sentence == (
        "run_size=100 would handle at least 8 times as many changes of a partition: of the 22 ms of one from claim to "
        "commit its handler takes 2 ms"
    )


def test_a_run_is_no_longer_than_run_seconds_lets_it_be() -> None:
    """What is cut would be sent again."""
    found = gain(0.05, 0.2, run_seconds=1.0)
    assert found is not None
    assert found.size == 20


@pytest.mark.parametrize(
    ("handler", "whole", "others"),
    [
        (0.5, 0.52, {}),
        (2.0, 5.0, {}),
        (0.002, 0.022, {"takes_runs": False}),
        (0.002, 0.022, {"run_size": 2}),
        (0.0, 0.0, {}),
        (1.0, 0.5, {}),
        (0.0, -1.0, {}),
    ],
    ids=[
        "slow",
        "longer than a run",
        "alone by definition",
        "runs already",
        "nothing",
        "two clocks",
        "a clock set back",
    ],
)
def test_where_runs_bring_little_nothing_is_said(handler: float, whole: float, others: dict[str, Any]) -> None:
    """Whoever reads it could do nothing with it."""
    assert gain(handler, whole, **others) is None


def test_the_least_gain_is_worth_a_sentence() -> None:
    """From a factor of two on."""
    assert gain(0.01, 0.0214) is not None
    assert gain(0.01, 0.0204) is None
    assert LEAST_GAIN == 2.0


def test_status_shows_the_gain_by_the_last_change_of_each_partition() -> None:
    """The median: one change that waited for an election says nothing of the others."""
    ran = {"last": 5, "took": 1, "claimed": NOON, "at": NOON + timedelta(milliseconds=20)}
    slow = {**ran, "at": NOON + timedelta(seconds=20)}
    images = [image(0, ran=ran), image(1, ran=slow), image(2, ran=ran), image(3, ran={**ran, "last": 4}), image(4)]
    (shown,) = shape(facts(images=images)).handlers
    assert shown.run_gain is not None
    assert shown.run_gain.startswith("run_size=100 would handle at least 11 times")
    for without in (
        facts(images=[image(0)]),
        facts(images=images, without_runs=frozenset({"summarise"})),
        facts(images=images, options=replace(OPTIONS, run_size=10)),
    ):
        assert shape(without).handlers[0].run_gain is None
