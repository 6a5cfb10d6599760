"""
Receipts: what says in another cluster that a branch of a transaction was applied, beside its documents.

A receipt is written by the same MongoDB transaction that changes the documents, so both are there or neither is, and
nothing of ours stands in a document: who writes one back as a whole loses nothing. It is named by a key that is made
for the transaction, and by the branch.

- *Apply*: insert the receipt `applied`, and change the documents, all before the deadline by that cluster's own clock.
  If there is a receipt, it was done before, or somebody has undone it: then it is refused. That is all that keeps a
  change from being applied twice: any number of coordinators may try, as late as they like.
- *Undo*: turn the receipt into `undone` and take the changes back; where there is none, leave `void`, which refuses
  whoever comes too late.
- *Settle*: let the receipt expire, never before the deadline. Once it is gone, the deadline refuses.

A receipt that expires is one of a transaction whose outcome is in the log: an undo reverts none of these.
`tests/property/receipts_model.py` has the rules as a machine, and what breaks without each of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any

import pymongo
from bson import ObjectId
from pymongo import ASCENDING, IndexModel, MongoClient, ReturnDocument
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import DuplicateKeyError

from mongo_celery.mongo.expressions import after, literal, millis
from mongo_celery.twophase.branches import Branch
from mongo_celery.twophase.clusters import opened
from mongo_celery.twophase.indexes import Indexes
from mongo_celery.twophase.local import (
    RefusedError,
    UnmetError,
    change,
    find_met,
    in_one,
    is_there,
    revert,
    why_twins,
    why_unmet,
)
from mongo_celery.twophase.participants import Part
from mongo_celery.twophase.states import Transaction

Document = dict[str, Any]
Open = Callable[[Part], Collection[Document]]

Share = tuple[Transaction, Branch]
"""One branch of a transaction."""

COLLECTION = "transactionReceipts"
RETENTION_SECONDS = 86_400.0
"""For people who look: nothing depends on it."""

_INDEXES = (IndexModel([("expiresAt", ASCENDING)], name="expired_receipts", expireAfterSeconds=0, sparse=True),)


class Receipt(StrEnum):
    """What a receipt says."""

    APPLIED = "applied"
    UNDONE = "undone"
    VOID = "void"


class OverdueError(Exception):
    """The deadline has passed by the clock of the branch's cluster."""


class UndoRefusedError(Exception):
    """A participant does not meet the rule for taking its change back; the text says which."""


