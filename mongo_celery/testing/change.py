"""
Changes for unit tests, as MongoDB gives them: one function for each operation on a document.

Each takes what such an event always has, and refuses what it never has, so that a handler is not tried with what cannot
come. A change that was made by hand has no fence, unless one is given: `Change.build` says why.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import bson
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions
from bson.errors import BSONError
from bson.regex import Regex

from mongo_celery.arguments import nearest
from mongo_celery.bridge.change import Change
from mongo_celery.bridge.existing import SNAPSHOT
from mongo_celery.bridge.stream.filter import DOCUMENT_OPERATIONS, EXPANDED_OPERATIONS, OPERATIONS
from mongo_celery.errors import HandlerUsageError

_KNOWN = OPERATIONS | EXPANDED_OPERATIONS | {SNAPSHOT}
_OF_DOCUMENTS = DOCUMENT_OPERATIONS | {SNAPSHOT}
_WITH_DOCUMENT = {"insert", "replace", SNAPSHOT}
_OPTIONS = {"document_key", "full_document", "fencing_token", "fence", "client"}
_FIELDS_OF = {
    "documentKey": _OF_DOCUMENTS,
    "fullDocument": _OF_DOCUMENTS,
    "fullDocumentBeforeChange": {"update", "replace", "delete"},
    "operationDescription": EXPANDED_OPERATIONS | {"rename"},
}
_FIELDS = _FIELDS_OF.keys() | {
    *("_id", "operationType", "clusterTime", "wallTime", "ns", "nsType", "to", "updateDescription", "collectionUUID"),
    *("lsid", "txnNumber", "splitEvent", "stateBeforeChange", "commitTimestamp"),
}
_ALIKE = 0.85
_SILENT = {"admin", "config", "local"}
_NO_NAME = re.compile(r'[/\\ "$\0]')
_ANY_UUID: CodecOptions[Any] = CodecOptions(uuid_representation=UuidRepresentation.STANDARD)


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
    if document is not None and key is not None and key != document.get("_id"):
        raise HandlerUsageError(
            f"key={key!r} is another _id than the document's, {document.get('_id')!r}: leave it out."
        )
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
        ns: `"db.collection"`; `"db"` for `dropDatabase`, and `""` for `invalidate`.
        options: of `Change.build`.

    Raises:
        HandlerUsageError: no such event can come.
    """
    if operation_type not in _KNOWN:
        raise HandlerUsageError(
            f"operation {operation_type!r} is unknown{nearest(operation_type, sorted(_KNOWN))}: no server sends it.",
        )
    _check_namespace(operation_type, ns)
    for name in sorted(options.keys() - _OPTIONS - _FIELDS):
        meant = difflib.get_close_matches(_camel(name), _FIELDS, n=1, cutoff=_ALIKE)
        meant = meant or difflib.get_close_matches(name, _OPTIONS, n=1, cutoff=_ALIKE)
        if meant:  # else a pipeline may have added it
            raise HandlerUsageError(f"no event has a field {name!r} (did you mean {meant[0]!r}?).")
    change = Change.build(operation_type, ns=ns, **options)
    _refuse_impossible(change)
    return change


def _check_namespace(operation: str, ns: str) -> None:
    """Names that a server takes, as many of them as the event has."""
    if operation == "invalidate":
        if ns:
            raise HandlerUsageError(f"the event of an invalidate has no namespace: ns='', not {ns!r}.")
        return
    database, _, collection = ns.partition(".")
    if operation == "dropDatabase":
        if collection:
            raise HandlerUsageError(f"the event of a dropDatabase names no collection: ns={database!r}, not {ns!r}.")
    elif not database or not collection:
        raise HandlerUsageError(f"ns={ns!r} names no collection: write 'db.collection', as events have it.")
    if database in _SILENT or collection.startswith("system."):
        raise HandlerUsageError(f"ns={ns!r} is of the server's own, and in no change stream.")
    if not database or _NO_NAME.search(database) or "$" in collection or collection[-1:] == ".":
        raise HandlerUsageError(f"ns={ns!r} is no name that a server takes.")


def _refuse_impossible(change: Change) -> None:
    operation, raw = change.operation_type, change.raw
    _check_documents(change)
    if (operation == "update") != (change.update_description is not None):
        raise HandlerUsageError("updateDescription belongs to the event of an update, and to none else: see updated().")
    if (operation == "rename") != ("to" in raw):
        raise HandlerUsageError("to={'db': ..., 'coll': ...} belongs to the event of a rename, and to none else.")
    for name in sorted(raw.keys() & _FIELDS_OF.keys()):
        if operation not in _FIELDS_OF[name]:
            raise HandlerUsageError(f"the event of a {operation} has no {name}.")
    _check_description(change.update_description or {})
    try:
        bson.encode(raw, codec_options=_ANY_UUID)
    except (BSONError, OverflowError) as error:
        raise HandlerUsageError(f"MongoDB cannot hold this {operation}: {error}.") from None


def _check_documents(change: Change) -> None:
    operation, document, key = change.operation_type, change.full_document, change.document_key
    if operation in _OF_DOCUMENTS and "_id" not in key:
        raise HandlerUsageError(f"the event of a {operation} has a document key: give a document with its _id.")
    if isinstance(key.get("_id"), list | tuple | re.Pattern | Regex):
        raise HandlerUsageError("an _id is no list and no regular expression: servers refuse such a document.")
    if operation in _WITH_DOCUMENT and document is None:
        raise HandlerUsageError(f"the event of a {operation} carries its document: give full_document=...")
    if operation == "delete" and document is not None:
        raise HandlerUsageError("the event of a delete has no document any more: fullDocumentBeforeChange has it.")
    for found in (document, change.full_document_before_change):
        if found is not None and found.get("_id") != key.get("_id"):
            raise HandlerUsageError(
                "the document's _id is another than that of the document key, and it never changes.",
            )


def _check_description(description: Mapping[str, Any]) -> None:
    fields, removed = description.get("updatedFields") or {}, description.get("removedFields") or []
    if "_id" in fields or "_id" in removed:
        raise HandlerUsageError("an update never changes the _id: leave it out of what was set or removed.")
    both = sorted(fields.keys() & set(removed))
    if both:
        raise HandlerUsageError(f"one change of a document does not both set and remove {both[0]!r}.")


def _camel(name: str) -> str:
    """As events have it: `full_document` is `fullDocument` there."""
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


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
