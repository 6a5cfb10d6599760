"""
Changes for unit tests, as MongoDB gives them: one function for each operation on a document.

Each takes what such an event always has, and refuses what it never has, so that a handler is not tried with what cannot
come. A change that was made by hand has no fence, unless one is given: `Change.build` says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from mongo_celery.arguments import nearest
from mongo_celery.bridge.change import Change
from mongo_celery.bridge.existing import SNAPSHOT
from mongo_celery.bridge.stream.operation_types import DOCUMENT_OPERATIONS, EXPANDED_OPERATIONS, OPERATIONS
from mongo_celery.errors import HandlerUsageError

_KNOWN = OPERATIONS | EXPANDED_OPERATIONS | {SNAPSHOT}
_OF_DOCUMENTS = DOCUMENT_OPERATIONS | {SNAPSHOT}
_WITH_DOCUMENT = {"insert", "replace", SNAPSHOT}
_WITHOUT_COLLECTION = {"dropDatabase"}


def inserted(ns: str, document: Mapping[str, Any], **options: Any) -> Change:
    """
    An insert.

    Args:
        ns: `"db.collection"`.
        document: with its `_id`.
        options: `fence`, `client`, `fencing_token` and fields of the event, as of `Change.build`.

    Raises:
        HandlerUsageError: no such event can come.
    """
    return _built("insert", ns, document, document, options)


def replaced(ns: str, document: Mapping[str, Any], **options: Any) -> Change:
    """
    A replace.

    Args:
        ns: `"db.collection"`.
        document: as it is afterwards, with its `_id`.
        options: as of `inserted`.

    Raises:
        HandlerUsageError: no such event can come.
    """
    return _built("replace", ns, document, document, options)


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
    An update.

    Args:
        ns: `"db.collection"`.
        document: as the server has looked it up, with its `_id`; None for one that was deleted meanwhile.
        fields: paths that were set, with their values.
        removed: paths that were removed.
        key: the `_id`, where `document` is None.
        options: as of `inserted`.

    Raises:
        HandlerUsageError: no such event can come.
    """
    if not fields and not removed:
        raise HandlerUsageError(
            "an update that changes nothing makes no event: give fields={'path': value} or removed=."
        )
    if document is None and key is None:
        raise HandlerUsageError("updated(..., None) is of a document that is gone: give its _id, key=...")
    description = {"updatedFields": dict(fields or {}), "removedFields": list(removed), "truncatedArrays": []}
    identity = {"_id": key} if document is None else document
    return _built("update", ns, identity, document, {"updateDescription": description, **options})


def deleted(ns: str, key: Any, **options: Any) -> Change:
    """
    A delete.

    Args:
        ns: `"db.collection"`.
        key: the document's `_id`; the document is gone.
        options: as of `inserted`.

    Raises:
        HandlerUsageError: no such event can come.
    """
    return _built("delete", ns, {"_id": key}, None, options)


def build_change(operation_type: str, *, ns: str, **options: Any) -> Change:
    """
    As `Change.build`, refusing what no server sends.

    Args:
        operation_type: as in MongoDB's events, or `snapshot`.
        ns: `"db.collection"`; `"db"` for `dropDatabase` alone.
        options: of `Change.build`.

    Raises:
        HandlerUsageError: no such event can come.
    """
    if operation_type not in _KNOWN:
        raise HandlerUsageError(
            f"operation {operation_type!r} is unknown{nearest(operation_type, sorted(_KNOWN))}: no server sends it.",
        )
    database, _, collection = ns.partition(".")
    if operation_type in _WITHOUT_COLLECTION:
        if collection:
            raise HandlerUsageError(
                f"the event of a {operation_type} names no collection: ns={database!r}, not {ns!r}."
            )
    elif not database or not collection:
        raise HandlerUsageError(f"ns={ns!r} names no collection: write 'db.collection', as events have it.")
    change = Change.build(operation_type, ns=ns, **options)
    _refuse_impossible(change)
    return change


def _refuse_impossible(change: Change) -> None:
    operation, document = change.operation_type, change.full_document
    if operation in _OF_DOCUMENTS and "_id" not in change.document_key:
        raise HandlerUsageError(f"the event of a {operation} has a document key: give a document with its _id.")
    if operation in _WITH_DOCUMENT and document is None:
        raise HandlerUsageError(f"the event of a {operation} carries its document: give full_document=...")
    if operation == "delete" and document is not None:
        raise HandlerUsageError("the event of a delete has no document any more: full_document_before_change has it.")
    if document is not None and document.get("_id") != change.document_key.get("_id"):
        raise HandlerUsageError("the document's _id is another than that of the document key, and it never changes.")
    if (operation == "update") != (change.update_description is not None):
        raise HandlerUsageError("updateDescription belongs to the event of an update, and to none else: see updated().")


def _built(
    operation: str,
    ns: str,
    identity: Mapping[str, Any],
    document: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> Change:
    if "_id" not in identity:
        raise HandlerUsageError(f"the document of a {operation} has an _id by the time of its event: give it one.")
    named = {"document_key": {"_id": identity["_id"]}, "full_document": document, "wallTime": datetime.now(UTC)}
    return build_change(operation, ns=ns, **{**named, **options})
