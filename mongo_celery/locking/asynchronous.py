"""
SELECT ... FOR UPDATE for asyncio: the same locks, over `AsyncMongoClient`.

Both carry out the same plans (`selections`), so arguments, commands, results, errors and what becomes of a dead holder
are as of `rows`. One thing differs: when the time of a transaction is used up, nothing can be awaited any more, so who
may hold what it has waited for is asked by a conflict in its last second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Unpack

from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection

from mongo_celery.locking import selections
from mongo_celery.locking.call import LockOptions, SkippingOptions, lock_call
from mongo_celery.locking.plans import awaited


async def select_for_update(
    collection: AsyncCollection[Any],
    filter: Mapping[str, Any],  # noqa: A002 - PyMongo's word
    *,
    session: AsyncClientSession,
    sort: Any = None,
    projection: Any = None,
    **options: Unpack[SkippingOptions],
) -> Any:
    """
    Read a document and lock it until the transaction ends; all as of `mongo_celery.select_for_update`.

    ::

        @transactional(client)                      # an AsyncMongoClient
        async def book(seat, customer, *, session):
            found = await select_for_update(client.shop.seats, {"_id": seat}, session=session)
    """
    call = lock_call(collection, filter, session, AsyncClientSession, **options)
    return await awaited(selections.one(call, sort, projection))


async def select_many_for_update(
    collection: AsyncCollection[Any],
    filter: Mapping[str, Any],  # noqa: A002 - PyMongo's word
    *,
    session: AsyncClientSession,
    sort: Any = None,
    limit: int = 0,
    projection: Any = None,
    **options: Unpack[SkippingOptions],
) -> list[Any]:
    """Read several documents and lock them; all as of `mongo_celery.select_many_for_update`."""
    call = lock_call(collection, filter, session, AsyncClientSession, **options)
    return await awaited(selections.several(call, sort, limit, projection))


async def select_for_update_of(
    wanted: Iterable[tuple[AsyncCollection[Any], Mapping[str, Any]]],
    *,
    session: AsyncClientSession,
    **options: Unpack[LockOptions],
) -> list[list[Any]]:
    """Read documents of several collections and lock them; all as of `mongo_celery.locking.select_for_update_of`."""
    return await awaited(selections.of_several(selections.calls_of(wanted, session, AsyncClientSession, options)))
