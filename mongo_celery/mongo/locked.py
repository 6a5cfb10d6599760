"""
Writes that meet documents which an open transaction has written: around them, or with the lock as the error.

A plain update waits for such a document until that transaction ends, by default up to a minute
(`transactionLifetimeLimitSeconds`), and all later documents wait. Within a transaction the server refuses the same
write immediately. So the plain update has a short time limit. Then all documents are tried in one transaction, then in
groups, and the documents of a refused group one by one. None of these waits for a lock.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import pymongo
from pymongo.client_session import ClientSession
from pymongo.errors import NetworkTimeout, OperationFailure, PyMongoError

from mongo_celery.mongo.opening import open_session
from mongo_celery.mongo.table import Table, Update

_PATIENCE_SECONDS = 1.0
_GLANCE_SECONDS = 0.25
_GROUP = 64
_TRANSIENT = "TransientTransactionError"

_T = TypeVar("_T")


def update_around_locks(table: Table, scope: Mapping[str, Any], condition: Mapping[str, Any], change: Update) -> None:
    """
    Update all documents of a scope that match a condition, except locked ones, in bounded time.

    Documents without the update still match the condition in a majority read. If the time is too short, they include
    unlocked ones.

    Raises:
        PyMongoError: for any reason other than a lock or a server that is too slow.
    """
    query = {**scope, **condition}
    try:
        with pymongo.timeout(min(table.timeout, _PATIENCE_SECONDS)):
            table.collection.update_many(query, change)
            return
    except PyMongoError as error:
        if not error.timeout:
            raise
    left = [document["_id"] for document in table.find(query, {"_id": 1})]
    update_unlocked(table, left, condition, change, seconds=2 * table.timeout)


def update_unlocked(
    table: Table, ids: Sequence[Any], condition: Mapping[str, Any], change: Update, *, seconds: float
) -> None:
    """
    Update documents by `_id` that match a condition, without waiting for locked ones.

    After the time it starts no more transactions, unless all earlier ones were refused. Each transaction has a call's
    time limit, which a slow server may need. The order is random, so repeated calls reach all unlocked documents.
    """
    until = time.monotonic() + seconds
    pending: deque[Sequence[Any]] = deque([random.sample(ids, len(ids))])
    has_answer = False
    with open_session(table.collection.database.client) as session:
        while pending and (not has_answer or time.monotonic() < until):
            group = pending.popleft()
            is_done = not group or _try_update(table, session, {"_id": {"$in": group}, **condition}, change)
            has_answer |= is_done or len(group) == 1
            if not is_done and len(group) > 1:
                size = _GROUP if len(group) > _GROUP else 1
                pending.extendleft(group[start : start + size] for start in range(0, len(group), size))


def update_one_around_lock(
    table: Table, guard: Mapping[str, Any], change: Update, session: ClientSession | None = None
) -> bool:
    """
    Update the document that a guard selects. If an open transaction has locked it, wait only briefly.

    The update may be made twice.

    Args:
        session: the session, whose later reads see the update. None for a new one.

    Returns:
        False if no document matched.

    Raises:
        PyMongoError: the update was not made, or its result is unknown. See `is_lock`.
    """
    if session is None:
        with open_session(table.collection.database.client) as own:
            return update_one_around_lock(table, guard, change, own)

    def write() -> bool:
        return table.collection.update_one(guard, change, session=session).matched_count == 1

    try:
        with pymongo.timeout(min(table.timeout, _GLANCE_SECONDS)):
            return write()
    except NetworkTimeout:
        with table.limit():  # an abandoned transaction would stay open and lock it for a minute
            table.collection.database.command("ping")
    except PyMongoError as error:
        if not error.timeout:
            raise
    return _in_transaction(table, session, write)


def update_one_or_raise_lock(table: Table, guard: Mapping[str, Any], change: Update) -> bool:
    """
    Update the document that a guard selects, like `Table.update`, and never twice.

    Raises:
        PyMongoError: the update was not made, or its result is unknown. If a lock kept it waiting, it satisfies
            `is_lock`.
    """
    try:
        return table.update(guard, change)
    except PyMongoError as error:
        if not error.timeout:
            raise
        with open_session(table.collection.database.client) as session:
            try:
                _probe(table, session, guard, change)
            except PyMongoError as refusal:
                if is_lock(refusal):
                    raise
        raise  # the update may have been made, and reversed since then


def run_transaction(session: ClientSession, body: Callable[[ClientSession], _T]) -> _T:
    """
    Run a transaction with PyMongo's `with_transaction`, which repeats it within the time limit.

    Raises:
        PyMongoError: from the transaction. If the time was up, and a lock was the last refusal within it, it satisfies
            `is_lock`.
    """
    refusal: PyMongoError | None = None

    def attempt(inside: ClientSession) -> _T:
        nonlocal refusal
        try:
            result = body(inside)
        except PyMongoError as error:
            refusal = error if is_lock(error) else refusal
            raise
        refusal = None  # no lock delays its end
        return result

    try:
        return session.with_transaction(attempt)
    except PyMongoError as error:
        if refusal is None or not error.timeout:
            raise
        raise refusal from None  # PyMongo may have made it the cause of the timeout


def is_lock(error: BaseException) -> bool:
    """Return True if a transaction was refused, usually because another one wrote the document. Nothing changed."""
    return isinstance(error, OperationFailure) and not error.timeout and error.has_error_label(_TRANSIENT)


def _try_update(table: Table, session: ClientSession, query: Mapping[str, Any], change: Update) -> bool:
    """Update in a transaction. Return False if it was refused or not answered. The next one ends an open one."""
    try:
        _in_transaction(table, session, lambda: table.collection.update_many(query, change, session=session))
    except PyMongoError as error:
        if not (error.timeout or is_lock(error)):
            raise
        return False
    return True


def _probe(table: Table, session: ClientSession, guard: Mapping[str, Any], change: Update) -> None:
    """Try an update in a transaction that is aborted. The server refuses it immediately if the document is locked."""
    with pymongo.timeout(2 * table.timeout), session.start_transaction():
        with table.limit():
            table.collection.update_one(guard, change, session=session)
        session.abort_transaction()


def _in_transaction(table: Table, session: ClientSession, write: Callable[[], _T]) -> _T:
    """Write in a transaction. Its end has a full call's time: no lock can delay it any more."""
    limit = table.timeout
    with pymongo.timeout(2 * limit), session.start_transaction(), pymongo.timeout(limit):
        return write()
