"""What `docs/howto/remove.md` needs: a bridge and outboxes that have worked; and that nothing of them is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery
from pymongo import MongoClient

from mongo_celery import Bridge, Change, Outbox, OutboxCollection
from mongo_celery.testing import BridgeRunner
from tests.fixtures.tasks import register_tasks


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """Fenced writes and deletes, entries that were sent, a lock, and a lease."""
    app = Celery("shop", broker=redis_url)
    bridge = Bridge(app, mongo_url, name="shop")

    def summarise(change: Change) -> None:
        fenced, key = change.fenced("shop.summaries"), {"_id": change.document_key["_id"]}
        if change.full_document is None:
            fenced.delete_one(key)
        else:
            fenced.replace_one(key, {"total": 1}, upsert=True)

    bridge.on_change("shop.orders")(summarise)
    with MongoClient[dict[str, Any]](mongo_url) as client:
        shop = client.shop
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
