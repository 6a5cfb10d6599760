"""
The fenced view of a PyMongo collection. `change.fenced(...)` returns it.

Round trips if nothing is stale (n = number of batches of 500):

=====================================  ================================================================
operation                              round trips
=====================================  ================================================================
`update_one`, `replace_one` by `_id`   1, also for an upsert that finds its document
`find_one_and_update` by `_id`         1. Operators on a document without a stamp of this term: 2
any of them by another filter          1 more
an upsert that inserts                 5: the miss, then a transaction (slot, insert, slot, commit)
`delete_one` by `_id`                  4: a transaction (slot, delete, tombstone, commit)
a write that matches nothing           at most 4, to find the reason
`update_many`                          1 + n
`bulk_write` of updates by `_id`       n. A batch with new documents: 7 more, all of them together
`bulk_write` of deletes by `_id`       6 for up to 500 consecutive deletes. A single one as above
`bulk_write` of anything else          as the single operation
delete from a collection with outbox   without a document: 1 more. With pending entries: their delivery
=====================================  ================================================================

A client's first insert or delete in a collection also creates the TTL index of the tombstones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from pymongo import DeleteOne, ReplaceOne, UpdateMany, UpdateOne
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.results import BulkWriteResult, DeleteResult, UpdateResult

from mongo_celery.bridge.fenced.fence import Fence, Origin
from mongo_celery.bridge.fenced.writes import FencedWrites, Query
from mongo_celery.mongo.opening import resolve_collection
from mongo_celery.mongo.steps import run_sync
from mongo_celery.mongo.writes import Modifications

if TYPE_CHECKING:
    from mongo_celery.outbox import Outbox


class DeleteOptions(TypedDict, total=False):
    """Arguments of PyMongo's method with the same name, here and below."""

    collation: Any
    hint: Any
    let: Mapping[str, Any] | None
    comment: Any


class ReplaceOptions(DeleteOptions, total=False):
    """Arguments of `replace_one`."""

    bypass_document_validation: bool | None


class UpdateOptions(ReplaceOptions, total=False):
    """Arguments of `update_one` and `update_many`."""

    array_filters: Sequence[Mapping[str, Any]] | None


