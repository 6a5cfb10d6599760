"""What `docs/fastapi.md` needs, which is nothing but servers, and what its endpoints must have done."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import redis
from fastapi.testclient import TestClient
from pymongo import MongoClient

from mongo_celery import Change, Fence
from tests.fixtures.process import wait_for

AT_A_TIME = 8


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
            assert codes == [200, 409, 200, 409], codes
            assert browser.get(f"/orders/{order}").status_code == 404
            wait_for(lambda: set(_stored(shop)) == {"_id", "customer", "status"}, message="nothing is pending")
            asyncio.run(namespace["show"](_change(_stored(shop), client)))
            assert browser.get(f"/orders/{order}").json()["text"] == "Eve: canceled"
            many = _cancel_at_a_time(browser)
            assert browser.post(f"/orders/{order}/notes", params={"text": "late"}).status_code == 201
        assert (shop.notes.count_documents({}), shop.note_log.count_documents({})) == (1, 1)
        assert shop.customers.find_one() == {"_id": "Eve", "credits": 1 + len(many)}
        wanted = {(each, what) for each in (order, *many) for what in ("placed", "paid", "canceled")}
        wait_for(lambda: _sent(broker) == wanted, message=lambda: f"sent: {_sent(broker)}")
        last = [("_id", -1)]
        deliver = lambda: asyncio.run(namespace["show"](_change(shop.orders.find_one(sort=last), client)))  # noqa: E731
        namespace["test_an_order_gets_its_line"](SimpleNamespace(deliver=deliver))


def _sent(broker: Any) -> set[tuple[str, ...]]:
    """The arguments of the tasks that have arrived: a busy machine's outbox is behind its answers."""
    bodies = [json.loads(message)["body"] for message in broker.lrange("celery", 0, -1)]
    return {tuple(json.loads(b64decode(body))[0]) for body in bodies}


def _cancel_at_a_time(browser: TestClient) -> list[str]:
    """Requests that write one customer conflict: each is repeated and answered, and none fails."""
    many = [browser.post("/orders", params={"customer": "Eve"}).json()["order"] for _ in range(AT_A_TIME)]
    assert {browser.post(f"/orders/{each}/pay").status_code for each in many} == {200}
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        codes = list(pool.map(lambda each: browser.post(f"/orders/{each}/cancel").status_code, many))
    assert set(codes) == {200}
    return many


def _stored(shop: Any) -> dict[str, Any]:
    """The one order."""
    order: dict[str, Any] = shop.orders.find_one()
    return order


def _change(order: dict[str, Any] | None, client: MongoClient[dict[str, Any]]) -> Change:
    fence = Fence("shop/show", 0, 0, 1)
    return Change.build("insert", ns="shop.orders", full_document=order, fence=fence, client=client)
