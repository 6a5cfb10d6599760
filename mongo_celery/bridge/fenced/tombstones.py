"""
Tombstones of fenced deletes. They stop an older execution from reviving the document.

They are in the sibling collection ``<collection>.fence_tombstones``, one per deleted `_id`, with all stamps of the
document and the deleter's::

    {_id: <the target's _id>, _fence: {...}, expireAt: <server's time + ttl>, writes: <number>}

Reason for a separate collection: a stub in the target's place would be atomic, but every reader would see it, a unique
index would take its missing field for a null (two deletes, E11000), and a validator would refuse it.

Reason for transactions: two documents cannot be checked and written atomically without one. "Tombstone first, then
delete" leaves a gap for the upsert: it finds no tombstone, and inserts after the delete. Reading the tombstone in a
transaction is not enough either: snapshots let the upsert commit on what it read (write skew). So:

T1. Every fenced create or delete first *writes* the tombstone's slot in the same transaction, even if there is no
    tombstone. Two such transactions on one `_id` conflict, so one of them restarts and sees the other's result.
T2. A transaction settles the slot. A delete leaves the merged stamps. A creation moves them into the document and
    removes the slot. So a tombstone exists only if there is no fenced document.
T3. So the newest stamps of an `_id` are always in the document or its tombstone, never only in a client.

A crash at any point leaves a transaction that the server aborts: target, slot and stamps stay unchanged. Until then
(`transactionLifetimeLimitSeconds`, 60 s) the server refuses other creates and deletes of this `_id`, which are tried
again. Updates and replacements of existing documents need no transaction: the stamp is part of the document.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from pymongo import IndexModel, ReturnDocument, UpdateOne

from mongo_celery.bridge.fenced.fence import FIELD
from mongo_celery.mongo.identity import id_key
from mongo_celery.mongo.steps import AnyCollection, Session, Steps
from mongo_celery.mongo.table import create_indexes

SUFFIX = ".fence_tombstones"
"""Suffix of a target's tombstone collection. Change streams exclude these collections."""

TTL_MS = 7 * 24 * 60 * 60 * 1000
"""How long a delete is remembered: far longer than any execution or queued message lives."""

_prepared: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()

Stamps = Mapping[str, Any]


class Tombstones:
    """
    The tombstones of one collection, as steps (`mongo.steps`). All methods except `prepare` and `read` run in the
    caller's transaction.

    Args:
        target: the collection of the documents, with its concerns.
    """

    def __init__(self, target: AnyCollection) -> None:
        self._collection: Any = target.database.get_collection(
            target.name + SUFFIX,
            codec_options=target.codec_options,
            write_concern=target.write_concern,
            read_preference=target.read_preference,
        )

    def prepare(self) -> Steps[None]:
        """
        Create the TTL index, once per client and process.

        Call it before a transaction touches the collection. Later, an index built outside the transaction would wait
        for the transaction's own lock.
        """
        done = _prepared.setdefault(self._collection.database.client, set())
        if self._collection.full_name not in done:
            yield from create_indexes(self._collection, [IndexModel("expireAt", expireAfterSeconds=0)])
            done.add(self._collection.full_name)

    def take_slots(self, ids: Sequence[Any], session: Session) -> Steps[list[Stamps | None]]:
        """Write the slots of `ids` (T1) and return their stamps, or None for no tombstone."""
        touch = {"$inc": {"writes": 1}}
        if len(ids) == 1:
            found: Any = yield self._collection.find_one_and_update(
                {"_id": {"$eq": ids[0]}},
                touch,
                {FIELD: 1},
                upsert=True,
                return_document=ReturnDocument.AFTER,
                session=session,
            )
            return [found.get(FIELD)]
        yield self._collection.bulk_write(
            [UpdateOne({"_id": {"$eq": i}}, touch, upsert=True) for i in ids], ordered=False, session=session
        )
        return (yield from self.read(ids, session))

    def settle_slots(self, outcome: Sequence[tuple[Any, Stamps | None]], session: Session) -> Steps[None]:
        """Store a tombstone with these stamps for each id. If the stamps are None, remove the tombstone (T2)."""
        gone = [i for i, stamps in outcome if stamps is None]
        if gone:
            yield self._collection.delete_many({"_id": {"$in": gone}}, session=session)
        kept = [UpdateOne({"_id": {"$eq": i}}, self._tombstone(s)) for i, s in outcome if s is not None]
        if kept:
            yield self._collection.bulk_write(kept, ordered=False, session=session)

    def read(self, ids: Sequence[Any], session: Session | None) -> Steps[list[Stamps | None]]:
        """Return the stamps of `ids`, or None for no tombstone."""
        if session is not None and session.in_transaction:
            yield from self.prepare()
        return (yield from read_stamps(self._collection, ids, session))

    @staticmethod
    def _tombstone(stamps: Stamps) -> list[Mapping[str, Any]]:
        return [{"$set": {FIELD: {"$literal": dict(stamps)}, "expireAt": {"$add": ["$$NOW", TTL_MS]}}}]


def read_stamps(
    collection: AnyCollection,
    ids: Sequence[Any],
    session: Session | None,
    *,
    bare: Stamps | None = None,
) -> Steps[list[Stamps | None]]:
    """Return the ``_fence`` of each document: None if there is no document, `bare` if it has no stamp."""
    whose: Any = collection
    found = yield whose.find({"_id": {"$in": list(ids)}}, {FIELD: 1}, session=session).to_list()
    if len(ids) == 1:
        return [document.get(FIELD, bare) for document in found] or [None]
    codec = collection.codec_options
    asked = [id_key(i, codec) for i in ids]
    stamps = {id_key(document["_id"], codec): document.get(FIELD, bare) for document in found}
    if stamps.keys() <= set(asked):
        return [stamps.get(key) for key in asked]
    # The collection's collation may treat different ids as equal, and only the server knows which.
    for i, key in zip(ids, asked, strict=True):
        if key not in stamps:
            [stamps[key]] = yield from read_stamps(collection, [i], session, bare=bare)
    return [stamps[key] for key in asked]
