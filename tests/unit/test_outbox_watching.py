"""How long the delivery of a watched outbox waits for whoever holds the document."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import Retry

from mongo_celery.outbox.delivery import Delivery
from mongo_celery.outbox.watching import delivery_handler


@pytest.mark.parametrize(("retries", "pause"), [(0, 2.0), (1, 4.0), (2, 8.0), (3, 8.0)])
def test_a_document_that_is_held_is_asked_for_ever_more_seldom(retries: int, pause: float) -> None:
    """Each time is a record of Celery's, and holds the partition."""
    relay: Any = SimpleNamespace(deliver=lambda _: Delivery(), is_held=lambda _: True)
    request = SimpleNamespace(retries=retries)
    task = SimpleNamespace(request=request, retry=lambda **given: Retry(when=given["countdown"]))
    with pytest.raises(Retry) as raised:
        delivery_handler(lambda: relay, "shop.orders")(task, SimpleNamespace(document_key={"_id": 1}))
    assert raised.value.when == pause
