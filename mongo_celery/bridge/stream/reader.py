"""
The reader: one thread that reads the change stream and delivers its events in order and in batches.

It opens at a position, remembers the token of the last delivered item, and reopens from there after every non-final
error. No other code resumes. One function handles every error (`_handle_error`): it counts the error, writes one log
record, and waits longer while errors continue.

The reader is bounded: it delivers batches of some events, and waits while the listener has no room for the next batch.
Meanwhile it does not read the stream. A post-batch token is delivered as an item at its place, but only if a read
returned nothing.

After an error that one event may have caused, a read requests one event, and each further one twice as many. If a read
of one event fails, events are read one by one (`isolator`). Complete events are delivered as usual, incomplete ones
with a read error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bson import Timestamp
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.errors import NetworkTimeout

from mongo_celery.bridge.change import describe, token_data
from mongo_celery.bridge.existing import is_unread
from mongo_celery.bridge.raw_event import RawEvent
from mongo_celery.bridge.stream.cursor import AWAIT_SECONDS, LOW_LATENCY_SECONDS, EventCursor, Position, token_of
from mongo_celery.bridge.stream.isolator import (
    TOKEN_MAX,
    ClientFactory,
    EventIsolator,
    Reread,
    explain_oversized,
    shorten,
)
from mongo_celery.bridge.stream.items import ChangeEvent, Failed, Item, ReadError, weigh
from mongo_celery.bridge.stream.source import Scope, Source
from mongo_celery.bridge.stream.verdicts import (
    PASSING,
    UNKNOWN_LIMIT,
    closes_connection,
    concerns_an_event,
    final_error,
    judge_stream_error,
)
from mongo_celery.bridge.window import Mark
from mongo_celery.errors import HistoryLostError, MongoCeleryError
from mongo_celery.mongo.oplog import time_of_token
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.verdicts import Verdict, error_code, error_name, server_words

logger = logging.getLogger("mongo_celery.stream")

PAUSES = Pauses(first=1.25, longest=5.0, growth=1.6, jitter=0.2)
"""Pauses between openings: at least one second, even with jitter."""

_FIRST_TIMEOUT = 5.0
_LONGEST_TIMEOUT = 86_400.0
_DOUBLINGS_MAX = 16
_BATCH_WEIGHT = 64
"""In units of `weigh`, which limits bytes. A larger batch would delay its first item without a gain."""
_LARGEST_SMALL_BATCH = 4096
_FULL_BATCH = 0  # the server decides how many events a `getMore` returns
_ISOLATED_MAX = 200
_READ_ERRORS_AT_ONCE = 100


@dataclass(slots=True)
class StreamStatus:
    """
    The state of reading. Only the reader writes it, and any thread may read it.

    Attributes:
        reopenings: errors after which the stream was opened again, or which ended it.
        failures: current number of failures in a row, which lengthens the pauses. A single read does not end a row.
        last_error: name, code and words of the last error. None after a successful read.
        last_read: monotonic time of the last successful read, even without events.
    """

    reopenings: int = 0
    failures: int = 0
    last_error: str | None = None
    last_read: float | None = None

    def succeed(self) -> None:
        """Note a successful read."""
        self.last_error, self.last_read = None, time.monotonic()


@dataclass(slots=True)
class _Attempt:
    """One opening of the stream, and its result."""

    isolates: bool = False
    opened_at: float | None = None
    has_read: bool = False
    has_progress: bool = False

    @property
    def seconds(self) -> float:
        """Return how many seconds the stream has been open."""
        return 0.0 if self.opened_at is None else time.monotonic() - self.opened_at

    def may_concern_an_event(self, error: Exception) -> bool:
        """
        Return True if the reader should search for a single event, unless that search has failed.

        A server that closes the connection instead of sending the first answer may be unable to send it.
        """
        is_unsent = closes_connection(error) and not self.has_read
        return self.opened_at is not None and not self.isolates and (is_unsent or concerns_an_event(error))


class StreamReader:
    """
    Reads one change stream until it is stopped or meets a final error.

    Args:
        make_client: makes a client with a socket timeout in seconds that returns documents as RawBSONDocument and does
            not repeat reads.
        scope: the stream to read.
        position: the position from which to read.
        deliver: called in the reader's thread with the next items, at least one, in stream order. Returns when there is
            room for them.
        comment: the comment of all commands, for the server's log.
        pauses: the pauses between openings while an error lasts.
        status: a copy of the last reader's status, so that a stream that reopens elsewhere keeps its pauses.

    Attributes:
        status: the state of reading.
    """

    def __init__(
        self,
        make_client: ClientFactory,
        scope: Scope,
        position: Position,
        *,
        deliver: Callable[[Sequence[Item]], None],
        comment: str | Mapping[str, Any] | None = None,
        pauses: Pauses = PAUSES,
        status: StreamStatus | None = None,
    ) -> None:
        self.status = status or StreamStatus()
        self._make_client = make_client
        self._scope = scope
        self._position = position
        self._deliver = deliver
        self._batch = _FULL_BATCH
        self._comment = comment
        self._pauses = pauses
        self._stopping = threading.Event()
        self._attempt = _Attempt()
        self._isolates = False
        self._unknown = 0
        self._timeouts = 0
        self._read_errors = 0  # in a row
        self._has_low_latency = False
        self._last_stand_in = ""  # no stream can be opened at this token
        self._refused: str | None = None  # a token that the server lacks: use times until it is passed
        self._thread = threading.Thread(target=self._run, name="mongo_celery-reader", daemon=True)

    @property
    def read_to(self) -> Timestamp | None:
        """The cluster time up to which everything was delivered. None before the first item. Any thread may call it."""
        return self._position.time if self.status.last_read is not None else None

    @property
    def is_running(self) -> bool:
        """Return True if the thread of the reader reads, or waits to read. Any thread may call it."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """Stop reading, without waiting. The result of a read in progress is dropped."""
        self._stopping.set()

    def set_low_latency(self, is_low: bool) -> None:
        """Set whether to report progress quickly, even without events. Any thread may call it."""
        self._has_low_latency = is_low

    # -- openings, and the errors that end them ------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._attempt = _Attempt(self._isolates)
            self._isolates = False
            timeout = min(_FIRST_TIMEOUT * 2.0 ** min(self._timeouts, _DOUBLINGS_MAX), _LONGEST_TIMEOUT)
            pause: float | None = 0.0
            try:
                with self._make_client(timeout) as client:
                    (self._isolate_events if self._attempt.isolates else self._read_stream)(client)
                if self._attempt.has_progress:  # up to an invalidate, or event by event
                    self.status.failures = 0
                else:
                    pause = self._pauses.nth()
            except Exception as error:  # noqa: BLE001 - every error is classified there
                pause = self._handle_error(error)
            if pause is None:
                return
            self._stopping.wait(pause)

    def _handle_error(self, error: Exception) -> float | None:
        """
        Decide after an error: open again (perhaps by time, with smaller batches or event by event), or end.

        A first read may scan much of the oplog. Each timeout doubles its time limit until a read succeeds.

        Returns:
            The seconds before the next opening. None if the error is final and was delivered.
        """
        attempt = self._attempt
        verdict = judge_stream_error(error, opening=attempt.opened_at is None)
        may_concern_an_event = attempt.may_concern_an_event(error)
        if attempt.has_read:
            self._timeouts = 0
        elif isinstance(error, NetworkTimeout):
            self._timeouts += 1
        self._unknown = self._unknown + 1 if verdict is Verdict.UNKNOWN and not attempt.has_read else 0
        final: MongoCeleryError | None = None
        if verdict is Verdict.TOKEN_NOT_FOUND and self._position.token is not None and self._refused is None:
            self._refused = token_data(self._position.token)
        elif may_concern_an_event and self._unknown <= UNKNOWN_LIMIT:
            self._isolates, self._batch = self._batch == 1, 1
        elif verdict not in PASSING or self._unknown > UNKNOWN_LIMIT:
            final = final_error(verdict, error, str(Source(self._scope.database, self._scope.collection)))
        is_search = may_concern_an_event and not closes_connection(error)
        pause = self._count_failure(error, is_search=is_search)
        if final is None:
            self._log_failure(error, pause)
            return pause
        if isinstance(final, HistoryLostError):
            # Another reader may follow at a place that is chosen later. A place chosen before the pause could fall off
            # the oplog during it.
            self._stopping.wait(pause)
        if not self._stopping.is_set():
            self._deliver([Failed(final)])
        return None

    def _count_failure(self, error: Exception, *, is_search: bool) -> float:
        """
        Count an error, and return the seconds before the next opening.

        The first error in a row causes no pause, nor does the search for a single event. A row ends when a stream was
        read for as long as the longest pause. A stream that breaks repeatedly is opened about once a second while it
        progresses, otherwise less and less often.
        """
        status = self.status
        if self._attempt.seconds >= self._pauses.longest:
            status.failures = 0
        elif self._attempt.has_progress:
            status.failures = min(status.failures, 1)
        status.failures += 1
        status.reopenings += 1
        status.last_error = f"{error_name(error)}: {server_words(error)}"
        return 0.0 if is_search or status.failures == 1 else self._pauses.nth(status.failures - 2)

    def _log_failure(self, error: Exception, pause: float) -> None:
        logger.warning(
            "the change stream has ended (%s, %d in a row). The listener opens it again in %.1f s: %s",
            error_name(error),
            self.status.failures,
            pause,
            server_words(error),
            extra={
                "event": "stream_reopening",
                "pause": pause,
                "code": error_code(error),
                "error": error_name(error),
                "failures": self.status.failures,
            },
        )

    # -- reading -------------------------------------------------------------------------------------

    def _read_stream(self, client: MongoClient[RawBSONDocument]) -> None:
        """Open, and read until the stream ends (an invalidate) or fails. If stopped, end quietly."""
        with EventCursor(client, self._scope, self._start(), comment=self._comment) as cursor:
            self._attempt.opened_at = time.monotonic()
            cursor.limit_batch(self._batch)
            while not self._stopping.is_set() and cursor.is_alive:
                cursor.set_await(LOW_LATENCY_SECONDS if self._has_low_latency else AWAIT_SECONDS)
                documents = cursor.read_batch()
                self._note_read()
                if documents:
                    self._hand_over(documents)
                else:
                    self._pass_marker(cursor.token)
                if self._batch != _FULL_BATCH:
                    is_small = documents and self._batch < _LARGEST_SMALL_BATCH / 2
                    self._batch = 2 * self._batch if is_small else _FULL_BATCH
                    cursor.limit_batch(self._batch)

    def _isolate_events(self, client: MongoClient[RawBSONDocument]) -> None:
        """
        Read single events up to the one that cannot be read whole. Earlier events are complete.

        Many read errors in a row are slow, because each needs several openings.
        """
        if self._read_errors >= _READ_ERRORS_AT_ONCE:
            self._stopping.wait(self._pauses.nth())
        isolator = EventIsolator(client, self._scope, self._comment)
        self._attempt.opened_at = time.monotonic()
        for number, event in enumerate(isolator.read_events(self._start(), self._last_stand_in), start=1):
            self._note_read()
            if isinstance(event, Reread):
                self._hand_over([event.document], event.error)
                if event.error is not None and not is_unread(token_data(token_of(event.document))):
                    return
            else:
                self._pass_marker(event)
            if self._stopping.is_set() or number == _ISOLATED_MAX:
                return

    def _start(self) -> Position:
        return Position(None if self._refused is not None else self._position.token, self._position.time)

    def _note_read(self) -> None:
        self._attempt.has_read = True
        self._unknown = 0
        self.status.succeed()

    # -- delivery ------------------------------------------------------------------------------------

    def _hand_over(self, documents: Iterable[RawBSONDocument], error: ReadError | None = None) -> None:
        """Deliver the read events in batches."""
        batch: list[ChangeEvent] = []
        weight = 0
        try:
            for document in documents:
                event = self._make_event(document, error)
                batch.append(event)
                weight += weigh(event)
                if weight >= _BATCH_WEIGHT:
                    complete, batch, weight = batch, [], 0
                    self._hand_over_batch(complete)
                    if self._stopping.is_set():
                        return
        finally:  # deliver also the events before one that fails
            if batch:
                self._hand_over_batch(batch)

    def _make_event(self, document: RawBSONDocument, error: ReadError | None) -> ChangeEvent:
        event = RawEvent(document.raw)
        if len(event.raw) > TOKEN_MAX and len(token_data(token_of(event))) > TOKEN_MAX:
            event = RawEvent(shorten(event, token_data(token_of(event))).raw)
            error = ReadError(explain_oversized(event))
        if event.plain is not None:
            mark = Mark({"_data": event.plain.token}, event.plain.token, event.plain.cluster_time)
        else:
            token, time_ = token_of(event), event.get("clusterTime")
            if not isinstance(time_, Timestamp):  # a damaged event may lack it
                time_ = time_of_token(token, self._position.time)
            mark = Mark(token, token_data(token), time_)
        if error is None:
            self._read_errors = 0
        else:
            self._read_errors += 1
            logger.error(
                "a change could not be read completely (%s): %s",
                describe(event),
                error.sentence,
                extra={"event": "change_read_error", "token": mark.data, "only_match": error.only_match},
            )
        return ChangeEvent(mark, event, event.raw, error)

    def _pass_marker(self, token: Mapping[str, Any] | None) -> None:
        """Deliver a place without an event, unless the stream is already there."""
        if token is None:
            return
        if self._position.token is None or token_data(token) > token_data(self._position.token):
            mark = Mark(dict(token), token_data(token), time_of_token(token, self._position.time))
            self._hand_over_batch([mark])

    def _hand_over_batch(self, batch: Sequence[ChangeEvent | Mark]) -> None:
        """Deliver, then remember the place: a remembered place was always delivered."""
        if self._stopping.is_set():
            return
        self._deliver(batch)
        self.status.succeed()
        place: Mark | None = None
        for item in batch:
            mark = item if isinstance(item, Mark) else item.mark
            if is_unread(mark.data):
                self._last_stand_in = max(self._last_stand_in, mark.data)
                self._attempt.has_progress = True
            else:
                place = mark
        # Reading by time repeats some events. Use the token only after the refused one.
        if place is not None and (self._refused is None or place.data > self._refused):
            self._refused = None
            self._position = Position(place.token, place.cluster_time or self._position.time)
            self._attempt.has_progress = True
