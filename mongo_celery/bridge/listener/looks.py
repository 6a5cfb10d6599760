"""
When the partitions are looked at, and which of them.

What an execution does shows in its partition alone, so partitions are read again and again while something is out.
Two kinds of reading share that:

- The **sweep** reads all of them, once a second. It alone is needed: it shows all that happens, whoever does it.
- A **look** reads those with something out, sooner. Of them the server leaves out where nothing has happened that
  counts: a run that nobody has claimed yet, where the fence is as it was (every claim, and every command that moves a
  position, raises it), and one that runs, where the claim stands and nothing is handled. That needs no clock, no order
  of writes, and nothing that a write would have to leave for it: each partition is compared with what was seen of
  itself. So nothing is missed, however late a majority has it.

What happens without a write, or by one that is not compared (a claim lapses, a list moves its position under its
claim, a person pauses what nobody has claimed), is seen by the sweep: at most a second later.

While much is out, its queues give workers enough to do, and nobody gains by knowing at once. So the pause between
looks is then a part of the time that the quickest runs take from their dispatch to their end, within bounds.

Positions are written with w:1, and on a set of one member a majority read shows such a write when the journal is
flushed: by the next majority write, which under load there always is, else up to a tenth of a second later. So a look
that follows one in vain has it flushed, where a run was claimed and may have ended; not after a second without
anything, when a tenth is little.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pymongo.errors import PyMongoError

if TYPE_CHECKING:
    from pymongo.client_session import ClientSession

    from mongo_celery.bridge.listener.subscription import Subscription
    from mongo_celery.bridge.state.partitions import Image, Partitions, Seen

SWEEP_SECONDS = 1.0
BUSY_LOOK = 0.03
_LONGEST_LOOK = 0.25
_LONGEST_BUSY_LOOK = 0.1  # `fairness` wants to know who waits for so long
_SHORTEST_LOOK = 0.005
_BUSY = 3
_SHARE = 4
"""A look's pause is one part in so many of the time that runs take."""

_WEIGHT = 0.2
_FLUSHING_SECONDS = 1.0


class Looks:
    """
    The looks of one term. Used by the leading thread.

    Args:
        partitions: where they lie.
        session: in which all that decides what runs is read.

    Attributes:
        moved_at: monotonic time at which something last went out, or was seen to have ended.
        has_swept: whether the last reading was of all partitions.
    """

    def __init__(self, partitions: Partitions, session: ClientSession) -> None:
        self.moved_at = 0.0
        self.has_swept = False
        self._partitions = partitions
        self._session = session
        self._looked_at = self._swept_at = 0.0
        self._taken: dict[str, float] = {}

    def look(self, subscriptions: Mapping[str, Subscription], now: float) -> list[Image] | None:
        """
        Read what is due, if anything is.

        Returns:
            Images; None where nothing was due.
        """
        if now - self._swept_at >= SWEEP_SECONDS:
            self._swept_at = self._looked_at = now
            self.has_swept = True
            generations = {name: led.plan.layout.generation for name, led in subscriptions.items()}
            return self._partitions.of(generations, self._session)
        if now - self._looked_at < self._pause(subscriptions, now):
            return None
        seen = {each.partition_id: each.seen for led in subscriptions.values() for each in led.in_flight}
        if self._may_be_unflushed(seen.values(), now):
            with contextlib.suppress(PyMongoError):  # if something is wrong, the look says what
                self._partitions.flush()
        self._looked_at = now
        self.has_swept = False
        return self._partitions.changed(seen, self._session)

    def look_now(self) -> None:
        """The next reading is due at once, and is of all partitions."""
        self._swept_at = -math.inf

    def failed(self, now: float) -> None:
        """Reading failed: the next one is due as if it had not."""
        self._looked_at = self._swept_at = now

    def ended(self, subscription: str, sent_at: float | None, now: float) -> None:
        """A run was seen to have ended; if this term has sent it, at that time."""
        self.moved_at = now
        if sent_at is not None:
            before = self._taken.get(subscription, now - sent_at)
            self._taken[subscription] = before + _WEIGHT * (now - sent_at - before)

    def due(self, subscriptions: Mapping[str, Subscription], now: float) -> float:
        """Monotonic time of the next reading."""
        return min(self._swept_at + SWEEP_SECONDS, self._looked_at + self._pause(subscriptions, now))

    def _pause(self, subscriptions: Mapping[str, Subscription], now: float) -> float:
        """Short after something moved, longer while handlers take their time; infinite with nothing out."""
        out = {name: count for name, led in subscriptions.items() if (count := len(led.in_flight))}
        if not out:
            return math.inf
        least = _SHORTEST_LOOK
        if sum(out.values()) >= _BUSY:
            quickest = min(self._taken.get(name, 0.0) for name in out)
            least = min(max(quickest / _SHARE, BUSY_LOOK), _LONGEST_BUSY_LOOK)
        return min(max((now - self.moved_at) / 4, least), _LONGEST_LOOK)

    def _may_be_unflushed(self, seen: Iterable[Seen | None], now: float) -> bool:
        """Whether the last look was in vain, and runs that were claimed before it may have ended."""
        if self.moved_at >= self._looked_at or now - self.moved_at > _FLUSHING_SECONDS:
            return False
        return any(each is None or each.claimed for each in seen)
