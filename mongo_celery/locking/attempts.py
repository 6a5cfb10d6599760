"""What one call of `transactional` remembers across its attempts, found by its session."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from pymongo.client_session import ClientSession

logger = logging.getLogger("mongo_celery.locking")

_FIRST_PAUSE = 0.005
_GROWTH = 1.5
_LONGEST_PAUSE = 0.5
_STEPS_MAX = 20  # the longest pause is reached after twelve; the power of a large number would overflow


@dataclass(slots=True)
class Attempts:
    """
    The attempts of one transaction.

    Attributes:
        deadline: on the monotonic clock; no attempt begins after it.
        count: attempts that have failed.
        transient: the last error after which there was another attempt.
        conflicts: since when a document has been waited for, by its namespace and filter.
        callbacks: to run after the commit; those of an attempt that failed are dropped.
    """

    deadline: float
    count: int = 0
    transient: BaseException | None = None
    conflicts: dict[str, float] = field(default_factory=dict)
    callbacks: list[Callable[[], object]] = field(default_factory=list)

    @property
    def remaining(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self.deadline - time.monotonic()

    def next_pause(self) -> float:
        """
        Seconds to wait before the next attempt: exponential with full jitter, as the drivers' specification has it.

        Source: MongoDB specifications, "Convenient API for Transactions", backoff of `withTransaction`.
        """
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * _GROWTH ** min(self.count, _STEPS_MAX))
        self.count += 1
        return random.random() * pause  # noqa: S311 - jitter, no secret

    def run_callbacks(self) -> None:
        """Run what waits for the commit, each once; what fails is logged and stops nothing."""
        waiting, self.callbacks = self.callbacks, []
        for callback in waiting:
            try:
                callback()
            except Exception:
                logger.exception("a callback after a commit failed; the transaction is committed")


_of_session: WeakKeyDictionary[ClientSession, Attempts] = WeakKeyDictionary()
_foreign: WeakKeyDictionary[ClientSession, Attempts] = WeakKeyDictionary()


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


def waiting_since(session: ClientSession, document: str) -> float:
    """When a document first conflicted with this transaction, on the monotonic clock; now, if it never has."""
    known = _of_session.get(session) or _foreign.setdefault(session, Attempts(0.0))
    return known.conflicts.setdefault(document, time.monotonic())


def wait_ended(session: ClientSession, document: str) -> None:
    """A document was locked or given up: the next wait for it begins anew."""
    for known in (_of_session.get(session), _foreign.get(session)):
        if known is not None:
            known.conflicts.pop(document, None)
