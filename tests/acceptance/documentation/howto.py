"""What the pages of `docs/howto` need, and what their code must have done: a function for each page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import redis
from celery.beat import Service

from mongo_celery import Change, Outbox, OutboxCollection
from mongo_celery.testing import BridgeRunner
from tests.acceptance.documentation.shop import open_shop
from tests.fixtures.tasks import register_tasks


@contextmanager
def beat(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """An app with a bridge."""
    with open_shop(mongo_url, redis_url) as (namespace, client):
        yield namespace

        service = Service(namespace["app"], scheduler_cls=namespace["app"].conf.beat_scheduler)
        service.scheduler.tick()
        service.sync()
        assert (client.mongo_celery.beat.find_one({"_id": "shop/nightly"}) or {})["task"] == "shop.report"
        assert (client.mongo_celery.beat.find_one({"_id": "shop"}) or {})["state"] == "idle"


class _Search:
    """An index that refuses smaller versions, as engines with external versions do."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, Any]] = {}

    def index(self, key: str, document: dict[str, Any], *, version: int) -> None:
        self._put(key, document, version)

    def delete(self, key: str, *, version: int) -> None:
        self._put(key, None, version)

    def _put(self, key: str, document: dict[str, Any] | None, version: int) -> None:
        assert version >= self.found.get(key, (0, None))[0]
        self.found[key] = version, document


class _Mailer:
    """A provider that sends one mail for each key."""

    def __init__(self) -> None:
        self.sent: dict[str, str] = {}

    def send(self, *, to: str, key: str) -> None:
        self.sent[key] = to


