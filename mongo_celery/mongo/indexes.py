"""
Indexes that are created at the first use of a collection. Without indexes everything works, but slowly.

MongoDB creates an index between transactions: it waits for all that have written to the collection, and blocks other
writes meanwhile, for up to a minute. So a creation has a time limit and is tried again later. Until then everything
works without the index. The limit includes reading the collection, because MongoDB does not limit this. It is
`WAIT_SECONDS` for a writer. A background job allows more for a large collection, and writes may hang that long while a
transaction is open. A collection with few documents, or with its index, never hangs.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pymongo
from pymongo import IndexModel
from pymongo.collection import Collection
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery.mongo.opening import ANSWER_SECONDS
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.steps import run_sync
from mongo_celery.mongo.table import create_indexes, reading_seconds
from mongo_celery.mongo.verdicts import is_transient

logger = logging.getLogger("mongo_celery.indexes")

WAIT_SECONDS = 3.0
"""
The time that a writer waits for creating indexes, or for another thread that creates them. A background job waits
longer, depending on the number of documents.
"""

AGAIN_SECONDS = 60.0
"""Seconds before another attempt."""


class Indexes:
    """
    The indexes of one collection. The first process that needs them creates them.

    Args:
        collection: the collection.
        wanted: keys, name and options. An equal index with another name is enough.
        otherwise: the effect of their absence, in words.
    """

    def __init__(self, collection: Collection[Any], wanted: Sequence[IndexModel], otherwise: str) -> None:
        self._collection = collection
        self._wanted = wanted
        self._otherwise = otherwise
        self._is_settled = False
        self._again_at = 0.0
        self._begun_at = -math.inf
        self._lock = threading.Lock()

    @property
    def is_settled(self) -> bool:
        """Return True if this process needs no further attempt to create the indexes."""
        return self._is_settled

    def exist(self) -> bool | None:
        """Return True if all indexes exist. None if the user may not list them."""
        try:
            with pymongo.timeout(ANSWER_SECONDS):
                found = [{**each, "key": dict(each["key"])} for each in self._collection.index_information().values()]
        except OperationFailure as error:
            if is_transient(error):
                raise
            return None
        return all(any(is_index(each, wanted) for each in found) for wanted in self._wanted)

    def ensure(self, *, patiently: bool) -> None:
        """
        Create missing indexes, unless that failed recently. It never fails.

        If another thread creates them, a background job continues without them. A writer waits, but not for a creation
        that began long ago.

        Args:
            patiently: wait as long as reading the collection may take.
        """
        if self._is_settled or time.monotonic() < self._again_at:
            return
        others = 0.0 if patiently else self._begun_at + WAIT_SECONDS - time.monotonic()
        if not self._lock.acquire(timeout=max(0.0, others)):
            return
        try:
            if not self._is_settled and time.monotonic() >= self._again_at:
                self._begun_at = time.monotonic()
                with nullcontext() if patiently else pymongo.timeout(WAIT_SECONDS):
                    self._is_settled = self._create(patiently=patiently)
                self._again_at = 0.0 if self._is_settled else time.monotonic() + AGAIN_SECONDS
        finally:
            self._lock.release()

    def _create(self, *, patiently: bool) -> bool:
        """Create missing indexes. Return False if a later attempt is needed. Log a missing right once."""
        begun, seconds = False, WAIT_SECONDS
        names = ", ".join(each.document["name"] for each in self._wanted)
        try:
            if self.exist():
                return True
            seconds += reading_seconds(self._collection) if patiently else 0.0
            begun = True
            with pymongo.timeout(seconds):
                run_sync(create_indexes(self._collection, self._wanted))
        except PyMongoError as error:
            if begun and error.timeout:
                logger.warning(
                    "The index %s on %s could not be created. A transaction that wrote there is open, a member "
                        "of the replica set is down, or the collection takes longer than %.0f s to read (then "
                        "create the index yourself). The next attempt is in %.0f s. Until then %s.",
                    names, self._collection.full_name, seconds, AGAIN_SECONDS, self._otherwise,
                    extra={"event": "index_delayed"},
                )  # fmt: skip
            if is_transient(error) or not isinstance(error, OperationFailure):
                return False  # others log an outage
            logger.warning(
                "The index %s on %s cannot be created (%s). Without it %s. Create it yourself.",
                names, self._collection.full_name, short(error), self._otherwise,
                extra={"event": "index_refused"},
            )  # fmt: skip
        return True


def is_index(found: Mapping[str, Any], wanted: IndexModel) -> bool:
    """Return True if a stored index has the same keys and condition, whatever its name."""
    condition = "partialFilterExpression"
    keys = found["key"].items() if isinstance(found["key"], Mapping) else found["key"]
    return list(keys) == list(wanted.document["key"].items()) and found.get(condition) == wanted.document.get(condition)
