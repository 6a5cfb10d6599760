"""The partition of a change: a hash that is the same everywhere and for ever, of a key that cannot change."""

from __future__ import annotations

import functools
import math
import operator
import struct
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import bson
import pytest
from bson import DBRef, Decimal128, Int64, MaxKey, MinKey, ObjectId, Regex, Timestamp
from bson.binary import Binary
from bson.code import Code
from bson.datetime_ms import DatetimeMS
from hypothesis import given
from hypothesis import strategies as st

from mongo_celery.bridge.partitioning import partition_hash, partitioner, rule_named
from mongo_celery.errors import ConfigurationError
from tests.fixtures.samples import BSON_VALUES, event

OBJECT_ID = ObjectId("0123456789abcdef01234567")
LEAP_DAY = datetime(2024, 2, 29, 12, 0, 0, 5000, tzinfo=UTC)

GOLDEN: list[tuple[Any, int]] = [
    (OBJECT_ID, 0x70ECB87F98B23A85),
    (1, 0xFFC5DDB1E563CB55),
    (-7, 0xBDD60AAC13B59C25),
    (1 << 40, 0x2DED07120804B1D1),
    (Int64(-(1 << 63)), 0x72CF5329A6FFB7F7),
    (1.5, 0x69A8773439A9AA49),
    (0.1, 0xA717E6BE1A56AE62),
    (Decimal128("0.10"), 0xA717E6BE1A56AE62),
    (Decimal128("1E+400"), 0x2B0C6BEAD5F1B78E),
    ("order-1", 0x9612288F1723F5B5),
    ("é\U0001f40d", 0x06D0C514F6015758),
    (b"\x00\xff", 0x177F11799D4431E5),
    (Binary(uuid.UUID(int=7).bytes, 4), 0x9C90D389D68B6777),
    (LEAP_DAY, 0x73D3B0F0EB352788),
    (None, 0xA5A9190DB78B9A43),
    (True, 0x50708D086F2DF584),
    ({"a": 1, "b": 2}, 0x7EC5D78E9954C1DF),
    ({"b": 2, "a": 1}, 0x70B53E77D9613929),
    ({"a": {"b": [1, 2]}}, 0x127A14DC85611152),
    (["shop", "orders", OBJECT_ID], 0x652299B52159C532),
    ("x" * 100_000, 0xEA0A72AA0C44BCF2),
    (math.nan, 0xFE946857DF6F4CD0),
    (math.inf, 0x2B0C6BEAD5F1B78E),
    (MinKey(), 0xF8865015D17870B9),
    (MaxKey(), 0xF312908B242EAFA8),
    (Regex("a", "i"), 0x5D247AE0CC51813E),
    (Code("x"), 0xD60C42B681C8C7EE),
    (DBRef("c", 1), 0x3CD92868187A6106),
    (Timestamp(1, 2), 0x6D92ECEAF1E670EA),
]
"""Computed once. A hash that differs sends changes of a stored layout to partitions that have passed them (P1)."""

EQUAL: list[list[Any]] = [
    [1, 1.0, Int64(1), Decimal128("1"), Decimal128("1.000"), Decimal128("10E-1")],
    [0, 0.0, -0.0, Decimal128("0"), Decimal128("-0"), Decimal128("0E+100")],
    [2**53, float(2**53), Decimal128(str(2**53))],
    [Int64(-(1 << 63)), -float(1 << 63), Decimal128(str(-(1 << 63)))],
    [float(1 << 63), Decimal128(str(1 << 63))],
    [math.inf, Decimal128("Infinity")],
    [math.nan, -math.nan, struct.unpack("<d", b"\1\0\0\0\0\0\xf8\x7f")[0], Decimal128("NaN"), Decimal128("-NaN")],
    [{"n": 1}, {"n": 1.0}, {"n": Decimal128("1")}],
    [[1, [2]], [1.0, [Int64(2)]], (1, (2,))],
    [b"ab", Binary(b"ab", 0)],
    [LEAP_DAY, LEAP_DAY.astimezone(timezone(timedelta(hours=5))), DatetimeMS(1709208000005)],
]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.decimals(places=3, allow_nan=True, min_value=-(10**12), max_value=10**12).map(
        lambda value: Decimal128(str(value))
    ),
    st.builds(ObjectId, st.binary(min_size=12, max_size=12)),
    st.sampled_from(list(BSON_VALUES.values())),
)
names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=5)
keys = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4), max_leaves=8
)


def region(change: Mapping[str, Any]) -> Any:
    return change["documentKey"]["region"]


class Rules:
    @staticmethod
    def region(change: Mapping[str, Any]) -> Any:
        return region(change)

    def __call__(self, change: Mapping[str, Any]) -> Any:
        return region(change)


@pytest.mark.parametrize(("key", "expected"), GOLDEN, ids=lambda value: repr(value)[:30])
def test_the_hash_of_a_key_is_what_it_always_was(key: object, expected: int) -> None:
    """P1, P2: golden vectors; a new hash would need a new partitioning."""
    assert partition_hash(key) == expected


