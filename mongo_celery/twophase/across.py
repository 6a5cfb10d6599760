"""
Participants in several clusters: each cluster's share is one MongoDB transaction with a receipt.

| step | what is done |
|---|---|
| initial to pending | the entry has its key and its deadline; with the own branch where that is the first |
| pending to applied | the remote branches, in their order; then the log, with the own branch where that is the last |
| applied to done | the receipts are settled, the decider's at the end |
| pending to canceling | a participant refuses, the deadline has passed, or somebody asks for it |
| canceling to canceled | the decider is void, the others are undone; the log, with the own branch if it was first |
| canceling to applied | the decider was applied: what it has committed goes on |

Any number of coordinators may do any step at once, as late as they like: see `receipts`. So whoever asked for it is
released when it is decided, by the last remote branch or by the log with its own; what is left follows (`follower`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any

import pymongo
from bson import ObjectId
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery.errors import TransactionTimeoutError
from mongo_celery.mongo.verdicts import brief
from mongo_celery.twophase.branches import Branch, BranchPlan, Own, plan_of
from mongo_celery.twophase.clusters import noted
from mongo_celery.twophase.coordinator import BusyError, OvertakenError, StuckError
from mongo_celery.twophase.local import (
    RefusedError,
    UnmetError,
    change,
    in_one,
    is_unwritable,
    revert,
    why_unmet,
)
from mongo_celery.twophase.log import TransactionLog
from mongo_celery.twophase.marked import MarkedBranches
from mongo_celery.twophase.participants import Part
from mongo_celery.twophase.receipts import OverdueError, Receipt, Receipts, Share, UndoRefusedError, absent
from mongo_celery.twophase.states import RECEIPTS, State, Transaction

logger = logging.getLogger("mongo_celery.twophase")

Document = dict[str, Any]
Open = Callable[[Part], Collection[Document]]


class AcrossClusters:
    """
    Performs the steps of transactions over several clusters. Holds nothing of one between two of them.

    Args:
        log: of the transactions.
        open_part: gives a participant's collection, with majority writes and reads.
        is_standalone: whether a cluster has no MongoDB transactions.
        share: seconds for which one participant with markers may keep the others from having back what is theirs.
    """

    def __init__(
        self, log: TransactionLog, open_part: Open, is_standalone: Callable[[str], bool], share: float
    ) -> None:
        self._log = log
        self._open = open_part
        self._is_standalone = is_standalone
        self._receipts = Receipts(open_part)
        self._marked = MarkedBranches(log, open_part, ObjectId(), share)

    def step(self, transaction: Transaction, until: float, *, any_application: bool = False) -> Transaction:
        """
        Do what comes next, and record it.

        Args:
            transaction: as it was read.
            until: on the monotonic clock; for how long it is tried.
            any_application: whether one that nobody has begun may belong to another application.

        Returns:
            The transaction after the step; the same if it is final.

        Raises:
            OvertakenError: it is in another state by now; read it again.
            UnmetError: a participant was changed meanwhile; try again.
            StuckError: it stays where it is.
            PyMongoError, TransactionTimeoutError: the outcome may be unknown; read it again.
        """
        if transaction.state is State.INITIAL:
            return self._begin(transaction, until, any_application=any_application)
        if transaction.state is State.PENDING:
            return self._apply(transaction, until)
        if transaction.state is State.APPLIED:
            return self._settle(transaction)
        if transaction.state is State.CANCELING:
            return self._undo(transaction, until)
        return transaction

    # -- forward -----------------------------------------------------------------------------------

    def _begin(self, transaction: Transaction, until: float, *, any_application: bool) -> Transaction:
        """Initial to pending. One whose own branch refuses at once is canceled, and nothing was done."""
        fields = self._with_marked(begun_fields(transaction.parts), transaction.parts)

        def claimed(session: ClientSession | None) -> tuple[Transaction, bool]:
            claim = self._log.claim(
                transaction, ObjectId(), any_application=any_application, session=session, fields=fields
            )
            return _mine(claim), True

        try:
            return self._with_home(transaction.parts, claimed, until)
        except RefusedError as error:
            return _mine(self._log.drop(transaction, _logged(transaction.id, str(error))))

    def store(self, fields: Document, parts: tuple[Part, ...], identity: Any, until: float) -> Transaction:
        """
        Store a transaction as begun.

        Args:
            fields: as `begun_fields` has made them: the same ones where an answer was lost, so that it is known again.
            parts: its participants.
            identity: its id.
            until: as for `step`.

        Raises:
            KnownError: there is one of this id.
            RefusedError: a participant in the log's own cluster cannot be changed; nothing is stored.
            UnmetError, PyMongoError, TransactionTimeoutError: as for `step`.
        """
        whole = self._with_marked(fields, parts)
        return self._with_home(parts, lambda session: self._log.insert_begun(whole, parts, identity, session), until)

    def _with_marked(self, fields: Document, parts: tuple[Part, ...]) -> Document:
        """With the clusters that get markers, and the incarnations there, which are recorded before it is pending."""
        for part in parts:
            self._open(part)  # whoever does not know a cluster must not begin what it cannot finish
        remote = {part.cluster for part in parts if part.cluster is not None}
        marked = frozenset(filter(self._is_standalone, remote))
        if not marked:
            return fields
        return {
            **fields,
            "marked": sorted(marked),
            "incarnations": self._marked.incarnations(parts, marked, fields["key"]),
        }

    def _with_home(
        self, parts: tuple[Part, ...], begin: Callable[[ClientSession | None], tuple[Transaction, bool]], until: float
    ) -> Transaction:
        """Begin a transaction, together with the own branch where that is the first, and where it was not begun yet."""
        plan = plan_of(parts)
        if plan.home is None or plan.own is not Own.FIRST:
            return begin(None)[0]
        home = plan.home

        def body(session: ClientSession) -> Transaction:
            after, is_new = begin(session)
            if is_new:  # else the own branch was changed with it, by a commit whose answer was lost
                change(self._open, home.parts, session)
            return after

        self._log.prepare()
        try:
            return in_one(self._log.collection.database.client, body, until)
        except UnmetError as error:
            raise RefusedError(self._reason(home, error)) from error

    def _apply(self, transaction: Transaction, until: float) -> Transaction:
        """Pending to applied, or to canceling."""
        after = self.decide(transaction, until)
        return _mine(self._log.move(after, State.APPLIED)) if after.state is State.PENDING else after

    def is_decided(self, transaction: Transaction) -> bool:
        """Whether one that is pending or applied is committed in all clusters."""
        decider = plan_for(transaction).decider
        if transaction.state is State.APPLIED or decider is None:
            return transaction.state is State.APPLIED
        return self._receipts.said(transaction, decider) is Receipt.APPLIED

    def decide(self, transaction: Transaction, until: float) -> Transaction:
        """
        The remote branches of one that is pending, and the own one where that is the last.

        Args:
            transaction: as it was read.
            until: as for `step`.

        Returns:
            It is `canceling` if a participant refuses, or it is too late. Else everything is committed, and the log
            says `applied` where it decides; where the last receipt does, it still says `pending`.

        Raises:
            Exception: as of `step`.
        """
        plan = plan_for(transaction)
        if transaction.is_late:
            return self._late(transaction)
        for branch in plan.remote:
            try:
                receipt = self._applied_branch(transaction, branch, until)
            except RefusedError as error:
                return self._cancel(transaction, str(error))
            except StuckError:
                if self.is_decided(transaction):  # whatever has become of this one since
                    return transaction
                raise
            except OverdueError:
                return self._cancel(
                    transaction, f"its branch {branch} was not applied before the deadline, by the clock there"
                )
            except OperationFailure as error:
                if not is_unwritable(error):
                    raise
                raise StuckError(
                    f"its branch {branch} cannot be written ({brief(error)}); it is canceled by the first recovery "
                    f"after {_iso(transaction.deadline)}"
                ) from error
            if receipt is not Receipt.APPLIED:
                raise OvertakenError
        return self._applied(transaction, plan, until)

    def _late(self, transaction: Transaction) -> Transaction:
        decider = plan_for(transaction).decider
        if decider is not None:
            with _asked(decider):
                if self.is_decided(transaction):
                    return transaction
        return self._cancel(transaction, "it was not applied before its deadline")

    def _applied_branch(self, transaction: Transaction, branch: Branch, until: float) -> Receipt | None:
        with noted(branch.cluster):
            if not branch.marked:
                return self._receipts.apply(transaction, branch, until)
            self._marked.perform(transaction, branch)
            return Receipt.APPLIED

    def _applied(self, transaction: Transaction, plan: BranchPlan, until: float) -> Transaction:
        if plan.decider is not None:
            return transaction
        if plan.own is not Own.LAST or plan.home is None:
            return _mine(self._log.move(transaction, State.APPLIED))
        home = plan.home

        def body(session: ClientSession) -> Transaction:
            after = _mine(self._log.move(transaction, State.APPLIED, session=session))
            change(self._open, home.parts, session)
            return after

        try:
            return in_one(self._log.collection.database.client, body, until)
        except (RefusedError, UnmetError) as error:
            return self._cancel(transaction, self._reason(home, error))

    def _settle(self, transaction: Transaction) -> Transaction:
        # In their order, so the decider comes last: whoever finds it gone must find the others settled.
        for branch in plan_for(transaction).remote:
            with noted(branch.cluster):
                if branch.marked:
                    self._marked.perform(transaction, branch)
                else:
                    self._receipts.settle(transaction, branch)
        return _mine(self._log.move(transaction, State.DONE))

    def together(self, transactions: Sequence[Transaction], until: float) -> list[Transaction]:
        """
        Finish several pending or applied transactions at once, whose branches are in the same clusters and databases.

        Returns:
            Those that are done.

        Raises:
            Exception: as of `Receipts.apply_together`. What is not done may have come as far as applied; each may be
                taken by itself from where the log says.
        """
        decided = [each for each in transactions if each.state is State.APPLIED]
        # The log decides for those whose last branch is its own: that is one MongoDB transaction for each.
        pending = [each for each in transactions if each.state is State.PENDING and plan_for(each).decider is not None]
        late = [each for each in pending if each.is_late]
        if late:
            decided += self._receipts.applied_among(_shares(late, -1))
        in_time = [each for each in pending if not each.is_late]
        if in_time:
            for index in range(len(plan_for(in_time[0]).remote)):
                self._receipts.apply_together(_shares(in_time, index), until)
        return self.follow([*decided, *in_time])

    def follow(self, transactions: Sequence[Transaction]) -> list[Transaction]:
        """
        Say in the log what is decided: applied, then done.

        Args:
            transactions: everything of them is committed; they may share clusters or not.

        Returns:
            Those that are done; whoever was faster with another finishes that one.

        Raises:
            Exception: the first of what some could not be settled for; all others are done.
        """
        pending = [each for each in transactions if each.state is State.PENDING]
        applied = [each for each in transactions if each.state is State.APPLIED]
        if pending:
            # Only what the log lets become applied: what somebody cancels meanwhile may not have its receipts settled.
            applied += self._log.move_together(pending, State.APPLIED, before=State.PENDING)
        alike: dict[Hashable, list[Transaction]] = {}
        for each in applied:
            alike.setdefault(likeness_of(each) or each.key, []).append(each)
        settled: list[Transaction] = []
        failure: Exception | None = None
        for those in alike.values():
            try:
                self._settle_together(those)
                settled += those
            except Exception as error:  # noqa: BLE001 - one that cannot be settled keeps no others from being done
                failure = failure or error
        done = self._log.move_together(settled, State.DONE, before=State.APPLIED) if settled else []
        if failure is not None:
            raise failure
        return done

    def _settle_together(self, alike: Sequence[Transaction]) -> None:
        for index, branch in enumerate(plan_for(alike[0]).remote):  # the decider's at the end
            if branch.marked:  # then it is the only one
                self._marked.perform(replace(alike[0], state=State.APPLIED), branch)
            else:
                self._receipts.settle_together(_shares(alike, index))

    # -- backward ----------------------------------------------------------------------------------

    def _cancel(self, transaction: Transaction, reason: str) -> Transaction:
        return _mine(self._log.move(transaction, State.CANCELING, reason=_logged(transaction.id, reason)))

    def _undo(self, transaction: Transaction, until: float) -> Transaction:
        """The decider is asked; if it was applied, the transaction goes on. Else everything else is undone."""
        plan = plan_for(transaction)
        if plan.decider is not None and self._void(transaction, plan.decider) is Receipt.APPLIED:
            return _mine(self._log.move(transaction, State.APPLIED))
        self._undo_others(transaction, plan.others, until)
        if plan.own is Own.FIRST and plan.home is not None:
            return self._undo_home(transaction, plan.home, until)
        return _mine(self._log.move(transaction, State.CANCELED))

    def _undo_others(self, transaction: Transaction, branches: Sequence[Branch], until: float) -> None:
        """Each of them, in reverse order: one that refuses, or does not answer, keeps nothing of the others."""
        stuck: Exception | None = None
        unanswered: Exception | None = None
        for left, branch in reversed(list(enumerate(branches, 1))):
            share = time.monotonic() + max(until - time.monotonic(), 0) / left
            try:
                with noted(branch.cluster):
                    if branch.marked:
                        with pymongo.timeout(max(share - time.monotonic(), 0)):
                            self._marked.perform(transaction, branch)
                    else:
                        self._note_gone(transaction, self._receipts.undo(transaction, branch, share))
            except (UndoRefusedError, RefusedError, StuckError) as error:
                stuck = stuck or error
            except (PyMongoError, TransactionTimeoutError, BusyError) as error:
                if is_unwritable(error):
                    stuck = stuck or StuckError(f"its branch {branch} cannot be undone: {brief(error)}")
                else:
                    unanswered = unanswered or error
        if stuck is not None:
            raise StuckError(str(stuck)) from stuck
        if unanswered is not None:
            raise unanswered

    def _void(self, transaction: Transaction, decider: Branch) -> Receipt:
        with _asked(decider):
            return self._receipts.void(transaction, decider)

    def _undo_home(self, transaction: Transaction, home: Branch, until: float) -> Transaction:
        """Canceling to canceled, and the own branch is taken back with it."""
        gone: list[Part] = []

        def body(session: ClientSession) -> Transaction:
            after = _mine(self._log.move(transaction, State.CANCELED, session=session))
            left = [part for part in home.parts if part not in gone]
            if left:
                revert(self._open, left, session)
            return after

        client = self._log.collection.database.client
        try:
            try:
                return in_one(client, body, until)
            except UnmetError:
                gone = absent(self._open, home.parts)
                after = in_one(client, body, until)
                self._note_gone(transaction, gone)
                return after
        except (UndoRefusedError, RefusedError) as error:
            raise StuckError(str(error)) from error

    def _reason(self, branch: Branch, error: Exception) -> str:
        if isinstance(error, RefusedError):
            return str(error)
        reason = why_unmet(self._open, branch.parts)
        if reason is None:
            raise error
        return reason

    @staticmethod
    def _note_gone(transaction: Transaction, gone: list[Part]) -> None:
        for part in gone:
            logger.warning(
                "transaction %r: participant %s is gone; nothing to undo there",
                transaction.id,
                part,
                extra={"event": "participant_gone"},
            )


@contextmanager
def _asked(decider: Branch) -> Iterator[None]:
    """Say of a branch that decides, and whose server will not say what, what is missing there."""
    try:
        with noted(decider.cluster):
            yield
    except OperationFailure as error:
        if not is_unwritable(error):
            raise
        raise StuckError(
            f"its branch {decider}, which decides, cannot be asked ({brief(error)}): allow find, insert and update on "
            "the receipts there"
        ) from error


def _shares(transactions: Sequence[Transaction], index: int) -> list[Share]:
    """The same branch of each."""
    return [(each, plan_for(each).remote[index]) for each in transactions]


def plan_for(transaction: Transaction) -> BranchPlan:
    """How a transaction that was begun is carried out."""
    return plan_of(transaction.parts, transaction.marked)


def likeness_of(transaction: Transaction) -> Hashable:
    """What those have in common that may be finished together; None for one that has to be taken by itself."""
    if transaction.key is None or transaction.marked or transaction.state not in {State.PENDING, State.APPLIED}:
        return None
    plan = plan_for(transaction)
    return (plan.own, *((branch.cluster, branch.database) for branch in plan.remote))


def begun_fields(parts: tuple[Part, ...], stored: Sequence[Document] | None = None) -> Document:
    """
    What an entry has from pending on: a new key, and the participants under another name.

    Args:
        parts: the participants.
        stored: the same as documents, if they have been made.
    """
    own = plan_of(parts).own
    return {
        "protocol": RECEIPTS,
        "key": ObjectId(),
        "own": None if own is None else str(own),
        "changes": [part.to_document() for part in parts] if stored is None else list(stored),
    }


def _logged(identity: Any, reason: str) -> str:
    logger.warning("transaction %r is canceled: %s", identity, reason, extra={"event": "transaction_canceled"})
    return reason


def _iso(time: datetime | None) -> str:
    return "its deadline" if time is None else time.isoformat(timespec="seconds")


def _mine(transaction: Transaction | None) -> Transaction:
    if transaction is None:
        raise OvertakenError
    return transaction
