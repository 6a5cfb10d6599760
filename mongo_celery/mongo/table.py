"""
Guarded writes and reads on one collection, each with a time limit.

A claim or lease must not be used after its expiry. So a call under it waits for a server for a shorter time than the
driver would.

The writes of every successful run (claim, handled, commit; inline: claim, position) are `unretried`: plain commands
without the driver's retries. Callers repeat them. Each repetition is harmless, or its owner ends it after a lost
answer. Retryable writes would cost every run the server's bookkeeping (a session record for each, and for a
find-and-modify a copy of the document), which no run needs. Rarer writes, such as a position inside a run (`advance`),
use the driver's retries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pymongo
from bson import Timestamp
from pymongo import IndexModel, ReturnDocument
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import BulkWriteError, OperationFailure

from mongo_celery.mongo.opening import ANSWER_SECONDS, open_session
from mongo_celery.mongo.steps import AnyCollection, Steps
from mongo_celery.mongo.verdicts import Code, list_failures

Update = Mapping[str, Any] | Sequence[Mapping[str, Any]]
MAJORITY: Mapping[str, Any] = {"w": "majority"}
ACKNOWLEDGED: Mapping[str, Any] = {"w": 1}
TRANSACTION_SECONDS = 5.0
JOURNALED: Mapping[str, Any] = {"w": 1, "j": True}
_WHOLE = 1_000_000  # as much as fits into 16 MB in one answer, instead of 101 documents


def call_timeout(ttl: float) -> float:
    """Return the time limit in seconds of one MongoDB call under a right of `ttl` seconds."""
    return ttl * 0.3


def find_duplicates(error: BulkWriteError) -> list[int]:
    """
    Return the places of requests in an unordered bulk write whose document already existed.

    Raises:
        BulkWriteError: the time was up.
        OperationFailure: the first other failure. Any of the writes may have been made.
    """
    if error.timeout:
        raise error
    _raise_failure(error.details, but=Code.DuplicateKey)
    return [each["index"] for each in error.details["writeErrors"]]


def _raise_failure(answer: Mapping[str, Any], but: Code | None = None) -> None:
    """Raise the first failure in an answer with its own code. The answer's overall code has no information."""
    for failure in list_failures(answer):
        if failure.get("code") != but:
            raise OperationFailure(failure.get("errmsg", "write failed"), failure.get("code"), answer)