@pytest.mark.parametrize("values", EQUAL, ids=lambda values: repr(values[0])[:20])
def test_values_that_mongodb_holds_equal_share_a_partition(values: list[Any]) -> None:
    """P2: `_id: 1` and `_id: 1.0` are one document, whoever wrote which."""
    assert len({partition_hash(value) for value in values}) == 1


@given(keys.filter(lambda key: key == key))  # noqa: PLR0124 - NaN is not
def test_a_key_hashes_like_itself_read_from_the_server(key: object) -> None:
    """P1: what the listener decodes from the event's bytes is the same key."""
    try:
        raw = bson.encode({"key": key})
    except OverflowError:
        return  # an integer that no event can hold
    assert partition_hash(bson.decode(raw)["key"]) == partition_hash(key)


def test_by_default_the_key_is_namespace_and_id() -> None:
    """P2: changes of one document stay together; equal ids of two collections do not have to."""
    rule = partitioner(None, "updateLookup", None)
    assert rule.name == partitioner("_id", None, None).name == "_id"
    assert rule.key(event("update", "shop.orders", documentKey={"_id": 7, "region": "eu"})) == ["shop", "orders", 7]
    assert rule.key(event("drop", "shop.orders")) == ["shop", "orders", None]
    assert rule.key(event("invalidate", "")) == [None, None, None]


@pytest.mark.parametrize(
    ("rule", "name", "expected"),
    [
        ("documentKey.region", "documentKey.region", "eu"),
        ("fullDocument.customer.id", "fullDocument.customer.id", 9),
        ("customer.id", "fullDocument.customer.id", 9),
        ("customer.name.first", "fullDocument.customer.name.first", None),
        ("fullDocumentBeforeChange.customer", "fullDocumentBeforeChange.customer", "old"),
        (region, "tests.unit.test_partitioning:region", "eu"),
        (Rules.region, "tests.unit.test_partitioning:Rules.region", "eu"),
    ],
)
def test_a_rule_reads_a_field_of_the_event(rule: Any, name: str, expected: object) -> None:
    """A short path means the document; what is missing is null. A function is known by its module and name."""
    change = event(
        "replace",
        documentKey={"_id": 1, "region": "eu"},
        fullDocument={"customer": {"id": 9, "name": None}},
        fullDocumentBeforeChange={"customer": "old"},
    )
    made = partitioner(rule, "required", "required")
    assert (made.name, made.key(change)) == (name, expected)


def test_a_key_from_a_looked_up_document_is_refused() -> None:
    """P1: on re-reading it can name a partition whose position is past the change, which would be lost."""
    for operations in (None, {"update"}, {"insert", "delete"}):
        for full_document in (None, "default", "updateLookup", "whenAvailable"):
            with pytest.raises(ConfigurationError):
                partitioner("customer", full_document, None, operations)
    for operations in (None, {"insert", "replace"}):
        for before in (None, "off", "whenAvailable"):
            with pytest.raises(ConfigurationError):
                partitioner("fullDocumentBeforeChange.customer", "required", before, operations)
    for operations in ({"insert"}, {"insert", "replace"}):
        assert partitioner("customer", "updateLookup", None, operations).name == "fullDocument.customer"


@pytest.mark.parametrize(
    "rule",
    [
        *("", ".", "a.", ".a", "a..b", 5, ["a"], {}),
        *(lambda change: change, functools.partial(region), operator.itemgetter("documentKey"), Rules()),
    ],
    ids=lambda rule: repr(rule).partition(" at ")[0],
)
def test_a_rule_that_is_no_path_and_no_named_function_is_refused(rule: Any) -> None:
    """P1, P9: two different lambdas would have the same name, and a layout would not notice the change."""
    with pytest.raises(ConfigurationError):
        partitioner(rule, "required", "required")


def other(event: Mapping[str, Any]) -> Any:
    pytest.fail(f"called with {event}")


def test_a_rule_is_found_again_by_the_name_that_is_stored() -> None:
    """P2: until a new layout is in force, changes belong to partitions by the old rule."""
    for rule in ("_id", "documentKey.region", region):
        name = partitioner(rule, None, None).name
        again = partitioner(rule_named(name, [None, "_id", region]), None, None)
        assert again.name == name
        found = {"ns": {"db": "shop", "coll": "orders"}, "documentKey": {"_id": 1, "region": "north"}}
        assert again.hash(found) == partitioner(rule, None, None).hash(found)


@pytest.mark.parametrize("name", [f"{__name__}:other", f"{__name__}:nothing", "no.such.module:rule", "os:abort"])
def test_a_function_that_is_not_registered_as_a_rule_is_refused_by_its_name(name: str) -> None:
    """P2, P9: whoever can write the state chooses the name, so nothing is looked up by it."""
    with pytest.raises(ConfigurationError, match=name):
        rule_named(name, [None, "_id", region])
