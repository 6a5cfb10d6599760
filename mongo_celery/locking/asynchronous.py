"""
SELECT ... FOR UPDATE for asyncio: the same locks, over `AsyncMongoClient`.

What a lock is, how it is refused and how long it is waited for is as in `rows` and `call`. Who holds a document is not
asked here: a `DocumentLockedError` has no candidates, and no dead holder is ended. A thread that waits for the same
document does that; else the server does.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, fields
from typing import Any, cast

from pymongo import ReturnDocument
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.errors import OperationFailure

from mongo_celery.arguments import Duration
from mongo_celery.errors import ConfigurationError, DocumentLockedError
from mongo_celery.locking.call import LockCall, lock_call
from mongo_celery.mongo.identity import id_key
from mongo_celery.mongo.transaction.frames import note_locked, waits_of
from mongo_celery.mongo.verdicts import Code


async def select_for_update(
    collection: AsyncCollection[Any],
    filter: Mapping[str, Any],  # noqa: A002 - PyMongo's word
    *,
    session: AsyncClientSession,
    field: str = "_lock",
    application: str | None = None,
    sort: Any = None,
    projection: Any = None,
    nowait: bool = False,
    wait: Duration | None = None,
) -> Any:
    """
    Read a document and lock it until the transaction ends; arguments, result and errors as of `rows`.

    ::

        @transactional(client)                      # an AsyncMongoClient
        async def book(seat, customer, *, session):
            found = await select_for_update(client.shop.seats, {"_id": seat}, session=session)
    """
    call = _lock_call(collection, filter, session, field=field, application=application, nowait=nowait, wait=wait)
    with call.judged():
        return await collection.find_one_and_update(
            filter,
            call.update,
            sort=sort,
            projection=projection,
            return_document=ReturnDocument.AFTER,
            session=session,
        )


async def select_many_for_update(
    collection: AsyncCollection[Any],
    filter: Mapping[str, Any],  # noqa: A002 - PyMongo's word
    *,
    session: AsyncClientSession,
    field: str = "_lock",
    application: str | None = None,
    sort: Any = None,
    limit: int = 0,
    projection: Any = None,
    nowait: bool = False,
    wait: Duration | None = None,
) -> list[Any]:
    """
    Read several documents and lock them, by three commands however many they are.

    Arguments, result and errors as of `rows`, but for a projection: it may show `_id` as it is or not at all, and take
    nothing from the filter. The transaction reads one snapshot, so a document that has changed since it was read is a
    conflict.
    """
    _refuse_projection(projection)
    call = _lock_call(collection, filter, session, field=field, application=application, nowait=nowait, wait=wait)
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        raise ConfigurationError(f"limit={limit!r} must be 0 for all, or a positive whole number.")
    codec = collection.codec_options
    with call.judged():
        order = [("_id", 1)] if sort is None else sort
        ids = [
            each["_id"] async for each in collection.find(filter, {"_id": 1}, sort=order, limit=limit, session=session)
        ]
        if not ids:
            return []
        chosen = {"_id": {"$in": ids}}
        done = await collection.update_many(chosen, call.update, session=session)
        if done.matched_count > len(ids):
            raise ConfigurationError(
                f"{done.matched_count} documents of {collection.full_name} have the {len(ids)} _ids that were to be "
                "locked, so an _id does not say which: in a collection sharded by another key, make them unique."
            )
        if done.matched_count != len(ids):
            raise _conflict(f"{len(ids)} documents were read, and {done.matched_count} of them are there to be locked")
        shown, has_id = _with_id(projection)
        found = {id_key(each["_id"], codec): each async for each in collection.find(chosen, shown, session=session)}
    documents = [found[id_key(each, codec)] for each in ids]
    if not has_id and issubclass(codec.document_class, MutableMapping):
        for document in documents:
            document.pop("_id")
    return documents


@dataclass(frozen=True, slots=True)
class _AsyncLockCall(LockCall):
    """A call whose refusals cannot be asked about by the way: that would block the event loop."""

    def _conflicted(self, error: OperationFailure) -> None:
        waits = waits_of(self.session)
        waited = waits.conflicted(self.place)
        if self.bound is None or waited < self.bound:
            return
        waits.ended(self.place)
        reason = (
            f"it was not free within {self.bound:g} s"
            if self.bound
            else "another transaction holds it, or has just changed it"
        )
        locked = DocumentLockedError(
            f"The document of {self.name} is locked: {reason}. Try again later, or allow more time for waiting.",
            document=self.name,
            candidates=(),
        )
        note_locked(self.session, locked)
        raise locked from error


def _lock_call(
    collection: AsyncCollection[Any], filter_: Mapping[str, Any], session: object, **options: Any
) -> LockCall:
    call = lock_call(cast("Any", collection), filter_, session, kind=AsyncClientSession, **options)
    return _AsyncLockCall(**{each.name: getattr(call, each.name) for each in fields(call)})


def _conflict(message: str) -> OperationFailure:
    details = {"errmsg": message, "errorLabels": ["TransientTransactionError"]}
    return OperationFailure(message, Code.WriteConflict, details)


def _refuse_projection(projection: Any) -> None:
    """Documents are read again by their ids, and put in order by these."""
    is_computed = isinstance(projection, Mapping) and not isinstance(projection.get("_id", True), bool | int | float)
    names = () if isinstance(projection, str) else projection or ()
    if is_computed or _takes_meta(projection) or any(name.startswith("_id.") or name.endswith(".$") for name in names):
        raise ConfigurationError(
            f"projection={projection!r} computes the _id, shows parts of it, or takes something from the filter, which "
            "locks of asyncio cannot do for several documents; ask for whole fields, or for one document."
        )


def _takes_meta(asked: object) -> bool:
    return isinstance(asked, Mapping) and any(name == "$meta" or _takes_meta(item) for name, item in asked.items())


def _with_id(projection: Any) -> tuple[Any, bool]:
    """A projection that shows the `_id`, by which documents are put in order; and whether it was wanted."""
    if not isinstance(projection, Mapping) or projection.get("_id", True):
        return projection, True
    return {name: shown for name, shown in projection.items() if name != "_id"} or None, False
