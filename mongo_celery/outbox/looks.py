"""When a dispatcher looks at the index for what it has not been told of."""

from __future__ import annotations

import math
import time

from mongo_celery.mongo.repeating import Pauses

LOOKS_AFTER = (0.1, 0.5, 2.0)
"""When the index is looked at after a write that the outbox has prepared, and somebody else carries out."""

_LOOKS_MAX = 5
"""Looks at the index that are planned at any time."""


_RESTS = Pauses(first=2.0, longest=60.0)
"""After a look that MongoDB did not end in time: it reads the whole collection where the index is missing."""


class PlannedLooks:
    """Moments of the monotonic clock, few at any time. Its user has a lock around each use."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self._not_before = -math.inf
        self._rests = 0

    @property
    def next(self) -> float | None:
        """The first of them; None if none is planned."""
        return max(self.at[0], self._not_before) if self.at else None

    def plan(self, *seconds: float) -> None:
        """
        Plan looks, so many seconds from now.

        The first that is planned already stays, so that they go on under any load; and so do those that lie behind the
        new ones, which wait for something else, such as the end of a claim.
        """
        now = time.monotonic()
        new = [now + each for each in seconds]
        first = min([new[0], *self.at[:1]])
        behind = [each for each in self.at if each > new[-1]] if len(new) > 1 else self.at
        self.at = sorted({first, *new[1:], *behind})[:_LOOKS_MAX]

    def plan_only(self, *seconds: float) -> None:
        """As `plan`, instead of all others."""
        self.at = []
        self.plan(*seconds)

    def begin(self) -> bool:
        """Whether one is due; all that are due are one, and begin with this."""
        now = time.monotonic()
        is_due = self.next is not None and self.next <= now
        self.at = [each for each in self.at if each > now] if is_due else self.at
        return is_due

    def rest(self) -> None:
        """One was not answered in time: the next one has a pause before it, which grows; the sweep finds what waits."""
        self._not_before = time.monotonic() + _RESTS.nth(self._rests)
        self._rests += 1
        self.plan(0.0)

    def succeeded(self) -> None:
        """One was answered: no pauses any more."""
        self._not_before, self._rests = -math.inf, 0

    def end_with_one(self) -> None:
        """The process ends: one now, for what somebody has hinted at, if any is planned and they are answered."""
        self.at = [0.0] if self.at and not self._rests else []

    @property
    def is_last_due(self) -> bool:
        """Whether the one that was planned for the end is still to come."""
        return self.at[:1] == [0.0]
