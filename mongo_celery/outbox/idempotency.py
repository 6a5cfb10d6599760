"""
Idempotency records: the ids that have run, and those that are running. One document per id.

::

    {_id, state: "running" | "done", owner, until, expiresAt, result: JSON text}

`_id` is a task's id, or `{t: task, k: key}` if `once` has a key, so two tasks for one order have separate records. A
run claims its record until a server time, and a thread renews the claim while its function runs. A finished record is
final, until `expiresAt` removes it.

The first renewal is due a third of the claim's time after the *start* of the claim call. So a slow answer shortens the
first pause, not the safety. A function that ends within a third of the time needs no renewal. A frozen process's claim
(stopped, swapped out, in a debugger) lapses, and a second run may start beside it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import pymongo
from bson import ObjectId
from bson.codec_options import CodecOptions
from pymongo import IndexModel, MongoClient, ReturnDocument
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import DuplicateKeyError

from mongo_celery.forking import per_process
from mongo_celery.mongo.expressions import after, literal
from mongo_celery.mongo.indexes import Indexes
from mongo_celery.mongo.opening import Source, plain_types, resolve_collection, with_majority
from mongo_celery.mongo.redaction import short

logger = logging.getLogger("mongo_celery.outbox")

_INDEX = IndexModel([("expiresAt", 1)], name="expires-at", expireAfterSeconds=0)
_WAIT_SECONDS = 10.0
_ANSWER_SECONDS_MIN = 1.0
_TEXT_MAX = 200

_IS_NEW = {"$eq": [{"$type": "$state"}, "missing"]}
_HAS_LAPSED = {"$and": [{"$eq": ["$state", "running"]}, {"$lte": ["$until", "$$NOW"]}]}


@dataclass(frozen=True, slots=True)
class IdempotencyClaim:
    """
    The answer to a claim of an id.

    Attributes:
        owner: the claim's owner. None if it was refused.
        wait: seconds before the next attempt, if another run has the id.
        result: the result as JSON, if the id has run and its result was stored.
        finisher: owner of the run that has finished, if the id has run.
    """

    owner: ObjectId | None = None
    wait: float | None = None
    result: str | None = None
    finisher: ObjectId | None = None


class IdempotencyStore:
    """
    The idempotency records of one collection.

    Args:
        source: the collection, or a callable that returns it.
        keep: seconds for which a finished id is remembered.
        claim_ttl: seconds for which an unrenewed claim stops duplicates.
    """

    def __init__(self, source: Source, keep: float, claim_ttl: float) -> None:
        self._source = source
        self._keep = keep
        self.claim_ttl = claim_ttl
        IDEMPOTENCY_STORES.add(self)

    def __repr__(self) -> str:
        return f"<once {self._source!r}>"

    @property
    def client(self) -> MongoClient[Any]:
        """The client whose sessions can write the records."""
        return resolve_collection(self._source).database.client

    @property
    def types(self) -> CodecOptions[dict[str, Any]]:
        """The encoding of the records."""
        return plain_types(resolve_collection(self._source))

    @property
    def full_names(self) -> Sequence[str]:
        """Return the namespace of the records, without a server call."""
        return [resolve_collection(self._source).full_name]

    @property
    def collection(self) -> Collection[dict[str, Any]]:
        """Return the collection with majority writes. Its TTL index is created if possible now."""
        self._indexes.ensure(patiently=False)
        return self._open()

    @per_process
    def _indexes(self) -> Indexes:
        return Indexes(self._open(), [_INDEX], "the idempotency records of `once` never expire")

    def _open(self) -> Collection[dict[str, Any]]:
        given = resolve_collection(self._source)
        return with_majority(given, plain_types(given))

    def claim(self, identity: Any, owner: ObjectId) -> IdempotencyClaim:
        """Claim an id. The same owner may call again after a lost answer."""
        times = {"until": after(self.claim_ttl), "expiresAt": after(self.claim_ttl + self._keep)}
        return self._take(identity, owner, {"state": "running", **times}, None)

    def claim_done(self, identity: Any, owner: ObjectId, session: ClientSession) -> IdempotencyClaim:
        """
        Record an id as done inside a transaction, unless it runs or has run.

        If two transactions do this, one conflicts and repeats.
        """
        return self._take(identity, owner, {"state": "done", "expiresAt": after(self._keep)}, session)

    def _take(
        self, identity: Any, owner: ObjectId, state: dict[str, Any], session: ClientSession | None
    ) -> IdempotencyClaim:
        """Write by `_id` alone. A record that is still valid stays, and is returned."""
        taken = {"_id": "$_id", "owner": literal(owner), **state}
        is_free = {"$or": [_IS_NEW, _HAS_LAPSED, {"$eq": ["$owner", literal(owner)]}]}
        with suppress(DuplicateKeyError):  # another run has just created it
            found: Any = self.collection.find_one_and_update(
                {"_id": identity},
                [{"$replaceWith": {"$cond": [is_free, taken, "$$ROOT"]}}],
                upsert=True,
                return_document=ReturnDocument.AFTER,
                session=session,
            )
            if found["owner"] == owner:
                return IdempotencyClaim(owner)
            if found["state"] == "done":
                return IdempotencyClaim(result=found.get("result"), finisher=found.get("owner"))
        return IdempotencyClaim(wait=min(self.claim_ttl, _WAIT_SECONDS))

    def renew(self, identity: Any, owner: ObjectId) -> bool:
        """Renew a claim. Return False if another run has it. A claim that has just ended is not lost."""
        mine = {"_id": identity, "owner": owner, "state": "running"}
        times = {"until": after(self.claim_ttl), "expiresAt": after(self.claim_ttl + self._keep)}
        collection = self.collection
        if collection.update_one(mine, [{"$set": times}]).matched_count:
            return True
        return collection.find_one({"_id": identity, "owner": {"$ne": owner}}, {"_id": 1}) is None

    def finish(self, identity: Any, owner: ObjectId, result: str | None) -> bool:
        """Record that an id has run, with its result. Return False if its claim was lost."""
        change = [{"$set": {"state": "done", "result": literal(result), "expiresAt": after(self._keep)}}]
        return self.collection.update_one({"_id": identity, "owner": owner}, change).matched_count == 1

    def free(self, identity: Any, owner: ObjectId, session: ClientSession | None = None) -> bool:
        """Remove the record of a failed run. Return False if its claim was lost."""
        return self.collection.delete_one({"_id": identity, "owner": owner}, session=session).deleted_count == 1

    def add_result(self, identity: Any, result: str | None, session: ClientSession) -> None:
        """Add the result to a record of the same transaction."""
        self.collection.update_one({"_id": identity}, {"$set": {"result": result}}, session=session)


IDEMPOTENCY_STORES: WeakSet[IdempotencyStore] = WeakSet()
"""The stores of this process."""


@contextmanager
def renew_claim(
    store: IdempotencyStore, identity: Any, owner: ObjectId, started: float
) -> Iterator[Callable[[], None]]:
    """
    Let a thread renew a claim in the block. The yielded function stops it: a renewal in flight then changes nothing.

    Args:
        store: the record's store.
        identity: the record's `_id`.
        owner: the claim's owner.
        started: monotonic start of the claim call.
    """
    ended, period = threading.Event(), store.claim_ttl / 3

    def renew(due: float) -> None:
        while not ended.wait(max(0.0, due - time.monotonic())):
            due = time.monotonic() + period
            try:
                with pymongo.timeout(max(period, _ANSWER_SECONDS_MIN)):
                    if not store.renew(identity, owner):
                        return
            except Exception as error:  # noqa: BLE001 - the user's callable, too; without this thread the claim lapses
                logger.warning(
                    "The claim of %s could not be renewed. The renewal is tried again: %s",
                    describe_identity(identity),
                    short(error),
                    extra={"event": "mark_renewal_failed"},
                )
                due = time.monotonic() + period / 4

    threading.Thread(target=renew, args=[started + period], name="mongo_celery-once", daemon=True).start()
    try:
        yield ended.set
    finally:
        ended.set()


def describe_identity(identity: Any) -> str:
    """Describe an id for logs and errors: the task and its key, or the task's id."""
    named = isinstance(identity, dict)
    text = f"{identity['t']} for {identity['k']!r}" if named else repr(identity)
    return text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}..."
