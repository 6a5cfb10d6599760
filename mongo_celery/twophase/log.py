"""The log: the collection of transaction documents. Each write is one conditional update."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bson import ObjectId
from bson.int64 import Int64
from pymongo import ASCENDING, IndexModel, ReturnDocument
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.cursor import Cursor
from pymongo.errors import DuplicateKeyError

from mongo_celery.errors import TransactionStateError, TransactionTimeoutError
from mongo_celery.mongo.expressions import REMOVED, after, insert_if_absent, literal, millis
from mongo_celery.mongo.indexes import Indexes
from mongo_celery.mongo.verdicts import ErrorContext
from mongo_celery.twophase.transaction import UNFINISHED, State, Transaction, read_transaction
from mongo_celery.twophase.values import has_operators, storable, to_text

logger = logging.getLogger("mongo_celery.twophase")

Document = dict[str, Any]

_OVERDUE_SECONDS = 30.0
"""After its deadline, a transaction whose last step is this old is abandoned, whatever `older_than` is."""

_AHEAD_SECONDS = 60.0
"""Largest difference between the clocks of two members. A last step that is further ahead counts as long ago."""

_LATE_PART = 0.9
"""
Share of the deadline. Documents are removed only after the deadline, so nothing is stored twice before
this share.
"""

_STOPPED_BY_MAX = 1000
"""Largest length of the reason why a transaction stopped. A server error may repeat a whole document."""

_WIRE_OF_5_0 = 13
"""Version of MongoDB 5.0's protocol."""

_PAGE = 200
"""Number of documents in one read of a log."""

_MODIFIED = {"$convert": {"input": "$lastModified", "to": "date", "onError": None, "onNull": None}}
_IS_OVERDUE = {"$and": [{"$eq": [{"$type": "$deadline"}, "date"]}, {"$lte": ["$deadline", "$$NOW"]}]}

LOG_INDEXES = (
    IndexModel([("state", ASCENDING), ("lastModified", ASCENDING)], name="transactions_by_state"),
    IndexModel([("expiresAt", ASCENDING)], name="expired_transactions", expireAfterSeconds=0, sparse=True),
)


class KnownError(Exception):
    """A transaction with this id exists."""


class OvertakenError(Exception):
    """Another process has changed the transaction or a participant meanwhile. Read it again."""

    def __str__(self) -> str:
        return "other processes kept changing it"


@dataclass(frozen=True, slots=True)
class StateCount:
    """
    The transactions in one state.

    Attributes:
        count: number of transactions.
        oldest_seconds: time since the last step of the oldest one.
        abandoned: number of transactions that recovery should have taken over by now.
    """

    count: int
    oldest_seconds: float
    abandoned: int


