"""The partial index on what is pending, and what can be learnt through it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from pymongo.collection import Collection
from pymongo.errors import OperationFailure
from pymongo.read_concern import ReadConcern

from mongo_celery.mongo.redaction import short
from mongo_celery.outbox import pending
from mongo_celery.outbox.entries import FIELD

logger = logging.getLogger("mongo_celery.outbox")

NAME = "pending-events"
COUNT = f"{FIELD}.count"


def ensure(collection: Collection[Any]) -> None:
    """
    Create the index if it is not there.

    A user without the right to create indexes gets a warning: then the sweep reads the whole collection until
    somebody creates it.
    """
    try:
        collection.create_index([(COUNT, 1)], name=NAME, partialFilterExpression=pending.WITH_ENTRIES)
    except OperationFailure as error:
        logger.warning(
            "outbox: the index %s on %s cannot be created (%s); create it by hand, or each sweep reads the whole "
            "collection",
            NAME, collection.full_name, short(error),
            extra={"event": "index_refused"},
        )  # fmt: skip


def exists(collection: Collection[Any]) -> bool | None:
    """Whether the index is there; None where the user may not look."""
    try:
        return NAME in collection.index_information()
    except OperationFailure:
        return None


def due_documents(collection: Collection[dict[str, Any]], older_than: float, limit: int) -> list[Any]:
    """The `_id`s of documents whose oldest entry has waited so many seconds and that nobody holds."""
    conditions = [pending.FREE, pending.DUE, pending.older_than(older_than)]
    found = collection.find({**pending.WITH_ENTRIES, "$expr": {"$and": conditions}}, {"_id": 1}, limit=limit)
    return [document["_id"] for document in found]


def waiting(collection: Collection[dict[str, Any]]) -> dict[str, Any]:
    """Documents, entries, age of the oldest in seconds, and documents with a failed entry; by the server's clock."""
    pipeline: list[dict[str, Any]] = [
        {"$match": pending.WITH_ENTRIES},
        {
            "$group": {
                "_id": None,
                "documents": {"$sum": 1},
                "pending": {"$sum": f"${COUNT}"},
                "oldest": {"$min": pending.OLDEST},
                "failing": {"$sum": {"$cond": [{"$gt": [{"$max": f"${FIELD}.events.attempts"}, 0]}, 1, 0]}},
            },
        },
        {"$set": {"seconds": {"$max": [0, {"$divide": [{"$subtract": ["$$NOW", "$oldest"]}, 1000]}]}}},
    ]
    # Removals are not majority writes: a majority read would still show what was delivered a moment ago.
    local = collection.with_options(read_concern=ReadConcern("local"))
    rows: Iterator[dict[str, Any]] = iter(local.aggregate(pipeline))
    return next(rows, {"documents": 0, "pending": 0, "seconds": None, "failing": 0})
