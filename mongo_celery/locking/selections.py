"""The plans of `select_for_update` and its like, which threads (`rows`) and asyncio (`asynchronous`) carry out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pymongo.asynchronous.collection import AsyncCollection
from pymongo.collection import Collection

from mongo_celery.errors import ConfigurationError
from mongo_celery.locking.call import LockCall, LockOptions, judged, lock_call
from mongo_celery.locking.many import among, lock_all, lock_these
from mongo_celery.locking.plans import Plan
from mongo_celery.locking.skipping import free_ids, tried
from mongo_celery.mongo.transaction.scopes import Session


def one(call: LockCall, sort: Any, projection: Any) -> Plan[Any]:
    """The document, or None."""
    if not call.skip_locked:
        return (yield from judged(call, call.lock_one(call.filter, sort, projection)))
    ids = yield from free_ids(call, 1, lambda count: _first_ids(call, sort, count))
    if not ids:
        return None
    with tried(call, ids):
        # With the caller's filter: it may have the shard key, and what the projection takes from it.
        asked = call.lock_one(among(call.filter, {"$eq": ids[0]}), None, projection)
        return (yield from judged(call, asked))


def several(call: LockCall, sort: Any, limit: int, projection: Any) -> Plan[list[Any]]:
    """The documents."""
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        raise ConfigurationError(f"limit={limit!r} must be 0 for all, or a positive whole number.")
    if not call.skip_locked:
        return (yield from lock_all(call, sort, limit, projection))
    if not limit:
        raise ConfigurationError("skip_locked needs a limit=: how many documents to take at most.")
    ids = yield from free_ids(call, limit, lambda count: _first_ids(call, sort, count))
    with tried(call, ids):
        return (yield from lock_these(call, ids, sort, projection)) if ids else []


def calls_of(
    wanted: Iterable[tuple[Any, Mapping[str, Any]]], session: object, kind: type[Session], options: LockOptions
) -> list[LockCall]:
    """One for each pair of a collection and a filter, checked."""
    calls = []
    for collection, filter_ in wanted:
        if not isinstance(collection, Collection | AsyncCollection) or not isinstance(filter_, Mapping):
            raise ConfigurationError("select_for_update_of takes pairs of a collection and a filter.")
        calls.append(lock_call(collection, filter_, session, kind, **options))
    return calls


def of_several(calls: Sequence[LockCall]) -> Plan[list[list[Any]]]:
    """The documents of each call, locked in the order of the collections' names."""
    found: dict[int, list[Any]] = {}
    for number in sorted(range(len(calls)), key=lambda each: str(calls[each].collection.full_name)):
        found[number] = yield from lock_all(calls[number], None, 0, None)
    return [found[number] for number in range(len(calls))]


def _first_ids(call: LockCall, sort: Any, count: int) -> Plan[list[Any]]:
    found = yield from call.find(call.filter, {"_id": 1}, sort, count)
    return [each["_id"] for each in found]
