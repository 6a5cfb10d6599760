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
`transactionLifetimeLimitSeconds` (60 by default), or somebody does who waits for them for more than ten seconds
(`freeing`, which says what that is worth); a lost connection alone does not free them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Unpack

from pymongo.client_session import ClientSession
from pymongo.collection import Collection

from mongo_celery.locking import selections
from mongo_celery.locking.call import LockOptions, SkippingOptions, lock_call
from mongo_celery.locking.plans import carried_out


def select_for_update(
    collection: Collection[Any],
    filter: Mapping[str, Any],  # noqa: A002 - PyMongo's word
    *,
    session: ClientSession,
    sort: Any = None,
    projection: Any = None,
    **options: Unpack[SkippingOptions],
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
        sort: which document comes first, if several match.
        projection: of what is returned; by default all, the field of the lock too.
        options: see `LockOptions` and `SkippingOptions`.

    Returns:
        The document as it is after locking, or None if none matches.

    Raises:
        TransactionRequiredError: the session has no transaction in progress.
        DocumentLockedError: another transaction holds it, or has changed it since this one began, and `nowait` or
            `wait` says not to wait any longer. Its attribute `candidates` has the open transactions that may hold
            it, of which MongoDB does not say which one does. The server has then aborted the transaction, so catch
            it outside: `transactional` raises it again when a body that has caught it returns or goes on with the
            session, and the driver's `with_transaction` repeats such a body until its own limit.
        TopologyError: the server is a standalone.
        ConfigurationError: `field` cannot be written, or the collection's validator refuses it; or `nowait`, `wait`
            and `skip_locked` exclude each other.
        OperationFailure: a write conflict, labelled as transient, or a LockTimeout, which is the same of a whole
            collection: while one operation has it for itself, as `createIndex` does for moments, and `collMod` as long
            as it waits for open transactions. Let it pass to `transactional`.
    """
    call = lock_call(collection, filter, session, ClientSession, **options)
    return carried_out(selections.one(call, sort, projection))


def select_many_for_update(
    collection: Collection[Any],
    filter: Mapping[str, Any],  # noqa: A002 - PyMongo's word
    *,
    session: ClientSession,
    sort: Any = None,
    limit: int = 0,
    projection: Any = None,
    **options: Unpack[SkippingOptions],
) -> list[Any]:
    """
    Read several documents and lock them, by two commands however many they are.

    On a replica set, one or two that are asked for by nothing but `_id` are locked by one command each.
    Nobody waits for a document while holding another: who meets a conflict loses all that it has locked, and begins
    anew. So overlapping sets do not deadlock; two that meet in opposite orders may both begin anew, after pauses of
    different lengths. Afterwards each document is locked as by `select_for_update`. Not promised: that no further
    document matches; one that is inserted meanwhile is free.

    Args:
        collection: where.
        filter: which documents.
        session: of a transaction in progress.
        sort: order of the returned list, and which documents a `limit` takes; by default `_id`.
        limit: how many at most; 0 for all, as in PyMongo.
        projection: of what is returned. Together with a `limit`, one that shows the lock's field, or is more than
            names of fields, costs a third command; one of parts of `_id` costs one for each document.
        options: see `LockOptions` and `SkippingOptions`. `wait` counts for all of them together; `skip_locked` needs a
            `limit`, and costs three commands: after a conflict half as many are tried, so there may be fewer although
            more are free.

    Returns:
        The documents as they are after locking; an empty list if none matches.

    Raises:
        TransactionRequiredError, DocumentLockedError, TopologyError, ConfigurationError: as of `select_for_update`.
    """
    call = lock_call(collection, filter, session, ClientSession, **options)
    return carried_out(selections.several(call, sort, limit, projection))


def select_for_update_of(
    wanted: Iterable[tuple[Collection[Any], Mapping[str, Any]]],
    *,
    session: ClientSession,
    **options: Unpack[LockOptions],
) -> list[list[Any]]:
    """
    Read documents of several collections and lock them, by two commands a collection, or one for one by its `_id`.

    ::

        [order], lines = select_for_update_of([(orders, {"_id": 7}), (lines, {"order": 7})], session=session)

    They are locked in the order of the collections' names, whatever order they are asked for in: two transactions
    that want the same ones meet at the first, before either has done much. Afterwards each document is locked as by
    `select_for_update`.

    Args:
        wanted: collections of one client, each with a filter.
        session: of a transaction in progress.
        options: see `LockOptions`. `field` is that of all collections, `wait` counts for each.

    Returns:
        A list for each collection, in the order of `wanted`: its documents as they are after locking, by `_id`.

    Raises:
        TransactionRequiredError, DocumentLockedError, TopologyError, ConfigurationError: as of `select_for_update`.
    """
    return carried_out(selections.of_several(selections.calls_of(wanted, session, ClientSession, options)))
