"""
Parcels: the documents of an `OutboxCollection`, one for each transaction and key.

::

    {_id: ObjectId, key: text or null, seq: Timestamp, pendingEvents: {count, events: [entry ...], claim}}

A parcel is inserted and never appended to. `seq` is sent as `Timestamp(0, 0)`, in whose place the server puts a time of
its own when it inserts, in a transaction too; in an upsert it would leave it as it is. So a transaction that begins
after another was committed, or that writes a document which the other has written (it would fail otherwise, and be
repeated), has the later `seq`: by `seq` and `_id` the parcels of a key are in the order of such transactions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from bson import ObjectId, Timestamp

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.outbox.entries import FIELD, Entry
from mongo_celery.outbox.pending import PendingField

Document = dict[str, Any]

FIELD_OF_PARCELS = PendingField(FIELD)
ORDER = [("seq", 1), ("_id", 1)]
"""The order of a key's parcels."""

_ENTRIES_MAX = 500
_BYTES_MAX = 4 * 1024 * 1024
"""Of one parcel, about: a transaction with more has several under one key, in their order."""

_OVERHEAD_BYTES = 512
"""What an entry has beside its payload, about."""

_KEY_BYTES_MAX = 1024


@dataclass(frozen=True, slots=True)
class ParcelHead:
    """
    A parcel that may be the first of its key.

    Attributes:
        id: its `_id`.
        key: its key; without one it is the only one that it is in order with.
    """

    id: Any
    key: str | None


def key_text(key: object) -> str | None:
    """
    A key as it is stored; None stays None.

    Raises:
        OutboxRefusedError: it is none.
    """
    if key is None:
        return None
    if isinstance(key, bool) or not isinstance(key, (str, int, ObjectId, UUID)):
        raise OutboxRefusedError(
            f"key={key!r} must be text, a whole number, an ObjectId or a UUID: the id of what tasks are about."
        )
    text = str(key)
    try:
        size = len(text.encode())
    except UnicodeEncodeError:  # half of a surrogate pair
        size = 0
    if not 0 < size <= _KEY_BYTES_MAX:
        raise OutboxRefusedError(f"a key must be text of 1 to {_KEY_BYTES_MAX} bytes.")
    return text


def new_parcels(key: str | None, entries: Sequence[Entry]) -> list[Document]:
    """Some entries of one transaction as parcels, to be inserted in this order: usually one."""
    return [_parcel(key, each) for each in _portions(entries)]


def _parcel(key: str | None, entries: Sequence[Entry]) -> Document:
    return {"_id": ObjectId(), "key": key, "seq": Timestamp(0, 0), FIELD: FIELD_OF_PARCELS.new_field(entries)}


def _portions(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    portion: list[Entry] = []
    size = 0
    for entry in entries:
        weight = len(entry.payload) + _OVERHEAD_BYTES
        if portion and (len(portion) >= _ENTRIES_MAX or size + weight > _BYTES_MAX):
            yield portion
            portion, size = [], 0
        portion.append(entry)
        size += weight
    if portion:
        yield portion


def head_of(document: Mapping[str, Any]) -> ParcelHead:
    """A stored parcel's place; what somebody else has written as a key is none."""
    key = document.get("key")
    return ParcelHead(document["_id"], key if isinstance(key, str) else None)
