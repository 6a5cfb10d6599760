"""
Advancing one transaction with markers: one step after the other, each of which may be repeated by anybody.

A coordinator that is overtaken (another has raised the transaction's version) stops at its next write on the
transaction. Whatever it still sends to a participant is refused by the participant's version: see `documents`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
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
from mongo_celery.twophase.log import TransactionLog
from mongo_celery.twophase.participants import MARKERS, PARTICIPANT_VERSION, Part
from mongo_celery.twophase.states import State, Transaction

logger = logging.getLogger("mongo_celery.twophase")

Open = Callable[[Part], Collection[dict[str, Any]]]

_ROUNDS = 50
"""How often other transactions may have changed a participant's version before the attempt is given up for now."""

_PAUSES = Pauses(first=0.05, longest=0.05, jitter=1.0)


class OvertakenError(Exception):
    """Another coordinator has the transaction, or it is no longer in the state in which this one left it."""


class BusyError(Exception):
    """Other transactions kept changing a participant's version; try again."""


class StuckError(Exception):
    """A participant can be neither changed nor undone; the transaction stays in its state."""


class Coordinator:
    """
    Performs steps. Holds nothing of a transaction between two of them.

    Args:
        log: of the transactions.
        open_part: gives a participant's collection, with majority writes and reads.
        identity: of this coordinator.
        share: seconds for which one participant may keep the others from having back what is theirs.
    """

    def __init__(self, log: TransactionLog, open_part: Open, identity: ObjectId, share: float) -> None:
        self._log = log
        self._open = open_part
        self.identity = identity
        self._share = share

    def step(self, transaction: Transaction) -> Transaction:
        """
        Do what comes next, and record it.

        Returns:
            The transaction after the step; the same if it is final.

        Raises:
            OvertakenError, BusyError, StuckError: see there.
            PyMongoError: the outcome may be unknown; repeat the step.
        """
        if transaction.state is State.INITIAL:
            return self.begin(transaction)
        if transaction.state is State.PENDING:
            return self._apply(transaction, None)
        if transaction.state is State.APPLIED:
            return self._settle(transaction)
        if transaction.state is State.CANCELING:
            return self._undo(transaction)
        return transaction

    def begin(self, transaction: Transaction, *, any_application: bool = False) -> Transaction:
        """Initial to pending, with the incarnations of the participants; or to canceled."""
        if transaction.refusal is not None:
            return self._mine(self._log.drop(transaction, _noted(transaction, transaction.refusal)))
        return self._claimed(transaction, self._views(transaction), any_application=any_application)

    def begin_and_apply(self, transaction: Transaction) -> Transaction:
        """
        Initial to applied in one go.

        The claim itself proves that the transaction was not beyond `pending` when the participants were looked at.
        """
        if transaction.refusal is not None:
            return self.begin(transaction)
        views = self._views(transaction)
        return self._apply(self._claimed(transaction, views), views)

    def _views(self, transaction: Transaction) -> list[View]:
        """
        A look at each participant.

        One that has no version is given one as long as nobody has recorded the incarnations.
        """
        give = transaction.incarnations is None
        return [self._look(transaction, part, give=give) for part in transaction.parts]

    def _claimed(self, transaction: Transaction, views: list[View], *, any_application: bool = False) -> Transaction:
        fields = {"incarnations": [view.incarnation for view in views]}
        return self._mine(self._log.claim(transaction, self.identity, any_application=any_application, fields=fields))

    def _apply(self, transaction: Transaction, views: list[View] | None) -> Transaction:
        """All participants, in their order; then `applied`. Or `canceling`, where one of them refuses."""
        if transaction.refusal is not None:
            return self._cancel(transaction, transaction.refusal)
        try:
            if transaction.is_late:
                return self._apply_late(transaction)
            return self._applied(transaction, views)
        except StuckError:
            self._prove(transaction)
            raise
        except OperationFailure as error:
            if isinstance(error, WriteError) or is_transient(error):
                raise
            # A right that is missing, or a collection that takes no writes: it has until the deadline to be put right.
            reason = f"a participant cannot be read or written ({brief(error)})"
            if transaction.deadline is None:  # of the tutorial's code
                raise StuckError(reason) from error
            raise StuckError(f"{reason}; it is canceled by the first recovery after its deadline") from error

    def _apply_late(self, transaction: Transaction) -> Transaction:
        """After the deadline: `applied` where everything is there already; else `canceling`, whoever is silent."""
        try:
            with pymongo.timeout(self._share):
                views = self._views(transaction)
                twice = self._twice(transaction, views)
        except PyMongoError as error:
            return self._cancel(
                transaction, f"its deadline has passed, and a participant cannot be read or written ({brief(error)})"
            )
        if twice is not None:
            return self._cancel(transaction, twice)
        known = [_known(transaction, index, view) for index, view in enumerate(views)]
        if all(each == (True, None) for each in known):
            return self._advance(transaction, State.APPLIED)
        return self._cancel(transaction, "it was not applied before its deadline")

    def _applied(self, transaction: Transaction, views: list[View] | None) -> Transaction:
        parts = transaction.parts
        reached = 0
        for _ in range(_ROUNDS):
            if views is None:
                views = self._views(transaction)
                self._prove(transaction)
            twice = self._twice(transaction, views)
            if twice is not None:
                return self._cancel(transaction, twice)
            while reached < len(parts):
                applied, reason = self._apply_one(transaction, reached, views[reached])
                if reason is not None:
                    return self._cancel(transaction, reason)
                if not applied:
                    break
                reached += 1
            if reached == len(parts):
                return self._advance(transaction, State.APPLIED)
            views = None
            time.sleep(_PAUSES.nth())
        raise BusyError

    def _twice(self, transaction: Transaction, views: list[View]) -> str | None:
        """Why not, if the server has found one document for two participants: the marker cannot tell them apart."""
        parts = transaction.parts
        for index, (part, view) in enumerate(zip(parts, views, strict=True)):
            for other, seen in zip(parts[:index], views[:index], strict=True):
                if view.id is None or seen.id is None or part.namespace != other.namespace:
                    continue
                clients = [self._open(each).database.client for each in (part, other)]
                if not same_bson(view.id, seen.id) or not is_same_cluster(*clients):
                    continue
                reason = f"participants {other} and {part} are one document; combine both changes in one participant"
                if view.marked:
                    # Which of the two changes it has cannot be known: undoing the wrong one would lose something.
                    raise StuckError(f"{reason}; one of them was applied, so put it right by hand")
                return reason
        return None

    def _apply_one(self, transaction: Transaction, index: int, view: View) -> tuple[bool, str | None]:
        """Whether it is applied now; if not, the reason to cancel, or None to look again."""
        part = transaction.parts[index]
        known = _known(transaction, index, view)
        if known is not None:
            return known
        try:
            if documents.apply(self._open(part), part, transaction.marker, view.participant_version):
                return True, None
        except WriteError as error:
            if is_transient(error):
                raise
            return False, f"participant {part} refuses the change: {short(error)}"
        return self._why_not(transaction, index, view)

    def _why_not(self, transaction: Transaction, index: int, view: View) -> tuple[bool, str | None]:
        """What an apply that matched nothing has met."""
        part = transaction.parts[index]
        now = self._look(transaction, part, give=transaction.incarnations is None)
        known = _known(transaction, index, now)
        if known is not None:
            return known
        if view.participant_version is None or now.participant_version != view.participant_version:
            return False, None
        return False, f"participant {part} does not meet {dict(part.require)!r}"

    def _advance(self, transaction: Transaction, state: State) -> Transaction:
        return self._mine(self._log.advance(transaction, state))

    def _cancel(self, transaction: Transaction, reason: str) -> Transaction:
        return self._mine(self._log.cancel(transaction, self.identity, _noted(transaction, reason)))

    def _settle(self, transaction: Transaction) -> Transaction:
        together: dict[tuple[str | None, str], list[Part]] = {}
        for part in transaction.parts:
            together.setdefault((part.cluster, part.namespace), []).append(part)
        for parts in together.values():
            documents.settle(self._open(parts[0]), parts, transaction.marker)
        return self._advance(transaction, State.DONE)

    def _undo(self, transaction: Transaction) -> Transaction:
        """Each of them, also after one that cannot be undone or does not answer: the others get back what they can."""
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
            self._prove(transaction)
            raise stuck
        if unanswered is not None:
            raise unanswered
        return self._advance(transaction, State.CANCELED)

    def _undo_one(self, transaction: Transaction, index: int) -> None:
        part, recorded = transaction.parts[index], _recorded(transaction, index)
        try:
            outcome = documents.undo(self._open(part), part, transaction.marker, recorded)
        except OperationFailure as error:
            if is_transient(error):
                raise
            raise StuckError(f"participant {part} refuses to be undone: {brief(error)}") from error
        if outcome is Undone.REFUSED:
            raise StuckError(f"participant {part} cannot be undone: it does not meet {dict(part.revert_require)!r}")
        if outcome is Undone.REPLACED:
            raise _replaced(transaction, part, recorded)
        if outcome is Undone.GONE:
            logger.warning(
                "transaction %r: participant %s is gone; nothing to undo there",
                transaction.id,
                part,
                extra={"event": "participant_gone"},
            )

    def _look(self, transaction: Transaction, part: Part, *, give: bool) -> View:
        return self._look_of(transaction.marker, part, give=give)

    def _look_of(self, marker: Any, part: Part, *, give: bool = True) -> View:
        try:
            return documents.look(self._open(part), part, marker, give=give)
        except WriteError as error:
            if is_transient(error):
                raise
            refusal = (
                f"participant {part} refuses the field {PARTICIPANT_VERSION!r} ({short(error)}): allow it as an "
                f"object, and {MARKERS!r} as an array, in the collection's validator"
            )
            return View(exists=True, marked=False, participant_version=None, refusal=refusal)

    def _prove(self, transaction: Transaction) -> None:
        """Prove that the transaction is in the same state, and mine: what was seen counts only then."""
        if not self._log.touch(transaction):
            raise OvertakenError

    @staticmethod
    def _mine(transaction: Transaction | None) -> Transaction:
        if transaction is None:
            raise OvertakenError
        return transaction


