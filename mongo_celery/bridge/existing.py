"""
Existing documents as events: what a snapshot gives to handlers beside what the stream does.

A document that exists has its place in the stream behind every change up to a cluster time T and before every later
one. Its event has the operation type `snapshot`, and else what an insert of the document would have: `clusterTime` is
T, `fullDocument` the document.

Its token is made by us: ``82``, seconds and increment of T as the server writes them, ``~``, then a number that no
other has. The tilde sorts behind every digit, so the token lies behind all tokens of events at T whatever follows their
time, and before those of T + 1. A server refuses it: no stream is ever opened there, so positions that open one (a
watermark, the place up to which a layout is read) are never made of it.

Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import bson
from bson import Timestamp
from bson.raw_bson import RawBSONDocument

from mongo_celery.bridge.change import wrap_event
from mongo_celery.bridge.raw_event import EVENT_TYPES

SNAPSHOT = "snapshot"
"""The operation type of an existing document."""

AS = "insert"
"""The operation type that users' expressions and functions see, so that it goes where its insert would go."""

TOKEN_TYPE = "82"  # noqa: S105 - of a token that begins with a cluster time
END = "~"
"""The mark after the time in the token of an existing document."""

PLACE_CHARS = 18
"""Characters of a token up to there: its type, seconds and increment."""

LETTER = "00"
"""Begins the name of the dead letter of an existing document; before every token."""
_VERSION_CHARS = 16
_UNREAD_CHARS = 200
_PLACE_CHARS = 1024
_PLACE_KEPT = 960
_SIZE_BYTES = 4


def place_at_time(time: Timestamp) -> str:
    """Return the first place of a cluster time: all tokens of its events are there or after it."""
    return f"{TOKEN_TYPE}{time.time:08X}{time.inc:08X}"


def place_after_time(time: Timestamp) -> str:
    """Return the place after all tokens of events at a cluster time, and before those of all later ones."""
    return place_at_time(time) + END


def make_token(time: Timestamp, version: int, number: int) -> str:
    """
    Return the comparable part of an existing document's token.

    Args:
        time: behind whose changes it has its place.
        version: of the term that has read it.
        number: over all that this term has read.
    """
    return f"{place_after_time(time)}{version:0{_VERSION_CHARS}X}{number:010X}"


def is_existing(data: str) -> bool:
    """Return True if a comparable part of a token is that of an existing document, where no stream can be opened."""
    return data[PLACE_CHARS : PLACE_CHARS + 1] == END


def unread_place(data: str) -> str:
    """
    Return a replacement for a token that is too large to be kept: its beginning, then `END`.

    The beginning has time, place in the transaction and collection, so it compares with other tokens as the whole does.
    """
    return data[:_UNREAD_CHARS] + END


def is_unread(data: str) -> bool:
    """Return True if a comparable part of a token replaces one that is too large to be kept."""
    return data.endswith(END) and not is_existing(data)


def opens_stream(data: str) -> bool:
    """Return True if a comparable part of a token is the server's own, so that a stream can be opened there."""
    return END not in data


def extract_time(place: str) -> Timestamp:
    """Return the cluster time of a place."""
    seconds = len(TOKEN_TYPE)
    middle = (seconds + PLACE_CHARS) // 2
    return Timestamp(int(place[seconds:middle], 16), int(place[middle:PLACE_CHARS], 16))


def previous_time(time: Timestamp) -> Timestamp:
    """Return the last time before one of a write."""
    return Timestamp(time.time, time.inc - 1)


def extract_term(data: str) -> int | None:
    """Return the term that has read an existing document, from its token; None for any other token."""
    try:
        return int(data[PLACE_CHARS + 1 :][:_VERSION_CHARS], 16) if is_existing(data) else None
    except ValueError:
        return None


def token_place(data: str) -> str:
    """
    Return the place of a token within an `_id`, bounded: tokens carry the document's `_id`, which may have megabytes.

    What is kept of a long one holds cluster time, number and collection, which no two events share: so places have the
    order of their tokens. The place of a place is itself.
    """
    if len(data) <= _PLACE_CHARS:
        return data
    return f"{data[:_PLACE_KEPT]}{END}{hashlib.blake2b(data.encode(), digest_size=16).hexdigest()}"


def dead_letter_name(data: str, raw: bytes) -> str:
    """
    Return the name of a change's dead letter, unique in its subscription: its token.

    That of an existing document is named by its key: read again, it has another token, and must not become a second
    dead letter. A long token is shortened.
    """
    if not is_existing(data):
        return token_place(data)
    try:
        event = wrap_event(raw)
        key = b"".join(bytes(event[name].raw) for name in ("ns", "documentKey"))
    except Exception:  # noqa: BLE001 - bytes that cannot be read are named by their place
        return data
    return LETTER + hashlib.blake2b(key, digest_size=16).hexdigest().upper()


def as_inserted(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same event, plain, as users' functions see it: an existing document is where its insert would be."""
    return {**event, "operationType": AS} if event.get("operationType") == SNAPSHOT else event


def join_documents(*documents: bytes) -> bytes:
    """Join documents: return one with the fields of all, byte for byte."""
    body = b"".join(document[_SIZE_BYTES:-1] for document in documents)
    return (len(body) + _SIZE_BYTES + 1).to_bytes(_SIZE_BYTES, "little") + body + b"\0"


def event_bytes(shaped: bytes, data: str) -> bytes:
    """The event of an existing document, from what the server has made of it, which has no token, type or time."""
    return join_documents(_head(data), shaped)


def move_event(raw: bytes, data: str) -> bytes:
    """Return the same event at another place."""
    head = _head(data)
    return raw[:_SIZE_BYTES] + head[_SIZE_BYTES:-1] + raw[len(head) - 1 :]


def _head(data: str) -> bytes:
    return bson.encode({"_id": {"_data": data}, "operationType": SNAPSHOT, "clusterTime": extract_time(data)})


@dataclass(frozen=True, slots=True)
class DocumentId:
    """
    An `_id` byte for byte: no text that is not valid, and no type that a client would change on the way, moves it.

    Attributes:
        kind: its BSON type.
        value: its bytes.
    """

    kind: int
    value: bytes

    @classmethod
    def of(cls, document: bytes) -> DocumentId | None:
        """The value in a document that has one field, or none."""
        start = _SIZE_BYTES + 1
        end = document.find(b"\0", start)
        if len(document) <= start:
            return None
        return cls(document[_SIZE_BYTES], document[end + 1 : -1])

    def make_document(self, name: str) -> RawBSONDocument:
        """Return a document of one field with this value."""
        body = bytes([self.kind]) + name.encode() + b"\0" + self.value
        size = (len(body) + _SIZE_BYTES + 1).to_bytes(_SIZE_BYTES, "little")
        return RawBSONDocument(size + body + b"\0", EVENT_TYPES)
