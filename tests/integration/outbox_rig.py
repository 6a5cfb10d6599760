"""An app with a few tasks, an outbox on the real servers, and what arrived in Redis."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import redis
from bson import ObjectId
from celery import Celery
from pymongo.collection import Collection
from pymongo.database import Database

from mongo_celery import Outbox
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.pending import LONG_AGO, UNCLAIMED
from mongo_celery.outbox.registry import AnyOutbox

Document = dict[str, Any]


@dataclass(frozen=True)
class Message:
    """One message in the queue, its headers and its decoded body."""

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
    """
    An app with tasks, its queue, and outboxes.

    Args:
        database: of this test.
        broker: URL of an emptied Redis.
        backend: URL of the result backend.
        conf: more of Celery's settings.
    """

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
        self._outboxes: list[Outbox] = []

    def outbox(self, collection: str = "orders", **options: Any) -> Outbox:
        """An outbox whose writes wait for the dispatcher, so that a test can look at once at what it has sent."""
        made = Outbox(self.app, self.database[collection], **{"sweep_every": None, "at_once": "wait", **options})
        self._outboxes.append(made)
        return made

    def drain(self) -> list[Message]:
        """Take all messages from the queue, the oldest first."""
        found = []
        while (raw := self._redis.rpop("celery")) is not None:
            message = json.loads(raw)
            body = base64.b64decode(message["body"])
            is_json = message["content-type"] == "application/json"
            found.append(Message(message["headers"], json.loads(body) if is_json else body))
        return found

    def sent(self) -> list[list[Any]]:
        """Arguments of all messages, the oldest first."""
        return [message.args for message in self.drain()]

    def close(self) -> None:
        for outbox in self._outboxes:
            outbox.backing.close()
        self._redis.close()
        self.app.close()


@contextmanager
def opened(database: Database[Document], broker: str, **conf: Any) -> Iterator[Rig]:
    rig = Rig(database, broker, **conf)
    try:
        yield rig
    finally:
        rig.close()


def damage(outbox: AnyOutbox, where: Document, place: int = 0, **changes: Any) -> None:
    """Have the outbox itself store an entry with these changes: what it has signed, and nobody can send."""
    collection, name = outbox.backing.plain, f"{outbox.backing.field.events}.{place}"
    document = collection.find_one(where)
    assert document is not None
    stored = Entry.from_document(document[outbox.backing.field.name]["events"][place])
    signed = outbox.backing.signer.sign(replace(stored, **changes))
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
