"""Writes that got no answer are made again until they do, and no longer."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pymongo.errors import AutoReconnect, DuplicateKeyError, OperationFailure

from mongo_celery.bridge.state.leases import FORGED
from mongo_celery.bridge.worker.deferred import DeferredWrites
from mongo_celery.bridge.worker.dropping import Dropper
from mongo_celery.bridge.worker.execution import persist
from mongo_celery.command_line import CommandLine
from tests.fixtures.process import wait_for


@pytest.mark.parametrize(
    ("answers", "patience", "calls"),
    [
        ((True,), 0, 1),
        ((AutoReconnect("away"), AutoReconnect("away"), True), 0, 3),
        ((AutoReconnect("away"), False), 0, 2),
        ((OperationFailure("not authorized", 13), OperationFailure("Authentication failed", 18), True), 0, 3),
        ((False,), 3, 3),
        ((False, AutoReconnect("away"), True), 3, 3),
        ((DuplicateKeyError("no", 11000),), 0, 1),
        ((ValueError("a mistake"),), 0, 1),
    ],
)
def test_a_write_is_made_until_it_is_answered(answers: tuple[bool | Exception, ...], patience: int, calls: int) -> None:
    """An outage is no answer. A refusal is one, after as many as are asked for. An error that stays ends it."""
    deferred = DeferredWrites(cast("Any", SimpleNamespace(name="shop", client=None)))
    made, ended = list[bool | Exception](), list[int]()

    def write() -> bool:
        made.append(answers[min(len(made), len(answers) - 1)])
        if isinstance(made[-1], Exception):
            raise made[-1]
        return made[-1]

    deferred.add("an outcome", write, answers=patience, ended=lambda: ended.append(len(made)))
    wait_for(lambda: ended)
    assert ended == [calls]


def test_a_thread_that_cannot_start_is_started_with_the_next_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """P17: the process had too many threads. The write that met that is refused, and no other one."""
    deferred, made = DeferredWrites(cast("Any", SimpleNamespace(name="shop", client=None))), list[str]()

    def write(name: str) -> bool:
        made.append(name)
        return True

    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", _refuse)
        with pytest.raises(RuntimeError):
            deferred.add("an outcome", lambda: write("first"))
    deferred.add("an outcome", lambda: write("second"))
    wait_for(lambda: made)
    assert made == ["second"]


def test_dropped_messages_are_counted_by_the_next_thread_that_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """P16: dropping fails for no message."""
    counted = Counter[str]()
    drops = SimpleNamespace(count=lambda counts, _: counted.update(counts))
    wiring = SimpleNamespace(name="shop", store=SimpleNamespace(drops=drops), line=CommandLine.of(None))
    dropper = Dropper(cast("Any", wiring))
    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", _refuse)
        dropper.drop(FORGED)
    dropper.drop(FORGED)
    wait_for(lambda: counted[FORGED] == 2)


def test_a_write_on_a_connection_of_a_dropped_user_is_repeated_on_a_new_one() -> None:
    """P14: the user may have been created again."""
    answers: list[Any] = [OperationFailure("command update requires authentication", 13), True]
    renewed = list[Exception]()

    def write() -> bool:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    assert persist(cast("Any", SimpleNamespace(renew_connections=renewed.append)), write, "an outcome", 60.0)
    assert len(renewed) == 1


def _refuse(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
