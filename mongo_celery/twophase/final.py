"""The documents of transactions that are final, or that nobody has begun: read in their order, and removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mongo_celery.mongo.identity import same_bson
from mongo_celery.mongo.verdicts import ErrorContext
from mongo_celery.twophase.log import TransactionLog, is_older
from mongo_celery.twophase.states import FINAL, State

Document = dict[str, Any]

_READ_AT_ONCE = 2000
"""However many of them are wanted: a call reads no more, so that it ends in time."""


@dataclass(frozen=True, slots=True)
class Page:
    """
    What was found among some documents.

    Attributes:
        found: ids and states, and what compensates them, in the order of their ids.
        last: the last one that was read, whether it is wanted or not; None where none was left to read.
    """

    found: Sequence[Document]
    last: Document | None


class FinalTransactions:
    """
    Those of one log that nobody has advanced for some time, nor will: final, or never begun and not queued.

    Args:
        log: of the transactions.
        older_than: seconds since the last step, by the server's clock.
        any_application: also those of other applications.
    """

    def __init__(self, log: TransactionLog, older_than: float, *, any_application: bool) -> None:
        self._log = log
        self._collection = log.collection
        self._older_than = older_than
        whose: Document = {} if any_application else log.ours()
        # Not a list of states, as damaged code may leave it: $in would find it by any of them.
        initial = str(State.INITIAL)
        is_one = {"$in": [*FINAL, initial], "$not": {"$type": "array"}}
        never_begun = {"queuedAt": None, "lastModified": {"$type": "date"}}
        self._condition: Document = {
            "state": is_one,
            "$or": [{"state": {"$ne": initial}}, never_begun],
            "$expr": is_older(older_than),
            **whose,
        }

    @staticmethod
    def concern_of(log: TransactionLog) -> ErrorContext:
        """Whom an error of MongoDB concerns, and what whoever removes transactions needs."""
        name = log.collection.full_name
        return ErrorContext(f"the transactions' collection {name}", f"find and remove on {name}")

    def page(self, condition: Mapping[str, Any], last: Document | None) -> Page:
        """
        Read on, in the order of the ids.

        Args:
            condition: which of them are wanted.
            last: the last one that was read; None at the beginning.
        """
        by_id = [("_id", 1)]
        read = self._collection.find({}, {"_id": 1}).sort(by_id).hint(by_id).limit(_READ_AT_ONCE)
        if last is not None:
            # A $gt would end at the last id of the same type, and as an expression read all before it on MongoDB 4.4.
            read = read.min([("_id", last["_id"])]).limit(_READ_AT_ONCE + 1)
        ids = [each["_id"] for each in read]
        if last is not None and ids and same_bson(ids[0], last["_id"]):  # else it was removed
            del ids[0]
        # Only among these: by a condition of its own a call would read all that does not meet it.
        wanted = {**self._condition, **condition, "_id": {"$in": ids}}
        found = self._collection.find(wanted, {"state": 1, "compensatedBy": 1}).sort(by_id).hint(by_id)
        return Page(list(found) if ids else [], {"_id": ids[-1]} if ids else None)

    def holds(self, identity: Any) -> bool:
        """Whether the transaction of that id is one of them."""
        return self._finds({**self._condition, "_id": {"$eq": identity}})

    def has_any(self, identity: Any) -> bool:
        """Whether there is a transaction of that id, final or not."""
        return self._finds({"_id": {"$eq": identity}})

    def has_open(self, identity: Any) -> bool:
        """Whether there is a transaction of that id that is not final."""
        return self._finds({"_id": {"$eq": identity}, "state": {"$nin": list(FINAL)}})

    def remove(self, ids: Sequence[Any]) -> None:
        """Remove some, for good, as far as they are such ones."""
        # Asked for: MongoDB 4.4 does not know $$NOW in deletes.
        is_old = {"$expr": is_older(self._older_than, now=self._log.server_time())}
        self._collection.delete_many({**self._condition, **is_old, "_id": {"$in": list(ids)}})

    def _finds(self, condition: Document) -> bool:
        return self._collection.find_one(condition, {"_id": 1}) is not None
