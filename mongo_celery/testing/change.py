"""Changes for unit tests in MongoDB's form: one function for each operation on a document, and one for a real case."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import bson
from bson import json_util
from bson.binary import UuidRepresentation
from bson.codec_options import DEFAULT_CODEC_OPTIONS, CodecOptions
from bson.errors import BSONError

from mongo_celery.bridge.change import Change, read_namespace
from mongo_celery.bridge.fenced.fence import Fence
from mongo_celery.errors import HandlerUsageError
from mongo_celery.quantities import number

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


_MAKE_CASE = "Make it with celery -A APP changes dead-letters list --id ID --json."


def load_change(
    case: str | Path | Mapping[str, Any],
    *,
    client: Any = None,
    fence: Fence | None = None,
    fencing_token: int | None = None,
) -> Change:
    """
    Return the change of a production case, as the worker gave it to the handler.

    ::

        # Part of what `celery -A shop changes dead-letters list --id ID --json` prints:
        event = {
            "_id": {"_data": "82"},
            "operationType": "delete",
            "ns": {"db": "shop", "coll": "orders"},
            "documentKey": {"_id": {"$numberInt": "7"}},
        }
        change = load_change({"event": event})
        assert change.document_key == {"_id": 7}

    Args:
        case: the output of `dead-letters list --id ID --json`, or of `changes show HANDLER PARTITION --json`. It is a
            file, its text, or the parsed object. A part of it with `event` is sufficient.
        client: as in `Change.build`. Its codec options decode the event, such as `tz_aware`.
        fence: as in `Change.build`.
        fencing_token: as in `Change.build`.

    Raises:
        HandlerUsageError: it contains no change, several changes, or one whose event is not stored or unreadable.
    """
    found: Any = case
    if not isinstance(found, Mapping):
        is_text = isinstance(found, str) and found.lstrip()[:1] in ("{", "[")
        try:
            found = json.loads(found if is_text else Path(found).read_bytes())  # bytes: PowerShell writes UTF-16
        except ValueError as error:
            raise HandlerUsageError(f"This case is not complete JSON ({error}). {_MAKE_CASE}") from error
    letters = found.get("dead_letters", [found]) if isinstance(found, Mapping) else found
    events = [each["event"] for each in letters or () if isinstance(each, Mapping) and "event" in each]
    if len(events) != 1:
        raise HandlerUsageError(
            f"This case has {number(len(events), 'change', 'changes')} with an event, and needs one. {_MAKE_CASE}"
        )
    if events[0] is None:
        raise HandlerUsageError(
            "The event of this case is not stored, or no client can decode it, so no handler could get it. Choose "
            "another dead letter, or build the change with inserted(), updated(), replaced() or deleted()."
        )
    codec = DEFAULT_CODEC_OPTIONS if client is None else client.codec_options
    try:
        event = bson.decode(bson.encode(json_util.loads(json.dumps(events[0]))), codec)
        operation = event["operationType"]
    except (BSONError, KeyError, TypeError, ValueError) as error:
        raise HandlerUsageError(
            f"The event of this case cannot be decoded ({type(error).__name__}: {error}). If your handlers have codec "
            "options, such as datetime_conversion, pass a client with them as client=..."
        ) from error
    return Change.build(
        operation,
        ns=read_namespace({"ns": event.pop("ns", {})}),
        client=client,
        fence=fence,
        fencing_token=fencing_token,
        **event,
    )


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
