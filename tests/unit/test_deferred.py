"""Writes that got no answer are made again until they do, and no longer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pymongo.errors import AutoReconnect, DuplicateKeyError

from mongo_celery.bridge.worker.deferred import DeferredWrites
from tests.fixtures.process import wait_for


@pytest.fixture
def deferred() -> DeferredWrites:
    """Give the deferred writes of one process."""
    return DeferredWrites(cast("Any", SimpleNamespace(name="shop")))


class Script:
    """A write that answers as written down, and the same for ever at the end."""

    def __init__(self, *answers: bool | Exception) -> None:
        self.answers = list(answers)
        self.calls = 0

    def __call__(self) -> bool:
        answer = self.answers[min(self.calls, len(self.answers) - 1)]
        self.calls += 1
        if isinstance(answer, Exception):
            raise answer
        return answer


def _is_idle(deferred: DeferredWrites) -> Callable[[], bool]:
    return lambda: deferred._thread is None


@pytest.mark.parametrize(
    ("answers", "patience", "calls"),
    [
        ((True,), 0, 1),
        ((AutoReconnect("away"), AutoReconnect("away"), True), 0, 3),
        ((AutoReconnect("away"), False), 0, 2),
        ((False,), 3, 3),
        ((False, AutoReconnect("away"), True), 3, 3),
        ((DuplicateKeyError("no", 11000),), 0, 1),
        ((ValueError("a mistake"),), 0, 1),
    ],
)
def test_a_write_is_made_until_it_is_answered(
    deferred: DeferredWrites, answers: tuple[bool | Exception, ...], patience: int, calls: int
) -> None:
    """
    An outage is no answer; a refusal is one, after as many as are asked for; an error that stays ends it.

    Its end is told once, whatever it was.
    """
    write, ended = Script(*answers), []
    deferred.add("an outcome", write, answers=patience, ended=lambda: ended.append(write.calls))
    wait_for(_is_idle(deferred))
    assert write.calls == calls
    assert ended == [calls]


def test_one_that_gets_no_answer_holds_up_no_other(deferred: DeferredWrites) -> None:
    """Each has its own pauses; the thread ends with the last one, and a new one begins another."""
    back = threading.Event()

    def write() -> bool:
        if not back.is_set():
            raise AutoReconnect("away")
        return True

    deferred.add("the first", write)
    other = Script(True)
    deferred.add("the second", other)
    wait_for(lambda: other.calls == 1)
    assert not _is_idle(deferred)()
    back.set()
    wait_for(_is_idle(deferred))
    third = Script(True)
    deferred.add("the third", third)
    wait_for(lambda: third.calls == 1)
