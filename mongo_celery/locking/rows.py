"""
Locking documents inside a transaction by writing a value that always differs.

MongoDB has no SELECT ... FOR UPDATE. A read in a transaction locks nothing: two transactions may read the same
documents, decide, and write to different ones (write skew). A *write* conflicts. So the document is read by a
`find_one_and_update` that writes a fresh value:

- A second transaction that wants the document fails at once with a write conflict, which MongoDB marks as
  transient. There is no queue in the server: `transactional` repeats the whole body, with pauses, until the first
  one has ended. The next one is chosen by chance.
- A writer outside any transaction waits inside the server until the transaction has ended.
- A reader outside sees the document as it was before.

Source: MongoDB, "How To SELECT ... FOR UPDATE Inside MongoDB Transactions".

A holder that dies without ending its transaction keeps its documents until the server ends it,
`transactionLifetimeLimitSeconds` (60 by default) after it began, or up to half of that later. A lost connection alone
does not free them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from pymongo.client_session import ClientSession
from pymongo.collection import Collection

from mongo_celery.locking.call import LockOptions, lock_call, lock_many, lock_one, run_sync


def select_for_update(
    collection: Collection[Any],
    filter: Mapping[str, Any],  # noqa: A002 - PyMongo's word
    *,
    session: ClientSession,
    sort: Any = None,
    projection: Any = None,
    **options: Unpack[LockOptions],
) -> Any:
    """
    Read a document and lock it until the transaction ends, by one command.

    ::

        @transactional(client)
        def book(seat, customer, *, session):
            found = select_for_update(client.shop.seats, {"_id": seat}, session=session)

    Afterwards no other transaction can write to it or lock it, and writers outside transactions wait. Not
    promised: that others cannot read it; an order in which those who wait get it; or anything about documents
    that do not exist: None locks nothing, and somebody else may insert one that matches.

    The lock is a write: it stays in the document as `{id, at}` by the server's clock, and change streams see it once
    the transaction is committed.

    Args:
        collection: of the document.
        filter: which document; the first one that matches.
        session: of a transaction in progress.
        sort: which document comes first, if several match.
        projection: of the result; by default all, the field of the lock too.
        options: see `LockOptions`.

    Returns:
        The document as it is after locking, or None if none matches.

    Raises:
        TransactionRequiredError: the session has no transaction in progress.
        DocumentLockedError: with `nowait`, another transaction holds it, or has changed it since this one began. The
            server has aborted this transaction, so catch it outside: `transactional` raises it again when a body that
            has caught it returns or goes on with the session. The driver's `with_transaction` repeats such a body
            until its own limit.
        TopologyError: the server is a standalone.
        ConfigurationError: `field` cannot be written, holds another value, or the collection's validator refuses it.
        OperationFailure: a write conflict, labelled as transient. Or a LockTimeout, which is the same of a whole
            collection: `createIndex` has it for moments, and `collMod` as long as it waits for open transactions. Let
            it pass to `transactional`.
    """
    call = lock_call(collection, filter, session, ClientSession, **options)
    return run_sync(lock_one(call, sort, projection))


def select_many_for_update(
    collection: Collection[Any],
    filter: Mapping[str, Any],  # noqa: A002 - PyMongo's word
    *,
    session: ClientSession,
    sort: Any = None,
    limit: int = 0,
    projection: Any = None,
    **options: Unpack[LockOptions],
) -> list[Any]:
    """
    Read several documents and lock them, by two commands however many they are.

    A transaction that meets a conflict loses all its locks and begins anew, so none waits while it holds a document.
    Overlapping sets do not deadlock. Two that meet in opposite orders may both begin anew, after pauses of different
    lengths. Afterwards each document is locked as by `select_for_update`. Not promised: that no further document
    matches; one that is inserted meanwhile is free.

    Args:
        collection: of the documents.
        filter: which documents.
        session: of a transaction in progress.
        sort: order of the returned list, and which documents a `limit` takes; by default `_id`.
        limit: how many at most; 0 for all, as in PyMongo.
        projection: of the result, which always has `_id`, whole and as it is.
        options: see `LockOptions`.

    Returns:
        The documents, with the lock's field as it was before; an empty list if none matches.

    Raises:
        TransactionRequiredError, DocumentLockedError, TopologyError, ConfigurationError: as of `select_for_update`.
    """
    call = lock_call(collection, filter, session, ClientSession, **options)
    return run_sync(lock_many(call, sort, limit, projection))
