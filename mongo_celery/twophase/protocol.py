"""
The tutorial's protocol: a transaction over any documents, step by step. Any process may repeat each step.

| step | in the participants | then in the log |
|---|---|---|
| begin | look at each, and give it a version | `pending`, with the participants' incarnations |
| apply | change each, and push the marker, while its version is unchanged | `applied` |
| settle | pull the markers, renew the versions | `done` |
| cancel | | `canceling`, instead of `applied` |
| undo | take back if the marker exists, renew the versions | `canceled` |

If another coordinator takes a transaction over (its version grows), the first one stops at its next write to the log.
The participants' versions refuse its late writes: see `documents`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pymongo
from bson import ObjectId
from pymongo.collection import Collection
from pymongo.errors import OperationFailure, PyMongoError, WriteError

from mongo_celery.mongo.cluster import is_same_cluster
from mongo_celery.mongo.identity import same_bson
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.verdicts import brief, is_transient
from mongo_celery.twophase import documents
from mongo_celery.twophase.documents import UNRECORDED, Undone, View
from mongo_celery.twophase.log import OvertakenError, TransactionLog, log_cancel
from mongo_celery.twophase.participants import MARKERS, PARTICIPANT_VERSION, Part
from mongo_celery.twophase.transaction import State, Transaction

logger = logging.getLogger("mongo_celery.twophase")

Open = Callable[[Part], Collection[dict[str, Any]]]

_ROUNDS = 50
"""Number of concurrent version changes of a participant before a coordinator gives up an attempt."""

_PAUSES = Pauses(first=0.05, longest=0.05, jitter=1.0)


class StuckError(Exception):
    """A participant can be neither changed nor undone. The transaction keeps its state."""


class Coordinator:
    """
    Performs the steps of transactions. Between two steps it stores nothing about one.

    Args:
        log: the log of the transactions.
        open_part: returns a participant's collection, with majority writes and reads.
        share: seconds that one participant may delay the undo of the others.
        any_application: True to begin transactions of other applications too.

    Attributes:
        identity: id of this object, which its transactions store as `coordinator`.
        any_application: as passed.
    """

    def __init__(self, log: TransactionLog, open_part: Open, share: float, *, any_application: bool = False) -> None:
        self._log = log
        self._open = open_part
        self._share = share
        self.any_application = any_application
        self.identity = ObjectId()

    def step(self, transaction: Transaction) -> Transaction:
        """
        Perform and record the next step. A new transaction is begun and applied in one step.

        Returns:
            The transaction after the step. The same if it is final.

        Raises:
            OvertakenError: another coordinator owns the transaction, or others kept changing a participant.
            StuckError: a participant can be neither changed nor undone.
            PyMongoError: the outcome may be unknown. Repeat the step.
        """
        if transaction.state is State.INITIAL:
            begun, views = self.begin(transaction)
            return self._apply(begun, views)
        if transaction.state is State.PENDING:
            return self._apply(transaction, None)
        if transaction.state is State.APPLIED:
            return self._settle(transaction)
        if transaction.state is State.CANCELING:
            return self._undo(transaction)
        return transaction

    # -- forward -----------------------------------------------------------------------------------

    def begin(self, transaction: Transaction) -> tuple[Transaction, list[View]]:
        """Move a transaction from initial to pending, and record the participants' incarnations."""
        views = self._look_at_all(transaction)
        begun = self._log.move(
            transaction,
            State.PENDING,
            coordinator=self.identity,
            any_application=self.any_application,
            incarnations=[view.incarnation for view in views],
        )
        return begun, views

    def _apply(self, transaction: Transaction, views: list[View] | None) -> Transaction:
        """
        Change all participants in order, then move to `applied`. If one refuses, move to `canceling`.

        Args:
            transaction: a pending transaction.
            views: the participants, read before this coordinator made the transaction pending. So they show the state
                before any change by this transaction.
        """
        try:
            with pymongo.timeout(self._share) if transaction.is_late else nullcontext():
                reason = self._apply_all(transaction, views)
        except StuckError:
            self._log.prove(transaction)
            raise
        except PyMongoError as error:
            reason = f"a participant cannot be read or written ({brief(error)})"
            if transaction.is_late:  # participants that have paid do not wait for a silent one
                return self._cancel(transaction, f"its deadline has passed, and {reason}")
            if not isinstance(error, OperationFailure) or isinstance(error, WriteError) or is_transient(error):
                raise
            # A missing right, or a read-only collection: an operator has until the deadline.
            if transaction.deadline is not None:
                reason = f"{reason}. The first recovery after its deadline cancels it"
            raise StuckError(reason) from error
        if reason is not None:
            return self._cancel(transaction, reason)
        return self._log.move(transaction, State.APPLIED)

    def _apply_all(self, transaction: Transaction, views: list[View] | None) -> str | None:
        """Change all participants. Return the reason to cancel, if any."""
        parts = transaction.parts
        reached = 0
        for _ in range(_ROUNDS):
            if views is None:
                views = self._look_at_all(transaction)
                self._log.prove(transaction)
            twice = self._find_twice(transaction, views)
            if twice is not None:
                return twice
            if transaction.is_late:
                known = [_judge_view(transaction, index, view) for index, view in enumerate(views)]
                return None if all(each == (True, None) for each in known) else "it was not applied before its deadline"
            while reached < len(parts):
                applied, reason = self._apply_one(transaction, reached, views[reached])
                if reason is not None:
                    return reason
                if not applied:
                    break
                reached += 1
            if reached == len(parts):
                return None
            views = None
            time.sleep(_PAUSES.nth())
        raise OvertakenError

    def _apply_one(self, transaction: Transaction, index: int, view: View) -> tuple[bool, str | None]:
        """Return True if the participant is now changed, the reason to cancel, or None to look again."""
        part = transaction.parts[index]
        known = _judge_view(transaction, index, view)
        if known is not None:
            return known
        try:
            if documents.apply(self._open(part), part, transaction.id, view.participant_version):
                return True, None
        except WriteError as error:
            if is_transient(error):
                raise
            return False, f"participant {part} refuses the change: {short(error)}"
        now = self._look(transaction, part)
        known = _judge_view(transaction, index, now)
        if known is not None:
            return known
        if view.participant_version is None or now.participant_version != view.participant_version:
            return False, None
        return False, f"participant {part} does not meet {dict(part.require)!r}"

    def _settle(self, transaction: Transaction) -> Transaction:
        together: dict[tuple[str | None, str], list[Part]] = {}
        for part in transaction.parts:
            together.setdefault((part.cluster, part.namespace), []).append(part)
        for parts in together.values():
            try:
                documents.settle(self._open(parts[0]), parts, transaction.id)
            except OperationFailure as error:
                if is_transient(error):
                    raise
                self._log.prove(transaction)
                why = f"a participant in {parts[0].namespace} cannot be completed: {brief(error)}"
                raise StuckError(why) from error
        return self._log.move(transaction, State.DONE)

    # -- backward ----------------------------------------------------------------------------------

    def _cancel(self, transaction: Transaction, reason: str) -> Transaction:
        canceling = self._log.move(transaction, State.CANCELING, coordinator=self.identity, reason=reason)
        log_cancel(transaction.id, reason)
        return canceling

    def _undo(self, transaction: Transaction) -> Transaction:
        """Undo each one. If one fails or does not answer, still restore the others."""
        stuck: StuckError | None = None
        unanswered: PyMongoError | None = None
        for index in reversed(range(len(transaction.parts))):
            try:
                with pymongo.timeout(self._share):
                    self._undo_one(transaction, index)
            except StuckError as error:
                stuck = stuck or error
            except PyMongoError as error:
                unanswered = unanswered or error
        if stuck is not None:
            self._log.prove(transaction)
            raise stuck
        if unanswered is not None:
            raise unanswered
        return self._log.move(transaction, State.CANCELED)

    def _undo_one(self, transaction: Transaction, index: int) -> None:
        part, recorded = transaction.parts[index], _find_incarnation(transaction, index)
        try:
            outcome = documents.undo(self._open(part), part, transaction.id, recorded)
        except OperationFailure as error:
            if is_transient(error):
                raise
            raise StuckError(f"participant {part} cannot be undone: {brief(error)}") from error
        if outcome is Undone.REFUSED:
            rule = dict(part.revert_require)
            raise StuckError(f"participant {part} cannot be undone: it does not match revert_require={rule!r}")
        if outcome is Undone.REPLACED:
            raise _make_replaced_error(transaction, index)
        if outcome is Undone.GONE:
            logger.warning(
                "transaction %r: participant %s no longer exists, so its change is not undone",
                transaction.id,
                part,
                extra={"event": "participant_gone"},
            )

    # -- look ----------------------------------------------------------------------------------------

    def _look_at_all(self, transaction: Transaction) -> list[View]:
        return [self._look(transaction, part) for part in transaction.parts]

    def _look(self, transaction: Transaction, part: Part) -> View:
        """Look at a participant. Without recorded incarnations, give it a version if it has none."""
        try:
            return documents.look(self._open(part), part, transaction.id, give=transaction.incarnations is None)
        except WriteError as error:
            if is_transient(error):
                raise
            refusal = (
                f"participant {part} refuses the field {PARTICIPANT_VERSION!r} ({short(error)}). Allow it as an "
                f"object, and {MARKERS!r} as an array, in the collection's validator"
            )
            return View(exists=True, marked=False, participant_version=None, refusal=refusal)

    def _find_twice(self, transaction: Transaction, views: list[View]) -> str | None:
        """Return the reason to refuse, if two participants are one document, which would share a marker."""
        parts = transaction.parts
        for index, (part, view) in enumerate(zip(parts, views, strict=True)):
            for other, seen in zip(parts[:index], views[:index], strict=True):
                if view.id is None or seen.id is None or part.namespace != other.namespace:
                    continue
                clients = [self._open(each).database.client for each in (part, other)]
                if not same_bson(view.id, seen.id) or not is_same_cluster(*clients):
                    continue
                reason = (
                    f"participants {other} and {part} are the same document. Combine both changes in one participant"
                )
                if view.marked:
                    # The applied one of the two changes is unknown: undoing the wrong one would lose data.
                    raise StuckError(f"{reason}. One of the changes was applied, so correct the document manually")
                return reason
        return None


