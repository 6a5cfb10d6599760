"""Heartbeats go on, whatever a single one meets."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest
from pymongo.errors import AutoReconnect

from mongo_celery.bridge.state.claims import Claim, Claims
from mongo_celery.bridge.worker.heartbeat import Heartbeats

TTL_SECONDS = 1.5
CLAIM = Claim("shop/orders/0/1", "owner", 1, 1, 7, 0, 0)


class FakeClaims:
    """Answers with what it was given, in turn, and then with the last for ever."""

    def __init__(self, *answers: bool | Exception) -> None:
        self.calls = 0
        self.exhausted = threading.Event()
        self._answers = list(answers)

    def extend(self, _claim: Claim) -> bool:
        answer = self._answers[min(self.calls, len(self._answers) - 1)]
        self.calls += 1
        if self.calls >= len(self._answers):
            self.exhausted.set()
        if isinstance(answer, Exception):
            raise answer
        return answer


def heartbeats(claims: FakeClaims) -> Heartbeats:
    return Heartbeats(cast("Claims", cast("Any", claims)), TTL_SECONDS)


@pytest.mark.parametrize("error", [AutoReconnect("gone"), RuntimeError("anything")])
def test_a_heartbeat_that_fails_is_repeated(error: Exception) -> None:
    """An error of any kind ends neither this heartbeat nor the thread that all claims of a process share."""
    claims = FakeClaims(error, error, True)
    beats = heartbeats(claims)
    beat = beats.begin(CLAIM, time.monotonic())
    assert claims.exhausted.wait(60)
    beats.end(beat)
    assert not beat.lost


def test_a_heartbeat_that_is_refused_is_final() -> None:
    """P3: the claim belongs to somebody else, and is not asked for again."""
    claims = FakeClaims(False)
    beats = heartbeats(claims)
    beat = beats.begin(CLAIM, time.monotonic())
    assert claims.exhausted.wait(60)
    other = FakeClaims(True)
    later = heartbeats(other)
    later.begin(CLAIM, time.monotonic() - TTL_SECONDS)
    assert other.exhausted.wait(60)
    assert beat.lost
    assert claims.calls == 1
