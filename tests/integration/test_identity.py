"""When two values are one `_id`: our answer beside the server's."""

from __future__ import annotations

import math
import struct
import uuid
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from bson import DBRef, Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp
from bson.binary import Binary, UuidRepresentation
from bson.code import Code
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.datetime_ms import DatetimeMS
from pymongo.collection import Collection
from pymongo.database import Database

from mongo_celery.mongo.identity import id_key

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


@pytest.fixture
def things(database: Database[Document]) -> Collection[Document]:
    return database.get_collection("things", codec_options=CODEC)


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
