"""
Values as the server sees them. Two values that Python considers equal may be two documents, and vice versa.

A transaction stores values in BSON's types, with the codec of their collection. So every process that reads them sends
the same bytes, whatever its codec.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

import bson
from bson import ObjectId, Regex, json_util
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions, DatetimeConversion

from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.identity import same_bson

EXTENDED_JSON = json_util.CANONICAL_JSON_OPTIONS.with_options(
    uuid_representation=UuidRepresentation.UNSPECIFIED, datetime_conversion=DatetimeConversion.DATETIME_AUTO
)
"""Text form that preserves every type and field name. A UUID is a Binary, which every codec can send."""
_WRITTEN = EXTENDED_JSON.with_options(uuid_representation=UuidRepresentation.STANDARD)

Codec = CodecOptions[Any]

_PLAIN: Codec = CodecOptions(
    tz_aware=True,
    uuid_representation=UuidRepresentation.UNSPECIFIED,
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
)


def plain(name: str, value: Any, codec: Codec) -> Any:
    """
    Return a value in BSON's types: a UUID becomes a Binary, a tuple a list, a time has milliseconds and a zone.

    Args:
        name: the name of the value, for messages.
        value: the value as the user gave it.
        codec: the codec of the value's collection.

    Raises:
        ConfigurationError: BSON cannot hold it.
    """
    try:
        return bson.decode(bson.encode({"value": value}, codec_options=codec), codec_options=_PLAIN)["value"]
    except Exception as error:  # PyMongo raises many kinds: OverflowError, ValueError, InvalidDocument
        raise ConfigurationError(
            f"{name} cannot be stored in MongoDB ({error}). Use types of BSON and integers of at most 64 bits. "
            "For a uuid.UUID use a client with uuidRepresentation='standard'.",
        ) from error


def plain_id(name: str, value: Any, codec: Codec) -> Any:
    """
    Return an `_id` in BSON's types.

    Raises:
        ConfigurationError: no document can have it. It would be a condition, not an id.
    """
    if isinstance(value, (re.Pattern, Regex, list, tuple)):
        raise ConfigurationError(f"{name}={value!r} cannot be an _id. Pass the id itself, not a pattern or a list.")
    if isinstance(value, Mapping) and any(str(key).startswith("$") for key in value):
        raise ConfigurationError(
            f"{name}={value!r} cannot be an _id, because its keys begin with $. Pass the id itself."
        )
    return plain(name, value, codec)


def to_text(value: Any) -> str:
    """Return a value as Extended JSON. It may contain a UUID that a client has read as Python's own."""
    return json_util.dumps(value, json_options=_WRITTEN)


def from_text(text: str) -> Any:
    """
    Return the value of an Extended JSON text.

    Raises:
        Exception: the text is not Extended JSON. The error may be of any kind.
    """
    return json_util.loads(text, json_options=EXTENDED_JSON)


def interpret_id(text: str) -> list[Any]:
    """Return the other possible meanings of a typed id: Extended JSON, an ObjectId."""
    found: list[Any] = []
    with suppress(Exception):  # see `from_text`
        found.append(from_text(text))
    if ObjectId.is_valid(text):
        found.append(ObjectId(text))
    return found


def has_operators(value: Any) -> bool:
    """Return True if a name at any depth begins with `$`. MongoDB 4.4 does not store such a value."""
    if isinstance(value, Mapping):
        return any(str(name).startswith("$") or has_operators(each) for name, each in value.items())
    return isinstance(value, (list, tuple)) and any(map(has_operators, value))


def storable(name: str, value: Mapping[str, Any], codec: Codec) -> dict[str, Any]:
    """
    Return an update or a filter as it is read back from its stored text.

    Raises:
        ConfigurationError: BSON cannot hold it, or Extended JSON reads it differently.
    """
    if not value:
        return {}  # most participants have no filter to check
    given = plain(name, value, codec)
    try:
        survives = same_bson(from_text(to_text(given)), given)
    except Exception:  # noqa: BLE001 - whatever the parser stumbles over, the remedy is the same
        survives = False
    if not survives:
        raise ConfigurationError(
            f"{name}={value!r} would change when it is stored as Extended JSON, because names such as $regex, "
            "$date or $oid are special there. Use values instead (re.compile('^L'), a datetime, an ObjectId), "
            "and combine several conditions on one field with $and.",
        )
    return cast("dict[str, Any]", given)
