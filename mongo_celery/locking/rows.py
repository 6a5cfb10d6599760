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

from collections.abc import Mapping, Sequence
from typing import Any

from pymongo import ReturnDocument
from pymongo.client_session import ClientSession
from pymongo.collection import Collection

from mongo_celery.arguments import Duration
from mongo_celery.errors import ConfigurationError
from mongo_celery.locking.call import LockCall, lock_call
from mongo_celery.locking.many import among, lock_all, lock_these
from mongo_celery.locking.skipping import free_ids, tried


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
    skip_locked: bool = False,
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
        nowait: fail with `DocumentLockedError` at the first conflict, instead of letting `transactional` repeat the
            body. Who may hold it is asked for the error, at most four times a second: three more commands. Where the
            server does not answer those, the error comes two seconds later, at most once in five seconds.
        wait: seconds or `timedelta` for which the body is repeated because of this call, over all attempts; then
            `DocumentLockedError`. It is looked at when an attempt conflicts, so it may be exceeded by a pause and
            the body's own time. Without it, the limit of `transactional` counts alone. A call is known again by
            its collection and by being the n-th lock of its attempt; a body that locks in another order at each
            attempt may wait longer. In transactions that `transactional` does not run, attempts count together
            only if each conflicts within a second of the one before, whichever transaction it is of.
        skip_locked: take one that others do not hold, as far as that can be guessed: at random among the first
            sixteen or so that match, and another one each time that a conflict has the body repeated. Not promised:
            that it is the first by `sort`; or that there is none where None is returned, when others hold all that
            it has tried. Let it be the first statement of the body, which may then be repeated for nothing.

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
    call = lock_call(
        collection,
        filter,
        session,
        field=field,
        application=application,
        nowait=nowait,
        wait=wait,
        skip_locked=skip_locked,
    )
    if not skip_locked:
        return _lock_one(call, filter, sort, projection)
    ids = free_ids(call, filter, sort, 1)
    if not ids:
        return None
    with tried(call, ids):
        # With the caller's filter: it may have the shard key, and what the projection takes from it.
        return _lock_one(call, among(filter, {"$eq": ids[0]}), None, projection)


def _lock_one(call: LockCall, filter_: Mapping[str, Any], sort: Any, projection: Any) -> Any:
    with call.judged():
        return call.collection.find_one_and_update(
            filter_,
            call.update,
            sort=sort,
            projection=projection,
            return_document=ReturnDocument.AFTER,
            session=call.session,
        )


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
    skip_locked: bool = False,
) -> list[Any]:
    """
    Read several documents and lock them, by two commands however many they are.

    Nobody waits for a document while holding another: who meets a conflict loses all that it has locked, and begins
    anew. So overlapping sets do not deadlock; two that meet in opposite orders may both begin anew, after pauses of
    different lengths. Afterwards each document is locked as by `select_for_update`. Not promised: that no further
    document matches; one that is inserted meanwhile is free.

    Args:
        collection: where.
        filter: which documents.
        session: of a transaction in progress.
        field: as of `select_for_update`.
        application: as of `select_for_update`.
        sort: order of the returned list, and which documents a `limit` takes; by default `_id`.
        limit: how many at most; 0 for all, as in PyMongo.
        projection: of what is returned. Together with a `limit`, one that shows the lock's field, or is more than
            names of fields, costs a third command; one of parts of `_id` costs one for each document.
        nowait: as of `select_for_update`.
        wait: as of `select_for_update`, for all of them together.
        skip_locked: as of `select_for_update`, for up to `limit` documents, which must be given then. After a
            conflict half as many are tried, so there may be fewer although more are free; three commands.

    Returns:
        The documents as they are after locking; an empty list if none matches.

    Raises:
        TransactionRequiredError, DocumentLockedError, TopologyError, ConfigurationError: as of `select_for_update`.
    """
    call = lock_call(
        collection,
        filter,
        session,
        field=field,
        application=application,
        nowait=nowait,
        wait=wait,
        skip_locked=skip_locked,
    )
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        raise ConfigurationError(f"limit={limit!r} must be 0 for all, or a positive whole number.")
    if not skip_locked:
        return lock_all(call, filter, sort, limit, projection)
    if not limit:
        raise ConfigurationError("skip_locked needs a limit=: how many documents to take at most.")
    ids = free_ids(call, filter, sort, limit)
    with tried(call, ids):
        return lock_these(call, filter, ids, sort, projection)


def select_for_update_of(
    wanted: Sequence[tuple[Collection[Any], Mapping[str, Any]]],
    *,
    session: ClientSession,
    field: str = "_lock",
    application: str | None = None,
    nowait: bool = False,
    wait: Duration | None = None,
) -> list[list[Any]]:
    """
    Read documents of several collections and lock them, by two commands a collection.

    ::

        [order], lines = select_for_update_of([(orders, {"_id": 7}), (lines, {"order": 7})], session=session)

    They are locked in the order of the collections' names, whatever order they are asked for in: two transactions
    that want the same ones meet at the first, before either has done much. Afterwards each document is locked as by
    `select_for_update`.

    Args:
        wanted: collections of one client, each with a filter.
        session: of a transaction in progress.
        field: as of `select_for_update`, in all of them.
        application: as of `select_for_update`.
        nowait: as of `select_for_update`.
        wait: as of `select_for_update`, for each collection.

    Returns:
        A list for each collection, in the order of `wanted`: its documents as they are after locking, by `_id`.

    Raises:
        TransactionRequiredError, DocumentLockedError, TopologyError, ConfigurationError: as of `select_for_update`.
    """
    calls = []
    for collection, filter_ in wanted:
        if not isinstance(collection, Collection) or not isinstance(filter_, Mapping):
            raise ConfigurationError("select_for_update_of takes pairs of a collection and a filter.")
        call = lock_call(collection, filter_, session, field=field, application=application, nowait=nowait, wait=wait)
        calls.append((call, filter_))
    found: dict[int, list[Any]] = {}
    for number in sorted(range(len(calls)), key=lambda each: calls[each][0].collection.full_name):
        call, filter_ = calls[number]
        found[number] = lock_all(call, filter_, None, 0, None)
    return [found[number] for number in range(len(calls))]
