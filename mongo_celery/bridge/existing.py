"""
Existing documents as events. A snapshot gives them to handlers, between the changes of the stream.

An existing document's place in the stream is after every change up to a cluster time T, and before every later one. Its
event has the operation type `snapshot`. Its other fields are those of an insert: `clusterTime` is T, `fullDocument` the
document.

This module makes the document's token: ``82``, seconds and increment of T as the server writes them, ``~``, then a
unique number. The tilde sorts after every digit, so the token comes after all tokens of events at T and before those of
T + 1. A server refuses it, so no stream opens there. Positions that open a stream (a watermark, the place up to which a
layout is read) are never made from it.

These functions are pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import bson
from bson import Timestamp
from bson.raw_bson import RawBSONDocument

from mongo_celery.bridge.change import wrap_event
from mongo_celery.bridge.raw_event import EVENT_TYPES

SNAPSHOT = "snapshot"
"""The operation type of an existing document."""

AS = "insert"
"""The operation type that users' expressions and functions see. It leads to the partition of the insert."""

TOKEN_TYPE = "82"  # noqa: S105 - of a token that begins with a cluster time
END = "~"
"""The mark after the time in an existing document's token."""

PLACE_CHARS = 18
"""Length of a token's type, seconds and increment."""

LETTER = "00"
"""Beginning of the dead letter name of an existing document. It sorts before every token."""
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
        time: the document's place is after all changes of this time.
        version: the term that read it.
        number: counts the documents that this term has read.
    """
    return f"{place_after_time(time)}{version:0{_VERSION_CHARS}X}{number:010X}"


def is_existing(data: str) -> bool:
    """Return True if this is the token of an existing document, where no stream can be opened."""
    return data[PLACE_CHARS : PLACE_CHARS + 1] == END


def unread_place(data: str) -> str:
    """
    Return a replacement for a token that is too large to store: its beginning, then `END`.

    The beginning has time, place in the transaction and collection, so it sorts like the whole token.
    """
    return data[:_UNREAD_CHARS] + END


def is_unread(data: str) -> bool:
    """Return True if this token replaces one that is too large to store."""
    return data.endswith(END) and not is_existing(data)


def opens_stream(data: str) -> bool:
    """Return True if this is the server's own token, so that a stream can be opened there."""
    return END not in data


def extract_time(place: str) -> Timestamp:
    """Return the cluster time of a place."""
    seconds = len(TOKEN_TYPE)
    middle = (seconds + PLACE_CHARS) // 2
    return Timestamp(int(place[seconds:middle], 16), int(place[middle:PLACE_CHARS], 16))


def previous_time(time: Timestamp) -> Timestamp:
    """Return the last cluster time before this one."""
    return Timestamp(time.time, time.inc - 1)


def extract_term(data: str) -> int | None:
    """Return the term that read an existing document, from its token. None for other tokens."""
    try:
        return int(data[PLACE_CHARS + 1 :][:_VERSION_CHARS], 16) if is_existing(data) else None
    except ValueError:
        return None


def token_place(data: str) -> str:
    """
    Return a token's place, short enough for an `_id`: a token contains the document's `_id`, which may have megabytes.

    The part kept of a long token has cluster time, number and collection, which no two events share. So places sort
    like their tokens. The place of a place is itself.
    """
    if len(data) <= _PLACE_CHARS:
        return data
    return f"{data[:_PLACE_KEPT]}{END}{hashlib.blake2b(data.encode(), digest_size=16).hexdigest()}"


def dead_letter_name(data: str, raw: bytes) -> str:
    """
    Return the name of a change's dead letter, which is unique in its subscription. Usually it is the token.

    An existing document's dead letter is named by its key: when the document is read again, it has another token, but
    must not become a second dead letter. Long tokens are shortened.
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
    """Return the event for users' functions, which see an existing document as an insert."""
    return {**event, "operationType": AS} if event.get("operationType") == SNAPSHOT else event


def join_documents(*documents: bytes) -> bytes:
    """Join documents byte for byte into one with the fields of all."""
    body = b"".join(document[_SIZE_BYTES:-1] for document in documents)
    return (len(body) + _SIZE_BYTES + 1).to_bytes(_SIZE_BYTES, "little") + body + b"\0"


def event_bytes(shaped: bytes, data: str) -> bytes:
    """Return the event of an existing document: add token, type and time to the part from the server."""
    return join_documents(_head(data), shaped)


def move_event(raw: bytes, data: str) -> bytes:
    """Return the same event at another place in the stream."""
    head = _head(data)
    return raw[:_SIZE_BYTES] + head[_SIZE_BYTES:-1] + raw[len(head) - 1 :]


def _head(data: str) -> bytes:
    before, after = _split_head(len(data), data[:PLACE_CHARS])
    return b"".join((before, data.encode(), after))


@lru_cache
def _split_head(chars: int, place: str) -> tuple[bytes, bytes]:
    """Return what is before and after a token of this length and place. A chunk's tokens differ only at their ends."""
    token = END * chars
    head = bson.encode({"_id": {"_data": token}, "operationType": SNAPSHOT, "clusterTime": extract_time(place)})
    before, after = head.split(token.encode())
    return before, after


@dataclass(frozen=True, slots=True)
class DocumentId:
    """
    An `_id` byte for byte. Invalid text, or a type that a client would convert, arrives unchanged.

    Attributes:
        kind: BSON type of the `_id`.
        value: bytes of the `_id`.
    """

    kind: int
    value: bytes

    @classmethod
    def of(cls, document: bytes) -> DocumentId | None:
        """Return the value of the only field of a document. None if there is no field."""
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
