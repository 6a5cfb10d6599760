"""Prepare `docs/snapshots.md`: orders that exist. Check that its handler keeps their summaries, old and new."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pymongo import MongoClient

from mongo_celery.testing import BridgeRunner


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """Three orders. One changes and one goes while the snapshot runs."""
    del redis_url
    with MongoClient[dict[str, Any]](mongo_url) as client:
        orders = client.shop.orders
        orders.insert_many([{"_id": key, "total": key} for key in (1, 2, 3)])
        namespace: dict[str, Any] = {}
        yield namespace

        bridge = namespace["bridge"]
        (handler,) = bridge.handlers
        assert handler.begins_with_snapshot(bridge.options)
        with BridgeRunner(bridge, url=mongo_url) as runner:
            orders.update_one({"_id": 2}, {"$set": {"total": 20}})
            orders.delete_one({"_id": 3})
            runner.deliver()
        summaries = list(client.shop.order_summaries.find({}, {"_fence": 0}).sort("_id"))
        assert summaries == [{"_id": 1, "total": 1}, {"_id": 2, "total": 20}]
