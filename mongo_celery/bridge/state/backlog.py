"""
Stored changes: what a partition cannot run yet, with its bytes, beyond any oplog.

One document a change. Its `_id` is the partition's, a slash and the change's place, so that a range of `_id` is a range
of the stream. Nothing here is guarded by a term, and needs none:

1. A document means nothing by itself. What may be run from here is bounded by the mark on the partition
   (`spilled.to`), which is guarded, and by how far the term has read (`reach`).
2. An insert that finds its document raises its `term`. So a term whose inserts were all acknowledged knows that no
   older one can remove what it relies on. The bytes are those of the first reading that was stored, or of the last one
   where it was refused.
3. A removal takes what is committed, and only what no later term has inserted or raised: a process that wakes up late
   removes nothing that a rewind has made somebody store again.

| field | |
|---|---|
| `term` | the term that inserted it, or met it last |
| `hash` | of the partition key, as a signed number of 64 bits |
| `raw`, `zip` | the event as the server sent it; whether it is compressed |
| `token` | the resume token, where `_id` and bytes do not tell it: they cannot be read, or it is long |
| `refusal` | why it is not given to its handler; whether that halts, and lasts |
| `refused` | set where it was ever refused: it stays until no term reads it again, and says where it is done |
| `size` | bytes of the event |

What is read here decides what runs, so it is read in a causally consistent session that has seen the partition's image
(the caller's): else a deposed primary could say that there is nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import bson
from bson.binary import Binary
from bson.int64 import Int64
from pymongo.client_session import ClientSession
from pymongo.errors import BulkWriteError, OperationFailure, PyMongoError

from mongo_celery.bridge.change import describe, read_token, token_data
from mongo_celery.bridge.existing import END, token_place
from mongo_celery.bridge.state.state_collection import StateCollection, ids_under, range_end, to_signed, to_unsigned
from mongo_celery.bridge.window import Refusal
from mongo_celery.mongo.table import find_duplicates

EVERYTHING = END
"""A place after that of every change."""

_AT_A_TIME = 1000  # documents, some of which have megabytes
_OUTLINE = ("hash", "size", "refusal", "token")
_ROUNDS = 3
_SLASHES = 3  # of a partition's `_id`

Document = dict[str, Any]


class Backlog(StateCollection):
    """The stored changes of one bridge."""

    # -- writing -----------------------------------------------------------------------------------

    def insert(
        self,
        partition_id: str,
        changes: Iterable[StoredChange],
        term: int,
        session: ClientSession | None = None,
    ) -> None:
        """
        Store changes of one partition. Afterwards each is there, by majority, and no older term can remove it.

        Repeating it is harmless. One that is there already keeps its bytes, unless it was refused.

        Raises:
            PyMongoError: any of them may be missing. Nothing may rely on those that are there.
        """
        for bulk in split_bulks(build_documents(partition_id, changes, term)):
            self._insert({document["_id"]: document for document in bulk}, term, session)

    def _insert(self, missing: dict[str, Document], term: int, session: ClientSession | None) -> None:
        for _ in range(_ROUNDS):
            present = self._insert_new(list(missing.values()), session)
            missing = {name: missing[name] for name in present}
            if not missing or self._keep(missing, term, session):
                return
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
            return {documents[place]["_id"] for place in find_duplicates(error)}
        return set()

    def _keep(self, present: Mapping[str, Document], term: int, session: ClientSession | None) -> bool:
        """
        Raise the term of documents that are there. False where one of them no longer is.

        A change that was refused is replaced: the cause may have been cured.
        """
        collection, ids = self._table.collection, sorted(present)
        with self._table.limit():
            kept_as_is = {"_id": {"$in": ids}, "refusal": None}
            raised = collection.update_many(kept_as_is, {"$max": {"term": Int64(term)}}, session=session)
            kept = raised.matched_count
            if kept == len(ids):
                return True
            refused = {"refusal": {"$ne": None}}
            for found in collection.find({"_id": {"$in": ids}, **refused}, {"_id": 1}, session=session):
                mine = {"_id": found["_id"], "term": {"$lte": Int64(term)}, **refused}
                update = build_replacement(present[found["_id"]])
                kept += collection.update_one(mine, update, session=session).matched_count
            return kept == len(ids)

    def remove(self, partition_id: str, committed: str, passed: str, term: int) -> Iterator[int]:
        """
        Remove what is done of a partition, and never what a later term has stored. Yield how many, call by call.

        An undeliverable change that a term may read again stays: it says in which partition the change is done.

        Args:
            committed: comparable part of the committed token of a majority image. Nothing is committed where it is
                empty. `EVERYTHING` for a partition that is no longer in force.
            passed: the same, no further than the stored watermark: up to there no change is read again.
            term: the present one.
        """
        over: list[dict[str, Any]] = [{"refused": None}]
        if passed:
            over.append({"_id": backlog_range(partition_id, "", passed)})
        for some in self._slices(backlog_range(partition_id, "", committed)) if committed else ():
            yield self._remove_some({"_id": some, "term": {"$lte": Int64(term)}, "$or": over})

    def _remove_some(self, query: Mapping[str, Any]) -> int:
        with self._table.limit():
            return self._table.collection.delete_many(query).deleted_count

    # -- reading -----------------------------------------------------------------------------------

    def read(self, partition_id: str, after: str, until: str, limit: int) -> list[StoredChange]:
        """
        Return the first stored changes of a partition behind a place, in order.

        Args:
            after: comparable part of a token. Empty for the beginning.
            until: that of the last one that may be read.
            limit: how many at most.
        """
        query = {"_id": backlog_range(partition_id, after, until)}
        with self._table.limit(), self._table.collection.find(query).sort("_id", 1) as found:
            return [parse_change(document) for document in found.limit(limit)]

    def outline(
        self, partition_id: str, after: str, until: str, limit: int, session: ClientSession | None = None
    ) -> list[StoredChange]:
        """Do as `read`, without the bytes of the events."""
        query = {"_id": backlog_range(partition_id, after, until)}
        with self._table.limit():
            found = self._table.collection.find(query, dict.fromkeys(_OUTLINE, 1), session=session)
            return [parse_outline(document) for document in found.sort("_id", 1).limit(limit)]

    def first(self, partition_id: str, after: str, until: str) -> str | None:
        """Return the comparable part of the token of the first stored change after a place. By the index alone."""
        found = self._at(backlog_range(partition_id, after, until), 1)
        return None if found is None else parse_place(partition_id, found)

    def last(self, partition_id: str) -> str:
        """Return the place of the last stored change of a partition. Empty without one."""
        found = self._table.find_one({"_id": ids_under(partition_id)}, {"_id": 1}, sort=[("_id", -1)])
        return "" if found is None else parse_place(partition_id, found["_id"])

    def fetch(self, partition_id: str, data: Sequence[str]) -> dict[str, StoredChange]:
        """Stored changes by the comparable parts of their tokens. Those that are not there are left out."""
        ids = {backlog_id(partition_id, each): each for each in data}
        with self._table.limit(), self._table.collection.find({"_id": {"$in": list(ids)}}) as found:
            return {ids[document["_id"]]: parse_change(document) for document in found}

    def undeliverable(self, partition_id: str, after: str, until: str) -> Iterator[list[str]]:
        """Yield the places of changes that were ever refused, behind a place up to another one, call by call."""
        for some in self._slices(backlog_range(partition_id, after, until)):
            query = {"_id": some, "$or": [{"refused": True}, {"refusal": {"$ne": None}}]}
            yield [parse_place(partition_id, each["_id"]) for each in self._table.find(query, {"_id": 1})]

    def _slices(self, ids: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
        """Yield a range of `_id`s in parts that one call can read."""
        last: str | None = ids["$gt"]
        while last is not None:
            behind = {**ids, "$gt": last}
            with self._table.limit():
                last = self._at(behind, _AT_A_TIME)
            yield behind if last is None else {"$gt": behind["$gt"], "$lte": last}

    def next_partition(self, after: str | None = None) -> str | None:
        """The `_id` of the first partition behind another one that has stored changes, or of what is none. Or None."""
        ids = ids_under(self._bridge)
        if after is not None:  # partitions may lie behind the `_id` of what is none
            ids["$gt"] = range_end(after) if after.count("/") == _SLASHES else after
        query = {"_id": ids}
        found = self._table.find_one(query, {"_id": 1}, sort=[("_id", 1)])
        return None if found is None else "/".join(found["_id"].split("/")[:4])

    def _at(self, ids: Mapping[str, str], number: int) -> str | None:
        """The `_id` of the document with this number in a range, from 1, by the index alone."""
        found = self._table.collection.find({"_id": ids}, {"_id": 1}).sort("_id", 1)
        document = next(found.skip(number - 1).limit(1), None)
        return None if document is None else str(document["_id"])

    def count(self, partition_id: str, after: str, until: str) -> int:
        """Return how many changes are stored of a partition between two places."""
        with self._table.limit():
            return self._table.collection.count_documents({"_id": backlog_range(partition_id, after, until)})

    def size(self, enough: int) -> int:
        """
        Return the bytes of what is stored: of all that is in the collection, while that is no more than `enough`.

        Beyond, what other bridges of this state database have there does not count, unless what this one has is too
        much to be read within the time of a call.
        """
        with self._table.limit():
            found = self._table.collection.database.command("collStats", self._table.collection.name)
        whole, mine = int(found.get("size", 0)), ids_under(self._bridge)
        if whole <= enough:
            return whole
        others = [{"_id": {"$lte": mine["$gt"]}}, {"_id": {"$gte": mine["$lt"]}}]
        if self._table.find_one({"$or": others}, {"_id": 1}) is None:
            return whole
        bytes_ = {"$group": {"_id": None, "bytes": {"$sum": {"$bsonSize": "$$ROOT"}}}}
        try:
            return sum(int(row["bytes"]) for row in self._table.aggregate([{"$match": {"_id": mine}}, bytes_]))
        except PyMongoError as error:
            if not error.timeout:
                raise
            return whole


_ZIPPED_FROM = 1024
_WORTH_IT = 0.9
_SHOWN_CHARS = 80
_DOCUMENT_BYTES = (16 << 20) - (16 << 10)
_BULK_BYTES = 4 << 20
_BULK_DOCUMENTS = 1000
_OF_A_KIND = ("zip", "token", "refusal")
"""Fields that one change has and another has not."""


@dataclass(frozen=True, slots=True)
class StoredChange:
    """
    One change as it is stored.

    Attributes:
        data: comparable part of its resume token.
        raw: the event's bytes. Empty where they were not read, or are damaged, and then there is a refusal.
        hash: of its partition key, from 0 to 2^64 - 1.
        refusal: why it is not given to its handler. None for all others.
        token: the whole resume token, where `raw` may not give it, and where it is long. None for all others.
        size: bytes of the event, as its document says; 0 before it is stored.
    """

    data: str
    raw: bytes = b""
    hash: int = 0
    refusal: Refusal | None = None
    token: Mapping[str, Any] | None = None
    size: int = 0


# -- places ----------------------------------------------------------------------------------------


def backlog_id(partition_id: str, data: str) -> str:
    """Return the `_id` of a change's document, by the comparable part of its token or its place."""
    return f"{partition_id}/{token_place(data)}"


