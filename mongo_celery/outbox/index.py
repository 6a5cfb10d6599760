"""
The indexes of an outbox, which come with its first use, and what can be learnt through the one on what is pending.

MongoDB creates an index between transactions: it waits for all that have written to the collection, and other writes
to it wait behind that, for a minute if need be. So a creation is given up after a time, and begun again later; until
then everything goes on without the index. The time is one for all of it, reading the collection included: MongoDB
bounds no part of it. It is `WAIT_SECONDS` for who writes; a relay gives a large collection more, and for so long may
writes hang there while a transaction is open. One that has few documents, or its index already, never sees that.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pymongo
from pymongo.collection import Collection
from pymongo.errors import OperationFailure, PyMongoError
from pymongo.read_concern import ReadConcern

from mongo_celery.mongo.opening import ANSWER_SECONDS
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.table import reading_seconds
from mongo_celery.mongo.verdicts import is_transient
from mongo_celery.outbox.claims import PendingClaims
from mongo_celery.outbox.pending import PendingField

logger = logging.getLogger("mongo_celery.outbox")

WAIT_SECONDS = 3.0
"""
How long a writer waits for the creation of all indexes of an outbox, and for another thread that creates them; a relay
takes for each so much longer as its collection has documents.
"""

AGAIN_SECONDS = 60.0
"""After so long the creation of an index is tried again."""

"""A slow server reads so many to create an index; who writes meanwhile waits only where a transaction is open."""

_NONE = {"documents": 0, "pending": 0, "seconds": None, "failing": 0, "stuck": 0, "other_apps": 0}


@dataclass(frozen=True, slots=True)
class OutboxIndex:
    """
    An index that an outbox needs.

    Attributes:
        collection: on which.
        name: that it gets; another is as good.
        keys: fields and directions.
        otherwise: what comes of its absence, in words.
        condition: of the documents that it holds; None for all.
        options: more, where it is created.
    """

    collection: Collection[Any]
    name: str
    keys: Sequence[tuple[str, int]]
    otherwise: str
    condition: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def exists(self) -> bool | None:
        """Whether it is there, whatever its name; None where the user may not look."""
        try:
            with pymongo.timeout(ANSWER_SECONDS):
                found = self.collection.index_information().values()
        except OperationFailure as error:
            if is_transient(error):
                raise
            return None
        return any(map(self.is_like, found))

    def is_like(self, found: Mapping[str, Any]) -> bool:
        """Return True if a stored index has these keys and this condition, whatever its name."""
        keys = found["key"].items() if isinstance(found["key"], Mapping) else found["key"]
        return list(keys) == list(self.keys) and found.get("partialFilterExpression") == self.condition

    def create(self, *, patiently: bool) -> bool:
        """
        Create it if it is not there; without the right to do so, say it and go on without.

        Args:
            patiently: wait as long as it may take to read the collection.

        Returns:
            Whether this is settled; False where it has to be tried again.
        """
        partial: dict[str, Any] = {} if self.condition is None else {"partialFilterExpression": self.condition}
        begun, seconds = False, WAIT_SECONDS
        try:
            if self.exists():
                return True
            seconds += reading_seconds(self.collection) if patiently else 0.0
            begun = True
            with pymongo.timeout(seconds):
                self.collection.create_index(self.keys, name=self.name, **partial, **self.options)
        except PyMongoError as error:
            if begun and error.timeout:
                logger.warning(
                    "outbox: the index %s on %s cannot be created while a transaction that has written there is open, "
                    "or a member of the replica set is away, or reading the collection takes longer than %.0f s (then "
                    "create it by hand); it is tried again after %.0f s, and until then %s",
                    self.name, self.collection.full_name, seconds, AGAIN_SECONDS, self.otherwise,
                    extra={"event": "index_delayed"},
                )  # fmt: skip
            if is_transient(error) or not isinstance(error, OperationFailure):
                return False  # an outage has louder witnesses
            logger.warning(
                "outbox: the index %s on %s cannot be created (%s); create it by hand, or %s",
                self.name, self.collection.full_name, short(error), self.otherwise,
                extra={"event": "index_refused"},
            )  # fmt: skip
        return True


class OutboxIndexes:
    """
    The indexes of one outbox, created by the process that first needs them.

    Args:
        indexes: the first is that on what is pending.
    """

    def __init__(self, *indexes: OutboxIndex) -> None:
        self._missing = list(indexes)
        self._again_at = 0.0
        self._begun_at = -math.inf
        self._lock = threading.Lock()

    def ensure(self, *, patiently: bool) -> None:
        """
        Create what is missing, unless it was tried in vain a moment ago; within a bound, and whatever comes of it.

        While another thread is at it, relays go on at once: they need no index. Who writes waits, but not for one that
        was begun long ago.

        Args:
            patiently: as of `OutboxIndex.create`; whoever has something else to do is not patient, and waits
                `WAIT_SECONDS` for all of them together.
        """
        if not self._missing or time.monotonic() < self._again_at:
            return
        others = 0.0 if patiently else self._begun_at + WAIT_SECONDS - time.monotonic()
        if not self._lock.acquire(timeout=max(0.0, others)):
            return
        try:
            if self._missing and time.monotonic() >= self._again_at:
                self._begun_at = time.monotonic()
                with nullcontext() if patiently else pymongo.timeout(WAIT_SECONDS):
                    self._missing = [each for each in self._missing if not each.create(patiently=patiently)]
                self._again_at = time.monotonic() + AGAIN_SECONDS if self._missing else 0.0
        finally:
            self._lock.release()


def of_pending(collection: Collection[Any], pending: PendingField) -> OutboxIndex:
    """The index on documents in which something is pending."""
    return OutboxIndex(
        collection,
        pending.name,
        [(pending.count, 1), (pending.until, 1)],
        "each sweep reads the whole collection",
        {pending.count: {"$gt": 0}},
    )


def due_documents(
    collection: Collection[Any],
    claims: PendingClaims,
    older_than: float,
    limit: int,
    *,
    passing_over: Sequence[Any] = (),
    by_lot: bool = False,
    seconds: float | None = None,
) -> list[Any]:
    """
    Return the `_id`s of documents whose oldest entry has waited so many seconds, and that this process may claim.

    Args:
        collection: of the outbox.
        claims: conditions on its field.
        older_than: the seconds.
        limit: how many at most.
        passing_over: `_id`s of documents that are not wanted.
        by_lot: choose any of them, and read all for that; else the first that the index has.
        seconds: that this may take; None for no bound.

    Raises:
        PyMongoError: it took longer, or MongoDB did not answer.
    """
    condition = claims.claimable(older_than)
    if passing_over:
        condition["_id"] = {"$nin": list(passing_over)}
    with nullcontext() if seconds is None else pymongo.timeout(seconds):
        if by_lot:
            lot: list[dict[str, Any]] = [{"$match": condition}, {"$project": {"_id": 1}}, {"$sample": {"size": limit}}]
            return [each["_id"] for each in _local(collection).aggregate(lot)]
        return [each["_id"] for each in _local(collection).find(condition, {"_id": 1}, limit=limit)]


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
                "failing": _how_many({"$gt": [failed, 0]}),
                "stuck": _how_many(stuck_after is not None and {"$gte": [failed, stuck_after]}),
                "other_apps": _how_many({"$not": [claims.ours]}),
            },
        },
        {"$set": {"seconds": {"$max": [0, {"$divide": [{"$subtract": ["$$NOW", "$oldest"]}, 1000]}]}}},
    ]
    rows: Iterator[dict[str, Any]] = iter(_local(collection).aggregate(pipeline))
    return next(rows, _NONE)


def _how_many(condition: Any) -> dict[str, Any]:
    return {"$sum": {"$cond": [condition, 1, 0]}}


def _local(collection: Collection[Any]) -> Collection[Any]:
    """Removals are not majority writes: a majority read would still show what was delivered a moment ago."""
    return collection.with_options(read_concern=ReadConcern("local"))
