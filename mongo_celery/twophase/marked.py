"""
Branches on standalone servers, beside branches with receipts: their documents carry markers and versions.

All is as in `documents`, but that nobody owns the transaction: any number of coordinators may drive it. Each looks at a
version, then proves that the transaction is still pending, whoever has it, and changes the document only where the
version is the one that it saw. Two that do so at once are kept apart by the marker, one that comes too late by the
version: it is renewed whenever a branch is settled or undone, and that happens only after the transaction has left
`pending`. `tests/property/receipts_model.py` has it as a machine.

The marker is the transaction's key, not its id: that may be used again once the transaction is purged, and a
coordinator that stood still for so long would take its successor's change back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bson import ObjectId

from mongo_celery.twophase.branches import Branch
from mongo_celery.twophase.coordinator import Coordinator, OvertakenError
from mongo_celery.twophase.local import RefusedError
from mongo_celery.twophase.participants import Part
from mongo_celery.twophase.states import State, Transaction


class MarkedBranches(Coordinator):
    """Performs the steps of one branch at a time; what the log says of the whole is left to others."""

    def incarnations(self, parts: Sequence[Part], marked: frozenset[str], key: ObjectId) -> list[Any]:
        """
        Of those participants that get markers, as they are before the transaction is begun; None for the others.

        One that has none is given one; errors as of `documents.look`.
        """
        return [self._incarnation(part, key) if part.cluster in marked else None for part in parts]

    def perform(self, transaction: Transaction, branch: Branch) -> None:
        """
        Apply a branch of one that is pending, settle it if it is applied, or undo it if it is canceling.

        Raises:
            RefusedError: a participant cannot be changed.
            OvertakenError, BusyError, StuckError: see there.
            PyMongoError: the outcome may be unknown; repeat it.
        """
        recorded = transaction.incarnations
        if recorded is not None:
            places = [index for index, part in enumerate(transaction.parts) if part.cluster == branch.cluster]
            recorded = tuple(recorded[index] for index in places)
        self.step(replace(transaction, parts=branch.parts, incarnations=recorded, deadline=None))

    def _incarnation(self, part: Part, key: ObjectId) -> Any:
        return self._look_of(key, part).incarnation

    def _prove(self, transaction: Transaction) -> None:
        if not self._log.prove(transaction):
            raise OvertakenError

    def _advance(self, transaction: Transaction, state: State) -> Transaction:
        return replace(transaction, state=state)

    def _cancel(self, transaction: Transaction, reason: str) -> Transaction:
        del transaction
        raise RefusedError(reason)
