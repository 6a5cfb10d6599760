"""What `docs/howto/commit.md` needs, and what must have reached the broker."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import redis
from celery import Celery
from pymongo import MongoClient

from tests.fixtures.process import wait_for

_DELIVERY_SECONDS_MAX = 120.0


def _nothing(_order_id: int) -> None:
    """A task: only its message matters."""


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """An app with two tasks, and a collection of orders."""
    app = Celery("shop", broker=redis_url)
    with MongoClient[dict[str, Any]](mongo_url) as client, redis.Redis.from_url(redis_url) as broker:
        tasks = {name: app.task(name=f"shop.{name}")(_nothing) for name in ("send_receipt", "ship")}
        namespace: dict[str, Any] = {**tasks, "app": app, "client": client, "orders": client.shop.orders}
        yield namespace

        namespace["place_as_before"]({"_id": 1})
        namespace["place"]({"_id": 2, "paid": False})
        for _ in range(2):  # the second one matches nothing
            namespace["pay"](2)
        for name in ("outbox", "parcels"):
            if name == "parcels":
                namespace["cancel"](2)  # a delete behind the delivery: it takes no pending task away
            delivered = partial(_is_delivered, namespace[name])
            wait_for(delivered, _DELIVERY_SECONDS_MAX, f"every entry of {name} is dispatched")
        headers = [json.loads(message)["headers"] for message in broker.lrange("celery", 0, -1)]
        sent = Counter({header["id"]: header["task"] for header in headers}.values())
        assert sent == {"shop.send_receipt": 3, "shop.ship": 1}, sent
        assert [order["_id"] for order in client.shop.orders.find()] == [1]


def _is_delivered(outbox: Any) -> bool:
    """A slow machine may have left something to the sweep."""
    outbox.sweep(older_than=0)
    return bool(outbox.status().pending == 0)
