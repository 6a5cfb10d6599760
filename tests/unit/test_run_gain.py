"""What runs would bring a handler that is late: the figure, when it is said, and when it is not."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from mongo_celery.bridge.listener.activity import Activity
from mongo_celery.bridge.listener.run_gain import LATE_CHANGES, LEAST_GAIN, RunAdvice, RunGain, run_gain
from mongo_celery.bridge.operations.status import shape
from mongo_celery.bridge.options import BridgeOptions
from tests.unit.test_status import NOON, facts, image
from tests.unit.test_subscription import change, subscription

OPTIONS = BridgeOptions(name="shop")
LOOK = 31.0
HOUR = 3600.0


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


class Late:
    """A handler of which changes wait, and the advice about it."""

    def __init__(self, waiting: int = LATE_CHANGES, **options: Any) -> None:
        made = BridgeOptions(name="shop", **options)
        self.subscription = subscription(**options)
        for number in range(waiting):
            self.subscription.take_in(change(number + 1))
        self.activity = Activity("shop", ["handle"], 30.0)
        self.advice = RunAdvice(made, self.activity)

    def look(self, now: float, *, handler: float = 0.001, commit: float = 0.02, runs: int = 5) -> None:
        """Some runs later."""
        for _ in range(runs):
            self.activity.of("handle").handler.add(handler)
            self.activity.of("handle").commit.add(commit)
        self.advice.turn([self.subscription], now)


def records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [each for each in caplog.records if getattr(each, "event", "") == "runs_would_help"]


def test_a_handler_that_stays_late_is_told_once_an_hour(caplog: pytest.LogCaptureFixture) -> None:
    """At the second look, with the figure of the time between them; a single look may be a moment's backlog."""
    caplog.set_level(logging.INFO, "mongo_celery.listener")
    late = Late()
    late.look(LOOK, handler=9.0)
    assert not records(caplog)
    late.look(LOOK + 1)
    assert not records(caplog), "too soon"
    for number in range(2, 5):
        late.look(number * LOOK)
    (record,) = records(caplog)
    assert record.getMessage().startswith(f"handler handle is late ({LATE_CHANGES} changes wait): run_size=100 would")
    late.look(2 * LOOK + HOUR)
    assert len(records(caplog)) == 2


@pytest.mark.parametrize(
    "late",
    [lambda: Late(LATE_CHANGES - 1), lambda: Late(run_size=2)],
    ids=["few wait", "runs already"],
)
def test_nothing_is_told_of_others(caplog: pytest.LogCaptureFixture, late: Any) -> None:
    """Nor of a handler of which nothing was measured, or that is slow itself."""
    caplog.set_level(logging.INFO, "mongo_celery.listener")
    one = late()
    for number in range(1, 4):
        one.look(number * LOOK)
    slow, idle = Late(), Late()
    for number in range(1, 4):
        slow.look(number * LOOK, handler=1.0)
        idle.look(number * LOOK, runs=0)
    assert not records(caplog)


def test_status_shows_the_gain_by_the_last_change_of_each_partition() -> None:
    """The median: one change that waited for an election says nothing of the others."""
    ran = {"last": 5, "took": 1, "claimed": NOON, "at": NOON + timedelta(milliseconds=20)}
    slow = {**ran, "at": NOON + timedelta(seconds=20)}
    images = [image(0, ran=ran), image(1, ran=slow), image(2, ran=ran), image(3, ran={**ran, "last": 4}), image(4)]
    (shown,) = shape(facts(images=images))["subscriptions"]
    assert shown["run_gain"] == {
        "handler_seconds": 0.001,
        "change_seconds": 0.02,
        "run_size": 100,
        "factor": pytest.approx(11.9),
        "sentence": "run_size=100 would handle at least 11 times as many changes of a partition: of the 20 ms of one "
        "from claim to commit its handler takes 1 ms",
    }
    for without in (
        facts(images=[image(0)]),
        facts(images=images, without_runs=frozenset({"summarise"})),
        facts(images=images, options=replace(OPTIONS, run_size=10)),
    ):
        assert shape(without)["subscriptions"][0]["run_gain"] is None
