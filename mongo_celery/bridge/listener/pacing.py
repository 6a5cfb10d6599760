"""The times at which something that has failed is tried again, and something that lasts is logged again."""

from __future__ import annotations

import math
import time

from mongo_celery.mongo.repeating import Pauses

_ONE_SECOND = Pauses(first=1.0, longest=1.0)


class RetryGate:
    """
    The next attempt of something that has failed.

    Args:
        pauses: between one attempt and the next. By default a second each.

    Attributes:
        opens_at: monotonic time of the next attempt; 0 if nothing has failed.
        failures: attempts that have failed, one after the other.
    """

    def __init__(self, pauses: Pauses = _ONE_SECOND) -> None:
        self.opens_at = 0.0
        self.failures = 0
        self._pauses = pauses

    def is_open(self, now: float) -> bool:
        """Return True if it may be tried."""
        return now >= self.opens_at

    def note_failure(self, lived: float = 0.0) -> float:
        """
        Close until the pause is over. It begins now: the attempt may have taken longer than that.

        Args:
            lived: seconds for which it went well. For longer than the longest pause: then pauses begin anew.

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
        """Begin with the shortest pause again."""
        self.opens_at, self.failures = 0.0, 0


class LogThrottle:
    """
    The log records about a state that lasts: one now and then.

    Args:
        seconds: between two records.

    Attributes:
        left_out: records that were left out since the last one.
    """

    def __init__(self, seconds: float = 30.0) -> None:
        self.left_out = 0
        self._seconds = seconds
        self._logged_at = -math.inf

    def may_log(self) -> bool:
        """Return True if a record is due. Then none is for a while."""
        now = time.monotonic()
        if now - self._logged_at < self._seconds:
            self.left_out += 1
            return False
        self._logged_at = now
        return True

    def describe_left_out(self) -> str:
        """Return the end of a sentence about the records that were left out, and begin to count anew."""
        count, self.left_out = self.left_out, 0
        return f" (and {count} more since the last such line)" if count else ""
