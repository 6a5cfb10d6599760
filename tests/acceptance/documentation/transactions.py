"""What `docs/transactions.md` needs, and what must have become of its seats, accounts and orders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import django
from celery import Celery
from django.conf import settings
from pymongo import MongoClient

from mongo_celery import Bridge
from mongo_celery.testing import BridgeRunner


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """An app, a client, two seats, two accounts, a lamp and an order; and a theater of Django's."""
    app = Celery("shop", broker=redis_url)
    with MongoClient[dict[str, Any]](mongo_url) as client:
        shop = client.shop
        shop.seats.insert_one({"_id": "A3", "customer": None})
        client.bank.accounts.insert_many([{"_id": name, "balance": 1000} for name in "AB"])
        shop.stock.insert_one({"_id": "lamp", "left": 3})
        shop.orders.insert_one({"_id": 7, "state": "new"})
        namespace: dict[str, Any] = {
            "app": app,
            "bridge": Bridge(app, mongo_url, name="shop", autodiscover=False),
            "client": client,
            "seats": shop.seats,
            "stock": shop.stock,
            "orders": shop.orders,
            **theater(mongo_url),
        }
        yield namespace

        seat_of_django, sell = namespace["Seat"], namespace["sell"]
        only = seat_of_django.objects.create(row=1)
        sell(only.pk, "eve")
        assert seat_of_django.objects.get(pk=only.pk).customer == "eve"
        assert shop.theater_seats.count_documents({"_lock": {"$exists": True}}) == 1
        book = namespace["book"]
        assert [book("A3", customer) for customer in ("eve", "adam")] == [None, "taken"]
        assert shop.seats.find_one() is not None
        assert shop.seats.find_one({}, {"customer": 1}) == {"_id": "A3", "customer": "eve"}
        balances = {account["_id"]: account["balance"] for account in client.bank.accounts.find()}
        assert balances == {"A": 880, "B": 1120}, balances
        assert shop.stock.find_one({}, {"left": 1}) == {"_id": "lamp", "left": 2}
        assert shop.orders.find_one({}, {"state": 1}) == {"_id": 7, "state": "paid"}
        _pay_once(namespace["bridge"], client, mongo_url)
        assert {entry["state"] for entry in client.bank.transactions.find()} == {"done"}


def _pay_once(bridge: Bridge, client: MongoClient[dict[str, Any]], mongo_url: str) -> None:
    """The handler is done, its worker dies before that is stored, and it is called again."""
    client.bank.create_collection("payments")
    with BridgeRunner(bridge, url=mongo_url) as runner:
        client.bank.payments.insert_one({"from": "A", "to": "B", "amount": 10})
        runner.crash("called")
        assert len(runner.deliver().calls) == 2
    assert {each["_id"]: each["balance"] for each in client.bank.accounts.find()} == {"A": 870, "B": 1130}


def theater(mongo_url: str) -> dict[str, Any]:
    """Django's settings, and a model of a seat."""
    database = {"ENGINE": "django_mongodb_backend", "HOST": mongo_url, "NAME": "shop"}
    field = "django_mongodb_backend.fields.ObjectIdAutoField"
    settings.configure(DATABASES={"default": database}, DEFAULT_AUTO_FIELD=field, INSTALLED_APPS=[], USE_TZ=True)
    django.setup()
    from django.db import models

    class Seat(models.Model):  # type: ignore[misc]
        row = models.IntegerField()
        customer = models.CharField(max_length=20, null=True)  # noqa: DJ001 - nobody has it yet

        class Meta:
            app_label = "shop"
            db_table = "theater_seats"

        def __str__(self) -> str:
            return str(self.row)

    return {"Seat": Seat}
