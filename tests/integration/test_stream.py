"""
The reader of the change stream against a real server and its failpoints.

What it hands over is each change once and in order, whatever interrupts it; what cannot be cured ends in an
error of ours that says in a sentence what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.database import Database

from mongo_celery.bridge.listener.starts import start_time
from mongo_celery.bridge.stream.cursor import Position
from mongo_celery.bridge.stream.items import ChangeEvent, Failed, Item
from mongo_celery.bridge.stream.reader import StreamReader
from mongo_celery.bridge.stream.source import make_scope
from mongo_celery.bridge.window import Mark
from mongo_celery.embedded import MongoReplicaSet
from mongo_celery.errors import (
    AccessError,
    ConfigurationError,
    HistoryLostError,
    MongoCeleryError,
    StreamRefusedError,
    TopologyError,
    UnreadableEventError,
)
from mongo_celery.mongo.oplog import check_topology, read_oplog
from tests.fixtures.process import wait_for
from tests.fixtures.rights import DATA, UrlOf
from tests.integration.stream_rig import APP_NAME, Reading, now, scope_on, selector_of

Document = dict[str, Any]
Failpoint = Callable[..., AbstractContextManager[None]]
MakeClient = Callable[..., MongoClient[Document]]


@pytest.fixture
def items(database: Database[Document]) -> Collection[Document]:
    """Give a collection to watch."""
    return database.create_collection("items")


@pytest.fixture
def reading(mongo_url: str, items: Collection[Document]) -> Iterator[Reading]:
    """Give a reader of that collection."""
    with Reading(mongo_url, scope_on(items.full_name), now(items.database.client)) as started:
        yield started


def insert(collection: Collection[Document], *keys: Any) -> None:
    for key in keys:
        collection.insert_one({"_id": key})


# -- interruptions -----------------------------------------------------------------------------------

INTERRUPTIONS: dict[str, Document] = {
    "connection cut": {"closeConnection": True},
    "cursor not found": {"errorCode": 43},
    "host unreachable": {"errorCode": 6},
    "exceeded time limit": {"errorCode": 262},
    "shutdown in progress": {"errorCode": 91},
    "primary stepped down": {"errorCode": 189},
    "not writable primary": {"errorCode": 10107},
    "election in progress": {"errorCode": 216},
    "interrupted": {"errorCode": 11601},
    "interrupted at shutdown": {"errorCode": 11600},
    "write conflict": {"errorCode": 112},
    "resumable by label": {"errorCode": 7, "errorLabels": ["ResumableChangeStreamError"]},
    "of unknown kind": {"errorCode": 8},
}
interruption = pytest.mark.parametrize("data", INTERRUPTIONS.values(), ids=INTERRUPTIONS.keys())


@interruption
def test_an_interrupted_read_goes_on_and_repeats_and_loses_nothing(
    reading: Reading, items: Collection[Document], failpoint: Failpoint, data: Document
) -> None:
    """P1: the driver resumes once, and only for some errors; the reader goes on after all of these."""
    insert(items, 1, 2)
    reading.wait_for_keys(1, 2)
    with failpoint(failCommands=["getMore"], appName=APP_NAME, mode={"times": 2}, **data):
        insert(items, 3, 4)
        reading.wait_for_keys(1, 2, 3, 4)
    insert(items, 5)
    reading.wait_for_keys(1, 2, 3, 4, 5)


@pytest.mark.parametrize("data", [{"closeConnection": True}, {"errorCode": 91}, {"errorCode": 8}])
def test_a_stream_that_cannot_be_opened_at_once_is_opened_later(
    mongo_url: str, items: Collection[Document], failpoint: Failpoint, data: Document
) -> None:
    """P1: opening is tried again, from the same place."""
    position = now(items.database.client)
    insert(items, 1)
    with (
        failpoint(failCommands=["aggregate"], appName=APP_NAME, mode={"times": 3}, **data),
        Reading(mongo_url, scope_on(items.full_name), position) as reading,
    ):
        reading.wait_for_keys(1)


def test_an_error_of_unknown_kind_that_stays_is_final(
    mongo_url: str, items: Collection[Document], failpoint: Failpoint
) -> None:
    """P9: no endless loop: after so many in a row the stream ends, and names the server's words."""
    with (
        failpoint(failCommands=["aggregate"], appName=APP_NAME, errorCode=8),
        Reading(mongo_url, scope_on(items.full_name), now(items.database.client)) as reading,
    ):
        assert isinstance(reading.wait_for_failure(), StreamRefusedError)