class Receipts:
    """
    The receipts of all branches, in their clusters.

    Args:
        open_part: gives a participant's collection.
    """

    def __init__(self, open_part: Open) -> None:
        self._open = open_part
        self._found: dict[tuple[str | None, str], tuple[Collection[Document], Indexes]] = {}

    def collection(self, branch: Branch) -> Collection[Document]:
        """Where the receipts of a branch lie; its index is made at the first use in this process."""
        place = (branch.cluster, branch.database)
        if place not in self._found:
            first = self._open(branch.parts[0])
            collection = opened(first.database.get_collection(COLLECTION, codec_options=first.codec_options))
            self._found.setdefault(place, (collection, Indexes(collection, _INDEXES)))
        found, indexes = self._found[place]
        indexes.make()
        return found

    def client(self, branch: Branch) -> MongoClient[Any]:
        """The client of a branch's cluster."""
        return self._open(branch.parts[0]).database.client

    def apply(self, transaction: Transaction, branch: Branch, until: float) -> Receipt | None:
        """
        Apply a branch, unless that was done or undone before.

        Args:
            transaction: which one.
            branch: of it.
            until: on the monotonic clock; for how long it is tried.

        Returns:
            What its receipt says afterwards; None if it was there and is gone.

        Raises:
            UnmetError: a participant was changed meanwhile; try again.
            OverdueError: it is too late by the clock of the branch's cluster.
            RefusedError: a participant cannot be changed.
        """
        receipts, identity = self.collection(branch), _identity(transaction, branch)
        receipt = {"_id": identity, "transaction": transaction.id, "state": str(Receipt.APPLIED)}

        def body(session: ClientSession) -> None:
            receipts.insert_one(dict(receipt), session=session)
            change(self._open, branch.parts, session, before=_deadline(transaction))

        try:
            in_one(self.client(branch), body, until)
        except DuplicateKeyError:
            return self.said(transaction, branch)
        except UnmetError:
            self._explain(transaction, branch)
            raise
        return Receipt.APPLIED

    def said(self, transaction: Transaction, branch: Branch) -> Receipt | None:
        """What the receipt of a branch says; None if there is none."""
        found = self.collection(branch).find_one({"_id": {"$eq": _identity(transaction, branch)}}, {"state": 1})
        return None if found is None else Receipt(found["state"])

    def _explain(self, transaction: Transaction, branch: Branch) -> None:
        first = self._open(branch.parts[0])
        if first.database.command("hello", codec_options=first.codec_options)["localTime"] >= _deadline(transaction):
            raise OverdueError
        reason = why_unmet(self._open, branch.parts)
        if reason is not None:
            raise RefusedError(reason)

    def void(self, transaction: Transaction, branch: Branch) -> Receipt:
        """Ask the branch that decides: from now on it cannot be applied, unless it was. Nothing is reverted."""
        return self._turned(transaction, branch, turn=False, session=None) or Receipt.VOID

    def undo(self, transaction: Transaction, branch: Branch, until: float) -> list[Part]:
        """
        Take the changes of a branch back if they were applied, and refuse them from now on.

        Returns:
            Participants that are gone, so that nothing could be taken back there.

        Raises:
            UndoRefusedError: a participant does not meet its rule.
            UnmetError: a participant was changed meanwhile; try again.
        """
        with pymongo.timeout(max(until - time.monotonic(), 0)):
            self.collection(branch)  # before the MongoDB transaction: indexes cannot be made in one
        gone: list[Part] = []

        def body(session: ClientSession) -> None:
            before = self._turned(transaction, branch, turn=True, session=session)
            left = [part for part in branch.parts if part not in gone]
            if before is Receipt.APPLIED and left:
                revert(self._open, left, session)

        while True:
            try:
                in_one(self.client(branch), body, until)
            except UnmetError:
                found = absent(self._open, branch.parts)
                if len(found) == len(gone) or time.monotonic() >= until:
                    raise
                gone[:] = found
            else:
                return gone

    def settle(self, transaction: Transaction, branch: Branch) -> None:
        """Let the receipt of a branch expire."""
        keep = {"$ifNull": ["$expiresAt", _expiry(transaction)]}
        self.collection(branch).update_one(
            {"_id": {"$eq": _identity(transaction, branch)}}, [{"$set": {"expiresAt": keep}}]
        )

    def apply_together(self, shares: Sequence[Share], until: float) -> None:
        """
        Apply branches of several transactions in one cluster and database in one MongoDB transaction.

        Raises:
            UnmetError: one of them was undone, or a participant of one does not meet its rule, or one is too late:
                nothing was changed. Take each by itself.
            RefusedError, PyMongoError, TransactionTimeoutError: as of `apply`.
        """
        receipts = self.collection(shares[0][1])
        found = list(receipts.find({"_id": {"$in": [_identity(*share) for share in shares]}}, {"state": 1}))
        if any(each["state"] != Receipt.APPLIED for each in found):
            raise UnmetError
        known = {each["_id"]["t"] for each in found}
        new = [share for share in shares if share[0].key not in known]

        def body(session: ClientSession) -> None:
            made = [{"_id": _identity(*share), "transaction": share[0].id, "state": "applied"} for share in new]
            receipts.insert_many(made, session=session)
            parts = [part for _, branch in new for part in branch.parts]
            change(self._open, parts, session, before=min(_deadline(transaction) for transaction, _ in new))

        if new:
            in_one(self.client(shares[0][1]), body, until)

    def applied_among(self, shares: Sequence[Share]) -> list[Transaction]:
        """Of several transactions in one cluster and database: those whose branch is applied."""
        which = {"_id": {"$in": [_identity(*share) for share in shares]}, "state": str(Receipt.APPLIED)}
        keys = {each["_id"]["t"] for each in self.collection(shares[0][1]).find(which, {"_id": 1})}
        return [transaction for transaction, _ in shares if transaction.key in keys]

    def settle_together(self, shares: Sequence[Share]) -> None:
        """Let the receipts of several transactions in one cluster and database expire, after all their deadlines."""
        latest = max((transaction for transaction, _ in shares), key=_deadline)
        keep = {"$ifNull": ["$expiresAt", _expiry(latest)]}
        identities = [_identity(*share) for share in shares]
        self.collection(shares[0][1]).update_many({"_id": {"$in": identities}}, [{"$set": {"expiresAt": keep}}])

    def _turned(
        self, transaction: Transaction, branch: Branch, *, turn: bool, session: ClientSession | None
    ) -> Receipt | None:
        """
        Write what refuses a late apply.

        Args:
            transaction: which one.
            branch: of it.
            turn: whether a receipt `applied` becomes `undone`.
            session: of a MongoDB transaction, if any.

        Returns:
            What the receipt said before, if it is to be reverted or stands; None if there was none that counts.
        """
        settled, applied = {"$ne": [{"$type": "$expiresAt"}, "missing"]}, {"$eq": ["$state", str(Receipt.APPLIED)]}
        turned = {"$and": [applied, {"$not": [settled]}]}
        missing = {"$eq": [{"$type": "$state"}, "missing"]}
        state = {"$cond": [missing, str(Receipt.VOID), "$state"]}
        expires: Any = {"$ifNull": ["$expiresAt", _expiry(transaction)]}
        if turn:
            state = {"$cond": [turned, str(Receipt.UNDONE), state]}
        else:
            expires = {"$cond": [applied, {"$ifNull": ["$expiresAt", "$$REMOVE"]}, expires]}
        change_ = {"transaction": literal(transaction.id), "state": state, "expiresAt": expires}
        try:
            before = self.collection(branch).find_one_and_update(
                {"_id": {"$eq": _identity(transaction, branch)}},
                [{"$set": change_}],
                upsert=True,
                return_document=ReturnDocument.BEFORE,
                session=session,
            )
        except DuplicateKeyError:
            if session is not None:
                raise
            return self._turned(transaction, branch, turn=turn, session=session)  # another was faster: as it is now
        if before is None:
            return None
        if turn and "expiresAt" in before:
            return None
        return Receipt(before["state"])


def absent(open_part: Open, parts: tuple[Part, ...]) -> list[Part]:
    """
    Which participants are gone, so that nothing can be taken back there.

    Raises:
        UndoRefusedError: one of the others does not meet its rule.
    """
    gone = []
    found = []
    for part in parts:
        met = find_met(open_part, part, part.revert_require)
        if met is not None:
            found.append((part, met))
        elif is_there(open_part, part):
            raise UndoRefusedError(
                f"participant {part} cannot be undone: it does not meet {dict(part.revert_require)!r}"
            )
        else:
            gone.append(part)
    twins = why_twins(found)
    if twins is not None and not gone:
        raise UndoRefusedError(f"{twins} be undone")
    return gone


def _identity(transaction: Transaction, branch: Branch) -> Document:
    assert isinstance(transaction.key, ObjectId)
    return {"t": transaction.key, "b": branch.cluster}


def _deadline(transaction: Transaction) -> datetime:
    assert transaction.deadline is not None
    return transaction.deadline


def _expiry(transaction: Transaction) -> Document:
    """Some time after the deadline and after now, by the clock of the receipt's cluster."""
    return {"$max": [after(RETENTION_SECONDS), {"$add": [_deadline(transaction), millis(RETENTION_SECONDS)]}]}
