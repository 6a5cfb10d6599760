"""
Stored changes, with their bytes, of partitions that cannot run them yet. They outlast any oplog.

There is one document per change. Its `_id` is the partition's, a slash and the change's place, so a range of `_id` is a
range of the stream. No write here checks the term:

1. A document alone has no effect. The mark on the partition (`stored.to`), which is guarded, and the term's reading
   progress (`reach`) limit what may run from here.
2. An insert that finds its document raises the document's `term`. So if all inserts of a term were acknowledged, no
   older term can remove the documents that it relies on. The bytes are those of the first stored reading, or of the
   last one if it was refused.
3. A removal takes committed changes, but none that a later term has inserted or raised. So a process that wakes up late
   removes nothing that was stored again after a rewind.

| field | |
|---|---|
| `term` | the term that inserted it, or last found it |
| `hash` | of the partition key, as a signed number of 64 bits |
| `raw`, `zip` | the event as the server sent it. `zip` is true if it is compressed |
| `token` | the resume token, if `_id` and bytes do not contain it: they are unreadable, or it is long |
| `refusal` | the reason why its handler must not get it, as a `Refusal` |
| `refused` | set if it was ever refused: it stays until no term reads it again, and names where it is done |
| `size` | bytes of the event |

The documents decide what runs. So they are read in a causally consistent session that has seen the partition's image
(the caller's). Otherwise a deposed primary could report that there are none.
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
"""A place after every change."""

_AT_A_TIME = 1000  # documents, some of which have megabytes
_OUTLINE = ("hash", "size", "refusal", "token")
_ROUNDS = 3
_SLASHES = 3  # slashes in a partition's `_id`

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
        Store changes of one partition. Afterwards a majority has each of them, and no older term can remove it.

        Repeating it is harmless. An existing document keeps its bytes, unless it was refused.

        Raises:
            PyMongoError: any of them may be missing. Do not rely on those that exist.
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
            "Stored changes were removed again and again while they were inserted, or a later term has stored them."
        )

    def _insert_new(self, documents: list[Document], session: ClientSession | None) -> set[str]:
        """Insert documents. Return the `_id`s that already existed."""
        try:
            with self._table.limit():
                self._table.collection.insert_many(documents, ordered=False, session=session)
        except BulkWriteError as error:
            return {documents[place]["_id"] for place in find_duplicates(error)}
        return set()

    def _keep(self, present: Mapping[str, Document], term: int, session: ClientSession | None) -> bool:
        """
        Raise the term of existing documents. Return False if one of them no longer exists.

        A refused change is replaced: its cause may have been fixed.
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
        Remove finished changes of a partition, but none of a later term. Yield the number after each call.

        An undeliverable change stays while a term may read it again: it names the partition where the change is done.

        Args:
            committed: comparable part of the committed token in a majority image. Empty if nothing is committed.
                `EVERYTHING` for a partition that is no longer in force.
            passed: the smaller of `committed` and the stored watermark. Changes before this place are never read again.
            term: the current term.
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
        Return the first stored changes of a partition after a place, in order.

        Args:
            after: comparable part of a token. Empty for the beginning.
            until: comparable part of the last token to read.
            limit: largest number of changes.
        """
        query = {"_id": backlog_range(partition_id, after, until)}
        with self._table.limit(), self._table.collection.find(query).sort("_id", 1) as found:
            return [parse_change(document) for document in found.limit(limit)]

    def outline(
        self, partition_id: str, after: str, until: str, limit: int, session: ClientSession | None = None
    ) -> list[StoredChange]:
        """Return the same as `read`, but without the bytes of events."""
        query = {"_id": backlog_range(partition_id, after, until)}
        with self._table.limit():
            found = self._table.collection.find(query, dict.fromkeys(_OUTLINE, 1), session=session)
            return [parse_outline(document) for document in found.sort("_id", 1).limit(limit)]

    def first(self, partition_id: str, after: str, until: str) -> str | None:
        """Return the comparable part of the token of the first stored change after a place. Only the index is read."""
        found = self._at(backlog_range(partition_id, after, until), 1)
        return None if found is None else parse_place(partition_id, found)

    def last(self, partition_id: str) -> str:
        """Return the place of a partition's last stored change. Empty if there is none."""
        found = self._table.find_one({"_id": ids_under(partition_id)}, {"_id": 1}, sort=[("_id", -1)])
        return "" if found is None else parse_place(partition_id, found["_id"])

    def fetch(self, partition_id: str, data: Sequence[str]) -> dict[str, StoredChange]:
        """Return stored changes by the comparable parts of their tokens. Missing ones are left out."""
        ids = {backlog_id(partition_id, each): each for each in data}
        with self._table.limit(), self._table.collection.find({"_id": {"$in": list(ids)}}) as found:
            return {ids[document["_id"]]: parse_change(document) for document in found}

    def undeliverable(self, partition_id: str, after: str, until: str) -> Iterator[list[str]]:
        """Yield the places of changes that were ever refused, after one place and up to another, call by call."""
        for some in self._slices(backlog_range(partition_id, after, until)):
            query = {"_id": some, "$or": [{"refused": True}, {"refusal": {"$ne": None}}]}
            yield [parse_place(partition_id, each["_id"]) for each in self._table.find(query, {"_id": 1})]

    def _slices(self, ids: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
        """Split a range of `_id`s into parts for one call each."""
        last: str | None = ids["$gt"]
        while last is not None:
            behind = {**ids, "$gt": last}
            with self._table.limit():
                last = self._at(behind, _AT_A_TIME)
            yield behind if last is None else {"$gt": behind["$gt"], "$lte": last}

    def next_partition(self, after: str | None = None) -> str | None:
        """Return the `_id` of the next partition with stored changes. None if there is none."""
        ids = ids_under(self._bridge)
        if after is not None:  # partitions may follow an `_id` that is not a partition's
            ids["$gt"] = range_end(after) if after.count("/") == _SLASHES else after
        query = {"_id": ids}
        found = self._table.find_one(query, {"_id": 1}, sort=[("_id", 1)])
        return None if found is None else "/".join(found["_id"].split("/")[:4])

    def _at(self, ids: Mapping[str, str], number: int) -> str | None:
        """Return the `_id` of the n-th document in a range, from 1. Only the index is read."""
        found = self._table.collection.find({"_id": ids}, {"_id": 1}).sort("_id", 1)
        document = next(found.skip(number - 1).limit(1), None)
        return None if document is None else str(document["_id"])

    def count(self, partition_id: str, after: str, until: str) -> int:
        """Return the number of stored changes in a partition between two places."""
        with self._table.limit():
            return self._table.collection.count_documents({"_id": backlog_range(partition_id, after, until)})

    def size(self, enough: int) -> int:
        """
        Return the bytes of stored changes, which is the whole collection's size up to `enough`.

        Above that, changes of other bridges in this state database do not count, unless this bridge has too many to
        read within a call's time.
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
"""Fields that only some changes have."""


@dataclass(frozen=True, slots=True)
class StoredChange:
    """
    A stored change.

    Attributes:
        data: comparable part of its resume token.
        raw: the event's bytes. Empty if they were not read, or are damaged (then there is a refusal).
        hash: the hash of its partition key, from 0 to 2^64 - 1.
        refusal: reason why its handler does not get it. None for all others.
        token: the whole resume token, if `raw` may lack it or it is long. None for all others.
        size: bytes of the event according to its document. 0 before it is stored.
    """

    data: str
    raw: bytes = b""
    hash: int = 0
    refusal: Refusal | None = None
    token: Mapping[str, Any] | None = None
    size: int = 0


# -- places ----------------------------------------------------------------------------------------


def backlog_id(partition_id: str, data: str) -> str:
    """Return the `_id` of a change's document, from the comparable part of its token or its place."""
    return f"{partition_id}/{token_place(data)}"


def parse_place(partition_id: str, document_id: str) -> str:
    """Return a change's place from the `_id` of its document."""
    return document_id[len(partition_id) + 1 :]


def backlog_range(partition_id: str, after: str, until: str) -> dict[str, str]:
    """Match the `_id`s of a partition after one token or place and up to another."""
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
    """Return the fields that store an event's bytes: `raw`, and `zip` if compressed."""
    zipped = zlib.compress(raw, 1) if len(raw) > _ZIPPED_FROM else raw
    return {"raw": Binary(zipped), "zip": True} if len(zipped) < _WORTH_IT * len(raw) else {"raw": Binary(raw)}


def unpack_event(document: Mapping[str, Any]) -> bytes:
    """
    Return the bytes that `pack_event` stored.

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
    Return the update that replaces one reading of a change by another.

    A reading without bytes replaces nothing: it came from damaged bytes, and the stored ones may be restored.
    """
    if not document["raw"]:
        return {"$max": {"term": document["term"]}}
    gone = {name: "" for name in _OF_A_KIND if name not in document}
    return {"$set": {name: value for name, value in document.items() if name != "_id"}, "$unset": gone}


def parse_change(head: Mapping[str, Any]) -> StoredChange:
    """
    Return the change in a document.

    If its bytes cannot be read, the change is refused, which halts only its own partition. The same applies to a
    document that this package did not write.
    """
    change = parse_outline(head)
    try:
        return replace(change, raw=unpack_event(head))
    except Exception as error:  # noqa: BLE001 - whatever somebody has left there
        return refuse_damaged(head["_id"], change.token or {"_data": change.data}, f"they cannot be read ({error!r})")


def holds_token(raw: bytes, data: str) -> bool:
    """Return True if bytes are an event whose token has this comparable part."""
    try:
        return token_data(read_token(raw)) == data
    except Exception:  # noqa: BLE001 - bytes of a user, whatever they do to a decoder
        return False


def parse_outline(head: Mapping[str, Any]) -> StoredChange:
    """Return a stored change from its document, without reading the bytes of the event."""
    place = head["_id"].rpartition("/")[2]
    try:
        token, refusal = head.get("token"), head.get("refusal")
        data = token_data(token or {"_data": place})
        if token_place(data) != place:
            raise ValueError("the token belongs to another change")
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
    """Return the change of a document whose bytes no handler can get. It halts its partition."""
    partition_id, data = document_id.rpartition("/")[0], token_data(token)
    reason = (
        f"The stored bytes of the change at {data[:_SHOWN_CHARS]} in partition {partition_id} are damaged: {damage}. "
        "Restore them in the collection `backlog` of the state database and retry, or skip the change."
    )
    return StoredChange(data, refusal=Refusal.because(reason, halts=True), token=token)


def _refuse_too_large(change: StoredChange) -> StoredChange:
    """Return a change without its bytes, which no document can hold. The failure policy decides about it."""
    reason = (
        f"This change ({describe(change.raw)}) is larger than 16 MB, even compressed, so it could not be stored, and "
        "its handler does not get it. Repair its effects manually, then discard the dead letter. Keep documents "
        "smaller, or set full_document and full_document_before_change so that changes carry less."
    )
    return replace(change, raw=b"", refusal=change.refusal or Refusal.because(reason, lasts=True))


def _rare(change: StoredChange) -> Document:
    """Return the fields that most changes do not have."""
    fields: Document = {}
    if change.token is not None:
        fields["token"] = dict(change.token)
    elif not _is_token_derivable(change):
        fields["token"] = {"_data": change.data}
    if change.refusal is not None:
        fields |= {"refusal": asdict(change.refusal), "refused": True}
    return fields


def _is_token_derivable(change: StoredChange) -> bool:
    """Return True if `_id` and bytes contain the token. A long one is not in the `_id`."""
    return token_place(change.data) == change.data and holds_token(change.raw, change.data)
