"""What the pages of `docs` need, and what their code must have done: a function for each page."""

from __future__ import annotations

import asyncio
import gc
import io
import logging
import logging.config
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import pytest
from celery import Celery
from pymongo import MongoClient

from mongo_celery import Bridge, Change, Fence
from mongo_celery.bridge.change import ChangeFailed
from mongo_celery.bridge.fenced.fence import Origin
from mongo_celery.bridge.wiring import BRIDGES
from mongo_celery.errors import StaleFencingTokenError
from mongo_celery.testing import BridgeRunner
from tests.acceptance.documentation.shop import open_shop
from tests.fixtures.process import wait_for


@contextmanager
def production(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """Nothing but both variables."""
    os.environ.update(BROKER_URL=redis_url, MONGODB_URL=mongo_url)
    namespace: dict[str, Any] = {}
    yield namespace

    bridge = namespace["bridge"]
    assert (bridge.name, bridge.url, bridge.options.start_from) == ("shop", mongo_url, "now")
    assert bridge.client.admin.command("ping")["ok"]


@contextmanager
def configuration(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """An app."""
    del mongo_url
    app = Celery("small", broker=redis_url)
    yield {"app": app, "Bridge": Bridge}

    bridges = {wiring.name: wiring for wiring in BRIDGES.of(app)}
    assert sorted(bridges) == ["shop", "small"], bridges
    assert (bridges["shop"].options.partitions, bridges["small"].options.partitions) == (8, 8)
    assert bridges["shop"].options.claim_ttl == 20
    for bridge in bridges.values():
        bridge.client.admin.command("ping")
        bridge.client.close()


@contextmanager
def scale(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """Nothing."""
    del mongo_url, redis_url
    namespace: dict[str, Any] = {}
    yield namespace

    bridges = {wiring.name: wiring for wiring in BRIDGES.of(namespace["app"])}
    assert sorted(bridges) == ["shop_invoices", "shop_orders"], bridges
    assert {name: [each.name for each in wiring.handlers] for name, wiring in bridges.items()} == {
        "shop_orders": ["summarise"],
        "shop_invoices": ["book"],
    }
    with namespace["rabbit"].connection_for_write() as connection:
        assert connection.alt == ["amqp://rabbit1//", "amqp://rabbit2//", "amqp://rabbit3//"]
    assert namespace["rabbit"].amqp.queues["shop.0"].queue_arguments == {"x-queue-type": "quorum"}
    with namespace["watched"].connection_for_write() as connection:
        assert (connection.transport.driver_type, len(connection.alt)) == ("redis", 3)
        assert connection.transport_options["master_name"] == "main"


@contextmanager
def logs(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """Nothing; afterwards it is used, as Django does."""
    del mongo_url, redis_url
    namespace: dict[str, Any] = {}
    yield namespace
    written = io.StringIO()
    with redirect_stderr(written):
        logging.config.dictConfig(namespace["LOGGING"])
        logging.getLogger("mongo_celery.listener").info("lease released")
        logging.getLogger("kombu").info("not asked for")
    assert written.getvalue().endswith("INFO mongo_celery.listener lease released\n"), written.getvalue()
    assert written.getvalue().startswith("20"), written.getvalue()


@contextmanager
def apps(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """Nothing; its two apps reach their cluster, and one that is let go is gone."""
    del mongo_url, redis_url
    namespace: dict[str, Any] = {}
    yield namespace
    bridge = namespace["bridge"]
    gone = namespace.pop("second")
    for app in (namespace["first"], gone):
        assert bridge.of(app).client.admin.command("ping")["ok"]
    gone = weakref.ref(gone)
    del app
    gc.collect()
    assert gone() is None
    bridge.client.close()


@contextmanager
def handlers(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """Yield the app and the bridge of the README."""
    with open_shop(mongo_url, redis_url) as (namespace, client):
        yield namespace

        bridge = namespace["bridge"]
        names = {handler.name for handler in bridge.handlers}
        assert names == {"bill", "send_invoice", "mirror_order", "call_partner", "remind", "mirror_status"}, names
        assert namespace["bill"].max_retries == 5
        namespace["client"].close()
        fence = Fence("shop/mirror_status", 0, 0, 1)
        order = Change.build("insert", ns="shop.orders", full_document={"_id": 1, "status": "new"}, fence=fence)
        asyncio.run(namespace["mirror_status"](order))
        assert client.shop.statuses.find_one({}, {"_fence": 0}) == {"_id": 1, "status": "new"}
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


EVE = {"_id": "eve", "name": "Eve"}


@contextmanager
def failures(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """A bridge. The handler has the options that the page names."""
    bridge = Bridge(Celery("small", broker=redis_url), mongo_url)
    namespace: dict[str, Any] = {"bridge": bridge}
    yield namespace

    bill = namespace["bill"]
    assert bill.autoretry_for == (ConnectionError,)
    assert (bill.max_retries, bill.time_limit) == (8, 60)


@contextmanager
def effects(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
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


@contextmanager
def throughput(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """Yield the app and the bridge of the README."""
    with open_shop(mongo_url, redis_url) as (namespace, client):
        yield namespace

        bridge = namespace["bridge"]
        names = {handler.name for handler in bridge.handlers}
        assert names == {"copy_orders", "announce", "index"}, names
        assert [handler.name for handler in bridge.handlers if handler.commits_inline(bridge.options)] == ["index"]
        _copies(namespace["copy_orders"], client)
        _announces(namespace)


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


@contextmanager
def snapshots(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """Three orders. One changes and one goes while the snapshot runs."""
    del redis_url
    with MongoClient[dict[str, Any]](mongo_url) as client:
        orders = client.shop.orders
        orders.insert_many([{"_id": key, "total": key} for key in (1, 2, 3)])
        namespace: dict[str, Any] = {}
        yield namespace

        bridge = namespace["bridge"]
        (handler,) = bridge.handlers
        assert handler.begins_with_snapshot(bridge.options)
        with BridgeRunner(bridge, url=mongo_url) as runner:
            orders.update_one({"_id": 2}, {"$set": {"total": 20}})
            orders.delete_one({"_id": 3})
            runner.deliver()
        summaries = list(client.shop.order_summaries.find({}, {"_fence": 0}).sort("_id"))
        assert summaries == [{"_id": 1, "total": 1}, {"_id": 2, "total": 20}]


@contextmanager
def flask(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """A second app beside that of the page, in these servers; and the page's own test."""
    namespace: dict[str, Any] = {}
    yield namespace

    config = {"MONGO_URI": mongo_url.replace("/?", "/another?"), "CELERY": {"broker_url": redis_url}}
    app, mongo = namespace["create_app"](config), namespace["mongo"]
    mongo.db.stock.insert_one({"_id": "lamp", "left": 9})
    with BridgeRunner(namespace["bridge"].of(app.extensions["celery"]), url=mongo_url) as runner:
        namespace["test_an_order_has_its_page"](app, runner)
        mongo.db.stock.update_one({"_id": "lamp"}, {"$inc": {"left": -2}})
        runner.deliver()
        assert list(mongo.db.refills.find({}, {"left": 1})) == [{"_id": "lamp", "left": 7}]
        for write, pages in ((mongo.db.orders.insert_one, 1), (mongo.db.orders.delete_one, 0)):
            write({"_id": 1})
            runner.deliver()
            assert mongo.db.pages.count_documents({"_id": 1}) == pages
    with MongoClient[dict[str, Any]](mongo_url) as client:
        wait_for(lambda: set(client.another.orders.find_one() or ()) == {"_id", "customer", "status"}, message="sent")