def parse_place(partition_id: str, document_id: str) -> str:
    """Return the place of a change in the `_id` of its document."""
    return document_id[len(partition_id) + 1 :]


def backlog_range(partition_id: str, after: str, until: str) -> dict[str, str]:
    """Match the `_id`s of a partition after a token or place, up to another one."""
    return {"$gt": backlog_id(partition_id, after), "$lte": backlog_id(partition_id, until)}


# -- documents -------------------------------------------------------------------------------------


def build_documents(partition_id: str, changes: Iterable[StoredChange], term: int) -> Iterator[Document]:
    """Yield the documents of some changes."""
    bridge, handler, partitioning, index = partition_id.split("/")
    where = {"bridge": bridge, "handler": handler, "partitioningTerm": Int64(partitioning), "partition": int(index)}
    for change in changes:
        head: Document = {
            "_id": backlog_id(partition_id, change.data),
            **where,
            "term": Int64(term),
            "hash": Int64(to_signed(change.hash)),
            "size": len(change.raw),
        }
        document = {**head, **_rare(change), **pack_event(change.raw)}
        if len(document["raw"]) > _BULK_BYTES and len(bson.encode(document)) > _DOCUMENT_BYTES:
            document = {**head, **_rare(_refuse_too_large(change)), "raw": Binary(b"")}
        yield document


