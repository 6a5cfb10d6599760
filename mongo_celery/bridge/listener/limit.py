"""
The limits of a handler over all workers: `max_running` and `rate`.

The listener is the only one that dispatches, so it counts. Two facts make the count exact:

- A message of a limited handler contains the fencing token of its partition, and its claim needs it. So of all messages
  of a partition, repeated ones too, at most one can claim.
- A partition **holds a slot** from the attempt to send its message until nothing can run there any more: its run has
  ended, or its claim and its message have another fencing token. Claims that a take-over finds count, and so does a
  partition that it could not win. If a partition holds a slot but waits for something else (it is paused, or the broker
  rejects its message), the next sweep ends its claim and its message (`Claims.void`). So no slot is lost.

The tokens of a rate are stored in the handler's document. They are reserved by one write before the messages are sent,
so the next term continues with them, and a crash loses those of one batch at most. Messages without a claim are bounded
by the same number, so that they cannot run as one burst later.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from pymongo.errors import PyMongoError

from mongo_celery.mongo.verdicts import brief

if TYPE_CHECKING:
    from mongo_celery.bridge.handlers import Handler
    from mongo_celery.bridge.listener.partition import Partition
    from mongo_celery.bridge.state.subscriptions import Subscriptions

logger = logging.getLogger("mongo_celery.listener")

BURST_SECONDS = 1.0
"""The tokens of this time, and one more, may be used together. So a late turn of the listener loses none."""

_SHORTEST_PAUSE = 0.02
_RETRY_SECONDS = 0.5
_ROUNDED_SECONDS = 0.001  # the server's times are milliseconds


class Limit:
    """
    The limits of one handler in one term. The leading thread uses it.

    Args:
        handler: the handler.

    Attributes:
        is_limited: False if the handler has no limit, so everything is admitted.
        per_second: the handler's rate. 0 without one.
        burst: the largest number of tokens.
        waiting: partitions whose next run waits only for a slot or a token.
        opens_at: monotonic time at which the next token exists. Infinite if only the end of a run can open the limit.
    """

    def __init__(self, handler: Handler) -> None:
        self.is_limited = handler.is_limited
        self.waiting = 0
        self.opens_at = 0.0
        self.per_second = handler.per_second
        self.burst = 1 + self.per_second * BURST_SECONDS
        self._max_running = handler.max_running
        self._tokens, self._counted_at = self.burst, -math.inf  # as far as this term knows
        self._token_at = 0.0
        self._slots = self._starts = self._messages = math.inf
        self._have_waited = False

    def begin(self, partitions: Collection[Partition], now: float) -> None:
        """Count the free slots and tokens before runs are chosen."""
        if not self.is_limited:
            return
        self._have_waited, self.waiting, self.opens_at = self.waiting > 0, 0, 0.0
        if self._max_running is not None:
            self._slots = self._max_running - sum(each.holds_slot for each in partitions)
        if self.per_second:
            self._starts = math.floor(self._estimate(now)) if now >= self._token_at else 0
            self._messages = math.floor(self.burst) - sum(each.has_message for each in partitions)

    def admit(self, partition: Partition) -> bool:
        """
        Return True if a partition without a run in flight may have one now.

        A partition that holds a slot already needs none, unless others wait and only its message was lost.
        """
        if not self.is_limited:
            return True
        keeps = partition.holds_slot and (partition.image.claim is not None or not self._have_waited)
        if self._starts >= 1 and (keeps or self._slots >= 1) and (partition.has_message or self._messages >= 1):
            return True
        self.waiting += 1
        self.opens_at = math.inf if self._starts >= 1 else self._token_at
        return False

    def note_chosen(self, partition: Partition) -> None:
        """Count a chosen run."""
        if not self.is_limited:
            return
        self._starts -= 1
        self._slots -= not partition.holds_slot
        self._messages -= not partition.has_message

    def reserve(self, store: Subscriptions, name: str, term: int, wanted: int) -> int:
        """Reserve tokens for some starts. Return their number."""
        try:
            granted, left = store.take_tokens(name, term, wanted, self.per_second, self.burst)
        except PyMongoError as error:
            self._token_at = time.monotonic() + _RETRY_SECONDS
            logger.warning(
                "the listener could not reserve executions for the rate of %s, so it sends none, and tries again: %s",
                name,
                brief(error),
                extra={"event": "rate_unread", "subscription": name},
            )
            return 0
        now = time.monotonic()
        self._tokens, self._counted_at = left, now
        pause = max((1 - left) / self.per_second + _ROUNDED_SECONDS, _SHORTEST_PAUSE)
        self._token_at = now + pause if left < 1 else 0.0
        return granted

    def refill(self) -> None:
        """Forget when the next token exists, because the stored ones were changed."""
        self._tokens, self._token_at = self.burst, 0.0

    def _estimate(self, now: float) -> float:
        return min(self._tokens + (now - self._counted_at) * self.per_second, self.burst)
