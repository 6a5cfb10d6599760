"""Prepare `docs/effects.md`, and check what its handlers do with a change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pymongo import MongoClient

from mongo_celery import Change, Fence
from mongo_celery.bridge.fenced.fence import Origin
from mongo_celery.errors import StaleFencingTokenError
from tests.acceptance.documentation.shop import open_shop

EVE = {"_id": "eve", "name": "Eve"}


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """Yield the app and the bridge of the README."""
    with open_shop(mongo_url, redis_url) as (namespace, client):
        yield namespace

        bridge = namespace["bridge"]
        names = {handler.name for handler in bridge.handlers}
        assert names == {"add_up", "remember_name", "copy_order"}, names
        _passes_over_what_is_outdated(namespace["copy_order"], client)
        order = Change.build("insert", ns="shop.orders", full_document={"_id": 7, "customer": "eve"})
        with client.start_session() as session, session.start_transaction():
            namespace["add_up"](order.with_session(session))
        assert client.shop.totals.find_one() == {"_id": "eve", "orders": 1}
        _remembers(namespace["remember_name"], client)


def _passes_over_what_is_outdated(copy_order: Any, client: MongoClient[dict[str, Any]]) -> None:
    """Of an order that has moved to another customer, and so to another partition."""
    for partition, place in ((3, b"2"), (4, b"1")):
        fence = Fence("shop/copy_order", 0, partition, 1, Origin(1, place))
        document = {"_id": 9, "customer": partition}
        copy_order(Change.build("replace", ns="shop.orders", full_document=document, fence=fence, client=client))
    assert client.shop.order_copies.find_one({"_id": 9}, {"_fence": 0}) == {"_id": 9, "customer": 3}


def _remembers(remember_name: Any, client: MongoClient[dict[str, Any]]) -> None:
    def change(operation: str, token: int, document: dict[str, Any] | None) -> Change:
        key = {"_id": EVE["_id"]}
        return Change.build(
            operation,
            ns="shop.customers",
            document_key=key,
            full_document=document,
            fence=Fence("shop/remember_name", 0, 0, token),
            client=client,
        )

    names = client.shop.customer_names
    remember_name(change("insert", 2, EVE))
    assert names.find_one({}, {"_fence": 0}) == EVE
    try:
        remember_name(change("update", 1, {**EVE, "name": "Evelyn"}))
    except StaleFencingTokenError:
        pass
    else:
        raise AssertionError("an older execution was admitted")
    assert names.find_one({}, {"_fence": 0}) == EVE
    remember_name(change("delete", 3, None))
    assert names.find_one() is None
