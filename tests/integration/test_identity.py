"""When two values are one `_id`: our answer beside the server's."""

from __future__ import annotations

import math
import struct
import uuid
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from bson import DBRef, Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp
from bson.binary import Binary, UuidRepresentation
from bson.code import Code
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import create_decimal128_context
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import DuplicateKeyError

from mongo_celery.mongo.identity import id_key
from tests.fixtures.samples import BSON_VALUES

Document = dict[str, Any]

CODEC: CodecOptions[Any] = CodecOptions(
    uuid_representation=UuidRepresentation.STANDARD, datetime_conversion=DatetimeConversion.DATETIME_AUTO
)
TIME = datetime(2024, 2, 29, 12, 0, 0, 5000, tzinfo=UTC)
SEVEN = uuid.UUID(int=7)

NUMBERS: list[Any] = [
    *(0, -0.0, Decimal128("-0"), Decimal128("0E+100"), Decimal128("0E-6176"), False),
    *(1, 1.0, Int64(1), Decimal128("1"), Decimal128("1.000"), Decimal128("10E-1"), True),
    *(0.5, Decimal128("0.50"), 0.1, Decimal128("0.1"), Decimal128("0.1000000000000000055511151231257827")),
    *(2**53, 2**53 + 1, float(2**53), Decimal128(str(2**53 + 1))),
    *(2**63 - 1, float(2**63), Decimal128(str(2**63 - 1)), Decimal128(str(2**63)), -(2**63), -float(2**63)),
    *(1e300, Decimal128("1E+300"), Decimal128("1E+400"), Decimal128("2E+400"), Decimal128("1E+6144")),
    *(5e-324, Decimal128("4.940656458412465441765687928682213E-324"), Decimal128("1E-6176"), Decimal128("2E-6176")),
    *(math.inf, -math.inf, Decimal128("Infinity"), Decimal128("-Infinity")),
    *(math.nan, -math.nan, struct.unpack("<d", b"\1\0\0\0\0\0\xf8\x7f")[0]),
    *(Decimal128("NaN"), Decimal128("-NaN"), Decimal128("sNaN")),
]
"""Those that a float, an integer or a decimal alone cannot tell apart, or takes for two."""

OTHERS: list[Any] = [
    *({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1.0, "b": Decimal128("2")}, {"a": 1}, {"b": 1}, {"a": True}, {}),
    *({"a": {}}, {"a": None}, {"a": []}, {"": 1}, {"a": [1]}, {"a": [1.0]}, {"a": (1,)}, {"a": [[1.0]]}, {"a": [1, 2]}),
    *(TIME, TIME.astimezone(timezone(timedelta(hours=5))), TIME.replace(microsecond=5999)),
    *(TIME.replace(tzinfo=None), DatetimeMS(1709208000005), TIME.replace(microsecond=6000), DatetimeMS(1 << 62)),
    *(Timestamp(1, 2), Timestamp(2, 1), Timestamp(0, 5)),
    *(SEVEN, Binary(SEVEN.bytes, 4), Binary(SEVEN.bytes, 3), SEVEN.bytes),
    *(b"", b"ab", Binary(b"ab", 0), Binary(b"ab", 2), Binary(b"ab", 5), Binary(b"\2\0\0\0ab", 0)),
    *("", "a", "A", "\u00e1", "number", ObjectId("0" * 24), "0" * 24, None, MinKey(), MaxKey()),
    *({"r": Regex("a")}, {"r": Regex("a", "i")}, {"r": Regex("a", "mi")}, {"r": Regex("a", "im")}),
    *(Code("a"), Code("a", {}), Code("a", {"x": 1}), Code("a", {"x": 1.0})),
    *({"d": DBRef("c", 1)}, {"d": DBRef("c", 1.0)}, {"d": DBRef("c", 2)}),
]

scalars = st.one_of(
    st.sampled_from(NUMBERS),
    st.integers(-3, 3),
    st.floats(),
    st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-100, max_value=100).map(Decimal128),
    st.sampled_from([value for value in BSON_VALUES.values() if not isinstance(value, dict | list | Regex | DBRef)]),
)
ids = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=2).map(lambda items: {"a": items})
        | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=3,
)


def respelled(value: Any, draw: st.DrawFn) -> Any:
    """The same, or nearly the same, in other types and another order."""
    if isinstance(value, dict):
        return {name: respelled(item, draw) for name, item in draw(st.permutations(list(value.items())))}
    if isinstance(value, list):
        return [respelled(item, draw) for item in value]
    if isinstance(value, int | float | Decimal128) and not isinstance(value, bool):
        number = Decimal(str(value).replace("sNaN", "NaN"))
        rounded = Decimal128(create_decimal128_context().create_decimal(number))
        return draw(st.sampled_from([value, float(number), rounded]))
    return value


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Any, Any]:
    """Two ids, of which the second is often much like the first."""
    one = draw(ids)
    return one, respelled(one, draw) if draw(st.booleans()) else draw(ids)


@pytest.fixture
def things(database: Database[Document]) -> Collection[Document]:
    return database.get_collection("things", codec_options=CODEC)


def is_there(things: Collection[Document], value: Any) -> bool:
    """Whether a document with this `_id` cannot be inserted because there is one."""
    try:
        things.insert_one({"_id": value})
    except DuplicateKeyError:
        return True
    return False


def test_ids_of_all_kinds_are_told_apart_as_the_server_does(things: Collection[Document]) -> None:
    """Each value belongs to the first that the server took for the same `_id`, and so do the keys."""
    theirs, ours = [], []
    keys: dict[Any, int] = {}
    for number, value in enumerate([*NUMBERS, *OTHERS]):
        things.update_one({"_id": {"$eq": value}}, {"$setOnInsert": {"first": number}}, upsert=True)
        theirs.append((things.find_one({"_id": {"$eq": value}}, {"_id": 0}) or {})["first"])
        ours.append(keys.setdefault(id_key(value, CODEC), number))
    assert ours == theirs
    assert len(set(theirs)) < len(theirs)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(pairs())
def test_two_ids_have_one_key_exactly_where_the_second_is_a_duplicate(
    things: Collection[Document], pair: tuple[Any, Any]
) -> None:
    """Neither is a document lost nor taken for another; and what was read has the key of what was written."""
    one, other = pair
    things.delete_many({})
    assert not is_there(things, one)
    assert [id_key(found["_id"], CODEC) for found in things.find()] == [id_key(one, CODEC)]
    assert (id_key(one, CODEC) == id_key(other, CODEC)) == is_there(things, other)
