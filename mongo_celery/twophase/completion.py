"""Completing a transaction: step by step to its end, past errors that pass and past other coordinators."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from bson import ObjectId
from pymongo.errors import PyMongoError

from mongo_celery.errors import TransactionStateError, TransactionTimeoutError
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.repeating import Pauses, until_answered
from mongo_celery.mongo.verdicts import is_transient
from mongo_celery.twophase.coordinator import BusyError, Coordinator, Open, OvertakenError, StuckError
from mongo_celery.twophase.log import TransactionLog
from mongo_celery.twophase.states import State, Transaction

Result = TypeVar("Result")

FINISHED_BY_RECOVERY = "recovery will finish it"
NOT_BEGUN = (
    "run it again: nothing may have been begun yet, and recovery finishes only what was begun, or queued by delay"
)
_PAUSES = Pauses(first=0.01, longest=0.5, jitter=1.0)
_LOOKS = Pauses(first=0.01, longest=0.5)


class Completion:
    """
    Completes transactions of one log.

    Args:
        log: of the transactions.
        open_part: gives a participant's collection.
        timeout: seconds for which transient errors are repeated, and another coordinator is waited for.
    """

    def __init__(self, log: TransactionLog, open_part: Open, timeout: float) -> None:
        self._log = log
        self._open = open_part
        self._timeout = timeout

    def new_coordinator(self, identity: ObjectId | None = None) -> Coordinator:
        """A coordinator with an identity of its own, or the given one."""
        return Coordinator(self._log, self._open, identity or ObjectId())

    def to_the_end(self, transaction: Transaction) -> Transaction:
        """
        Step by step until the state is final. If another coordinator takes over, wait for it.

        Raises:
            TransactionStateError: a participant refuses to be undone, or two of them are one document.
            TransactionTimeoutError: the time is used up.
        """
        deadline = time.monotonic() + self._timeout
        coordinator = self.new_coordinator(transaction.driver)
        while not transaction.state.is_final:
            current = transaction
            step = coordinator.begin_and_apply if current.state is State.INITIAL else coordinator.step
            try:
                transaction = self._once_more(step, current, coordinator, deadline)
            except OvertakenError:
                return self._awaited(transaction.id, deadline)
            except StuckError as error:
                raise stuck(current, error) from error
        return transaction

    def persist(
        self,
        attempt: Callable[[], Result],
        deadline: float | None = None,
        *,
        hint: str = FINISHED_BY_RECOVERY,
        **fields: Any,
    ) -> Result:
        """
        Repeat an attempt that met a transient error, or found something changed, until the time is used up.

        Args:
            attempt: what is done; it may be done several times.
            deadline: of the monotonic clock; by default after the timeout.
            hint: what follows when the time is used up.
            fields: of the error.

        Raises:
            TransactionTimeoutError: it is.
        """
        deadline = time.monotonic() + self._timeout if deadline is None else deadline
        try:
            return until_answered(attempt, deadline=deadline, pauses=_PAUSES, repeatable=_passes)
        except (PyMongoError, BusyError) as error:
            if not _passes(error):
                raise
            raise TransactionTimeoutError(
                f"MongoDB did not let it get on in time ({short(error)}); {hint}.",
                outcome="unknown",
                **fields,
            ) from error

    def _once_more(
        self, step: Callable[[Transaction], Transaction], seen: Transaction, coordinator: Coordinator, deadline: float
    ) -> Transaction:
        """A step; if an answer was lost and the step had been done after all, go on from there."""
        hint = NOT_BEGUN if seen.state is State.INITIAL else FINISHED_BY_RECOVERY
        try:
            return self.persist(lambda: step(seen), deadline, hint=hint, id=seen.id)
        except OvertakenError:
            now = self.persist(lambda: self._log.get(seen.id), deadline, id=seen.id)
            if now.driver != coordinator.identity:
                raise
            return now

    def _awaited(self, transaction_id: Any, deadline: float) -> Transaction:
        count = 0
        while True:
            now = self.persist(lambda: self._log.get(transaction_id), deadline, id=transaction_id)
            if now.state.is_final:
                return now
            if time.monotonic() >= deadline:
                raise TransactionTimeoutError(
                    f"transaction {now.id!r} is {now.state}, in the hands of another coordinator; if that one does not "
                    "finish it, recovery will.",
                    id=now.id,
                    outcome="unknown",
                )
            time.sleep(_LOOKS.nth(count))
            count += 1


def _passes(error: Exception) -> bool:
    return isinstance(error, BusyError) or is_transient(error)


def stuck(transaction: Transaction, error: StuckError) -> TransactionStateError:
    """What to say of a transaction that no coordinator gets any further."""
    return TransactionStateError(
        f"transaction {transaction.id!r} stays {transaction.state}: {error}. Put it right, then recover.",
        id=transaction.id,
        state=transaction.state,
    )


def still_mine(transaction: Transaction | None) -> Transaction:
    """What a conditional update returned; None means that it met another state, and calls for another attempt."""
    if transaction is None:
        raise BusyError("it changed meanwhile")
    return transaction
