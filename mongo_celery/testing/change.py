"""Changes for unit tests in MongoDB's form: one function for each operation on a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import bson
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions
from bson.errors import BSONError

from mongo_celery.bridge.change import Change
from mongo_celery.errors import HandlerUsageError

_ANY_UUID: CodecOptions[Any] = CodecOptions(uuid_representation=UuidRepresentation.STANDARD)


def inserted(ns: str, document: Mapping[str, Any], **options: Any) -> Change:
    """
    Return an insert.

    ::

        change = inserted("shop.orders", {"_id": 1, "total": 20})
        assert change.full_document == {"_id": 1, "total": 20}

    Args:
        ns: `"db.collection"`.
        document: a document with its `_id`.
        options: `fence`, `client`, `fencing_token` and fields of the event, as in `Change.build`.

    Raises:
        HandlerUsageError: the namespace, the `_id` or the values cannot be those of an event.
    """
    return _build("insert", ns, document, document, options)


def replaced(ns: str, document: Mapping[str, Any], **options: Any) -> Change:
    """
    Return a replace.

    ::

        change = replaced("shop.orders", {"_id": 1, "total": 30})
        assert change.operation_type == "replace"

    Args:
        ns: `"db.collection"`.
        document: the new document, with its `_id`.
        options: as in `inserted`.

    Raises:
        HandlerUsageError: the namespace, the `_id` or the values cannot be those of an event.
    """
    return _build("replace", ns, document, document, options)


def updated(
    ns: str,
    document: Mapping[str, Any] | None,
    fields: Mapping[str, Any] | None = None,
    *,
    removed: Sequence[str] = (),
    key: Any = None,
    **options: Any,
) -> Change:
    """
    Return an update.

    ::

        change = updated("shop.orders", {"_id": 1, "total": 40}, {"total": 40}, removed=["note"])
        assert change.update_description["removedFields"] == ["note"]

    Args:
        ns: `"db.collection"`.
        document: the document after lookup by the server, with its `_id`. None if it was deleted meanwhile.
        fields: paths that were set, with their values.
        removed: paths that were removed.
        key: the `_id`, if `document` is None.
        options: as in `inserted`.

    Raises:
        HandlerUsageError: the namespace, the `_id` or the values cannot be those of an event.
    """
    if not fields and not removed:
        raise HandlerUsageError(
            "An update that changes nothing makes no event. Give fields={'path': value} or removed=."
        )
    description = {"updatedFields": dict(fields or {}), "removedFields": list(removed), "truncatedArrays": []}
    identity = {"_id": key} if document is None else document
    return _build("update", ns, identity, document, {"updateDescription": description, **options})


def deleted(ns: str, key: Any, **options: Any) -> Change:
    """
    Return a delete.

    ::

        change = deleted("shop.orders", 1)
        assert change.document_key == {"_id": 1}

    Args:
        ns: `"db.collection"`.
        key: the `_id` of the deleted document.
        options: as in `inserted`.

    Raises:
        HandlerUsageError: the namespace, the `_id` or the values cannot be those of an event.
    """
    return _build("delete", ns, {"_id": key}, None, options)


def _build(
    operation: str, ns: str, identity: Mapping[str, Any], document: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> Change:
    if not all(ns.partition(".")[::2]):
        raise HandlerUsageError(f"ns={ns!r} is not a collection. Write 'db.collection', such as 'shop.orders'.")
    if "_id" not in identity:
        raise HandlerUsageError(f"A document without _id makes no {operation} event. Give it an _id.")
    known = {"document_key": {"_id": identity["_id"]}, "full_document": document, "wallTime": datetime.now(UTC)}
    change = Change.build(operation, ns=ns, **{**known, **options})
    try:
        bson.encode(change.raw, codec_options=_ANY_UUID)
    except (BSONError, OverflowError) as error:
        raise HandlerUsageError(f"MongoDB cannot hold this {operation}: {error}.") from None
    return change
