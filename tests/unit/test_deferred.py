"""Writes that got no answer are made again until they do, and no longer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from pymongo.errors import AutoReconnect, DuplicateKeyError

from mongo_celery.bridge.worker.deferred import DeferredWrites
from tests.fixtures.process import wait_for


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
def test_a_write_is_made_until_it_is_answered(answers: tuple[bool | Exception, ...], patience: int, calls: int) -> None:
    """An outage is no answer. A refusal is one, after as many as are asked for. An error that stays ends it."""
    deferred = DeferredWrites(cast("Any", SimpleNamespace(name="shop")))
    made, ended = list[bool | Exception](), list[int]()

    def write() -> bool:
        made.append(answers[min(len(made), len(answers) - 1)])
        if isinstance(made[-1], Exception):
            raise made[-1]
        return made[-1]

    deferred.add("an outcome", write, answers=patience, ended=lambda: ended.append(len(made)))
    wait_for(lambda: ended)
    assert ended == [calls]
