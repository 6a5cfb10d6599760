"""Indexes that are made at the first use, and are not needed for anything to be right."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pymongo
from pymongo import IndexModel
from pymongo.collection import Collection
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery.mongo.verdicts import brief, is_transient

logger = logging.getLogger("mongo_celery.twophase")


_AT_ONCE_SECONDS = 1.0
"""How long a call waits for its indexes: enough where the collection is new, or they are there."""

_AGAIN_SECONDS = 600.0


class Indexes:
    """
    The indexes of one collection, made once in a process.

    A call waits for them for a moment only. Where that does not suffice, since the collection is large or an open
    transaction keeps it, a thread of its own makes them, however long it takes. What the server refuses (a right, an
    index of the same name) is said once: reads are slower without them, and what should expire stays.

    Attributes:
        is_made: whether there is nothing to do in this process any more.
    """

    def __init__(self, collection: Collection[Any], wanted: Sequence[IndexModel]) -> None:
        self._collection = collection
        self._wanted = wanted
        self._lock = threading.Lock()
        self.is_made = False
        self._due = -math.inf

    def make(self) -> None:
        """Make what is missing, and the collection with it; or see to it that it is made later. It never fails."""
        if self.is_made or not self._is_my_turn():
            return
        try:
            with pymongo.timeout(_AT_ONCE_SECONDS):
                self._collection.create_indexes(list(self._wanted))
        except OperationFailure as error:
            if not is_transient(error):
                self._refused(error)
                return
        except PyMongoError:
            pass
        else:
            self.is_made = True
            return
        with suppress(RuntimeError):  # the interpreter is ending
            threading.Thread(target=self._make_at_leisure, name="mongo-celery-indexes", daemon=True).start()

    def _is_my_turn(self) -> bool:
        """One thread tries, and others go on; if it does not succeed, another one after some minutes."""
        with self._lock:
            now = time.monotonic()
            if now < self._due:
                return False
            self._due = now + _AGAIN_SECONDS
            return True

    def _make_at_leisure(self) -> None:
        try:
            self._collection.create_indexes(list(self._wanted))
        except Exception as error:  # noqa: BLE001 - the client may be closed by now, too
            self._refused(error)
        else:
            self.is_made = True

    def _refused(self, error: Exception) -> None:
        logger.warning(
            "the indexes of %s could not be made (%s): reads of what is unfinished take longer, and what should expire "
            "is kept. Grant createIndex there, or make them by hand.",
            self._collection.full_name,
            brief(error),
            extra={"event": "transaction_indexes_missing"},
        )
        self.is_made = isinstance(error, OperationFailure) and not is_transient(error)
