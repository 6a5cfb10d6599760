"""A key as an operator types it, and the partition of its changes."""

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
from mongo_celery.findings import list_some

if TYPE_CHECKING:
    from mongo_celery.bridge.state.subscriptions import Layout
    from mongo_celery.bridge.wiring import Wiring

_JSON = json_util.RELAXED_JSON_OPTIONS.with_options(uuid_representation=UuidRepresentation.STANDARD)
_CODEC: CodecOptions[dict[str, Any]] = CodecOptions(uuid_representation=UuidRepresentation.STANDARD)
_KEY_CHARS = 60
_READ_SECONDS = 3.0


def keys_of(text: str) -> list[Any]:
    """
    Return the possible `_id` values of a text: the text, its value as JSON, an ObjectId.

    Raises:
        CommandRefusedError: it is a regular expression, which would match all keys in a query.
    """
    found: list[Any] = [text]
    with suppress(Exception):  # not JSON: then it is text, and PyMongo raises many kinds, even decimal errors
        value = json_util.loads(text, json_options=_JSON)
        bson.encode({"_id": value}, codec_options=_CODEC)  # otherwise no document has it, and no query could name it
        found.append(value)
    if isinstance(found[-1], Regex | re.Pattern):
        raise CommandRefusedError(f"--key {text} is a regular expression. Use the whole _id of one document.")
    if ObjectId.is_valid(text):
        found.append(ObjectId(text))
    return found


def find_key(wiring: Wiring, handler: str, layout: Layout, text: str, source: str | None) -> tuple[Any, int]:
    """
    Return the key that a text means, and the hash of its partition key.

    The key is the one that exists as a document's `_id`. If none or several exist, or with `partition_by`, it is an
    ObjectId, otherwise the JSON value, otherwise the text. `'"42"'` is always a text, `'{"$oid": "..."}'` an ObjectId.

    Args:
        source: the collection of the document, as `db.collection`, if the handler has several.

    Raises:
        CommandRefusedError: the key is ambiguous or impossible.
    """
    values = keys_of(text)
    is_by_document = layout.key.partition(":")[2] == "_id"
    database = collection = ""
    if source or is_by_document:
        database, collection = _collection_of(wiring, handler, source)
    if len(values) > 1 and is_by_document:
        table = wiring.client[database].get_collection(collection, _CODEC)
        with suppress(PyMongoError), pymongo.timeout(_READ_SECONDS):  # without the right to read it, none counts
            there = [value for value in values if table.find_one({"_id": value}, {"_id": 1}) is not None]
            values = there if len(there) == 1 else values
    key = values[-1]
    event = {"ns": {"db": database, "coll": collection}, "documentKey": {"_id": key}}
    try:
        return key, partition_hash(document_key(event) if is_by_document else key)
    except Exception as error:  # noqa: BLE001 - whatever a key's type does to BSON
        raise CommandRefusedError(f"--key {quote_key(key)} cannot be the _id of a document: {error}.") from None


def quote_key(key: object) -> str:
    """Return a key in Python's form, because a number and an equal-looking text are different keys."""
    text = repr(key)
    return text if len(text) <= _KEY_CHARS else f"{text[:_KEY_CHARS]}..."


def key_json(key: object) -> str:
    """Return a key as `--key` accepts it: JSON, which is the same key whatever documents exist."""
    return json_util.dumps(key, json_options=_JSON)


def _collection_of(wiring: Wiring, handler: str, source: str | None) -> tuple[str, str]:
    """Return the document's collection. Refuse one that no handler of this app watches."""
    watched = [each for one in wiring.stream()[0] if one.name == handler for each in one.sources]
    if source is None and not (len(watched) == 1 and watched[0].database and watched[0].collection):
        why = f"watches {', '.join(sorted(map(str, watched)))}" if watched else "is not in this app"
        raise CommandRefusedError(
            f"Handler {handler} {why}, so --key alone is not enough. Also give the collection of the document: "
            "--source db.collection",
        )
    name = source or str(watched[0])
    database, dot, collection = name.partition(".")
    if not (dot and database and collection):
        raise CommandRefusedError(f"--source {name!r} must be DATABASE.COLLECTION, for example --source shop.orders")
    if watched and not any(each.covers(database, collection) for each in watched):
        raise CommandRefusedError(f"Handler {handler} does not watch {name}. It watches {list_some(watched)}.")
    return database, collection
