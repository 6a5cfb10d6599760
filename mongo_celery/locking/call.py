"""
One locking call: its commands, and the meaning of a refusal.

A call is a generator of steps (`mongo.steps`), so that threads and asyncio share its code.

| refusal by the server | effect |
|---|---|
| a write conflict: another transaction has the document | raised as transient, for `transactional` |
| a LockTimeout: an operation has the whole collection | the same |
| either of them, with `nowait` | DocumentLockedError |
| by the collection's validator, or another value in the lock's field | ConfigurationError: repeating cannot help |
| no replica set | TopologyError |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypedDict

from bson import ObjectId
from pymongo import ReturnDocument
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import OperationFailure

from mongo_celery.arguments import check_flags
from mongo_celery.errors import ConfigurationError, DocumentLockedError, TransactionRequiredError
from mongo_celery.mongo.steps import Session, Steps
from mongo_celery.mongo.transaction.ending import AFTER_CRASH
from mongo_celery.mongo.transaction.scopes import scope_of
from mongo_celery.mongo.verdicts import Code, server_words, standalone_refused

_FILTER_CHARS = 300
"""Largest part of a filter in a message."""

_HELD = {Code.WriteConflict, Code.LockTimeout}
_UNWRITABLE = {Code.DocumentValidationFailure, Code.PathNotViable}
_BATCH = 1_000_000
"""Number of documents in one answer. The first answer has all of them, up to the server's 16 MiB."""


class LockOptions(TypedDict, total=False):
    """
    The options of all locking calls.

    Attributes:
        field: the field to write, by default `_lock`. Use it only for locks.
        nowait: fail with `DocumentLockedError` at the first conflict. By default `transactional` repeats the body
            until its `timeout=`.
    """

    field: str
    nowait: bool


@dataclass(frozen=True, slots=True)
class LockCall:
    """
    A call that locks documents in one collection.

    Attributes:
        collection: a collection for threads or asyncio, like the session.
        session: a session with a transaction in progress.
        filter: selects the documents to lock.
        field: the field to write.
        nowait: True to raise an error at the first conflict.
    """

    collection: Any
    session: Session
    filter: Mapping[str, Any]
    field: str
    nowait: bool

    @property
    def update(self) -> dict[str, Any]:
        """Return the locking write. It is not a pipeline, which MongoDB 4.4 shows to change streams as a `replace`."""
        return {"$set": {f"{self.field}.id": ObjectId()}, "$currentDate": {f"{self.field}.at": True}}


# -- calls -----------------------------------------------------------------------------------------


def lock_call(
    collection: Any,
    filter_: Mapping[str, Any],
    session: object,
    kind: type[Session],
    *,
    field: str = "_lock",
    nowait: bool = False,
) -> LockCall:
    """Check a call's arguments, with a session of this kind. Errors as in `select_for_update`."""
    if not isinstance(session, kind) or not session.in_transaction:
        raise TransactionRequiredError
    is_async = kind is AsyncClientSession
    if isinstance(collection, AsyncCollection) is not is_async:
        wanted = "locking.asynchronous needs an AsyncCollection" if is_async else "locking needs a Collection"
        raise ConfigurationError(f"mongo_celery.{wanted} of the session's client, not {type(collection).__name__}.")
    if (
        not isinstance(field, str)
        or not field
        or f"{field}.".startswith("_id.")
        or "\0" in field
        or any(not part or part.startswith("$") for part in field.split("."))
    ):
        raise ConfigurationError(f"field={field!r} cannot be used for locks. Use a plain name such as '_lock'.")
    check_flags(nowait=nowait)
    return LockCall(collection=collection, session=session, filter=filter_, field=field, nowait=nowait)


def lock_one(call: LockCall, sort: Any, projection: Any) -> Steps[Any]:
    """Lock the first matching document, and return it. None if none matches."""
    with _explaining_refusals(call):
        found = yield call.collection.find_one_and_update(
            call.filter,
            call.update,
            sort=sort,
            projection=projection,
            return_document=ReturnDocument.AFTER,
            session=call.session,
        )
    return found