def pack_event(raw: bytes) -> Document:
    """Return the fields that keep an event's bytes: `raw`, and `zip` where these are compressed."""
    zipped = zlib.compress(raw, 1) if len(raw) > _ZIPPED_FROM else raw
    return {"raw": Binary(zipped), "zip": True} if len(zipped) < _WORTH_IT * len(raw) else {"raw": Binary(raw)}


def unpack_event(document: Mapping[str, Any]) -> bytes:
    """
    Return the bytes that `pack_event` has kept.

    Raises:
        KeyError, TypeError, zlib.error: they are damaged.
    """
    raw = document["raw"]
    return zlib.decompress(raw) if document.get("zip") else bytes(memoryview(raw))


def split_bulks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield groups of documents for one call each."""
    bulk: list[Document] = []
    size = 0
    for document in documents:
        taken = len(document["raw"])
        if bulk and (size + taken > _BULK_BYTES or len(bulk) >= _BULK_DOCUMENTS):
            yield bulk
            bulk, size = [], 0
        bulk.append(document)
        size += taken
    if bulk:
        yield bulk


def build_replacement(document: Mapping[str, Any]) -> Document:
    """
    The update that puts one reading of a change in the place of another.

    One without bytes replaces nothing: it was read where they are damaged, and those that are there may be restored.
    """
    if not document["raw"]:
        return {"$max": {"term": document["term"]}}
    gone = {name: "" for name in _OF_A_KIND if name not in document}
    return {"$set": {name: value for name, value in document.items() if name != "_id"}, "$unset": gone}


def parse_change(head: Mapping[str, Any]) -> StoredChange:
    """
    Return the change in a document.

    One whose bytes cannot be read is refused: it halts its own partition, and nothing else. So is a document that
    nobody of ours has written.
    """
    change = parse_outline(head)
    try:
        return replace(change, raw=unpack_event(head))
    except Exception as error:  # noqa: BLE001 - whatever somebody has left there
        return refuse_damaged(head["_id"], change.token or {"_data": change.data}, f"they cannot be read ({error!r})")


def holds_token(raw: bytes, data: str) -> bool:
    """Return True if bytes are an event of the token with this comparable part."""
    try:
        return token_data(read_token(raw)) == data
    except Exception:  # noqa: BLE001 - bytes of a user, whatever they do to a decoder
        return False


def parse_outline(head: Mapping[str, Any]) -> StoredChange:
    """Return the change in a document without its bytes."""
    place = head["_id"].rpartition("/")[2]
    try:
        token, refusal = head.get("token"), head.get("refusal")
        data = token_data(token or {"_data": place})
        if token_place(data) != place:
            raise ValueError("its token is another change's")
        return StoredChange(
            data=data,
            hash=to_unsigned(head["hash"]),
            refusal=Refusal.because(**refusal) if refusal else None,
            token=token,
            size=int(head.get("size", 0)),
        )
    except Exception as error:  # noqa: BLE001 - whatever somebody has left there
        return refuse_damaged(head["_id"], {"_data": place}, f"the document cannot be read ({error!r})")


def refuse_damaged(document_id: str, token: Mapping[str, Any], damage: str) -> StoredChange:
    """Return the change of a document whose bytes cannot be given to a handler. It halts its partition."""
    partition_id, data = document_id.rpartition("/")[0], token_data(token)
    reason = (
        f"The bytes that partition {partition_id} has stored of the change at {data[:_SHOWN_CHARS]} are damaged: "
        f"{damage}. Restore them in the collection `backlog` of the state database and retry, or skip the change."
    )
    return StoredChange(data, refusal=Refusal.because(reason, halts=True), token=token)


def _refuse_too_large(change: StoredChange) -> StoredChange:
    """Return a change without its bytes, which no document can hold. Its failure policy decides about it."""
    reason = (
        f"This change ({describe(change.raw)}) is larger than 16 MB, even compressed, and could not be stored. Its "
        "handler does not get it. Keep documents smaller, or set full_document and full_document_before_change so that "
        "less travels. Repair what depends on it, then discard the dead letter."
    )
    return replace(change, raw=b"", refusal=change.refusal or Refusal.because(reason, lasts=True))


def _rare(change: StoredChange) -> Document:
    """The fields that most changes do not have."""
    fields: Document = {}
    if change.token is not None:
        fields["token"] = dict(change.token)
    elif not _is_token_derivable(change):
        fields["token"] = {"_data": change.data}
    if change.refusal is not None:
        fields |= {"refusal": asdict(change.refusal), "refused": True}
    return fields


def _is_token_derivable(change: StoredChange) -> bool:
    """Return True if `_id` and bytes together give the token: a long one is not in the `_id`."""
    return token_place(change.data) == change.data and holds_token(change.raw, change.data)
