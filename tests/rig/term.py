"""Terms of a listener without its threads: a lease, what it has taken over, and what it leads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from bson import Timestamp
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.database import Database

from mongo_celery.bridge.change import Change
from mongo_celery.bridge.handlers import Handler, make_handler
from mongo_celery.bridge.listener.renewal import Renewal
from mongo_celery.bridge.listener.subscription import Subscription, make_partitions
from mongo_celery.bridge.listener.takeover import Takeover, find_rule, find_undeliverable, take_over
from mongo_celery.bridge.listener.term_facts import TermFacts
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.state.store import Store
from mongo_celery.bridge.state.subscriptions import Advance, Subscriptions
from mongo_celery.bridge.window import Mark
from mongo_celery.command_line import CommandLine
from mongo_celery.mongo.verdicts import ErrorContext
from tests.fixtures.mongo import sparse
from tests.fixtures.samples import IDENTITY

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

Document = dict[str, Any]

BRIDGE = "shop"
TTL = 30.0
"""Seconds. A call may take a part of it, and a busy machine stalls for some seconds."""


def handle(_change: Change) -> None:
    """A handler."""


def mark_at(time: Timestamp) -> Mark:
    data = f"82{time.time:08x}{time.inc:08x}2b02"
    return Mark({"_data": data}, data, time)


def advance(
    subscriptions: Subscriptions,
    name: str,
    version: int,
    token: Mapping[str, Any],
    cluster_time: Timestamp | None,
    fingerprint: str,
) -> bool:
    """Store one watermark; whether that has changed anything."""
    before = subscriptions.read_all()
    subscriptions.advance_all([Advance(name, version, token, cluster_time)], fingerprint)
    return subscriptions.read_all() != before


@dataclass(frozen=True, slots=True)
class TermRig:
    """One term: its store, its lease, and the options and handlers of its process."""

    store: Store
    renewal: Renewal
    options: BridgeOptions
    handlers: Sequence[Handler]
    database: Database[Document]

    @property
    def version(self) -> int:
        return self.renewal.term.number

    @property
    def partitions(self) -> Collection[Document]:
        return sparse(self.database["partitions"])

    @property
    def wiring(self) -> Wiring:
        """What parts of a listener use of a bridge."""
        concern = ErrorContext("the state database", "readWrite")
        found = SimpleNamespace(
            name="shop",
            store=self.store,
            client=self.database.client,
            options=self.options,
            state_concern=concern,
            line=CommandLine("shop"),
        )
        return cast("Wiring", found)

    def take_over(self) -> Takeover:
        return take_over(self.store, self.renewal, self.options, self.handlers)

    def led(self, takeover: Takeover, marks: Mapping[str, Mark | None]) -> list[Subscription]:
        return [self._led(takeover, handler, marks.get(handler.name)) for handler in self.handlers]

    def _led(self, takeover: Takeover, handler: Handler, mark: Mark | None) -> Subscription:
        images = takeover.images[handler.name]
        partitioning = takeover.layouts[handler.name].term
        rule = find_rule(handler, takeover.layouts[handler.name], self.options, [handler])
        plan = TermFacts(
            handler,
            handler.selector(None),
            rule,
            takeover.layouts[handler.name],
            takeover.version,
            Timestamp(1, 1),
            mark,
            find_undeliverable(self.store, self.renewal, takeover, handler.name, rule, mark),
        )
        partitions = make_partitions(images, self.store.partitions, partitioning, takeover.version, self.options)
        return Subscription(self.options, plan, partitions)

    def partitioning(self, name: str) -> int:
        found = sparse(self.database["handlers"]).find_one({"_id": f"{BRIDGE}/{name}"})
        assert found is not None, "it was taken over"
        return int(found["partitioning"]["term"])

    def partition_id(self, name: str, index: int) -> str:
        """`_id` of a partition in force."""
        return f"{BRIDGE}/{name}/{self.partitioning(name)}/{index}"

    def documents(self) -> dict[str, Document]:
        return {document["_id"]: document for document in self.partitions.find()}


class KilledError(Exception):
    """A listener was killed here."""


@contextmanager
def open_transaction(client: MongoClient[Document], database: str, *ids: str) -> Iterator[None]:
    """Write partitions in a transaction that stays open, as a client does that has died before its commit."""
    with client.start_session() as session, session.start_transaction():
        for where in ids:
            found = client[database]["partitions"].update_one({"_id": where}, {"$set": {"note": 1}}, session=session)
            assert found.matched_count == 1
        yield
        session.abort_transaction()


def around(
    monkeypatch: pytest.MonkeyPatch, step: tuple[type, str], act: Callable[[], None], *, behind: bool = False
) -> None:
    """Let something happen once in front of a step, a method of the state, or right behind it."""
    kind, name = step
    original = getattr(kind, name)
    waiting = [act]

    def stepped(self: Any, *arguments: Any, **options: Any) -> Any:
        found = original(self, *arguments, **options) if behind else None
        while waiting:
            waiting.pop()()
        return found if behind else original(self, *arguments, **options)

    monkeypatch.setattr(kind, name, stepped)


def begin_term(
    client: MongoClient[Document],
    database: str,
    partitions: int,
    names: Sequence[str] = ("record",),
    partition_by: Callable[[Mapping[str, Any]], Any] | None = None,
    starts: Mapping[str, Any] | None = None,
    **options_: Any,
) -> TermRig:
    """A new term, whatever the one before is doing: its lease has lapsed."""
    times = {"lease_ttl": TTL, "claim_ttl": TTL}
    options = BridgeOptions(**{"name": BRIDGE, "database": database, "partitions": partitions, **times, **options_})
    store = Store(client, options)
    store.leases.ensure()
    client[database]["leases"].update_one({"_id": BRIDGE}, {"$set": {"expiresAt": None}})
    term = store.leases.acquire(IDENTITY)
    assert term is not None, "the lease has lapsed"
    handlers = [_handler(name, options, partition_by, (starts or {}).get(name)) for name in names]
    renewal = Renewal(store.leases, store.signing, term, TTL)
    return TermRig(store, renewal, options, handlers, client[database])


def hold_lease(state: Database[Document]) -> None:
    """Let a lease that nobody renews live for an hour."""
    state["leases"].update_one({}, [{"$set": {"expiresAt": {"$add": ["$$NOW", 3_600_000]}}}])


def _handler(
    name: str,
    options: BridgeOptions,
    partition_by: Callable[[Mapping[str, Any]], Any] | None,
    start_from: Any,
) -> Handler:
    return make_handler(
        handle,
        ("shop.orders",),
        options,
        task_name=f"shop.{name}",
        given={"name": name, "partition_by": partition_by, "start_from": start_from},
    )
