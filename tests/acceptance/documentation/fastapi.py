"""What `docs/fastapi.md` needs, which is nothing but servers, and what its endpoints must have done."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from fastapi.testclient import TestClient
from pymongo import MongoClient

from mongo_celery import Change, Fence
from tests.fixtures.process import wait_for


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """Requests of all endpoints, in the server's process; the handler with what they have written."""
    with MongoClient[dict[str, Any]](mongo_url) as client, redis.Redis.from_url(redis_url) as broker:
        namespace: dict[str, Any] = {}
        yield namespace

        shop = client.shop
        with TestClient(namespace["api"]) as browser:
            order = browser.post("/orders", params={"customer": "Eve"}).json()["order"]
            codes = [browser.post(f"/orders/{order}/{what}").status_code for what in ("pay", "pay", "cancel", "cancel")]
            assert codes == [200, 409, 200, 409]
            assert browser.get(f"/orders/{order}").status_code == 404
            wait_for(lambda: set(_stored(shop)) == {"_id", "customer", "status"}, message="nothing is pending")
            namespace["show"](_change(_stored(shop), client))
            assert browser.get(f"/orders/{order}").json()["text"] == "Eve: canceled"
        assert shop.customers.find_one() == {"_id": "Eve", "credits": 1}
        bodies = [json.loads(message)["body"] for message in broker.lrange("celery", 0, -1)]
        sent = {tuple(json.loads(b64decode(body))[0]) for body in bodies}
        assert sent == {(order, what) for what in ("placed", "paid", "canceled")}, sent


def _stored(shop: Any) -> dict[str, Any]:
    """The one order."""
    order: dict[str, Any] = shop.orders.find_one()
    return order


def _change(order: dict[str, Any], client: MongoClient[dict[str, Any]]) -> Change:
    fence = Fence("shop/show", 0, 0, 1)
    return Change.build("insert", ns="shop.orders", full_document=order, fence=fence, client=client)
