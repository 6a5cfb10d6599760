"""A bridge whose partitions have handled some real changes, and that nobody leads: for tests that move positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bson import ObjectId, Timestamp
from celery import Celery
from pymongo.database import Database

from mongo_celery import Bridge
from mongo_celery.bridge.listener.renewal import Renewal
from mongo_celery.bridge.listener.takeover import take_over
from mongo_celery.bridge.partitioning import partition_hash
from mongo_celery.bridge.state.claims import Claim
from mongo_celery.bridge.state.leases import Term
from mongo_celery.bridge.state.store import Store
from mongo_celery.bridge.state.subscriptions import Advance
from mongo_celery.mongo.oplog import time_of_token
from mongo_celery.plan import Plan
from tests.fixtures.mongo import sparse
from tests.fixtures.samples import IDENTITY
from tests.rig.term import hold_lease

Document = dict[str, Any]

NAME, HANDLER = "shop", "summarise"
PARTITIONS = 2


def data_of(token: Mapping[str, Any] | None) -> str:
    return str(token["_data"]) if token else ""


def place_of(plan: Plan) -> Timestamp:
    time = time_of_token({"_data": plan.fields["token"]}, None)
    assert time is not None
    return time


class PositionsRig:
    """
    A bridge whose partitions have handled some real changes, and that nobody leads.

    Attributes:
        events: the changes, in the order of the stream.
    """

    def __init__(self, bridge: Bridge, data: Database[Document], handler: str = HANDLER) -> None:
        self.bridge, self.data, self.handler = bridge, data, handler
        self.store = Store(bridge.client, bridge.options)
        self.state = bridge.client[bridge.options.database]
        self.events: list[Document] = []
        self.term: Term | None = None
        self.lead()

    # -- a listener --------------------------------------------------------------------------------

    def lead(self) -> None:
        self.store.leases.ensure()
        self.term = self.store.leases.acquire(IDENTITY, (self.store.leases.read() or {}).get("identity"))
        assert self.term is not None, "the lease is free"
        hold_lease(self.state)
        renewal = Renewal(self.store.leases, self.store.signing, self.term, 10.0)
        takeover = take_over(self.store, renewal, self.bridge.options, self.bridge.handlers)
        self.version, self.partitioning = takeover.version, takeover.layouts[self.handler].term

    def release(self) -> None:
        assert self.term is not None, "it leads"
        assert self.store.leases.release(self.term)

    def write(self, count: int) -> None:
        """So many changes, which are handled one after the other; the watermark follows."""
        with self.data["orders"].watch() as stream:
            for _ in range(count):
                self.data["orders"].insert_one({})
                self.events.append(dict(stream.next()))
        for event in self.events[-count:]:
            assert self.handle(event)
        last = self.events[-1]
        self.store.subscriptions.pin(self.handler, self.version, self.events[0]["clusterTime"], None)
        self.store.subscriptions.advance_all(
            [Advance(self.handler, self.version, last["_id"], last["clusterTime"])], "f"
        )

    def index(self, event: Mapping[str, Any]) -> int:
        return partition_hash([self.data.name, "orders", event["documentKey"]["_id"]]) % PARTITIONS

    def partition_id(self, index: int) -> str:
        return self.store.partitions.partition_id(self.handler, self.partitioning, index)

    def claim(self, event: Mapping[str, Any]) -> Claim | None:
        number = int(self.partition(self.index(event))["committed"]) + 1
        where, token = self.partition_id(self.index(event)), event["_id"]["_data"]
        owner = str(ObjectId())
        return self.store.claims.take(where, owner=owner, term=self.version, first=number, last=number, token=token)

    def handle(self, event: Mapping[str, Any]) -> bool:
        """Run a change; whether it may run."""
        claim = self.claim(event)
        if claim is None or not self.store.claims.handle(claim, claim.last, event["_id"]):
            return False
        return self.store.claims.commit(claim.partition_id, claim.first)

    # -- what there is -----------------------------------------------------------------------------

    def partition(self, index: int) -> Document:
        return sparse(self.state["partitions"]).find_one({"_id": self.partition_id(index)}) or {}

    @property
    def subscription(self) -> Document:
        return sparse(self.state["handlers"]).find_one({"_id": f"{NAME}/{self.handler}"}) or {}

    def of(self, index: int) -> list[Document]:
        return [event for event in self.events if self.index(event) == index]

    def claims_at(self, event: Mapping[str, Any]) -> Claim:
        """As `claim`, of a change that may run."""
        found = self.claim(event)
        assert found is not None, "the change may run"
        return found

    def plan(self, to: str, **options: Any) -> Plan:
        return self.bridge.operations.reset(self.handler, to, **options)

    def reset(self, to: str, **options: Any) -> Plan:
        plan = self.plan(to, **options)
        plan.run()
        return plan

    def everything(self) -> Document:
        """The whole state, without collections in which nothing is stored."""
        found = {name: list(self.state[name].find()) for name in sorted(self.state.list_collection_names())}
        return {name: documents for name, documents in found.items() if documents}


def bridge_on(url: str, data: Database[Document], state: str, *handlers: str) -> Bridge:
    app = Celery("positions", broker="memory://", set_as_current=False)
    bridge = Bridge(app, url, name=NAME, database=state, partitions=PARTITIONS, autodiscover=False)
    for name in handlers:
        bridge.on_change(f"{data.name}.orders", name=name)(_function(name))
    app.finalize()
    return bridge


def _function(name: str) -> Any:
    def handle(change: object) -> None:
        del change

    handle.__name__ = handle.__qualname__ = name
    return handle


@contextmanager
def staged(url: str, data: Database[Document], state: str) -> Iterator[PositionsRig]:
    """Give a stage of eight changes and more, some in each partition, that is led."""
    bridge = bridge_on(url, data, state, HANDLER)
    made = PositionsRig(bridge, data)
    made.write(8)
    while not (len(made.of(0)) > 1 and len(made.of(1)) > 1):
        made.write(1)
    yield made
    bridge.client.close()
