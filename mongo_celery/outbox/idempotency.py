"""
Idempotency records: which ids have run, and which run now. One document per id.

::

    {_id, state: "running" | "done", owner, until, expiresAt, result: JSON text}

`_id` is a task's id, or `{t: task, k: key}` where `once` has a key: two tasks about one order have a record each. A
run claims its record until a time of the server's clock, and renews the claim while its function runs. A record that
is done is final, until `expiresAt` removes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from bson import ObjectId
from bson.codec_options import CodecOptions
from pymongo import MongoClient, ReturnDocument
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import DuplicateKeyError

from mongo_celery.forking import per_process
from mongo_celery.mongo.expressions import after, literal
from mongo_celery.mongo.opening import Source, plain_types, resolve_collection, with_majority
from mongo_celery.outbox.index import OutboxIndex, OutboxIndexes

_INDEX = "expires-at"
_OTHERWISE = "the idempotency records of `once` stay for ever"
_WAIT_SECONDS = 10.0

_IS_NEW = {"$eq": [{"$type": "$state"}, "missing"]}
_HAS_LAPSED = {"$and": [{"$eq": ["$state", "running"]}, {"$lte": ["$until", "$$NOW"]}]}


@dataclass(frozen=True, slots=True)
class IdempotencyClaim:
    """
    The answer to a claim on an id.

    Attributes:
        owner: of the claim; None if it was refused.
        wait: seconds after which to ask again, if another run has the id.
        result: JSON of the result, if the id has run and its result was kept.
    """

    owner: ObjectId | None = None
    wait: float | None = None
    result: str | None = None


class IdempotencyStore:
    """
    The idempotency records of one collection.

    Args:
        source: the collection, or a callable that returns it.
        keep: seconds for which a finished id is remembered.
        claim_ttl: seconds for which a run keeps duplicates away, unless it is renewed.
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
        """Whose sessions can write the records."""
        return resolve_collection(self._source).database.client

    @property
    def types(self) -> CodecOptions[dict[str, Any]]:
        """How the records are encoded."""
        return plain_types(resolve_collection(self._source))

    @property
    def full_names(self) -> Sequence[str]:
        """The namespace of the records; without a call to a server."""
        return [resolve_collection(self._source).full_name]

    @property
    def collection(self) -> Collection[dict[str, Any]]:
        """With majority writes; its TTL index exists afterwards, if it can be created now."""
        self._indexes.ensure(patiently=False)
        return self._open()

    @per_process
    def _indexes(self) -> OutboxIndexes:
        return OutboxIndexes(
            OutboxIndex(self._open(), _INDEX, [("expiresAt", 1)], _OTHERWISE, options={"expireAfterSeconds": 0})
        )

    def _open(self) -> Collection[dict[str, Any]]:
        given = resolve_collection(self._source)
        return with_majority(given, plain_types(given))

    def claim(self, identity: Any, owner: ObjectId) -> IdempotencyClaim:
        """Claim an id to run; the same owner may ask again, if it got no answer."""
        times = {"until": after(self.claim_ttl), "expiresAt": after(self.claim_ttl + self._keep)}
        return self._take(identity, owner, {"state": "running", **times}, None)

    def claim_done(self, identity: Any, owner: ObjectId, session: ClientSession) -> IdempotencyClaim:
        """
        Record an id as done inside a transaction, unless it runs or has run.

        Of two transactions one conflicts, and is repeated.
        """
        return self._take(identity, owner, {"state": "done", "expiresAt": after(self._keep)}, session)

    def _take(
        self, identity: Any, owner: ObjectId, state: dict[str, Any], session: ClientSession | None
    ) -> IdempotencyClaim:
        """Write by `_id` alone: a record that still counts stays as it is, and is what comes back."""
        taken = {"_id": "$_id", "owner": literal(owner), **state}
        is_free = {"$or": [_IS_NEW, _HAS_LAPSED, {"$eq": ["$owner", literal(owner)]}]}
        with suppress(DuplicateKeyError):  # another run has just made it
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
                return IdempotencyClaim(result=found.get("result"))
        return IdempotencyClaim(wait=min(self.claim_ttl, _WAIT_SECONDS))

    def renew(self, running: Sequence[tuple[Any, ObjectId]]) -> set[ObjectId]:
        """
        Renew claims, all by one write.

        Args:
            running: ids with the owners of their claims.

        Returns:
            The owners whose claims are lost: another run has them. A claim that has ended meanwhile is not lost.
        """
        identities, owners = [identity for identity, _ in running], [owner for _, owner in running]
        mine = {"_id": {"$in": identities}, "owner": {"$in": owners}, "state": "running"}
        times = {"until": after(self.claim_ttl), "expiresAt": after(self.claim_ttl + self._keep)}
        collection = self.collection
        if collection.update_many(mine, [{"$set": times}]).matched_count == len(owners):
            return set()
        others = {"_id": {"$in": identities}, "owner": {"$nin": owners}}
        taken = [found["_id"] for found in collection.find(others, {"_id": 1})]
        return {owner for identity, owner in running if identity in taken}

    def finish(self, identity: Any, owner: ObjectId, result: str | None) -> bool:
        """Record that an id has run, and with which result; False if its claim was lost."""
        change = [{"$set": {"state": "done", "result": literal(result), "expiresAt": after(self._keep)}}]
        return self.collection.update_one({"_id": identity, "owner": owner}, change).matched_count == 1

    def free(self, identity: Any, owner: ObjectId, session: ClientSession | None = None) -> None:
        """Remove the record of a run that has failed."""
        self.collection.delete_one({"_id": identity, "owner": owner}, session=session)

    def add_result(self, identity: Any, result: str | None, session: ClientSession) -> None:
        """Add the result to a record of the same transaction."""
        self.collection.update_one({"_id": identity}, {"$set": {"result": result}}, session=session)


IDEMPOTENCY_STORES: WeakSet[IdempotencyStore] = WeakSet()
"""Those of this process."""
