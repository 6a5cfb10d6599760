"""
The cursor of a change stream that never resumes on its own.

PyMongo's own change stream opens itself again inside a read, forever and without a record. Here every error of the
`aggregate` and of each `getMore` reaches the caller, who alone decides what follows. The client should not repeat
reads either (`retryReads=False`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bson import Timestamp
from bson.codec_options import DatetimeConversion

from mongo_celery.bridge.raw_event import RawEvent
from mongo_celery.bridge.stream.source import Scope
from mongo_celery.mongo.opening import with_majority

if TYPE_CHECKING:
    from bson.raw_bson import RawBSONDocument
    from pymongo import MongoClient
    from pymongo.command_cursor import CommandCursor

AWAIT_SECONDS = 1.0
"""How long the server waits for the next event before it answers with none."""

LOW_LATENCY_SECONDS = 0.03
"""The same while a snapshot or a test waits for the stream to pass a place."""


@dataclass(frozen=True, slots=True)
class Position:
    """The place at which a stream is opened: after a token of its own, or at a cluster time."""

    token: Mapping[str, Any] | None
    time: Timestamp | None


def open_cursor(
    client: MongoClient[Any],
    scope: Scope,
    start: Position,
    *,
    first_batch: int = 0,
    comment: str | Mapping[str, Any] | None = None,
) -> CommandCursor[RawBSONDocument]:
    """
    Open a stream with one `aggregate`. Closing the cursor ends it on the server too.

    With an empty first batch the server looks at no event. So an error of the `aggregate` is about the stream as such,
    and an error about an event can only come with a `getMore`.

    Args:
        client: gives documents as RawBSONDocument.
        scope: where, with which stages and options.
        start: where to begin: after its token, else at its time, else now.
        first_batch: how many events the `aggregate` itself may return. It does not wait for them.
        comment: of the command and its `getMore`s.
    """
    stage = {**scope.options, **_beginning(start)}
    target = scope.find_target(client)
    if scope.database is None:
        target, stage = client.admin, {"allChangesForCluster": True} | stage
    # No text or time in an event may stop those behind it.
    types = client.codec_options.with_options(
        unicode_decode_error_handler="replace", datetime_conversion=DatetimeConversion.DATETIME_AUTO
    )
    options = {} if comment is None else {"comment": comment}
    cursor: CommandCursor[RawBSONDocument] = with_majority(target, types).aggregate(
        [{"$changeStream": stage}, *scope.pipeline],
        batchSize=first_batch,
        maxAwaitTimeMS=1 if first_batch else int(AWAIT_SECONDS * 1000),
        **options,
    )
    return cursor


def post_batch_token(cursor: CommandCursor[RawBSONDocument]) -> Mapping[str, Any] | None:
    """Return the token after everything that was read so far. None from a server that gives none."""
    # PyMongo has no public name for it. Its own change stream takes it from here.
    token: Mapping[str, Any] | None = cursor._post_batch_resume_token  # noqa: SLF001
    return token


def next_batch(cursor: CommandCursor[RawBSONDocument]) -> Sequence[RawBSONDocument]:
    """
    Return all that is read and not taken yet, else what the next `getMore` gives: nothing if nothing is new.

    Each event is a slice of the answer's bytes, and nothing of it is decoded.
    """
    found: list[RawBSONDocument] = []
    cursor._next_batch(found)  # noqa: SLF001 - the public ways ask event by event, or until so many are there
    return found


def set_await(cursor: CommandCursor[RawBSONDocument], seconds: float) -> None:
    """Let the server wait so long for the next event, from the next `getMore` on."""
    cursor._max_await_time_ms = int(seconds * 1000)  # noqa: SLF001 - as above: what it was opened with counts once


def limit_batch(cursor: CommandCursor[RawBSONDocument], count: int) -> None:
    """Let each later `getMore` return so many events at most; 0 for as many as the server likes."""
    cursor._batch_size = count  # noqa: SLF001 - the public way makes 2 of 1


def token_of(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the event's own resume token."""
    token: Any = event.token if isinstance(event, RawEvent) else event["_id"]
    return dict(token)


def _beginning(start: Position) -> dict[str, Any]:
    if start.token is not None:  # unlike `resumeAfter`, this may be the token of an invalidate
        return {"startAfter": dict(start.token)}
    return {} if start.time is None else {"startAtOperationTime": start.time}
