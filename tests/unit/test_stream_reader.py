"""A reader of a change stream: the time that it gives the server for a read, and what it joins and hands over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import bson
from bson import Timestamp
from bson.raw_bson import RawBSONDocument
from pymongo.errors import NetworkTimeout, OperationFailure

from mongo_celery.bridge.listener.activity import Activity
from mongo_celery.bridge.listener.stream_intake import ReadAhead, StreamIntake
from mongo_celery.bridge.stream.cursor import Position
from mongo_celery.bridge.stream.isolator import join_fragments
from mongo_celery.bridge.stream.items import ChangeEvent
from mongo_celery.bridge.stream.reader import StreamReader, _Attempt
from mongo_celery.bridge.stream.source import Scope
from tests.fixtures.process import wait_for
from tests.fixtures.samples import mark, raw_event


def _make_reader() -> tuple[StreamReader, list[float]]:
    """Return a reader that ends when it asks for a client, and the seconds that it gave that client."""
    seconds: list[float] = []

    def make_client(timeout: float) -> Any:
        seconds.append(timeout)
        reader.stop()
        raise NetworkTimeout("timed out")

    reader = StreamReader(make_client, Scope("shop", None, (), {}), Position(None, None), deliver=lambda _items: None)
    return reader, seconds


def test_reopenings_are_counted_once_also_after_a_time_without_a_reader() -> None:
    """P16: while all handlers have lost their history, nothing is read; the term's count does not begin anew."""

    def make_client(_timeout: float) -> Any:
        raise NetworkTimeout("timed out")

    wiring: Any = SimpleNamespace(stream_client=make_client, options=SimpleNamespace(comment=None))
    nothing: Any = SimpleNamespace(note_reopening=lambda: None, is_busy=False)
    intake = StreamIntake(wiring, Scope("shop", None, (), {}), {}, nothing, nothing, lambda: None)
    activity = Activity("shop", [], 30.0)
    counts = [intake.reopenings]

    def has_counted() -> bool:
        return intake.reopenings > counts[-1]

    for _ in range(2):
        intake.open_reader(Position(None, Timestamp(1, 1)))
        wait_for(has_counted)
        intake.open_reader(None)
        counts.append(intake.reopenings)
        activity.note_sweep(intake.reopenings)
    assert counts == sorted(counts)
    assert activity.reopenings == counts[-1] >= 2


def test_a_search_for_one_event_is_given_more_time_each_time_up_to_a_limit() -> None:
    """P17: the stream fails on the event immediately, and the read of the event alone scans the oplog to its end."""
    for times, given in ((3, 40.0), (2000, 86_400.0)):
        reader, seconds = _make_reader()
        for _ in range(times):
            reader._attempt = _Attempt(opened_at=0.0)
            reader._handle_error(OperationFailure("too large", 10334))
            reader._attempt = _Attempt(opened_at=0.0, isolates=True)
            reader._handle_error(NetworkTimeout("timed out"))
        reader._attempt = _Attempt(opened_at=0.0)
        reader._handle_error(OperationFailure("too large", 10334))
        reader._run()
        assert seconds == [given]


def test_fragments_are_joined_to_the_whole_event_or_to_none() -> None:
    """P13: never half of one. No more is read than the event has, since that would wait for the next change."""
    whole = {"operationType": "insert", "fullDocument": {"_id": 1}, "fullDocumentBeforeChange": {"_id": 2}}
    first, second, third = (
        RawBSONDocument(bson.encode({"splitEvent": {"fragment": number, "of": 3}, name: value}))
        for number, (name, value) in enumerate(whole.items(), start=1)
    )
    stream = iter([first, second, third, first])
    joined = join_fragments(stream, {"_data": "82"})
    assert joined is not None
    assert bson.decode(joined.raw) == {"_id": {"_data": "82"}, **whole}
    assert list(stream) == [first]
    for broken in ([], [first], [first, second], [first, third], [third]):
        assert join_fragments(broken, {"_data": "82"}) is None


def test_what_was_read_ahead_is_bounded_in_bytes_whatever_one_event_has() -> None:
    """P12: the listener's memory is bounded."""
    ahead, raw = ReadAhead(200), raw_event(fullDocument={"text": "x" * 3_000_000})
    for is_full in (False, False, True):
        ahead.put([ChangeEvent(mark(1), RawBSONDocument(raw), raw)])
        assert ahead.full() is is_full
    ahead.get()
    assert not ahead.full()
