"""Indexes that are made at the first use, and are not needed for anything to be right."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

from pymongo import IndexModel
from pymongo.collection import Collection
from pymongo.errors import OperationFailure

from mongo_celery.mongo.verdicts import brief, is_transient

logger = logging.getLogger("mongo_celery.twophase")


class Indexes:
    """
    The indexes of one collection, made once in a process.

    What the server refuses (a right, an index of the same name) is said once: reads are slower without them, and what
    should expire stays.
    """

    def __init__(self, collection: Collection[Any], wanted: Sequence[IndexModel]) -> None:
        self._collection = collection
        self._wanted = wanted
        self._lock = threading.Lock()
        self._is_made = False

    def make(self) -> None:
        """
        Make what is missing, and the collection with it.

        Raises:
            PyMongoError: no server has answered; the next call tries again.
        """
        if self._is_made:
            return
        try:
            self._collection.create_indexes(list(self._wanted))
        except OperationFailure as error:
            if is_transient(error):
                raise
            with self._lock:
                if not self._is_made:
                    logger.warning(
                        "the indexes of %s could not be made (%s): reads of what is unfinished take longer, and what "
                        "should expire is kept. Grant createIndex there, or make them by hand.",
                        self._collection.full_name,
                        brief(error),
                        extra={"event": "transaction_indexes_missing"},
                    )
        self._is_made = True
