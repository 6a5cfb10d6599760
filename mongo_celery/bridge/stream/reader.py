"""
The reader: one thread that reads the change stream and hands over what it reads, in order and in batches.

It opens at a position, remembers the token of the last item it handed over, and reopens from there after every error
that is not final. Nobody else resumes. Each error passes one place (`_handle_error`), which counts it, writes one log
record, and waits longer and longer while it lasts.

The reader is bounded: it hands over a batch only while the listener has granted credit. Without credit it does not read
the stream. A post-batch token is handed over only if a read returned nothing, as an item at its place.

After an error that may be about one event a read brings one event, and each further one twice as many. When one of one
event fails, events are read one by one (`isolator`): one that the server can give whole is handed over as always,
another one with a read error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bson import Timestamp
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.errors import NetworkTimeout

from mongo_celery.bridge.change import describe, token_data
from mongo_celery.bridge.existing import is_unread
from mongo_celery.bridge.raw_event import RawEvent
from mongo_celery.bridge.stream.cursor import (
    AWAIT_SECONDS,
    LOW_LATENCY_SECONDS,
    Position,
    limit_batch,
    next_batch,
    open_cursor,
    post_batch_token,
    set_await,
    token_of,
)
from mongo_celery.bridge.stream.isolator import (
    TOKEN_MAX,
    ClientFactory,
    EventIsolator,
    Reread,
    explain_oversized,
    shorten,
)
from mongo_celery.bridge.stream.items import ChangeEvent, Failed, Item, ReadError, credit_cost
from mongo_celery.bridge.stream.reactions import (
    UNKNOWN_LIMIT,
    Reaction,
    classify_error,
    closes_connection,
    concerns_an_event,
    final_error,
)
from mongo_celery.bridge.stream.source import Scope, Source
from mongo_celery.bridge.window import Mark
from mongo_celery.errors import HistoryLostError, MongoCeleryError
from mongo_celery.mongo.oplog import time_of_token
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.verdicts import error_code, error_name, server_words

if TYPE_CHECKING:
    from pymongo.command_cursor import CommandCursor

logger = logging.getLogger("mongo_celery.stream")

PAUSES = Pauses(first=1.25, longest=5.0, growth=1.6, jitter=0.2)
"""Before an opening, after the first: never less than a second, whatever chance takes away."""

_FIRST_TIMEOUT = 5.0
_LONGEST_TIMEOUT = 86_400.0
_BATCH_CREDITS = 64
"""Credits of one batch: a larger one would keep its first item waiting, and gain nothing."""
_LARGEST_SMALL_BATCH = 4096
_ISOLATED_MAX = 200
_READ_ERRORS_AT_ONCE = 100


@dataclass(slots=True)
class StreamStatus:
    """
    The state of reading. The reader alone writes it, and any thread may read it.

    Attributes:
        reopenings: errors after which the stream was opened again, or which ended it.
        failures: of these, the number in a row by which the pauses grow. A read in between does not end a row.
        last_error: name, code and words of the last error. None if a read has succeeded since.
        last_read: monotonic time of the last read that succeeded, even one that returned nothing.
    """

    reopenings: int = 0
    failures: int = 0
    last_error: str | None = None
    last_read: float | None = None

    def succeed(self) -> None:
        """Note that a read has succeeded."""
        self.last_error, self.last_read = None, time.monotonic()


@dataclass(slots=True)
class _Attempt:
    """One opening of the stream, and what has come of it."""

    isolates: bool = False
    opened_at: float | None = None
    has_read: bool = False
    has_progress: bool = False

    def open(self) -> None:
        """Note that the stream is open."""
        self.opened_at = time.monotonic()

    @property
    def seconds(self) -> float:
        """For how long it has been open."""
        return 0.0 if self.opened_at is None else time.monotonic() - self.opened_at

    def may_concern_an_event(self, error: Exception) -> bool:
        """
        Return True if single events should be looked at: not when looking at them has failed.

        A server that closes the connection instead of giving the first answer may be unable to send it.
        """
        is_unsent = closes_connection(error) and not self.has_read
        return self.opened_at is not None and not self.isolates and (is_unsent or concerns_an_event(error))


class StreamReader:
    """
    Reads one change stream until it is stopped or meets a final error.

    Args:
        make_client: makes a client with a socket timeout in seconds that gives documents as RawBSONDocument and
            repeats no reads.
        scope: what to watch.
        position: where to begin.
        deliver: called in the reader's thread with the next items, one at least, in stream order.
        room: how far to read ahead of `grant_credit`, by `credit_cost`.
        batch_size: the most events of a `getMore`. By default as many as the server likes.
        comment: of all commands, for the server's log.
        pauses: between openings while an error lasts.
        status: a copy of that of the reader before: a stream that is opened again elsewhere has the same pauses.

    Attributes:
        status: how reading goes.
    """

    def __init__(
        self,
        make_client: ClientFactory,
        scope: Scope,
        position: Position,
        *,
        deliver: Callable[[Sequence[Item]], None],
        room: int,
        batch_size: int | None = None,
        comment: str | Mapping[str, Any] | None = None,
        pauses: Pauses = PAUSES,
        status: StreamStatus | None = None,
    ) -> None:
        self.status = status or StreamStatus()
        self._make_client = make_client
        self._scope = scope
        self._position = position
        self._deliver = deliver
        self._room = room
        self._handed_over = 0
        self._credit = threading.Condition()
        self._full_batch = batch_size or 0  # 0: as many as the server likes
        self._batch = self._full_batch
        self._comment = comment
        self._pauses = pauses
        self._stopping = threading.Event()
        self._attempt = _Attempt()
        self._isolates = False
        self._unknown = 0
        self._timeouts = 0
        self._read_errors = 0  # in a row
        self._has_low_latency = False
        self._last_stand_in = ""  # a token at which no stream can be opened
        self._refused: str | None = None  # the token that the server did not find; until it is passed, times count
        self._thread = threading.Thread(target=self._run, name="mongo_celery-reader", daemon=True)

    @property
    def read_to(self) -> Timestamp | None:
        """The cluster time up to which everything was handed over. None before the first. Callable from any thread."""
        return self._position.time if self.status.last_read is not None else None

    @property
    def is_running(self) -> bool:
        """Return True if its thread reads, or waits to do so. Callable from any thread."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """Read no more. Does not wait: a read may still be under way, and its result is dropped."""
        self._stopping.set()
        with self._credit:
            self._credit.notify_all()

    def set_low_latency(self, is_low: bool) -> None:
        """Set whether to report soon how far the stream is, even if no event comes. Callable from any thread."""
        self._has_low_latency = is_low

    def grant_credit(self, batch: Iterable[Item]) -> None:
        """Let as much more be handed over as a batch that was taken in. Callable from any thread."""
        with self._credit:
            self._handed_over -= sum(map(credit_cost, batch))
            self._credit.notify_all()

    # -- openings, and the errors that end them ------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._attempt = _Attempt(self._isolates)
            self._isolates = False
            timeout = min(_FIRST_TIMEOUT * 2.0**self._timeouts, _LONGEST_TIMEOUT)
            pause: float | None = 0.0
            try:
                with self._make_client(timeout) as client:
                    (self._isolate_events if self._attempt.isolates else self._read_stream)(client)
                if self._attempt.has_progress:  # up to an invalidate, or one by one
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
        Decide what follows an error: another opening, by time, with smaller batches or event by event, or the end.

        A first read may have to scan much of the oplog: each time-out without progress doubles the time for it.

        Returns:
            The seconds to wait before the next opening. None if the error is final, and was handed over.
        """
        attempt = self._attempt
        reaction = classify_error(error, opening=attempt.opened_at is None)
        may_concern_an_event = attempt.may_concern_an_event(error)
        self._timeouts = self._timeouts + 1 if isinstance(error, NetworkTimeout) and not attempt.has_read else 0
        self._unknown = self._unknown + 1 if reaction is Reaction.UNKNOWN and not attempt.has_read else 0
        final: MongoCeleryError | None = None
        if reaction is Reaction.REOPEN_BY_TIME and self._position.token is not None and self._refused is None:
            self._refused = token_data(self._position.token)
        elif may_concern_an_event and self._unknown <= UNKNOWN_LIMIT:
            self._isolates, self._batch = self._batch == 1, 1
        elif reaction not in {Reaction.REOPEN, Reaction.UNKNOWN} or self._unknown > UNKNOWN_LIMIT:
            final = final_error(reaction, error, str(Source(self._scope.database, self._scope.collection)))
        is_search = may_concern_an_event and not closes_connection(error)
        pause = self._count_failure(error, is_search=is_search)
        if final is None:
            self._log_failure(error, pause)
            return pause
        if isinstance(final, HistoryLostError):
            # Another reader may follow at a place that is still to be chosen. One that was chosen before the pause
            # might roll away in it.
            self._stopping.wait(pause)
        if not self._stopping.is_set():
            self._deliver([Failed(final)])
        return None

    def _count_failure(self, error: Exception, *, is_search: bool) -> float:
        """
        Count an error, and return the seconds to wait before the next opening.

        The first error in a row costs no pause, nor does the search for a single event that may be the reason. A row
        ends with a stream that was read for as long as the longest pause. A stream that breaks again and again is
        opened about once a second as long as it makes progress, and ever more rarely if it does not.
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
            "change stream interrupted (%s), %d in a row, opened again in %.1f s: %s",
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
        """Open, and read until the stream ends (an invalidate) or fails. Ends quietly when stopped."""
        with self._open(client, self._scope, self._start()) as cursor:
            self._attempt.open()
            limit_batch(cursor, self._batch)
            while not self._stopping.is_set() and cursor.alive:
                set_await(cursor, LOW_LATENCY_SECONDS if self._has_low_latency else AWAIT_SECONDS)
                documents = next_batch(cursor)
                self._note_read()
                if documents:
                    self._hand_over(documents)
                else:
                    self._pass_marker(post_batch_token(cursor))
                if self._batch != self._full_batch:
                    is_small = documents and self._batch < (self._full_batch or _LARGEST_SMALL_BATCH) / 2
                    self._batch = 2 * self._batch if is_small else self._full_batch
                    limit_batch(cursor, self._batch)

    def _isolate_events(self, client: MongoClient[RawBSONDocument]) -> None:
        """
        Read single events up to the one that cannot be read whole. Events before it arrive whole.

        Many read errors in a row come slowly: each costs several openings.
        """
        if self._read_errors >= _READ_ERRORS_AT_ONCE:
            self._stopping.wait(self._pauses.nth())
        isolator = EventIsolator(
            self._scope,
            lambda scope, start, first: self._open(client, scope, start, first),
            lambda: client.admin.command("ping"),
        )
        self._attempt.open()
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

    def _open(
        self, client: MongoClient[RawBSONDocument], scope: Scope, start: Position, first_batch: int = 0
    ) -> CommandCursor[RawBSONDocument]:
        return open_cursor(client, scope, start, first_batch=first_batch, comment=self._comment)

    def _start(self) -> Position:
        return Position(None if self._refused is not None else self._position.token, self._position.time)

    def _note_read(self) -> None:
        self._attempt.has_read = True
        self._unknown = 0
        self.status.succeed()

    # -- handing over --------------------------------------------------------------------------------

    def _hand_over(self, documents: Iterable[RawBSONDocument], error: ReadError | None = None) -> None:
        """Hand over what was read in batches, each as large as there is credit for."""
        batch: list[ChangeEvent] = []
        cost, limit = 0, self._batch_limit()
        try:
            for document in documents:
                event = self._make_event(document, error)
                batch.append(event)
                cost += credit_cost(event)
                if cost >= limit:
                    complete, batch = batch, []
                    self._hand_over_batch(complete, cost)
                    if self._stopping.is_set():
                        return
                    cost, limit = 0, self._batch_limit()
        finally:  # also what was read before one that cannot be taken
            if batch:
                self._hand_over_batch(batch, cost)

    def _batch_limit(self) -> int:
        """Return the most credits of the next batch. There are no fewer when it is handed over."""
        return min(_BATCH_CREDITS, self._room - self._handed_over)

    def _make_event(self, document: RawBSONDocument, error: ReadError | None) -> ChangeEvent:
        event = RawEvent(document.raw)
        if len(event.raw) > TOKEN_MAX and len(token_data(token_of(event))) > TOKEN_MAX:
            event = RawEvent(shorten(event, token_data(token_of(event))).raw)
            error = ReadError(explain_oversized(event))
        place = event.place
        if place is not None:
            mark = Mark(None, *place)
        else:
            token, time_ = token_of(event), event.get("clusterTime")
            if not isinstance(time_, Timestamp):  # a damaged event may have none
                time_ = time_of_token(token, self._position.time)
            mark = Mark(token, token_data(token), time_)
        if error is None:
            self._read_errors = 0
        else:
            self._read_errors += 1
            logger.error(
                "a change could not be read as it was asked for (%s): %s",
                describe(event),
                error.sentence,
                extra={"event": "change_read_error", "token": mark.data, "only_match": error.only_match},
            )
        return ChangeEvent(mark, event, event.raw, error)

    def _pass_marker(self, token: Mapping[str, Any] | None) -> None:
        """Hand over a place that was passed without an event, unless the stream is there already."""
        if token is None:
            return
        if self._position.token is None or token_data(token) > token_data(self._position.token):
            mark = Mark(dict(token), token_data(token), time_of_token(token, self._position.time))
            self._hand_over_batch([mark], credit_cost(mark))

    def _hand_over_batch(self, batch: Sequence[ChangeEvent | Mark], cost: int) -> None:
        """Hand over when there is credit, then remember the place: a place that is remembered was handed over."""
        with self._credit:
            self._credit.wait_for(lambda: self._handed_over < self._room or self._stopping.is_set())
            if self._stopping.is_set():
                return
            self._handed_over += cost
        self.status.succeed()
        self._deliver(batch)
        place: Mark | None = None
        for item in batch:
            mark = item if isinstance(item, Mark) else item.mark
            if is_unread(mark.data):
                self._last_stand_in = max(self._last_stand_in, mark.data)
                self._attempt.has_progress = True
            else:
                place = mark
        # What is read by time comes again in part. The token is asked for only after the one that was refused.
        if place is not None and (self._refused is None or place.data > self._refused):
            self._refused = None
            self._position = Position(place.token, place.cluster_time or self._position.time)
            self._attempt.has_progress = True