def _known(transaction: Transaction, index: int, view: View) -> tuple[bool, str | None] | None:
    """
    What a look alone decides: it is applied already, or why to cancel; None if only trying can tell.

    Raises:
        StuckError: it is no longer the document that it was, so whether it has its change cannot be known.
    """
    part, recorded = transaction.parts[index], _recorded(transaction, index)
    if view.marked:
        return True, None
    if not view.exists:
        return False, f"participant {part} does not exist"
    if view.refusal is not None:
        return False, view.refusal
    if recorded is None:  # it has never had a version, so nothing was ever applied there
        return False, f"participant {part} did not exist, or took no version, when the transaction was begun"
    if recorded is not UNRECORDED and view.incarnation != recorded:
        raise _replaced(transaction, part, recorded)
    return None


def _recorded(transaction: Transaction, index: int) -> Any:
    """The incarnation of a participant when the transaction was begun."""
    return UNRECORDED if transaction.incarnations is None else transaction.incarnations[index]


def _replaced(transaction: Transaction, part: Part, recorded: Any) -> StuckError:
    logger.error(
        "transaction %r: participant %s was replaced or made anew in the middle of it",
        transaction.id,
        part,
        extra={"event": "participant_replaced"},
    )
    return StuckError(
        f"participant {part} was written back as a whole, or deleted and made anew, in the middle of it, so whether it "
        f"has its change cannot be known; if it has, push {transaction.marker!r} to its {MARKERS!r}, and in either "
        f"case set its {PARTICIPANT_VERSION!r} to {{of: {recorded!r}, at: ObjectId()}}"
    )


def _noted(transaction: Transaction, reason: str) -> str:
    logger.warning("transaction %r is canceled: %s", transaction.id, reason, extra={"event": "transaction_canceled"})
    return reason
