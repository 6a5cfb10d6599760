"""What `docs/howto/saga.md` needs: services that lose an answer and decline a card, and whether each order ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from celery import Celery
from pymongo import MongoClient

from mongo_celery import Bridge
from mongo_celery.testing import BridgeRunner


class _Warehouse:
    """Two lamps, for whoever asks first; a repeated key is the same request, as with real services."""

    def __init__(self) -> None:
        self.keys: dict[str, bool] = {}
        self.left = 2
        self.answers = 0

    def reserve(self, _article: str, *, key: str) -> bool:
        if key not in self.keys:
            self.keys[key] = self.left > 0
            self.left -= self.keys[key]
        self.answers += 1
        if self.answers == 1:
            raise ConnectionResetError("the answer is lost")
        return self.keys[key]

    def release(self, _article: str, *, key: str) -> None:
        self.left += self.keys.setdefault(key, True)


class _Bank:
    """Ann can pay."""

    def charge(self, customer: str, _price: int, *, key: str) -> bool:
        assert key
        return customer == "Ann"


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """An app, a bridge, orders, and both services."""
    app, warehouse = Celery("shop", broker=redis_url), _Warehouse()
    bridge = Bridge(app, mongo_url, name="shop")
    with MongoClient[dict[str, Any]](mongo_url) as client:
        orders = client.shop.orders
        services = {"warehouse": warehouse, "bank": _Bank()}
        namespace: dict[str, Any] = {"app": app, "bridge": bridge, "orders": orders, **services}
        yield namespace

        placed: Any = orders.find_one_and_delete({"_id": 1})
        with BridgeRunner(bridge, url=mongo_url) as runner:
            orders.insert_many([{**placed, "_id": key, "customer": who} for key, who in ((1, "Ann"), (2, "Bob"))])
            orders.insert_one(
                {"_id": 3, "state": "waiting", "article": "lamp", "since": datetime(2026, 1, 1, tzinfo=UTC)}
            )
            namespace["give_up"]()
            runner.crash("called", "advance")
            runner.deliver()
            assert {order["_id"]: order["state"] for order in orders.find()} == {
                1: "paid",
                2: "canceled",
                3: "canceled",
            }
            assert warehouse.left == 2 - 2 + 1 + 1  # reserved for both; released once each
            assert not runner.deliver().calls  # the ends have no step
