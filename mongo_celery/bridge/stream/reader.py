"""
The reader: one thread that reads the change stream and hands over what it reads, in order.

It opens at a position, remembers the token of the last item it handed over, and reopens from there
after every error that is not final, with growing pauses and jitter. It is bounded: it hands over an item
only when the listener has made room; while it has none, the stream is not read.

A post-batch token is handed over only when a read returned nothing, as an item at its place.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bson import Timestamp
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient
from pymongo.change_stream import ChangeStream
from pymongo.errors import NetworkTimeout

from mongo_celery.bridge.change import token_data
from mongo_celery.bridge.stream.reactions import UNKNOWN_LIMIT, Reaction, final_error, reaction_to
from mongo_celery.bridge.stream.source import Scope
from mongo_celery.bridge.window import Mark
from mongo_celery.errors import MongoCeleryError
from mongo_celery.mongo.oplog import time_of_token
from mongo_celery.mongo.repeating import Pauses

logger = logging.getLogger("mongo_celery.stream")

_MAX_AWAIT_SECONDS = 1.0
_FIRST_TIMEOUT = 5.0
_LONGEST_TIMEOUT = 86_400.0
_PAUSES = Pauses(first=0.1, longest=10.0, jitter=0.5)
_UNIT_SHIFT = 15


@dataclass(frozen=True, slots=True)
class Position:
    """Where a stream is opened: after a token of its own, or at a cluster time."""

    token: Mapping[str, Any] | None
    time: Timestamp | None


@dataclass(frozen=True, slots=True)
class Flaw:
    """
    Why an event could not be read as it was asked for.

    Attributes:
        sentence: what failed and what the server said, for people.
        only_match: whether nothing but a `match` expression failed on it; then only handlers with one are concerned.
    """

    sentence: str
    only_match: bool = False


@dataclass(frozen=True, slots=True)
class ChangeEvent:
    """
    A change event: its place, the document to match on, of which only the top is decoded, and its bytes.

    One with a flaw was read with less (no look-up, no images, no flags, in the worst case no document at all);
    it belongs to the failure policy of the handlers it concerns.
    """

    mark: Mark
    document: Mapping[str, Any]
    raw: bytes
    flaw: Flaw | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The stream has ended for good."""

    error: MongoCeleryError


Item = ChangeEvent | Mark | Failed
ClientFactory = Callable[[float], MongoClient[RawBSONDocument]]


