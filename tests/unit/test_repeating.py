"""The one loop that repeats a call."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
from pymongo.errors import AutoReconnect, OperationFailure

from mongo_celery.mongo.repeating import Pauses, retry_until_answered


@pytest.mark.parametrize(
    ("outcomes", "deadline", "calls"),
    [
        ([AutoReconnect(), AutoReconnect(), "done"], math.inf, 3),
        ([AutoReconnect(), OperationFailure("refused", 13), "done"], math.inf, 2),
        ([AutoReconnect(), "done"], -math.inf, 1),
        (["done"], -math.inf, 1),
    ],
    ids=["answered", "refused", "after the deadline", "late and answered"],
)
def test_a_call_is_repeated_until_it_is_answered_or_its_deadline(
    outcomes: list[object], deadline: float, calls: int
) -> None:
    """A refusal is an answer. A call is made once at least: who comes late may still be answered."""
    made, noted = list[object](), list[Exception]()

    def call() -> object:
        made.append(outcomes[len(made)])
        if isinstance(made[-1], Exception):
            raise made[-1]
        return made[-1]

    with suppress(AutoReconnect, OperationFailure):
        assert retry_until_answered(call, deadline=deadline, pauses=Pauses(0.0, 0.0), note=noted.append) == "done"
    assert noted == made[: calls - 1]
    assert made == outcomes[:calls]