class TransactionLog:
    """
    Reads and writes of transaction documents.

    Args:
        collection: a collection with majority writes, majority reads, and reads from the primary.
        application: this application's marker.
        accounts: namespace of the documents in transfers, unless a transfer names another one.
        older_than: seconds after which an unfinished transaction counts as abandoned.
        deadline: seconds after which a transaction that is not applied is canceled.
        retention: seconds for which it is kept when final, or while it has not begun. None for ever.
    """

    def __init__(
        self,
        collection: Collection[Document],
        application: str,
        accounts: str,
        *,
        older_than: float,
        deadline: float,
        retention: float | None,
    ) -> None:
        self.collection = collection
        self._accounts = accounts
        self.older_than = older_than
        self._application = application
        self._deadline = deadline
        self._retention = retention
        self._has_operators: bool | None = None
        self._indexes = Indexes(collection, LOG_INDEXES, "recovery reads all transactions, and none expires")

    @property
    def error_context(self) -> ErrorContext:
        """The subject of MongoDB's errors, and the rights for transactions."""
        name = self.collection.full_name
        return ErrorContext(
            f"the transactions' collection {name} or one of their participants",
            f"find, insert and update on {name}, and find and update on the participants' collections",
        )

    def prepare(self, *, patiently: bool = False) -> None:
        """
        Create the collection and its indexes at first use in this process.

        Args:
            patiently: wait as long as reading the collection may take.
        """
        self._indexes.ensure(patiently=patiently)

    @property
    def is_prepared(self) -> bool:
        """Return True if this process has finished creating the collection and its indexes."""
        return self._indexes.is_settled

    # -- writing -----------------------------------------------------------------------------------

    def insert(
        self,
        fields: Mapping[str, Any],
        transaction_id: Any,
        *,
        state: State = State.INITIAL,
        session: ClientSession | None = None,
        coordinator: ObjectId | None = None,
        is_queued: bool = False,
    ) -> bool:
        """
        Store a new transaction with the server's time.

        Args:
            fields: the fields besides id, state and time.
            transaction_id: id of the transaction.
            state: the first state. Every state except initial includes this application's marker.
            session: the session of the MongoDB transaction for the write, if any.
            coordinator: the process that stores it. It identifies a commit that was reported as failed.
            is_queued: True to let recovery begin the transaction, as after `queue`.

        Returns:
            True if it is new, False if the same coordinator has already stored it.

        Raises:
            KnownError: this id exists.
            ConfigurationError: the `require` of a transfer would be another rule when this server has stored it.
            TransactionTimeoutError: this process was frozen for too long. An earlier attempt may have stored the
            transaction, and the log may already have removed it.
        """
        if session is None:
            self.prepare()
        self._refuse_late(coordinator, transaction_id)
        whole = {
            **self._storable_fields(fields),
            **({} if state is State.INITIAL and not is_queued else {"application": self._application}),
            **({} if coordinator is None else {"coordinator": coordinator}),
        }
        begun: Document = {"state": str(state), "lastModified": "$$NOW", **self._times(state)}
        if is_queued:
            begun["queuedAt"] = "$$NOW"
        try:
            # An upsert, because only an update can set the server's time.
            found = self.collection.find_one_and_update(
                {"_id": {"$eq": transaction_id}},
                insert_if_absent({"$mergeObjects": [{"_id": "$_id"}, literal(whole), begun]}),
                projection={"coordinator": 1},
                upsert=True,
                return_document=ReturnDocument.BEFORE,
                session=session,
            )
        except DuplicateKeyError:
            found = {}
        if found is None:
            return True
        if coordinator is not None and found.get("coordinator") == coordinator:
            return False
        raise KnownError

    def _storable_fields(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields as the server can store them: before MongoDB 5.0, a rule with operators is a text."""
        rule = fields.get("require")
        if not isinstance(rule, Mapping) or not has_operators(rule) or self._stores_operators():
            return fields
        return {**fields, "require": to_text(storable("require", rule, self.collection.codec_options))}

    def _stores_operators(self) -> bool:
        """Return True if the server stores names that begin with `$`. Queried once per process."""
        if self._has_operators is None:
            answer = self.collection.database.client.admin.command("hello")
            self._has_operators = answer.get("maxWireVersion", 0) >= _WIRE_OF_5_0
        return self._has_operators

    def _refuse_late(self, coordinator: ObjectId | None, transaction_id: Any) -> None:
        """
        Refuse an attempt if an earlier one may have stored the transaction so long ago that it may be removed.

        A coordinator's id contains the time of the first attempt by this machine's clock, because the monotonic clock
        stops while a machine is suspended. If the clock is set meanwhile, an attempt may be refused needlessly.
        """
        late = self._deadline * _LATE_PART + 1  # an ObjectId has whole seconds
        if coordinator is not None and time.time() - coordinator.generation_time.timestamp() >= late:
            raise TransactionTimeoutError(
                f"This process was frozen too long while it stored transaction {transaction_id!r}, so the "
                "outcome is unknown. Check its participants before you call it again.",
                id=transaction_id,
                outcome="unknown",
            )

    def _times(self, state: State) -> Document:
        """Return the times that begin with a state: the limits to begin or apply, and the expiry."""
        if state is State.INITIAL:
            return {"beginBy": None if self._retention is None else after(self._retention)}
        if state is State.PENDING:
            return {"deadline": after(self._deadline)}
        if state.is_final and self._retention is not None:
            return {"expiresAt": after(self._retention)}
        return {}

    def move(
        self,
        seen: Transaction,
        state: State,
        *,
        coordinator: ObjectId | None = None,
        any_application: bool = False,
        condition: Mapping[str, Any] | None = None,
        session: ClientSession | None = None,
        **fields: Any,
    ) -> Transaction:
        """
        Move a transaction to another state or coordinator, unless it has changed since it was read.

        Args:
            seen: the transaction as read.
            state: the next state. If it is the current one, its times do not change.
            coordinator: the new owner. The version grows, and this application's marker is set.
            any_application: True to allow another application's transaction.
            condition: further conditions.
            session: the session of the surrounding MongoDB transaction, if any.
            fields: further fields to store.

        Raises:
            OvertakenError: it changed since it was read, or belongs to another application.
        """
        guard: Document = {**seen.guard, **(condition or {})}
        change: Document = {name: literal(value) for name, value in fields.items()}
        change["lastModified"] = "$$NOW"
        if state is not seen.state:
            change.update({"state": str(state), "stoppedBy": REMOVED, "beginBy": REMOVED, **self._times(state)})
        if coordinator is not None:
            guard.update({} if any_application else self._ours())
            change.update({"application": literal(self._application), "coordinator": coordinator})
            change["version"] = {"$add": [{"$ifNull": ["$version", Int64(0)]}, Int64(1)]}
        # Expressions, because only they can read the time.
        found = self.collection.find_one_and_update(
            guard, [{"$set": change}], return_document=ReturnDocument.AFTER, session=session
        )
        if found is None:
            raise OvertakenError
        return self.read(found)

    def take_over(
        self,
        seen: Transaction,
        coordinator: ObjectId,
        *,
        older_than: float | None = None,
        is_overdue: bool = False,
        any_application: bool = False,
    ) -> Transaction:
        """
        Give an unfinished transaction to a coordinator.

        Args:
            seen: the transaction as read.
            coordinator: the new owner.
            older_than: take it only if its last step was at least this many seconds ago. See `find_abandoned`.
            is_overdue: True to take it only after its deadline.
            any_application: True to allow another application's transaction.

        Raises:
            OvertakenError: another process was faster, or it is not old enough.
        """
        conditions = [*([] if older_than is None else [_is_abandoned(older_than)]), *([_IS_OVERDUE] * is_overdue)]
        condition = {"$expr": {"$and": conditions}} if conditions else None
        return self.move(
            seen, seen.state, coordinator=coordinator, any_application=any_application, condition=condition
        )

    def expire(self, seen: Transaction) -> Transaction:
        """Cancel a transaction not begun within the retention. Raise OvertakenError if it has begun or was queued."""
        reason = "it was not started within its retention"
        return self.move(seen, State.CANCELED, condition={"queuedAt": None}, reason=reason)

    def prove(self, mine: Transaction) -> None:
        """Prove with a majority write that a transaction still has this state and version, or raise OvertakenError."""
        if not self.collection.update_one(mine.guard, {"$currentDate": {"lastModified": True}}).matched_count:
            raise OvertakenError

    def note_stopped(self, seen: Transaction, why: str) -> None:
        """
        Note in a transaction why it waits for a person. Its next step removes the note.

        The time of its last step does not change.
        """
        text = why if len(why) <= _STOPPED_BY_MAX else f"{why[:_STOPPED_BY_MAX]}..."
        self.collection.update_one({"_id": {"$eq": seen.id}, "state": str(seen.state)}, {"$set": {"stoppedBy": text}})

    def note_compensated(
        self, seen: Transaction, attempt: int, before: int | None, session: ClientSession | None
    ) -> None:
        """
        Note in a finished transaction the attempt that compensates it.

        Args:
            seen: the transaction.
            attempt: number of the attempt.
            before: the expected current number. None for none.
            session: the session of the MongoDB transaction that stores the attempt, if any.

        Raises:
            OvertakenError: it has changed since it was read.
        """
        guard = {
            "_id": {"$eq": seen.id},
            "state": str(State.DONE),
            "coordinator": seen.coordinator,  # after its retention, another transaction may have the id
            "compensatedBy": before,
        }
        change = {"$set": {"compensatedBy": attempt}}
        if not self.collection.update_one(guard, change, session=session).matched_count:
            raise OvertakenError

    def queue(self, transaction_id: Any, session: ClientSession | None = None) -> None:
        """
        Note that Celery runs a transaction. From now on this application's recovery also begins it.

        Args:
            transaction_id: the id of the transaction.
            session: the session of the surrounding MongoDB transaction, if any.

        Raises:
            TransactionStateError: it is final, or belongs to another application.
        """
        states = [str(each) for each in (State.INITIAL, *UNFINISHED)]
        guard = {"_id": {"$eq": transaction_id}, "state": {"$in": states}, **self._ours()}
        # Marked now: another application may not know its clusters.
        change = {"$set": {"application": self._application}, "$currentDate": {"queuedAt": True}}
        if not self.collection.update_one(guard, change, session=session).matched_count:
            seen = self.get(transaction_id, session)
            self.refuse_foreign(seen)
            raise TransactionStateError(
                f"Transaction {transaction_id!r} is {seen.state}. Nothing needs to be done.",
                id=transaction_id,
                state=seen.state,
            )

    # -- reading -----------------------------------------------------------------------------------

    def get(self, transaction_id: Any, session: ClientSession | None = None) -> Transaction:
        """
        Return a transaction, as it is or as an open MongoDB transaction sees it.

        Raises:
            TransactionStateError: it does not exist, or its state or shape is unknown.
        """
        found = self.find_one(transaction_id, session)
        if found is None:
            raise TransactionStateError(f"There is no transaction {transaction_id!r}.", id=transaction_id)
        return self.read(found)

    def find_one(self, transaction_id: Any, session: ClientSession | None = None) -> Document | None:
        """Return the document of a transaction, whatever its shape."""
        return self.collection.find_one({"_id": {"$eq": transaction_id}}, session=session)

    def read(self, document: Mapping[str, Any]) -> Transaction:
        """Read a document. Errors as in `read_transaction`."""
        return read_transaction(document, self._accounts)

    def refuse_foreign(self, seen: Transaction) -> None:
        """
        Refuse a transaction of another application.

        Raises:
            TransactionStateError: it belongs to another application.
        """
        if seen.application not in {None, self._application}:
            raise TransactionStateError(
                f"Transaction {seen.id!r} belongs to application {seen.application!r}, not to {self._application!r}.",
                id=seen.id,
                application=seen.application,
            )

    def find(self, states: Sequence[str], limit: int) -> list[Document]:
        """Return documents in some states for display, the one with the oldest step first."""
        wanted = {each for state in states for each in (state, {"canceled": "cancelled"}.get(state, state))}
        found = self.collection.find({"state": {"$in": sorted(wanted)}})
        return list(found.sort("lastModified", ASCENDING).limit(limit))

    def find_abandoned(
        self, older_than: float, *, any_application: bool, without: Sequence[str] = ()
    ) -> Cursor[Document]:
        """
        Return a cursor over recoverable transactions, the oldest step first.

        These are all unfinished ones, queued ones that have not begun, and those that have not begun within the
        retention.

        Args:
            older_than: seconds since the last step, by the server's clock. After the deadline, fewer are enough.
            any_application: True to include transactions of other applications.
            without: the clusters to skip. Transactions with a participant in one of them are left out.
        """
        # The transaction's own application decides its expiry. For the tutorial's code, ours does.
        is_begun: list[Document] = [
            {"state": {"$ne": str(State.INITIAL)}},
            {"queuedAt": {"$exists": True}},
            {"beginBy": {"$type": "date"}, "$expr": {"$lte": ["$beginBy", "$$NOW"]}},
        ]
        if self._retention is not None:
            aged = {"lastModified": {"$type": "date"}, "$expr": _is_older(self._retention)}
            is_begun.append({"beginBy": {"$exists": False}, **aged})
        condition: Document = {
            "state": {"$in": [str(each) for each in (State.INITIAL, *UNFINISHED)]},
            "$or": is_begun,
            "$expr": _is_abandoned(older_than),
            **({"participants.cluster": {"$nin": [*without]}} if without else {}),
            **({} if any_application else self._ours()),
        }
        return self.collection.find(condition).sort("lastModified", ASCENDING).batch_size(_PAGE)

    def count_states(self) -> dict[State, StateCount]:
        """Count the unfinished transactions by state."""
        states = [str(each) for each in (State.INITIAL, *UNFINISHED)]
        abandoned = {"$sum": {"$cond": [_is_abandoned(self.older_than), 1, 0]}}
        stages: list[Document] = [
            {"$match": {"state": {"$in": states}}},
            {
                "$group": {
                    "_id": "$state",
                    "count": {"$sum": 1},
                    "oldest": {"$max": {"$subtract": ["$$NOW", _MODIFIED]}},
                    "abandoned": abandoned,
                }
            },
        ]
        return {
            State(row["_id"]): StateCount(row["count"], max(row["oldest"] or 0, 0) / 1000, row["abandoned"])
            for row in self.collection.aggregate(stages)
            if row["_id"] in states
        }

    def _ours(self) -> Document:
        """Return the filter for this application's transactions and for those without a marker."""
        return {"application": {"$in": [None, self._application]}}


def log_cancel(identity: Any, reason: str) -> None:
    """Log the cancellation of a transaction and its reason."""
    logger.warning(
        "transaction %r is canceled, and its changes are undone: %s",
        identity,
        reason,
        extra={"event": "transaction_canceled"},
    )


def _is_abandoned(older_than: float) -> Document:
    """
    Return the condition, by the server's clock, that its last step is this old or its deadline has passed.

    A time far ahead comes from a primary whose clock was ahead, and counts as long ago.
    """
    overdue = {"$and": [_IS_OVERDUE, _is_older(min(older_than, _OVERDUE_SECONDS))]}
    is_ahead = {"$gt": [_MODIFIED, after(_AHEAD_SECONDS)]}
    return {"$or": [_is_older(older_than), overdue, is_ahead]}


def _is_older(seconds: float) -> Document:
    """Return the condition by the server's clock. A missing or invalid time counts as long ago."""
    return {"$lte": [_MODIFIED, {"$subtract": ["$$NOW", millis(seconds)]}]}
