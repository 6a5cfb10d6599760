"""What a dispatcher plans, without its thread."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from mongo_celery.outbox.dispatcher import OutboxDispatcher


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
    first, last = dispatcher._looks_at
    assert last - first == pytest.approx(600)
    for _ in range(100):
        dispatcher.expect()
        dispatcher.hint()
    assert dispatcher._looks_at[-1] == last
    assert len(dispatcher._looks_at) <= 5


def test_a_broker_that_takes_connections_and_no_message_is_asked_ever_more_rarely(
    dispatcher: OutboxDispatcher, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Redis out of memory does; that it is back is said when something has gone out."""
    monkeypatch.setattr(dispatcher, "_answers", lambda: True)
    with caplog.at_level(logging.INFO, "mongo_celery.outbox"):
        for times in range(4):
            assert dispatcher._probes == times
            dispatcher._pause_for_broker([])
            dispatcher._probe()
        assert not caplog.records
        dispatcher._went_out(0)
        assert not caplog.records
        for _ in range(2):
            dispatcher._went_out(1)
    assert [record.__dict__["event"] for record in caplog.records] == ["broker_back"]
    assert dispatcher._probes == 0