class Table:
    """
    One collection. Every call ends within a time limit, with an answer or a `PyMongoError`.

    Args:
        collection: a collection with the concerns for all calls.
        timeout: time limit of each call in seconds.
    """

    def __init__(self, collection: Collection[dict[str, Any]], timeout: float) -> None:
        self.collection = collection
        self.timeout = timeout
        self._database, self._name = collection.database, collection.name
        self._types = collection.codec_options  # a command would decode its answer with the driver's defaults

    def limit(self) -> AbstractContextManager[Any]:
        """Apply one call's time limit to all calls in the block."""
        return pymongo.timeout(self.timeout)

    @contextmanager
    def session(self) -> Iterator[ClientSession]:
        """Open a session for one transaction, within its time limit."""
        with (
            pymongo.timeout(max(self.timeout, TRANSACTION_SECONDS)),
            open_session(self.collection.database.client) as session,
        ):
            yield session

    def find_one(self, query: Mapping[str, Any], fields: Any = None, **options: Any) -> dict[str, Any] | None:
        """Return one document, or None."""
        with self.limit():
            return self.collection.find_one(query, fields, **options)

    def find(
        self, query: Mapping[str, Any], fields: Any = None, session: ClientSession | None = None
    ) -> list[dict[str, Any]]:
        """Return all documents. The limit includes reading them to the end."""
        with self.limit():
            return list(self.collection.find(query, fields, batch_size=_WHOLE, session=session))

    def find_raw(self, query: Mapping[str, Any], fields: Any, session: ClientSession | None = None) -> list[bytes]:
        """Return all documents as the server's answers contain them, one after another."""
        with self.limit():
            cursor: Any = self.collection.find_raw_batches(query, fields, batch_size=_WHOLE, session=session)
            return list(cursor)

    def aggregate(self, stages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """
        Return all rows, even if many must be sorted. Only a sort requests the disk, because Atlas M0
        refuses that.
        """
        on_disk: dict[str, Any] = {"allowDiskUse": True} if any("$sort" in stage for stage in stages) else {}
        with self.limit():
            return list(self.collection.aggregate(stages, **on_disk))

    def update(self, guard: Mapping[str, Any], change: Update, *, upsert: bool = False) -> bool:
        """Update the document that the guard selects. Return False if none matched."""
        with self.limit():
            return self.collection.update_one(guard, change, upsert=upsert).matched_count == 1

    def find_and_update(self, guard: Mapping[str, Any], change: Update) -> dict[str, Any] | None:
        """Update the document that the guard selects, and return it afterwards, or None."""
        with self.limit():
            return self.collection.find_one_and_update(guard, change, return_document=ReturnDocument.AFTER)

    def delete_all(self, guard: Mapping[str, Any]) -> None:
        """Delete every document that the guard selects."""
        with self.limit():
            self.collection.delete_many(guard)

    def write_all(self, requests: Sequence[Any]) -> None:
        """
        Make many independent writes in one call. A failure does not stop the others.

        An insert or upsert of an existing document does not count as a failure.

        Raises:
            PyMongoError: as in `find_duplicates`. Any of the writes may have been made.
        """
        if not requests:
            return
        try:
            with self.limit():
                self.collection.bulk_write(requests, ordered=False)
        except BulkWriteError as error:
            find_duplicates(error)  # raises any other failure

    def update_unretried(self, guard: Mapping[str, Any], change: Update, concern: Mapping[str, Any] = MAJORITY) -> bool:
        """Do the same as `update` with a plain command. The collection's own write concern is ignored."""
        return bool(self._run_updates([guard], change, concern)["n"])

    def update_timed(self, guard: Mapping[str, Any], change: Update) -> Timestamp | None:
        """
        Do the same as `update_unretried`, with a majority write.

        Returns:
            The cluster time of the write's oplog entry. None if nothing matched.

        Raises:
            OperationFailure: also if the server gave no time. A set that is still making its signing keys gives none.
        """
        answer = self._run_updates([guard], change)
        if not answer["n"]:  # checked first, because a refusal has another time
            return None
        if not isinstance(answer.get("operationTime"), Timestamp):
            raise OperationFailure("The server returned no operationTime", Code.Location51144, dict(answer))
        time: Timestamp = answer["operationTime"]
        return time

    def update_each_unretried(self, guards: Sequence[Mapping[str, Any]], change: Update) -> int:
        """Make the same update for each document that a guard selects, in one command. Return the number of matches."""
        return int(self._run_updates(guards, change)["n"])

    def find_and_update_unretried(self, guard: Mapping[str, Any], change: Update, fields: Mapping[str, Any]) -> Any:
        """Do the same as `find_and_update`, with a plain command and a majority write. Return only some fields."""
        command = {
            "findAndModify": self._name,
            "query": guard,
            "update": change,
            "new": True,
            "fields": fields,
            "writeConcern": MAJORITY,
        }
        return self._run(command)["value"]

    def _run_updates(
        self, guards: Sequence[Mapping[str, Any]], change: Update, concern: Mapping[str, Any] = MAJORITY
    ) -> Mapping[str, Any]:
        updates = [{"q": guard, "u": change} for guard in guards]
        return self._run({"update": self._name, "updates": updates, "ordered": False, "writeConcern": concern})

    def _run(self, command: dict[str, Any]) -> Mapping[str, Any]:
        with pymongo.timeout(self.timeout):
            answer: dict[str, Any] = self._database.command(command, codec_options=self._types)
        _raise_failure(answer)  # also of a write concern, after which the outcome is unknown
        return answer


_THERE = (Code.IndexOptionsConflict, Code.IndexKeySpecsConflict)
_DOCUMENTS_A_SECOND = 10_000


def create_indexes(collection: AnyCollection, indexes: Sequence[IndexModel]) -> Steps[None]:
    """
    Create indexes with a single read of the collection, as steps.

    An existing index with other options, such as a TTL changed by a DBA, does not change.

    Raises:
        PyMongoError: any of them may be missing.
    """
    try:
        yield collection.create_indexes([*indexes])
    except OperationFailure as error:
        if error.code not in _THERE:
            raise
        if len(indexes) > 1:  # the server has made none of them
            for each in indexes:
                yield from create_indexes(collection, [each])


def reading_seconds(collection: Collection[Any]) -> float:
    """
    Return the expected seconds for creating an index, which reads the whole collection.

    Raises:
        PyMongoError: MongoDB did not answer.
    """
    with pymongo.timeout(ANSWER_SECONDS):
        return collection.estimated_document_count() / _DOCUMENTS_A_SECOND
