"""
The policy for entries that could not be published.

Only an entry's own faults count: an unreadable payload, or a broker that refuses *this* entry and accepts others. An
outage, a time limit, a task unknown to this process and an app with another broker do not count.

===================  =====================================================================================
`wait for broker`    it accepted nothing; the entry is tried again as soon as the broker is back, or after a pause
`other process`      a process that knows its task, or of its app, delivers it: stop before it. It is held back for
                     some seconds, so that a sweep tries all others first
`attempt`            its own fault: counted, and tried again after a pause that grows to 5 minutes. With the policy
                     `halt` it is stuck after `max_attempts`: a person should look
`dead letter`        a dead letter, so that later entries continue (policy `dead_letter`)
`unsigned`           a dead letter immediately, whatever the policy: the outbox has not written it
===================  =====================================================================================

`dead_letter` waits for `max_attempts` *and* ten minutes. No time is stored for that: the sum of the entry's pauses
equals the time since its first attempt, by the server's clock.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from enum import Enum

from mongo_celery.command_line import ANY_APP
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.outbox.entries import StoredEntry, entry_id, read_attempts
from mongo_celery.outbox.origin import OtherBrokerError
from mongo_celery.outbox.publisher import BrokerUnavailableError, UnknownTaskError
from mongo_celery.outbox.signing import UnsignedEntryError
from mongo_celery.quantities import number

logger = logging.getLogger("mongo_celery.outbox")

FAILURE_POLICIES = ("halt", "dead_letter")

BROKER_PAUSE_SECONDS = 1.0
"""Pause of entries after the broker did not answer."""

REFUSED_PAUSE_SECONDS = 30.0
"""Pause of entries after the broker refused all, for example because its memory is full."""

UNKNOWN_PAUSE_SECONDS = 5.0
"""Pause of entries that another process must publish, which may run the next sweep."""

DEAD_SECONDS_MIN = 600.0
"""Least age of an entry before it becomes a dead letter: a deploy's mistake is fixed within minutes."""

_PAUSES = Pauses(first=1.0, longest=300.0)
_PAUSES_MAX = 64
"""This many pauses always exceed `DEAD_SECONDS_MIN`. A stored number of attempts may be arbitrary."""


_OTHER_BROKER_SECONDS = 60.0
"""Seconds between two log records about entries for another broker."""

_UNSIGNED_SECONDS = 10.0
"""Seconds between two log records about unsigned entries, so that a flood of them cannot fill the log."""


class FailureKind(Enum):
    """The kinds of consequences of a failed publish."""

    WAIT_FOR_BROKER = "wait for broker"
    OTHER_PROCESS = "other process"
    ATTEMPT = "attempt"
    DEAD_LETTER = "dead letter"


@dataclass(frozen=True, slots=True)
class FailureVerdict:
    """
    The consequence of an entry's failure.

    Attributes:
        kind: the action.
        pause: seconds for which the document is held back.
        attempts: number of attempts including this one. 0 if it does not count.
        is_outage: True if the broker does not answer at all, so that nothing else can be published.
    """

    kind: FailureKind
    pause: float = 0.0
    attempts: int = 0
    is_outage: bool = False

    @property
    def counts(self) -> bool:
        """Return True if the entry's attempts increase. A dead letter keeps its earlier number."""
        return self.attempts > 0 and self.kind is not FailureKind.DEAD_LETTER


