"""
The document form of a stored change: where its document stands, and what is in it. See `backlog.py` for the rules.

An `_id` is the partition's, a slash and the change's place. The parts of a change that fits into no document stand
behind it, each behind one more slash. A slash sorts before every character of a place, and what ends a range after
them all: so the stream's order is that of the `_id`s, and a change and its parts are never far from one another.

Pure.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import bson
from bson.binary import Binary
from bson.int64 import Int64

from mongo_celery.bridge.change import read_token, token_data
from mongo_celery.bridge.existing import token_place
from mongo_celery.bridge.refusal import Refusal

Document = dict[str, Any]

_ZIPPED_FROM = 1024
_WORTH_IT = 0.9
_RAW_FIELD = 10  # without the bytes themselves
_SHOWN_CHARS = 80
_DOCUMENT_BYTES = (16 << 20) - (16 << 10)
_PART_BYTES = 8 << 20
_PARTS_MAX = 100
"""More than any event has: a number that somebody else has written there costs no memory."""

_BULK_BYTES = 4 << 20
_BULK_DOCUMENTS = 1000
_HASHES = 1 << 64
_END = "~"
_OF_A_KIND = ("zip", "parts", "digest", "token", "refusal")
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
    """Return the place of a change in the `_id` of its document, or of one of its parts."""
    return document_id[len(partition_id) + 1 :].partition("/")[0]


def backlog_range(partition_id: str, after: str, until: str) -> dict[str, str]:
    """Match the `_id`s of a partition after a token or place, up to another one: the changes and their parts."""
    behind = f"{backlog_id(partition_id, after)}/{_END}" if after else f"{partition_id}/"
    return {"$gt": behind, "$lte": f"{backlog_id(partition_id, until)}/{_END}"}


def ids_under(prefix: str) -> dict[str, str]:
    """The `_id`s that begin with this and a slash, of a bridge or a partition. A zero comes after a slash."""
    return {"$gt": f"{prefix}/", "$lt": range_end(prefix)}


def range_end(prefix: str) -> str:
    """Return the first text after all `_id`s that begin with this and a slash."""
    return f"{prefix}0"


def part_ids(head: Mapping[str, Any]) -> list[str]:
    """The `_id`s of a change's parts: behind its own, and named by their contents."""
    # Read again, an event may have other bytes: those of two readings must not be mixed.
    count = head["parts"] if isinstance(head["parts"], int) else 0
    return [f"{head['_id']}/{head['digest']}.{number:02d}" for number in range(min(count, _PARTS_MAX))]


def to_signed(hash_: int) -> int:
    """Return a hash from 0 to 2^64 - 1 as MongoDB keeps it."""
    return hash_ - _HASHES if hash_ >= _HASHES // 2 else hash_


def to_unsigned(hash_: int) -> int:
    """Return the hash that MongoDB keeps so, from 0 to 2^64 - 1."""
    return hash_ % _HASHES


# -- documents -------------------------------------------------------------------------------------


def build_documents(partition_id: str, changes: Iterable[StoredChange], term: int) -> Iterator[Document]:
    """Yield the documents of some changes. The parts of a change come before it, so it is never there without them."""
    bridge, handler, partitioning, index = partition_id.split("/")
    where = {"bridge": bridge, "handler": handler, "partitioningTerm": Int64(partitioning), "partition": int(index)}
    for change in changes:
        head: Document = {
            "_id": backlog_id(partition_id, change.data),
            **where,
            "term": Int64(term),
            "hash": Int64(to_signed(change.hash)),
            "size": len(change.raw),
            **_rare(change),
        }
        kept = pack_event(change.raw)
        raw = bytes(kept.pop("raw"))
        head |= kept
        if len(raw) + _overhead(head) > _DOCUMENT_BYTES:
            head["parts"] = -(-len(raw) // _PART_BYTES)
            head["digest"] = hashlib.blake2b(raw, digest_size=8).hexdigest()
            yield from _parts(head, raw)
            raw = b""
        yield {**head, "raw": Binary(raw)}


def pack_event(raw: bytes) -> Document:
    """Return the fields that keep an event's bytes: `raw`, and `zip` where these are compressed."""
    zipped = zlib.compress(raw, 1) if len(raw) > _ZIPPED_FROM else raw
    return {"raw": Binary(zipped), "zip": True} if len(zipped) < _WORTH_IT * len(raw) else {"raw": Binary(raw)}


def unpack_event(document: Mapping[str, Any]) -> bytes:
    """Return the bytes that `pack_event` has kept."""
    return zlib.decompress(document["raw"]) if document.get("zip") else bytes(document["raw"])


def split_bulks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield groups of documents for one call each. The parts of a change are in earlier groups than itself."""
    bulk: list[Document] = []
    size = 0
    for document in documents:
        taken = len(document["raw"])
        if bulk and (size + taken > _BULK_BYTES or len(bulk) >= _BULK_DOCUMENTS or "parts" in document):
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
    if not document["raw"] and "parts" not in document:
        return {"$max": {"term": document["term"]}}
    gone = {name: "" for name in _OF_A_KIND if name not in document}
    return {"$set": {name: value for name, value in document.items() if name != "_id"}, "$unset": gone}


def parse_change(head: Mapping[str, Any], parts: Sequence[Mapping[str, Any]] = ()) -> StoredChange:
    """
    Return the change in a document and its parts.

    One whose bytes are not all there, or cannot be read, is refused: it halts its own partition, and nothing else. So
    is a document that nobody of ours has written.
    """
    change = parse_outline(head)
    try:
        raw, damage = _join_bytes(head, parts)
    except Exception as error:  # noqa: BLE001 - whatever somebody has left there
        raw, damage = b"", f"the document cannot be read ({error!r})"
    if not damage:
        return replace(change, raw=raw)
    return refuse_damaged(head["_id"], change.token or {"_data": change.data}, damage)


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


def _join_bytes(head: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> tuple[bytes, str]:
    """Return an event's bytes, and their damage. An empty text for none."""
    if len(parts) != head.get("parts", 0):
        return b"", f"of {head['parts']} parts {len(parts)} are there"
    raw = b"".join(part["raw"] for part in parts) if parts else head["raw"]
    if not isinstance(raw, bytes):
        return b"", f"they are of type {type(raw).__name__}"
    try:
        return zlib.decompress(raw) if head.get("zip") else raw, ""
    except zlib.error as error:
        return b"", f"they cannot be decompressed ({error})"


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


def _parts(head: Document, raw: bytes) -> Iterator[Document]:
    shared = {name: head[name] for name in ("partitioningTerm", "term", "hash")}
    for number, part_id in enumerate(part_ids(head)):
        part = raw[number * _PART_BYTES : (number + 1) * _PART_BYTES]
        yield {"_id": part_id, **shared, "part": number + 1, "raw": Binary(part)}


def _overhead(document: Document) -> int:
    return len(bson.encode(document)) + _RAW_FIELD
