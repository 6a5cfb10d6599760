"""What `docs/howto/watch.md` needs: a loop that has stopped somewhere, and its token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from celery import Celery
from pymongo import MongoClient

from mongo_celery import Bridge
from mongo_celery.testing import BridgeRunner


class _StoppedError(Exception):
    """Somebody has ended the loop."""


class _Index:
    """A task that a person stops the loop in."""

    def __init__(self) -> None:
        self.started: list[int] = []

    def delay(self, key: int) -> None:
        self.started.append(key)
        if key == 3:
            raise _StoppedError


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """An app, a bridge, and the loop's collections."""
    app, index = Celery("shop", broker=redis_url), _Index()
    bridge = Bridge(app, mongo_url, name="shop")
    with MongoClient[dict[str, Any]](mongo_url) as client:
        orders, tokens = client.shop.orders, client.shop.tokens
        with orders.watch() as stream:
            orders.insert_one({"_id": 1, "title": "a lamp"})
            tokens.insert_one({"_id": "orders", "token": stream.next()["_id"]})
        token = tokens.find_one()["token"]["_data"]  # type: ignore[index] # it is there
        namespace: dict[str, Any] = {"bridge": bridge, "orders": orders, "tokens": tokens, "index": index}
        namespace["ORDERS_TOKEN"] = token
        yield namespace

        (handler,) = bridge.handlers
        assert handler.start_from == tokens.find_one()["token"]  # type: ignore[index] # it is there
        orders.insert_many([{"_id": key, "title": "another lamp"} for key in (2, 3)])
        with suppress(_StoppedError):
            namespace["listen"]()
        assert index.started == [2, 3]
        with BridgeRunner(bridge, url=mongo_url) as runner:
            orders.update_one({"_id": 1}, {"$set": {"title": "the lamp"}})
            orders.delete_one({"_id": 2})
            runner.deliver()
        assert list(client.shop.found.find({}, {"_fence": 0})) == [{"_id": 1, "words": ["the", "lamp"]}]
