"""The one loop that repeats a call, and the pauses between attempts."""

from __future__ import annotations

import math
import random
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


@pytest.mark.parametrize(
    ("pauses", "seconds"),
    [
        (Pauses(first=0.5, longest=10.0), [0.5, 1, 2, 4, 8, 10, 10]),
        (Pauses(first=1.0, longest=3.0, growth=1.5), [1, 1.5, 2.25, 3, 3]),
        (Pauses(first=0.4, longest=0.4), [0.4, 0.4, 0.4]),
    ],
    ids=["doubling", "slower", "constant"],
)
def test_pauses_grow_up_to_a_bound(pauses: Pauses, seconds: list[float]) -> None:
    """And there they stay, however often it has failed."""
    assert [pauses.nth(count) for count in range(len(seconds))] == seconds
    assert pauses.nth(10**6) == seconds[-1]


@pytest.mark.parametrize(("jitter", "least"), [(0.0, 8.0), (0.5, 4.0), (1.0, 0.0)])
def test_chance_takes_away_no_more_than_the_jitter(
    jitter: float, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause is never longer than without, so that a bound stays a bound."""
    pauses = Pauses(first=1.0, longest=60.0, jitter=jitter)
    found = []
    for chance in (0.0, 1.0):
        monkeypatch.setattr(random, "random", lambda chance=chance: chance)
        found.append(pauses.nth(3))
    assert found == [8.0, least]


def test_a_call_is_repeated_until_it_is_answered() -> None:
    """Each error before the next attempt is told."""
    noted: list[Exception] = []
    call = answers(LOST, LOST, "done")
    assert retry_until_answered(call, deadline=math.inf, pauses=AT_ONCE, note=noted.append) == "done"
    assert noted == [LOST, LOST]


def test_a_refusal_is_an_answer() -> None:
    """Whatever it is: the same call would be refused again."""
    with pytest.raises(OperationFailure):
        retry_until_answered(answers(LOST, REFUSED, "too late"), deadline=math.inf, pauses=AT_ONCE)


def test_what_fails_after_the_deadline_is_not_made_again() -> None:
    """It is made once all the same: who comes late may still be answered."""
    with pytest.raises(AutoReconnect):
        retry_until_answered(answers(LOST, "too late"), deadline=-math.inf, pauses=AT_ONCE)
    assert retry_until_answered(answers("done"), deadline=-math.inf, pauses=AT_ONCE) == "done"


def test_a_caller_says_what_else_may_pass() -> None:
    """Such as finding a document changed meanwhile."""
    changed = LookupError("changed meanwhile")
    call = answers(changed, "done")
    assert (
        retry_until_answered(call, deadline=math.inf, pauses=AT_ONCE, repeatable=lambda error: error is changed)
        == "done"
    )
