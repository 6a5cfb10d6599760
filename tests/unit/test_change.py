"""A change as a handler sees it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from datetime import UTC, datetime
from typing import Any

import bson
import pytest
from bson import ObjectId, Timestamp
from pymongo import MongoClient

from mongo_celery import Change, Fence, FencedCollection
from mongo_celery.bridge.change import describe, token_data
from mongo_celery.errors import ConfigurationError, HandlerUsageError
from tests.fixtures.samples import event

SECRET = "not for any log"


@pytest.fixture
def unreachable() -> Iterator[MongoClient[dict[str, Any]]]:
    """Give a client of no server."""
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
    """PyMongo's names, in Python's spelling; the event itself stays reachable."""
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

    change = Change.unread(read, partition=3, seq=9, fencing_token=12)
    assert (change.partition, change.seq, change.fencing_token, looked) == (3, 9, 12, [])
    with pytest.raises(AttributeError, match="no attribute 'rwa'"):
        change.rwa  # type: ignore[attr-defined] # noqa: B018
    assert not hasattr(change, "raws")
    with pytest.raises(FrozenInstanceError):
        change.seq = 1  # type: ignore[misc]
    assert looked == []
    assert change.operation_type == "update"
    assert change.raw is change.raw
    assert change == Change(full_event(), partition=3, seq=9, fencing_token=12)
    assert looked == [1]


def test_what_cannot_be_decoded_fails_where_it_is_looked_at() -> None:
    """Each time, with the decoder's own error; all else of the change can be used."""
    change = Change.unread(lambda: bson.decode(b"\x05\0\0\0\1"), seq=9)
    assert change.seq == 9
    assert repr(change) == "<Change an event that cannot be read seq=9>"
    for _ in range(2):
        with pytest.raises(bson.errors.InvalidBSON):
            change.full_document  # noqa: B018


def test_an_event_without_a_document_has_empty_attributes() -> None:
    """`drop`, `invalidate` and their like do not make a handler fail on the way to looking."""
    change = Change(event("invalidate", ""))
    assert (change.ns, change.namespace, change.document_key) == ({}, "", {})
    assert change.full_document is change.full_document_before_change is change.update_description is None
    assert change.cluster_time is None
    assert change.wall_time is None
    with pytest.raises(KeyError):
        _ = change["ns"]


def test_what_logs_show_names_the_document_and_nothing_of_its_contents() -> None:
    """Documents are the users' data."""
    shown = repr(Change(full_event(), seq=4))
    assert shown == "<Change shop.orders update 7 seq=4>"
    assert SECRET not in shown


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (event("drop"), "shop.orders drop -"),
        (event("dropDatabase", "shop"), "shop dropDatabase -"),
        (event("invalidate", ""), " invalidate -"),
        (event("delete", documentKey={"_id": None}), "shop.orders delete None"),
        (event("delete", documentKey={"region": "eu"}), "shop.orders delete -"),
        (event("delete", documentKey={"_id": "x" * 1000}), f"shop.orders delete '{'x' * 79}..."),
        (event("delete", documentKey={"_id": b"x" * 1000}), f"shop.orders delete b'{'x' * 78}..."),
        (event("delete", documentKey={"_id": {"b": 1, "a": 2}}), "shop.orders delete {'b': 1, 'a': 2}"),
        (event("delete", documentKey=7), "shop.orders delete -"),
        (event("delete", ns={"coll": "orders"}), "orders delete 1"),
        (event("delete", ns="orders"), " delete 1"),
        (event("x" * 1000), f"shop.orders {'x' * 80} -"),
        ({}, " None -"),
    ],
)
def test_a_description_is_bounded_and_never_fails(raw: dict[str, Any], text: str) -> None:
    """A log line of a change with an endless key is still a line."""
    assert describe(raw) == describe(bson.encode(raw)) == text


def test_a_description_names_the_size_of_a_large_key_and_takes_bytes_that_are_no_event() -> None:
    """Nothing is written out only to be cut."""
    assert describe(bson.encode(event(documentKey={"_id": {"a": "x" * 10_000}}))).endswith(
        "(a document of 10013 bytes)"
    )
    assert describe(b"") == describe(b"\xff" * 40) == "an event that cannot be read"


