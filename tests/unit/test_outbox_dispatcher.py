"""What a dispatcher plans, without its thread."""

from __future__ import annotations

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
