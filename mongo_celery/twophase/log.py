"""The transactions' own documents; which of them were left, and which may go, `abandoned` and `final` ask."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain, islice
from typing import Any

from bson import ObjectId
from bson.int64 import Int64
from pymongo import ASCENDING, IndexModel, ReturnDocument
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import DuplicateKeyError

from mongo_celery.errors import TransactionStateError, TransactionTimeoutError
from mongo_celery.mongo.expressions import after, insert_if_absent, literal, millis
from mongo_celery.mongo.verdicts import ErrorContext
from mongo_celery.quantities import duration
from mongo_celery.twophase.indexes import Indexes
from mongo_celery.twophase.options import RETENTION
from mongo_celery.twophase.participants import Part
from mongo_celery.twophase.sessions import named_sessions
from mongo_celery.twophase.states import FINAL, RECEIPTS, State, Transaction, read_transaction, refuse_other_accounts
from mongo_celery.twophase.values import to_text

Document = dict[str, Any]

UNFINISHED = (State.PENDING, State.APPLIED, State.CANCELING)
_OVERDUE_SECONDS = 30.0
"""Since the last step of what has passed its deadline: then it is abandoned, however long others may take."""

_LATE_PART = 0.9
"""Of the deadline, after which alone something may be purged: then nothing is stored that may have been before."""

_STOPPED_BY_MAX = 1000
"""Characters of why a transaction stays as it is: an error of a server may repeat a whole document."""

_MODIFIED = {"$convert": {"input": "$lastModified", "to": "date", "onError": None, "onNull": None}}
IS_OVERDUE = {"$and": [{"$eq": [{"$type": "$deadline"}, "date"]}, {"$lte": ["$deadline", "$$NOW"]}]}
_NOW = {"$currentDate": {"lastModified": True}}

_KEYS = {
    State.INITIAL: ("lastModified", "queuedAt"),
    State.PENDING: ("lastModified",),
    State.APPLIED: ("lastModified", "_id"),
    State.CANCELING: ("lastModified", "state"),
}
"""
The partial index of each state that is not final. One index for all of them would serve no query for one of them, nor
one that asks for several by `$in` or `$or`; and servers before 5.0 want their keys to differ.
"""

LOG_INDEXES = (
    *(
        IndexModel(
            [(field, ASCENDING) for field in fields],
            name=f"{state}_transactions",
            partialFilterExpression={"state": str(state)},
        )
        for state, fields in _KEYS.items()
    ),
    IndexModel([("expiresAt", ASCENDING)], name="expired_transactions", expireAfterSeconds=0, sparse=True),
)


class KnownError(Exception):
    """There is a transaction of this id."""


@dataclass(frozen=True, slots=True)
class Standing:
    """
    How transactions of one state stand.

    Attributes:
        count: how many there are.
        oldest_seconds: since the last step of the oldest.
        abandoned: how many of them have stood for so long that recovery should have taken them.
    """

    count: int
    oldest_seconds: float
    abandoned: int


class TransactionLog:
    """
    Reads and writes of transaction documents.

    Args:
        collection: with majority writes, majority reads, primary.
        application: this application's marker.
        accounts: namespace of the documents that transfers name.
        older_than: seconds after which an unfinished transaction counts as abandoned.
        deadline: seconds after which a transaction that is not applied cancels itself.
        retention: seconds for which one that is final, or that nobody has begun, is kept; None for ever.
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
        self._older_than = older_than
        self._application = application
        self._accounts = accounts
        self._deadline = deadline
        self._retention = retention
        self._indexes = Indexes(collection, LOG_INDEXES)

    def prepare(self) -> None:
        """Make the indexes, and the collection, at the first use in this process."""
        self._indexes.make()

    @property
    def is_prepared(self) -> bool:
        """Whether nothing of that is left to do in this process."""
        return self._indexes.is_made

    @property
    def concern(self) -> ErrorContext:
        """Whom an error of MongoDB concerns, and what transactions need."""
        name = self.collection.full_name
        return ErrorContext(
            f"the transactions' collection {name} or one of their participants",
            f"find, insert and update on {name}, find and update on the participants' collections, and, in other "
            "clusters, find, insert and update on transactionReceipts beside them",
        )

    def insert(
        self,
        fields: Mapping[str, Any],
        transaction_id: Any,
        *,
        state: State = State.INITIAL,
        session: ClientSession | None = None,
        mark: ObjectId | None = None,
        is_queued: bool = False,
    ) -> bool:
        """
        Store a new transaction, with the server's time.

        Args:
            fields: what it has beside id, state and time.
            transaction_id: its id.
            state: where it begins; this application's marker comes with every state but initial.
            is_queued: recovery begins it, as after `queue`; it has this application's marker.
            session: of a MongoDB transaction, if it is stored in one.
            mark: who stores it, by which it is known again: an earlier MongoDB transaction may have been committed
                though it was told otherwise.

        Returns:
            Whether it is new; False for one that bears the mark.

        Raises:
            KnownError: there is one of this id.
            TransactionTimeoutError: this process stood still meanwhile; it may have been stored, and purged.
        """
        if session is None:
            self.prepare()
        self._refuse_late(mark, transaction_id)
        whole = {
            **fields,
            **({} if state is State.INITIAL and not is_queued else {"application": self._application}),
            **({} if mark is None else {"driver": mark}),
        }
        begun: Document = {"state": str(state), "lastModified": "$$NOW", **self._times(state)}
        if is_queued:
            begun["queuedAt"] = "$$NOW"
        try:
            # An upsert, since only an update can set the server's time.
            found = self.collection.find_one_and_update(
                {"_id": {"$eq": transaction_id}},
                insert_if_absent({"$mergeObjects": [{"_id": "$_id"}, literal(whole), begun]}),
                projection={"driver": 1},
                upsert=True,
                return_document=ReturnDocument.BEFORE,
                session=session,
            )
        except DuplicateKeyError:
            found = {}
        if found is None:
            return True
        if mark is not None and found.get("driver") == mark:
            return False
        raise KnownError

    def insert_begun(
        self, fields: Mapping[str, Any], parts: tuple[Part, ...], transaction_id: Any, session: ClientSession | None
    ) -> tuple[Transaction, bool]:
        """
        Store a new transaction with receipts as pending; its key tells whether it is ours.

        Returns:
            The transaction, and whether it is new: else it was stored before, and the answer was lost.

        Raises:
            KnownError: there is one of this id.
            TransactionTimeoutError: this process stood still meanwhile; it may have been stored, and purged.
        """
        self.prepare()
        self._refuse_late(fields["key"], transaction_id)
        named = named_sessions({None, *(each["cluster"] for each in fields["changes"])})
        marks = self._marks(ObjectId())  # made for this call alone
        whole = {**fields, **marks, "version": Int64(1), "sessions": named}
        begun: Document = {"state": str(State.PENDING), "lastModified": "$$NOW", **self._times(State.PENDING)}
        found = self.collection.find_one_and_update(
            {"_id": {"$eq": transaction_id}},
            insert_if_absent({"$mergeObjects": [{"_id": "$_id"}, literal(whole), begun]}),
            upsert=True,
            return_document=ReturnDocument.AFTER,
            session=session,
        )
        if found is None or found.get("key") != fields["key"]:
            raise KnownError
        return read_transaction(found, self._accounts, parts), found.get("driver") == marks["driver"]

    def _refuse_late(self, mark: ObjectId | None, transaction_id: Any) -> None:
        """
        Refuse what another attempt may have stored so long ago that it can have been purged by now.

        The mark has the time of the first attempt, by the clock of this machine: another one would not know of a
        machine that was suspended. If it was set meanwhile, this one is refused, and nothing is wrong.
        """
        late = self._deadline * _LATE_PART + 1  # a mark has whole seconds
        if mark is not None and time.time() - mark.generation_time.timestamp() >= late:
            raise TransactionTimeoutError(
                f"this process stood still for too long while it stored transaction {transaction_id!r}, so whether it "
                "was done is not known: look at what it changes before you ask for it again.",
                id=transaction_id,
                outcome="unknown",
            )

    def _times(self, state: State) -> Document:
        """What the server's time decides of a state: until when it may be applied, and how long it is kept."""
        if state is State.PENDING:
            return {"deadline": after(self._deadline)}
        if state.is_final and self._retention is not None:
            return {"expiresAt": after(self._retention)}
        return {}

    def get(self, transaction_id: Any, session: ClientSession | None = None) -> Transaction:
        """
        A transaction, as it is or as an open MongoDB transaction sees it.

        Raises:
            TransactionStateError: there is none, or its state or shape is unknown.
            ConfigurationError: it is not final, and a transfer between other accounts.
        """
        found = self.find_one(transaction_id, session)
        if found is None:
            raise TransactionStateError(f"there is no transaction {transaction_id!r}.", id=transaction_id)
        return found

    def find_one(self, transaction_id: Any, session: ClientSession | None = None) -> Transaction | None:
        """A transaction, or None; errors as of `states.read_transaction`."""
        document = self.collection.find_one({"_id": {"$eq": transaction_id}}, session=session)
        return None if document is None else self.read(document)

    def read(self, document: Mapping[str, Any]) -> Transaction:
        """Understand a document; errors as of `states.read_transaction`."""
        return read_transaction(document, self._accounts)

    def refuse_other_accounts(self, seen: Transaction) -> None:
        """Refuse a transfer, also one that is final, between other accounts; errors as of the function in `states`."""
        refuse_other_accounts(seen.document, self._accounts)

    def ages_of(self, seen: Sequence[Transaction]) -> list[tuple[Transaction, float]]:
        """Those that nobody has done a step of since they were read, each with the seconds since its last step."""
        age = {"$divide": [{"$subtract": ["$$NOW", _MODIFIED]}, 1000]}
        stages: list[Document] = [
            {"$match": {"_id": {"$in": [each.id for each in seen]}}},
            {"$project": {"lastModified": 1, "age": age}},
        ]
        found = {to_text(each["_id"]): each for each in self.collection.aggregate(stages)}
        unchanged = []
        for each in seen:
            now = found.get(to_text(each.id), {})
            if now.get("age") is not None and now["lastModified"] == each.last_modified:
                unchanged.append((each, float(now["age"])))
        return unchanged

    def claim(
        self,
        seen: Transaction,
        coordinator: ObjectId,
        *,
        any_application: bool = False,
        session: ClientSession | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> Transaction | None:
        """
        Take a transaction nobody has begun: initial becomes pending. None if somebody was faster.

        Args:
            seen: as it was read.
            coordinator: who takes it.
            any_application: whether it may belong to another application.
            session: of a MongoDB transaction that does more.
            fields: what it has from now on; with receipts, they have the participants under another name.
        """
        given = dict(fields or {})
        if given.get("protocol") == RECEIPTS:
            given["sessions"] = named_sessions(seen.clusters)
        return self._update(
            self._unbegun(seen, any_application=any_application),
            State.PENDING,
            {**self._marks(coordinator), **given},
            version=True,
            session=session,
            without=("participants",) if given.get("protocol") == RECEIPTS else (),
        )

    def complete(
        self, seen: Transaction, coordinator: ObjectId, session: ClientSession, *, any_application: bool = False
    ) -> Transaction | None:
        """Initial becomes done, in the MongoDB transaction that changes all participants. None: somebody was faster."""
        guard = self._unbegun(seen, any_application=any_application)
        return self._update(guard, State.DONE, self._marks(coordinator), version=True, session=session)

    def _unbegun(self, seen: Transaction, *, any_application: bool) -> Document:
        return {
            "_id": {"$eq": seen.id},
            "state": str(State.INITIAL),
            **({} if any_application else self.ours()),
        }

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
            older_than: only if its last step was so many seconds ago, by the server's clock; see `abandoned`.
            any_application: whether it may belong to another application.
        """
        guard: Document = dict(seen.guard)
        if not any_application:
            guard.update(self.ours())
        if older_than is not None:
            guard["$expr"] = is_abandoned(older_than)
        sessions = {} if seen.key is None else {"sessions": named_sessions(seen.clusters)}
        return self._update(guard, None, {**self._marks(coordinator), **sessions}, version=True)

    def take_over_together(
        self,
        ids: Sequence[Any],
        coordinator: ObjectId,
        clusters: Iterable[str | None],
        *,
        older_than: float,
        any_application: bool,
    ) -> list[Transaction]:
        """As `take_over`, of several with receipts that are pending or applied, in these; those that were taken."""
        guard: Document = {
            "_id": {"$in": list(ids)},
            "protocol": RECEIPTS,
            "state": {"$in": [str(State.PENDING), str(State.APPLIED)]},
            "$expr": is_abandoned(older_than),
            **({} if any_application else self.ours()),
        }
        marks = {**self._marks(coordinator), "sessions": named_sessions({None, *clusters})}
        change = {name: literal(value) for name, value in marks.items()}
        version = {"$add": [{"$ifNull": ["$version", Int64(0)]}, Int64(1)]}
        self.collection.update_many(guard, [{"$set": {**change, "lastModified": "$$NOW", "version": version}}])
        return [self.read(each) for each in self.collection.find({"_id": {"$in": list(ids)}, "driver": coordinator})]

    def move_together(self, seen: Sequence[Transaction], state: State, *, before: State) -> list[Transaction]:
        """As `move`, of several; those that are in this state afterwards, whoever moved them. Times are not read."""
        which = {"_id": {"$in": [each.id for each in seen]}, "key": {"$in": [each.key for each in seen]}}
        change: Document = {
            "state": str(state),
            "lastModified": "$$NOW",
            "stoppedBy": "$$REMOVE",
            **self._times(state),
        }
        moved = self.collection.update_many({**which, "state": str(before)}, [{"$set": change}]).matched_count
        if moved == len(seen):
            return [replace(each, state=state) for each in seen]
        return [self.read(each) for each in self.collection.find({**which, "state": str(state)})]

    def touch(self, mine: Transaction) -> bool:
        """Prove by a majority write that a transaction is still in this state and mine."""
        return bool(self.collection.update_one(mine.guard, _NOW).matched_count)

    def prove(self, seen: Transaction) -> bool:
        """Prove by a majority write that a transaction with receipts is still in this state, whoever has it."""
        guard = {"_id": {"$eq": seen.id}, "state": str(seen.state), "key": seen.key}
        return bool(self.collection.update_one(guard, _NOW).matched_count)

    def advance(
        self, mine: Transaction, state: State, *, session: ClientSession | None = None, **fields: Any
    ) -> Transaction | None:
        """The next state; None if I have been overtaken."""
        return self._update(mine.guard, state, fields, version=False, session=session)

    def move(
        self,
        seen: Transaction,
        state: State,
        *,
        session: ClientSession | None = None,
        reason: str | None = None,
    ) -> Transaction | None:
        """
        The next state of a transaction with receipts, whoever has it; None if it is no longer as it was seen.

        Any number of coordinators may advance it, so there is no version in the condition.
        """
        guard = {"_id": {"$eq": seen.id}, "state": str(seen.state), "key": seen.key}
        fields = {} if reason is None else {"reason": reason}
        goes_on = (
            seen.state is State.CANCELING and state is State.APPLIED
        )  # why it was to be canceled is of no interest
        return self._update(
            guard, state, fields, version=False, session=session, without=("reason",) if goes_on else ()
        )

    def cancel(self, seen: Transaction, coordinator: ObjectId, reason: str) -> Transaction | None:
        """From pending to canceling, by a new coordinator; None if it is no longer as it was seen."""
        fields = {"reason": reason, **self._marks(coordinator)}
        if seen.key is not None:
            fields["sessions"] = named_sessions(seen.clusters)
        return self._update(seen.guard, State.CANCELING, fields, version=True)

    def drop(self, seen: Transaction, reason: str, session: ClientSession | None = None) -> Transaction | None:
        """From initial to canceled: nothing was done yet."""
        return self._update(seen.guard, State.CANCELED, {"reason": reason}, version=False, session=session)

    def expire(self, seen: Transaction) -> Transaction | None:
        """From initial to canceled, since nobody has begun it for so long; None if somebody has, or has queued it."""
        assert self._retention is not None
        reason = f"nobody has begun it for {duration(self._retention)}"
        guard = {**seen.guard, "queuedAt": None}
        return self._update(guard, State.CANCELED, {"reason": reason}, version=False)

    def unattended(self) -> Document:
        """Return the condition of initial ones that recovery takes: queued, or not begun within the retention."""
        queued: Document = {"queuedAt": {"$exists": True}}
        if self._retention is None or self._retention == RETENTION.total_seconds():  # nobody has chosen one
            return queued
        expired = {"lastModified": {"$type": "date"}, "$expr": is_older(self._retention)}
        return {"$or": [queued, expired]}

    def note_stopped(self, seen: Transaction, why: str) -> bool:
        """
        Note in a transaction what keeps it in its state until a person has put it right; its next step removes that.

        Its last step stays when it was. Nothing is written where it says the same already.

        Returns:
            Whether it was written.
        """
        said = why if len(why) <= _STOPPED_BY_MAX else f"{why[:_STOPPED_BY_MAX]}..."
        guard = {"_id": {"$eq": seen.id}, "state": str(seen.state), "stoppedBy": {"$ne": said}}
        return bool(self.collection.update_one(guard, {"$set": {"stoppedBy": said}}).modified_count)

    def note_compensated(
        self, seen: Transaction, attempt: int, before: int | None, session: ClientSession | None
    ) -> bool:
        """
        Note in a transaction that is done the attempt that compensates it.

        Args:
            seen: the transaction.
            attempt: number of the attempt.
            before: the number that is to be there; None for none.
            session: of the MongoDB transaction that stores the attempt, where there is one.

        Returns:
            False if it is no longer as it was seen.
        """
        guard = {"_id": {"$eq": seen.id}, "state": str(State.DONE), "compensatedBy": before}
        change = {"$set": {"compensatedBy": attempt}}
        return bool(self.collection.update_one(guard, change, session=session).matched_count)

    def queue(self, transaction_id: Any, session: ClientSession | None = None) -> None:
        """
        Note that Celery has been asked to advance a transaction: this application's recovery then begins it too.

        Args:
            transaction_id: of the transaction.
            session: of a MongoDB transaction that this is part of.

        Raises:
            TransactionStateError: nothing is left to do, or it is another application's.
            ConfigurationError: it is a transfer between other accounts.
        """
        states = [str(each) for each in (State.INITIAL, *UNFINISHED)]
        ours = {**self.ours(), "accounts": {"$in": [None, self._accounts]}}
        guard = {"_id": {"$eq": transaction_id}, "state": {"$in": states}, **ours}
        # Marked already: another application may know neither its accounts nor its clusters.
        change = {"$set": {"application": self._application}, "$currentDate": {"queuedAt": True}}
        if not self.collection.update_one(guard, change, session=session).matched_count:
            seen = self.get(transaction_id, session)
            self.refuse_foreign(seen)
            raise TransactionStateError(
                f"transaction {transaction_id!r} is {seen.state}: nothing is left to do.",
                id=transaction_id,
                state=seen.state,
            )

    def refuse_foreign(self, seen: Transaction) -> None:
        """
        Refuse a transaction of another application.

        Raises:
            TransactionStateError: it is one.
        """
        if seen.application not in {None, self._application}:
            raise TransactionStateError(
                f"transaction {seen.id!r} belongs to application {seen.application!r}, not to {self._application!r}.",
                id=seen.id,
                application=seen.application,
            )

    def of_state(self, state: State, condition: Mapping[str, Any], limit: int, *, skip: int = 0) -> Iterable[Document]:
        """Documents of a state that is not final, the oldest step first."""
        found = self.collection.find({"state": str(state), **condition}).sort("lastModified", 1)
        return found.skip(skip).limit(limit)

    def find(self, states: Sequence[str], older_than: float | None, limit: int, *, skip: int = 0) -> Iterable[Document]:
        """
        Documents for people to look at, behind those that are skipped; see `TwoPhaseCommit.found`.

        The server skips those of one state, and else all of them are read.
        """
        condition: Document = {} if older_than is None else {"$expr": is_older(older_than)}
        wanted = [State(each) for each in dict.fromkeys(states)]
        there = skip if len(wanted) <= 1 else 0
        end = limit + skip - there
        is_open = [self.of_state(each, condition, end, skip=there) for each in wanted if not each.is_final]
        final = [text for text, state in FINAL.items() if state in wanted]
        by_id: Iterable[Document] = ()
        if final or not wanted:  # their last step has no index, and there are as many as there ever were
            which = {**condition, **({"state": {"$in": final}} if final else {})}
            by_id = self.collection.find(which).sort("_id", 1).hint([("_id", 1)]).skip(there).limit(end)
        return islice(chain(heapq.merge(*is_open, key=age_key), by_id), skip - there, end)

    def standing(self) -> dict[State, Standing]:
        """How the transactions stand that are not final, by state."""
        age = {"$subtract": ["$$NOW", _MODIFIED]}
        abandoned = {"$sum": {"$cond": [is_abandoned(self._older_than), 1, 0]}}
        found: dict[State, Standing] = {}
        for state in (State.INITIAL, *UNFINISHED):
            stages: list[Document] = [
                {"$match": {"state": str(state)}},
                {"$sort": {"lastModified": 1}},  # else the index is not used, whose condition the first stage is
                {"$group": {"_id": None, "count": {"$sum": 1}, "oldest": {"$max": age}, "abandoned": abandoned}},
            ]
            for row in self.collection.aggregate(stages):
                found[state] = Standing(row["count"], max(row["oldest"] or 0, 0) / 1000, row["abandoned"])
        return found

    def server_time(self) -> datetime:
        """Return the time by the server's clock."""
        answer = self.collection.database.command("hello", codec_options=self.collection.codec_options)
        now: datetime = answer["localTime"]
        return now

    def ours(self) -> Document:
        """The condition of those of this application, and of nobody's."""
        return {"application": {"$in": [None, self._application]}}

    def _marks(self, coordinator: ObjectId) -> Document:
        return {"application": self._application, "driver": coordinator}

    def _update(
        self,
        guard: Document,
        state: State | None,
        fields: Mapping[str, Any],
        *,
        version: bool,
        session: ClientSession | None = None,
        without: Sequence[str] = (),
    ) -> Transaction | None:
        """Another state, or the same one for None; in one update by expressions, since only they know the time."""
        change: Document = {name: literal(value) for name, value in fields.items()}
        change["lastModified"] = "$$NOW"
        if state is not None:
            change.update({"state": str(state), "stoppedBy": "$$REMOVE", **self._times(state)})
        if version:
            change["version"] = {"$add": [{"$ifNull": ["$version", Int64(0)]}, Int64(1)]}
        stages: list[Document] = [{"$set": change}, *([{"$unset": list(without)}] if without else [])]
        found = self.collection.find_one_and_update(
            guard, stages, return_document=ReturnDocument.AFTER, session=session
        )
        return None if found is None else self.read(found)


def age_key(document: Mapping[str, Any]) -> float:
    """The time of the last step, for sorting; what is no time comes first, as with the server."""
    modified = document.get("lastModified")
    return modified.timestamp() if isinstance(modified, datetime) else float("-inf")


def is_abandoned(older_than: float) -> Document:
    """By the server's clock: its last step was so long ago, or it has passed its deadline."""
    overdue = {"$and": [IS_OVERDUE, is_older(min(older_than, _OVERDUE_SECONDS))]}
    return {"$or": [is_older(older_than), overdue]}


def is_older(seconds: float, *, now: object = "$$NOW") -> Document:
    """By the server's clock; a time that is missing or is no time counts as long ago."""
    return {"$lte": [_MODIFIED, {"$subtract": [now, millis(seconds)]}]}
