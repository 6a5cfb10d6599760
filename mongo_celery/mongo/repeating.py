"""Repeating a call until it is answered, with pauses between attempts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from mongo_celery.mongo.verdicts import is_transient

Result = TypeVar("Result")

_STEPS_MAX = 64  # the longest pause is reached long before, and a large power would overflow


@dataclass(frozen=True, slots=True)
class Pauses:
    """
    The pauses before repeated attempts.

    Attributes:
        first: the first pause in seconds.
        longest: the longest pause in seconds. Equal to the first for constant pauses.
        growth: factor between two pauses.
        jitter: the random share that may be subtracted from a pause, so that many callers do not return together. 0 for
            none, 1 for any pause from 0 to the whole.
    """

    first: float
    longest: float
    growth: float = 2.0
    jitter: float = 0.0

    def nth(self, count: int = 0) -> float:
        """Return the seconds to wait after this many earlier pauses, with jitter."""
        whole = min(self.first * self.growth ** min(count, _STEPS_MAX), self.longest)
        return whole * (1 - self.jitter * random.random())  # noqa: S311 - jitter, no secret


def retry_until_answered(
    call: Callable[[], Result],
    *,
    deadline: float,
    pauses: Pauses,
    repeatable: Callable[[Exception], bool] = is_transient,
    note: Callable[[Exception], object] | None = None,
) -> Result:
    """
    Make a call, and repeat it with pauses until the server answers. A refusal is an answer.

    The call may take effect more than once: an attempt with a lost answer may have succeeded.

    Args:
        call: the call.
        deadline: the deadline on the monotonic clock. A call that fails after it is not repeated.
        pauses: pauses between attempts.
        repeatable: returns True if an error means that there was no answer.
        note: receives each error before another attempt.

    Raises:
        Exception: the error of the last attempt.
    """
    count = 0
    while True:
        try:
            return call()
        except Exception as error:
            if not repeatable(error) or time.monotonic() >= deadline:
                raise
            if note is not None:
                note(error)
        time.sleep(pauses.nth(count))
        count += 1
