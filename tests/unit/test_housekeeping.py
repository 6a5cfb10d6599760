"""The housekeeping thread."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator

import pytest

from mongo_celery.bridge.listener import housekeeping as module
from mongo_celery.bridge.listener.housekeeping import Housekeeping
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
