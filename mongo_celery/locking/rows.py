"""
Locking documents in a transaction by writing a value that always differs.

MongoDB has no SELECT ... FOR UPDATE. A read in a transaction locks nothing: two transactions may read the same
documents, decide, and write to different ones (write skew). A *write* conflicts. So a `find_one_and_update` reads the
document and writes a fresh value:

- A second transaction on the document fails immediately with a write conflict, which MongoDB marks as transient. The
  server has no queue: `transactional` repeats the whole body, with pauses, until the first one has ended. Any waiting
  transaction may be next.
- A writer outside any transaction waits inside the server until the transaction has ended.
- A reader outside sees the document before the transaction.

Source: MongoDB, "How To SELECT ... FOR UPDATE Inside MongoDB Transactions".

If a holder dies without ending its transaction, its documents stay locked until the server ends it. That is
`transactionLifetimeLimitSeconds` (60 by default) after its start, or up to half of that later. A lost connection does
not free them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from pymongo.client_session import ClientSession
from pymongo.collection import Collection

from mongo_celery.locking.call import LockOptions, lock_call, lock_many, lock_one
from mongo_celery.mongo.steps import run_sync


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
    Read a document and lock it until the transaction ends, with one command.

    ::

        @transactional(client)
        def book(seat, customer, *, session):
            found = select_for_update(client.shop.seats, {"_id": seat}, session=session)

    Afterwards no other transaction can write to the document or lock it, and writers outside transactions wait. Others
    can still read it. Waiting transactions get the lock in any order. If no document matches, the result is None and
    nothing is locked: another client may insert a matching document.

    The lock is a write. It stays in the document as `{id, at}` by the server's clock, and change streams see it after
    the commit.

    Args:
        collection: the document's collection.
        filter: the first matching document is locked.
        session: the session of a transaction in progress.
        sort: the order of matching documents.
        projection: fields of the result. By default all, including the lock's field.
        options: see `LockOptions`.

    Returns:
        The document after locking, or None if none matches.

    Raises:
        TransactionRequiredError: the session has no transaction in progress.
        DocumentLockedError: with `nowait`, another transaction holds the document, or changed it since this one began.
            The server has aborted this transaction, so catch the error outside. If the body catches it and returns or
            continues to use the session, `transactional` raises it again. The driver's `with_transaction` repeats such
            a body until its own limit.
        TopologyError: the server is a standalone.
        ConfigurationError: `field` cannot be written, holds another value, or the collection's validator refuses it.
        OperationFailure: a write conflict, labelled as transient. Or a LockTimeout, the same for a whole collection:
            `createIndex` causes it briefly, and `collMod` while it waits for open transactions. Do not catch it in
            `transactional`.
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
    Read several documents and lock them, with two commands for any number.

    A transaction that meets a conflict loses all its locks and starts again, so none waits while it holds a document.
    Overlapping sets do not deadlock. Two that meet in opposite order may both start again, after different pauses.
    Afterwards each document is locked as by `select_for_update`. A matching document that is inserted meanwhile is not
    locked.

    Args:
        collection: the collection of the documents.
        filter: all matching documents are locked.
        session: the session of a transaction in progress.
        sort: order of the returned list, and of the documents for `limit`. By default `_id`.
        limit: largest number of documents. 0 for all, as in PyMongo.
        projection: fields of the result, which always has the whole `_id`.
        options: see `LockOptions`.

    Returns:
        The documents, with the lock field's value before this lock. An empty list if none matches.

    Raises:
        TransactionRequiredError, DocumentLockedError, TopologyError, ConfigurationError: as in `select_for_update`.
    """
    call = lock_call(collection, filter, session, ClientSession, **options)
    return run_sync(lock_many(call, sort, limit, projection))
