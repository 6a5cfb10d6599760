"""
Locking documents inside a transaction by writing a value that always differs.

MongoDB has no SELECT ... FOR UPDATE. A read in a transaction locks nothing: two transactions may read the same
documents, decide, and write to different ones (write skew). A *write* conflicts; so the document is read by a
`find_one_and_update` that writes a fresh value:

- A second transaction that wants the document fails at once with a write conflict, which MongoDB marks as
  transient. There is no queue in the server: `transactional` repeats the whole body, with pauses, until the first
  one has ended. Who comes next is chance.
- A writer outside any transaction waits inside the server until the transaction has ended.
- A reader outside sees the document as it was before.

Source: MongoDB, "How To SELECT ... FOR UPDATE Inside MongoDB Transactions".

A holder that dies without ending its transaction keeps its documents until the server ends it, after
`transactionLifetimeLimitSeconds` (60 by default); a lost connection alone does not free them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

import bson
from bson import ObjectId
from pymongo import ReturnDocument
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import OperationFailure

from mongo_celery.arguments import Duration, not_negative
from mongo_celery.errors import ConfigurationError, DocumentLockedError, TransactionRequiredError
from mongo_celery.mongo.attempts import Place, note_locked, waits_of
from mongo_celery.mongo.verdicts import Code, standalone_refused

Document = dict[str, Any]


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
    wait: Duration | None = None,
) -> Any:
    """
    Read a document and lock it until the transaction ends.

    Afterwards no other transaction can write to it or lock it, and writers outside transactions wait. Not
    promised: that others cannot read it; an order in which those who wait get it; or anything about documents
    that do not exist: None locks nothing, and somebody else may insert one that matches.

    The lock is a write: it stays in the document as `{application, at, id}` by the server's clock, and change
    streams see it once the transaction is committed.

    Args:
        collection: where.
        filter: which document; the first one that matches.
        session: of a transaction in progress.
        field: the field that is written; it belongs to locks alone.
        application: who locks, for people who look; by default `host:pid`.
        sort: which document comes first, if several match.
        projection: of what is returned; by default all, the field of the lock too.
        nowait: fail at once with `DocumentLockedError`, instead of letting `transactional` repeat the body.
        wait: seconds or `timedelta` for which the body is repeated because of this call, over all attempts; then
            `DocumentLockedError`. It is looked at when an attempt conflicts, so it may be exceeded by a pause and
            the body's own time. Without it, the limit of `transactional` counts alone. A call is known again by
            its collection and by being the n-th lock of its attempt; a body that locks in another order at each
            attempt may wait longer. In transactions that `transactional` does not run, attempts count together
            only if each conflicts within a second of the one before, whichever transaction it is of.

    Returns:
        The document as it is after locking, or None if none matches.

    Raises:
        TransactionRequiredError: the session has no transaction in progress.
        DocumentLockedError: another transaction holds it, or has changed it since this one began, and `nowait` or
            `wait` says not to wait any longer. The server has then aborted the transaction, so catch it outside:
            `transactional` raises it again when a body that has caught it returns or goes on with the session,
            and the driver's `with_transaction` repeats such a body until its own limit.
        TopologyError: the server is a standalone.
        ConfigurationError: `field` cannot be written, or `nowait` and `wait` exclude each other.
        OperationFailure: a write conflict, labelled as transient. Let it pass to `transactional`.
    """
    bound = _check(session, field, nowait=nowait, wait=wait)
    place = (collection.full_name, waits_of(session).next_call(), b"")
    update = _update(field, application)
    return _lock(collection, filter, update, place, session=session, bound=bound, sort=sort, projection=projection)


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
    wait: Duration | None = None,
) -> list[Any]:
    """
    Read several documents and lock them, in ascending order of `_id`, whatever order is asked for.

    Two transactions that lock overlapping sets meet at the smallest common document, so neither holds what the
    other still wants and one of them always gets on. Afterwards each document is locked as by
    `select_for_update`. Not promised: that no further document matches; one that is inserted meanwhile is free.

    Args:
        collection: where.
        filter: which documents.
        session: of a transaction in progress.
        field: as of `select_for_update`.
        application: as of `select_for_update`.
        sort: order of the returned list, and which documents a `limit` takes; by default `_id`.
        limit: how many at most; 0 for all, as in PyMongo.
        projection: of what is returned.
        nowait: as of `select_for_update`.
        wait: as of `select_for_update`, for each document.

    Returns:
        The documents as they are after locking; an empty list if none matches.

    Raises:
        TransactionRequiredError, DocumentLockedError, TopologyError, ConfigurationError: as of `select_for_update`.
    """
    bound = _check(session, field, nowait=nowait, wait=wait)
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        raise ConfigurationError(f"limit={limit!r} must be 0 for all, or a positive whole number.")
    call = waits_of(session).next_call()
    by_id = [("_id", 1)]
    with standalone_refused():
        wanted = _ids(collection, filter, session, sort=by_id if sort is None else sort, limit=limit)
        # The server's own order: values of several types cannot be compared here.
        ordered = wanted if sort is None else _ids(collection, {"_id": {"$in": wanted}}, session, sort=by_id)
    found = {}
    for document_id in ordered:
        key = _exact(collection, document_id)
        # The filter need not be asked again: the transaction reads one snapshot, and a document that has
        # changed since is a write conflict.
        found[key] = _lock(
            collection,
            {"_id": document_id},
            _update(field, application),
            (collection.full_name, call, key),
            session=session,
            bound=bound,
            projection=projection,
        )
    return [found[_exact(collection, document_id)] for document_id in wanted]


def _lock(
    collection: Collection[Any],
    filter_: Mapping[str, Any],
    update: list[Document],
    place: Place,
    *,
    session: ClientSession,
    bound: float | None,
    sort: Any = None,
    projection: Any = None,
) -> Any:
    waits = waits_of(session)
    try:
        with standalone_refused():
            found = collection.find_one_and_update(
                filter_,
                update,
                sort=sort,
                projection=projection,
                return_document=ReturnDocument.AFTER,
                session=session,
            )
    except BaseException as error:
        waits.failed()
        if not isinstance(error, OperationFailure) or error.code != Code.WriteConflict or bound is None:
            raise
        if bound and waits.conflicted(place) < bound:
            raise
        waits.ended(place)
        locked = _locked_error(f"{collection.full_name} {dict(filter_)!r}", bound)
        note_locked(session, locked)
        raise locked from error
    waits.ended(place)
    return found


def _ids(collection: Collection[Any], filter_: Any, session: ClientSession, *, sort: Any, limit: int = 0) -> list[Any]:
    found = collection.find(filter_, {"_id": 1}, sort=sort, limit=limit, session=session)
    return [document["_id"] for document in found]


def _exact(collection: Collection[Any], document_id: object) -> bytes:
    """An `_id` to look up: Python takes 1 and True for the same key, MongoDB does not, and a dict is no key at all."""
    return bson.encode({"_id": document_id}, codec_options=collection.codec_options)


def _check(session: object, field: str, *, nowait: bool, wait: Duration | None) -> float | None:
    """The seconds to wait, 0 for `nowait`, None for no bound."""
    if not isinstance(session, ClientSession) or not session.in_transaction:
        raise TransactionRequiredError
    if (
        not isinstance(field, str)
        or not field
        or f"{field}.".startswith("_id.")
        or "\0" in field
        or any(not part or part.startswith("$") for part in field.split("."))
    ):
        raise ConfigurationError(f"field={field!r} cannot be written; choose a plain name such as '_lock'.")
    if nowait and wait is not None:
        raise ConfigurationError("nowait and wait exclude each other; give one of them.")
    if wait is None:
        return 0.0 if nowait else None
    return not_negative(wait, "wait")


def _update(field: str, application: str | None) -> list[Document]:
    mark = {"application": application or f"{socket.gethostname()}:{os.getpid()}", "at": None, "id": ObjectId()}
    # Two stages: a document in one stage would be merged into what the field held before.
    return [{"$set": {field: {"$literal": mark}}}, {"$set": {f"{field}.at": "$$NOW"}}]


def _locked_error(name: str, limit: float) -> DocumentLockedError:
    reason = f"it was not free within {limit:g} s" if limit else "another transaction holds it, or has just changed it"
    return DocumentLockedError(
        f"The document of {name} is locked: {reason}. Try again later, or allow more time for waiting.",
        document=name,
    )
