"""The engine of one log. It selects the protocol of a transaction, and finishes it despite transient errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import pymongo
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import PyMongoError, ServerSelectionTimeoutError

from mongo_celery.errors import ConfigurationError, TransactionStateError, TransactionTimeoutError
from mongo_celery.mongo.opening import ANSWER_SECONDS
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.repeating import Pauses, retry_until_answered
from mongo_celery.mongo.verdicts import explain_error, is_transient
from mongo_celery.twophase.clusters import Clusters
from mongo_celery.twophase.local import LocalTransactions, run_independently
from mongo_celery.twophase.log import OvertakenError, TransactionLog, log_cancel
from mongo_celery.twophase.participants import Part
from mongo_celery.twophase.protocol import Coordinator, StuckError
from mongo_celery.twophase.transaction import State, Transaction

Result = TypeVar("Result")

FINISHED_BY_RECOVERY = "Recovery will finish it"
NOT_BEGUN = "Run it again, because recovery finishes only transactions that were started or sent by delay"
_PAUSES = Pauses(first=0.01, longest=0.5, jitter=1.0)
_POLLS = Pauses(first=0.01, longest=0.5)

_SHARES = 8
"""Divisor of a call's time: the share that a silent participant may use while others must be undone."""


class SilentClusterError(ServerSelectionTimeoutError):
    """A cluster that is known to be silent was not queried."""


