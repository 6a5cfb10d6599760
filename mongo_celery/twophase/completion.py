"""Completing a transaction: step by step to its end, past errors that pass and past other coordinators."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any, TypeVar

import pymongo
from bson import ObjectId
from bson.binary import Binary
from pymongo.client_session import ClientSession
from pymongo.errors import PyMongoError

from mongo_celery.errors import ConfigurationError, TransactionStateError, TransactionTimeoutError
from mongo_celery.mongo.opening import ANSWER_SECONDS
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.repeating import Pauses, retry_until_answered
from mongo_celery.mongo.verdicts import explain_error, is_transient
from mongo_celery.quantities import number
from mongo_celery.twophase.across import AcrossClusters, begun_fields
from mongo_celery.twophase.clusters import AwayError, Clusters, is_away, without
from mongo_celery.twophase.coordinator import BusyError, Coordinator, OvertakenError, StuckError
from mongo_celery.twophase.follower import LogFollower
from mongo_celery.twophase.local import in_one
from mongo_celery.twophase.log import TransactionLog
from mongo_celery.twophase.participants import Part
from mongo_celery.twophase.sessions import SessionPool, end_transactions, sessions_of
from mongo_celery.twophase.states import State, Transaction
from mongo_celery.twophase.within import WithinCluster

logger = logging.getLogger("mongo_celery.twophase")

Result = TypeVar("Result")

FINISHED_BY_RECOVERY = "recovery will finish it"
NOT_BEGUN = (
    "run it again: nothing may have been begun yet, and recovery finishes only what was begun, or queued by delay"
)
_PAUSES = Pauses(first=0.01, longest=0.5, jitter=1.0)
_LOOKS = Pauses(first=0.01, longest=0.5)
_LEAST_SECONDS = 0.05
"""For what has no time left: PyMongo takes 0 for no limit."""

_SHARES = 8
"""A participant that does not answer may use up such a part of a call's time while others are to be undone."""

_SIGN_SECONDS = 3.0
"""How long recovery waits for a cluster's sign of life; what is in it is left for the next recovery then."""


class Way(Enum):
    """How a transaction is carried out."""

    WITHIN = "in one MongoDB transaction"
    ACROSS = "with receipts"
    DOCUMENTS = "with markers in the documents"


