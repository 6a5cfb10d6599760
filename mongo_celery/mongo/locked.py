"""
Updating many documents around those that an open transaction has written.

A plain update waits for such a document until that transaction ends, for a minute by default
(`transactionLifetimeLimitSeconds`), and whatever lies behind it waits too. Within a transaction of one's own the
server refuses the same write at once. So the plain update has a short time; after that, halves and halves of
halves are tried in transactions, until what is locked stands alone. Nothing then waits for a lock.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pymongo
from pymongo import WriteConcern
from pymongo.client_session import ClientSession
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery.mongo.table import Table, Update

_PATIENCE_SECONDS = 1.0
_TRANSIENT = "TransientTransactionError"


def update_around_locks(table: Table, scope: Mapping[str, Any], condition: Mapping[str, Any], change: Update) -> None:
    """
    Update all documents of a scope that fulfil a condition, but those that are locked; bounded.

    Documents that were not updated still fulfil the condition: a read by majority shows them. That may be more than
    what is locked, where the time did not suffice.

    Raises:
        PyMongoError: for any other reason than a lock.
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
    update_unlocked(table, [left], condition, change)


def update_unlocked(
    table: Table, groups: Iterable[Sequence[Any]], condition: Mapping[str, Any], change: Update
) -> None:
    """
    Update documents by `_id`, without waiting for those that are locked; ends within the time of one call of the table.

    Args:
        table: where.
        groups: what is tried in one transaction, and in halves where something of it is locked.
        condition: what a document must fulfil at that time, beside its `_id`.
        change: the update.
    """
    until = time.monotonic() + table.timeout
    pending = [group for group in groups if group]
    with table.collection.database.client.start_session() as session:
        while pending and time.monotonic() < until:
            group = pending.pop(0)
            if not _updated(table, session, {"_id": {"$in": list(group)}, **condition}, change) and len(group) > 1:
                half = len(group) // 2
                pending += [group[:half], group[half:]]


def _updated(table: Table, session: ClientSession, query: Mapping[str, Any], change: Update) -> bool:
    """Whether the update was made; one that met a lock has changed nothing. The next one ends what this leaves open."""
    session.start_transaction(write_concern=WriteConcern("majority"))
    try:
        with table.limit():
            table.collection.update_many(query, change, session=session)
        with table.limit():
            session.commit_transaction()
    except OperationFailure as error:
        if session.in_transaction:
            with table.limit():
                session.abort_transaction()
        if not (error.timeout or error.has_error_label(_TRANSIENT)):
            raise
        return False
    return True
