"""What `docs/howto/erasure.md` needs: a customer, and all that was made of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery
from pymongo import MongoClient

from mongo_celery import Bridge
from mongo_celery.testing import BridgeRunner


class _SearchEngine:
    """Somebody else's service, which is away at first."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def forget(self, customer: str) -> None:
        self.asked.append(customer)
        if len(self.asked) == 1:
            raise ConnectionResetError


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """An app, a bridge, and a search engine."""
    bridge, search_engine = Bridge(Celery("shop", broker=redis_url), mongo_url, name="shop"), _SearchEngine()
    with MongoClient[dict[str, Any]](mongo_url) as client:
        yield {"bridge": bridge, "search_engine": search_engine}

        shop = client.shop
        shop.invoices.insert_one({"_id": 1, "customer": "eve", "name": "Eve", "address": "Main Street 1", "total": 5})
        shop.wishes.insert_many([{"customer": "eve"}, {"customer": "bob"}])
        with BridgeRunner(bridge, url=mongo_url) as runner:
            shop.customers.insert_one({"_id": "eve"})
            shop.customers.delete_one({"_id": "eve"})
            runner.deliver()
        assert shop.invoices.find_one() == {"_id": 1, "customer": "eve", "total": 5}
        assert [wish["customer"] for wish in shop.wishes.find()] == ["bob"]
        assert search_engine.asked == ["eve", "eve"]
