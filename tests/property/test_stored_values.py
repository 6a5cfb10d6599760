"""What is taken to survive Extended JSON without trying it does survive."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from bson import Decimal128, ObjectId, json_util
from bson.codec_options import CodecOptions
from hypothesis import event, given
from hypothesis import strategies as st

from mongo_celery.mongo.identity import same_bson
from mongo_celery.twophase.values import from_text, is_plainly_storable, plain, to_text

_MEANING = ("$oid", "$date", "$numberInt", "$numberLong", "$regex", "$options", "$ref", "$id", "$uuid", "$minKey")
_OPERATORS = ("$inc", "$set", "$push", "$pull", "$min", "$max", "$eq", "$gte", "$exists", "$unset", "$currentDate")
_NAMES = st.sampled_from(["", "a", "b.c", "numberInt", "a$", "€", *_MEANING, *_OPERATORS])
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(max_size=5),
    st.just("0123456789abcdef01234567"),
    st.builds(ObjectId),
    st.just(Decimal128("1.50")),
    st.just(datetime(2020, 1, 1, tzinfo=UTC)),
)
_VALUES: st.SearchStrategy[Any] = st.recursive(
    _LEAVES, lambda inner: st.dictionaries(_NAMES, inner, max_size=3) | st.lists(inner, max_size=2), max_leaves=6
)


@given(_VALUES)
def test_what_has_only_names_that_mean_nothing_survives(value: Any) -> None:
    stored = plain("apply", value, CodecOptions[dict[str, Any]]())
    if is_plainly_storable(stored):
        event("plain")
        assert same_bson(from_text(to_text(stored)), stored)


def test_the_commonest_updates_need_no_trial() -> None:
    for value in ({"$inc": {"balance": -100}}, {"balance": {"$gte": 100}}, {"$set": {"state": "sold"}}):
        assert is_plainly_storable(value)
    assert not is_plainly_storable({"$set": {"at": {"$date": "2020"}}})
    assert json_util.loads('{"$date": "2020-01-01T00:00:00Z"}') != {"$date": "2020-01-01T00:00:00Z"}
