"""Heartbeats go on, whatever a single one meets."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from pymongo.errors import AutoReconnect, NetworkTimeout

from mongo_celery.bridge.state.claims import Claim, Claims
from mongo_celery.bridge.worker import heartbeat
from mongo_celery.bridge.worker.heartbeat import Heartbeats
from tests.fixtures.process import wait_for

TTL_SECONDS = 1.5
CLAIM = Claim("shop/orders/0/1", "owner", 1, 1, 7, 0, 0)


class FakeClaims:
    """Answers with what it was given, in turn, and then with the last for ever."""

    def __init__(self, *answers: bool | Exception) -> None:
        self.calls = 0
        self.sizes: list[int] = []
        self.owners: list[str] = []
        self.withdrawn = threading.Event()
        self.exhausted = threading.Event()
        self.answers = list(answers)

    def extend(self, claims: Sequence[Claim], *, leaving: bool) -> list[Claim]:
        del leaving
        self.sizes.append(len(claims))
        answer = self.answers[min(self.calls, len(self.answers) - 1)]
        self.calls += 1
        if self.calls >= len(self.answers):
            self.exhausted.set()
        if isinstance(answer, Exception):
            raise answer
        return [] if answer else list(claims)

    def withdraw(self, _partition_id: str, owner: str) -> bool:
        self.owners.append(owner)
        self.withdrawn.set()
        return True


def regex_of(seconds: float) -> Callable[[], None]:
    """A match that holds the interpreter at least so long by the processor's clock: each letter doubles it."""
    pattern = re.compile("(a+)+b")
    length, took = 16, 0.0
    while took < seconds / 8:
        length += 1
        before = time.process_time()
        pattern.match("a" * length)
        took = time.process_time() - before
    text = "a" * (length + 3)

    def match() -> None:
        pattern.match(text)

    return match


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


def test_a_process_that_lives_withdraws_what_the_loss_of_its_claim_has_charged() -> None:
    """P14: a heartbeat that was refused proves both that the claim was replaced and that its owner is no crash."""
    claims = FakeClaims(False)
    heartbeats(claims).begin(CLAIM, time.monotonic())
    assert claims.withdrawn.wait(60)
    assert claims.owners == ["owner"]


def test_an_execution_that_ends_after_its_claim_may_have_lapsed_withdraws_its_crash() -> None:
    """P14: whether it was replaced is not known here; asking changes nothing where it was not."""
    claims = FakeClaims(AutoReconnect("gone"))
    beats = heartbeats(claims)
    beats.end(beats.begin(CLAIM, time.monotonic() - 2 * TTL_SECONDS))
    assert claims.withdrawn.wait(60)
    assert claims.owners == ["owner"]


def test_an_execution_that_ends_in_time_withdraws_nothing() -> None:
    """No write for a change that runs as it should."""
    claims, asked = FakeClaims(True), FakeClaims(True)
    beats = heartbeats(claims)
    beats.end(beats.begin(CLAIM, time.monotonic()))
    heartbeats(asked).begin(CLAIM, time.monotonic())
    assert asked.exhausted.wait(60)
    assert (claims.owners, claims.calls) == ([], 0)


def test_many_claims_are_renewed_by_one_write_and_a_slow_one_is_made_smaller() -> None:
    """One locked document must not let all claims of a process lapse."""
    claims = FakeClaims(NetworkTimeout("slow"), True)
    beats = heartbeats(claims)
    for number in range(300):
        beats.begin(replace(CLAIM, owner=f"owner{number}"), time.monotonic() - TTL_SECONDS / 3)
    assert claims.exhausted.wait(60)
    assert claims.sizes[0] == 300
    assert claims.sizes[1] <= 300 // 8


def test_a_claim_that_is_not_renewed_has_its_crash_withdrawn_too() -> None:
    """A transactional handler's claim: a heartbeat would abort its transaction."""
    claims = FakeClaims(True)
    beats = heartbeats(claims)
    beats.end(beats.begin(CLAIM, time.monotonic() - 2 * TTL_SECONDS, renew=False))
    assert claims.withdrawn.wait(60)
    assert claims.calls == 0


def test_a_claim_that_lives_longer_than_others_is_judged_by_its_own_time() -> None:
    """No write behind each slow transactional handler."""
    claims, asked = FakeClaims(True), FakeClaims(True)
    beats = heartbeats(claims)
    beats.end(beats.begin(CLAIM, time.monotonic() - 2 * TTL_SECONDS, ttl=60.0, renew=False))
    heartbeats(asked).begin(CLAIM, time.monotonic())
    assert asked.exhausted.wait(60)
    assert claims.owners == []


def test_a_lapse_that_the_handler_itself_has_caused_stays_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """P14: a pattern that holds the interpreter for longer than the claim is what `max_crashes` is for."""
    # A machine with twenty processes for each core gives this one less than the tenth that counts as work of its own.
    monkeypatch.setattr(heartbeat, "_OWN_WORK", 0.01)
    hog = regex_of(TTL_SECONDS)
    claims = FakeClaims(True)
    beat = heartbeats(claims).begin(CLAIM, time.monotonic())
    wait_for(lambda: claims.calls)
    claims.answers = [False]
    hog()
    wait_for(lambda: beat.lost)
    assert beat.charged
    assert claims.owners == []
