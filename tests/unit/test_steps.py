"""Steps of threads: how they end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from mongo_celery.mongo.steps import Steps, run_sync


@pytest.fixture
def between_steps() -> Iterator[None]:
    """Raise an error in `run_sync` when it has got the first result, as a time limit's signal may do there."""

    def trace(frame: Any, event: str, _: object) -> Any:
        if frame.f_code is not run_sync.__code__:
            return None
        if event == "line" and frame.f_locals.get("answer"):
            raise TimeoutError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    yield
    sys.settrace(before)


@pytest.mark.usefixtures("between_steps")
def test_a_signal_between_two_steps_ends_them() -> None:
    """Otherwise the time limit and the scope of their transaction would also apply to what follows."""
    events = []

    def steps() -> Steps[None]:
        try:
            yield "answer"
        finally:
            events.append("ended")

    kept = steps()
    with suppress(TimeoutError):
        run_sync(kept)
        events.append("returned")
    assert events == ["ended"]