@dataclass(slots=True)
class FailurePolicy:
    """
    The policy for entries with their own faults.

    Args:
        name: `halt` to try forever, or `dead_letter` to move it to the dead letters.
        max_attempts: number of attempts before an entry is stuck, or may become a dead letter.
    """

    name: str
    max_attempts: int
    _logged_at: float = field(default=-math.inf, init=False, repr=False)
    _unlogged: int = field(default=0, init=False, repr=False)
    _other_logged_at: float = field(default=-math.inf, init=False, repr=False)

    def judge(self, entry: StoredEntry, error: BaseException) -> FailureVerdict:
        """
        Return the consequence for an entry.

        Args:
            entry: the entry as read, or the stored value if unreadable.
            error: the error of its publishing.
        """
        if isinstance(error, BrokerUnavailableError):
            pause = REFUSED_PAUSE_SECONDS if error.answers else BROKER_PAUSE_SECONDS
            return FailureVerdict(FailureKind.WAIT_FOR_BROKER, pause, is_outage=not error.answers)
        if isinstance(error, UnsignedEntryError):
            return FailureVerdict(FailureKind.DEAD_LETTER)
        if isinstance(error, (UnknownTaskError, OtherBrokerError)):
            return FailureVerdict(FailureKind.OTHER_PROCESS, UNKNOWN_PAUSE_SECONDS)
        attempts = read_attempts(entry) + 1
        if self.name == "dead_letter" and self._is_over(attempts):
            return FailureVerdict(FailureKind.DEAD_LETTER, attempts=attempts)
        return FailureVerdict(FailureKind.ATTEMPT, _PAUSES.nth(attempts), attempts)

    def _is_over(self, attempts: int) -> bool:
        held_back = sum(_PAUSES.nth(count) for count in range(1, min(attempts, _PAUSES_MAX)))
        return attempts >= self.max_attempts and held_back >= DEAD_SECONDS_MIN

    def log(self, verdict: FailureVerdict, entry: StoredEntry, document_id: object, error: BaseException) -> None:
        """
        Log a verdict. A stuck entry is an error once, then a warning. Unsigned entries are an error every ten seconds,
        those for other brokers every minute. An unknown task is normal, and the sweep reports it after a while.
        """
        if isinstance(error, UnsignedEntryError):
            self._log_unsigned(document_id)
        elif isinstance(error, OtherBrokerError):
            self._log_other_broker(document_id, error)
        elif verdict.kind is FailureKind.WAIT_FOR_BROKER:
            logger.warning(
                "outbox: the broker accepts no messages (%s). Entries wait in MongoDB until it does",
                short(error),
                extra={"event": "broker_refused"},
            )
        elif verdict.kind is not FailureKind.OTHER_PROCESS:
            attempts = number(verdict.attempts, "attempt", "attempts")
            about = entry_id(entry), document_id, attempts, short(error)
            if verdict.kind is FailureKind.DEAD_LETTER:
                text = "outbox: entry %s of document %r was moved to the dead letters after %s: %s"
                logger.error(text, *about, extra={"event": "entry_dead"})
            elif self.name == "halt" and verdict.attempts == self.max_attempts:
                text = "outbox: entry %s of document %r is stuck after %s, and later entries of the document wait: %s"
                logger.error(text, *about, extra={"event": "entry_stuck"})
            else:
                text = "outbox: entry %s of document %r failed (%s) and will be tried again: %s"
                logger.warning(text, *about, extra={"event": "entry_failed"})

    def _log_unsigned(self, document_id: object) -> None:
        if time.monotonic() - self._logged_at < _UNSIGNED_SECONDS:
            self._unlogged += 1
            return
        logger.error(
            "outbox: document %r has an entry that the outbox has not signed. It was not sent, and is now a "
                "dead letter (%d more since the last such record). Find out which program writes to the outbox's "
                "field: %s",
            document_id, self._unlogged, ANY_APP.celery("outbox", "dead-letters", "list"),
            extra={"event": "entry_unsigned"},
        )  # fmt: skip
        self._logged_at, self._unlogged = time.monotonic(), 0

    def _log_other_broker(self, document_id: object, error: OtherBrokerError) -> None:
        if time.monotonic() - self._other_logged_at < _OTHER_BROKER_SECONDS:
            return
        self._other_logged_at = time.monotonic()
        logger.error(
            "outbox: document %r waits for another app: %s. Later entries of the document also wait. Give apps "
                "that share a collection the same broker_url, or use separate collections. Until then run the sweep "
                "of each app.",
            document_id, error,
            extra={"event": "other_broker"},
        )  # fmt: skip
