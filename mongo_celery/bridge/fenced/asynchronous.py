"""The fenced view of a collection of an `AsyncMongoClient`. `change.fenced(...)` returns it for such a collection."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from pymongo import DeleteOne, ReplaceOne, UpdateMany, UpdateOne
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.results import BulkWriteResult, DeleteResult, UpdateResult

from mongo_celery.bridge.fenced.collection import DeleteOptions, ReplaceOptions, UpdateOptions
from mongo_celery.bridge.fenced.fence import Fence, Origin
from mongo_celery.bridge.fenced.writes import FencedWrites, Query
from mongo_celery.mongo.steps import run_async
from mongo_celery.mongo.writes import Modifications

if TYPE_CHECKING:
    from mongo_celery.outbox import Outbox


class AsyncFencedCollection:
    """
    `FencedCollection` for asyncio: the same writes over an `AsyncMongoClient`, as coroutines.

    Rules, arguments, results and errors are the same. Inside an open transaction, await each write in the asyncio task
    of the transaction.

    Args:
        collection: a PyMongo collection of an `AsyncMongoClient`.
        fence: the execution's right to write.
        outboxes: returns the app's outboxes of this collection.
        origin_of: as for `FencedCollection`.

    Raises:
        ConfigurationError: raised by each method, also if it runs in another asyncio task than the open transaction.
    """

    def __init__(
        self,
        collection: AsyncCollection[Any],
        fence: Fence,
        *,
        outboxes: Callable[[], Sequence[Outbox]] = tuple,
        origin_of: Callable[[Any], Origin | None] | None = None,
    ) -> None:
        self._writes = FencedWrites(collection, fence, outboxes, origin_of)

    def __repr__(self) -> str:
        return self._writes.describe(self)

    async def update_one(
        self,
        filter: Query,  # noqa: A002 - PyMongo's name, here and below
        update: Modifications,
        upsert: bool = False,
        *,
        sort: Mapping[str, Any] | None = None,
        session: AsyncClientSession | None = None,
        **options: Unpack[UpdateOptions],
    ) -> UpdateResult:
        """Update one document, like `FencedCollection.update_one`."""
        steps = self._writes.update_one(filter, update, upsert=upsert, sort=sort, session=session, options=options)
        return await run_async(steps)

    async def replace_one(
        self,
        filter: Query,  # noqa: A002
        replacement: Mapping[str, Any],
        upsert: bool = False,
        *,
        sort: Mapping[str, Any] | None = None,
        session: AsyncClientSession | None = None,
        **options: Unpack[ReplaceOptions],
    ) -> UpdateResult:
        """Replace one document, like `FencedCollection.replace_one`."""
        steps = self._writes.replace_one(
            filter, replacement, upsert=upsert, sort=sort, session=session, options=options
        )
        return await run_async(steps)

    async def find_one_and_update(
        self,
        filter: Query,  # noqa: A002
        update: Modifications,
        projection: Mapping[str, Any] | Iterable[str] | None = None,
        *,
        sort: Any = None,
        upsert: bool = False,
        return_document: bool = False,
        session: AsyncClientSession | None = None,
        **options: Any,
    ) -> Any:
        """Update and return one document, like `FencedCollection.find_one_and_update`."""
        options |= {"projection": projection, "return_document": return_document}
        steps = self._writes.find_one_and_update(
            filter, update, upsert=upsert, sort=sort, session=session, options=options
        )
        return await run_async(steps)

    async def delete_one(
        self,
        filter: Query,  # noqa: A002
        *,
        session: AsyncClientSession | None = None,
        **options: Unpack[DeleteOptions],
    ) -> DeleteResult:
        """Delete one document, like `FencedCollection.delete_one`."""
        return await run_async(self._writes.delete_one(filter, session=session, options=options))

    async def update_many(
        self,
        filter: Query,  # noqa: A002
        update: Modifications,
        upsert: bool = False,
        *,
        session: AsyncClientSession | None = None,
        **options: Unpack[UpdateOptions],
    ) -> UpdateResult:
        """Update many documents, like `FencedCollection.update_many`."""
        return await run_async(
            self._writes.update_many(filter, update, upsert=upsert, session=session, options=options)
        )

    async def bulk_write(
        self,
        requests: Sequence[UpdateOne | ReplaceOne[Any] | DeleteOne | UpdateMany],
        ordered: bool = True,
        *,
        bypass_document_validation: bool | None = None,
        session: AsyncClientSession | None = None,
        comment: Any = None,
        let: Mapping[str, Any] | None = None,
    ) -> BulkWriteResult:
        """Make many writes, like `FencedCollection.bulk_write`."""
        options = {"bypass_document_validation": bypass_document_validation, "comment": comment, "let": let}
        return await run_async(self._writes.bulk_write(requests, ordered=ordered, session=session, options=options))
