"""A key as people type it, and the partition in which its changes lie."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import bson
import pymongo
from bson import ObjectId, Regex, json_util
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions
from pymongo.errors import PyMongoError

from mongo_celery.bridge.partitioning import document_key, partition_hash
from mongo_celery.errors import CommandRefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mongo_celery.bridge.state.subscriptions import Layout
    from mongo_celery.bridge.wiring import Wiring

_JSON = json_util.RELAXED_JSON_OPTIONS.with_options(uuid_representation=UuidRepresentation.STANDARD)
_CODEC: CodecOptions[dict[str, Any]] = CodecOptions(uuid_representation=UuidRepresentation.STANDARD)
_KEY_CHARS = 60
_READ_SECONDS = 3.0


def keys_of(text: str) -> list[Any]:
    """
    Return the values of `_id` that a text may mean: the text, its value as JSON, an ObjectId.

    Raises:
        CommandRefusedError: it is a regular expression, which a query would match with all keys.
    """
    found: list[Any] = [text]
    with suppress(Exception):  # no JSON: then it is text; PyMongo raises what it likes, decimal's errors too
        value = json_util.loads(text, json_options=_JSON)
        bson.encode({"_id": value}, codec_options=_CODEC)  # else no document has it, and no query could name it
        found.append(value)
    if isinstance(found[-1], Regex | re.Pattern):
        raise CommandRefusedError("A key is the _id of a document, and no regular expression is one: name a whole key.")
    if ObjectId.is_valid(text):
        found.append(ObjectId(text))
    return found


def key_of(wiring: Wiring, subscription: str, layout: Layout, text: str, source: str | None) -> Any:
    """
    Return the one key that a text means.

    That is the one which a document has as its `_id`. Where none or several are there, or with `partition_by`, it is
    an ObjectId, else the value as JSON, else the text. `'"42"'` is always a text, `'{"$oid": "..."}'` an ObjectId.

    Args:
        source: the collection of the document, as `db.collection`, where the handler has several.

    Raises:
        CommandRefusedError: it cannot be told.
    """
    values = keys_of(text)
    if len(values) > 1 and _is_by_document(layout):
        database, collection = _collection_of(wiring, subscription, source)
        table = wiring.client[database].get_collection(collection, _CODEC)
        with suppress(PyMongoError), pymongo.timeout(_READ_SECONDS):  # without the right to read it, none counts
            there = [value for value in values if table.find_one({"_id": value}, {"_id": 1}) is not None]
            values = there if len(there) == 1 else values
    return values[-1]


def quote_key(key: object) -> str:
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
    return hash_of_key(wiring, subscription, layout, key, source) % layout.partitions


def hash_of_key(wiring: Wiring, subscription: str, layout: Layout, key: object, source: str | None) -> int:
    """Return the hash by which the changes of a key are spread. Arguments and errors as of `partition_of_key`."""
    value = document_key(_event_of(wiring, subscription, key, source)) if _is_by_document(layout) else key
    try:
        return partition_hash(value)
    except Exception as error:  # noqa: BLE001 - whatever a key's type does to BSON
        raise CommandRefusedError(f"--key {quote_key(key)} can be no key: {error}.") from None


def _is_by_document(layout: Layout) -> bool:
    return layout.key.partition(":")[2] == "_id"


def _event_of(wiring: Wiring, subscription: str, key: object, source: str | None) -> Mapping[str, Any]:
    """What of an event the partition rule by document looks at."""
    database, collection = _collection_of(wiring, subscription, source)
    return {"ns": {"db": database, "coll": collection}, "documentKey": {"_id": key}}


def _collection_of(wiring: Wiring, subscription: str, source: str | None) -> tuple[str, str]:
    name = source or _only_source(wiring, subscription)
    database, dot, collection = name.partition(".")
    if not (dot and database and collection):
        raise CommandRefusedError(f"--source {name!r} is not of the form 'db.collection'.")
    return database, collection


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
