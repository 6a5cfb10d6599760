"""The documents with pending entries in one collection, found by the index."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pymongo import IndexModel
from pymongo.collection import Collection
from pymongo.read_concern import ReadConcern

from mongo_celery.mongo.indexes import Indexes
from mongo_celery.outbox.claims import ATTEMPTS, HEAD, OLDEST, SKEW_SECONDS, WITH_ENTRIES, claimable
from mongo_celery.outbox.commands import limit_command
from mongo_celery.outbox.origin import EntryOrigin
from mongo_celery.outbox.pending import COUNT, FIELD, LONG_AGO, UNTIL

PENDING_INDEX = IndexModel([(COUNT, 1), (UNTIL, 1)], name=FIELD, partialFilterExpression=WITH_ENTRIES)

_BATCH = 100
_UNKNOWN_MAX = 100
_AGE: dict[str, Any] = {"$max": [0, {"$divide": [{"$subtract": ["$$NOW", "$oldest"]}, 1000]}]}
_NONE = {"documents": 0, "pending": 0, "seconds": None, "failing": 0, "stuck": 0, "other_brokers": 0}


@dataclass(frozen=True, slots=True)
class UnknownTask:
    """
    A task that is unknown to a process, and that documents wait for.

    Attributes:
        name: the name of the task.
        documents: number of documents in which it is the next entry.
        seconds: age of their oldest entry.
    """

    name: str
    documents: int
    seconds: float


class PendingDocuments:
    """
    Finds documents with pending entries, without reading others.

    Removals are not majority writes, so a majority read would still show recently delivered entries.

    Args:
        collection: the collection of the outbox.
        origin: the origin of this process's entries.

    Attributes:
        place: namespace and field of the entries.
    """

    def __init__(self, collection: Collection[dict[str, Any]], origin: EntryOrigin) -> None:
        self.place = f"{collection.full_name}/{FIELD}"
        self._origin = origin
        # An `_id` that is no valid text must not end a poll. No write can name it, so its own delivery fails.
        types = collection.codec_options.with_options(unicode_decode_error_handler="surrogateescape")
        self._collection = collection.with_options(types, read_concern=ReadConcern("local"))
        self.indexes = Indexes(collection, [PENDING_INDEX], "each sweep reads the whole collection")

    def find_due(self, older_than: float, limit: int = 0) -> Iterator[Any]:
        """
        Return the `_id`s of documents that this process may claim, with failed ones last.

        Each is returned once, even if it becomes due again meanwhile. Hardly any later writes are included.

        Args:
            older_than: least age of the oldest entry in seconds.
            limit: largest number. 0 for all.

        Raises:
            PyMongoError: MongoDB did not answer.
        """
        began, shown = time.monotonic(), {"_id": 1, "ahead": {"$subtract": [OLDEST, "$$NOW"]}}
        for found in self._collection.find(claimable(older_than), shown, limit=limit, batch_size=_BATCH):
            # A cursor keeps the time of its first command, so later writes look as if a clock were ahead.
            passed = 1000 * (SKEW_SECONDS + time.monotonic() - began)
            if not 0 < (found["ahead"] or 0) < passed:
                yield found["_id"]

    def poll_due(self, limit: int) -> Sequence[Any]:
        """
        Return up to this many `_id`s of documents that may be claimed, with one command.

        Raises:
            PyMongoError: MongoDB did not answer in time, for example without the index.
        """
        with limit_command():
            return list(islice(self.find_due(0.0, limit), limit))

    def count(self, stuck_after: int | None) -> dict[str, Any]:
        """
        Return the totals of pending entries, by the server's clock.

        Args:
            stuck_after: number of own failures after which an entry is stuck. None if it becomes a dead letter instead.
        """
        failed = {"$convert": {"input": ATTEMPTS, "to": "double", "onError": 0, "onNull": 0}}
        entries = {"$convert": {"input": f"${COUNT}", "to": "long", "onError": 0, "onNull": 0}}
        sums = {
            "failing": {"$gt": [failed, 0]},
            "stuck": stuck_after is not None and {"$gte": [failed, stuck_after]},
            "other_brokers": self._origin.match_other(),
        }
        pipeline: list[dict[str, Any]] = [
            {"$match": WITH_ENTRIES},
            {
                "$group": {
                    "_id": None,
                    "documents": {"$sum": 1},
                    "pending": {"$sum": entries},
                    "oldest": {"$min": OLDEST},
                    **{name: {"$sum": {"$cond": [condition, 1, 0]}} for name, condition in sums.items()},
                },
            },
            {"$set": {"seconds": _AGE}},
        ]
        return next(iter(self._collection.aggregate(pipeline)), _NONE)

    def find_unknown_tasks(self, known: Iterable[str]) -> list[UnknownTask]:
        """
        Return unknown tasks that documents wait for, those of most documents first.

        Later steps of a canvas are not checked, and no process has to know tasks of other apps. The index finds the
        documents that a relay has held back.
        """
        is_awaited = {"$and": [{"$eq": ["$$head.kind", "task"]}, {"$ne": ["$$head.elsewhere", True]}]}
        name = {"$let": {"vars": {"head": HEAD}, "in": {"$cond": [is_awaited, "$$head.name", 0]}}}
        pipeline: list[dict[str, Any]] = [
            {"$match": {**WITH_ENTRIES, UNTIL: {"$gt": LONG_AGO}}},
            {"$group": {"_id": name, "documents": {"$sum": 1}, "oldest": {"$min": OLDEST}}},
            {"$match": {"_id": {"$type": "string", "$nin": [*known]}}},
            {"$set": {"seconds": _AGE}},
            {"$sort": {"documents": -1, "_id": 1}},
            {"$limit": _UNKNOWN_MAX},
        ]
        found = self._collection.aggregate(pipeline)
        return [UnknownTask(each["_id"], each["documents"], each["seconds"] or 0.0) for each in found]
