"""An app with a few tasks, an outbox on the real servers, and what arrived in Redis."""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import bson
import pytest
import redis
from bson import ObjectId
from bson.datetime_ms import DatetimeMS
from bson.raw_bson import RawBSONDocument
from celery import Celery
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import PyMongoError

from mongo_celery import Outbox, OutboxCollection, transactional
from mongo_celery.locking import after_commit
from mongo_celery.mongo.identity import NO_ID
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.pending import EVENTS, FIELD, LONG_AGO, UNCLAIMED
from mongo_celery.outbox.registry import BaseOutbox
from tests.fixtures.process import PATIENCE_SECONDS, wait_for

Document = dict[str, Any]


@dataclass(frozen=True)
class Message:
    headers: Document
    body: Any

    @property
    def id(self) -> str:
        return str(self.headers["id"])

    @property
    def args(self) -> list[Any]:
        return list(self.body[0])


def _add(a: int, b: int) -> int:
    return a + b


def _total(values: list[int]) -> int:
    return sum(values)


def _same(value: Any) -> Any:
    return value


class Rig:
    """An app with tasks, its queue, and outboxes."""

    def __init__(
        self, database: Database[Document], broker: str, backend: str = "cache+memory://", **conf: Any
    ) -> None:
        self.database = database
        self.app = Celery("rig", broker=broker, backend=backend, set_as_current=False)
        self.app.conf.update(accept_content=["json", "pickle"], **conf)
        self.add = self.app.task(name="add", shared=False)(_add)
        self.total = self.app.task(name="total", shared=False)(_total)
        self.pickled = self.app.task(name="pickled", serializer="pickle", shared=False)(_same)
        self._redis: Any = redis.Redis.from_url(broker)
        self._outboxes: list[BaseOutbox] = []
        self.run = transactional(database.client).run

    def outbox(
        self, collection: str | Collection[Document] = "orders", *, app: Celery | None = None, **options: Any
    ) -> Outbox:
        """An outbox whose writes deliver before they return, unless the test says `at_once`."""
        given = {"sweep_every": None, "database": self.database.name, **options}
        made = Outbox(app or self.app, self._open(collection), **given)
        if "at_once" not in options:
            deliver_in_writes(made)
        self._outboxes.append(made)
        return made

    def messages(self, collection: str | Collection[Document] = "outbox", **options: Any) -> OutboxCollection:
        given = {"sweep_every": None, "at_once": False, "database": self.database.name, **options}
        name = given.pop("name", f"outbox {len(self._outboxes)}")
        made = OutboxCollection(self.app, self._open(collection), name=name, **given)
        self._outboxes.append(made)
        return made

    def _open(self, collection: str | Collection[Document]) -> Collection[Document]:
        return self.database[collection] if isinstance(collection, str) else collection

    @property
    def stored(self) -> list[Document]:
        """The documents of `messages()`: those of keys first."""
        return list(self.database["outbox"].find().sort("_id", 1))

    @property
    def orders(self) -> Collection[Document]:
        """The collection of `outbox()`."""
        return self.database["orders"]

    def pending(self, identity: Any, collection: str = "orders") -> Document:
        """The outbox's field of a document, as if empty where it has none; its count is checked on the way."""
        return pending(self.database, identity, collection)

    def drain(self, queue: str = "celery") -> list[Message]:
        found = []
        while (raw := self._redis.rpop(queue)) is not None:
            message = json.loads(raw)
            body = base64.b64decode(message["body"])
            is_json = message["content-type"] == "application/json"
            found.append(Message(message["headers"], json.loads(body) if is_json else body))
        return found

    def sent(self) -> list[list[Any]]:
        return [message.args for message in self.drain()]

    def close(self) -> None:
        for outbox in self._outboxes:
            end(outbox)
        self._redis.close()
        self.app.close()


def end(outbox: BaseOutbox) -> None:
    """Close an outbox, and wait for a turn that lasts longer: without its client it would fail, and log that later."""
    dispatcher = outbox.runtime.dispatcher
    outbox.runtime.close()
    wait_for(lambda: not dispatcher._is_in_turn)


def deliver_in_writes(outbox: BaseOutbox) -> None:
    """Have writes deliver before they return, as the dispatcher does a moment later."""
    runtime = outbox.runtime

    def dispatch(document_ids: Sequence[Any], session: ClientSession | None) -> None:
        if session is not None and session.in_transaction:
            if not after_commit(lambda: dispatch(document_ids, None), session):
                runtime.dispatcher.expect()
            return
        known = [each for each in document_ids if each is not NO_ID]
        if len(known) < len(document_ids):
            known += runtime.pending.find_due(0.0, 100)
        runtime.pending.indexes.ensure(patiently=False)
        with suppress(PyMongoError):
            runtime._relay.deliver_all(known)

    runtime.dispatch = dispatch  # type: ignore[method-assign]


