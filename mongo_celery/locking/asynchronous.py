"""
SELECT ... FOR UPDATE for asyncio: the same locks, over `AsyncMongoClient`.

Both variants run the same steps (`call`). So arguments, commands, results and errors are as in `rows`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection

from mongo_celery.locking.call import LockOptions, lock_call, lock_many, lock_one
from mongo_celery.mongo.steps import run_async


async def select_for_update(
    collection: AsyncCollection[Any],
    filter: Mapping[str, Any],  # noqa: A002 - PyMongo's word
    *,
    session: AsyncClientSession,
    sort: Any = None,
    projection: Any = None,
    **options: Unpack[LockOptions],
) -> Any:
    """
    Read a document and lock it until the transaction ends, like `mongo_celery.select_for_update`.

    ::

        @transactional(client)                      # an AsyncMongoClient
        async def book(seat, customer, *, session):
            found = await select_for_update(client.shop.seats, {"_id": seat}, session=session)
    """
    call = lock_call(collection, filter, session, AsyncClientSession, **options)
    return await run_async(lock_one(call, sort, projection))


async def select_many_for_update(
    collection: AsyncCollection[Any],
    filter: Mapping[str, Any],  # noqa: A002 - PyMongo's word
    *,
    session: AsyncClientSession,
    sort: Any = None,
    limit: int = 0,
    projection: Any = None,
    **options: Unpack[LockOptions],
) -> list[Any]:
    """Read several documents and lock them, like `mongo_celery.select_many_for_update`."""
    call = lock_call(collection, filter, session, AsyncClientSession, **options)
    return await run_async(lock_many(call, sort, limit, projection))
