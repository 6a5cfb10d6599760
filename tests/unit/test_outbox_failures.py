"""What becomes of an entry that could not be published: its own faults count, and nothing else does."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

import pytest

from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.failures import DEAD_SECONDS_MIN, FailureKind, FailurePolicy
from mongo_celery.outbox.publisher import BrokerUnavailableError, UnknownTaskError
from mongo_celery.outbox.signing import UnsignedEntryError

HALT, DEAD = FailurePolicy("halt", 5), FailurePolicy("dead_letter", 5)
POISON = ValueError("its own")


def entry(attempts: int = 0) -> Entry:
    content: Any = {"content_type": "application/json", "content_encoding": "utf-8", "payload": "{}"}
    shown: Any = {"name": "shop.note", "argsrepr": "()"}
    return Entry(id="e1", kind="task", at=datetime.now(UTC), attempts=attempts, **shown, **content)


@pytest.mark.parametrize("policy", [HALT, DEAD], ids=["halt", "dead_letter"])
def test_what_is_not_its_own_fault_is_never_counted_however_often(policy: FailurePolicy) -> None:
    """An outage or a deploy makes no dead letter and nothing stuck. A broker that refuses one answers others."""
    errors = (
        BrokerUnavailableError("gone"),
        BrokerUnavailableError("out of memory", answers=True),
        UnknownTaskError("shop.new"),
    )
    gone, full, unknown = (policy.judge(entry(attempts=1000), error) for error in errors)
    assert {(each.counts, each.attempts) for each in (gone, full, unknown)} == {(False, 0)}
    assert [each.kind for each in (gone, full)] == [FailureKind.WAIT_FOR_BROKER] * 2
    assert (gone.is_outage, full.is_outage, unknown.kind) == (True, False, FailureKind.OTHER_PROCESS)
    assert gone.pause < full.pause


@pytest.mark.parametrize("max_attempts", [1, 5, 30])
def test_a_dead_letter_has_had_its_attempts_and_ten_minutes(max_attempts: int) -> None:
    """What it was held back for adds up to the time that has passed, whatever the clocks say."""
    policy, waited, attempts = FailurePolicy("dead_letter", max_attempts), 0.0, 0
    while (verdict := policy.judge(entry(attempts), POISON)).kind is FailureKind.ATTEMPT:
        waited += verdict.pause
        attempts += 1
    assert verdict.kind is FailureKind.DEAD_LETTER
    assert attempts + 1 >= max_attempts
    assert waited >= DEAD_SECONDS_MIN
    assert not verdict.counts


@pytest.mark.parametrize("policy", ["halt", "dead_letter"])
def test_many_unsigned_entries_are_one_error_in_the_log(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each of them is set aside at once. Whoever writes a flood of them does not fill the log."""
    dealing, forged, error = FailurePolicy(policy, 5), {"value": "text"}, UnsignedEntryError()
    with caplog.at_level(logging.WARNING, "mongo_celery.outbox"):
        for document_id in range(1000):
            verdict = dealing.judge(forged, error)
            assert (verdict.kind, verdict.counts) == (FailureKind.DEAD_LETTER, False)
            dealing.log(verdict, forged, document_id, error)
    assert [(each.levelno, each.__dict__["event"]) for each in caplog.records] == [(logging.ERROR, "entry_unsigned")]


def test_an_entry_is_tried_for_ever_and_that_it_is_stuck_is_an_error_once(caplog: pytest.LogCaptureFixture) -> None:
    """By default; its pauses grow to five minutes. An alarm every five minutes would be switched off."""
    with caplog.at_level(logging.WARNING, "mongo_celery.outbox"):
        verdicts = [HALT.judge(entry(attempts), POISON) for attempts in range(40)]
        for attempts, verdict in enumerate(verdicts):
            HALT.log(verdict, entry(attempts), 7, POISON)
    assert {(each.kind, each.counts) for each in verdicts} == {(FailureKind.ATTEMPT, True)}
    pauses = [each.pause for each in verdicts]
    assert (pauses[-1], pauses) == (300.0, sorted(pauses))
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.WARNING] * 4 + [logging.ERROR] + [logging.WARNING] * 35