def _operations(client: MongoClient[Document]) -> list[Document]:
    own = {"$match": {"appName": APP_NAME, "op": "getmore"}}
    return list(client.admin.aggregate([{"$currentOp": {"idleCursors": True}}, own]))


def test_a_killed_read_goes_on(reading: Reading, items: Collection[Document]) -> None:
    """P1: `killOp` on the running getMore; the driver alone would end the stream."""
    insert(items, 1)
    reading.wait_for_keys(1)
    client = items.database.client
    (running,) = wait_for(lambda: _operations(client))
    client.admin.command("killOp", op=running["opid"])
    insert(items, 2, 3)
    reading.wait_for_keys(1, 2, 3)


def test_a_killed_cursor_is_opened_again(reading: Reading, items: Collection[Document]) -> None:
    """P1: `killCursors`, as a fail-over or an idle time-out leaves it."""
    insert(items, 1)
    reading.wait_for_keys(1)
    client = items.database.client
    (running,) = wait_for(lambda: _operations(client))
    items.database.command("killCursors", items.name, cursors=[running["cursor"]["cursorId"]])
    insert(items, 2, 3)
    reading.wait_for_keys(1, 2, 3)


# -- what is final -----------------------------------------------------------------------------------

FINAL: dict[str, tuple[int, type[MongoCeleryError], str]] = {
    "history lost": (286, HistoryLostError, "--on-history-lost"),
    "the oplog passed the cursor": (136, HistoryLostError, "--on-history-lost"),
    "resumed after an invalidate": (260, HistoryLostError, "--on-history-lost"),
    "a token that is not found": (280, HistoryLostError, "--on-history-lost"),
    "too large": (10334, UnreadableEventError, "full_document"),
    "no image": (47, UnreadableEventError, "full_document"),
    "not authorized": (13, AccessError, "changeStream"),
    "no replica set": (40573, TopologyError, "--replSet"),
    "a bad stage": (40324, StreamRefusedError, "pipeline"),
}


@pytest.mark.parametrize("command", ["aggregate", "getMore"])
@pytest.mark.parametrize(("code", "kind", "cure"), FINAL.values(), ids=FINAL.keys())
def test_what_cannot_be_cured_ends_in_a_sentence_that_names_the_cure(
    mongo_url: str,
    items: Collection[Document],
    failpoint: Failpoint,
    command: str,
    code: int,
    kind: type[MongoCeleryError],
    cure: str,
) -> None:
    """P9: the right class, one paragraph, the server's words behind it; and the reader reads no more."""
    with (
        failpoint(failCommands=[command], appName=APP_NAME, errorCode=code),
        Reading(mongo_url, scope_on(items.full_name), now(items.database.client)) as reading,
    ):
        error = reading.wait_for_failure()
        assert type(error) is kind
        assert cure in str(error)
        assert "\n" not in str(error)
        assert not reading.reader._thread.is_alive() or wait_for(lambda: not reading.reader._thread.is_alive())


def test_a_token_that_is_not_found_is_tried_once_by_its_time(
    mongo_url: str, items: Collection[Document], failpoint: Failpoint
) -> None:
    """P1: 280 also comes when the pipeline has changed; at its cluster time the stream goes on, without a gap."""
    insert(items, 1)
    with Reading(mongo_url, scope_on(items.full_name), now(items.database.client)) as before:
        insert(items, 2)
        before.wait_for_keys(2)
        event = before.items[-1]
        assert isinstance(event, ChangeEvent)
    insert(items, 3)
    position = Position(event.mark.token, event.mark.cluster_time)
    with (
        failpoint(failCommands=["aggregate"], appName=APP_NAME, errorCode=280, mode={"times": 1}),
        Reading(mongo_url, scope_on(items.full_name), position) as reading,
    ):
        wait_for(lambda: 3 in reading.keys)
        assert reading.keys == [2, 3], "what is at the time itself comes again; the window knows it"