@contextmanager
def copies(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """An app, a bridge, a Redis as cache, an index, a mailer, and an order that exists."""
    search, mailer = _Search(), _Mailer()
    with open_shop(mongo_url, redis_url) as (namespace, client), redis.Redis.from_url(redis_url) as cache:
        orders = client.shop.orders
        orders.insert_one({"_id": 1, "customer": "Ann", "lines": []})
        yield {**namespace, "cache": cache, "search": search, "mailer": mailer}

        with BridgeRunner(namespace["bridge"], url=mongo_url) as runner:
            cache.mset({"order:1": "old", "order:2": "old"})
            orders.insert_one({"_id": 2, "customer": "Bob", "lines": [1, 2]})
            orders.update_one({"_id": 1}, {"$set": {"lines": [3]}})
            orders.insert_one({"_id": 3, "customer": "Eve", "lines": []})
            orders.delete_one({"_id": 3})
            runner.crash("called", "confirm_order")
            runner.deliver()
        assert {row["_id"]: row["title"] for row in client.shop.order_list.find()} == {1: "Ann: 1", 2: "Bob: 2"}
        assert cache.exists("order:1", "order:2") == 0
        assert {key: document for key, (_, document) in search.found.items()} == {
            "1": {"customer": "Ann"},
            "2": {"customer": "Bob"},
            "3": None,
        }
        assert "Bob" in mailer.sent.values()
        assert len(mailer.sent) == 2


class _SearchEngine:
    """Somebody else's service, which is away at first."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def forget(self, customer: str) -> None:
        self.asked.append(customer)
        if len(self.asked) == 1:
            raise ConnectionResetError


@contextmanager
def erasure(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """An app, a bridge, and a search engine."""
    search_engine = _SearchEngine()
    with open_shop(mongo_url, redis_url) as (namespace, client):
        yield {**namespace, "search_engine": search_engine}

        bridge, shop = namespace["bridge"], client.shop
        shop.invoices.insert_one({"_id": 1, "customer": "eve", "name": "Eve", "address": "Main Street 1", "total": 5})
        shop.wishes.insert_many([{"customer": "eve"}, {"customer": "bob"}])
        with BridgeRunner(bridge, url=mongo_url) as runner:
            shop.customers.insert_one({"_id": "eve"})
            shop.customers.delete_one({"_id": "eve"})
            runner.deliver()
        assert shop.invoices.find_one() == {"_id": 1, "customer": "eve", "total": 5}
        assert [wish["customer"] for wish in shop.wishes.find()] == ["bob"]
        assert search_engine.asked == ["eve", "eve"]


BEGUN = datetime(2026, 1, 1, tzinfo=UTC)


@contextmanager
def polling(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """An app, a bridge, and what the poll has."""
    copied: list[int] = []
    mails: list[tuple[int, str]] = []
    with open_shop(mongo_url, redis_url, tz_aware=True) as (namespace, client):
        orders = client.shop.orders
        client.shop.poll.insert_one({"_id": "poll", "until": BEGUN})
        namespace |= {
            "orders": orders,
            "state": client.shop.poll,
            "copy": lambda order: copied.append(order["_id"]),
            "send_mail": lambda key, mail: mails.append((key, mail)),
        }
        yield namespace

        with BridgeRunner(namespace["bridge"], url=mongo_url) as runner:
            orders.insert_many([{"_id": 1, "state": "new"}, {"_id": 2, "updated_at": datetime.now(UTC)}])
            namespace["poll"]()
            assert copied == [2]  # the page's reproach: who forgets `updated_at` is not seen
            runner.deliver()
            orders.update_one({"_id": 1}, {"$set": {"state": "shipped"}})
            orders.update_one({"_id": 1}, {"$set": {"note": "by rail"}})
            orders.delete_one({"_id": 2})
            runner.deliver()
        copies = list(client.shop.order_copies.find({}, {"_fence": 0}))
        assert copies == [{"_id": 1, "state": "shipped", "note": "by rail"}]
        assert [key for key, _ in mails] == [1]


@contextmanager
def remove(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """Fenced writes and deletes, entries that were sent, a lock, and a lease."""

    def summarise(change: Change) -> None:
        fenced, key = change.fenced("shop.summaries"), {"_id": change.document_key["_id"]}
        if change.full_document is None:
            fenced.delete_one(key)
        else:
            fenced.replace_one(key, {"total": 1}, upsert=True)

    with open_shop(mongo_url, redis_url) as (namespace, client):
        app, bridge, shop = namespace["app"], namespace["bridge"], client.shop
        bridge.on_change("shop.orders")(summarise)
        register_tasks(app, "receipt")
        outbox = Outbox(app, shop.orders, at_once=False)
        parcels = OutboxCollection(app, shop.shop_outbox, at_once=False)
        with BridgeRunner(bridge, url=mongo_url) as runner:
            for order in (1, 2):
                outbox.insert_one({"_id": order}, tasks=[app.signature("receipt", args=(order,))])
            runner.deliver()
            shop.orders.delete_one({"_id": 2})
            runner.deliver()
        with client.start_session() as session, session.start_transaction():
            parcels.add([app.signature("receipt", args=(1,))], key="1", session=session)
        for each in (outbox, parcels):
            assert each.sweep(older_than=0).error is None
            each.runtime.close()
        client.mongo_celery.leases.insert_one({"_id": "shop"})
        shop.seats.insert_one({"_id": "A1", "_lock": {"at": None}})
        assert "_fence" in (shop.summaries.find_one() or {})
        assert {"summaries.fence_tombstones", "shop_outbox"} <= {*shop.list_collection_names()}
        assert "pendingEvents" in shop.orders.index_information()
        yield {}

        assert {*shop.list_collection_names()} == {"orders", "summaries", "seats"}
        assert [*shop.orders.find(), *shop.summaries.find()] == [{"_id": 1}, {"_id": 1, "total": 1}]
        assert shop.seats.find_one() == {"_id": "A1"}
        assert [*shop.orders.index_information()] == ["_id_"]
        assert not client.mongo_celery.leases.count_documents({})
        assert not client.mongo_celery["keys"].count_documents({"_id": {"$regex": "^outbox/shop"}})
        assert not {"outbox_sweeps", "outbox_dead_letters"} & {*client.mongo_celery.list_collection_names()}


class _Warehouse:
    """Two lamps, for whoever asks first; a repeated key is the same request, as with real services."""

    def __init__(self) -> None:
        self.keys: dict[str, bool] = {}
        self.left = 2
        self.answers = 0

    def reserve(self, _article: str, *, key: str) -> bool:
        if key not in self.keys:
            self.keys[key] = self.left > 0
            self.left -= self.keys[key]
        self.answers += 1
        if self.answers == 1:
            raise ConnectionResetError("the answer is lost")
        return self.keys[key]

    def release(self, _article: str, *, key: str) -> None:
        self.left += self.keys.setdefault(key, True)


class _Bank:
    """Ann can pay."""

    def charge(self, customer: str, _price: int, *, key: str) -> bool:
        assert key
        return customer == "Ann"


@contextmanager
def saga(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """An app, a bridge, orders, and both services."""
    warehouse = _Warehouse()
    with open_shop(mongo_url, redis_url) as (namespace, client):
        orders = client.shop.orders
        namespace |= {"orders": orders, "warehouse": warehouse, "bank": _Bank()}
        yield namespace

        placed: Any = orders.find_one_and_delete({"_id": 1})
        with BridgeRunner(namespace["bridge"], url=mongo_url) as runner:
            orders.insert_many([{**placed, "_id": key, "customer": who} for key, who in ((1, "Ann"), (2, "Bob"))])
            orders.insert_one(
                {"_id": 3, "state": "waiting", "article": "lamp", "since": datetime(2026, 1, 1, tzinfo=UTC)}
            )
            namespace["give_up"]()
            runner.crash("called", "advance")
            runner.deliver()
            assert {order["_id"]: order["state"] for order in orders.find()} == {
                1: "paid",
                2: "canceled",
                3: "canceled",
            }
            assert warehouse.left == 2 - 2 + 1 + 1  # reserved for both; released once each
            assert not runner.deliver().calls  # the ends have no step


class _StoppedError(Exception):
    """Somebody has ended the loop."""


class _Index:
    """A task that a person stops the loop in."""

    def __init__(self) -> None:
        self.started: list[int] = []

    def delay(self, key: int) -> None:
        self.started.append(key)
        if key == 3:
            raise _StoppedError


@contextmanager
def watch(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """An app, a bridge, and the loop's collections."""
    index = _Index()
    with open_shop(mongo_url, redis_url) as (namespace, client):
        bridge = namespace["bridge"]
        orders, tokens = client.shop.orders, client.shop.tokens
        with orders.watch() as stream:
            orders.insert_one({"_id": 1, "title": "a lamp"})
            tokens.insert_one({"_id": "orders", "token": stream.next()["_id"]})
        token = tokens.find_one()["token"]["_data"]  # type: ignore[index] # it is there
        namespace |= {"orders": orders, "tokens": tokens, "index": index, "ORDERS_TOKEN": token}
        yield namespace

        (handler,) = bridge.handlers
        assert handler.start_from == tokens.find_one()["token"]  # type: ignore[index] # it is there
        orders.insert_many([{"_id": key, "title": "another lamp"} for key in (2, 3)])
        with suppress(_StoppedError):
            namespace["listen"]()
        assert index.started == [2, 3]
        with BridgeRunner(bridge, url=mongo_url) as runner:
            orders.update_one({"_id": 1}, {"$set": {"title": "the lamp"}})
            orders.delete_one({"_id": 2})
            runner.deliver()
        assert list(client.shop.found.find({}, {"_fence": 0})) == [{"_id": 1, "words": ["the", "lamp"]}]
