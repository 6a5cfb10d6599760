"""
The reader: one thread that reads the change stream and hands over what it reads, in order.

It opens at a position, remembers the token of the last item it handed over, and reopens from there after every error
that is not final. Items of one read are handed over some at a time: one by one, each would cost two threads a change
of turns. Nobody else resumes: each error passes one place, which counts it, writes one log record, and waits
longer and longer while it lasts. The reader is bounded: it hands over an item only when the listener has made room;
while it has none, the stream is not read.

A post-batch token is handed over only when a read returned nothing, as an item at its place.

An error that may be about one event makes the batches small. When the smallest fails too, the events that follow are
read one by one: what the server can give whole is handed over as always, the one that it cannot with a flaw.
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

from mongo_celery.bridge.change import describe, event_of, token_data
from mongo_celery.bridge.existing import is_unread
from mongo_celery.bridge.raw_event import RawEvent
from mongo_celery.bridge.stream.cursor import (
    AWAIT_SECONDS,
    HURRIED_SECONDS,
    limit_batch,
    next_batch,
    open_cursor,
    post_batch_token,
    token_of,
    wait_for,
)
from mongo_celery.bridge.stream.cursor import Position as Position  # noqa: PLC0414 - readers' makers take it from here
from mongo_celery.bridge.stream.items import ChangeEvent, Failed, Flaw, Item, credit_cost
from mongo_celery.bridge.stream.narrowing import Narrowing, Reread
from mongo_celery.bridge.stream.oversized import TOKEN_MAX, explain_oversized, shorten
from mongo_celery.bridge.stream.reactions import (
    UNKNOWN_LIMIT,
    Reaction,
    closes_connection,
    concerns_an_event,
    final_error,
    reaction_to,
)
from mongo_celery.bridge.stream.source import Scope
from mongo_celery.bridge.window import Mark
from mongo_celery.errors import HistoryLostError, MongoCeleryError
from mongo_celery.mongo.oplog import time_of_token
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.verdicts import code_of, named, said

if TYPE_CHECKING:
    from pymongo.command_cursor import CommandCursor

logger = logging.getLogger("mongo_celery.stream")

PAUSES = Pauses(first=1.25, longest=5.0, growth=1.6, jitter=0.2)
"""Before an opening, after the first: never less than a second, whatever chance takes away."""

_FIRST_TIMEOUT = 5.0
_LONGEST_TIMEOUT = 86_400.0
_TOGETHER = 64
"""Items that are handed over at once: more would keep the first of them waiting, and gain nothing."""
_SMALLEST_BATCH = 1
_LARGEST_SMALL_BATCH = 4096
_CANDIDATES_MAX = 200
_FLAWS_AT_ONCE = 100


ClientFactory = Callable[[float], MongoClient[RawBSONDocument]]


@dataclass(slots=True)
class StreamStatus:
    """
    The state of reading. The reader alone writes it; any thread may read it.

    Attributes:
        openings: `aggregate`s that were sent, for whatever reason.
        reopenings: errors after which the stream was opened again, or which ended it.
        failures: of these, how many in a row until now; 0 once a read has succeeded.
        breaks: of these, how many in a row by which the pauses grow; reads that succeed in between do not end it soon.
        flaws: events that could not be read as they were asked for.
        last_error: name, code and words of the last error; None if there was none.
        last_read: when a read last succeeded, on the monotonic clock, even one that returned nothing.
    """

    openings: int = 0
    reopenings: int = 0
    failures: int = 0
    breaks: int = 0
    flaws: int = 0
    last_error: str | None = None
    last_read: float | None = None

    def succeeded(self) -> None:
        """A read has succeeded."""
        self.failures = 0
        self.last_read = time.monotonic()

    def failed(self, error: Exception) -> None:
        """The stream has broken."""
        self.reopenings += 1
        self.failures += 1
        self.last_error = f"{named(error)}: {said(error)}"


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
        batch_size: the most events of a `getMore`; by default as many as the server likes.
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
        self._unknown = 0
        self._timeouts = 0
        self._flaws = 0  # in a row
        self._narrows = False
        self._is_hurried = False
        self._told = ""  # token of the last stand-in, at which no stream can be opened
        self._refused: str | None = None  # the token that the server did not find; until it is passed, times count
        self._thread = threading.Thread(target=self._run, name="mongo_celery-reader", daemon=True)

    @property
    def read_to(self) -> Timestamp | None:
        """Up to which cluster time everything was handed over; None before the first. Callable from any thread."""
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

    def hurry(self, is_hurried: bool) -> None:
        """Set whether to report soon how far the stream is, even if no event comes. Callable from any thread."""
        self._is_hurried = is_hurried

    def grant_credit(self, batch: Iterable[Item]) -> None:
        """Let as much more be handed over as a batch that was taken in. Callable from any thread."""
        with self._credit:
            self._handed_over -= sum(map(credit_cost, batch))
            self._credit.notify_all()

    # -- openings, and what ends them ----------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            progress = _Progress(narrows=self._narrows)
            self._narrows = False
            try:
                with self._make_client(self._timeout()) as client:
                    (self._read_one_by_one if progress.narrows else self._read_one_stream)(client, progress)
                if progress.taken:  # up to an invalidate, or one by one
                    self.status.breaks = 0
                    continue
                pause = self._pauses.nth()
            except Exception as error:  # noqa: BLE001 - every error is classified below
                final = self._judge(error, progress)
                if final is not None:
                    self._end(final, error, progress)
                    return
                pause = self._pause_after(error, progress)
                self._note(error, pause)
            self._stopping.wait(pause)

    def _timeout(self) -> float:
        """A first read may have to scan much of the oplog: each time-out without progress doubles it."""
        return min(_FIRST_TIMEOUT * 2.0**self._timeouts, _LONGEST_TIMEOUT)

    def _judge(self, error: Exception, progress: _Progress) -> MongoCeleryError | None:
        """Our error when this one is final; None to reopen."""
        reaction = reaction_to(error, opening=not progress.opened)
        self._timeouts = self._timeouts + 1 if isinstance(error, NetworkTimeout) and not progress.read else 0
        self._unknown = self._unknown + 1 if reaction is Reaction.UNKNOWN and not progress.read else 0
        if reaction is Reaction.REOPEN_BY_TIME and self._position.token is not None and self._refused is None:
            self._refused = token_data(self._position.token)
            return None
        if self._unknown <= UNKNOWN_LIMIT and progress.may_be_about_an_event(error):
            self._narrows = self._batch == _SMALLEST_BATCH
            self._batch = _SMALLEST_BATCH
            return None
        final = reaction not in {Reaction.REOPEN, Reaction.UNKNOWN} or self._unknown > UNKNOWN_LIMIT
        scope = ".".join(part for part in (self._scope.database, self._scope.collection) if part) or "the cluster"
        return final_error(reaction, error, scope) if final else None

    def _pause_after(self, error: Exception, progress: _Progress) -> float:
        """
        Return the seconds to wait before the next opening; none after the first error in a row.

        A row ends with a stream that was read for as long as the longest pause. One that breaks again and again is
        opened about once a second as long as it gets on, and ever more rarely if it does not. The steps that lead to a
        single event that may be the reason are free.
        """
        searches = progress.may_be_about_an_event(error) and not closes_connection(error)
        if progress.seconds >= self._pauses.longest or (progress.taken and searches):
            self.status.breaks = 0
        elif progress.taken:
            self.status.breaks = min(self.status.breaks, 1)
        self.status.breaks += 1
        paid = self.status.breaks - (2 if searches else 1)
        return self._pauses.nth(paid - 1) if paid > 0 else 0.0

    def _end(self, final: MongoCeleryError, error: Exception, progress: _Progress) -> None:
        """
        Hand over the error that ends this reader.

        Lost history, which another reader may follow at a place that is still to be chosen, is handed over when that
        one may be opened: a place that was chosen before a pause might roll away in it.
        """
        self.status.failed(error)
        if isinstance(final, HistoryLostError):
            self._stopping.wait(self._pause_after(error, progress))
        if not self._stopping.is_set():
            self._deliver([Failed(final)])

    def _note(self, error: Exception, pause: float) -> None:
        self.status.failed(error)
        logger.warning(
            "change stream interrupted (%s), %d in a row, opened again in %.1f s: %s",
            named(error),
            self.status.breaks,
            pause,
            said(error),
            extra={
                "event": "stream_reopening",
                "pause": pause,
                "code": code_of(error),
                "error": named(error),
                "failures": self.status.breaks,
            },
        )

    # -- reading -------------------------------------------------------------------------------------

    def _read_one_stream(self, client: MongoClient[RawBSONDocument], progress: _Progress) -> None:
        """Open, and read until the stream ends (an invalidate) or fails. Ends quietly when stopped."""
        with self._open(client, self._scope, self._start()) as cursor:
            progress.begin()
            self._begin_after(post_batch_token(cursor))
            limit_batch(cursor, self._batch)
            left = self._batch
            while not self._stopping.is_set() and cursor.alive:
                wait_for(cursor, HURRIED_SECONDS if self._is_hurried else AWAIT_SECONDS)
                documents = next_batch(cursor)
                self._has_read(progress)
                if documents:
                    self._take_all(documents, progress)
                else:
                    progress.taken |= self._pass_marker(post_batch_token(cursor))
                if self._batch != self._full_batch:
                    left -= len(documents)
                    if left <= 0 or not documents:
                        left = self._grow(cursor)

    def _read_one_by_one(self, client: MongoClient[RawBSONDocument], progress: _Progress) -> None:
        """
        Read single events up to the one that cannot be read whole.

        Events before it arrive whole. Many flawed ones in a row, as a pipeline makes that always fails, come slowly:
        each of them costs several openings.
        """
        if self._flaws >= _FLAWS_AT_ONCE:
            self._stopping.wait(self._pauses.nth())
        narrowing = Narrowing(
            self._scope,
            lambda scope, start, first: self._open(client, scope, start, first),
            lambda: client.server_info()["versionArray"],
        )
        progress.begin()
        for number, event in enumerate(narrowing.events(self._start(), self._told), start=1):
            self._has_read(progress)
            if isinstance(event, Reread):
                self._take_all([event.document], progress, event.flaw)
                if event.flaw is not None and not is_unread(token_data(token_of(event.document))):
                    return
            else:
                progress.taken |= self._pass_marker(event)
            if self._stopping.is_set() or number == _CANDIDATES_MAX:
                return

    def _open(
        self, client: MongoClient[RawBSONDocument], scope: Scope, start: Position, first_batch: int = 0
    ) -> CommandCursor[RawBSONDocument]:
        """Every opening passes here."""
        self.status.openings += 1
        return open_cursor(client, scope, start, first_batch=first_batch, comment=self._comment)

    def _start(self) -> Position:
        return Position(None if self._refused is not None else self._position.token, self._position.time)

    def _begin_after(self, token: Mapping[str, Any] | None) -> None:
        """A stream that was opened at no place of ours is opened again at its own beginning."""
        if token is not None and self._position.token is None and self._position.time is None:
            self._position = Position(dict(token), time_of_token(token, None))

    def _grow(self, cursor: CommandCursor[RawBSONDocument]) -> int:
        """Larger batches again, step by step: where one event cannot be read, others may follow."""
        self._batch *= 2
        if self._batch >= (self._full_batch or _LARGEST_SMALL_BATCH):
            self._batch = self._full_batch
        limit_batch(cursor, self._batch)
        return self._batch

    def _has_read(self, progress: _Progress) -> None:
        progress.read = True
        self._unknown = 0
        self.status.succeeded()

    # -- handing over --------------------------------------------------------------------------------

    def _take_all(self, documents: Iterable[RawBSONDocument], progress: _Progress, flaw: Flaw | None = None) -> None:
        """Hand over what was read, as there is room for it: each time as much of it as goes together."""
        items: list[Item] = []
        units, room = 0, self._room_now()
        try:
            for document in documents:
                item = self._item(document, items[-1] if items else None, flaw)
                items.append(item)
                units += credit_cost(item)
                if units >= room:
                    together, items = items, []
                    progress.taken |= self._arrived(together, units)
                    if self._stopping.is_set():
                        return
                    units, room = 0, self._room_now()
        finally:  # also what was read before one that cannot be taken
            if items:
                progress.taken |= self._arrived(items, units)

    def _room_now(self) -> int:
        """Return the units that may go together; there is no less room when they are handed over."""
        return min(_TOGETHER, self._room - self._handed_over)

    def _item(self, document: RawBSONDocument, before: Item | None, flaw: Flaw | None) -> ChangeEvent:
        event = event_of(document.raw)
        if len(event.raw) > TOKEN_MAX and len(token_data(token_of(event))) > TOKEN_MAX:
            event = event_of(shorten(event, token_data(token_of(event))).raw)
            flaw = Flaw(explain_oversized(event))
        place = event.place
        mark = self._mark_of(event, before) if place is None else Mark(None, *place)
        item = ChangeEvent(mark, event, event.raw, flaw)
        if flaw is None:
            self._flaws = 0
        else:
            self._complain(item, flaw)
        return item

    def _mark_of(self, event: RawEvent, before: Item | None) -> Mark:
        """The place of an event of any form."""
        token, time_ = token_of(event), event.get("clusterTime")
        if not isinstance(time_, Timestamp):  # a user's pipeline may have put something else there
            last = before.mark.cluster_time if isinstance(before, ChangeEvent) else None
            time_ = time_of_token(token, last or self._position.time)
        return Mark(token, token_data(token), time_)

    def _complain(self, event: ChangeEvent, flaw: Flaw) -> None:
        self._flaws += 1
        self.status.flaws += 1
        logger.error(
            "a change could not be read as it was asked for (%s): %s",
            describe(event.document),
            flaw.sentence,
            extra={"event": "change_flawed", "token": event.mark.data, "only_match": flaw.only_match},
        )

    def _pass_marker(self, token: Mapping[str, Any] | None) -> bool:
        if token is None:
            return False
        if self._position.token is not None and token_data(token) <= token_data(self._position.token):
            return False
        return self._arrived([Mark(dict(token), token_data(token), time_of_token(token, self._position.time))], 1)

    def _arrived(self, items: Sequence[Item], units: int) -> bool:
        """Hand over, then remember: what is remembered has been handed over. Tells whether that is progress."""
        self.status.succeeded()
        if not self._hand_over(items, units):
            return False
        marks = [_mark_in(item) for item in items]
        places = [mark for mark in marks if not is_unread(mark.data)]
        if len(places) < len(marks):
            self._told = max(mark.data for mark in marks if is_unread(mark.data))
        if not places:
            return True
        mark = places[-1]
        if self._refused is not None and mark.data <= self._refused:
            return False  # read by time, some come again; the token is asked for only behind the one that was refused
        self._refused = None
        self._position = Position(mark.token, mark.cluster_time or self._position.time)
        return True

    def _hand_over(self, items: Sequence[Item], units: int) -> bool:
        with self._credit:
            self._credit.wait_for(lambda: self._handed_over < self._room or self._stopping.is_set())
            if self._stopping.is_set():
                return False
            self._handed_over += units
        self._deliver(items)
        return True


def _mark_in(item: Item) -> Mark:
    assert not isinstance(item, Failed), "nothing arrives behind the end"
    return item if isinstance(item, Mark) else item.mark


@dataclass(slots=True)
class _Progress:
    """Of one stream."""

    narrows: bool = False
    opened: bool = False
    opened_at: float = 0.0
    read: bool = False
    taken: bool = False

    def begin(self) -> None:
        self.opened = True
        self.opened_at = time.monotonic()

    @property
    def seconds(self) -> float:
        """For how long it has been open."""
        return time.monotonic() - self.opened_at if self.opened else 0.0

    def may_be_about_an_event(self, error: Exception) -> bool:
        """
        Return True if single events should be looked at: not when looking at them has failed.

        A server that closes the connection instead of giving the first answer may be unable to send it.
        """
        is_unsent = closes_connection(error) and not self.read
        return self.opened and not self.narrows and (is_unsent or concerns_an_event(error))
