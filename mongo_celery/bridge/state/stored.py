"""
The document form of a stored change: where its document stands, and what is in it. See `backlog.py` for the rules.

An `_id` is the partition's, a slash and the change's place. So the stream's order is that of the `_id`s.

A change that fits into no document, even compressed, is stored without its bytes and with a refusal.

Pure.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import bson
from bson.binary import Binary
from bson.int64 import Int64

from mongo_celery.bridge.change import describe, read_token, token_data
from mongo_celery.bridge.existing import token_place
from mongo_celery.bridge.refusal import Refusal

Document = dict[str, Any]

_ZIPPED_FROM = 1024
_WORTH_IT = 0.9
_SHOWN_CHARS = 80
_DOCUMENT_BYTES = (16 << 20) - (16 << 10)
_BULK_BYTES = 4 << 20
_BULK_DOCUMENTS = 1000
_HASHES = 1 << 64
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


def ids_under(prefix: str) -> dict[str, str]:
    """The `_id`s that begin with this and a slash, of a bridge or a partition. A zero comes after a slash."""
    return {"$gt": f"{prefix}/", "$lt": range_end(prefix)}


def range_end(prefix: str) -> str:
    """Return the first text after all `_id`s that begin with this and a slash."""
    return f"{prefix}0"


def to_signed(hash_: int) -> int:
    """Return a hash from 0 to 2^64 - 1 as MongoDB keeps it."""
    return hash_ - _HASHES if hash_ >= _HASHES // 2 else hash_


def to_unsigned(hash_: int) -> int:
    """Return the hash that MongoDB keeps so, from 0 to 2^64 - 1."""
    return hash_ % _HASHES


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