def _roll(client: MongoClient[Document]) -> None:
    """Write until the oplog's oldest entry is a new one."""
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
    with Reading(rolling_oplog.url, scope, position, room=1) as open_reading:
        insert(items, 1)
        open_reading.wait_for_keys(1)
        insert(items, *range(2, 20))  # the reader waits for room with its cursor open
        _roll(client)
        for _ in range(30):
            open_reading.reader.grant_credit(open_reading.items[:1])
        assert isinstance(open_reading.wait_for_failure(), HistoryLostError)
        assert open_reading.keys == list(range(1, len(open_reading.keys) + 1)), "nothing after the gap"
    with Reading(rolling_oplog.url, scope, position) as new_reading:
        assert isinstance(new_reading.wait_for_failure(), HistoryLostError)
        assert new_reading.keys == []


def test_a_standalone_server_is_a_wrong_topology(standalone_url: str, make_client: MakeClient) -> None:
    """P9: found when the listener starts, and by the stream too."""
    client = make_client(standalone_url)
    with pytest.raises(TopologyError, match="--replSet"):
        check_topology(client)
    with pytest.raises(TopologyError, match="--replSet"):
        start_time(client, "now")
    with Reading(standalone_url, scope_on("shop.items"), Position(None, None)) as reading:
        assert isinstance(reading.wait_for_failure(), TopologyError)


def test_a_bad_pipeline_is_refused_at_once(mongo_url: str, items: Collection[Document]) -> None:
    """P9: with the server's own words."""
    wrong = [{"$matsch": {"a": 1}}]
    with Reading(mongo_url, scope_on(items.full_name, pipeline=wrong), now(items.database.client)) as reading:
        error = reading.wait_for_failure()
        assert isinstance(error, StreamRefusedError)
        assert "$matsch" in str(error)


def test_a_missing_right_is_named(guarded_url: UrlOf, make_client: MakeClient) -> None:
    """P9: of the stream, and of the oplog with its alternatives; with the rights of the documentation both work."""
    with Reading(guarded_url("without_stream"), scope_on(f"{DATA}.items"), Position(None, None)) as reading:
        error = reading.wait_for_failure()
        assert isinstance(error, AccessError)
        assert "changeStream and find there" in str(error)
        assert f"{DATA}.items" in str(error)
    with pytest.raises(AccessError, match=r"serverStatus.*start_from"):
        start_time(make_client(guarded_url("without_oplog")), "oldest")
    client = make_client(guarded_url("bridge"))
    assert start_time(client, "oldest") <= start_time(client, "now")
    with Reading(guarded_url("bridge"), scope_on(f"{DATA}.items"), now(client)) as allowed:
        insert(make_client(guarded_url("admin"))[DATA]["items"], 1)
        allowed.wait_for_keys(1)


# -- invalidation ------------------------------------------------------------------------------------


def test_a_dropped_collection_that_comes_back_is_read_on(reading: Reading, items: Collection[Document]) -> None:
    """P1: behind the invalidate the stream is opened after its token; nothing of the new collection is lost."""
    insert(items, 1)
    items.drop()
    insert(items, 2)
    reading.wait_for_keys(1, 2)
    assert reading.operations == ["insert", "drop", "invalidate", "insert"]
    assert reading.failure is None


def test_a_renamed_collection_that_is_made_anew_is_read_on(reading: Reading, items: Collection[Document]) -> None:
    """P1: renamed away, and back onto the name."""
    insert(items, 1)
    items.rename("elsewhere")
    items.database["elsewhere"].rename("items")
    insert(items, 2)
    reading.wait_for_keys(1, 2)


def test_handlers_that_ask_for_drop_and_rename_get_them(mongo_url: str, items: Collection[Document]) -> None:
    """Drop, rename and invalidate are operations like others where they are asked for."""
    scope = scope_on(items.full_name, operations={"insert", "drop", "rename", "invalidate"})
    with Reading(mongo_url, scope, now(items.database.client)) as reading:
        insert(items, 1)
        items.rename("elsewhere")
        insert(items, 2)
        items.drop()
        insert(items, 3)
        reading.wait_for_keys(1, 2, 3)
    assert reading.operations == ["insert", "rename", "invalidate", "insert", "drop", "invalidate", "insert"]


def test_a_dropped_database_that_comes_back_is_read_on(
    mongo_url: str, mongo_client: MongoClient[Document], database: Database[Document]
) -> None:
    """P1: also where the stream is open on the whole database."""
    insert(database["items"], 0)
    with Reading(mongo_url, scope_on(f"{database.name}.*"), now(mongo_client)) as reading:
        insert(database["items"], 1)
        mongo_client.drop_database(database)
        insert(database["others"], 2)
        reading.wait_for_keys(1, 2)


