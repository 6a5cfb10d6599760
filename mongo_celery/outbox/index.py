"""The partial index on what is pending, and what can be learnt through it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from pymongo.collection import Collection
from pymongo.errors import OperationFailure
from pymongo.read_concern import ReadConcern

from mongo_celery.mongo.redaction import short
from mongo_celery.outbox.claims import PendingClaims
from mongo_celery.outbox.pending import PendingField

logger = logging.getLogger("mongo_celery.outbox")

_NONE = {"documents": 0, "pending": 0, "seconds": None, "failing": 0, "stuck": 0, "other_apps": 0}


def ensure(collection: Collection[Any], field: PendingField) -> None:
    """
    Create the index if it is not there, under this name or another.

    A user without the right to create indexes gets a warning: then the sweep reads the whole collection until
    somebody creates it.
    """
    if exists(collection, field):
        return
    try:
        collection.create_index([(field.count, 1)], name=field.name, partialFilterExpression=_filter(field))
    except OperationFailure as error:
        logger.warning(
            "outbox: the index %s on %s cannot be created (%s); create it by hand, or each sweep reads the whole "
            "collection",
            field.name, collection.full_name, short(error),
            extra={"event": "index_refused"},
        )  # fmt: skip


def exists(collection: Collection[Any], field: PendingField) -> bool | None:
    """Whether the index is there, whatever its name; None where the user may not look."""
    try:
        found = collection.index_information().values()
    except OperationFailure:
        return None
    return any(
        list(each["key"]) == [(field.count, 1)] and each.get("partialFilterExpression") == _filter(field)
        for each in found
    )


def due_documents(
    collection: Collection[Any],
    claims: PendingClaims,
    older_than: float,
    limit: int,
    *,
    passing_over: Sequence[Any] = (),
    untried_first: bool = False,
) -> list[Any]:
    """
    The `_id`s of documents whose oldest entry has waited so many seconds, and that this process may claim.

    Args:
        collection: of the outbox.
        claims: conditions on its field.
        older_than: the seconds.
        limit: how many at most.
        passing_over: `_id`s of documents that are not wanted.
        untried_first: those that nobody has claimed, then those whose last claim is the longest ago; it costs a look at
            all that are due. Else the first that the index has, which may be the same ones each time.
    """
    condition = claims.claimable(older_than)
    if passing_over:
        condition["_id"] = {"$nin": list(passing_over)}
    if not untried_first:
        found = _local(collection).find(condition, {"_id": 1}, limit=limit)
        return [document["_id"] for document in found]
    stages: list[dict[str, Any]] = [
        {"$match": condition},
        {"$project": {"since": f"${claims.field.claim}.since"}},  # before they are sorted: documents may be large
        {"$sort": {"since": 1}},
        {"$limit": limit},
    ]
    return [document["_id"] for document in _local(collection).aggregate(stages)]


def waiting_for_others(collection: Collection[Any], claims: PendingClaims, older_than: float) -> Any:
    """A document whose next entry has waited so long for another app; None if there is none."""
    return _local(collection).find_one(claims.others(older_than), {"_id": 1})


def waiting(collection: Collection[Any], claims: PendingClaims, stuck_after: int | None) -> dict[str, Any]:
    """
    What waits, by the server's clock: documents, entries, seconds of the oldest; how many documents hold an entry that
    has failed, are stuck behind one, or wait for another app.

    Args:
        collection: of the outbox.
        claims: conditions on its field.
        stuck_after: after how many failures of its own an entry is stuck; None where it is set aside instead.
    """
    field = claims.field
    failed = {"$convert": {"input": claims.attempts, "to": "double", "onError": 0, "onNull": 0}}
    entries = {"$convert": {"input": f"${field.count}", "to": "long", "onError": 0, "onNull": 0}}
    pipeline: list[dict[str, Any]] = [
        {"$match": claims.with_entries},
        {
            "$group": {
                "_id": None,
                "documents": {"$sum": 1},
                "pending": {"$sum": entries},
                "oldest": {"$min": claims.oldest},
                "failing": _how_many({"$or": [{"$gt": [failed, 0]}, claims.nameless]}),
                "stuck": _how_many(_is_stuck(failed, claims, stuck_after)),
                "other_apps": _how_many({"$not": [claims.ours]}),
            },
        },
        {"$set": {"seconds": {"$max": [0, {"$divide": [{"$subtract": ["$$NOW", "$oldest"]}, 1000]}]}}},
    ]
    rows: Iterator[dict[str, Any]] = iter(_local(collection).aggregate(pipeline))
    return next(rows, _NONE)


def _is_stuck(failed: dict[str, Any], claims: PendingClaims, stuck_after: int | None) -> Any:
    return False if stuck_after is None else {"$or": [{"$gte": [failed, stuck_after]}, claims.nameless]}


def _how_many(condition: Any) -> dict[str, Any]:
    return {"$sum": {"$cond": [condition, 1, 0]}}


def _filter(field: PendingField) -> dict[str, Any]:
    return {field.count: {"$gt": 0}}


def _local(collection: Collection[Any]) -> Collection[Any]:
    """Removals are not majority writes: a majority read would still show what was delivered a moment ago."""
    return collection.with_options(read_concern=ReadConcern("local"))
