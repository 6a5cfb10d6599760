"""What `docs/operations/python.md` needs: a bridge that was led, and a change that has halted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import bson
from bson import ObjectId
from celery import Celery

from mongo_celery import Bridge, Change
from mongo_celery.bridge.listener.renewal import Renewal
from mongo_celery.bridge.listener.takeover import take_over
from mongo_celery.bridge.state.backlog import StoredChange
from tests.fixtures.samples import IDENTITY


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """The bridge, and a migration; afterwards each command has left its record, and nothing is paused or halted."""
    bridge = Bridge(Celery("shop", broker=redis_url, set_as_current=False), mongo_url, autodiscover=False)

    @bridge.on_change("shop.orders")
    def summarise(change: Change) -> None:
        del change

    store = bridge.wiring.store
    store.leases.ensure()
    term = store.leases.acquire(IDENTITY)
    assert term is not None
    renewal = Renewal(store.leases, store.signing, term, 10.0)
    takeover = take_over(store, renewal, bridge.options, bridge.handlers)
    partitioning = takeover.layouts["summarise"].term
    assert store.leases.release(term)

    def states() -> set[str]:
        return {each.state for each in store.partitions.of({"summarise": partitioning})}

    def migrate() -> None:
        assert states() == {"paused"}
        bridge.operations.resume("summarise", 3).run()
        where, token = store.partitions.partition_id("summarise", partitioning, 3), {"_data": "820000000100000001"}
        event = {"_id": token, "operationType": "insert", "ns": {"db": "shop", "coll": "orders"}}
        store.backlog.insert(where, [StoredChange(token["_data"], bson.encode(event))], takeover.version)
        claim = store.claims.take(
            where, owner=str(ObjectId()), term=takeover.version, first=1, last=1, token=token["_data"]
        )
        assert claim is not None
        assert store.claims.halt(claim, token, "shop.orders insert 1", "ValueError: no")

    yield {"bridge": bridge, "migrate": migrate}
    assert states() == {"flowing"}
    assert store.dead_letters.collection.count_documents({}) == 1
    records = bridge.operations.history()
    assert [each["act"] for each in records] == ["pause", "resume", "resume", "skip"]
    assert (records[-1]["by"], records[-1]["reason"]) == ("ann", "a test order")
    bridge.client.close()