def _is_invalidate(item: object) -> bool:
    return isinstance(item, ChangeEvent) and item.document["operationType"] == "invalidate"


def test_a_reader_that_starts_behind_an_invalidate_opens_after_its_token(
    mongo_url: str, items: Collection[Document]
) -> None:
    """P1: the token of an invalidate may be stored; `resumeAfter` it would be refused with 260."""
    with Reading(mongo_url, scope_on(items.full_name), now(items.database.client)) as first:
        insert(items, 1)
        items.drop()
        wait_for(lambda: "invalidate" in first.operations)
        last = next(item for item in first.items if _is_invalidate(item))
        assert isinstance(last, ChangeEvent)
    insert(items, 2)
    with Reading(mongo_url, scope_on(items.full_name), Position(last.mark.token, last.mark.cluster_time)) as second:
        second.wait_for_keys(2)


# -- scopes and filters ------------------------------------------------------------------------------


def test_a_stream_of_two_collections_is_open_on_their_database(mongo_url: str, database: Database[Document]) -> None:
    """The narrowest scope, and nothing of a third collection."""
    client = database.client
    scope = scope_on(f"{database.name}.a", f"{database.name}.b")
    assert (scope.database, scope.collection) == (database.name, None)
    with Reading(mongo_url, scope, now(client)) as reading:
        for number, name in enumerate(("a", "c", "b", "c", "a")):
            insert(database[name], number)
        reading.wait_for_keys(0, 2, 4)


def test_a_stream_of_the_cluster_leaves_out_the_bridges_own_state(
    mongo_url: str, database: Database[Document], state_database: str
) -> None:
    """P6: else each commit would be a change that leads to a commit."""
    client = database.client
    other = client[f"{database.name}_other"]
    scope = make_scope([selector_of("*")], state_database=state_database)
    assert (scope.database, scope.collection) == (None, None)
    with Reading(mongo_url, scope, now(client)) as reading:
        insert(database["items"], "first")
        insert(client[state_database]["partitions"], "state")
        insert(other["items"], "last")
        wait_for(lambda: "last" in reading.keys)
    client.drop_database(other)
    assert "state" not in reading.keys
    assert [key for key in reading.keys if key in {"first", "last"}] == ["first", "last"]


def test_the_state_database_cannot_be_watched() -> None:
    """P6: refused with the cure."""
    with pytest.raises(ConfigurationError, match="Choose another database"):
        make_scope([selector_of("state.*")], state_database="state")


def test_a_condition_becomes_a_flag_and_no_filter(mongo_url: str, items: Collection[Document]) -> None:
    """A filter on a looked-up field would make tokens unresumable: all changes arrive, flagged for their handler."""
    wants = selector_of(items.full_name, match={"$gt": ["$fullDocument.total", 5]})
    scope = make_scope([wants, selector_of(items.full_name, name="all")], state_database="none")
    with Reading(mongo_url, scope, now(items.database.client)) as reading:
        items.insert_many([{"_id": 1, "total": 9}, {"_id": 2, "total": 1}, {"_id": 3}, {"_id": 4, "total": 6}])
        reading.wait_for_keys(1, 2, 3, 4)
    assert [event["documentKey"]["_id"] for event in reading.events if wants.selects(event)] == [1, 4]


def test_an_event_that_is_no_valid_text_is_still_delivered(mongo_url: str, items: Collection[Document]) -> None:
    """P1: the bytes are passed on; reading does not fail on what no handler may look at."""
    with Reading(mongo_url, scope_on(items.full_name), now(items.database.client)) as reading:
        from bson.raw_bson import RawBSONDocument

        body = b"\x10_id\x00\x01\x00\x00\x00" + b"\x02s\x00\x03\x00\x00\x00\xff\xfe\x00"
        document = (len(body) + 5).to_bytes(4, "little") + body + b"\x00"
        items.database.get_collection("items").insert_one(RawBSONDocument(document))
        insert(items, 2)
        reading.wait_for_keys(1, 2)


# -- markers and room --------------------------------------------------------------------------------


