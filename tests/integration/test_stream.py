"""
The reader of the change stream against a real server and its failpoints.

What it hands over is each change once and in order, whatever interrupts it; what cannot be cured ends in an
error of ours that says in a sentence what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from bson import Timestamp
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.database import Database

from mongo_celery.bridge.listener.starts import start_time
from mongo_celery.bridge.stream.cursor import Position
from mongo_celery.bridge.stream.items import ChangeEvent, Failed, Item
from mongo_celery.bridge.stream.reader import PAUSES
from mongo_celery.bridge.stream.verdicts import UNKNOWN_LIMIT
from mongo_celery.bridge.window import Mark
from mongo_celery.embedded import MongoReplicaSet
from mongo_celery.errors import AccessError, HistoryLostError, StreamRefusedError, TopologyError
from mongo_celery.mongo.oplog import check_topology, operation_time, read_oplog
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.verdicts import Code, Verdict
from tests.fixtures.process import wait_for
from tests.fixtures.rights import DATA, UrlOf
from tests.rig.commands import CommandRecorder
from tests.rig.stream import APP_NAME, SHORT_PAUSES, StreamReading, now, scope_on

Document = dict[str, Any]
MakeClient = Callable[..., MongoClient[Document]]
Failpoint = Callable[..., AbstractContextManager[None]]

RESUMABLE = "ResumableChangeStreamError"
_ALL_TRANSIENT = {code for code in Code if code.verdict is Verdict.TRANSIENT}
TRANSIENT = sorted(_ALL_TRANSIENT - {Code.ChangeStreamInvalidated, Code.StaleConfig})
"""Those left out carry facts with them, without which no failpoint can make them."""

_NOT_FINAL = (Verdict.TRANSIENT, Verdict.DUPLICATE_KEY, Verdict.UNKNOWN)
FINAL = sorted(code for code in Code if code.verdict not in _NOT_FINAL)
NO_PAUSES = Pauses(first=0.01, longest=60.0, growth=1.0)
"""So that many errors one after the other are one row and cost no time."""


@dataclass
class Stream:
    """A collection, readers of it, what they send and log, and failures of their commands."""

    url: str
    items: Collection[Document]
    failpoint: Failpoint
    caplog: pytest.LogCaptureFixture
    commands: CommandRecorder = field(default_factory=CommandRecorder)

    def read(
        self, pauses: Pauses = SHORT_PAUSES, *, position: Position | None = None, scope: Any = None, **options: Any
    ) -> StreamReading:
        """Give a reader of the collection, from now on by default, to be started by `with`."""
        where = scope_on(self.items.full_name, **(scope or {}))
        given = {"pauses": pauses, "commands": self.commands, **options}
        return StreamReading(self.url, where, position or now(self.items.database.client), **given)

    def failing(self, command: str, **data: Any) -> AbstractContextManager[None]:
        return self.failpoint(failCommands=[command], appName=APP_NAME, **data)

    def insert(self, *keys: int) -> None:
        for key in keys:
            self.items.insert_one({"_id": key})

    @property
    def openings(self) -> int:
        return self.commands.names.count("aggregate")

    @property
    def reopenings(self) -> list[Any]:
        """The records of it."""
        return [record for record in self.caplog.records if getattr(record, "event", None) == "stream_reopening"]

    def kill_cursor(self) -> None:
        """Kill the reader's cursor, so that it opens the stream again."""
        client, match = self.items.database.client, {"appName": APP_NAME, "cursor.cursorId": {"$exists": 1}}
        own: list[Document] = [{"$currentOp": {"idleCursors": True}}, {"$match": match}]
        running = wait_for(lambda: [each for each in client.admin.aggregate(own) if each["ns"].endswith(".items")])
        for each in running:
            database, _, collection = each["ns"].partition(".")
            client[database].command("killCursors", collection, cursors=[each["cursor"]["cursorId"]])


@pytest.fixture
def stream(
    mongo_url: str, database: Database[Document], failpoint: Failpoint, caplog: pytest.LogCaptureFixture
) -> Stream:
    caplog.set_level("INFO", logger="mongo_celery")
    return Stream(mongo_url, database.create_collection("items"), failpoint, caplog)


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
        items.insert_one({"_id": 1})
        open_reading.wait_for_keys(1)
        items.insert_many([{"_id": key} for key in range(2, 20)])  # the reader waits for room with its cursor open
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


def test_a_bad_pipeline_is_refused_at_once(stream: Stream) -> None:
    with stream.read(scope={"pipeline": [{"$matsch": {"a": 1}}]}) as reading:
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
        make_client(guarded_url("admin"))[DATA]["items"].insert_one({"_id": 1})
        allowed.wait_for_keys(1)


