"""Pauses before an attempt is repeated, and before a lasting state is logged again."""

from __future__ import annotations

import math
import time

from mongo_celery.mongo.repeating import Pauses

_LOG_SECONDS = 30.0
_ONE_SECOND = Pauses(first=1.0, longest=1.0)


class RetryGate:
    """
    The next attempt after failures.

    Args:
        pauses: the pauses between two attempts. By default one second.

    Attributes:
        opens_at: monotonic time of the next attempt. 0 without a failure.
        failures: number of failed attempts in a row.
    """

    def __init__(self, pauses: Pauses = _ONE_SECOND) -> None:
        self.opens_at = 0.0
        self.failures = 0
        self._pauses = pauses

    def is_open(self, now: float) -> bool:
        """Return True if an attempt is allowed."""
        return now >= self.opens_at

    def note_failure(self, lived: float = 0.0) -> float:
        """
        Close the gate until the pause is over. The pause begins now, because the attempt may have taken longer.

        Args:
            lived: seconds of success before the failure. If longer than the longest pause, the pauses begin anew.

        Returns:
            The seconds of the pause.
        """
        if lived > self._pauses.longest:
            self.failures = 0
        pause = self._pauses.nth(self.failures)
        self.opens_at = time.monotonic() + pause
        self.failures += 1
        return pause

    def note_success(self) -> None:
        """Reset the pauses to the shortest one."""
        self.opens_at, self.failures = 0.0, 0


class LogThrottle:
    """
    Limits the repeated log records about a lasting state.

    Attributes:
        left_out: number of records omitted since the last one.
    """

    def __init__(self) -> None:
        self.left_out = 0
        self._logged_at = -math.inf

    def may_log(self) -> bool:
        """Return True if a log record is due. Then the next one is not due for a while."""
        now = time.monotonic()
        if now - self._logged_at < _LOG_SECONDS:
            self.left_out += 1
            return False
        self._logged_at = now
        return True

    def describe_left_out(self) -> str:
        """Return the end of a sentence about omitted records, and reset the count."""
        count, self.left_out = self.left_out, 0
        return f" ({count} more since the last such message)" if count else ""
