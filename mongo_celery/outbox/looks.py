"""When a dispatcher looks at the index for what it has not been told of."""

from __future__ import annotations

import time

LOOKS_AFTER = (0.1, 0.5, 2.0)
"""When the index is looked at after a write that the outbox has prepared, and somebody else carries out."""

_LOOKS_MAX = 5
"""Looks at the index that are planned at any time."""


class PlannedLooks:
    """Moments of the monotonic clock, few at any time. Its user has a lock around each use."""

    def __init__(self) -> None:
        self.at: list[float] = []

    @property
    def next(self) -> float | None:
        """The first of them; None if none is planned."""
        return self.at[0] if self.at else None

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
        is_due = bool(self.at) and self.at[0] <= now
        self.at = [each for each in self.at if each > now] if is_due else self.at
        return is_due

    def end_with_one(self) -> None:
        """The process ends: one now, for what somebody has hinted at, if any is planned."""
        self.at = [0.0] if self.at else []

    @property
    def is_last_due(self) -> bool:
        """Whether the one that was planned for the end is still to come."""
        return self.at[:1] == [0.0]
