"""What `docs/outbox.md` needs, and what must have reached the broker."""

from __future__ import annotations

import json
import sys
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import django
import redis
from celery import Celery
from django.conf import settings
from django.db import connection, models
from pymongo import MongoClient

from mongo_celery import Outbox
from tests.fixtures.process import wait_for

TASKS = ("send_receipt", "reserve", "book", "ship", "remind")
EXPECTED = {
    "shop.send_receipt": 3,  # by hand, with an insert, and for an instance of a Django model
    "shop.reserve": 1,
    "shop.book": 1,  # `ship` follows when `book` has run
    "shop.remind": 2,
}
_DELIVERY_SECONDS_MAX = 120.0


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """An app with tasks, a client, a collection of orders, and a Django project with a model."""
    app = Celery("shop", broker=redis_url)
    with MongoClient[dict[str, Any]](mongo_url) as client, redis.Redis.from_url(redis_url) as broker:
        sent = {name: app.task(name=f"shop.{name}")(_task(name)) for name in TASKS}
        _django(mongo_url)
        namespace: dict[str, Any] = {"app": app, "client": client, "orders": client.shop.orders, **sent}
        yield namespace

        for outbox in (namespace["outbox"], namespace["django_orders"]):
            wait_for(partial(_is_delivered, outbox), _DELIVERY_SECONDS_MAX, "every entry is dispatched")
        headers = [json.loads(message)["headers"] for message in broker.lrange("celery", 0, -1)]
        names = Counter({header["id"]: header["task"] for header in headers}.values())  # a duplicate has the same id
        assert names == EXPECTED, names
        bob = client.shop.orders.find_one({"_id": "2024-118"}, {"pendingEvents": 0})
        assert bob == {"_id": "2024-118", "customer": "Bob", "lines": [], "status": "paid", "late": True}, bob
        assert [order["customer"] for order in client.shop.shop_order.find()] == ["Eve"]
        once_only: Any = namespace["send_receipt"]
        for _ in range(2):
            once_only.apply(args=["2024-117"], task_id="the same")
        assert client.shop.done.count_documents({}) == 1


def _is_delivered(outbox: Outbox) -> bool:
    """A slow machine may have left something to the sweep."""
    outbox.sweep(older_than=0)
    return outbox.collection.find_one({"pendingEvents.count": {"$gt": 0}}) is None


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
