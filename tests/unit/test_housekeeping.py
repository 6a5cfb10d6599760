"""The housekeeping thread."""

from __future__ import annotations

import logging
import math
import threading

import pytest

from mongo_celery.bridge.listener import housekeeping as module
from mongo_celery.bridge.listener.housekeeping import Housekeeping
from tests.fixtures.process import wait_for


def test_a_job_that_fails_is_logged_and_ends_no_other(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P17: and is tried again. One that is woken runs. Each is closed at the end."""
    monkeypatch.setattr(module, "_FAILED_SECONDS", 0.01)
    housekeeping, failures, runs, closed = Housekeeping(), list[int](), list[int](), threading.Event()

    def fail() -> float:
        failures.append(1)
        raise ValueError("bad")

    with caplog.at_level(logging.ERROR, "mongo_celery.listener"):
        housekeeping.add(fail)
        housekeeping.add(lambda: runs.append(1) or 0.01, closed.set)  # type: ignore[func-returns-value]
        rare = list[int]()
        job = housekeeping.add(lambda: rare.append(1) or math.inf)  # type: ignore[func-returns-value]
        housekeeping.start()
        wait_for(lambda: len(failures) >= 2 and len(runs) >= 2)
    assert len(rare) == 1
    job.wake()
    wait_for(lambda: len(rare) == 2)
    housekeeping.stop()
    wait_for(closed.is_set)
    assert {record.__dict__["event"] for record in caplog.records} == {"housekeeping_failed"}