def test_handlers_that_ask_for_drop_and_rename_get_them(stream: Stream) -> None:
    with stream.read(scope={"operations": {"insert", "drop", "rename", "invalidate"}}) as reading:
        stream.insert(1)
        stream.items.rename("elsewhere")
        stream.insert(2)
        stream.items.drop()
        stream.insert(3)
        reading.wait_for_keys(1, 2, 3)
    assert reading.operations == ["insert", "rename", "invalidate", "insert", "drop", "invalidate", "insert"]
    (renamed,) = [event for event in reading.events if event["operationType"] == "rename"]
    assert (renamed["to"]["db"], renamed["to"]["coll"]) == (stream.items.database.name, "elsewhere")


def test_a_reader_that_starts_behind_an_invalidate_opens_after_its_token(stream: Stream) -> None:
    """P1: the token of an invalidate may be stored; `resumeAfter` it would be refused with 260."""
    with stream.read() as first:
        stream.insert(1)
        stream.items.drop()
        wait_for(lambda: "invalidate" in first.operations)
        events = [item for item in first.items if isinstance(item, ChangeEvent)]
        last = next(event for event in events if event.document["operationType"] == "invalidate")
    stream.insert(2)
    with stream.read(position=Position(last.mark.token, last.mark.cluster_time)) as second:
        second.wait_for_keys(2)


def test_a_marker_comes_only_behind_everything_that_was_read_and_can_be_resumed_from(stream: Stream) -> None:
    """P1, P5: items arrive in the order of their places. Behind a stored marker nothing is missing or repeated."""
    with stream.read() as reading:
        stream.insert(*range(200))
        reading.wait_for_keys(*range(200))
        stream.items.database["noise"].insert_one({})
        last = reading.items[-1]
        mark = wait_for(lambda: reading.items[-1] is not last and reading.items[-1])
        assert isinstance(mark, Mark)
        places = [_place(item) for item in reading.items]
        assert places == sorted(set(places))
        assert mark.cluster_time is not None
        wait_for(lambda: (reading.reader.read_to or Timestamp(0, 0)) >= mark.cluster_time)
    stream.insert(200)
    with stream.read(position=Position(mark.token, mark.cluster_time)) as again:
        again.wait_for_keys(200)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_the_place_of_a_quiet_stream_passes_a_neighbours_writes(stream: Stream, when: str) -> None:
    """P13: what lies before the first read, and what is written meanwhile. Else its place falls off the oplog."""
    client, position = stream.items.database.client, now(stream.items.database.client)

    def disturb() -> Timestamp:
        noise = stream.items.database["noise"]
        for _ in range(10):
            noise.insert_many([{"text": "x" * 100} for _ in range(1000)], ordered=False)
        last = operation_time(client)
        noise.insert_one({})  # a time is passed when something lies behind it
        return last

    last = disturb() if when == "before" else None
    with stream.read(position=position) as reading:
        last = last or disturb()
        wait_for(lambda: reading.marks and (reading.marks[-1].cluster_time or position.time) >= last)
        assert reading.events == []
        stream.insert(1)
        reading.wait_for_keys(1)


def _place(item: Item) -> str:
    assert not isinstance(item, Failed), "the stream goes on"
    return item.data if isinstance(item, Mark) else item.mark.data


def test_the_reader_reads_no_further_than_there_is_room(stream: Stream) -> None:
    items, position = stream.items, now(stream.items.database.client)
    items.insert_many([{"_id": number, "text": "x" * 200_000} for number in range(20)])
    with stream.read(position=position, room=1) as reading:
        wait_for(lambda: reading.items)
        assert items.database.client.admin.command("ping")["ok"], "a round trip later there is still nothing more"
        assert len(reading.items) == 10, "each weighs seven of the 64 of a batch"
        assert reading.room is not None
        reading.room.release()
        wait_for(lambda: len(reading.items) == 20)
        stream.insert(20)
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


# -- every code that a server can answer with ---------------------------------------------------------


