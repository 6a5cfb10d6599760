"""Django's `atomic` beside all others; the programs run in the process of `pairs_django`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pymongo.client_session import ClientSession

from mongo_celery import Change, once, transactional
from mongo_celery.errors import ConfigurationError
from tests.integration.pairs_rig import TABLE, Shop, label

row, fate = TABLE.row, TABLE.fate
Body = Callable[[str], object]


def of_django(shop: Shop, name: str) -> Any:
    """A collection of this shop by Django's client, as a source."""
    from django.db import connection

    return lambda: connection.get_collection(f"{shop.db.name}_{name}")


def pay(shop: Shop, key: str) -> None:
    """An effect of the ORM."""
    from tests.integration.pairs_django import Paid

    Paid.objects.create(shop=shop.db.name, key=key)


def session() -> Any:
    """Of Django's transaction."""
    from django.db import connection

    return connection.session


@row("fenced-atomic", "in a handler that is retried Django's part is aborted and counts once, and the copy is there")
def _(shop: Shop) -> None:
    from django_mongodb_backend import transaction  # type: ignore[import-untyped]

    @shop.bridge.on_change(shop.orders.full_name, autoretry_for=(OSError,))
    def handle(change: Change) -> None:
        with transaction.atomic():
            pay(shop, label(change))
            copy = {"n": (change.full_document or {})["n"]}
            change.fenced(shop.name("copies")).replace_one(change.document_key, copy, upsert=True)
            shop.fail(change)

    with shop.run() as runner:
        shop.put(1)
        shop.failing[1] = 1
        runner.deliver()
    assert shop.counted() == {"1.0": 1}
    assert shop.documents("copies") == shop.documents("orders")


@fate("transactional-atomic", "atomic inside Django's `transactional` is part of it", "paid", "sent")
def _(shop: Shop) -> Body:
    from django_mongodb_backend import transaction

    from mongo_celery.contrib.django import transactional as in_django

    moving = shop.outbox_collection(source=of_django(shop, "moving"))

    @in_django()
    def body(key: str) -> None:
        with transaction.atomic(), moving.atomic():
            pay(shop, f"paid {key}")
            shop.count.delay(f"sent {key}")
        shop.meet(session(), key)

    return body


@row("transactional-atomic.other_client", "inside a transaction of another client the outbox's atomic is refused")
def _(shop: Shop) -> None:
    moving = shop.outbox_collection(source=of_django(shop, "moving"))

    @transactional(shop.client)
    def work(*, session: ClientSession) -> None:
        shop.add("outside", session)
        with moving.atomic():
            pay(shop, "inside")

    with pytest.raises(ConfigurationError):
        work()
    assert shop.counted() == {}


@fate("once-atomic", "a step that is given its session has its record in it", "paid", "sent")
def _(shop: Shop) -> Body:
    moving = shop.outbox_collection(source=of_django(shop, "moving"))

    @once(of_django(shop, "marks"), key=lambda key: key)
    def step(key: str, *, session: Any) -> None:  # noqa: ARG001 - Django's queries have it
        pay(shop, f"paid {key}")

    def body(key: str) -> None:
        with moving.atomic():
            for _ in range(2):
                step(key, session=session())
            shop.count.delay(f"sent {key}")
            shop.fail(key)

    return body


@fate("outbox-atomic", "a document that is saved with tasks has its fate", "paid", "sent")
def _(shop: Shop) -> Body:
    from django.db import connection
    from django_mongodb_backend import transaction

    from tests.integration.pairs_django import Paid

    box = shop.outbox("paid", source=lambda: connection.get_collection(Paid._meta.db_table))

    def body(key: str) -> None:
        with transaction.atomic():
            paid = {"shop": shop.db.name, "key": f"paid {key}"}
            box.insert_one(paid, tasks=[shop.count.s(f"sent {key}")], session=connection.session)
            shop.fail(key)

    return body


@fate("collection-atomic", "what is sent inside has its fate", "paid", "sent")
def _(shop: Shop) -> Body:
    moving = shop.outbox_collection(source=of_django(shop, "moving"))

    def body(key: str) -> None:
        with moving.atomic():
            pay(shop, f"paid {key}")
            shop.count.delay(f"sent {key}")
            shop.fail(key)

    return body


@fate("locks-atomic", "what is read under a lock of a queryset and written counts once", "paid")
def _(shop: Shop) -> Body:
    from mongo_celery.contrib.django import transactional as in_django
    from mongo_celery.locking import django as locking
    from tests.integration.pairs_django import Paid

    @in_django()
    def body(key: str) -> None:
        pay(shop, "unpaid")
        [found] = locking.select_for_update(Paid.objects.filter(shop=shop.db.name, key="unpaid"))
        found.key = f"paid {key}"
        found.save()
        shop.meet(session(), key)

    return body


@fate("twophase-atomic", "a transfer by Django's client is part of Django's `transactional`", "paid", moved=10)
def _(shop: Shop) -> Body:
    from django.db import connection

    from mongo_celery.contrib.django import transactional as in_django

    database = connection.get_collection("any").database.client[shop.db.name]
    bank = shop.bank(lambda: database["transactions"])

    @in_django()
    def body(key: str) -> None:
        pay(shop, f"paid {key}")
        bank.transfer("A", "B", 10)
        shop.meet(session(), key)

    return body


@fate("atomic-atomic", "inside another it has the fate of the outer one, with what it has sent", "paid", "sent")
def _(shop: Shop) -> Body:
    from django_mongodb_backend import transaction

    moving = shop.outbox_collection(source=of_django(shop, "moving"))

    def body(key: str) -> None:
        with transaction.atomic():
            with moving.atomic():
                pay(shop, f"paid {key}")
                shop.count.delay(f"sent {key}")
            shop.fail(key)

    return body


@row("atomic-asyncio", "a coroutine that calls the ORM is refused by Django, and nothing is written or sent")
def _(shop: Shop) -> None:
    from django.core.exceptions import SynchronousOnlyOperation

    moving = shop.outbox_collection(source=of_django(shop, "moving"))

    async def work(_db: Any) -> None:
        with moving.atomic():
            shop.count.delay("sent")
            pay(shop, "one")

    with shop.run() as runner:
        with pytest.raises(SynchronousOnlyOperation):
            shop.in_asyncio(work)
        assert shop.send(runner) == []
    assert shop.counted() == {}
