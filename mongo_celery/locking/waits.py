"""The time for which the locks of one transaction have met conflicts, over its attempts."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from mongo_celery.mongo.transaction.scopes import Session, TransactionScope, scope_of

_REPETITION_SECONDS = 1.0
"""A driver's attempt that conflicts later than this after the one before is taken for another transaction's."""

Place = tuple[str, int, Hashable]
"""A lock: its namespace, the number of its call in the attempt, and which of the call's documents."""


@dataclass(slots=True)
class Waits:
    """
    The waits of one transaction.

    A lock is known by its place in the body: its filter may differ at each attempt, such as one with the time.

    Attributes:
        scope: of the transaction; None if `transactional` does not run it.
        forget_after: seconds without a conflict after which a wait begins anew.
        attempt: number of the scope's attempt.
        calls: lock calls of the attempt so far.
        conflicts: the first and the last conflict of each lock, on the monotonic clock.
    """

    scope: TransactionScope | None
    forget_after: float
    attempt: int = 0
    calls: int = 0
    conflicts: dict[Place, tuple[float, float]] = field(default_factory=dict)

    def next_call(self) -> int:
        """Return the number of a call that begins now."""
        self.calls += 1
        return self.calls

    def failed(self) -> None:
        """Note that the attempt ended by an error: the next call is the first one of another attempt."""
        self.calls = 0

    def conflicted(self, place: Place) -> float:
        """Note a conflict; return the seconds since the first one of this wait."""
        now = time.monotonic()
        self.conflicts = {each: met for each, met in self.conflicts.items() if now - met[1] <= self.forget_after}
        first, _ = self.conflicts.get(place, (now, now))
        self.conflicts[place] = (first, now)
        return now - first

    def ended(self, place: Place) -> None:
        """Note that it was locked or given up: the next wait begins anew."""
        self.conflicts.pop(place, None)


_of_session: WeakKeyDictionary[Session, Waits] = WeakKeyDictionary()


def waits_of(session: Session) -> Waits:
    """
    Return the waits of a session's transaction.

    A driver does not tell when a transaction begins, or if it repeats another. Only the time between conflicts tells
    that, and an error that ends an attempt.
    """
    scope, waits = scope_of(session), _of_session.get(session)
    if waits is None or waits.scope is not scope:
        waits = _of_session[session] = Waits(scope, _REPETITION_SECONDS if scope is None else math.inf)
    if scope is not None and waits.attempt != scope.attempts:
        waits.attempt, waits.calls = scope.attempts, 0
    return waits
