"""Indexes of ours in collections that somebody else may index, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pymongo
from pymongo import IndexModel
from pymongo.collection import Collection
from pymongo.errors import OperationFailure

from mongo_celery.mongo.opening import ANSWER_SECONDS
from mongo_celery.mongo.verdicts import Code

_THERE = (Code.IndexOptionsConflict, Code.IndexKeySpecsConflict)
_DOCUMENTS_A_SECOND = 10_000


def create_indexes(collection: Collection[Any], indexes: Sequence[IndexModel]) -> None:
    """
    Create indexes, all by one reading of the collection.

    An index that exists with other options, such as a TTL that a DBA has changed, stays as it is.

    Raises:
        PyMongoError: any of them may be missing.
    """
    try:
        collection.create_indexes([*indexes])
    except OperationFailure as error:
        if error.code not in _THERE:
            raise
        if len(indexes) > 1:  # the server has made none of them
            for each in indexes:
                create_indexes(collection, [each])


def reading_seconds(collection: Collection[Any]) -> float:
    """
    Return the seconds in which an index of a collection can be expected: it is read as a whole.

    Raises:
        PyMongoError: MongoDB did not answer.
    """
    with pymongo.timeout(ANSWER_SECONDS):
        return collection.estimated_document_count() / _DOCUMENTS_A_SECOND