class Completion:
    """
    Completes transactions of one log.

    Args:
        log: of the transactions.
        clusters: those that take part.
        timeout: seconds for which a call may last: transient errors are repeated, and others are waited for.
        protocol: `auto`, or `documents` for markers whatever the clusters can do.
    """

    def __init__(self, log: TransactionLog, clusters: Clusters, timeout: float, protocol: str) -> None:
        self._log = log
        self._client = log.collection.database.client
        self._clusters = clusters
        self._pool = SessionPool()
        self._timeout = timeout
        self._protocol = protocol
        self.within = WithinCluster(log, clusters.open)
        self._across = AcrossClusters(log, clusters.open, clusters.is_standalone, timeout / _SHARES)
        self._follower = LogFollower(self._followed)

    @contextmanager
    def bounded(self, away: Container[str] = ()) -> Iterator[float]:
        """
        No call to a server inside lasts beyond the timeout; gives its end on the monotonic clock.

        Args:
            away: clusters that do not answer, as is known: nothing is asked of these.
        """
        with sessions_of(self._clusters, self._pool), without(away), pymongo.timeout(self._timeout):
            yield time.monotonic() + self._timeout

    def prepare_taking(self, transactions: Sequence[Transaction]) -> None:
        """
        End what other coordinators keep open for these, which is to be taken from them.

        Raises:
            ConfigurationError: this process could not finish one of them, so it must not take it: another
                application's would be looked after by nobody any more.
        """
        for each in transactions:
            self._clusters.refuse_unknown(each.parts)
        named = [each for each in transactions if each.sessions]
        wanted: dict[str | None, dict[Binary, float]] = {}
        # By the age of each: among many somebody has taken over one just now, and those of the others may be at work.
        for each, age in self._log.ages_of(named) if named else ():
            for cluster, identity in each.sessions:
                if self._clusters.knows(cluster) and not is_away(cluster):
                    ages = wanted.setdefault(cluster, {})
                    ages[identity] = min(age, ages.get(identity, age))
        for cluster, ages in wanted.items():
            count = end_transactions(self._clusters.client(cluster), ages, self._timeout)
            if count:
                logger.warning(
                    "ended what another coordinator has kept open in %s: %s",
                    "the log's cluster" if cluster is None else f"cluster {cluster!r}",
                    number(count, "transaction", "transactions"),
                    extra={"event": "coordinator_ended"},
                )

    def once_bounded(self, attempt: Callable[[], Result]) -> Result:
        """One call to the log's server, repeated while that makes sense, within the timeout."""
        with self.bounded() as deadline:
            return self.until_answered(attempt, deadline, hint="call it again")

    def ask(self, cluster: str) -> None:
        """Have a cluster answer once, within some seconds; one that is not known here is said where it is needed."""
        if self._clusters.knows(cluster):
            with pymongo.timeout(min(self._timeout, _SIGN_SECONDS)):
                self._clusters.ping(cluster)

    def new_coordinator(self, identity: ObjectId | None = None) -> Coordinator:
        """A coordinator with an identity of its own, or the given one."""
        return Coordinator(self._log, self._clusters.open, identity or ObjectId(), self._timeout / _SHARES)

    def way_for(self, parts: Sequence[Part]) -> Way:
        """How a transaction is carried out that nobody has begun."""
        clusters = {part.cluster for part in parts}
        # One whose cluster is not known here fails when it is opened, and says why.
        known = {each for each in clusters if self._clusters.knows(each)}
        if self._protocol == "documents" or self._clusters.is_standalone(None):
            return Way.DOCUMENTS
        if clusters <= {None}:
            return Way.WITHIN
        by_markers = known == clusters and all(map(self._clusters.is_standalone, clusters))
        return Way.DOCUMENTS if by_markers else Way.ACROSS

    def refuse_beyond_transaction(self, parts: Sequence[Part]) -> None:
        """
        Refuse to run what an open transaction of the log's cluster cannot do; no server is asked.

        Raises:
            ConfigurationError: a participant is in another cluster, or they get markers.
        """
        elsewhere = next((part for part in parts if part.cluster is not None), None)
        if elsewhere is None and self._protocol != "documents":
            return
        why = "protocol='documents'" if elsewhere is None else f"participant {elsewhere} in another cluster"
        raise ConfigurationError(
            f"A transaction is open here, and this one, with {why}, cannot be a part of it. Nothing was changed. Store "
            "it with run=False and call delay(id): Celery runs it after the commit. Or make the call after the commit, "
            "with after_commit."
        )

    def way_of(self, transaction: Transaction) -> Way:
        """How it is carried out: as it was begun."""
        if transaction.state is State.INITIAL:
            return self.way_for(transaction.parts)
        return Way.DOCUMENTS if transaction.key is None else Way.ACROSS

    def way_asked(self, transaction: Transaction, deadline: float) -> Way:
        """The same, repeated until its clusters have answered what they are; errors as of `until_answered`."""
        return self.until_answered(lambda: self.way_of(transaction), deadline, hint=NOT_BEGUN, id=transaction.id)

    def to_the_end(self, transaction: Transaction, deadline: float, *, any_application: bool = False) -> Transaction:
        """
        Step by step until the state is final. If another coordinator takes over, wait for it.

        Args:
            transaction: as it was read, or taken over.
            deadline: of the monotonic clock.
            any_application: whether one that nobody has begun may belong to another application.

        Raises:
            TransactionStateError: a participant refuses to be undone, or two of them are one document.
            TransactionTimeoutError: the time is used up.
        """
        unchanged = 0
        while not transaction.state.is_final:
            current = transaction
            way = self.way_asked(current, deadline)
            if way is Way.DOCUMENTS:
                return self._by_documents(current, deadline)
            try:
                transaction = self.advanced(current, way, deadline, any_application=any_application)
            except OvertakenError:
                transaction = self.until_answered(lambda: self._log.get(current.id), deadline, id=current.id)  # noqa: B023
                if transaction.state is not State.INITIAL and transaction.key is None:
                    return self._awaited(transaction.id, deadline)  # somebody has begun it with markers
                if transaction.state is current.state:  # a receipt that no majority shows yet, or a log put back
                    _wait_or_give_up(transaction, unchanged, deadline)
                    unchanged += 1
            except StuckError as error:
                raise self.stopped(current, error) from error
        return transaction

    def advanced(
        self, transaction: Transaction, way: Way, deadline: float, *, any_application: bool = False
    ) -> Transaction:
        """One step with MongoDB transactions; errors as of `AcrossClusters.step`."""
        is_initial = transaction.state is State.INITIAL
        hint = NOT_BEGUN if is_initial else FINISHED_BY_RECOVERY
        step = self.within.run if way is Way.WITHIN else self._across.step
        with _named(transaction.id, hint, hint):
            return self.until_answered(
                lambda: step(transaction, deadline, any_application=any_application),
                deadline,
                hint=hint,
                id=transaction.id,
            )

    def to_its_decision(self, begun: Transaction, deadline: float) -> Transaction:
        """
        Carry out a transaction over several clusters that has just been begun; the log follows a moment later.

        Returns:
            It is canceled; or it is done, whatever its state here says.

        Raises:
            TransactionStateError, TransactionTimeoutError: as of `to_the_end`.
        """
        if begun.state is not State.PENDING:  # the answer was lost when it was begun, and somebody has taken it over
            return self.to_the_end(begun, deadline)
        try:
            with _named(begun.id, FINISHED_BY_RECOVERY, FINISHED_BY_RECOVERY):
                after = self.until_answered(lambda: self._across.decide(begun, deadline), deadline, id=begun.id)
        except OvertakenError:
            return self.to_the_end(begun, deadline)
        except StuckError as error:
            raise self.stopped(begun, error) from error
        if after.state is State.CANCELING:
            return self.to_the_end(after, deadline)
        self._follower.take(after, deadline)
        return after

    def _followed(self, transactions: Sequence[Transaction], deadline: float | None) -> None:
        with self.bounded() as bound:
            until = bound if deadline is None else min(bound, deadline)
            with pymongo.timeout(max(until - time.monotonic(), _LEAST_SECONDS)):
                self.until_answered(lambda: self._across.follow(transactions), until)

    def flush(self, until: float) -> bool:
        """Whether the log has followed all that this process has decided, before a time of the monotonic clock."""
        return self._follower.flush(until)

    def is_decided(self, transaction: Transaction, deadline: float) -> bool:
        """Whether all of it is committed, though the log may not say so yet."""
        if transaction.key is None or transaction.state not in {State.PENDING, State.APPLIED}:
            return False
        return self.until_answered(lambda: self._across.is_decided(transaction), deadline, id=transaction.id)

    def in_one(self, body: Callable[[ClientSession | None], Result], deadline: float) -> Result:
        """Run a body on the log in one MongoDB transaction; without one where the log is on a standalone server."""
        return body(None) if self._clusters.is_standalone(None) else in_one(self._client, body, deadline)

    def together(self, transactions: Sequence[Transaction], deadline: float) -> list[Transaction]:
        """Finish several that are alike; see `AcrossClusters.together`."""
        return self._across.together(transactions, deadline)

    def stored_and_done(
        self, fields: Mapping[str, Any], parts: tuple[Part, ...], identity: Any, deadline: float
    ) -> str | None:
        """Store a transaction and carry it out in one MongoDB transaction; see `WithinCluster.store`."""
        mark = ObjectId()
        hint = (
            f"whether transaction {identity!r} was done is not known: it was if it is in the log, and else not at all"
        )
        with _named(identity, "nothing was stored", hint):
            return self.until_answered(
                lambda: self.within.store(fields, parts, identity, mark, deadline), deadline, hint=hint, id=identity
            )

    def stored_and_begun(
        self, given: Mapping[str, Any], parts: tuple[Part, ...], identity: Any, deadline: float
    ) -> Transaction:
        """Store a transaction over several clusters as begun; errors as of `AcrossClusters.store`."""
        fields = begun_fields(parts, given.get("participants"))
        hint = f"whether transaction {identity!r} was begun is not known; if it is in the log, {FINISHED_BY_RECOVERY}"
        with _named(identity, "nothing was stored", hint):
            return self.until_answered(
                lambda: self._across.store(fields, parts, identity, deadline), deadline, hint=hint, id=identity
            )

    def stopped(self, transaction: Transaction, error: StuckError) -> TransactionStateError:
        """What to say of a transaction that no coordinator gets any further; it is noted in it, as far as that goes."""
        with suppress(PyMongoError), pymongo.timeout(ANSWER_SECONDS):
            self._log.note_stopped(transaction, str(error))
        return TransactionStateError(
            f"transaction {transaction.id!r} stays {transaction.state}: {error}. Put it right, then recover.",
            id=transaction.id,
            state=transaction.state,
        )

    def _by_documents(self, transaction: Transaction, deadline: float) -> Transaction:
        coordinator = self.new_coordinator(transaction.driver)
        while not transaction.state.is_final:
            current = transaction
            step = coordinator.begin_and_apply if current.state is State.INITIAL else coordinator.step
            try:
                transaction = self._once_more(step, current, coordinator, deadline)
            except OvertakenError:
                return self._awaited(transaction.id, deadline)
            except StuckError as error:
                raise self.stopped(current, error) from error
        return transaction

    def until_answered(
        self,
        attempt: Callable[[], Result],
        deadline: float,
        *,
        hint: str = FINISHED_BY_RECOVERY,
        **fields: Any,
    ) -> Result:
        """
        Repeat an attempt that met a transient error, or found something changed, until the time is used up.

        Args:
            attempt: what is done; it may be done several times.
            deadline: of the monotonic clock.
            hint: what follows when the time is used up.
            fields: of the error.

        Raises:
            TransactionTimeoutError: it is.
        """
        try:
            return retry_until_answered(attempt, deadline=deadline, pauses=_PAUSES, repeatable=_is_repeatable)
        except (PyMongoError, BusyError) as error:
            if not _is_repeatable(error):
                known = explain_error(error, self._log.concern)
                if known is None:
                    raise
                raise known from error
            raise TransactionTimeoutError(
                f"MongoDB did not let it get on in time{_where(error)} ({short(error)}); {hint}.",
                outcome="unknown",
                **fields,
            ) from error

    def _once_more(
        self, step: Callable[[Transaction], Transaction], seen: Transaction, coordinator: Coordinator, deadline: float
    ) -> Transaction:
        """A step; if an answer was lost and the step had been done after all, go on from there."""
        hint = NOT_BEGUN if seen.state is State.INITIAL else FINISHED_BY_RECOVERY
        try:
            return self.until_answered(lambda: step(seen), deadline, hint=hint, id=seen.id)
        except OvertakenError:
            now = self.until_answered(lambda: self._log.get(seen.id), deadline, id=seen.id)
            if now.driver != coordinator.identity:
                raise
            return now

    def _awaited(self, transaction_id: Any, deadline: float) -> Transaction:
        count = 0
        while True:
            now = self.until_answered(lambda: self._log.get(transaction_id), deadline, id=transaction_id)
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


