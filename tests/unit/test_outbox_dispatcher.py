"""What the dispatcher of an app plans, without MongoDB and a broker."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from mongo_celery.outbox.delivery import Delivery
from mongo_celery.outbox.dispatcher import AppDispatcher, OutboxDispatcher


@pytest.fixture
def outbox(monkeypatch: pytest.MonkeyPatch) -> OutboxDispatcher:
    """Give one whose thread never begins."""
    monkeypatch.setattr(AppDispatcher, "wake", lambda *_: None)
    given: Any = SimpleNamespace(collection=SimpleNamespace(full_name="shop.orders", codec_options=None))
    return OutboxDispatcher(AppDispatcher(), given)


def test_a_broker_that_stays_away_is_asked_ever_more_rarely() -> None:
    thread, pauses = AppDispatcher(), list[float]()
    thread.note_outage()
    for _ in range(3):
        assert not thread.is_back(lambda: False)
        assert thread.down_until is not None
        pauses.append(thread.down_until - time.monotonic())
    assert pauses == sorted(pauses)
    assert thread.is_back(lambda: True)
    assert thread.down_until is None


def test_documents_that_mongodb_refuses_are_polled_ever_more_rarely(outbox: OutboxDispatcher) -> None:
    """Each poll finds them again. Documents that are named are delivered meanwhile."""
    for rests in range(3):
        outbox._note(Delivery(is_refused=True, error="a validator"), [1])
        due = outbox.next_turn()
        assert due is not None
        assert due - time.monotonic() == pytest.approx(2.0 * 2**rests, abs=1.0)
    outbox.hint(2)
    due = outbox.next_turn()
    assert due is not None
    assert due <= time.monotonic()
    outbox._note(Delivery(dispatched=1), [3])
    assert outbox._rests == 0


def test_an_id_that_no_document_can_have_is_logged_and_the_others_are_queued(
    outbox: OutboxDispatcher, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the collection has no name yet."""
    outbox.hint([1], 2)
    del outbox._outbox.collection.full_name
    outbox.hint([1])
    assert [record.__dict__["event"] for record in caplog.records] == ["left_to_sweep"] * 2
    assert list(outbox._queue.values()) == [2]
