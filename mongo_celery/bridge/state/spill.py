"""
Stored changes: what a partition cannot run yet, with its bytes, beyond any oplog.

One document a change; its `_id` is the partition's, a slash and the change's place, so that a range of `_id` is a range
of the stream. Nothing here is guarded by an epoch, and needs none:

1. A document means nothing by itself. What may be run from here is bounded by the mark on the partition
   (`spilled.to`), which is guarded, and by how far the term has read (`reach`).
2. An insert that finds its document raises its `term`; so a term whose inserts were all acknowledged knows that no
   older one can remove what it relies on. The bytes are those of the first reading that was stored, or of the last one
   where it was refused or they lie in parts; never of two.
3. A removal takes what is committed, and only what no later term has inserted or raised: a process that wakes up late
   removes nothing that a rewind has made somebody store again.

| field | |
|---|---|
| `term` | the version of the lease that inserted it, or met it last |
| `hash` | of the partition key, as a signed number of 64 bits |
| `raw`, `zip` | the event as the server sent it; whether it is compressed |
| `parts`, `digest` | of an event that fits into no document: its bytes lie in so many documents behind it |
| `part` | the number of such a document, from 1 |
| `token` | the resume token, where `_id` and bytes do not tell it: they cannot be read, or it is long |
| `refusal` | why it is not given to its handler; whether that halts, and lasts |
| `refused` | set where it was ever refused: it stays until no term reads it again, and says where it is done |
| `size` | bytes of the document |

What is read here decides what runs, so it is read in a causally consistent session that has seen the partition's image
(the caller's): else a deposed primary could say that there is nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bson.int64 import Int64
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import BulkWriteError, OperationFailure

from mongo_celery.bridge.existing import END, place_of
from mongo_celery.bridge.state.stored import (
    Amount,
    Document,
    StoredChange,
    amount_of,
    bulks_of,
    change_in,
    documents_of,
    id_of,
    ids_between,
    ids_under,
    part_ids,
    past,
    place_in,
    replacing,
)
from mongo_celery.mongo.table import Table, call_timeout, present_in

__all__ = ["REMOVED", "Amount", "Spill", "StoredChange", "place_of"]

REMOVED = 2000
"""How many documents one call removes: some hundredths of a second where a machine has nothing else to do."""

EVERYTHING = END
"""A place after that of every change."""

_SUMMED = 500  # at a time: each may have megabytes, which the server reads for its size
_ROUNDS = 3
_SLASHES = 3  # of a partition's `_id`


class Spill:
    """
    The stored changes of one bridge.

    Args:
        collection: where, with majority writes and majority reads.
        bridge: its name.
        ttl: seconds of the right that calls must not outlive.
    """

    def __init__(self, collection: Collection[dict[str, Any]], bridge: str, ttl: float) -> None:
        self._table = Table(collection, call_timeout(ttl))
        self._bridge = bridge

    # -- writing -----------------------------------------------------------------------------------

    def insert(
        self,
        partition_id: str,
        changes: Iterable[StoredChange],
        version: int,
        session: ClientSession | None = None,
    ) -> Amount:
        """
        Store changes of one partition; afterwards each is there, by majority, and no older term can remove it.

        Repeating it is harmless. One that is there already keeps its bytes, unless it was refused.

        Returns:
            What was not there before.

        Raises:
            PyMongoError: any of them may be missing; nothing may rely on those that are there.
        """
        added = Amount()
        for bulk in bulks_of(documents_of(partition_id, changes, version)):
            added += self._insert(bulk, version, session)
        return added

    def _insert(self, documents: list[Document], version: int, session: ClientSession | None) -> Amount:
        missing = {document["_id"]: document for document in documents}
        added = Amount()
        for _ in range(_ROUNDS):
            present = self._insert_new(list(missing.values()), session)
            added += amount_of(document for name, document in missing.items() if name not in present)
            missing = {name: missing[name] for name in present}
            if not missing or self._keep(missing, version, session):
                return added
        raise OperationFailure(
            "Stored changes were removed again and again while they were inserted, or are a later term's; nothing may "
            "rely on them."
        )

    def _insert_new(self, documents: list[Document], session: ClientSession | None) -> set[str]:
        """The `_id`s that were there already."""
        try:
            with self._table.limit():
                self._table.collection.insert_many(documents, ordered=False, session=session)
        except BulkWriteError as error:
            return {documents[place]["_id"] for place in present_in(error)}
        return set()

    def _keep(self, present: Mapping[str, Document], version: int, session: ClientSession | None) -> bool:
        """
        Raise the term of documents that are there; False where one of them no longer is.

        A change in parts is replaced: another reading may have left it with parts that these are not, whose terms an
        older term could still be allowed to remove. So is one that was refused: the cause may have been cured.
        """
        collection, ids = self._table.collection, sorted(present)
        with self._table.limit():
            kept_as_is = {"_id": {"$in": ids}, "parts": None, "refusal": None}
            raised = collection.update_many(kept_as_is, {"$max": {"term": Int64(version)}}, session=session)
            kept = raised.matched_count
            if kept == len(ids):
                return True
            others = {"$or": [{"parts": {"$gt": 0}}, {"refusal": {"$ne": None}}]}
            for found in collection.find({"_id": {"$in": ids}, **others}, {"_id": 1}, session=session):
                mine = {"_id": found["_id"], "term": {"$lte": Int64(version)}, **others}
                update = replacing(present[found["_id"]])
                kept += collection.update_one(mine, update, session=session).matched_count
            return kept == len(ids)

    def replace(self, partition_id: str, changes: Iterable[StoredChange], version: int) -> None:
        """
        Put the bytes of these changes in the place of those that are stored, and damaged; never of a later term's.

        Raises:
            PyMongoError: any of them may be as before.
        """
        for document in documents_of(partition_id, changes, version):
            mine = {"_id": document["_id"], "term": {"$lte": Int64(version)}}
            with self._table.limit():
                self._table.collection.update_one(mine, replacing(document), upsert="part" in document)

    def remove(self, partition_id: str, committed: str, version: int, *, limit: int = REMOVED) -> int:
        """
        Remove what is committed: up to a token of a majority image, never what a later term has stored.

        Args:
            committed: comparable part of the committed token; nothing is committed where it is empty. `EVERYTHING` for
                a partition that is no longer in force.
            version: that of the term.
            limit: how many documents one call takes at most: where there may be more, it has to be made again.

        Returns:
            How many documents; less than `limit` when all is removed.
        """
        if not committed:
            return 0
        return self._delete(ids_between(partition_id, "", committed), version, limit)

    def _delete(self, ids: Mapping[str, str], version: int, limit: int) -> int:
        """One deletion of all could take longer than a call may; the index alone says where a part of it ends."""
        with self._table.limit():
            last = self._at(ids, limit)
            some = ids if last is None else {"$gt": ids["$gt"], "$lte": last}
            query = {"_id": some, "term": {"$lte": Int64(version)}}
            return self._table.collection.delete_many(query).deleted_count

    def remove_delivered(self, partition_id: str, after: str, committed: str, version: int) -> Iterator[int]:
        """Remove what `remove` does, but no change that was ever refused; yield how many documents, call by call."""
        for some in self._slices(ids_between(partition_id, after, committed)):
            query = {"_id": some, "refused": None, "term": {"$lte": Int64(version)}}
            with self._table.limit():
                removed = self._table.collection.delete_many(query).deleted_count
            yield removed

    # -- reading -----------------------------------------------------------------------------------

    def read(
        self,
        partition_id: str,
        after: str,
        until: str,
        *,
        limit: int,
        max_bytes: int,
        inclusive: bool = True,
        session: ClientSession | None = None,
    ) -> list[StoredChange]:
        """
        The first stored changes of a partition behind a place, in order: at least one where there is one.

        Args:
            after: comparable part of a token; empty for the beginning.
            until: that of the last one that may be read; with `inclusive=False` it is the first one that may not.
            limit: how many at most.
            max_bytes: of their events; the first may have more.
        """
        query = {"_id": ids_between(partition_id, after, until, inclusive=inclusive), "part": None}
        changes: list[StoredChange] = []
        size = 0
        with self._table.limit(), self._table.collection.find(query, session=session).sort("_id", 1) as found:
            for document in found.limit(limit):
                change = self._change(document, session)
                if change is None:
                    continue
                size += len(change.raw)
                if changes and size > max_bytes:
                    break
                changes.append(change)
        return changes

    def first(self, partition_id: str, after: str, until: str) -> str | None:
        """Return the comparable part of the token of the first stored change after a place; by the index alone."""
        found = self._at(ids_between(partition_id, after, until), 1)
        return None if found is None else place_in(partition_id, found)

    def fetch(
        self, partition_id: str, data: Sequence[str], session: ClientSession | None = None
    ) -> dict[str, StoredChange]:
        """Stored changes by the comparable parts of their tokens; those that are not there are left out."""
        ids = {id_of(partition_id, each): each for each in data}
        with self._table.limit(), self._table.collection.find({"_id": {"$in": list(ids)}}, session=session) as found:
            changes = {ids[document["_id"]]: self._change(document, session) for document in found}
        return {each: change for each, change in changes.items() if change is not None}

    def _change(self, head: Mapping[str, Any], session: ClientSession | None) -> StoredChange | None:
        """None where it is gone: it was committed meanwhile, and removed."""
        now: Mapping[str, Any] | None = head
        while now is not None and now.get("parts") and now.get("digest"):
            wanted = {"_id": {"$in": part_ids(now)}}
            parts = list(self._table.collection.find(wanted, session=session).sort("_id", 1))
            if len(parts) == now["parts"]:
                return change_in(now, parts)
            seen = now["digest"]
            now = self._table.collection.find_one({"_id": now["_id"]}, session=session)
            if now is not None and now.get("digest") == seen:
                return change_in(now, parts)
        return None if now is None else change_in(now)

    def amount(self, partition_id: str) -> Amount:
        """How much is stored of a partition, committed or not. Reads all of it, in as many calls as it takes."""
        total = Amount()
        group = {"_id": None, "count": {"$sum": {"$cond": ["$part", 0, 1]}}, "size": {"$sum": "$size"}}
        for some in self._slices(ids_under(partition_id)):
            for row in self._table.aggregate([{"$match": {"_id": some}}, {"$group": group}]):
                total += Amount(row["count"], row["size"])
        return total

    def undeliverable(self, partition_id: str, after: str, until: str) -> Iterator[list[str]]:
        """Yield the places of changes that were ever refused, behind a place up to another one, call by call."""
        for some in self._slices(ids_between(partition_id, after, until)):
            query = {"_id": some, "part": None, "$or": [{"refused": True}, {"refusal": {"$ne": None}}]}
            yield [place_in(partition_id, each["_id"]) for each in self._table.find(query, {"_id": 1})]

    def _slices(self, ids: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
        """Yield a range of `_id`s in parts that one call can read."""
        last: str | None = ids["$gt"]
        while last is not None:
            behind = {**ids, "$gt": last}
            with self._table.limit():
                last = self._at(behind, _SUMMED)
            yield behind if last is None else {"$gt": behind["$gt"], "$lte": last}

    def next_partition(self, after: str | None = None) -> str | None:
        """The `_id` of the first partition behind another one that has stored changes, or of what is none; or None."""
        ids = ids_under(self._bridge)
        if after is not None:  # partitions may lie behind the `_id` of what is none
            ids["$gt"] = past(after) if after.count("/") == _SLASHES else after
        query = {"_id": ids}
        found = self._table.find_one(query, {"_id": 1}, sort=[("_id", 1)])
        return None if found is None else "/".join(found["_id"].split("/")[:4])

    def _at(self, ids: Mapping[str, str], number: int) -> str | None:
        """The `_id` of the document with this number in a range, from 1, by the index alone."""
        found = self._table.collection.find({"_id": ids}, {"_id": 1}).sort("_id", 1)
        document = next(found.skip(number - 1).limit(1), None)
        return None if document is None else str(document["_id"])

    def count(self, partition_id: str, until: str, session: ClientSession | None = None) -> int:
        """At most how many changes are stored of a partition up to a place: their parts count too."""
        with self._table.limit():
            ids = ids_between(partition_id, "", until)
            return self._table.collection.count_documents({"_id": ids}, session=session)
