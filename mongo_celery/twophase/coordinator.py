"""
Advancing one transaction: one step after the other, each of which may be repeated by anybody.

A coordinator that is overtaken (another has raised the transaction's version) stops at its next write on the
transaction. Whatever it still sends to a participant is refused by the participant's version: see `documents`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from bson import ObjectId
from pymongo.collection import Collection
from pymongo.errors import WriteError

from mongo_celery.mongo.identity import same_bson
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.verdicts import is_transient
from mongo_celery.twophase import documents
from mongo_celery.twophase.clusters import is_one_server
from mongo_celery.twophase.documents import Undone, View
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
    """

    def __init__(self, log: TransactionLog, open_part: Open, identity: ObjectId) -> None:
        self._log = log
        self._open = open_part
        self.identity = identity

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

    def begin(self, transaction: Transaction) -> Transaction:
        """Initial to pending."""
        return self._mine(self._log.claim(transaction, self.identity))

    def begin_and_apply(self, transaction: Transaction) -> Transaction:
        """
        Initial to applied in one go.

        The claim itself proves that the transaction was not beyond `pending` when the participants were looked at.
        """
        views = [self._look(transaction, part) for part in transaction.parts]
        return self._apply(self._mine(self._log.claim(transaction, self.identity)), views)

    def _apply(self, transaction: Transaction, views: list[View] | None) -> Transaction:
        """All participants, in their order; then `applied`. Or `canceling`, where one of them refuses."""
        parts = transaction.parts
        reached = 0
        for _ in range(_ROUNDS):
            if views is None:
                views = [self._look(transaction, part) for part in parts]
                if not self._log.touch(transaction):
                    raise OvertakenError
            twice = self._twice(transaction, views)
            if twice is not None:
                return self._cancel(transaction, twice)
            while reached < len(parts):
                applied, reason = self._apply_one(transaction, parts[reached], views[reached])
                if reason is not None:
                    return self._cancel(transaction, reason)
                if not applied:
                    break
                reached += 1
            if reached == len(parts):
                return self._mine(self._log.advance(transaction, State.APPLIED))
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
                if not same_bson(view.id, seen.id) or not is_one_server(self._open(part), self._open(other)):
                    continue
                reason = f"participants {other} and {part} are one document; combine both changes in one participant"
                if view.marked:
                    # Which of the two changes it has cannot be known: undoing the wrong one would lose something.
                    raise StuckError(f"{reason}; one of them was applied, so put it right by hand")
                return reason
        return None

    def _apply_one(self, transaction: Transaction, part: Part, view: View) -> tuple[bool, str | None]:
        """Whether it is applied now; if not, the reason to cancel, or None to look again."""
        known = _known(part, view)
        if known is not None:
            return known
        try:
            if documents.apply(self._open(part), part, transaction.id, view.participant_version):
                return True, None
        except WriteError as error:
            if is_transient(error):
                raise
            return False, f"participant {part} refuses the change: {short(error)}"
        return self._why_not(transaction, part, view)

    def _why_not(self, transaction: Transaction, part: Part, view: View) -> tuple[bool, str | None]:
        """What an apply that matched nothing has met."""
        now = self._look(transaction, part)
        known = _known(part, now)
        if known is not None:
            return known
        if view.participant_version is None or now.participant_version != view.participant_version:
            return False, None
        return False, f"participant {part} does not meet {dict(part.require)!r}"

    def _cancel(self, transaction: Transaction, reason: str) -> Transaction:
        logger.warning(
            "transaction %r is canceled: %s", transaction.id, reason, extra={"event": "transaction_canceled"}
        )
        return self._mine(self._log.cancel(transaction, self.identity, reason))

    def _settle(self, transaction: Transaction) -> Transaction:
        for part in transaction.parts:
            documents.settle(self._open(part), part, transaction.id)
        return self._mine(self._log.advance(transaction, State.DONE))

    def _undo(self, transaction: Transaction) -> Transaction:
        for part in reversed(transaction.parts):
            try:
                outcome = documents.undo(self._open(part), part, transaction.id)
            except WriteError as error:
                if is_transient(error):
                    raise
                raise StuckError(f"participant {part} refuses to be undone: {short(error)}") from error
            if outcome is Undone.REFUSED:
                rule = dict(part.revert_require)
                raise StuckError(f"participant {part} cannot be undone: it does not meet {rule!r}")
            if outcome is Undone.GONE:
                logger.warning(
                    "transaction %r: participant %s is gone; nothing to undo there",
                    transaction.id,
                    part,
                    extra={"event": "participant_gone"},
                )
        return self._mine(self._log.advance(transaction, State.CANCELED))

    def _look(self, transaction: Transaction, part: Part) -> View:
        try:
            return documents.look(self._open(part), part, transaction.id)
        except WriteError as error:
            if is_transient(error):
                raise
            refusal = (
                f"participant {part} refuses the field {PARTICIPANT_VERSION!r} ({short(error)}): allow it, and "
                f"{MARKERS!r}, in the collection's validator"
            )
            return View(exists=True, marked=False, participant_version=None, refusal=refusal)

    @staticmethod
    def _mine(transaction: Transaction | None) -> Transaction:
        if transaction is None:
            raise OvertakenError
        return transaction


def _known(part: Part, view: View) -> tuple[bool, str | None] | None:
    """What a look alone decides: it is applied already, or why to cancel; None if only trying can tell."""
    if view.marked:
        return True, None
    if not view.exists:
        return False, f"participant {part} does not exist"
    return None if view.refusal is None else (False, view.refusal)
