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

from mongo_celery.mongo.identity import same_bson
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.transaction import transactional
from mongo_celery.mongo.verdicts import Verdict, is_transient, judge_error
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


def is_there(open_part: Open, part: Part, session: ClientSession | None = None) -> bool:
    """Whether a participant exists."""
    return open_part(part).find_one({"_id": {"$eq": part.id}}, {"_id": 1}, session=session) is not None


def find_met(
    open_part: Open, part: Part, rule: Mapping[str, Any], session: ClientSession | None = None
) -> Document | None:
    """Its `_id` as the server has it, if it meets a rule now."""
    return open_part(part).find_one(_found(part, rule), {"_id": 1}, session=session)


def why_unmet(open_part: Open, parts: Iterable[Part], session: ClientSession | None = None) -> str | None:
    """Why participants of one cluster cannot be changed, as they are now or in a transaction; None if they could."""
    found = []
    for part in parts:
        met = find_met(open_part, part, part.require, session)
        if met is None:
            if not is_there(open_part, part, session):
                return f"participant {part} does not exist"
            return f"participant {part} does not meet {dict(part.require)!r}"
        found.append((part, met))
    twins = why_twins(found)
    return None if twins is None else f"{twins} be changed"


def why_twins(found: Sequence[tuple[Part, Document]]) -> str | None:
    """The beginning of a sentence where two participants are one document: what each would bear, both do not."""
    for index, (part, met) in enumerate(found):
        for other, seen in found[:index]:
            if part.namespace == other.namespace and same_bson(met["_id"], seen["_id"]):
                return f"participants {other} and {part} are one document, and it does not let both"
    return None


def _found(part: Part, rule: Mapping[str, Any], more: Sequence[Document] = ()) -> Document:
    return {"_id": {"$eq": part.id}, "$and": [dict(rule), *more]}


def _send(open_part: Open, changes: Iterable[tuple[Part, Document, Mapping[str, Any]]], session: ClientSession) -> None:
    grouped: dict[str, list[tuple[Part, Document, Mapping[str, Any]]]] = {}
    for each in changes:
        grouped.setdefault(each[0].namespace, []).append(each)
    for those in grouped.values():
        try:
            matched = _matched(open_part(those[0][0]), those, session)
        except (BulkWriteError, WriteError) as error:
            index, said = _failed(error)
            if is_transient(error) or is_transient(said) or judge_error(said) is Verdict.ACCESS:
                raise
            raise RefusedError(f"participant {those[index][0]} refuses the change: {short(said)}") from error
        if matched != len(those):
            raise UnmetError


def _matched(
    collection: Collection[Document],
    changes: Sequence[tuple[Part, Document, Mapping[str, Any]]],
    session: ClientSession,
) -> int:
    """How many were found. A single statement costs the driver less by itself."""
    if len(changes) == 1:
        (_, found, update) = changes[0]
        return collection.update_one(found, update, session=session).matched_count
    updates = [UpdateOne(found, update) for _, found, update in changes]
    return collection.bulk_write(updates, session=session).matched_count


def _failed(error: BulkWriteError | WriteError) -> tuple[int, WriteError]:
    """
    Which statement has failed, and how.

    Raises:
        OperationFailure: none; it was not confirmed.
    """
    if isinstance(error, WriteError):
        return 0, error
    failures = (error.details or {}).get("writeErrors")
    if not failures:
        raise _unconfirmed(error) from error
    failure = failures[0]
    return failure.get("index", 0), WriteError(str(failure.get("errmsg", error)), failure.get("code"), failure)


def _unconfirmed(error: BulkWriteError) -> OperationFailure:
    """The whole has a code that says nothing; what it says of its confirmation has one that does."""
    failures = (error.details or {}).get("writeConcernErrors")
    if not failures:
        return error
    return OperationFailure(str(failures[0].get("errmsg")), failures[0].get("code"), failures[0])


def is_unwritable(error: BaseException) -> bool:
    """Whether a server has answered that it will not do this, for whatever reason but the documents."""
    return isinstance(error, OperationFailure) and not is_transient(error)
