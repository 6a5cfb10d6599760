"""
What a transaction changes in one cluster, as one MongoDB transaction: each participant by one statement.

Statements of one collection are sent as one command. An ordered bulk does not stop at a statement that matches
nothing; so it is counted, and the whole is aborted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from pymongo import MongoClient, UpdateOne
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import BulkWriteError, OperationFailure, WriteError

from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.transaction import transactional
from mongo_celery.mongo.verdicts import Verdict, is_transient, verdict_on
from mongo_celery.twophase.coordinator import BusyError
from mongo_celery.twophase.participants import Part
from mongo_celery.twophase.sessions import session_of

Document = dict[str, Any]
Open = Callable[[Part], Collection[Document]]
Result = TypeVar("Result")

_LEAST_SECONDS = 0.05
"""For a MongoDB transaction for which no time is left: it fails by its own limit, and says so."""


class UnmetError(BusyError):
    """Fewer documents matched than take part. The MongoDB transaction is aborted."""

    def __init__(self) -> None:
        super().__init__("participants changed meanwhile")


class RefusedError(Exception):
    """A participant cannot be changed so, whatever it holds now; the text says which and why."""


def in_one(client: MongoClient[Any], body: Callable[[ClientSession], Result], deadline: float) -> Result:
    """
    Run a body in a MongoDB transaction, repeated until a deadline of the monotonic clock.

    Raises:
        TransactionTimeoutError: the time is used up; `outcome` says what is known.
        TopologyError: it is a standalone server.
    """
    limit = max(deadline - time.monotonic(), _LEAST_SECONDS)
    # Its own: what is told to be done must not depend on a transaction that the caller is in.
    return transactional(client, timeout=limit, own=True).run(body, session=session_of(client))


def change(open_part: Open, parts: Sequence[Part], session: ClientSession, before: datetime | None = None) -> None:
    """
    Apply the changes of all participants.

    Args:
        open_part: gives a participant's collection.
        parts: of one cluster.
        session: of the MongoDB transaction.
        before: only while that cluster's own clock has not reached this.

    Raises:
        UnmetError: a participant is missing or does not meet its rule, or it is too late.
        RefusedError: the server refuses a change.
    """
    in_time = [] if before is None else [{"$expr": {"$lt": ["$$NOW", before]}}]
    _send(open_part, [(part, _found(part, part.require, in_time), part.apply) for part in parts], session)


def revert(open_part: Open, parts: Sequence[Part], session: ClientSession) -> None:
    """
    Take the changes of all participants back, in reverse order; errors as of `change`.

    Args:
        open_part: gives a participant's collection.
        parts: of one cluster.
        session: of the MongoDB transaction.
    """
    changes = [(part, _found(part, part.revert_require), part.revert) for part in reversed(parts)]
    _send(open_part, changes, session)


def is_there(open_part: Open, part: Part) -> bool:
    """Whether a participant exists."""
    return open_part(part).find_one({"_id": {"$eq": part.id}}, {"_id": 1}) is not None


def meets(open_part: Open, part: Part, rule: Mapping[str, Any]) -> bool:
    """Whether it meets a rule now."""
    return open_part(part).find_one(_found(part, rule), {"_id": 1}) is not None


def why_unmet(open_part: Open, parts: Iterable[Part]) -> str | None:
    """Why participants cannot be changed, as they are now; None if they could."""
    for part in parts:
        if not meets(open_part, part, part.require):
            if not is_there(open_part, part):
                return f"participant {part} does not exist"
            return f"participant {part} does not meet {dict(part.require)!r}"
    return None


def _found(part: Part, rule: Mapping[str, Any], more: Sequence[Document] = ()) -> Document:
    return {"_id": {"$eq": part.id}, "$and": [dict(rule), *more]}


def _send(open_part: Open, changes: Iterable[tuple[Part, Document, Mapping[str, Any]]], session: ClientSession) -> None:
    grouped: dict[str, list[tuple[Part, UpdateOne]]] = {}
    for part, found, update in changes:
        grouped.setdefault(part.namespace, []).append((part, UpdateOne(found, dict(update))))
    for each in grouped.values():
        try:
            result = open_part(each[0][0]).bulk_write([update for _, update in each], session=session)
        except BulkWriteError as error:
            failures = (error.details or {}).get("writeErrors")
            if not failures:
                raise _unconfirmed(error) from error
            failure = failures[0]
            said = WriteError(str(failure.get("errmsg", error)), failure.get("code"), failure)
            if is_transient(error) or is_transient(said) or verdict_on(said) is Verdict.ACCESS:
                raise
            part = each[failure.get("index", 0)][0]
            raise RefusedError(f"participant {part} refuses the change: {short(said)}") from error
        if result.matched_count != len(each):
            raise UnmetError


def _unconfirmed(error: BulkWriteError) -> OperationFailure:
    """The whole has a code that says nothing; what it says of its confirmation has one that does."""
    failures = (error.details or {}).get("writeConcernErrors")
    if not failures:
        return error
    return OperationFailure(str(failures[0].get("errmsg")), failures[0].get("code"), failures[0])


def is_unwritable(error: BaseException) -> bool:
    """Whether a server has answered that it will not do this, for whatever reason but the documents."""
    return isinstance(error, OperationFailure) and not is_transient(error)
