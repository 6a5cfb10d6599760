"""
`STORED_ID`: the placeholder for an unknown document `_id`, and ids derived from it.

A task for many documents, or for one whose `_id` is unknown before the write, cannot have the `_id` in its arguments.
`STORED_ID` is its placeholder. The stored entry contains a unique text instead, and the publishing process replaces it
with the `_id`. So many documents contain the same entry. To keep their tasks apart, every id in it is derived from the
stored id and the document's `_id`: the same at each dispatch, but different for each document.
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
    """Placeholder for the `_id` of a task's or event's document. The only instance is `STORED_ID`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "STORED_ID"

    def __reduce__(self) -> str:
        return "STORED_ID"

    def __str__(self) -> str:
        raise TypeError("STORED_ID cannot be formatted, because its value is not known yet. Use it as a whole argument")

    def __format__(self, spec: str) -> str:
        return str(self)


STORED_ID: Any = _StoredId()
"""
The `_id` of the document of a task or event: `remind.s(STORED_ID)`, also inside lists and dicts.

The task gets the `_id` in a form for arguments: an ObjectId and a Decimal128 as text, other types unchanged.
"""


def mentions_stored_id(value: object) -> bool:
    """Return True if the value is or contains `STORED_ID`."""
    if isinstance(value, Mapping):
        return any(map(mentions_stored_id, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(mentions_stored_id, value))
    return value is STORED_ID


def placeholder(entry_id: str) -> str:
    """Return the text for `STORED_ID` in an entry. Its random id makes it unique."""
    return f"mongo_celery.STORED_ID:{entry_id}"


def substitute(value: Any, what: object, instead: object) -> Any:
    """Return a value with `instead` in place of `what`. Other parts are not copied."""
    return _map_values(
        value, lambda each: instead if each is what or (isinstance(each, str) and each == what) else each
    )


def make_argument(document_id: Any) -> Any:
    """Return an `_id` in the form for tasks, which every serializer of Celery supports."""
    if isinstance(document_id, (ObjectId, Decimal128)):
        return str(document_id)
    if isinstance(document_id, Int64):
        return int(document_id)
    if isinstance(document_id, Binary):
        return bytes(document_id)
    if isinstance(document_id, Mapping):
        return {name: make_argument(value) for name, value in document_id.items()}
    if isinstance(document_id, (list, tuple)):
        return [make_argument(value) for value in document_id]
    return document_id


def derive_id(id: str, document_id: object) -> str:  # noqa: A002
    """Return the id of a shared entry's id for one document."""
    stored = bson.encode({"": document_id}, codec_options=_CODEC).hex()
    return str(uuid5(_NAMESPACE, f"{id} {stored}"))


def _map_values(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        changed = {name: _map_values(each, change) for name, each in value.items()}
        return changed if any(changed[name] is not value[name] for name in changed) else value
    if isinstance(value, (list, tuple)):
        parts = [_map_values(each, change) for each in value]
        if all(one is other for one, other in zip(parts, value, strict=True)):
            return value
        return tuple(parts) if isinstance(value, tuple) else parts
    return change(value)
