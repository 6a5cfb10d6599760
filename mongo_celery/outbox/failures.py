"""
What becomes of an entry whose publishing has failed: the same for every storage.

An entry is charged with its own faults only: a payload that cannot be read, or a refusal of *this* entry by a broker
that takes others. An outage, a time limit, a task that this process does not know and an entry of another app are
nobody's fault, and count nothing.

===================  =====================================================================================
`wait for broker`    it took nothing; the entry is tried again as soon as the broker is back, or after a pause
`wait for task`      no process has told the task yet, as during a deploy: tried again every 30 s, for 6 hours
`other app`          the entry belongs to an app that this process does not deliver for: stop in front of it
`attempt`            its own fault: counted, and tried again after a pause that grows to 5 minutes
`stuck`              as `attempt`, and it has failed `max_attempts` times: a person should look (policy `halt`)
`dead letter`        set aside, so that what stands behind it goes on (policy `dead_letter`)
`unsigned`           set aside at once, whatever the policy: the outbox has not written it
===================  =====================================================================================

`dead_letter` waits for `max_attempts` *and* for ten minutes. No moment is stored for that: what an entry was held back
for after each of its attempts adds up to the time that has passed since the first one, by the server's clock.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mongo_celery.command_line import ANY_APP
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.publisher import BrokerUnavailableError, OtherAppError, UnknownTaskError
from mongo_celery.outbox.signing import UnsignedEntryError
from mongo_celery.quantities import number

logger = logging.getLogger("mongo_celery.outbox")

FAILURE_POLICIES = ("halt", "dead_letter")

BROKER_PAUSE_SECONDS = 1.0
"""How long entries wait that a broker did not answer for."""

REFUSED_PAUSE_SECONDS = 30.0
"""How long entries wait that a broker has refused with all others, as one out of memory does."""

UNKNOWN_PAUSE_SECONDS = 30.0
UNKNOWN_SECONDS_MAX = 6 * 3600.0
"""After so long a task that nobody knows is the entry's fault: no deploy takes that long."""

DEAD_SECONDS_MIN = 600.0
"""An entry is set aside only after so long: a mistake in a deploy is put right within minutes."""

_PAUSES = Pauses(first=1.0, longest=300.0)
_PAUSES_MAX = 64
"""So many pauses are longer than `DEAD_SECONDS_MIN` in any case; a stored number of attempts may be any."""


_UNSIGNED_SECONDS = 10.0
"""Between two records of unsigned entries: whoever writes many of them must not fill the log."""


class FailureKind(Enum):
    """What is to be done about an entry that could not be published."""

    WAIT_FOR_BROKER = "wait for broker"
    WAIT_FOR_TASK = "wait for task"
    OTHER_APP = "other app"
    ATTEMPT = "attempt"
    STUCK = "stuck"
    DEAD_LETTER = "dead letter"


@dataclass(frozen=True, slots=True)
class FailureVerdict:
    """
    What becomes of an entry, and what to write down about it.

    Attributes:
        kind: what is to be done.
        pause: seconds for which what stands at the head is held back.
        attempts: how many there were with this one; 0 where it does not count.
        is_outage: whether the broker does not answer at all, so that nothing else can be published either.
    """

    kind: FailureKind
    pause: float = 0.0
    attempts: int = 0
    is_outage: bool = False

    @property
    def counts(self) -> bool:
        """Whether the entry's attempts grow by one; a dead letter keeps those that were counted before."""
        return self.attempts > 0 and self.kind is not FailureKind.DEAD_LETTER


