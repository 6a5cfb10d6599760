"""Repeating a call until it is answered, and the pauses between one attempt and the next."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from mongo_celery.mongo.verdicts import is_transient

Result = TypeVar("Result")

_STEPS_MAX = 64  # the longest pause is reached long before; the power of a large number would overflow


@dataclass(frozen=True, slots=True)
class Pauses:
    """
    The pauses before each next attempt.

    Attributes:
        first: seconds.
        longest: seconds; as long as the first for pauses that do not grow.
        growth: how many times as long as the one before each pause is.
        jitter: the share of a pause that chance may take away, so that many who failed at once do not return at once;
            0 for none, 1 for any pause from nothing to the whole.
    """

    first: float
    longest: float
    growth: float = 2.0
    jitter: float = 0.0

    def nth(self, count: int = 0) -> float:
        """Seconds to wait after so many earlier pauses; by chance another time each."""
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
    Make a call, and make it again with pauses while it gets no answer; a refusal is an answer.

    Not promised: that it had its effect only once. An attempt whose answer was lost may have had it too.

    Args:
        call: what is done.
        deadline: on the monotonic clock; what fails after it is not made again.
        pauses: between attempts.
        repeatable: whether an error means that there was no answer.
        note: is told each error after which there is another attempt.

    Raises:
        Exception: what the last attempt said.
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
