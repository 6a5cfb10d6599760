"""What a dispatcher plans, without its thread."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from typing import Any

import pytest

from mongo_celery.outbox.dispatcher import OutboxDispatcher
from mongo_celery.outbox.document_queue import TURN, QueuedDocument


@pytest.fixture
def dispatcher(monkeypatch: pytest.MonkeyPatch) -> OutboxDispatcher:
    """One that never begins."""

    def refuse(*_: object) -> Any:
        raise AssertionError("nothing is to be asked")

    monkeypatch.setattr(OutboxDispatcher, "_wake", lambda _self: None)
    return OutboxDispatcher(lambda: "orders", refuse, waiting=refuse, answers=refuse, claim_ttl=600, codec=refuse)


def test_a_look_that_waits_for_the_end_of_a_claim_outlives_any_number_of_writes(dispatcher: OutboxDispatcher) -> None:
    """Also under load; and few are planned at any time."""
    dispatcher._forget_queue()
    first, last = dispatcher._looks.at
    assert last - first == pytest.approx(600)
    for _ in range(100):
        dispatcher.expect()
        dispatcher.hint()
    assert dispatcher._looks.at[-1] == last
    assert len(dispatcher._looks.at) <= 5


def test_a_broker_that_takes_connections_and_no_message_is_asked_ever_more_rarely(
    dispatcher: OutboxDispatcher, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Redis out of memory does; that it is back is said when something has gone out."""
    monkeypatch.setattr(dispatcher._broker, "_answers", lambda: True)
    with caplog.at_level(logging.INFO, "mongo_celery.outbox"):
        for times in range(4):
            assert dispatcher._broker.probes == times
            dispatcher._pause_for_broker([])
            monkeypatch.setattr(dispatcher._broker, "down_until", 0.0)
            assert dispatcher._broker.probe()
        assert not caplog.records
        dispatcher._went_out(0)
        assert not caplog.records
        for _ in range(2):
            dispatcher._went_out(1)
    assert [record.__dict__["event"] for record in caplog.records] == ["broker_back"]
    assert dispatcher._broker.probes == 0


def test_turns_are_apart_so_that_something_gathers_unless_there_is_enough_or_somebody_waits(
    dispatcher: OutboxDispatcher,
) -> None:
    """And who writes meanwhile does not wake the thread up."""
    now = time.monotonic()
    dispatcher._turn_began = now
    dispatcher._queue.append(0, QueuedDocument(0))
    assert dispatcher._next_at(now) == pytest.approx(now + 0.02)
    dispatcher._queue.join(0, QueuedDocument(0, waiting=[threading.Event()]))
    assert dispatcher._next_at(now) == now
    dispatcher._queue.take_all()
    for number in range(TURN):
        assert dispatcher._next_at(now) != now
        dispatcher._queue.append(number, QueuedDocument(number))
    assert dispatcher._next_at(now) == now


def test_a_thread_with_nothing_to_do_ends_and_the_next_write_starts_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep an outbox alive, and so an app that nobody else has any more."""
    monkeypatch.setattr("mongo_celery.outbox.dispatcher._IDLE_SECONDS", 0.05)
    looks = list[int]()

    def waiting(_most: int, _but: Any) -> list[Any]:
        looks.append(1)
        return []

    given: dict[str, Any] = {"relay": object, "waiting": waiting, "answers": bool, "codec": object}
    dispatcher = OutboxDispatcher(lambda: "orders", claim_ttl=10, **given)
    for times in (1, 2):
        dispatcher.hint()
        thread = dispatcher._thread
        assert thread is not None
        thread.join(30)
        assert not thread.is_alive()
        assert (len(looks), dispatcher._thread) == (times, None)
    dispatcher.hint()
    dispatcher.close()  # while there is one
    assert dispatcher._thread is None
    gone = weakref.ref(dispatcher)
    del dispatcher
    gc.collect()
    assert gone() is None
