"""The transactions' own documents: every query on them has its home here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import bson
from bson import ObjectId
from bson.int64 import Int64
from pymongo import ReturnDocument
from pymongo.collection import Collection
from pymongo.errors import DuplicateKeyError

from mongo_celery.errors import TransactionStateError
from mongo_celery.mongo.expressions import created, literal, millis
from mongo_celery.mongo.verdicts import Concern
from mongo_celery.twophase.states import State, Transaction, read_transaction

Document = dict[str, Any]

UNFINISHED = (State.PENDING, State.APPLIED, State.CANCELING)
_MODIFIED = {"$convert": {"input": "$lastModified", "to": "date", "onError": None, "onNull": None}}
_NOW = {"$currentDate": {"lastModified": True}}


class TransactionLog:
    """
    Reads and writes of transaction documents.

    Args:
        collection: with majority writes, majority reads, primary.
        application: this application's marker.
        accounts: namespace of the documents that transfers name.
    """

    def __init__(self, collection: Collection[Document], application: str, accounts: str) -> None:
        self.collection = collection
        self._application = application
        self._accounts = accounts

    @property
    def concern(self) -> Concern:
        """Whom an error of MongoDB concerns, and what transactions need."""
        name = self.collection.full_name
        return Concern(
            f"the transactions' collection {name} or one of their participants",
            f"find, insert and update on {name}, and find and update on the participants' collections",
        )

    def insert(self, fields: Mapping[str, Any], transaction_id: Any, *, again: bool = False) -> None:
        """
        Store a new transaction in state initial, with the server's time.

        Args:
            again: whether an answer to the same was lost; then one with the same fields is taken for what was stored.
                It may be a twin's who asked for the same under the same id: it is carried out once in either case.

        Raises:
            TransactionStateError: there is one of this id.
        """
        begun = {"state": str(State.INITIAL), "lastModified": "$$NOW"}
        try:
            # An upsert, since only an update can set the server's time.
            found = self.collection.find_one_and_update(
                {"_id": {"$eq": transaction_id}},
                created({"$mergeObjects": [{"_id": "$_id"}, literal(dict(fields)), begun]}),
                projection={"_id": 1},
                upsert=True,
                return_document=ReturnDocument.BEFORE,
            )
        except DuplicateKeyError:
            found = {}
        if found is not None and not (again and self._has(transaction_id, fields)):
            raise TransactionStateError(
                f"there is a transaction {transaction_id!r} already; ids are used once. Nothing was changed.",
                id=transaction_id,
            )

    def _has(self, transaction_id: Any, fields: Mapping[str, Any]) -> bool:
        """Whether the stored one has these fields, byte for byte."""
        options = self.collection.codec_options
        stored = self.collection.find_one({"_id": {"$eq": transaction_id}}, dict.fromkeys(fields, 1)) or {}
        same = {name: stored[name] for name in fields if name in stored}
        return bson.encode(same, codec_options=options) == bson.encode(dict(fields), codec_options=options)

    def get(self, transaction_id: Any) -> Transaction:
        """
        A transaction.

        Raises:
            TransactionStateError: there is none, or its state or shape is unknown.
        """
        document = self.collection.find_one({"_id": {"$eq": transaction_id}})
        if document is None:
            raise TransactionStateError(f"there is no transaction {transaction_id!r}.", id=transaction_id)
        return self.read(document)

    def read(self, document: Mapping[str, Any]) -> Transaction:
        """Understand a document; errors as of `states.read_transaction`."""
        return read_transaction(document, self._accounts)

    def claim(self, seen: Transaction, coordinator: ObjectId, *, any_application: bool = False) -> Transaction | None:
        """Take a transaction nobody has begun: initial becomes pending. None if somebody was faster."""
        guard = {"_id": {"$eq": seen.id}, "state": str(State.INITIAL), **({} if any_application else self._ours())}
        return self._update(guard, {"state": str(State.PENDING), **self._marks(coordinator)}, version=True)

    def take_over(
        self,
        seen: Transaction,
        coordinator: ObjectId,
        *,
        older_than: float | None = None,
        any_application: bool = False,
    ) -> Transaction | None:
        """
        Become the coordinator of an unfinished transaction, in the state and version that were seen.

        Args:
            seen: as it was read.
            coordinator: who takes it.
            older_than: only if its last step was so many seconds ago, by the server's clock.
            any_application: whether it may belong to another application.
        """
        guard: Document = dict(seen.guard)
        if not any_application:
            guard.update(self._ours())
        if older_than is not None:
            guard["$expr"] = _older_than(older_than)
        return self._update(guard, self._marks(coordinator), version=True)

    def touch(self, mine: Transaction) -> bool:
        """Prove by a majority write that a transaction is still in this state and mine."""
        return bool(self.collection.update_one(mine.guard, _NOW).matched_count)

    def advance(self, mine: Transaction, state: State, **fields: Any) -> Transaction | None:
        """The next state; None if I have been overtaken."""
        return self._update(mine.guard, {"state": str(state), **fields}, version=False)

    def cancel(self, seen: Transaction, coordinator: ObjectId, reason: str) -> Transaction | None:
        """From pending to canceling, by a new coordinator; None if it is no longer as it was seen."""
        fields = {"state": str(State.CANCELING), "reason": reason, **self._marks(coordinator)}
        return self._update(seen.guard, fields, version=True)

    def drop(self, seen: Transaction, reason: str) -> Transaction | None:
        """From initial to canceled: nothing was done yet."""
        return self._update(seen.guard, {"state": str(State.CANCELED), "reason": reason}, version=False)

    def note_queued(self, transaction_id: Any) -> bool:
        """
        Note that Celery has been asked to advance a transaction: this application's recovery then begins it too.

        Returns:
            False if nothing is left to do, or it is another application's.
        """
        states = [str(each) for each in (State.INITIAL, *UNFINISHED)]
        guard = {"_id": {"$eq": transaction_id}, "state": {"$in": states}, **self._ours()}
        # Marked already: another application may know neither its accounts nor its clusters.
        change = {"$set": {"application": self._application}, "$currentDate": {"queuedAt": True}}
        return bool(self.collection.update_one(guard, change).matched_count)

    def abandoned(
        self, older_than: float, *, any_application: bool, limit: int, without: Sequence[Any] = ()
    ) -> list[Document]:
        """
        Documents that were left unfinished, the oldest step first: what recovery takes over.

        Args:
            older_than: seconds since the last step, by the server's clock.
            any_application: also those of other applications.
            limit: how many at most.
            without: ids that were looked at already.
        """
        whose: Document = {} if any_application else self._ours()
        left = {"state": {"$in": [str(state) for state in UNFINISHED]}}
        queued = {"state": str(State.INITIAL), "queuedAt": {"$exists": True}}
        condition = {**whose, "$or": [left, queued], "$expr": _older_than(older_than), "_id": {"$nin": list(without)}}
        return list(self.collection.find(condition).sort("lastModified", 1).limit(limit))

    def find(self, states: Sequence[str], older_than: float | None, limit: int) -> Iterable[Document]:
        """Documents for people to look at, the oldest step first."""
        condition: Document = {"state": {"$in": list(states)}} if states else {}
        if older_than is not None:
            condition["$expr"] = _older_than(older_than)
        return self.collection.find(condition).sort("lastModified", 1).limit(limit)

    def standing(self) -> dict[State, tuple[int, float]]:
        """How many transactions are not final, by state, and for how many seconds the oldest has stood there."""
        states = [str(state) for state in (State.INITIAL, *UNFINISHED)]
        age = {"$subtract": ["$$NOW", _MODIFIED]}
        stages: list[Document] = [
            {"$match": {"state": {"$in": states}}},
            {"$group": {"_id": "$state", "count": {"$sum": 1}, "oldest": {"$max": age}}},
        ]
        found = self.collection.aggregate(stages)
        return {State(row["_id"]): (row["count"], max(row["oldest"] or 0, 0) / 1000) for row in found}

    def _ours(self) -> Document:
        return {"application": {"$in": [None, self._application]}}

    def _marks(self, coordinator: ObjectId) -> Document:
        return {"application": self._application, "driver": coordinator}

    def _update(self, guard: Document, fields: Document, *, version: bool) -> Transaction | None:
        change: Document = {"$set": fields, **_NOW}
        if version:
            change["$inc"] = {"version": Int64(1)}
        found = self.collection.find_one_and_update(guard, change, return_document=ReturnDocument.AFTER)
        return None if found is None else self.read(found)


def _older_than(seconds: float) -> Document:
    """By the server's clock; a time that is missing or is no time counts as long ago."""
    return {"$lte": [_MODIFIED, {"$subtract": ["$$NOW", millis(seconds)]}]}
