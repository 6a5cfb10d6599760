"""A change as a handler sees it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from datetime import UTC, datetime
from typing import Any

import bson
import pytest
from bson import Timestamp
from pymongo import MongoClient

from mongo_celery import Change, Changes, Fence
from mongo_celery.bridge.change import Unread, describe, describe_change, token_data
from mongo_celery.errors import ConfigurationError, HandlerUsageError
from tests.fixtures.samples import event

SECRET = "not for any log"


@pytest.fixture
def unreachable() -> Iterator[MongoClient[dict[str, Any]]]:
    with MongoClient[dict[str, Any]]("mongodb://127.0.0.1:1", connect=False) as client:
        yield client


def full_event() -> dict[str, Any]:
    return event(
        "update",
        documentKey={"_id": 7, "region": "eu"},
        fullDocument={"_id": 7, "note": SECRET},
        fullDocumentBeforeChange={"_id": 7},
        updateDescription={"updatedFields": {"note": SECRET}, "removedFields": [], "truncatedArrays": []},
        clusterTime=Timestamp(5, 6),
        wallTime=datetime(2024, 1, 1, tzinfo=UTC),
    )


def test_attributes_carry_what_the_server_sent() -> None:
    raw = full_event()
    change = Change(raw, partition=3, seq=9, fencing_token=12)
    assert (change.operation_type, change.ns, change.namespace) == ("update", raw["ns"], "shop.orders")
    assert (change.document_key, change.full_document) == (raw["documentKey"], raw["fullDocument"])
    assert change.full_document_before_change == {"_id": 7}
    assert change.update_description == raw["updateDescription"]
    assert (change.cluster_time, change.wall_time) == (Timestamp(5, 6), raw["wallTime"])
    assert change.resume_token == raw["_id"]
    assert change["fullDocument"] is raw["fullDocument"]
    assert (change.partition, change.seq, change.fencing_token, change.session) == (3, 9, 12, None)


def test_a_change_is_decoded_when_it_is_looked_at_and_once() -> None:
    """Whoever looks at nothing but its place pays nothing for its document."""
    looked: list[int] = []

    def read() -> dict[str, Any]:
        looked.append(1)
        return full_event()

    change = Change(Unread(read), partition=3, seq=9, fencing_token=12)
    assert (change.partition, change.seq, change.fencing_token, looked) == (3, 9, 12, [])
    assert not hasattr(change, "raws")
    with pytest.raises(FrozenInstanceError):
        change.seq = 1  # type: ignore[misc]
    assert looked == []
    assert change.operation_type == "update"
    assert change == Change(full_event(), partition=3, seq=9, fencing_token=12)
    assert looked == [1]


def test_an_event_without_a_document_has_empty_attributes() -> None:
    """`drop`, `invalidate` and their like do not make a handler fail on the way to looking."""
    change = Change(event("invalidate", ""))
    assert (change.ns, change.namespace, change.document_key) == ({}, "", {})
    assert change.full_document is change.full_document_before_change is change.update_description is None
    assert change.cluster_time is None
    assert change.wall_time is None
    with pytest.raises(KeyError):
        _ = change["ns"]


def test_a_change_for_a_unit_test_is_built_like_the_servers() -> None:
    change = Change.build(
        "update", ns="shop.orders.old", full_document={"_id": 7}, fencing_token=4, updateDescription={"a": 1}
    )
    assert change.ns == {"db": "shop", "coll": "orders.old"}
    assert (change.document_key, change.fencing_token) == ({"_id": 7}, 4)
    assert change.update_description == {"a": 1}
    assert change.cluster_time is not None
    assert token_data(change.resume_token)
    assert Change.build("delete", ns="shop.orders", document_key={"_id": 1, "region": "eu"}).document_key["_id"] == 1
    assert Change.build("dropDatabase", ns="shop").ns == {"db": "shop"}
    assert Change.build("insert", ns="shop.orders", full_document={"no": "id"}).document_key == {}


@pytest.mark.parametrize("given", [{}, {"fencing_token": 2**62}], ids=["without a token", "with a token of its own"])
def test_a_built_change_writes_nothing_fenced(given: dict[str, Any], unreachable: MongoClient[dict[str, Any]]) -> None:
    """P3: its fence compares with that of no live change, so a backfill by hand could write over what is newer."""
    change = Change.build("insert", ns="shop.orders", client=unreachable, **given)
    for target in ("shop.summaries", unreachable["shop"]["summaries"]):
        with pytest.raises(HandlerUsageError):
            change.fenced(target)
    with pytest.raises(HandlerUsageError):
        _ = change.fence
    if not given:
        with pytest.raises(ConfigurationError):
            Fence("shop/summarise", 0, change.partition, change.fencing_token)


def test_a_description_is_bounded() -> None:
    """A log line of a change with an endless key is still a line. That none fails is a property."""
    for raw in (event("delete", documentKey={"_id": ["x" * 1000]}), event("x" * 1000)):
        assert len(describe(raw)) == len(describe(bson.encode(raw))) < 300


def test_a_change_that_cannot_be_read_is_described_all_the_same() -> None:
    assert describe_change(Change(lambda: bson.decode(b"\xff"), partition=0, seq=1, fencing_token=1))


def test_changes_are_one_at_least() -> None:
    with pytest.raises(HandlerUsageError):
        Changes([])
    assert Changes([Change.build("insert", ns="shop.orders")]).session is None


def test_a_name_of_a_collection_needs_a_client_and_a_database(unreachable: MongoClient[dict[str, Any]]) -> None:
    fence = Fence("shop/summarise", 0, 3, 7)
    for client, name in ((None, "shop.summaries"), (unreachable, "summaries")):
        with pytest.raises((HandlerUsageError, ConfigurationError)):
            Change.build("insert", ns="shop.orders", client=client, fence=fence).fenced(name)
