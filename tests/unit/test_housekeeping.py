"""The housekeeping thread, and the times of what is tried or logged again."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator

import pytest

from mongo_celery.bridge.listener import housekeeping as module
from mongo_celery.bridge.listener.housekeeping import Housekeeping
from mongo_celery.bridge.listener.pacing import LogThrottle, RetryGate
from mongo_celery.mongo.repeating import Pauses
from tests.fixtures.process import wait_for


@pytest.fixture
def housekeeping() -> Iterator[Housekeeping]:
    made = Housekeeping()
    made.start()
    yield made
    made.stop()
    made._thread.join()


def test_a_job_runs_again_when_it_says_or_is_woken(housekeeping: Housekeeping) -> None:
    runs, rare = [], []
    housekeeping.add(lambda: runs.append(1) or 0.01)  # type: ignore[func-returns-value]
    job = housekeeping.add(lambda: rare.append(1) or math.inf)  # type: ignore[func-returns-value]
    wait_for(lambda: len(runs) >= 3)
    assert len(rare) == 1
    job.wake()
    wait_for(lambda: len(rare) == 2)


def test_a_job_that_is_woken_while_it_runs_runs_once_more(housekeeping: Housekeeping) -> None:
    """What has changed after its look is not missed."""
    began, may_end, runs = threading.Event(), threading.Event(), []

    def work() -> float:
        runs.append(1)
        began.set()
        may_end.wait()
        return math.inf

    job = housekeeping.add(work)
    began.wait()
    job.wake()
    may_end.set()
    wait_for(lambda: len(runs) == 2)


def test_a_job_that_fails_is_logged_and_ends_no_other(
    housekeeping: Housekeeping, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P17: and is tried again."""
    monkeypatch.setattr(module, "_FAILED_SECONDS", 0.01)
    failures, runs = [], []

    def fail() -> float:
        failures.append(1)
        raise ValueError("bad")

    with caplog.at_level(logging.ERROR, "mongo_celery.listener"):
        housekeeping.add(fail)
        housekeeping.add(lambda: runs.append(1) or 0.01)  # type: ignore[func-returns-value]
        wait_for(lambda: len(failures) >= 2 and len(runs) >= 2)
    assert {record.__dict__["event"] for record in caplog.records} == {"housekeeping_failed"}


def test_jobs_are_closed_at_the_end() -> None:
    housekeeping, closed = Housekeeping(), threading.Event()
    housekeeping.add(lambda: math.inf, closed.set)
    housekeeping.start()
    housekeeping.stop()
    wait_for(closed.is_set)


def test_a_gate_opens_after_ever_longer_pauses_until_something_succeeds() -> None:
    gate, pauses = RetryGate(Pauses(first=10.0, longest=30.0)), []
    assert gate.is_open(0.0)
    for _ in range(3):
        gate.note_failure()
        pauses.append(round(gate.opens_at - time.monotonic()))
    assert pauses == [10, 20, 30]
    assert not gate.is_open(time.monotonic())
    gate.note_success()
    assert (gate.is_open(0.0), gate.failures) == (True, 0)


def test_a_throttle_counts_what_it_leaves_out() -> None:
    throttle = LogThrottle()
    assert [throttle.may_log() for _ in range(3)] == [True, False, False]
    assert (throttle.describe_left_out(), throttle.describe_left_out()) == (
        " (and 2 more since the last such line)",
        "",
    )
