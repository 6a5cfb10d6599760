"""
All participants in the log's own cluster: one MongoDB transaction changes them, and says in the log that it is done.

Nothing of ours stands in the documents, nobody sees one participant changed before the other, and there is nothing to
recover: what was not committed was not done. A cancel and a run at once meet in a write conflict on the entry.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from bson import ObjectId
from pymongo.client_session import ClientSession
from pymongo.collection import Collection

from mongo_celery.errors import TransactionCanceledError
from mongo_celery.twophase.coordinator import OvertakenError
from mongo_celery.twophase.local import RefusedError, UnmetError, change, in_one, why_unmet
from mongo_celery.twophase.log import TransactionLog
from mongo_celery.twophase.participants import Part
from mongo_celery.twophase.states import State, Transaction

logger = logging.getLogger("mongo_celery.twophase")

Document = dict[str, Any]


class WithinCluster:
    """
    Carries out transactions whose participants are all in the log's cluster.

    Args:
        log: of the transactions.
        open_part: gives a participant's collection.
    """

    def __init__(self, log: TransactionLog, open_part: Callable[[Part], Collection[Document]]) -> None:
        self._log = log
        self._open = open_part

    def run(self, transaction: Transaction, until: float, *, any_application: bool = False) -> Transaction:
        """
        Initial to done, or to canceled.

        Args:
            transaction: as it was read.
            until: on the monotonic clock; for how long it is tried.
            any_application: whether it may belong to another application.

        Raises:
            OvertakenError: somebody has begun, finished or canceled it; read it again.
            UnmetError: a participant was changed meanwhile; try again.
            PyMongoError, TransactionTimeoutError: the outcome may be unknown; read it again.
        """
        if transaction.refusal is not None:
            return self._dropped(transaction, transaction.refusal)

        def body(session: ClientSession) -> Transaction:
            after = self._log.complete(transaction, ObjectId(), session, any_application=any_application)
            if after is None:
                raise OvertakenError
            change(self._open, transaction.parts, session)
            return after

        self._log.prepare()
        try:
            return in_one(self._log.collection.database.client, body, until)
        except (RefusedError, UnmetError) as error:
            return self._dropped(transaction, self._reason(transaction.parts, error))

    def store(
        self, fields: Mapping[str, Any], parts: tuple[Part, ...], identity: Any, mark: ObjectId, until: float
    ) -> str | None:
        """
        Store a transaction as done, and do it, in one.

        Args:
            fields: what it has beside id and state.
            parts: its participants.
            identity: its id.
            mark: who stores it: the same one where an answer was lost, so that it is not done twice.
            until: as for `run`.

        Returns:
            Why it is to be canceled, and nothing is stored; None if it is done.

        Raises:
            KnownError: there is one of this id.
            UnmetError, PyMongoError, TransactionTimeoutError: as for `run`.
        """

        def body(session: ClientSession) -> None:
            if self._log.insert(fields, identity, state=State.DONE, session=session, mark=mark):
                change(self._open, parts, session)

        self._log.prepare()
        try:
            in_one(self._log.collection.database.client, body, until)
        except (RefusedError, UnmetError) as error:
            reason = self._reason(parts, error)
            _note(identity, reason)
            return reason
        return None

    def store_joined(
        self, fields: Mapping[str, Any], parts: tuple[Part, ...], identity: Any, session: ClientSession, *, run: bool
    ) -> str | None:
        """
        Store a transaction, and do it if it is to be run, in the open transaction of a session.

        Returns:
            Why it is stored as canceled; None if it is not.

        Raises:
            KnownError: there is one of this id.
            TransactionCanceledError: the server refuses a change, and has aborted the open transaction.
            PyMongoError: as it comes, for whoever has begun the open transaction.
        """
        reason = why_unmet(self._open, parts, session) if run else None
        state = State.INITIAL if not run else State.DONE if reason is None else State.CANCELED
        why = {} if reason is None else {"reason": reason}
        self._log.insert({**fields, **why}, identity, state=state, session=session)
        if reason is not None:
            _note(identity, reason)
        elif run:
            self._change_joined(identity, parts, session)
        return reason

    def run_joined(self, transaction: Transaction, session: ClientSession) -> Transaction:
        """Initial to done or canceled, in the open transaction of a session; errors as of `store_joined`."""
        reason = transaction.refusal or why_unmet(self._open, transaction.parts, session)
        if reason is not None:
            return self._dropped(transaction, reason, session)
        after = self._log.complete(transaction, ObjectId(), session)
        if after is None:
            raise OvertakenError
        self._change_joined(transaction.id, transaction.parts, session)
        return after

    def _change_joined(self, identity: Any, parts: tuple[Part, ...], session: ClientSession) -> None:
        try:
            change(self._open, parts, session)
        except RefusedError as error:
            _note(identity, str(error))
            raise TransactionCanceledError(
                f"transaction {identity!r} was rolled back, and the open transaction with it: {error}.",
                id=identity,
                reason=str(error),
            ) from error

    def _dropped(self, transaction: Transaction, reason: str, session: ClientSession | None = None) -> Transaction:
        _note(transaction.id, reason)
        after = self._log.drop(transaction, reason, session)
        if after is None:
            raise OvertakenError
        return after

    def _reason(self, parts: tuple[Part, ...], error: Exception) -> str:
        if isinstance(error, RefusedError):
            return str(error)
        reason = why_unmet(self._open, parts)
        if reason is None:
            raise error
        return reason


def _note(identity: Any, reason: str) -> None:
    logger.warning("transaction %r is canceled: %s", identity, reason, extra={"event": "transaction_canceled"})
