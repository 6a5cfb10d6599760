"""
Transactions within the log's cluster. One MongoDB transaction changes all participants and stores `done`.

The documents contain no additional fields, and no reader sees one participant changed before the other. Recovery is not
needed: uncommitted changes did not happen. A concurrent cancel and run conflict on the log entry.

In the caller's open transaction, the same writes join it. There, participants are checked before the change: a transfer
that cannot be paid must leave nothing half done in a transaction that continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from bson import ObjectId
from pymongo import MongoClient, UpdateOne
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import BulkWriteError, WriteError

from mongo_celery.mongo.identity import same_bson
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.transaction import transactional
from mongo_celery.mongo.verdicts import Verdict, is_transient, judge_error
from mongo_celery.mongo.writes import single_error
from mongo_celery.twophase.log import OvertakenError, TransactionLog, log_cancel
from mongo_celery.twophase.participants import Part
from mongo_celery.twophase.protocol import Coordinator
from mongo_celery.twophase.transaction import State, Transaction

Document = dict[str, Any]
Result = TypeVar("Result")

_LEAST_SECONDS = 0.05
"""Limit for a MongoDB transaction without time left. It fails with its own timeout error."""


class UnmetError(OvertakenError):
    """Fewer documents matched than participate. The MongoDB transaction is aborted."""


class RefusedError(Exception):
    """A server permanently refuses the change of a participant. The text names it and the reason."""


def run_independently(client: MongoClient[Any], body: Callable[[ClientSession], Result], until: float) -> Result:
    """
    Run a body in an independent MongoDB transaction, repeated until a monotonic time.

    Raises:
        TransactionTimeoutError: the time is used up. `outcome` contains the known state.
        TopologyError: the server is a standalone.
    """
    limit = max(until - time.monotonic(), _LEAST_SECONDS)
    return transactional(client, timeout=limit, independent=True).run(body)


class LocalTransactions:
    """
    Transactions whose participants are all in the log's cluster.

    Args:
        log: the log of the transactions.
        open_part: returns a participant's collection.
    """

    def __init__(self, log: TransactionLog, open_part: Callable[[Part], Collection[Document]]) -> None:
        self._log = log
        self._open = open_part
        self._client: MongoClient[Any] = log.collection.database.client

    # -- in its own MongoDB transaction --------------------------------------------------------------

    def store_done(
        self, fields: Mapping[str, Any], parts: Sequence[Part], identity: Any, coordinator: ObjectId, until: float
    ) -> str | None:
        """
        Store a transaction as done, and make its changes.

        Args:
            fields: the fields besides id and state.
            parts: participants of the transaction.
            identity: id of the transaction.
            coordinator: the process that stores it. Use the same one after a lost answer, so that it is not done twice.
            until: monotonic time until which attempts are repeated.

        Returns:
            The reason to cancel it, when nothing is stored. None if it is done.

        Raises:
            KnownError: this id exists.
            UnmetError: a participant changed meanwhile. Try again.
            PyMongoError, TransactionTimeoutError: the outcome may be unknown.
        """

        def body(session: ClientSession) -> None:
            if self._log.insert(fields, identity, state=State.DONE, session=session, coordinator=coordinator):
                self.change(parts, session)

        return self._commit(parts, body, until)

    def run(self, transaction: Transaction, mine: Coordinator, until: float) -> Transaction:
        """
        Bring a transaction from initial to done or canceled.

        Args:
            transaction: the transaction as read.
            mine: the coordinator that runs it.
            until: as in `store_done`.

        Raises:
            OvertakenError: another process has begun, finished or canceled it. Read it again.
            UnmetError, PyMongoError, TransactionTimeoutError: as in `store_done`.
        """
        after: list[Transaction] = []

        def body(session: ClientSession) -> None:
            is_any = mine.any_application
            after[:] = [
                self._log.move(
                    transaction, State.DONE, coordinator=mine.identity, any_application=is_any, session=session
                )
            ]
            self.change(transaction.parts, session)

        reason = self._commit(transaction.parts, body, until)
        if reason is not None:
            canceled = self._log.move(
                transaction,
                State.CANCELED,
                coordinator=mine.identity,
                any_application=mine.any_application,
                reason=reason,
            )
            log_cancel(transaction.id, reason)
            return canceled
        return after[0]

    def _commit(self, parts: Sequence[Part], body: Callable[[ClientSession], None], until: float) -> str | None:
        """Commit a body. Return the reason to cancel if a participant refuses."""
        self._log.prepare()
        try:
            run_independently(self._client, body, until)
        except RefusedError as error:
            reason: str | None = str(error)
        except UnmetError:
            reason = self.find_unmet(parts)
            if reason is None:
                raise
        else:
            return None
        return reason

    # -- participants ------------------------------------------------------------------------------

    def find_unmet(self, parts: Iterable[Part], session: ClientSession | None = None) -> str | None:
        """Return the reason why participants cannot be changed, read now or in a transaction. None if they can."""
        found: list[tuple[Part, Any]] = []
        for part in parts:
            collection = self._open(part)
            met = collection.find_one(_meeting(part), {"_id": 1}, session=session)
            if met is None:
                if collection.find_one({"_id": {"$eq": part.id}}, {"_id": 1}, session=session) is None:
                    return f"participant {part} does not exist"
                return f"participant {part} does not meet {dict(part.require)!r}"
            for other, seen in found:
                if part.namespace == other.namespace and same_bson(met["_id"], seen):
                    return f"participants {other} and {part} are the same document, and their changes conflict"
            found.append((part, met["_id"]))
        return None

    def change(self, parts: Sequence[Part], session: ClientSession) -> None:
        """
        Change each participant with one statement, and one command per collection.

        Raises:
            UnmetError: a participant is missing or does not match its rule.
            RefusedError: the server refuses a change.
        """
        grouped: dict[str, list[Part]] = {}
        for each in parts:
            grouped.setdefault(each.namespace, []).append(each)
        for those in grouped.values():
            updates = [UpdateOne(_meeting(part), part.apply) for part in those]
            try:
                matched = self._open(those[0]).bulk_write(updates, session=session).matched_count
            except BulkWriteError as error:
                said = single_error(error)
                is_refusal = isinstance(said, WriteError) and judge_error(said) is not Verdict.ACCESS
                if not is_refusal or is_transient(error) or is_transient(said):
                    raise said from error
                part = those[(said.details or {})["index"]]
                raise RefusedError(f"participant {part} refuses the change: {short(said)}") from error
            if matched != len(those):  # an ordered bulk does not stop at a statement without a match
                raise UnmetError


def _meeting(part: Part) -> Document:
    return {"_id": {"$eq": part.id}, "$and": [dict(part.require)]}
