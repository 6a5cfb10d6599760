"""What `docs/operations/python.md` needs: a bridge that was led, and a change that has halted."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import bson
from bson import ObjectId
from celery import Celery

from mongo_celery import Bridge, Change
from mongo_celery.bridge.listener.renewal import Renewal
from mongo_celery.bridge.listener.takeover import take_over
from mongo_celery.bridge.state.backlog import StoredChange
from mongo_celery.bridge.state.claims import Claim
from mongo_celery.bridge.state.partitions import Image
from tests.fixtures.process import wait_for
from tests.fixtures.samples import IDENTITY

FIRST = {"_data": "820000000100000001"}
RUNNING, PAUSED = 4, 5
"""A partition with a running change, and the one that the page pauses before the migration."""


@contextmanager
def prepared(mongo_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """The bridge, and a migration; afterwards each command has left its record, and only what was paused before is."""
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
        return {each.state for each in images()}

    def images() -> list[Image]:
        return store.partitions.of({"summarise": partitioning})

    def start(index: int) -> Claim:
        where = store.partitions.partition_id("summarise", partitioning, index)
        owner, token = str(ObjectId()), FIRST["_data"]
        claim = store.claims.take(where, owner=owner, term=takeover.version, first=1, last=1, token=token)
        assert claim is not None
        return claim

    running = start(RUNNING)

    def end_when_paused() -> None:
        wait_for(lambda: images()[RUNNING].state == "paused")
        assert store.claims.handle(running, 1, FIRST)
        assert store.claims.commit(running.partition_id, 1)

    def migrate() -> None:
        assert states() == {"paused"}
        assert not any(each.live for each in images()), "a change that ran has ended"
        bridge.operations.resume("summarise", 3).run()
        where = store.partitions.partition_id("summarise", partitioning, 3)
        event = {"_id": FIRST, "operationType": "insert", "ns": {"db": "shop", "coll": "orders"}}
        store.backlog.insert(where, [StoredChange(FIRST["_data"], bson.encode(event))], takeover.version)
        assert store.claims.halt(start(3), FIRST, "shop.orders insert 1", "ValueError: no")

    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(end_when_paused)
        yield {"bridge": bridge, "migrate": migrate}
        ending.result()
    assert {each.index for each in images() if each.state == "paused"} == {PAUSED}
    assert states() == {"flowing", "paused"}
    assert store.dead_letters.collection.count_documents({}) == 1
    records = bridge.operations.history()
    acts = [each["act"] for each in records]
    assert (acts[:2], set(acts[2:-1]), acts[-1]) == (["pause", "pause"], {"resume"}, "skip")
    assert (records[-1]["by"], records[-1]["reason"]) == ("ann", "a test order")
    bridge.client.close()
