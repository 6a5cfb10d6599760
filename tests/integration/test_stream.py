"""
The reader of the change stream against a real server and its failpoints.

What it hands over is each change once and in order, whatever interrupts it; what cannot be cured ends in an
error of ours that says in a sentence what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from bson import Timestamp
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.database import Database

from mongo_celery.bridge.listener.starts import start_time
from mongo_celery.bridge.stream.cursor import Position
from mongo_celery.bridge.stream.items import ChangeEvent, Failed, Item
from mongo_celery.bridge.window import Mark
from mongo_celery.embedded import MongoReplicaSet
from mongo_celery.errors import AccessError, HistoryLostError, StreamRefusedError, TopologyError
from mongo_celery.mongo.oplog import check_topology, read_oplog
from tests.fixtures.process import wait_for
from tests.fixtures.rights import DATA, UrlOf
from tests.rig.stream import StreamReading, now, scope_on

Document = dict[str, Any]
MakeClient = Callable[..., MongoClient[Document]]


@pytest.fixture
def items(database: Database[Document]) -> Collection[Document]:
    return database.create_collection("items")


@pytest.fixture
def reading(mongo_url: str, items: Collection[Document]) -> Iterator[StreamReading]:
    with StreamReading(mongo_url, scope_on(items.full_name), now(items.database.client)) as started:
        yield started


def insert(collection: Collection[Document], *keys: Any) -> None:
    for key in keys:
        collection.insert_one({"_id": key})


def _roll(client: MongoClient[Document]) -> None:
    oldest = read_oplog(client).first
    filler = client["filler"]["filler"]

    def rolled() -> bool:
        filler.insert_many([{"text": "x" * 100_000} for _ in range(40)])
        return read_oplog(client).first > oldest

    for _ in range(2):
        wait_for(rolled, message="the oplog rolls over")
        oldest = read_oplog(client).last


def test_a_rolling_oplog_is_lost_history_for_a_new_stream_and_for_an_open_one(
    rolling_oplog: MongoReplicaSet, make_client: MakeClient
) -> None:
    """P9: 286 where the position lies before the oplog, 136 where it passed an open cursor; never a silent gap."""
    client = make_client(rolling_oplog.url)
    items = client["shop"].create_collection("items")
    position = now(client)
    scope = scope_on("shop.items")
    with StreamReading(rolling_oplog.url, scope, position, room=1) as open_reading:
        insert(items, 1)
        open_reading.wait_for_keys(1)
        insert(items, *range(2, 20))  # the reader waits for room with its cursor open
        _roll(client)
        assert open_reading.room is not None
        open_reading.room.release(30)
        assert isinstance(open_reading.wait_for_failure(), HistoryLostError)
        assert open_reading.keys == list(range(1, len(open_reading.keys) + 1)), "nothing after the gap"
    with StreamReading(rolling_oplog.url, scope, position) as new_reading:
        assert isinstance(new_reading.wait_for_failure(), HistoryLostError)
        assert new_reading.keys == []


def test_a_standalone_server_is_a_wrong_topology(standalone_url: str, make_client: MakeClient) -> None:
    client = make_client(standalone_url)
    with pytest.raises(TopologyError):
        check_topology(client)
    with pytest.raises(TopologyError):
        start_time(client, "now")
    with StreamReading(standalone_url, scope_on("shop.items"), Position(None, None)) as reading:
        assert isinstance(reading.wait_for_failure(), TopologyError)


def test_a_bad_pipeline_is_refused_at_once(mongo_url: str, items: Collection[Document]) -> None:
    wrong = [{"$matsch": {"a": 1}}]
    with StreamReading(mongo_url, scope_on(items.full_name, pipeline=wrong), now(items.database.client)) as reading:
        assert isinstance(reading.wait_for_failure(), StreamRefusedError)


def test_a_missing_right_is_named(guarded_url: UrlOf, make_client: MakeClient) -> None:
    """P9: of the stream, and of the oplog with its alternatives; with the rights of the documentation both work."""
    with StreamReading(guarded_url("without_stream"), scope_on(f"{DATA}.items"), Position(None, None)) as reading:
        assert isinstance(reading.wait_for_failure(), AccessError)
    with pytest.raises(AccessError):
        start_time(make_client(guarded_url("without_oplog")), "oldest")
    client = make_client(guarded_url("bridge"))
    assert start_time(client, "oldest") <= start_time(client, "now")
    with StreamReading(guarded_url("bridge"), scope_on(f"{DATA}.items"), now(client)) as allowed:
        insert(make_client(guarded_url("admin"))[DATA]["items"], 1)
        allowed.wait_for_keys(1)


def test_handlers_that_ask_for_drop_and_rename_get_them(mongo_url: str, items: Collection[Document]) -> None:
    scope = scope_on(items.full_name, operations={"insert", "drop", "rename", "invalidate"})
    with StreamReading(mongo_url, scope, now(items.database.client)) as reading:
        insert(items, 1)
        items.rename("elsewhere")
        insert(items, 2)
        items.drop()
        insert(items, 3)
        reading.wait_for_keys(1, 2, 3)
    assert reading.operations == ["insert", "rename", "invalidate", "insert", "drop", "invalidate", "insert"]
    (renamed,) = [event for event in reading.events if event["operationType"] == "rename"]
    assert (renamed["to"]["db"], renamed["to"]["coll"]) == (items.database.name, "elsewhere")


def _is_invalidate(item: object) -> bool:
    return isinstance(item, ChangeEvent) and item.document["operationType"] == "invalidate"


def test_a_reader_that_starts_behind_an_invalidate_opens_after_its_token(
    mongo_url: str, items: Collection[Document]
) -> None:
    """P1: the token of an invalidate may be stored; `resumeAfter` it would be refused with 260."""
    with StreamReading(mongo_url, scope_on(items.full_name), now(items.database.client)) as first:
        insert(items, 1)
        items.drop()
        wait_for(lambda: "invalidate" in first.operations)
        last = next(item for item in first.items if _is_invalidate(item))
        assert isinstance(last, ChangeEvent)
    insert(items, 2)
    with StreamReading(
        mongo_url, scope_on(items.full_name), Position(last.mark.token, last.mark.cluster_time)
    ) as second:
        second.wait_for_keys(2)


def test_a_marker_comes_only_behind_everything_that_was_read_and_can_be_resumed_from(
    mongo_url: str, reading: StreamReading, items: Collection[Document]
) -> None:
    """P1, P5: items arrive in the order of their places. Behind a stored marker nothing is missing or repeated."""
    for number in range(200):
        insert(items, number)
    reading.wait_for_keys(*range(200))
    insert(items.database["noise"], 1)
    last = reading.items[-1]
    mark = wait_for(lambda: reading.items[-1] is not last and reading.items[-1])
    assert isinstance(mark, Mark)
    places = [_place(item) for item in reading.items]
    assert places == sorted(set(places))
    assert mark.cluster_time is not None
    wait_for(lambda: (reading.reader.read_to or Timestamp(0, 0)) >= mark.cluster_time)
    insert(items, 200)
    with StreamReading(mongo_url, scope_on(items.full_name), Position(mark.token, mark.cluster_time)) as again:
        again.wait_for_keys(200)


def _place(item: Item) -> str:
    assert not isinstance(item, Failed), "the stream goes on"
    return item.data if isinstance(item, Mark) else item.mark.data


def test_the_reader_reads_no_further_than_there_is_room(mongo_url: str, items: Collection[Document]) -> None:
    position = now(items.database.client)
    items.insert_many([{"_id": number, "text": "x" * 200_000} for number in range(20)])
    with StreamReading(mongo_url, scope_on(items.full_name), position, room=1) as reading:
        wait_for(lambda: reading.items)
        sent = items.database.client.admin.command("ping")
        assert sent["ok"], "a round trip later there is still nothing more"
        assert len(reading.items) == 10, "each weighs seven of the 64 of a batch"
        assert reading.room is not None
        reading.room.release()
        wait_for(lambda: len(reading.items) == 20)
        items.insert_one({"_id": 20})
    assert not reading.reader._thread.is_alive()


@pytest.mark.needs_mongodb(6, 0, 9)
def test_an_event_above_16_mb_comes_whole_from_a_server_that_splits_it(
    mongo_url: str, database: Database[Document]
) -> None:
    """P12: two documents of 10 MB and their update."""
    items = database.create_collection("images", changeStreamPreAndPostImages={"enabled": True})
    items.insert_one({"_id": 1, "text": "a" * 10_000_000})
    scope = scope_on(items.full_name, full_document="updateLookup", before_change="required")
    with StreamReading(mongo_url, scope, now(database.client)) as reading:
        items.update_one({"_id": 1}, {"$set": {"text": "b" * 10_000_000}})
        items.insert_one({"_id": 2})
        reading.wait_for_keys(1, 2)
    assert not reading.read_errors
    changed, _ = reading.events
    assert {field: changed[field]["text"][0] for field in ("fullDocument", "fullDocumentBeforeChange")} == {
        "fullDocument": "b",
        "fullDocumentBeforeChange": "a",
    }