class FencedCollection:
    """
    A view of a collection whose writes carry the fencing token of one execution.

    Methods take PyMongo's arguments and return PyMongo's results. The write concern is majority. A method raises
    `StaleFencingTokenError` if a newer execution of the same handler and partition has already written to the
    document or deleted it (P3). Each write stores the fencing token in the document's field ``_fence``, and a stored
    token never decreases (P4). Documents that you read contain ``_fence``. A replacement keeps the entries that an
    outbox of the app has in the document, and a delete delivers them first.

    With `partition_by`, changes of one document may be in several partitions. A write that sets, replaces or deletes
    then raises `OutdatedChangeError` if another partition has written for a later change of the document.

    The view does not protect documents that the newer execution has not touched. It does not see writes that bypass
    it. Inside an open transaction of the collection's client, as in a handler with `transactional=True`, each method
    joins the transaction without `session=` (see `current`), and the transaction's write concern applies. Upserts do
    not support a collation under which different `_id`s are equal. Use a view in one thread at a time, like a session.

    Args:
        collection: any PyMongo collection.
        fence: the execution's right to write.
        outboxes: returns the app's outboxes of this collection, like `Change.fenced`.
        origin_of: given a target's `_id`, returns the change that the write is for. Needed for executions of several
            changes.

    Raises:
        ConfigurationError: the collection belongs to an `AsyncMongoClient`: use `AsyncFencedCollection`. Each method
            also raises it if a transaction of another client of the same cluster is open here.
        ForkedClientError: raised by each method if the client was opened before this process was forked.
    """

    def __init__(
        self,
        collection: Collection[Any],
        fence: Fence,
        *,
        outboxes: Callable[[], Sequence[Outbox]] = tuple,
        origin_of: Callable[[Any], Origin | None] | None = None,
    ) -> None:
        self._writes = FencedWrites(resolve_collection(collection), fence, outboxes, origin_of)

    def __repr__(self) -> str:
        return self._writes.describe(self)

    def update_one(
        self,
        filter: Query,  # noqa: A002 - PyMongo's name, here and below
        update: Modifications,
        upsert: bool = False,
        *,
        sort: Mapping[str, Any] | None = None,
        session: ClientSession | None = None,
        **options: Unpack[UpdateOptions],
    ) -> UpdateResult:
        """
        Update one document, like `Collection.update_one`.

        Raises:
            StaleFencingTokenError: a newer execution has written to the document.
            OutdatedChangeError: another partition has written to it for a later change of the same document.
            ConfigurationError: an upsert without equality on `_id`, or an update of ``_fence``.
        """
        steps = self._writes.update_one(filter, update, upsert=upsert, sort=sort, session=session, options=options)
        return run_sync(steps)

    def replace_one(
        self,
        filter: Query,  # noqa: A002
        replacement: Mapping[str, Any],
        upsert: bool = False,
        *,
        sort: Mapping[str, Any] | None = None,
        session: ClientSession | None = None,
        **options: Unpack[ReplaceOptions],
    ) -> UpdateResult:
        """
        Replace one document, like `Collection.replace_one`. Stamps and pending entries stay. Errors as in `update_one`.

        Raises:
            OutboxRefusedError: the replacement has tasks. Add them by `bulk_write` of a `ReplaceOne` with its tasks.
        """
        steps = self._writes.replace_one(
            filter, replacement, upsert=upsert, sort=sort, session=session, options=options
        )
        return run_sync(steps)

    def find_one_and_update(
        self,
        filter: Query,  # noqa: A002
        update: Modifications,
        projection: Mapping[str, Any] | Iterable[str] | None = None,
        *,
        sort: Any = None,
        upsert: bool = False,
        return_document: bool = False,
        session: ClientSession | None = None,
        **options: Any,
    ) -> Any:
        """Update and return one document, like `Collection.find_one_and_update`. Errors as in `update_one`."""
        options |= {"projection": projection, "return_document": return_document}
        steps = self._writes.find_one_and_update(
            filter, update, upsert=upsert, sort=sort, session=session, options=options
        )
        return run_sync(steps)

    def delete_one(
        self,
        filter: Query,  # noqa: A002
        *,
        session: ClientSession | None = None,
        **options: Unpack[DeleteOptions],
    ) -> DeleteResult:
        """
        Delete one document, like `Collection.delete_one`, and store a tombstone (see `tombstones`).

        A delete by `_id` stores a tombstone even if the document does not exist, so that an older execution cannot
        create it again. Pending entries of an outbox in the document are delivered first.

        Raises:
            StaleFencingTokenError: a newer execution has written to the document or deleted it.
            OutdatedChangeError: as in `update_one`.
            OutboxRefusedError: pending entries cannot be delivered now. Inside a transaction they never can.
        """
        return run_sync(self._writes.delete_one(filter, session=session, options=options))

    def update_many(
        self,
        filter: Query,  # noqa: A002
        update: Modifications,
        upsert: bool = False,
        *,
        session: ClientSession | None = None,
        **options: Unpack[UpdateOptions],
    ) -> UpdateResult:
        """
        Update many documents, like `Collection.update_many`. The fencing token of each is checked.

        If a newer execution has written to one of them, its batch is written without it, then the error is raised.
        Errors as in `update_one`.
        """
        return run_sync(self._writes.update_many(filter, update, upsert=upsert, session=session, options=options))

    def bulk_write(
        self,
        requests: Sequence[UpdateOne | ReplaceOne[Any] | DeleteOne | UpdateMany],
        ordered: bool = True,
        *,
        bypass_document_validation: bool | None = None,
        session: ClientSession | None = None,
        comment: Any = None,
        let: Mapping[str, Any] | None = None,
    ) -> BulkWriteResult:
        """
        Make many writes, like `Collection.bulk_write`. The fencing token of each document is checked.

        `InsertOne` and `DeleteMany` are refused. Use ``ReplaceOne(..., upsert=True)`` and `DeleteOne`.

        Raises:
            StaleFencingTokenError: a newer execution has written to a document or deleted it. Later requests are
                not tried.
            OutdatedChangeError, OutboxRefusedError: as in the single operations. Later requests are not tried.
            BulkWriteError: writes failed. Indexes refer to `requests`.
            ConfigurationError: as in `update_one`. Nothing was written.
        """
        options = {"bypass_document_validation": bypass_document_validation, "comment": comment, "let": let}
        return run_sync(self._writes.bulk_write(requests, ordered=ordered, session=session, options=options))
