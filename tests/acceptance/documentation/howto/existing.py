"""What `docs/howto/existing.md` needs: orders that were there before the handler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery
from pymongo import MongoClient

from mongo_celery import Bridge
from mongo_celery.testing import BridgeRunner


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """An app, a bridge, and three orders."""
    bridge = Bridge(Celery("shop", broker=redis_url), mongo_url, name="shop")
    with MongoClient[dict[str, Any]](mongo_url) as client:
        client.shop.orders.insert_many([{"_id": key, "prices": [key, 5]} for key in (1, 2, 3)])
        yield {"bridge": bridge}

        with BridgeRunner(bridge, url=mongo_url) as runner:
            client.shop.orders.update_one({"_id": 2}, {"$set": {"prices": [20]}})
            client.shop.orders.delete_one({"_id": 3})
            runner.deliver()
        summaries = list(client.shop.order_summaries.find({}, {"_fence": 0}).sort("_id"))
        assert summaries == [{"_id": 1, "total": 6}, {"_id": 2, "total": 20}]