def _judge_view(transaction: Transaction, index: int, view: View) -> tuple[bool, str | None] | None:
    """
    Return the decision from reading: already applied, or the reason to cancel. None if only trying decides.

    Raises:
        StuckError: it is no longer the same document, so it may or may not include its change.
    """
    part, recorded = transaction.parts[index], _find_incarnation(transaction, index)
    if view.marked:
        return True, None
    if not view.exists:
        return False, f"participant {part} does not exist"
    if view.refusal is not None:
        return False, view.refusal
    if recorded is None:  # it has never had a version, so nothing was ever applied there
        return False, f"participant {part} did not exist, or had no version, when the transaction started"
    if recorded is not UNRECORDED and view.incarnation != recorded:
        raise _make_replaced_error(transaction, index)
    return None


def _find_incarnation(transaction: Transaction, index: int) -> Any:
    """Return a participant's incarnation from when the transaction began."""
    return UNRECORDED if transaction.incarnations is None else transaction.incarnations[index]


def _make_replaced_error(transaction: Transaction, index: int) -> StuckError:
    part = transaction.parts[index]
    logger.error(
        "transaction %r: participant %s was replaced or created again during the transaction",
        transaction.id,
        part,
        extra={"event": "participant_replaced"},
    )
    # A fix must not change the participant's version: another stopped transaction would continue with it.
    return StuckError(
        f"participant {part} was replaced, or deleted and created again, during the transaction, so it is "
        f"unknown whether it has its change. If it does, push {transaction.id!r} to its {MARKERS!r}. If not, set "
        f"'incarnations.{index}' of the transaction to null, which cancels it"
    )
