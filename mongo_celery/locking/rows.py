"""
Locking documents inside a transaction by writing a value that always differs.

MongoDB has no SELECT ... FOR UPDATE. A read in a transaction locks nothing: two transactions may read the same
document, decide, and write to others (write skew). A *write* conflicts; so the document is read by a
`find_one_and_update` that writes a fresh value. A second transaction that wants the document fails at once with
a write conflict, which MongoDB marks as transient: `transactional` repeats it until the first has ended. A writer
outside any transaction waits inside the server.

Source: MongoDB, "How To SELECT ... FOR UPDATE Inside MongoDB Transactions".

A holder that dies without ending its transaction keeps its documents until the server ends it, after
`transactionLifetimeLimitSeconds` (60 by default); a lost connection alone does not free them.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from bson import ObjectId
from pymongo import ReturnDocument
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import OperationFailure

from mongo_celery.errors import ConfigurationError, DocumentLockedError, TransactionRequiredError
from mongo_celery.locking.attempts import locked, waiting_since
from mongo_celery.options import seconds

Document = dict[str, Any]
_WRITE_CONFLICT = 112


def select_for_update(
    collection: Collection[Any],
    filter: Mapping[str, Any],  # noqa: A002 - PyMongo's word
    *,
    session: ClientSession,
    field: str = "_lock",
    application: str | None = None,
    sort: Any = None,
    projection: Any = None,
    nowait: bool = False,
    wait: float | timedelta | None = None,
) -> Any:
    """
    Read a document and lock it until the transaction ends.

    Afterwards no other transaction can write to it or lock it, and writers outside transactions wait. Not
    promised: that others cannot read it, or an order in which those who wait get it.

    Args:
        collection: where.
        filter: which document; the first one that matches.
        session: of a transaction in progress.
        field: the field that is written; it stays in the document.
        application: who locks, for people who look; by default host and process.
        sort: which document, if several match.
        projection: of what is returned.
        nowait: fail at once with `DocumentLockedError`, instead of letting `transactional` repeat.
        wait: seconds or `timedelta` to wait for this document, over all attempts; then `DocumentLockedError`.

    Returns:
        The document as it is after locking, or None if none matches.

    Raises:
        TransactionRequiredError: the session has no transaction in progress.
        DocumentLockedError: it is locked, and `nowait` or `wait` says not to wait any longer.
        ConfigurationError: `field` cannot be written.
    """
    _check(session, field, nowait=nowait, wait=wait)
    limit = None if wait is None else seconds(wait, "wait")
    name = f"{collection.full_name} {dict(filter)!r}"
    try:
        found = collection.find_one_and_update(
            filter,
            [{"$set": {field: {"$literal": _mark(application)}}}, {"$set": {f"{field}.at": "$$NOW"}}],
            sort=sort,
            projection=projection,
            return_document=ReturnDocument.AFTER,
            session=session,
        )
    except OperationFailure as error:
        if error.code != _WRITE_CONFLICT:
            raise
        if nowait:
            raise _locked_error(name, "another transaction holds it") from error
        if limit is not None and time.monotonic() - waiting_since(session, name) >= limit:
            raise _locked_error(name, f"it was not free within {limit:g} s") from error
        raise
    locked(session, name)
    return found


def select_many_for_update(
    collection: Collection[Any],
    filter: Mapping[str, Any],  # noqa: A002 - PyMongo's word
    *,
    session: ClientSession,
    field: str = "_lock",
    application: str | None = None,
    sort: Any = None,
    limit: int = 0,
    projection: Any = None,
    nowait: bool = False,
    wait: float | timedelta | None = None,
) -> list[Any]:
    """
    Read several documents and lock them, in ascending order of `_id`, whatever order is asked for.

    Two transactions that lock overlapping sets meet at the smallest common document, so neither holds what the
    other still wants and one of them always gets on.

    Args:
        collection: where.
        filter: which documents.
        session: of a transaction in progress.
        field: as of `select_for_update`.
        application: as of `select_for_update`.
        sort: order of the returned list, and which documents a `limit` takes; by default `_id`.
        limit: how many at most; 0 for all.
        projection: of what is returned.
        nowait: as of `select_for_update`.
        wait: as of `select_for_update`, for each document.

    Returns:
        The documents as they are after locking; an empty list if none matches.

    Raises:
        TransactionRequiredError, DocumentLockedError, ConfigurationError: as of `select_for_update`.
    """
    _check(session, field, nowait=nowait, wait=wait)
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        raise ConfigurationError(f"limit={limit!r} must be 0 for all, or a positive whole number.")
    order = [("_id", 1)] if sort is None else sort
    found = collection.find(filter, {"_id": 1}, sort=order, limit=limit, session=session)
    wanted = [document["_id"] for document in found]
    # The server's own order of _id: values of several types cannot be compared here.
    ordered = collection.find({"_id": {"$in": wanted}}, {"_id": 1}, sort=[("_id", 1)], session=session)
    ids = wanted if sort is None else [document["_id"] for document in ordered]
    by_place: list[Any] = [None] * len(wanted)
    for document_id in ids:
        by_place[wanted.index(document_id)] = select_for_update(
            collection,
            {"_id": document_id},
            session=session,
            field=field,
            application=application,
            projection=projection,
            nowait=nowait,
            wait=wait,
        )
    return by_place


def _check(session: object, field: str, *, nowait: bool, wait: object) -> None:
    if not isinstance(session, ClientSession) or not session.in_transaction:
        raise TransactionRequiredError
    if (
        not isinstance(field, str)
        or not field
        or field == "_id"
        or "\0" in field
        or any(not part or part.startswith("$") for part in field.split("."))
    ):
        raise ConfigurationError(f"field={field!r} cannot be written; choose a plain name such as '_lock'.")
    if nowait and wait is not None:
        raise ConfigurationError("nowait and wait exclude each other; give one of them.")


def _mark(application: str | None) -> Document:
    return {"application": application or f"{socket.gethostname()}:{os.getpid()}", "at": None, "id": ObjectId()}


def _locked_error(name: str, reason: str) -> DocumentLockedError:
    return DocumentLockedError(
        f"The document of {name} is locked: {reason}. Try again later, or allow more time for waiting.",
        document=name,
    )