class StreamReader:
    """
    Reads one change stream until it is stopped or meets a final error.

    Args:
        make_client: makes a client with a socket timeout in seconds that gives documents as RawBSONDocument.
        scope: what to watch.
        position: where to begin.
        deliver: called in the reader's thread with each item, in stream order.
        room: how far to read ahead of `made_room`, in units of an item or 32 KiB of it.
    """

    def __init__(
        self,
        make_client: ClientFactory,
        scope: Scope,
        position: Position,
        *,
        deliver: Callable[[Item], None],
        room: int,
        batch_size: int | None = None,
        comment: str | Mapping[str, Any] | None = None,
    ) -> None:
        self._make_client = make_client
        self._scope = scope
        self._position = position
        self._deliver = deliver
        self._limit = room
        self._sent = self._taken = 0  # each counted by one thread only
        self._room = threading.Event()
        self._batch_size = batch_size
        self._comment = comment
        self._stopping = threading.Event()
        self._unknown = 0
        self._timeouts = 0
        self._by_time = False
        self._thread = threading.Thread(target=self._run, name="mongo_celery-reader", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """Read no more. Does not wait: a read may still be under way, and its result is dropped."""
        self._stopping.set()
        self._room.set()

    def made_room(self, item: Item) -> None:
        """The listener has taken in an item."""
        self._taken += _units(item)
        if not self._room.is_set():
            self._room.set()

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            pause = _PAUSES.nth(failures)
            progress = _Progress()
            try:
                self._read_one_stream(progress)
                if progress.taken:
                    continue
            except Exception as error:  # noqa: BLE001 - every error is classified below
                final = self._judge(error, progress)
                if final is not None:
                    self._hand_over(Failed(final))
                    return
                failures = 0 if progress.read else failures + 1
                pause = _PAUSES.nth(failures)
                logger.warning(
                    "change stream interrupted, reopening: %s",
                    error,
                    extra={"event": "stream_reopening", "pause": pause},
                )
            self._stopping.wait(pause)

    def _judge(self, error: Exception, progress: _Progress) -> MongoCeleryError | None:
        """Our error when this one is final; None to reopen."""
        reaction = reaction_to(error, opening=not progress.opened)
        self._timeouts = self._timeouts + 1 if isinstance(error, NetworkTimeout) and not progress.read else 0
        self._unknown = self._unknown + 1 if reaction is Reaction.UNKNOWN and not progress.read else 0
        if reaction is Reaction.REOPEN_BY_TIME and self._position.token is not None and not self._by_time:
            self._by_time = True
            return None
        final = reaction not in {Reaction.REOPEN, Reaction.UNKNOWN} or self._unknown > UNKNOWN_LIMIT
        scope = ".".join(part for part in (self._scope.database, self._scope.collection) if part) or "the cluster"
        return final_error(reaction, error, scope) if final else None

    def _read_one_stream(self, progress: _Progress) -> None:
        """Open, and read until the stream ends (an invalidate) or fails. Ends quietly when stopped."""
        # A first read may have to scan much of the oplog: each time-out without progress doubles the socket timeout.
        timeout = min(_FIRST_TIMEOUT * 2**self._timeouts, _LONGEST_TIMEOUT)
        with self._make_client(timeout) as client, self._open(client) as stream:
            progress.opened = True
            while not self._stopping.is_set() and stream.alive:
                document = stream.try_next()
                if document is not None:
                    self._take(document)
                    progress.taken = True
                elif stream.resume_token is not None:
                    self._pass_marker(stream.resume_token)
                progress.read = True
                self._unknown = 0

    def _open(self, client: MongoClient[RawBSONDocument]) -> ChangeStream[RawBSONDocument]:
        options: dict[str, Any] = dict(self._scope.options)
        token = None if self._by_time else self._position.token
        if token is not None:
            options["start_after"] = token
        elif self._position.time is not None:
            options["start_at_operation_time"] = self._position.time
        stream: ChangeStream[RawBSONDocument] = self._scope.opened_on(client).watch(
            list(self._scope.pipeline),
            max_await_time_ms=int(_MAX_AWAIT_SECONDS * 1000),
            batch_size=self._batch_size,
            comment=self._comment,
            **options,
        )
        return stream

    def _take(self, document: Any) -> None:
        token = dict(document["_id"])
        time = document.get("clusterTime") or time_of_token(token, self._position.time)
        self._arrived(ChangeEvent(Mark(token, token_data(token), time), document, document.raw))

    def _pass_marker(self, token: Mapping[str, Any]) -> None:
        if self._position.token is not None and token_data(token) <= token_data(self._position.token):
            return
        self._arrived(Mark(dict(token), token_data(token), time_of_token(token, self._position.time)))

    def _arrived(self, item: ChangeEvent | Mark) -> None:
        """Hand over, then remember: what is remembered has been handed over."""
        mark = item if isinstance(item, Mark) else item.mark
        if self._hand_over(item):
            self._by_time = False
            self._position = replace(self._position, token=mark.token, time=mark.cluster_time or self._position.time)

    def _hand_over(self, item: Item) -> bool:
        while self._sent - self._taken >= self._limit and not self._stopping.is_set():
            self._room.clear()
            if self._sent - self._taken >= self._limit:  # looked at again: room may just have been made
                self._room.wait()
        if self._stopping.is_set():
            return False
        self._sent += _units(item)
        self._deliver(item)
        return True


@dataclass(slots=True)
class _Progress:
    opened: bool = False
    read: bool = False
    taken: bool = False


def _units(item: Item) -> int:
    """Large events take more room, so that reading ahead is bounded in bytes too; a failure takes none."""
    if isinstance(item, Failed):
        return 0
    return 1 + (len(item.raw) >> _UNIT_SHIFT) if isinstance(item, ChangeEvent) else 1
