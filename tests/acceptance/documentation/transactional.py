"""What `docs/transactional.md` needs, and what must have become of its orders, notes and seats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from celery import Celery
from fastapi.testclient import TestClient
from pymongo import MongoClient

from tests.fixtures.process import wait_for

SEATS = ("A1", "A2", "A3")


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """An app, a client, an order, a till, three seats, and the collections that bodies write to."""
    app = Celery("shop", broker=redis_url)
    with MongoClient[dict[str, Any]](mongo_url) as client, redis.Redis.from_url(redis_url) as broker:
        shop = client.shop
        shop.orders.insert_one({"_id": 7})
        shop.accounts.insert_one({"_id": "till", "balance": 0})
        shop.places.insert_many([{"_id": seat, "customer": None} for seat in SEATS])
        for name in ("journal", "attempts"):
            shop.create_collection(name)
        ship = app.task(name="shop.ship")(_ship)
        namespace: dict[str, Any] = {"app": app, "client": client, "ship": ship}
        yield namespace

        for _ in range(2):  # as a task that comes again behind an unknown outcome
            namespace["pay"](7, 100)
        assert shop.orders.find_one() == {"_id": 7, "closed": True, "paid": True}
        assert shop.accounts.find_one() == {"_id": "till", "balance": 100}
        assert [each["text"] for each in shop.attempts.find()] == ["refund of 7"]
        _use_fastapi(namespace)
        with namespace["web"].test_client() as browser:
            assert browser.post("/orders/7/pay").get_json() == {"paid": True}
            assert browser.post("/orders/8/pay").status_code == 404
            assert browser.post("/orders/7/cancel").status_code == 409
        wait_for(lambda: broker.llen("celery"), message="a message of the parcel's task")
        noted = [each["text"] for each in shop.journal.find()]
        assert noted == ["order 7 is closed", "by FastAPI", "order 7 is paid", "order 7 is to be canceled"], noted


def _use_fastapi(namespace: dict[str, Any]) -> None:
    """The async client is used on the one event loop of the test client, which `reserve_two` shares."""
    places = namespace["client"].shop.places
    with TestClient(namespace["api"]) as browser:
        assert browser.post("/notes", params={"text": "by FastAPI"}).json() == {"noted": "by FastAPI"}
        taken = [browser.post("/seats/A3", params={"customer": each}).status_code for each in ("Ann", "Bob")]
        assert taken == [200, 409]
        assert browser.portal is not None
        assert browser.portal.call(namespace["reserve_two"], "Eve") == ["Eve", "Eve"]
        browser.portal.call(namespace["send"], "A1", "Main Street 1")
        browser.portal.call(namespace["mongo"].close)
    assert [each["customer"] for each in places.find()] == ["Eve", "Eve", "Ann"]
    assert places.find_one({"sent": True}, {"_id": 1}) == {"_id": "A1"}


def _ship(parcel: str) -> str:
    return parcel
