"""How the delivery of a watched outbox waits for whoever holds the document."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mongo_celery.outbox.delivery import Delivery
from mongo_celery.outbox.watching import delivery_handler


class RetriedError(Exception):
    """As Celery's, with the pause."""


class Task:
    """A task that has been retried so many times."""

    def __init__(self, retries: int) -> None:
        self.request = SimpleNamespace(retries=retries)

    def retry(self, *, countdown: float, max_retries: int) -> RetriedError:
        return RetriedError(countdown, max_retries > 1000)


class Held:
    """A relay of a document that another one has."""

    def __init__(self, *, held: bool) -> None:
        self._held = held

    def deliver(self, _document_id: object) -> Delivery:
        return Delivery()

    def is_held(self, _document_id: object) -> bool:
        return self._held


def test_a_document_that_is_held_is_looked_at_again_more_and_more_seldom() -> None:
    """Each look is a record of Celery's, and holds the partition; one that nobody holds is done."""
    change: Any = SimpleNamespace(document_key={"_id": 1})
    deliver = delivery_handler(lambda: Held(held=True), "shop.orders")  # type: ignore[arg-type, return-value]
    pauses = []
    for retries in range(5):
        with pytest.raises(RetriedError) as raised:
            deliver(Task(retries), change)
        pauses.append(raised.value.args)
    assert pauses == [(2.0, True), (4.0, True), (8.0, True), (8.0, True), (8.0, True)]
    delivery_handler(lambda: Held(held=False), "shop.orders")(Task(0), change)  # type: ignore[arg-type, return-value]