def test_a_quiet_stream_hands_over_markers_of_its_neighbours_writes(
    reading: Reading, items: Collection[Document]
) -> None:
    """So a quiet collection never falls off the oplog; each marker is further on, and carries its time."""
    insert(items, 1)
    for number in range(3):
        insert(items.database["noise"], number)
        seen = len(reading.marks)
        wait_for(lambda: len(reading.marks) > seen)  # noqa: B023 - asked in this round only
    places = [mark.data for mark in reading.marks]
    assert places == sorted(set(places))
    assert all(mark.cluster_time is not None for mark in reading.marks)


def test_a_marker_comes_only_behind_everything_that_was_read(reading: Reading, items: Collection[Document]) -> None:
    """P5: items arrive in the order of their places, markers among them."""
    for number in range(200):
        insert(items, number)
    reading.wait_for_keys(*range(200))
    insert(items.database["noise"], 1)
    last = reading.items[-1]
    wait_for(lambda: isinstance(reading.items[-1], Mark) and reading.items[-1] is not last)
    places = [_place(item) for item in reading.items]
    assert places == sorted(set(places))


def _place(item: Item) -> str:
    assert not isinstance(item, Failed), "the stream goes on"
    return item.data if isinstance(item, Mark) else item.mark.data


def test_a_marker_can_be_resumed_from(mongo_url: str, reading: Reading, items: Collection[Document]) -> None:
    """P1: after a restart at a stored marker nothing is missing and nothing repeated."""
    insert(items, 1)
    insert(items.database["noise"], 1)
    reading.wait_for_keys(1)
    mark = wait_for(lambda: reading.marks)[-1]
    insert(items, 2)
    with Reading(mongo_url, scope_on(items.full_name), Position(mark.token, mark.cluster_time)) as again:
        wait_for(lambda: 2 in again.keys)
        assert again.keys in ([2], [1, 2])


def test_the_reader_reads_no_further_than_there_is_room(mongo_url: str, items: Collection[Document]) -> None:
    """Bounded read-ahead: it stops, goes on when room is made, and stops at once when told to."""
    with Reading(mongo_url, scope_on(items.full_name), now(items.database.client), room=5) as reading:
        insert(items, *range(20))
        wait_for(lambda: len(reading.items) == 5)
        reading.reader.grant_credit(reading.items[:1])
        wait_for(lambda: len(reading.items) == 6)
        sent = items.database.client.admin.command("ping")
        assert sent["ok"], "a round trip later there is still nothing more"
        assert len(reading.items) == 6
    assert not reading.reader._thread.is_alive()


def test_a_large_event_takes_more_room_than_a_small_one(mongo_url: str, items: Collection[Document]) -> None:
    """Bounded in bytes, too."""
    with Reading(mongo_url, scope_on(items.full_name), now(items.database.client), room=20) as reading:
        items.insert_many([{"_id": number, "text": "x" * 100_000} for number in range(10)])
        wait_for(lambda: len(reading.items) >= 5)
        assert len(reading.items) == 5, "each takes four units"
        reading.reader.grant_credit(reading.items[:1])
        wait_for(lambda: len(reading.items) == 6)


@pytest.mark.needs_mongodb(6, 0, 9)
def test_an_event_above_16_mb_comes_whole_from_a_server_that_splits_it(
    mongo_url: str, database: Database[Document]
) -> None:
    """P12: two documents of 10 MB and their update."""
    items = database.create_collection("images", changeStreamPreAndPostImages={"enabled": True})
    items.insert_one({"_id": 1, "text": "a" * 10_000_000})
    scope = scope_on(items.full_name, full_document="updateLookup", before_change="required")
    with Reading(mongo_url, scope, now(database.client)) as reading:
        items.update_one({"_id": 1}, {"$set": {"text": "b" * 10_000_000}})
        items.insert_one({"_id": 2})
        reading.wait_for_keys(1, 2)
    assert not reading.read_errors
    changed, _ = reading.events
    assert {field: changed[field]["text"][0] for field in ("fullDocument", "fullDocumentBeforeChange")} == {
        "fullDocument": "b",
        "fullDocumentBeforeChange": "a",
    }


def test_the_reader_is_one_thread_that_ends_with_its_process() -> None:
    """A listener that is told to end does not wait for a read that is under way."""
    assert StreamReader(
        lambda _: MongoClient(), scope_on("a.b"), Position(None, None), deliver=print, room=1
    )._thread.daemon
