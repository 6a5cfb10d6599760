"""
The cursor of a change stream that resumes nothing by itself.

PyMongo's own change stream opens itself again inside a read, for ever and without a word. Here every error of the
`aggregate` and of each `getMore` reaches the caller, who alone decides what follows. The client should not repeat
reads either (`retryReads=False`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bson import Timestamp
from pymongo.errors import InvalidOperation

from mongo_celery.bridge.stream.source import Scope

if TYPE_CHECKING:
    from bson.raw_bson import RawBSONDocument
    from pymongo import MongoClient
    from pymongo.command_cursor import CommandCursor

AWAIT_SECONDS = 1.0
"""How long the server waits for the next event before it answers with none."""

Stages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Start:
    """Where a cursor begins: after a token, else at a cluster time, else now."""

    token: Mapping[str, Any] | None = None
    time: Timestamp | None = None

    def options(self) -> dict[str, Any]:
        """The part of the `$changeStream` stage that says so."""
        if self.token is not None:  # unlike `resumeAfter`, this may be the token of an invalidate
            return {"startAfter": dict(self.token)}
        return {} if self.time is None else {"startAtOperationTime": self.time}


def open_cursor(
    client: MongoClient[RawBSONDocument],
    scope: Scope,
    start: Start,
    *,
    first_batch: int = 0,
    comment: str | Mapping[str, Any] | None = None,
) -> CommandCursor[RawBSONDocument]:
    """
    Open a stream with one `aggregate`. Closing the cursor ends it on the server too.

    With an empty first batch no event has been looked at: whatever fails is said of the stream as such, and an error of
    an event can only come with a `getMore`.

    Args:
        client: gives documents as RawBSONDocument.
        scope: where, with which stages and options.
        start: from where.
        first_batch: how many events the `aggregate` itself may return.
        comment: of the command and its `getMore`s.
    """
    stage = {_server_name(name): value for name, value in scope.options.items()} | start.options()
    target = scope.opened_on(client)
    if scope.database is None:
        target, stage = client.admin, {"allChangesForCluster": True} | stage
    options = {} if comment is None else {"comment": comment}
    cursor: CommandCursor[RawBSONDocument] = target.aggregate(
        [{"$changeStream": stage}, *scope.pipeline],
        batchSize=first_batch,
        maxAwaitTimeMS=int(AWAIT_SECONDS * 1000),
        **options,
    )
    return cursor


def post_batch_token(cursor: CommandCursor[RawBSONDocument]) -> Mapping[str, Any] | None:
    """The token behind everything that was read so far, of the last answer; None from a server that gives none."""
    # PyMongo has no public name for it; its own change stream takes it from here.
    token: Mapping[str, Any] | None = cursor._post_batch_resume_token  # noqa: SLF001
    return token


def token_of(event: Mapping[str, Any]) -> dict[str, Any]:
    """
    The event's own resume token.

    Raises:
        InvalidOperation: the pipeline has removed it.
    """
    token = event.get("_id")
    if token is None:
        raise InvalidOperation("The event has no resume token: the pipeline has removed its _id.")
    return dict(token)


def _server_name(option: str) -> str:
    """`full_document` is the `fullDocument` of the `$changeStream` stage, and so with all others."""
    head, *rest = option.split("_")
    return head + "".join(part.capitalize() for part in rest)