@dataclass(slots=True)
class FailurePolicy:
    """
    How an entry's own faults are dealt with.

    Args:
        name: `halt`, to try for ever, or `dead_letter`, to set aside.
        max_attempts: after how many attempts an entry is stuck, or may be set aside.
    """

    name: str
    max_attempts: int
    _logged_at: float = field(default=-math.inf, init=False, repr=False)
    _unlogged: int = field(default=0, init=False, repr=False)

    def verdict(self, entry: Entry | Mapping[str, Any], error: BaseException, age: float | None) -> FailureVerdict:
        """
        What becomes of an entry.

        Args:
            entry: as it was read, or the stored value where that cannot be read.
            error: what its publishing has raised.
            age: seconds since it was written, by the server's clock; None where that is not known.
        """
        if isinstance(error, BrokerUnavailableError):
            pause = REFUSED_PAUSE_SECONDS if error.answers else BROKER_PAUSE_SECONDS
            return FailureVerdict(FailureKind.WAIT_FOR_BROKER, pause, is_outage=not error.answers)
        if isinstance(error, UnsignedEntryError):
            return FailureVerdict(FailureKind.DEAD_LETTER)
        if isinstance(error, OtherAppError):
            return FailureVerdict(FailureKind.OTHER_APP)
        if isinstance(error, UnknownTaskError) and (age is None or age < UNKNOWN_SECONDS_MAX):
            return FailureVerdict(FailureKind.WAIT_FOR_TASK, UNKNOWN_PAUSE_SECONDS)
        attempts = attempts_of(entry) + 1
        if self.name == "dead_letter" and self._is_over(attempts):
            return FailureVerdict(FailureKind.DEAD_LETTER, attempts=attempts)
        is_stuck = self.name == "halt" and attempts >= self.max_attempts
        return FailureVerdict(FailureKind.STUCK if is_stuck else FailureKind.ATTEMPT, _PAUSES.nth(attempts), attempts)

    def _is_over(self, attempts: int) -> bool:
        held_back = sum(_PAUSES.nth(count) for count in range(1, min(attempts, _PAUSES_MAX)))
        return attempts >= self.max_attempts and held_back >= DEAD_SECONDS_MIN

    def tell(
        self, verdict: FailureVerdict, entry: Entry | Mapping[str, Any], document_id: object, error: BaseException
    ) -> None:
        """
        Log a verdict. A stuck entry is an error once, and a warning from then on. Unsigned entries are an error every
        ten seconds. An entry of another app is nothing unusual, and the sweep reports it when it has waited.
        """
        if verdict.kind is FailureKind.OTHER_APP:
            return
        id, said = entry_id_of(entry), short(error)  # noqa: A001
        if verdict.kind is FailureKind.WAIT_FOR_BROKER:
            logger.warning(
                "outbox: the broker took no message (%s); entries wait in MongoDB",
                said,
                extra={"event": "broker_refused"},
            )
        elif verdict.kind is FailureKind.WAIT_FOR_TASK:
            logger.warning(
                "outbox: entry %s of document %r waits for a process that knows its task: %s",
                id, document_id, said,
                extra={"event": "task_unknown"},
            )  # fmt: skip
        elif isinstance(error, UnsignedEntryError):
            self._log_unsigned(document_id)
        elif verdict.kind is FailureKind.DEAD_LETTER:
            logger.error(
                "outbox: entry %s of document %r is a dead letter after %s: %s",
                id, document_id, number(verdict.attempts, "attempt", "attempts"), said,
                extra={"event": "entry_dead"},
            )  # fmt: skip
        elif verdict.kind is FailureKind.STUCK and verdict.attempts == self.max_attempts:
            logger.error(
                "outbox: entry %s of document %r is stuck after %s and holds back what stands behind it: %s",
                id, document_id, number(verdict.attempts, "attempt", "attempts"), said,
                extra={"event": "entry_stuck"},
            )  # fmt: skip
        else:
            logger.warning(
                "outbox: entry %s of document %r failed (%s): %s",
                id, document_id, number(verdict.attempts, "attempt", "attempts"), said,
                extra={"event": "entry_failed"},
            )  # fmt: skip

    def _log_unsigned(self, document_id: object) -> None:
        if time.monotonic() - self._logged_at < _UNSIGNED_SECONDS:
            self._unlogged += 1
            return
        logger.error(
            "outbox: document %r has an entry that the outbox has not signed. It was not sent, and is a dead letter "
            "(%d more since the last such record). Find out who writes to the outbox's field: %s",
            document_id, self._unlogged, ANY_APP.celery("outbox", "dead-letters", "list"),
            extra={"event": "entry_unsigned"},
        )  # fmt: skip
        self._logged_at, self._unlogged = time.monotonic(), 0


def entry_id_of(entry: Entry | Mapping[str, Any]) -> Any:
    """By which an entry is removed; None where somebody else has written what has none."""
    return entry.id if isinstance(entry, Entry) else entry.get("id")


def attempts_of(entry: Entry | Mapping[str, Any]) -> int:
    """How often an entry has failed through its own fault, as far as that is stored."""
    found = entry.attempts if isinstance(entry, Entry) else entry.get("attempts")
    return int(found) if isinstance(found, int) and found > 0 else 0