class Engine:
    """
    Finishes the transactions of one log.

    Args:
        log: the log of the transactions.
        clusters: the participating clusters.
        timeout: largest duration of a call in seconds. It repeats transient errors, and waits for other coordinators.
        is_local_allowed: False to always use the tutorial's protocol.

    Attributes:
        log: the log.
        clusters: the clusters.
        local: runs transactions within the log's cluster.
    """

    def __init__(self, log: TransactionLog, clusters: Clusters, timeout: float, *, is_local_allowed: bool) -> None:
        self.log = log
        self.clusters = clusters
        self.local = LocalTransactions(log, clusters.open)
        self._timeout = timeout
        self._is_local_allowed = is_local_allowed

    @contextmanager
    def limit_calls(self) -> Iterator[float]:
        """Limit all server calls in the block by the timeout. Yield the end of the timeout on the monotonic clock."""
        with pymongo.timeout(self._timeout):
            yield time.monotonic() + self._timeout

    def until_answered(
        self, attempt: Callable[[], Result], deadline: float, *, hint: str = FINISHED_BY_RECOVERY, **fields: Any
    ) -> Result:
        """
        Repeat an attempt after a transient error or a concurrent change, until the time is used up.

        Args:
            attempt: the function to call, maybe several times.
            deadline: the deadline on the monotonic clock.
            hint: the next step for the user when the time is used up.
            fields: the fields for the error.

        Raises:
            TransactionTimeoutError: the time is used up.
        """
        try:
            return retry_until_answered(attempt, deadline=deadline, pauses=_PAUSES, repeatable=_is_repeatable)
        except TransactionTimeoutError as error:  # from a MongoDB transaction, which does not know its purpose
            known = vars(error)
            if "id" not in fields or "id" in known:
                raise
            message = f"Transaction {fields['id']!r} could not be finished. {hint}. {error}"
            raise TransactionTimeoutError(message, outcome=known.get("outcome", "unknown"), **fields) from error
        except (PyMongoError, OvertakenError) as error:
            if not _is_repeatable(error):
                explained = explain_error(error, self.log.error_context)
                if explained is None:
                    raise
                raise explained from error
            raise TransactionTimeoutError(
                f"MongoDB did not finish in time: {short(error)}. {hint}.", outcome="unknown", **fields
            ) from error

    def call(self, attempt: Callable[[], Result]) -> Result:
        """Make one call to the log's server, repeated while useful, within the timeout."""
        with self.limit_calls() as deadline:
            return self.until_answered(attempt, deadline, hint="Repeat the call")

    # -- the two protocols ---------------------------------------------------------------------------

    def is_local(self, parts: Sequence[Part]) -> bool:
        """Return True if one MongoDB transaction can run a transaction that has not begun."""
        return (
            self._is_local_allowed and all(part.cluster is None for part in parts) and self.clusters.has_transactions()
        )

    def refuse_beyond_transaction(self, parts: Sequence[Part]) -> None:
        """
        Refuse transactions that an open transaction of the log's cluster cannot run, without querying a server.

        Raises:
            ConfigurationError: a participant is in another cluster, or markers are used.
        """
        elsewhere = next((part for part in parts if part.cluster is not None), None)
        if elsewhere is None and self._is_local_allowed:
            return
        why = "protocol='documents'" if elsewhere is None else f"participant {elsewhere} in another cluster"
        raise ConfigurationError(
            f"A transaction is open here, and this one cannot join it because of {why}. Nothing was changed. "
            "Store it with run=False and call delay(id), and Celery runs it after the commit. Or make the call "
            "after the commit, with after_commit."
        )

    def write_together(self, body: Callable[[ClientSession | None], Result], deadline: float) -> Result:
        """Run a body on the log in one MongoDB transaction, or without one on a standalone server."""
        if not self.clusters.has_transactions():
            return body(None)
        return run_independently(self.log.collection.database.client, body, deadline)

    def make_coordinator(self, *, any_application: bool = False, silent: Container[str | None] = ()) -> Coordinator:
        """
        Return a new coordinator.

        Args:
            any_application: True to begin transactions of other applications too.
            silent: clusters that are known not to answer. They are not queried.
        """

        def open_part(part: Part) -> Collection[dict[str, Any]]:
            if part.cluster in silent:
                raise SilentClusterError(f"cluster {part.cluster!r} does not answer")
            return self.clusters.open(part)

        return Coordinator(self.log, open_part, self._timeout / _SHARES, any_application=any_application)

    def finish(self, transaction: Transaction, deadline: float, mine: Coordinator | None = None) -> Transaction:
        """
        Perform steps until the state is final. If another coordinator takes over, wait for it.

        Args:
            transaction: the transaction as read or taken over.
            deadline: the deadline on the monotonic clock.
            mine: the coordinator that owns it. By default a new one.

        Raises:
            TransactionStateError: a participant cannot be undone or was replaced, or two are one document.
            TransactionTimeoutError: the time is used up.
        """
        mine = mine or self.make_coordinator()

        def step() -> Transaction | None:
            with suppress(OvertakenError):
                if transaction.state is State.INITIAL and self.is_local(transaction.parts):
                    return self.local.run(transaction, mine, deadline)
                return mine.step(transaction)
            return None

        while not transaction.state.is_final:
            hint = NOT_BEGUN if transaction.state is State.INITIAL else FINISHED_BY_RECOVERY
            try:
                after = self.until_answered(step, deadline, hint=hint, id=transaction.id)
            except StuckError as error:
                raise self._stop(transaction, mine, error) from error
            if after is None:
                after = self._wait_for_others(transaction.id, mine, deadline)
                canceled = {State.CANCELING, State.CANCELED}
                is_new = after.state in canceled and transaction.state not in canceled
                if is_new and after.coordinator == mine.identity:  # the answer to its own cancel was lost
                    log_cancel(after.id, after.reason or "canceled")
            transaction = after
        return transaction

    def _wait_for_others(self, identity: Any, mine: Coordinator, deadline: float) -> Transaction:
        """Return a transaction when it is final, initial, or owned by this coordinator after a lost answer."""
        count = 0
        while True:
            now = self.until_answered(lambda: self.log.get(identity), deadline, id=identity)
            if now.state.is_final or now.coordinator == mine.identity:
                return now
            if time.monotonic() >= deadline:
                raise TransactionTimeoutError(
                    f"Transaction {now.id!r} is still {now.state}, because other processes kept changing it or its "
                    "participants. If it has begun, recovery finishes it. Otherwise try again.",
                    id=now.id,
                    outcome="unknown",
                )
            time.sleep(_POLLS.nth(count))
            count += 1
            if now.state is State.INITIAL:
                return now

    def _stop(self, transaction: Transaction, mine: Coordinator, error: StuckError) -> TransactionStateError:
        """Return the error of a transaction that no coordinator can advance. Note it there if possible."""
        with suppress(PyMongoError, TransactionStateError), pymongo.timeout(ANSWER_SECONDS):
            now = self.log.get(transaction.id)
            if now.coordinator == mine.identity:  # a step that begins it continues before it returns
                transaction = now
            self.log.note_stopped(transaction, str(error))
        return TransactionStateError(
            f"Transaction {transaction.id!r} stays {transaction.state}: {error}. Fix the cause, then run the recovery.",
            id=transaction.id,
            state=transaction.state,
        )


def _is_repeatable(error: Exception) -> bool:
    return isinstance(error, OvertakenError) or (is_transient(error) and not isinstance(error, SilentClusterError))
