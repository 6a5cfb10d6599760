"""The time that the server is given for a read: it grows until a read succeeds."""

from __future__ import annotations

from typing import Any

from pymongo.errors import NetworkTimeout, OperationFailure

from mongo_celery.bridge.stream.cursor import Position
from mongo_celery.bridge.stream.reader import StreamReader, _Attempt
from mongo_celery.bridge.stream.source import Scope


def _make_reader() -> tuple[StreamReader, list[float]]:
    """Return a reader that ends when it asks for a client, and the seconds that it gave that client."""
    seconds: list[float] = []

    def make_client(timeout: float) -> Any:
        seconds.append(timeout)
        reader.stop()
        raise NetworkTimeout("timed out")

    reader = StreamReader(make_client, Scope("shop", None, (), {}), Position(None, None), deliver=lambda _items: None)
    return reader, seconds


def test_a_search_for_one_event_is_given_more_time_each_time() -> None:
    """P17: the stream fails on the event immediately, and the read of the event alone scans the oplog to its end."""
    reader, seconds = _make_reader()
    for _ in range(3):
        reader._attempt = _Attempt(opened_at=0.0)
        reader._handle_error(OperationFailure("too large", 10334))
        reader._attempt = _Attempt(opened_at=0.0, isolates=True)
        reader._handle_error(NetworkTimeout("timed out"))
    reader._attempt = _Attempt(opened_at=0.0)
    reader._handle_error(OperationFailure("too large", 10334))
    reader._run()
    assert seconds == [40.0]


def test_the_time_has_a_limit_however_often_it_has_grown() -> None:
    """P17: a thread that fails before it reads would end silently."""
    reader, seconds = _make_reader()
    for _ in range(2000):
        reader._attempt = _Attempt()
        reader._handle_error(NetworkTimeout("timed out"))
    reader._run()
    assert seconds == [86_400.0]
