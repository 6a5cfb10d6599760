"""
The cursor of a change stream that never resumes automatically.

PyMongo's change stream reopens itself inside a read, forever and without a log record. Here every error of the
`aggregate` and of each `getMore` reaches the caller, which alone decides what to do. The client should not repeat reads
either (`retryReads=False`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from bson import Timestamp

from mongo_celery.bridge.raw_event import EVENT_TYPES, RawEvent
from mongo_celery.bridge.stream.source import Scope
from mongo_celery.mongo.opening import with_majority

if TYPE_CHECKING:
    from bson.raw_bson import RawBSONDocument
    from pymongo import MongoClient
    from pymongo.command_cursor import CommandCursor

AWAIT_SECONDS = 1.0
"""Seconds that the server waits for the next event before it returns none."""

LOW_LATENCY_SECONDS = 0.03
"""The same while a snapshot or a test waits for the stream to pass a place."""


@dataclass(frozen=True, slots=True)
class Position:
    """The place for opening a stream: after one of its tokens, or at a cluster time."""

    token: Mapping[str, Any] | None
    time: Timestamp | None


class EventCursor:
    """
    A stream opened by one `aggregate`. The end of its `with` block also ends it on the server.

    With an empty first batch the server reads no event. So an error of the `aggregate` concerns the whole stream, and
    only a `getMore` can fail because of an event.

    Args:
        client: the client of the stream. Events use `EVENT_TYPES`, whatever its options.
        scope: target, stages and options.
        start: begin after its token, otherwise at its time, otherwise now.
        first_batch: largest number of events in the answer of the `aggregate`, which does not wait for them.
        comment: the comment of the command and its `getMore`s.
    """

    def __init__(
        self,
        client: MongoClient[Any],
        scope: Scope,
        start: Position,
        *,
        first_batch: int = 0,
        comment: str | Mapping[str, Any] | None = None,
    ) -> None:
        stage = {**scope.options, **_beginning(start)}
        target = scope.find_target(client)
        if scope.database is None:
            target, stage = client.admin, {"allChangesForCluster": True} | stage
        self._cursor: CommandCursor[RawBSONDocument] = with_majority(target, EVENT_TYPES).aggregate(
            [{"$changeStream": stage}, *scope.pipeline],
            batchSize=first_batch,
            maxAwaitTimeMS=1 if first_batch else int(AWAIT_SECONDS * 1000),
            comment=comment,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._cursor.close()

    @property
    def is_alive(self) -> bool:
        """Return True if the server may have more events: not after an invalidate."""
        return self._cursor.alive

    @property
    def token(self) -> Mapping[str, Any] | None:
        """The token after everything that was read so far. None if the server sends none."""
        # PyMongo has no public name for it. Its own change stream reads it here.
        token: Mapping[str, Any] | None = self._cursor._post_batch_resume_token  # noqa: SLF001
        return token

    def read_event(self) -> RawBSONDocument | None:
        """
        Return the next unread event of the batch, otherwise the first of the next `getMore`. None if
        there is none.
        """
        return self._cursor.try_next()

    def read_batch(self) -> Sequence[RawBSONDocument]:
        """
        Return the rest of the batch, otherwise the next `getMore`'s events, which may be none.

        Each event is a slice of the answer's bytes, without decoding.
        """
        found: list[RawBSONDocument] = []
        self._cursor._next_batch(found)  # noqa: SLF001 - the public ways ask event by event, or until so many are there
        return found

    def set_await(self, seconds: float) -> None:
        """Set how long the server waits for an event in each later `getMore`."""
        self._cursor._max_await_time_ms = int(seconds * 1000)  # noqa: SLF001 - what it was opened with counts once

    def limit_batch(self, count: int) -> None:
        """Limit the number of events in each later `getMore`. With 0 the server decides."""
        self._cursor._batch_size = count  # noqa: SLF001 - the public way makes 2 of 1


def token_of(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the event's own resume token."""
    token: Any = event.token if isinstance(event, RawEvent) else event["_id"]
    return dict(token)


def _beginning(start: Position) -> dict[str, Any]:
    if start.token is not None:  # unlike `resumeAfter`, this accepts the token of an invalidate
        return {"startAfter": dict(start.token)}
    return {} if start.time is None else {"startAtOperationTime": start.time}
