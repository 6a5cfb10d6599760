"""What one call of `transactional` remembers across its attempts, found by its session."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from pymongo.client_session import ClientSession

from mongo_celery.errors import DocumentLockedError
from mongo_celery.mongo.redaction import traceback_of
from mongo_celery.mongo.repeating import Pauses

logger = logging.getLogger("mongo_celery.locking")

_PAUSES = Pauses(first=0.005, longest=0.5, growth=1.5, jitter=1.0)

_REPETITION_SECONDS = 1.0
"""A driver's attempt that conflicts later than this after the one before is taken for another transaction's."""

Place = tuple[str, int, Hashable]
"""A lock: its namespace, the number of its call in the attempt, and which of the call's documents."""


@dataclass(slots=True)
class Waits:
    """
    How long the locks of one transaction have met conflicts, over its attempts.

    A lock is known by its place in the body: a filter may be another one at each attempt, as one with the time is.

    Attributes:
        forget_after: seconds without a conflict after which a wait begins anew.
        calls: lock calls of the attempt so far.
        conflicts: the first and the last conflict of each lock, on the monotonic clock.
    """

    forget_after: float = math.inf
    calls: int = 0
    conflicts: dict[Place, tuple[float, float]] = field(default_factory=dict)

    def next_call(self) -> int:
        """The number of a call that begins now."""
        self.calls += 1
        return self.calls

    def failed(self) -> None:
        """The attempt has come to its end by an error, so the next call is the first one of another."""
        self.calls = 0

    def conflicted(self, place: Place) -> float:
        """Note a conflict; the seconds since the first one of this wait."""
        now = time.monotonic()
        self.conflicts = {each: met for each, met in self.conflicts.items() if now - met[1] <= self.forget_after}
        first, _ = self.conflicts.get(place, (now, now))
        self.conflicts[place] = (first, now)
        return now - first

    def ended(self, place: Place) -> None:
        """It was locked or given up: the next wait begins anew."""
        self.conflicts.pop(place, None)


@dataclass(slots=True)
class Attempts:
    """
    The attempts of one transaction.

    Attributes:
        deadline: on the monotonic clock; no attempt begins after it.
        count: attempts that have failed.
        transient: the last error after which there was another attempt.
        waits: how long its locks have met conflicts.
        locked: raised in this attempt by a lock that does not wait any longer.
        callbacks: to run after the commit; those of an attempt that failed are dropped.
    """

    deadline: float
    count: int = 0
    transient: BaseException | None = None
    waits: Waits = field(default_factory=Waits)
    locked: DocumentLockedError | None = None
    callbacks: list[Callable[[], object]] = field(default_factory=list)

    @property
    def remaining(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self.deadline - time.monotonic()

    def begin(self) -> None:
        """Forget what belonged to the attempt before."""
        self.locked = None
        self.waits.calls = 0
        self.callbacks.clear()

    def next_pause(self) -> float:
        """
        Seconds to wait before the next attempt: exponential with full jitter, as the drivers' specification has it.

        Source: MongoDB specifications, "Convenient API for Transactions", backoff of `withTransaction`.
        """
        self.count += 1
        return _PAUSES.nth(self.count - 1)

    def run_callbacks(self) -> None:
        """Run what waits for the commit, each once; what fails is logged and stops nothing."""
        waiting, self.callbacks = self.callbacks, []
        for callback in waiting:
            try:
                callback()
            except Exception as error:  # noqa: BLE001 - whatever a user's function raises
                logger.error(
                    "a callback after a commit failed; the transaction is committed: %s",
                    traceback_of(error),
                    extra={"event": "callback_failed"},
                )


_of_session: WeakKeyDictionary[ClientSession, Attempts] = WeakKeyDictionary()
_foreign: WeakKeyDictionary[ClientSession, Waits] = WeakKeyDictionary()


@contextmanager
def remembered(session: ClientSession, attempts: Attempts) -> Iterator[None]:
    """Note inside that a session belongs to a call of `transactional`; afterwards it belongs to whom it did before."""
    before = _of_session.get(session)
    _of_session[session] = attempts
    try:
        yield
    finally:
        if before is None:
            del _of_session[session]
        else:
            _of_session[session] = before


def attempts_of(session: ClientSession) -> Attempts | None:
    """The attempts of a session's transaction, if `transactional` runs it."""
    return _of_session.get(session)


def waits_of(session: ClientSession) -> Waits:
    """
    The waits of a session's transaction.

    Nobody says when a driver's transaction begins, or whether it repeats another: only the time between conflicts
    tells that, and an error that the attempt has ended.
    """
    attempts = _of_session.get(session)
    return attempts.waits if attempts is not None else _foreign.setdefault(session, Waits(_REPETITION_SECONDS))


def note_locked(session: ClientSession, error: DocumentLockedError) -> None:
    """The transaction has ended by this error, also if its body catches it."""
    attempts = _of_session.get(session)
    if attempts is not None:
        attempts.locked = error
