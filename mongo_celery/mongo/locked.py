"""
Updating many documents around those that an open transaction has written.

A plain update waits for such a document until that transaction ends, for a minute by default
(`transactionLifetimeLimitSeconds`), and whatever lies behind it waits too. Within a transaction of one's own the
server refuses the same write at once. So the plain update has a short time; after that, groups, and parts of the
groups that were refused, are tried in transactions, until what is locked stands alone. Nothing then waits for a lock.

A server may also just be slow. A transaction that gets no answer, rather than a refusal, has met no lock: from then on
each has the whole time of a call, and the first of them takes in all that is left, so that few are needed.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from itertools import chain
from typing import Any, TypeVar

import pymongo
from pymongo.client_session import ClientSession
from pymongo.errors import NetworkTimeout, OperationFailure, PyMongoError

from mongo_celery.mongo.opening import open_session
from mongo_celery.mongo.table import Table, Update

_PATIENCE_SECONDS = 1.0
_GLANCE_SECONDS = 0.25
_ATTEMPT_SECONDS = 0.5
_GROUP = 128
_PARTS = 4
_TRANSIENT = "TransientTransactionError"

_T = TypeVar("_T")


class _Outcome(Enum):
    DONE = "done"
    REFUSED = "refused"
    UNANSWERED = "unanswered"


def update_around_locks(table: Table, scope: Mapping[str, Any], condition: Mapping[str, Any], change: Update) -> None:
    """
    Update all documents of a scope that fulfil a condition, but those that are locked; bounded.

    Documents that were not updated still fulfil the condition: a read by majority shows them. That may be more than
    what is locked, where the time did not suffice.

    Raises:
        PyMongoError: for any other reason than a lock, or a server that is too slow for it.
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
    Update documents by `_id` that fulfil a condition, without waiting for those that are locked; ends within a time.

    A server that turns out to be slow is given the time of one more call, and answers late itself. What the time did
    not suffice for is chosen by chance, and a group that is refused is taken apart until some of it is updated or one
    document of it is known to be locked, so that repeating this reaches everything that is free, however little the
    time suffices for.
    """
    until = time.monotonic() + seconds
    limit = min(table.timeout, _ATTEMPT_SECONDS)
    pending = deque(_parts(random.sample(ids, len(ids)), _GROUP))
    is_further = False
    with open_session(table.collection.database.client) as session:
        while pending and (not is_further or time.monotonic() < until):
            group = pending.popleft()
            query = {"_id": {"$in": list(group)}, **condition}
            outcome = _update(table, session, query, change, limit)
            if outcome is _Outcome.UNANSWERED and limit < table.timeout:
                limit = table.timeout
                until = max(until, time.monotonic() + limit)
                pending = deque([list(chain(group, *pending))])
                continue
            is_further |= outcome is not _Outcome.REFUSED or len(group) == 1
            if outcome is not _Outcome.DONE and len(group) > 1:
                pending.extendleft(_parts(group, math.ceil(len(group) / _PARTS)))


def _parts(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def update_one_around_lock(
    table: Table, guard: Mapping[str, Any], change: Update, session: ClientSession | None = None
) -> bool:
    """
    Update the document that a guard names; where an open transaction has locked it, that is waited for a moment only.

    It may be made twice.

    Args:
        session: what is read in it afterwards is no older than the update; None for one of its own.

    Returns:
        False where none matched.

    Raises:
        PyMongoError: nothing is changed, or it is not known. See `is_lock`.
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
        with table.limit():  # a transaction of which nobody hears again would be open, and lock it, for a minute
            table.collection.database.command("ping")
    except PyMongoError as error:
        if not error.timeout:
            raise
    return _in_transaction(table, session, write, table.timeout)


def is_lock(error: BaseException) -> bool:
    """Return True if a transaction was refused, most often since another one wrote the document: nothing is changed."""
    return isinstance(error, OperationFailure) and not error.timeout and error.has_error_label(_TRANSIENT)


def _update(table: Table, session: ClientSession, query: Mapping[str, Any], change: Update, limit: float) -> _Outcome:
    """Try the update; one that was refused, by a lock, has changed nothing. The next one ends what this leaves open."""
    try:
        _in_transaction(table, session, lambda: table.collection.update_many(query, change, session=session), limit)
    except PyMongoError as error:
        if error.timeout:
            return _Outcome.UNANSWERED
        if not is_lock(error):
            raise
        return _Outcome.REFUSED
    return _Outcome.DONE


def _in_transaction(table: Table, session: ClientSession, write: Callable[[], _T], limit: float) -> _T:
    """Write in a transaction. Its end has the whole time of a call: no lock holds that up any more."""
    with pymongo.timeout(limit + table.timeout), session.start_transaction(), pymongo.timeout(limit):
        return write()
