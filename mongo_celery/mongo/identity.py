"""
Identity of values: whether two are the same `_id`, and which `_id` a filter requires.

Three questions and their functions:

=====================  ========================================================================================
are they one `_id`?    `id_key`: equal keys exactly if MongoDB considers the values equal, apart from a collation
do they hash alike?    `canonical`: equal values become one BSON value. Different decimals may also become one,
                       so it suits a partition, but not an identity
are they written       `same_bson`: the same types and bytes, for values that must come back unchanged
alike?
=====================  ========================================================================================
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping
from decimal import Decimal
from typing import Any

import bson
from bson.binary import UuidRepresentation
from bson.code import Code
from bson.codec_options import CodecOptions, DatetimeConversion, TypeRegistry
from bson.decimal128 import Decimal128
from bson.raw_bson import RawBSONDocument
from bson.regex import Regex

NO_ID = object()
"""No `_id` is demanded; `None` may be somebody's."""

_COMPARED: CodecOptions[Any] = CodecOptions(uuid_representation=UuidRepresentation.STANDARD)
_STORED: CodecOptions[Any] = CodecOptions(
    document_class=RawBSONDocument,  # fields in their order, and a DBRef as the document that it is
    uuid_representation=UuidRepresentation.UNSPECIFIED,
    datetime_conversion=DatetimeConversion.DATETIME_MS,
)
_PLAIN = {str, int, bson.ObjectId}
"""Types that every codec sends as they are."""
_NO_TYPES = TypeRegistry()
_HASHED_AS_IS = {str, bson.ObjectId, bool, type(None)}


# ---------------------------------------------------------------- one `_id`?


def id_key(value: Any, codec: CodecOptions[Any]) -> Hashable:
    """
    Return a comparable key of an `_id`. Two keys are equal exactly if the server considers the values the same `_id`.

    So 1, 1.0 and `Decimal128("1.0")` are one `_id`, also in documents and arrays. Documents with the same fields in
    another order are two, and 0.1 and `Decimal128("0.1")` are two. If the collation of a collection makes more strings
    equal, only the server knows.

    Args:
        value: the value, as users write it or as it was read.
        codec: the codec of the collection, with which it is sent.

    Raises:
        OverflowError, InvalidDocument: BSON cannot hold it.
    """
    if type(value) in _PLAIN:
        return _key(value)
    return _key(bson.decode(bson.encode({"": value}, codec_options=codec), codec_options=_STORED)[""])


def _key(value: Any) -> Hashable:
    if isinstance(value, str | bson.ObjectId) and not isinstance(value, Code):
        return value
    if isinstance(value, Decimal128):
        value = value.to_decimal()
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        # Python compares numbers of all kinds by their exact value, as the server does, all but this one.
        is_nan = value.is_nan() if isinstance(value, Decimal) else math.isnan(value)
        return "number", "NaN" if is_nan else value
    if isinstance(value, RawBSONDocument):
        return "document", *((name, _key(item)) for name, item in value.items())
    if isinstance(value, list):
        return "array", *map(_key, value)
    if isinstance(value, Code) and value.scope is not None:
        return "code", bytes(value, "utf-8"), _key(value.scope)
    return bson.encode({"": value}, codec_options=_STORED)


def to_stored(value: Any, codec: CodecOptions[Any]) -> Any:
    """
    Return a value as a client without a type registry would read it. So any client can send it.

    Args:
        value: the value, as users write it or as it was read.
        codec: the codec of the collection, with which it is sent.

    Raises:
        OverflowError, InvalidDocument: BSON cannot hold it.
    """
    if type(value) in _PLAIN or codec.type_registry == _NO_TYPES:
        return value
    plain = codec.with_options(
        document_class=dict, type_registry=_NO_TYPES, datetime_conversion=DatetimeConversion.DATETIME_AUTO
    )
    return bson.decode(bson.encode({"": value}, codec_options=codec), codec_options=plain)[""]


def same_bson(one: Any, other: Any) -> bool:
    """Return True if two values are the same in BSON: 1 and True are not, and 1 and 1.0 are not."""
    return bson.encode({"": one}, codec_options=_COMPARED) == bson.encode({"": other}, codec_options=_COMPARED)


# ---------------------------------------------------------------- which `_id`?


def parse_filter_id(filter: Mapping[str, Any]) -> Any:  # noqa: A002 - PyMongo's word
    """Return the `_id` that a filter demands by equality, or `NO_ID`."""
    wanted = filter.get("_id", NO_ID)
    if isinstance(wanted, re.Pattern | Regex):
        return NO_ID
    if isinstance(wanted, Mapping) and any(str(name).startswith("$") for name in wanted):
        return wanted["$eq"] if set(wanted) == {"$eq"} else NO_ID
    return wanted


# ---------------------------------------------------------------- one hash


def canonical(value: Any) -> Any:  # noqa: PLR0911 - one answer for each kind of value
    """
    Return the same BSON value for all values that MongoDB considers equal, also inside documents and arrays.

    Different decimals may become one float, and so share a partition. Equal numbers always become the same value.
    Partition hashes are computed from the result, so it must never change between versions.
    """
    if type(value) in _HASHED_AS_IS or isinstance(value, (str, bson.ObjectId)):
        return value
    if isinstance(value, Decimal128):
        return _canonical_decimal(value)
    if isinstance(value, int):
        return int(value) if _fits(value) else str(value)
    if isinstance(value, float):
        return _canonical_float(value)
    if isinstance(value, Mapping):
        return {str(name): canonical(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [canonical(item) for item in value]
    return value


def _canonical_decimal(value: Decimal128) -> Any:
    number = value.to_decimal()
    if number.is_nan():
        return math.nan
    if number.is_finite() and number == number.to_integral_value() and _fits(number):
        return int(number)
    return _canonical_float(float(number))


def _canonical_float(value: float) -> Any:
    if math.isnan(value):
        return math.nan  # MongoDB holds all of them equal, whatever their sign and payload
    return int(value) if value.is_integer() and _fits(value) else value


def _fits(number: float | Decimal) -> bool:
    """Return True if a whole number is one of BSON's integers."""
    return -(1 << 63) <= number < 1 << 63