def test_a_change_for_a_unit_test_is_built_like_the_servers() -> None:
    """The document key comes from the document; everything else that an event has may be given."""
    change = Change.build(
        "update",
        ns="shop.orders.old",
        full_document={"_id": 7, "total": 3},
        fencing_token=4,
        updateDescription={"updatedFields": {"total": 3}},
    )
    assert change.ns == {"db": "shop", "coll": "orders.old"}
    assert (change.document_key, change.fencing_token) == ({"_id": 7}, 4)
    assert change.update_description == {"updatedFields": {"total": 3}}
    assert change.cluster_time is not None
    assert token_data(change.resume_token)


def test_a_built_change_takes_a_key_of_its_own_and_needs_no_document() -> None:
    """Deletes have only a key; events of a database only its name."""
    key = {"_id": ObjectId(), "region": "eu"}
    assert Change.build("delete", ns="shop.orders", document_key=key).document_key == key
    assert Change.build("delete", ns="shop.orders").full_document is None
    assert Change.build("dropDatabase", ns="shop").ns == {"db": "shop"}
    assert Change.build("insert", ns="shop.orders", full_document={"no": "id"}).document_key == {}


@pytest.mark.parametrize("given", [{}, {"fencing_token": 2**62}], ids=["without a token", "with a token of its own"])
def test_a_built_change_writes_nothing_fenced(given: dict[str, Any], unreachable: MongoClient[dict[str, Any]]) -> None:
    """P3: its fence compares with that of no live change, so a backfill by hand could write over what is newer."""
    change = Change.build("insert", ns="shop.orders", client=unreachable, **given)
    for target in ("shop.summaries", unreachable["shop"]["summaries"]):
        with pytest.raises(HandlerUsageError, match="changes snapshot start HANDLER"):
            change.fenced(target)
    with pytest.raises(HandlerUsageError, match="changes snapshot start"):
        _ = change.fence


def test_what_a_built_change_has_instead_of_a_token_makes_no_fence() -> None:
    """P3: for other stores too; and a resource that compares tokens by itself has seen none that is smaller."""
    change = Change.build("insert", ns="shop.orders")
    assert change.fencing_token == -1
    with pytest.raises(ConfigurationError, match="changes snapshot start HANDLER"):
        Fence("shop/summarise", 0, change.partition, change.fencing_token)


def test_a_built_change_with_a_fence_gives_fenced_views(unreachable: MongoClient[dict[str, Any]]) -> None:
    """By name or by collection, with its partition and token; nothing connects before something is written."""
    fence = Fence("shop/summarise", 1, 3, 4)
    change = Change.build("insert", ns="shop.orders", fence=fence, client=unreachable)
    assert (change.partition, change.fencing_token, change.fence) == (3, 4, fence)
    for target in ("shop.summaries.new", unreachable["shop"]["summaries.new"]):
        view = change.fenced(target)
        assert repr(fence) in repr(view)
        assert "'shop.summaries.new'" in repr(view)


def test_a_name_needs_a_client_and_a_collection_has_one(unreachable: MongoClient[dict[str, Any]]) -> None:
    """P9: in a unit test of a handler that writes."""
    change = Change.build("insert", ns="shop.orders", fence=Fence("shop/summarise", 0, 0, 1))
    assert pickle.loads(pickle.dumps(change)).fence == change.fence
    assert isinstance(change.fenced(unreachable["shop"]["summaries"]), FencedCollection)
    with pytest.raises(HandlerUsageError, match=r"client=\.\.\."):
        change.fenced("shop.summaries")
    change = Change.build("insert", ns="shop.orders", fence=change.fence, client=unreachable)
    with pytest.raises(ConfigurationError, match=r"'db\.summaries'"):
        change.fenced("summaries")
    with MongoClient[dict[str, Any]]("mongodb://localhost:1/shop", connect=False) as client:
        change = Change.build("insert", ns="shop.orders", fence=change.fence, client=client)
        assert "'shop.summaries'" in repr(change.fenced("summaries"))
