"""
Tombstones: what a fenced delete leaves behind, so that an older execution cannot revive the document.

They live in the sibling collection ``<collection>.fence_tombstones``, one per deleted `_id`, with the
stamps that the document had (of all keys) and the deleter's::

    {_id: <the target's _id>, _fence: {...}, expireAt: <server's time + ttl>, writes: <number>}

Why a sibling. A stub in the target's own place would be atomic by itself, but every reader would see it, a
unique index would take its missing field for a null (two deletes, E11000), and a validator would refuse it.

Why transactions. Two documents cannot be checked and written at once without one. "Tombstone first, then
delete" leaves the upsert's side open: it looks, finds none, and inserts after the delete. Reading the
tombstone inside a transaction is not enough either: snapshots let the upsert commit on what it read (write
skew). So:

T1. Whoever creates or removes a target through a fence first *writes* the tombstone's slot in the same
    transaction, even if none is there. Two such transactions on one `_id` therefore conflict, and one of
    them starts again and sees what the other did.
T2. A transaction settles the slot: a delete leaves the merged stamps, a creation moves them into the
    document and removes the slot, so a tombstone exists only where no fenced document does.
T3. So at every moment the newest stamps of an `_id` are in the document or in its tombstone, never only in
    a client.

A crash at any point leaves a transaction that the server aborts: target, slot and stamps stay as they were.
Until it does (`transactionLifetimeLimitSeconds`, 60 s), others that create or delete this one `_id` are
refused by the server and try again.
Updates and replacements of documents that exist need none of this: document and stamp are one.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from pymongo import IndexModel, ReturnDocument, UpdateOne
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.mongo_client import MongoClient

from mongo_celery.bridge.fenced.fence import FIELD
from mongo_celery.mongo.identity import id_key
from mongo_celery.mongo.table import create_indexes

SUFFIX = ".fence_tombstones"
"""A target's tombstones are in the collection of its name and this suffix; change streams leave it out."""

TTL_MS = 7 * 24 * 60 * 60 * 1000
"""How long a delete is remembered: far longer than any execution or queued message lives."""

_prepared: weakref.WeakKeyDictionary[MongoClient[Any], set[str]] = weakref.WeakKeyDictionary()

Stamps = Mapping[str, Any]


class Tombstones:
    """
    The tombstones of one collection. Every method but `prepare` and `read` runs in the caller's transaction.

    Args:
        target: the collection that they belong to, with its concerns.
    """

    def __init__(self, target: Collection[Any]) -> None:
        self._collection = target.database.get_collection(
            target.name + SUFFIX,
            codec_options=target.codec_options,
            write_concern=target.write_concern,
            read_preference=target.read_preference,
        )

    def prepare(self) -> None:
        """
        Create the TTL index, once per client and process.

        Always before a transaction touches the collection: later, an index built outside of it
        would wait for the lock that this very transaction holds.
        """
        done = _prepared.setdefault(self._collection.database.client, set())
        if self._collection.full_name not in done:
            create_indexes(self._collection, [IndexModel("expireAt", expireAfterSeconds=0)])
            done.add(self._collection.full_name)

    def take_slots(self, ids: Sequence[Any], session: ClientSession) -> list[Stamps | None]:
        """Write the slots of `ids` (T1) and return the stamps found there, None for no tombstone."""
        touch = {"$inc": {"writes": 1}}
        if len(ids) == 1:
            found: Any = self._collection.find_one_and_update(
                {"_id": {"$eq": ids[0]}},
                touch,
                {FIELD: 1},
                upsert=True,
                return_document=ReturnDocument.AFTER,
                session=session,
            )
            return [found.get(FIELD)]
        self._collection.bulk_write(
            [UpdateOne({"_id": {"$eq": i}}, touch, upsert=True) for i in ids], ordered=False, session=session
        )
        return self.read(ids, session)

    def settle_slots(self, outcome: Sequence[tuple[Any, Stamps | None]], session: ClientSession) -> None:
        """For each id: leave a tombstone with these stamps, or, where they are None, none (T2)."""
        gone = [i for i, stamps in outcome if stamps is None]
        if gone:
            self._collection.delete_many({"_id": {"$in": gone}}, session=session)
        kept = [UpdateOne({"_id": {"$eq": i}}, self._tombstone(s)) for i, s in outcome if s is not None]
        if kept:
            self._collection.bulk_write(kept, ordered=False, session=session)

    def read(self, ids: Sequence[Any], session: ClientSession | None) -> list[Stamps | None]:
        """The stamps of `ids`, None for no tombstone."""
        if session is not None and session.in_transaction:
            self.prepare()
        return read_stamps(self._collection, ids, session)

    @staticmethod
    def _tombstone(stamps: Stamps) -> list[Mapping[str, Any]]:
        return [{"$set": {FIELD: {"$literal": dict(stamps)}, "expireAt": {"$add": ["$$NOW", TTL_MS]}}}]


def read_stamps(
    collection: Collection[Any],
    ids: Sequence[Any],
    session: ClientSession | None,
    *,
    bare: Stamps | None = None,
) -> list[Stamps | None]:
    """The ``_fence`` of each of `ids`: None where there is no document, `bare` where it has no stamp."""
    found = list(collection.find({"_id": {"$in": list(ids)}}, {FIELD: 1}, session=session))
    if len(ids) == 1:
        return [document.get(FIELD, bare) for document in found] or [None]
    codec = collection.codec_options
    asked = [id_key(i, codec) for i in ids]
    stamps = {id_key(document["_id"], codec): document.get(FIELD, bare) for document in found}
    if stamps.keys() <= set(asked):
        return [stamps.get(key) for key in asked]
    # The collection's collation holds equal what differs here, and only the server knows which of them.
    return [
        stamps[key] if key in stamps else read_stamps(collection, [i], session, bare=bare)[0]
        for i, key in zip(ids, asked, strict=True)
    ]
