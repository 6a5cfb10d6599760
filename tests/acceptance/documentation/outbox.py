"""What `docs/outbox.md` needs, and what must have reached the broker."""

from __future__ import annotations

import json
import sys
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import django
import redis
from celery import Celery
from django.conf import settings
from django.db import connection, models
from fastapi.testclient import TestClient
from pymongo import MongoClient

from mongo_celery import Bridge, Change, Fence
from mongo_celery.errors import StaleFencingTokenError
from tests.fixtures.process import wait_for

TASKS = ("send_receipt", "reserve", "book", "ship", "remind", "note")
EXPECTED = {
    "shop.send_receipt": 4,  # by hand, with an insert, in place of delay(), and for an instance of a Django model
    "shop.page.send_receipt": 1,  # of the Flask app, which has the page's last definition of it
    "shop.reserve": 2,  # with an insert, and of the Flask app
    "shop.ship": 2,  # with an update, and of the FastAPI app
    "shop.book": 1,  # `ship` follows when `book` has run
    "shop.remind": 3,  # of two orders that are late, and in a group
    "shop.note": 8,  # of two orders, of the bridge's handler, of four transactions, and by itself
}
OUTBOXES = ("outbox", "baskets", "parcels", "django_orders", "summaries", "leaving", "moving")
_DELIVERY_SECONDS_MAX = 120.0


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """An app with tasks, a bridge, a client, a collection of orders, and a Django project with a model."""
    app = Celery("shop", broker=redis_url)
    with MongoClient[dict[str, Any]](mongo_url) as client, redis.Redis.from_url(redis_url) as broker:
        sent = {name: app.task(name=f"shop.{name}")(_task(name)) for name in TASKS}
        bridge = Bridge(app, mongo_url, name="shop")
        _django(mongo_url)
        client.shop.customers.insert_one({"_id": "Ann"})
        namespace: dict[str, Any] = {**sent, "app": app, "bridge": bridge, "client": client}
        namespace["orders"] = client.shop.orders
        yield namespace

        _use_flask(namespace["web"])
        _use_fastapi(namespace["api"])
        _handle(namespace["summarise"], client)
        for name in OUTBOXES:
            wait_for(
                partial(_is_delivered, namespace[name]), _DELIVERY_SECONDS_MAX, f"every entry of {name} is dispatched"
            )
        headers = [json.loads(message)["headers"] for message in broker.lrange("celery", 0, -1)]
        names = Counter({header["id"]: header["task"] for header in headers}.values())  # a duplicate has the same id
        assert names == EXPECTED, names
        _judge(client)
        once_only: Any = namespace["send_receipt"]
        for _ in range(2):
            once_only.apply(args=["2024-117"], task_id="the same")
        assert client.shop.done.count_documents({}) == 1


def _use_flask(web: Any) -> None:
    with web.test_client() as browser:
        placed = browser.post("/baskets", data={"customer": "Eve"})
        paid = [browser.post(f"/baskets/{placed.get_json()['basket']}/pay").get_json() for _ in range(2)]
    assert (placed.status_code, paid) == (201, [{"paid": True}, {"paid": False}])


def _use_fastapi(api: Any) -> None:
    with TestClient(api) as browser:
        assert browser.post("/parcels", params={"address": "Main Street 1"}).status_code == 200


def _handle(summarise: Any, client: MongoClient[dict[str, Any]]) -> None:
    """The handler with a change, and with one of an execution that is stale by now: its task is not sent."""
    for value in (2, 1):
        change = Change.build(
            "insert",
            ns="shop.orders",
            full_document={"_id": 7, "customer": "Eve"},
            fence=Fence("shop/summarise", 0, 0, value),
            client=client,
        )
        with suppress(StaleFencingTokenError):
            summarise(change)


def _judge(client: MongoClient[dict[str, Any]]) -> None:
    """What was written, and that nothing of the outbox is left in it."""
    bob = client.shop.orders.find_one({"customer": "Bob"}, {"_id": 0})
    assert bob == {"customer": "Bob", "lines": [], "status": "paid", "late": True, "reminded": True}, bob
    assert [order["customer"] for order in client.shop.shop_order.find()] == ["Bob"]
    assert [set(basket) for basket in client.shop.basket.find()] == [{"_id", "customer", "paid"}]
    assert [set(parcel) for parcel in client.shop.parcels.find()] == [{"_id", "address"}]
    assert client.shop.summaries.find_one({}, {"_fence": 0}) == {"_id": 7, "customer": "Eve"}
    assert client.shop.customers.count_documents({}) == 0
    assert client.shop.wishes.count_documents({}) == 2
    assert client.shop.leaving.count_documents({}) == 0


def _is_delivered(outbox: Any) -> bool:
    """A slow machine may have left something to the sweep."""
    outbox.sweep(older_than=0)
    return bool(outbox.status().pending == 0)


def _task(name: str) -> Any:
    def task(*_: object) -> str:
        return name

    task.__name__ = name
    return task


def _django(mongo_url: str) -> None:
    settings.configure(
        DATABASES={"default": {"ENGINE": "django_mongodb_backend", "HOST": mongo_url, "NAME": "shop"}},
        DATABASE_ROUTERS=["django_mongodb_backend.routers.MongoRouter"],
        DEFAULT_AUTO_FIELD="django_mongodb_backend.fields.ObjectIdAutoField",
        INSTALLED_APPS=[],
        USE_TZ=True,
    )
    django.setup()

    class Order(models.Model):  # type: ignore[misc]  # noqa: DJ008 - nobody looks at it
        customer = models.CharField(max_length=20)

        class Meta:
            app_label = "shop"

    with connection.schema_editor() as editor:
        editor.create_model(Order)
    module: Any = types.ModuleType("shop.models")
    module.Order = Order
    sys.modules.update({"shop": types.ModuleType("shop"), "shop.models": module})
