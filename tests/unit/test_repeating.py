"""The one loop that repeats a call, and the pauses between attempts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
from pymongo.errors import AutoReconnect, OperationFailure

from mongo_celery.mongo.repeating import Pauses, retry_until_answered

AT_ONCE = Pauses(first=0.0, longest=0.0)
LOST, REFUSED = AutoReconnect("no answer"), OperationFailure("refused", 13)


def answers(*outcomes: object) -> Callable[[], object]:
    """A call that gives these in turn; an error is raised."""
    left: Iterator[object] = iter(outcomes)

    def call() -> object:
        outcome = next(left)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return call


def test_a_call_is_repeated_until_it_is_answered_or_its_deadline() -> None:
    """A refusal is an answer. A call is made once at least: who comes late may still be answered."""
    noted: list[Exception] = []
    call = answers(LOST, LOST, "done")
    assert retry_until_answered(call, deadline=math.inf, pauses=AT_ONCE, note=noted.append) == "done"
    assert noted == [LOST, LOST]
    with pytest.raises(OperationFailure):
        retry_until_answered(answers(LOST, REFUSED, "too late"), deadline=math.inf, pauses=AT_ONCE)
    with pytest.raises(AutoReconnect):
        retry_until_answered(answers(LOST, "too late"), deadline=-math.inf, pauses=AT_ONCE)
    assert retry_until_answered(answers("done"), deadline=-math.inf, pauses=AT_ONCE) == "done"
    passing = retry_until_answered(
        answers(REFUSED, "done"), deadline=math.inf, pauses=AT_ONCE, repeatable=lambda error: error is REFUSED
    )
    assert passing == "done"
