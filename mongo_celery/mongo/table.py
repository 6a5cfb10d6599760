"""
Guarded writes and reads on one collection, each within a time.

A right that is held for a time must not be used later than it allows, so a call that concerns one may not wait for
a server for as long as the driver would.

The writes of every run that succeeds (claim, handled, commit; inline: claim, position) are `unretried`: plain
commands, without the driver's own retries. Each of them is either harmless to repeat or ended by its owner when its
answer was lost, so callers repeat it themselves; the server's bookkeeping for retryable writes (a session record for
each, and for a find-and-modify a copy of the document) would be paid for every run and used for none. What is rarer,
such as a position inside of a run (`advance`), leaves its repetition to the driver.
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
from mongo_celery.mongo.verdicts import Code

Update = Mapping[str, Any] | Sequence[Mapping[str, Any]]
MAJORITY: Mapping[str, Any] = {"w": "majority"}
ACKNOWLEDGED: Mapping[str, Any] = {"w": 1}
TRANSACTION_SECONDS = 5.0
JOURNALED: Mapping[str, Any] = {"w": 1, "j": True}
_WHOLE = 1_000_000  # in one answer what fits into 16 MB; by default the first one has 101 documents


def call_timeout(ttl: float) -> float:
    """Hard limit in seconds of one MongoDB call that must not outlive a right of `ttl` seconds."""
    return ttl * 0.3


def find_duplicates(error: BulkWriteError) -> list[int]:
    """
    Return the places of requests of an unordered bulk whose document existed already, if nothing else failed.

    Raises:
        BulkWriteError: the time was over.
        OperationFailure: what the first of the others said; any of them may have been made.
    """
    if error.timeout:
        raise error
    found = error.details or {}
    errors = found.get("writeErrors", ())
    failures = [each for each in errors if each["code"] != Code.DuplicateKey]
    failures += found.get("writeConcernErrors", ())
    if failures:  # the whole has a code of its own, which says nothing
        raise OperationFailure(failures[0].get("errmsg", "write failed"), failures[0]["code"], found) from error
    return [each["index"] for each in errors]


class Table:
    """
    One collection whose every call ends within a time, by an answer or a `PyMongoError`.

    Args:
        collection: where, with the concerns that hold for all calls.
        timeout: hard limit of each call in seconds.
    """

    def __init__(self, collection: Collection[dict[str, Any]], timeout: float) -> None:
        self.collection = collection
        self.timeout = timeout
        self._database, self._name = collection.database, collection.name
        self._types = collection.codec_options  # a command would read its answer by the driver's defaults

    def limit(self) -> AbstractContextManager[Any]:
        """The limit of one call for all that is called inside."""
        return pymongo.timeout(self.timeout)

    @contextmanager
    def session(self) -> Iterator[ClientSession]:
        """Open a session for one transaction, within its time."""
        with (
            pymongo.timeout(max(self.timeout, TRANSACTION_SECONDS)),
            open_session(self.collection.database.client) as session,
        ):
            yield session

    def find_one(self, query: Mapping[str, Any], fields: Any = None, **options: Any) -> dict[str, Any] | None:
        """One document, or None."""
        with self.limit():
            return self.collection.find_one(query, fields, **options)

    def find(
        self, query: Mapping[str, Any], fields: Any = None, session: ClientSession | None = None
    ) -> list[dict[str, Any]]:
        """All documents; reading them to the end counts."""
        with self.limit():
            return list(self.collection.find(query, fields, batch_size=_WHOLE, session=session))

    def aggregate(self, stages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return all rows, however many have to be sorted. Only a sort asks for the disk: Atlas M0 refuses that."""
        on_disk: dict[str, Any] = {"allowDiskUse": True} if any("$sort" in stage for stage in stages) else {}
        with self.limit():
            return list(self.collection.aggregate(stages, **on_disk))

    def update(self, guard: Mapping[str, Any], change: Update, *, upsert: bool = False) -> bool:
        """Update the document that the guard names; False when none matched."""
        with self.limit():
            return self.collection.update_one(guard, change, upsert=upsert).matched_count == 1

    def find_and_update(self, guard: Mapping[str, Any], change: Update) -> dict[str, Any] | None:
        """Update the document that the guard names, and return it as it is then, or None."""
        with self.limit():
            return self.collection.find_one_and_update(guard, change, return_document=ReturnDocument.AFTER)

    def delete_all(self, guard: Mapping[str, Any]) -> None:
        """Delete every document that the guard names."""
        with self.limit():
            self.collection.delete_many(guard)

    def write_all(self, requests: Sequence[Any]) -> None:
        """
        Make many writes in one call, each for itself: one that fails keeps no other from being made.

        Documents that are there already, of inserts and of upserts, are no failure: what is stored then says the rest.

        Raises:
            PyMongoError: as of `find_duplicates`; any of them may have been made.
        """
        if not requests:
            return
        try:
            with self.limit():
                self.collection.bulk_write(requests, ordered=False)
        except BulkWriteError as error:
            find_duplicates(error)  # raises whatever else has failed

    def update_unretried(self, guard: Mapping[str, Any], change: Update, concern: Mapping[str, Any] = MAJORITY) -> bool:
        """As `update`, by a plain command; the collection's own write concern does not count."""
        updates = [{"q": guard, "u": change}]
        return bool(self._run({"update": self._name, "updates": updates, "writeConcern": concern})["n"])

    def update_timed(self, guard: Mapping[str, Any], change: Update) -> Timestamp | None:
        """
        As `update_unretried`, by majority.

        Returns:
            The cluster time of the write, of its own entry in the oplog; None where nothing matched.

        Raises:
            OperationFailure: also where the server gave no time, as a set does that still makes its signing keys.
        """
        updates = [{"q": guard, "u": change}]
        answer = self._run({"update": self._name, "updates": updates, "writeConcern": MAJORITY})
        if not answer["n"]:  # looked at first: what was refused is answered with another time
            return None
        if not isinstance(answer.get("operationTime"), Timestamp):
            raise OperationFailure("the server has given no operationTime", Code.Location51144, dict(answer))
        time: Timestamp = answer["operationTime"]
        return time

    def update_each_unretried(self, guards: Sequence[Mapping[str, Any]], change: Update) -> int:
        """The same update for each document that a guard names, by one plain command; how many matched."""
        updates = [{"q": guard, "u": change} for guard in guards]
        command = {"update": self._name, "updates": updates, "ordered": False, "writeConcern": MAJORITY}
        return int(self._run(command)["n"])

    def find_and_update_unretried(self, guard: Mapping[str, Any], change: Update, fields: Mapping[str, Any]) -> Any:
        """As `find_and_update`, by a plain command and a majority write; only some fields are returned."""
        command = {
            "findAndModify": self._name,
            "query": guard,
            "update": change,
            "new": True,
            "fields": fields,
            "writeConcern": MAJORITY,
        }
        return self._run(command)["value"]

    def _run(self, command: dict[str, Any]) -> Mapping[str, Any]:
        with pymongo.timeout(self.timeout):
            answer: dict[str, Any] = self._database.command(command, codec_options=self._types)
        failures = [*answer.get("writeErrors", ()), *filter(None, [answer.get("writeConcernError")])]
        if failures:  # a write concern that failed leaves the outcome open
            raise OperationFailure(failures[0].get("errmsg", "write failed"), failures[0].get("code"), answer)
        return answer


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
