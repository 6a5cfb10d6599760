"""A key as people type it, and the partition in which its changes lie."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from bson import ObjectId, json_util
from bson.binary import UuidRepresentation
from bson.errors import BSONError

from mongo_celery.bridge.partitioning import document_key, partition_hash
from mongo_celery.errors import CommandRefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mongo_celery.bridge.state.subscriptions import Layout
    from mongo_celery.bridge.wiring import Wiring

_JSON = json_util.RELAXED_JSON_OPTIONS.with_options(uuid_representation=UuidRepresentation.STANDARD)
_KEY_CHARS = 60


def key_of(text: str) -> Any:
    """The one value that a text means: an ObjectId, what it is as (extended) JSON, else itself."""
    if ObjectId.is_valid(text):
        return ObjectId(text)
    with suppress(ValueError, TypeError, BSONError, RecursionError):  # no JSON: then it is text
        return json_util.loads(text, json_options=_JSON)
    return text


def shown(key: object) -> str:
    """A key for people: as Python writes it, since a number and a text that looks like it are two keys."""
    text = repr(key)
    return text if len(text) <= _KEY_CHARS else f"{text[:_KEY_CHARS]}..."


def partition_of_key(wiring: Wiring, subscription: str, layout: Layout, key: object, source: str | None) -> int:
    """
    The partition in which the changes of a key lie.

    Args:
        key: a document's `_id`; with `partition_by`, what that gives.
        source: the collection of the document, as `db.collection`, where the handler has several.

    Raises:
        CommandRefusedError: it cannot be told.
    """
    rule = layout.key.partition(":")[2]
    value = key if rule != "_id" else document_key(_event_of(wiring, subscription, key, source))
    try:
        return partition_hash(value) % layout.partitions
    except Exception as error:  # noqa: BLE001 - whatever a key's type does to BSON
        raise CommandRefusedError(f"--key {shown(key)} can be no key: {error}.") from None


def _event_of(wiring: Wiring, subscription: str, key: object, source: str | None) -> Mapping[str, Any]:
    """What of an event the partition rule by document looks at."""
    name = source or _only_source(wiring, subscription)
    database, dot, collection = name.partition(".")
    if not (dot and database and collection):
        raise CommandRefusedError(f"--source {name!r} is not of the form 'db.collection'.")
    return {"ns": {"db": database, "coll": collection}, "documentKey": {"_id": key}}


def _only_source(wiring: Wiring, subscription: str) -> str:
    selectors, _ = wiring.stream()
    found = [source for each in selectors if each.name == subscription for source in each.sources]
    names = sorted({f"{each.database}.{each.collection}" for each in found if each.database and each.collection})
    if len(names) == 1 and len(found) == 1:
        return names[0]
    why = f"listens to {', '.join(sorted(map(str, found)))}" if found else "is not in this app"
    raise CommandRefusedError(
        f"Handler {subscription} {why}, so --key alone names no document: give its collection with --source.",
    )