def _wait_or_give_up(transaction: Transaction, count: int, deadline: float) -> None:
    pause = _LOOKS.nth(count)
    if time.monotonic() + 2 * pause >= deadline:  # the next try would meet the end of its time, and say only that
        raise TransactionTimeoutError(
            f"transaction {transaction.id!r} stays {transaction.state}: it belongs to another application by now."
            if transaction.state is State.INITIAL
            else f"transaction {transaction.id!r} stays {transaction.state} though a receipt of it says otherwise: was "
            "the log, or a cluster, put back to an earlier time?",
            id=transaction.id,
            outcome="unknown",
        )
    time.sleep(pause)


@contextmanager
def _named(identity: Any, aborted: str, unknown: str) -> Iterator[None]:
    """
    Say of a MongoDB transaction that has used its time up which transaction it belonged to.

    Args:
        identity: of the transaction.
        aborted: what follows if it was aborted.
        unknown: what follows if no commit was answered.
    """
    try:
        yield
    except TransactionTimeoutError as error:
        if "id" in vars(error):
            raise
        outcome = vars(error).get("outcome", "unknown")
        follows = aborted if outcome == "aborted" else unknown
        message = f"transaction {identity!r} did not get on{_where(error)}: {follows}. {error}"
        raise TransactionTimeoutError(message, id=identity, outcome=outcome) from error


def _where(error: BaseException) -> str:
    """In which cluster it was, as far as that was noted."""
    return "".join(f" {note}" for note in getattr(error, "__notes__", ())[:1])


def _is_repeatable(error: Exception) -> bool:
    return isinstance(error, BusyError) or (is_transient(error) and not isinstance(error, AwayError))


def still_mine(transaction: Transaction | None) -> Transaction:
    """What a conditional update returned; None means that it met another state, and calls for another attempt."""
    if transaction is None:
        raise BusyError("it changed meanwhile")
    return transaction
