"""
Every code that a server can answer with, on `aggregate` and on `getMore`, once and for as long as it lasts.

The reader alone resumes: what the server is sent, what is counted and what is logged is the same number. Nothing that
is written meanwhile is lost or comes twice; what does not pass ends with a sentence that names code, name and cure.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from pymongo.collection import Collection
from pymongo.database import Database

from mongo_celery.bridge.stream.reader import PAUSES
from mongo_celery.bridge.stream.verdicts import UNKNOWN_LIMIT
from mongo_celery.errors import HistoryLostError, StreamRefusedError
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.verdicts import Code, Verdict
from tests.fixtures.process import wait_for
from tests.rig.commands import CommandRecorder
from tests.rig.stream import APP_NAME, SHORT_PAUSES, StreamReading, now, scope_on

Document = dict[str, Any]
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

    def read(self, pauses: Pauses = SHORT_PAUSES, **options: Any) -> StreamReading:
        """Give a reader from now on, to be started by `with`."""
        given = {"pauses": pauses, "commands": self.commands, **options}
        return StreamReading(self.url, scope_on(self.items.full_name), now(self.items.database.client), **given)

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
    P15: while it lasts there is one opening a record, and a pause before each but the first; nothing is lost.

    Where connections are cut, events are looked at one by one as well: one may be too large for an answer.
    """
    with stream.read() as reading:
        stream.insert(1)
        reading.wait_for_keys(1)
        with stream.failing("getMore", **data):
            stream.insert(2)
            wait_for(lambda: len(stream.reopenings) >= 3)
            assert reading.reader.status.last_error is not None
        stream.insert(3)
        reading.wait_for_keys(1, 2, 3)
        wait_for(lambda: reading.reader.status.last_error is None)
    records = stream.reopenings
    assert "closeConnection" in data or stream.openings == 1 + len(records)
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
    made: list[int] = []

    class Noted(Pauses):
        def nth(self, count: int = 0) -> float:
            made.append(count)
            return super().nth(count)

    pauses, status = Noted(first=0.05, longest=0.2), None
    with stream.failing("getMore", errorCode=286):
        for number in range(3):
            with stream.read(pauses, status=status) as reading:
                assert isinstance(reading.wait_for_failure(), HistoryLostError)
            status = replace(reading.reader.status)
            assert made == list(range(number))
            assert status.reopenings == number + 1


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
