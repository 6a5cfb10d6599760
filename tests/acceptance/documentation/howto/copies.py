"""Prepare `docs/howto/copies.md`, and check that copies follow their orders and that each mail has one key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from celery import Celery
from pymongo import MongoClient

from mongo_celery import Bridge
from mongo_celery.testing import BridgeRunner


class _Search:
    """An index that refuses smaller versions, as engines with external versions do."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, Any]] = {}

    def index(self, key: str, document: dict[str, Any], *, version: int) -> None:
        self._put(key, document, version)

    def delete(self, key: str, *, version: int) -> None:
        self._put(key, None, version)

    def _put(self, key: str, document: dict[str, Any] | None, version: int) -> None:
        assert version >= self.found.get(key, (0, None))[0]
        self.found[key] = version, document


class _Mailer:
    """A provider that sends one mail for each key."""

    def __init__(self) -> None:
        self.sent: dict[str, str] = {}

    def send(self, *, to: str, key: str) -> None:
        self.sent[key] = to


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """An app, a bridge, a Redis as cache, an index, a mailer, and an order that exists."""
    bridge, search, mailer = Bridge(Celery("shop", broker=redis_url), mongo_url, name="shop"), _Search(), _Mailer()
    with MongoClient[dict[str, Any]](mongo_url) as client, redis.Redis.from_url(redis_url) as cache:
        orders = client.shop.orders
        orders.insert_one({"_id": 1, "customer": "Ann", "lines": []})
        yield {"bridge": bridge, "cache": cache, "search": search, "mailer": mailer}

        with BridgeRunner(bridge, url=mongo_url) as runner:
            cache.mset({"order:1": "old", "order:2": "old"})
            orders.insert_one({"_id": 2, "customer": "Bob", "lines": [1, 2]})
            orders.update_one({"_id": 1}, {"$set": {"lines": [3]}})
            orders.insert_one({"_id": 3, "customer": "Eve", "lines": []})
            orders.delete_one({"_id": 3})
            runner.crash("called", "confirm_order")
            runner.deliver()
        assert {row["_id"]: row["title"] for row in client.shop.order_list.find()} == {1: "Ann: 1", 2: "Bob: 2"}
        assert cache.exists("order:1", "order:2") == 0
        assert {key: document for key, (_, document) in search.found.items()} == {
            "1": {"customer": "Ann"},
            "2": {"customer": "Bob"},
            "3": None,
        }
        assert "Bob" in mailer.sent.values()
        assert len(mailer.sent) == 2