@pytest.mark.parametrize(
    "labels", [pytest.param([], id="without label"), pytest.param([RESUMABLE], id="with label", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("command", ["getMore", "aggregate"])
def test_a_transient_error_is_resumed(stream: Stream, command: str, labels: list[str]) -> None:
    """P15: each of the codes, one after the other: one opening and one record each, and every change once."""
    with stream.read(NO_PAUSES) as reading:
        for number, code in enumerate(TRANSIENT):
            with stream.failing(command, errorCode=code, errorLabels=labels, mode={"times": 1}):
                if command == "aggregate":
                    stream.kill_cursor()
                stream.insert(number)
                wait_for(lambda: code in [record.code for record in stream.reopenings], message=f"{code!r}")  # noqa: B023
            wait_for(lambda: number in reading.keys, message=f"{code!r}: {number} in {reading.keys}")  # noqa: B023
        # A read that was under way may have brought the last key before the one behind it failed.
        wait_for(lambda: stream.openings > len(stream.reopenings))
        assert reading.keys == list(range(len(TRANSIENT)))
        assert reading.failure is None
    records = stream.reopenings
    assert stream.openings == 1 + len(records)
    assert reading.reader.status.reopenings == len(records)


LASTING: dict[str, Document] = {
    "by number": {"errorCode": 6},
    "by number and label": {"errorCode": 262, "errorLabels": [RESUMABLE]},
    "by label alone": {"errorCode": 9999, "errorLabels": [RESUMABLE]},
    "by label against a number that is final": {"errorCode": 2, "errorLabels": [RESUMABLE]},
    "the cursor is gone": {"errorCode": 43},
    "the connection is cut": {"closeConnection": True},
}


@pytest.mark.parametrize("data", LASTING.values(), ids=LASTING.keys())
def test_a_getmore_error_is_resumed(stream: Stream, data: Document) -> None:
    """
    P15: while it lasts there is one opening a record, and a pause before each but the first. Nothing is lost.

    Where connections are cut, events are looked at one by one as well: one may be too large for an answer.
    """
    with stream.read() as reading:
        stream.insert(1)
        reading.wait_for_keys(1)
        with stream.failing("getMore", **data):
            stream.insert(2)
            wait_for(lambda: len(stream.reopenings) >= 3 and reading.reader.status.last_error is not None)
        stream.insert(3)
        reading.wait_for_keys(1, 2, 3)
        wait_for(lambda: reading.reader.status.last_error is None)
    records = stream.reopenings
    if "closeConnection" in data:
        del records[3:]  # an event that is read alone begins a new series
    else:
        assert stream.openings == 1 + len(records)
    assert [record.pause > 0 for record in records] == [index > 0 for index in range(len(records))]
    assert [record.failures for record in records] == list(range(1, len(records) + 1))


def test_a_lasting_error_opens_the_stream_at_most_once_a_second(stream: Stream) -> None:
    """P15: by the pauses that are the default, whatever chance takes away from them."""
    assert min(PAUSES.nth(count) for count in range(1000)) >= 1.0
    with stream.failing("getMore", errorCode=262), stream.read(PAUSES) as reading:
        wait_for(lambda: len(stream.reopenings) >= 3)
    pauses = [record.pause for record in stream.reopenings]
    assert pauses[0] == 0
    assert all(pause >= 1 for pause in pauses[1:])
    assert stream.openings <= 1 + len(pauses)
    assert reading.failure is None


@pytest.mark.parametrize("command", ["getMore", "aggregate"])
def test_a_final_error_ends_with_code_name_and_cure(stream: Stream, command: str) -> None:
    for code in FINAL:
        stream.commands.sent.clear()
        with stream.failing(command, errorCode=code), stream.read() as reading:
            error = reading.wait_for_failure()
        assert code.name in str(error)
        assert stream.openings <= 3, "the stream, with small batches, and single events"


@pytest.mark.parametrize("command", ["getMore", "aggregate"])
def test_an_aggregate_error_is_named_when_nobody_knows_it(stream: Stream, command: str) -> None:
    """P9: an error of unknown kind is tried a few times, with pauses, and then ends with what is known of it."""
    with stream.failing(command, errorCode=4711), stream.read() as reading:
        error = reading.wait_for_failure()
    assert isinstance(error, StreamRefusedError)
    assert "4711" in str(error)
    assert stream.openings == UNKNOWN_LIMIT + 1


@pytest.mark.parametrize("command", ["getMore", "aggregate"])
def test_a_token_that_is_never_found_is_tried_once_by_its_time(stream: Stream, command: str) -> None:
    """P15: code 280 was tried by time for ever, where it comes with the `getMore`."""
    with stream.read() as reading:
        stream.insert(1)
        reading.wait_for_keys(1)
        with stream.failing(command, errorCode=Code.ChangeStreamFatalError):
            if command == "aggregate":
                stream.kill_cursor()
            assert isinstance(reading.wait_for_failure(), HistoryLostError)
    assert len([record for record in stream.reopenings if record.code == Code.ChangeStreamFatalError]) == 1


def test_lost_history_that_is_lost_again_elsewhere_is_paced_across_readers(stream: Stream) -> None:
    """P15: going on from the oldest entry of an oplog that rolls on; each time another reader begins."""
    pauses = Pauses(first=3600, longest=3600)
    with stream.failing("getMore", errorCode=286):
        with stream.read(pauses) as first:
            assert isinstance(first.wait_for_failure(), HistoryLostError)
        with stream.read(pauses, status=replace(first.reader.status)) as second:
            wait_for(lambda: second.reader.status.reopenings == 2)
    assert second.failure is None, "no third reader begins before the pause has ended"
    assert stream.openings == 2


def test_a_token_that_is_found_later_loses_nothing(stream: Stream) -> None:
    """P1: read by time, what was read before comes again and is known; the token is asked for behind it only."""
    with stream.read() as reading:
        stream.insert(0, 1, 2)
        reading.wait_for_keys(0, 1, 2)
        with stream.failing("getMore", errorCode=280, mode={"times": 1}):
            stream.insert(3)
            wait_for(lambda: 3 in reading.keys)
        stream.insert(4)
        wait_for(lambda: 4 in reading.keys)
        assert list(dict.fromkeys(reading.keys)) == [0, 1, 2, 3, 4]
        assert reading.failure is None
