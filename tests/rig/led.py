"""A bridge whose lease is held by no process: a worker's and a listener's writes are made by the test."""

from __future__ import annotations

from typing import Any

import bson
from bson import ObjectId, Timestamp

from mongo_celery import Bridge
from mongo_celery.bridge.listener.renewal import Renewal
from mongo_celery.bridge.listener.takeover import take_over
from mongo_celery.bridge.operations.bridge_snapshot import PartitionStatus
from mongo_celery.bridge.state.backlog import StoredChange
from mongo_celery.bridge.state.claims import Claim
from mongo_celery.bridge.state.leases import Term
from mongo_celery.bridge.state.partitions import Image
from mongo_celery.bridge.state.store import Store
from tests.fixtures.samples import IDENTITY
from tests.rig.term import hold_lease

NAME = "shop"
IDLE = {"inFlight": 0, "buffered": 0, "caughtUp": True}


def token(number: int) -> dict[str, Any]:
    """A resume token; larger numbers come later in the stream."""
    return {"_data": f"82{number:08X}00000001"}


def stored_change(number: int, **fields: Any) -> StoredChange:
    event = {"_id": token(number), "operationType": "insert", "ns": {"db": "shop", "coll": "orders"}, **fields}
    event["documentKey"] = {"_id": number}
    return StoredChange(token(number)["_data"], bson.encode(event), hash=number)


class LedBridge:
    """A bridge whose lease is held, with a worker's means to claim."""

    def __init__(self, bridge: Bridge) -> None:
        self.bridge, self.operations = bridge, bridge.operations
        self.store = Store(bridge.client, bridge.options)
        self.state = bridge.client[bridge.options.database]
        self.store.leases.ensure()
        term = self.store.leases.acquire(IDENTITY)
        assert term is not None, "the lease is free"
        hold_lease(self.state)
        self.term: Term = term
        renewal = Renewal(self.store.leases, self.store.signing, term, bridge.options.lease_ttl)
        takeover = take_over(self.store, renewal, bridge.options, bridge.handlers)
        self.version = takeover.version
        self.partitionings = {name: layout.term for name, layout in takeover.layouts.items()}

    def report(self, **fields: Any) -> None:
        assert self.store.leases.record_report(self.term, fields)

    def claim(self, index: int = 0, number: int = 1, handler: str = "summarise") -> Claim | None:
        return self.store.claims.take(
            self.store.partitions.partition_id(handler, self.partitionings[handler], index),
            owner=str(ObjectId()),
            term=self.version,
            first=number,
            last=number,
            token=token(number)["_data"],
        )

    def run(self, index: int = 0, number: int = 1, handler: str = "summarise") -> Claim:
        claim = self.claim(index, number, handler)
        assert claim is not None, "the change may run"
        return claim

    def halt(self, index: int = 0, number: int = 1, handler: str = "summarise") -> None:
        claim = self.run(index, number, handler)
        assert self.store.claims.halt(claim, token(number), f"shop.orders insert {number}", "ValueError: no")

    def park(self, index: int = 0, number: int = 1) -> None:
        """Let a change ask for a retry in an hour."""
        claim = self.run(index, number)
        assert self.store.claims.park(claim, delay=3600, not_before=None, error="ConnectionError: later")

    def partition(self, index: int = 0) -> PartitionStatus:
        """A partition as `status` shows it."""
        return self.operations.read_status().handlers[0].partitions[index]

    def images(self) -> list[Image]:
        return self.store.partitions.of(self.partitionings)

    def lose_history(self, oldest: Timestamp = Timestamp(0x10000000, 1)) -> None:  # noqa: B008 - it is immutable
        """Let the handler's position lie before the oldest entry of the oplog."""
        assert self.store.subscriptions.pin("summarise", self.version, Timestamp(5, 1), None)
        assert self.store.subscriptions.mark_lost("summarise", self.version, Timestamp(5, 1), oldest, "rolled over")

    # -- stored changes of the first partition -----------------------------------------------------

    @property
    def image(self) -> Image:
        return self.images()[0]

    def store_changes(self, *changes: StoredChange, mark: bool = True) -> None:
        """Store changes of the first partition, and let the mark reach the last one."""
        self.store.backlog.insert(self.image.id, changes, self.version)
        if mark:
            assert self.store.partitions.mark_stored(self.image.id, self.version, changes[-1].data, "halted")

    def commit(self, last: int) -> None:
        for number in range(int(self.image.committed) + 1, last + 1):
            assert self.store.claims.discard(self.run(number=number), token(number))

    @property
    def stored(self) -> list[str]:
        """The changes of the first partition that the listener would run next, in order."""
        image = self.image
        return [each.data for each in self.store.backlog.read(image.id, image.data, token(99)["_data"], 9)]