def leave_strange_ids(rig: Rig) -> None:
    """Leave a document whose `_id` is a date that Python does not have, and one whose `_id` is not UTF-8."""
    outbox = rig.outbox(name="writer of strange ids", at_once=False)
    rig.orders.insert_one(outbox.with_tasks({"_id": DatetimeMS(2**60)}, [rig.add.s(1, 1)]))
    broken = bson.encode(outbox.with_tasks({"_id": "not utf-8"}, [rig.add.s(1, 2)]))
    rig.orders.insert_one(RawBSONDocument(broken.replace(b"not utf-8", b"\xff" * 9)))


def run_together(*calls: Callable[[], object]) -> None:
    """Run functions at the same time, each in a thread of its own; what one of them raises is raised here."""
    with ThreadPoolExecutor(len(calls)) as pool:
        for each in [pool.submit(call) for call in calls]:
            each.result()


@contextmanager
def opened(database: Database[Document], broker: str, **conf: Any) -> Iterator[Rig]:
    rig = Rig(database, broker, **conf)
    try:
        yield rig
    finally:
        rig.close()


@pytest.fixture(name="rig")
def an_outbox_rig(database: Database[Document], redis_url: str) -> Iterator[Rig]:
    with opened(database, redis_url) as made:
        yield made


def damage(outbox: BaseOutbox, where: Document, place: int = 0, **changes: Any) -> None:
    """Have the outbox itself store an entry with these changes: what it has signed, and nobody can send."""
    collection, name = outbox.runtime.plain, f"{EVENTS}.{place}"
    document = collection.find_one(where)
    assert document is not None
    stored = Entry.from_document(document[FIELD]["events"][place])
    signed = outbox.runtime.signer.sign(replace(stored, **changes))
    assert collection.update_one({"_id": document["_id"]}, {"$set": {name: signed.to_document()}}).matched_count


def ripen(collection: Collection[Document], identity: Any) -> None:
    """As if the next entry of a document had been tried for as long as anything is, and had failed each time."""
    tried = {"pendingEvents.events.0.attempts": 99, "pendingEvents.events.0.at": LONG_AGO}
    assert collection.update_one({"_id": identity}, {"$set": tried}).matched_count


def hold(
    collection: Collection[Document],
    identity: Any,
    seconds: float = 600.0,
    owner: ObjectId | None = None,
    field: str = "pendingEvents",
) -> None:
    """As a relay that claims a document, or with `NOBODY` as one that holds it back, by the server's clock."""
    until = {"$add": ["$$NOW", round(seconds * 1000)]}
    claim = {"$mergeObjects": [{"owner": owner or ObjectId(), "until": until}]}
    changed = collection.update_one({"_id": identity}, [{"$set": {f"{field}.claim": claim}}])
    assert changed.matched_count


def pause_of(collection: Collection[Document], identity: Any) -> float:
    """For how many seconds a document is held back, by the server's clock; 0 for one that is free."""
    left = {"$divide": [{"$subtract": ["$pendingEvents.claim.until", "$$NOW"]}, 1000]}
    (found,) = collection.aggregate([{"$match": {"_id": identity}}, {"$project": {"left": left}}])
    return max(0.0, float(found["left"]))


def due_again(collection: Collection[Document]) -> None:
    """As if the pauses after failures were over."""
    collection.update_many({"pendingEvents": {"$exists": True}}, {"$set": {"pendingEvents.claim": UNCLAIMED}})


def pending(database: Database[Document], identity: Any, collection: str = "orders") -> Document:
    """The outbox's field of a document, as if empty where it has none; its count is checked on the way."""
    document = database[collection].find_one({"_id": identity})
    assert document is not None
    field: Document = document.get("pendingEvents", {"count": 0, "events": []})
    assert field["count"] == len(field["events"])
    return field


Publish = Callable[[], None]


@contextmanager
def publishing(outbox: BaseOutbox, instead: Callable[[Publish, Entry], object]) -> Iterator[None]:
    publisher = outbox.runtime.publisher
    publish = publisher.publish

    def replaced(entry: Entry, *given: Any) -> None:
        instead(lambda: publish(entry, *given), entry)

    publisher.publish = replaced  # type: ignore[method-assign]
    try:
        yield
    finally:
        publisher.publish = publish  # type: ignore[method-assign]


@contextmanager
def held_up(outbox: BaseOutbox) -> Iterator[tuple[list[Entry], threading.Event]]:
    """No message goes out before the block ends: the entries that were tried, and what is set by the first of them."""
    asked, begun, go_on, here = list[Entry](), threading.Event(), threading.Event(), os.getpid()

    def hold(publish: Publish, entry: Entry) -> None:
        if os.getpid() == here:
            asked.append(entry)
            begun.set()
            assert go_on.wait(PATIENCE_SECONDS)
        publish()

    with publishing(outbox, hold):
        try:
            yield asked, begun
        finally:
            go_on.set()


def settled(outbox: BaseOutbox) -> bool:
    """Return True if nothing is pending in the collection, nor waits in the process."""
    status = outbox.status()
    return not status.pending and not status.dispatcher.queued
