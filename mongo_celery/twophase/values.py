"""
Values as the server has them: two that Python calls equal may be two documents, and the other way round.

What a transaction keeps is brought into BSON's own types at its beginning, with the codec of the collection that it
was given with. Whoever reads it later, with whatever codec, then sends the same bytes.
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
from bson.int64 import Int64

from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.identity import same_bson

EXTENDED_JSON = json_util.CANONICAL_JSON_OPTIONS.with_options(
    uuid_representation=UuidRepresentation.UNSPECIFIED, datetime_conversion=DatetimeConversion.DATETIME_AUTO
)
"""Text in which every type and field name survives; a UUID is a Binary, which every codec can send."""
_WRITTEN = EXTENDED_JSON.with_options(uuid_representation=UuidRepresentation.STANDARD)

Codec = CodecOptions[Any]

_PLAIN: Codec = CodecOptions(
    tz_aware=True,
    uuid_representation=UuidRepresentation.UNSPECIFIED,
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
)
_REGEX_OPTIONS = set("imsx")

_SURVIVING = {str, int, Int64, bool, ObjectId, type(None)}
_MEANING_NOTHING = {
    *("$set", "$unset", "$inc", "$mul", "$min", "$max", "$push", "$pull", "$addToSet"),
    *("$eq", "$ne", "$gt", "$gte", "$lt", "$lte", "$exists"),
}


def plain(name: str, value: Any, codec: Codec) -> Any:
    """
    A value in BSON's own types: a UUID becomes a Binary, a tuple a list, a time has milliseconds and a zone.

    Args:
        name: what it is, for the message.
        value: as given by the user.
        codec: of the collection that it was given with.

    Raises:
        ConfigurationError: BSON cannot hold it.
    """
    try:
        return bson.decode(bson.encode({"value": value}, codec_options=codec), codec_options=_PLAIN)["value"]
    except Exception as error:  # PyMongo raises what it likes: OverflowError, ValueError, InvalidDocument
        raise ConfigurationError(
            f"{name} cannot be stored in MongoDB ({error}): use types of BSON, integers of at most 64 bits, and for a "
            "uuid.UUID a client with uuidRepresentation='standard'.",
        ) from error


def plain_id(name: str, value: Any, codec: Codec) -> Any:
    """
    The same for an `_id`.

    Raises:
        ConfigurationError: no document can have it; such a value would be a condition, not an id.
    """
    if isinstance(value, (re.Pattern, Regex, list, tuple)):
        raise ConfigurationError(f"{name}={value!r} can be no _id: pass the id itself, not a pattern or a list.")
    if isinstance(value, Mapping) and any(str(key).startswith("$") for key in value):
        raise ConfigurationError(f"{name}={value!r} can be no _id: its keys begin with $. Pass the id itself.")
    return plain(name, value, codec)


def to_text(value: Any) -> str:
    """As Extended JSON; a UUID that a client has read as Python's own, such as an `_id`, too."""
    return json_util.dumps(value, json_options=_WRITTEN)


def from_text(text: str) -> Any:
    """
    Read it back.

    Raises:
        Exception: of any kind; it is no Extended JSON.
    """
    return json_util.loads(text, json_options=EXTENDED_JSON)


def readings(text: str) -> list[Any]:
    """What a text that somebody has typed as an id may mean beside itself: Extended JSON, an ObjectId."""
    found: list[Any] = []
    with suppress(Exception):  # see `from_text`
        found.append(from_text(text))
    if ObjectId.is_valid(text):
        found.append(ObjectId(text))
    return found


def storable_rule(name: str, value: Mapping[str, Any], codec: Codec) -> dict[str, Any]:
    """A filter as it comes back from the text in which it is kept; errors as of `storable`."""
    if not value:
        return {}  # of most participants there is nothing to check
    return _surviving(name, value, _with_patterns(plain(name, value, codec)))


def storable(name: str, value: Mapping[str, Any], codec: Codec) -> dict[str, Any]:
    """
    An update as it comes back from the text in which it is kept.

    Raises:
        ConfigurationError: BSON cannot hold it, or Extended JSON reads it as something else.
    """
    return _surviving(name, value, plain(name, value, codec))


def is_plainly_storable(value: Any) -> bool:
    """
    Whether a value in BSON's own types survives Extended JSON for sure: it has only names that mean nothing there.

    Most updates and rules are so; to try it costs many times as much.
    """
    if isinstance(value, dict):
        return all(
            (not key.startswith("$") or key in _MEANING_NOTHING) and is_plainly_storable(item)
            for key, item in value.items()
        )
    return type(value) in _SURVIVING


def _surviving(name: str, value: object, given: Any) -> dict[str, Any]:
    if is_plainly_storable(given):
        return cast("dict[str, Any]", given)
    try:
        survives = same_bson(from_text(to_text(given)), given)
    except Exception:  # noqa: BLE001 - whatever the parser stumbles over, the remedy is the same
        survives = False
    if not survives:
        raise ConfigurationError(
            f"{name}={value!r} would change when it is stored as Extended JSON, which has a meaning of its own for "
            "names such as $regex, $date or $oid. Use values instead (re.compile('^L'), a datetime, an ObjectId), and "
            "combine several conditions on one field with $and.",
        )
    return cast("dict[str, Any]", given)


def _with_patterns(value: Any) -> Any:
    """`{"$regex": "^L"}` alone as the pattern that it means in a filter: Extended JSON reads it as one."""
    if isinstance(value, list):
        return [_with_patterns(each) for each in value]
    if not isinstance(value, dict):
        return value
    pattern, options = value.get("$regex"), value.get("$options", "")
    alone = set(value) <= {"$regex", "$options"} and isinstance(pattern, str) and isinstance(options, str)
    if alone and set(options) <= _REGEX_OPTIONS:
        return Regex(cast("str", pattern), options)
    return {key: _with_patterns(each) for key, each in value.items()}
