"""What `docs/howto/polling.md` needs, and what its handlers must do where polling is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from celery import Celery
from pymongo import MongoClient

from mongo_celery import Bridge
from mongo_celery.testing import BridgeRunner

BEGUN = datetime(2026, 1, 1, tzinfo=UTC)


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """An app, a bridge, and what the poll has."""
    bridge = Bridge(Celery("shop", broker=redis_url), mongo_url, name="shop")
    copied: list[int] = []
    mails: list[tuple[int, str]] = []
    with MongoClient[dict[str, Any]](mongo_url, tz_aware=True) as client:
        orders = client.shop.orders
        client.shop.poll.insert_one({"_id": "poll", "until": BEGUN})
        namespace: dict[str, Any] = {
            "bridge": bridge,
            "orders": orders,
            "state": client.shop.poll,
            "copy": lambda order: copied.append(order["_id"]),
            "send_mail": lambda key, mail: mails.append((key, mail)),
        }
        yield namespace

        with BridgeRunner(bridge, url=mongo_url) as runner:
            orders.insert_many([{"_id": 1, "state": "new"}, {"_id": 2, "updated_at": datetime.now(UTC)}])
            namespace["poll"]()
            assert copied == [2]  # the page's reproach: who forgets `updated_at` is not seen
            runner.deliver()
            orders.update_one({"_id": 1}, {"$set": {"state": "shipped"}})
            orders.update_one({"_id": 1}, {"$set": {"note": "by rail"}})
            orders.delete_one({"_id": 2})
            runner.deliver()
        copies = list(client.shop.order_copies.find({}, {"_fence": 0}))
        assert copies == [{"_id": 1, "state": "shipped", "note": "by rail"}]
        assert [key for key, _ in mails] == [1]
