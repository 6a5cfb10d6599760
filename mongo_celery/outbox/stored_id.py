"""
What stands for a document's `_id` where that is not known yet, and the ids that follow from it.

A task that is written to many documents, or to one whose `_id` nobody knows before the write, cannot have the `_id`
among its arguments. `STORED_ID` stands there instead. In the stored entry a text that no other entry contains stands
for it, and whoever publishes the entry puts the `_id` in its place. The same entry then lies in many documents; so
that its tasks are not one and the same, every id in it is derived from the stored id and the document's `_id`: the
same at each dispatch, another one for each document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID, uuid5

import bson
from bson import Decimal128, Int64, ObjectId
from bson.binary import Binary, UuidRepresentation
from bson.codec_options import CodecOptions

_NAMESPACE = UUID("6d6f6e67-6f5f-5365-8c65-72792d6f7574")
_CODEC: CodecOptions[Any] = CodecOptions(uuid_representation=UuidRepresentation.STANDARD)


class _StoredId:
    """Stands for the `_id` of the document with which a task or event is stored; there is one, `STORED_ID`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "STORED_ID"

    def __reduce__(self) -> str:
        return "STORED_ID"

    def __str__(self) -> str:
        raise TypeError("STORED_ID stands for a whole argument, and nothing is known of it yet; it cannot be formatted")

    def __format__(self, spec: str) -> str:
        return str(self)


STORED_ID: Any = _StoredId()
"""
The `_id` of the document with which a task or event is stored: `remind.s(STORED_ID)`, also inside lists and dicts.

The task gets the `_id` as an argument can hold it: an ObjectId and a Decimal128 as text, all else as it is.
"""


def mentions_stored_id(value: object) -> bool:
    """Whether `STORED_ID` is the value or lies in it."""
    if isinstance(value, Mapping):
        return any(map(mentions_stored_id, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(mentions_stored_id, value))
    return value is STORED_ID


def placeholder(entry_id: str) -> str:
    """The text that stands for `STORED_ID` in an entry; its random id keeps it from being anybody's own text."""
    return f"mongo_celery.STORED_ID:{entry_id}"


def put_in(value: Any, what: object, instead: object) -> Any:
    """A value with `instead` wherever `what` stands in it; parts without it are not copied."""
    return _mapped(value, lambda each: instead if each is what or (isinstance(each, str) and each == what) else each)


def as_argument(document_id: Any) -> Any:
    """An `_id` as tasks get it: what every serializer of Celery can hold."""
    if isinstance(document_id, (ObjectId, Decimal128)):
        return str(document_id)
    if isinstance(document_id, Int64):
        return int(document_id)
    if isinstance(document_id, Binary):
        return bytes(document_id)
    if isinstance(document_id, Mapping):
        return {name: as_argument(value) for name, value in document_id.items()}
    if isinstance(document_id, (list, tuple)):
        return [as_argument(value) for value in document_id]
    return document_id


def derived_id(id: str, document_id: object) -> str:  # noqa: A002
    """The id that one of a shared entry's ids has for one document."""
    stored = bson.encode({"": document_id}, codec_options=_CODEC).hex()
    return str(uuid5(_NAMESPACE, f"{id} {stored}"))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        changed = {name: _mapped(each, change) for name, each in value.items()}
        return changed if any(changed[name] is not value[name] for name in changed) else value
    if isinstance(value, (list, tuple)):
        parts = [_mapped(each, change) for each in value]
        if all(one is other for one, other in zip(parts, value, strict=True)):
            return value
        return tuple(parts) if isinstance(value, tuple) else parts
    return change(value)
