"""What `docs/handlers.md` needs, and what its handlers must do with a change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery
from pymongo import MongoClient

from mongo_celery import Bridge, Change, Fence
from mongo_celery.bridge.change import ChangeFailed
from mongo_celery.bridge.fenced.fence import Origin
from mongo_celery.errors import StaleFencingTokenError
from mongo_celery.testing import BridgeRunner

EVE = {"_id": "eve", "name": "Eve"}


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """The app and the bridge of the README."""
    app = Celery("shop", broker=redis_url)
    bridge = Bridge(app, mongo_url, name="shop")
    with MongoClient[dict[str, Any]](mongo_url) as client:
        namespace: dict[str, Any] = {"app": app, "bridge": bridge}
        yield namespace

        names = {handler.name for handler in bridge.handlers}
        expected = {
            "bill",
            "send_invoice",
            "copy_order",
            "copy_orders",
            "announce",
            "add_up",
            "index",
            "remember_name",
            "mirror_order",
        }
        assert names == expected, names
        assert [handler.name for handler in bridge.handlers if handler.commits_inline(bridge.options)] == ["index"]
        assert namespace["bill"].max_retries == 5
        _copies(namespace["copy_orders"], client)
        _passes_over_what_is_outdated(namespace["copy_order"], client)
        _announces(namespace)
        order = Change.build("insert", ns="shop.orders", full_document={"_id": 7, "customer": "eve"})
        with client.start_session() as session, session.start_transaction():
            namespace["add_up"](order.with_session(session))
        assert client.shop.totals.find_one() == {"_id": "eve", "orders": 1}
        with namespace["client"]:
            namespace["remember_name"](namespace["change"])
        assert client.shop.customer_names.find_one({}, {"_fence": 0}) == EVE
        client.shop.customer_names.drop()
        _remembers(namespace["remember_name"], client)
        _mirrors(bridge, client, mongo_url)


def _mirrors(bridge: Bridge, client: MongoClient[dict[str, Any]], mongo_url: str) -> None:
    """Of each tenant in its own database, and of nothing else."""
    tenants = client.tenant_ann, client.tenant_bob
    with BridgeRunner(bridge, url=mongo_url) as runner:
        for tenant in tenants:
            tenant.orders.insert_one({"_id": 1, "of": tenant.name})
            tenant.other.insert_one({"_id": 2})
        delivered = runner.deliver()
    assert [call.handler for call in delivered.calls] == ["mirror_order"] * 2
    for tenant in tenants:
        assert [*tenant.order_mirrors.find({}, {"_fence": 0})] == [{"_id": 1, "of": tenant.name}]
        client.drop_database(tenant.name)


def _copies(copy_orders: Any, client: MongoClient[dict[str, Any]]) -> None:
    fence = Fence("shop/copy_orders", 0, 0, 1)
    documents: list[Any] = [{"_id": 1, "n": 1}, {"_id": 2, "n": 1}, {"_id": 1, "n": 2}, None]
    keys = [1, 2, 1, 2]
    copy_orders(
        [
            Change.build(
                "delete" if document is None else "insert",
                ns="shop.orders",
                document_key={"_id": key},
                full_document=document,
                fence=fence,
                client=client,
            )
            for key, document in zip(keys, documents, strict=True)
        ]
    )
    assert list(client.shop.order_copies.find({}, {"_fence": 0})) == [{"_id": 1, "n": 2}]


def _passes_over_what_is_outdated(copy_order: Any, client: MongoClient[dict[str, Any]]) -> None:
    """Of an order that has moved to another customer, and so to another partition."""
    for partition, place in ((3, b"2"), (4, b"1")):
        fence = Fence("shop/copy_order", 0, partition, 1, Origin(1, place))
        document = {"_id": 9, "customer": partition}
        copy_order(Change.build("replace", ns="shop.orders", full_document=document, fence=fence, client=client))
    assert client.shop.order_copies.find_one({"_id": 9}, {"_fence": 0}) == {"_id": 9, "customer": 3}


def _announces(namespace: dict[str, Any]) -> None:
    published: list[Any] = []

    def publish(document: dict[str, Any]) -> None:
        if document["_id"] == 2:
            raise ConnectionResetError
        published.append(document["_id"])

    namespace["publish"] = publish
    changes = [Change.build("insert", ns="shop.orders", full_document={"_id": each}) for each in (1, 2, 3)]
    with pytest.raises(ChangeFailed) as failed:
        namespace["announce"](changes)
    assert isinstance(failed.value.__cause__, ConnectionResetError)
    assert (failed.value.place, published) == (1, [1])


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