def lock_many(call: LockCall, sort: Any, limit: int, projection: Any) -> Steps[list[Any]]:
    """
    Read the matching documents, lock them, and return them as read.

    The first read fixes the documents, whatever filter, order, limit and projection use. The transaction has one
    snapshot, so the write conflicts with every change after the read.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        raise ConfigurationError(f"limit={limit!r} must be a whole number of at least 0. 0 means all documents.")
    shown = _with_id(projection)
    with _explaining_refusals(call):
        cursor = call.collection.find(
            call.filter,
            shown,
            sort=[("_id", 1)] if sort is None else sort,
            limit=limit,
            batch_size=_BATCH,
            session=call.session,
        )
        found: list[Any] = yield cursor.to_list()
    yield from lock_ids(call, [each["_id"] for each in found])
    return found


def lock_ids(call: LockCall, ids: Sequence[Any]) -> Steps[None]:
    """Lock documents that this transaction has read, by their distinct `_id`s."""
    if not ids:
        return
    with _explaining_refusals(call):
        done = yield call.collection.update_many({"_id": {"$in": ids}}, call.update, session=call.session)
    if done.matched_count < len(ids):
        raise ConfigurationError(
            f"{len(ids)} documents of {call.collection.full_name} were read, but only {done.matched_count} were "
            "found again by _id. The collection's codec_options must decode and encode an _id without loss.",
        )


def _with_id(projection: Any) -> Any:
    """Return a projection that includes the original `_id`."""
    if any(name.startswith("_id.") for name in projection or ()):
        raise ConfigurationError("projection= selects parts of _id, but _id is always returned whole. Leave them out.")
    if not isinstance(projection, Mapping) or "_id" not in projection:
        return projection or None
    if projection["_id"] not in (0, 1):
        raise ConfigurationError("projection= computes _id, but _id is always returned unchanged. Leave that out.")
    return {name: value for name, value in projection.items() if name != "_id" or value} or None


@contextmanager
def _explaining_refusals(call: LockCall) -> Iterator[None]:
    """Replace the server's refusals by the errors of the table above."""
    try:
        with standalone_refused():
            yield
    except OperationFailure as error:
        if error.code in _UNWRITABLE:
            raise _unwritable(call, error) from error
        if error.code not in _HELD:
            raise
        if not call.nowait:
            raise
        scope, locked = scope_of(call.session), _explain_lock(call, error)
        if scope is not None:
            scope.rollback_reason = locked  # the server has ended the transaction, even if the body catches this
        raise locked from error


def _explain_lock(call: LockCall, error: OperationFailure) -> DocumentLockedError:
    text = repr(dict(call.filter))
    document = f"{call.collection.full_name} {text if len(text) <= _FILTER_CHARS else text[:_FILTER_CHARS] + '...'}"
    if error.code == Code.LockTimeout:
        reason = "an operation such as createIndex holds its collection, or waits for it"
    else:
        reason = "another transaction holds it, or has just changed it"
    return DocumentLockedError(
        f"The document of {document} is locked: {reason}. Try again later, or leave out nowait=. {AFTER_CRASH}",
        document=document,
    )


def _unwritable(call: LockCall, error: OperationFailure) -> ConfigurationError:
    if error.code == Code.PathNotViable:
        return ConfigurationError(
            f"The field {call.field!r} of a document of {call.collection.full_name} holds another value, so no "
            f"lock can be written there. Choose another field with field=. The server said: {server_words(error)}",
        )
    return ConfigurationError(
        f"The validator of {call.collection.full_name} refuses the document with the lock's field "
        f"{call.field!r}. Allow this field as an object, or choose an allowed one with field=. If the document "
        "was invalid before, correct it or set validationLevel to moderate. The server said: "
        f"{server_words(error)}",
    )
