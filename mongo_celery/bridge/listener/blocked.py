"""Handlers that have been blocked for long. The signal `handler_blocked` names each of them once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.listener.partition import DELAYED, Partition
from mongo_celery.signals import handler_blocked, send_signal

if TYPE_CHECKING:
    from mongo_celery.bridge.listener.subscription import Subscription
    from mongo_celery.bridge.wiring import Wiring

LAG_SECONDS = 300
"""Lag from which a handler is late, and time from which a partition is blocked for long."""

RETRYING_SECONDS = 3600
"""Retries of a few minutes are normal. A partition that is blocked for longer is a finding."""

_REQUESTED = ("paused", "retrying")
"""States that a person or a handler has requested."""

_TICK_SECONDS = 5.0


class BlockedHandlers:
    """
    The blocked partitions that one term has seen, and the handlers that were reported.

    Attributes:
        due_at: monotonic time of the next look.
    """

    def __init__(self) -> None:
        self.due_at = 0.0
        self._seen: dict[str, tuple[int, float, str]] = {}
        self._reported = set[tuple[str, str]]()

    def report(self, wiring: Wiring, subscriptions: Iterable[Subscription], now: float) -> None:
        """Send a signal for each handler that has newly been blocked for long."""
        for found in self.find_new(subscriptions, now):
            send_signal(handler_blocked, wiring.name, **found, command=wiring.line.changes("status"))

    def find_new(self, subscriptions: Iterable[Subscription], now: float) -> Iterator[dict[str, Any]]:
        """Yield the arguments of a signal for each handler and state that has newly been blocked for long."""
        self.due_at = now + _TICK_SECONDS
        found = defaultdict[tuple[str, str], list[tuple[float, Partition]]](list)
        for subscription in subscriptions:
            for partition in subscription.partitions.values():
                state, seconds = self._follow(partition, now)
                if state is not None and seconds >= (RETRYING_SECONDS if state in _REQUESTED else LAG_SECONDS):
                    found[subscription.name, state].append((seconds, partition))
        for (handler, state), blocked in found.items():
            if (handler, state) not in self._reported:
                seconds, first = max(blocked, key=lambda each: each[0])
                yield {
                    "handler": handler,
                    "partition": first.index,
                    "state": state,
                    "seconds": int(seconds),
                    "partitions": len(blocked),
                    "error": first.rejection.error if first.rejection is not None else first.image.error,
                }
        self._reported = set(found)

    def _follow(self, partition: Partition, now: float) -> tuple[str | None, float]:
        """Return the state in which a partition is blocked, and for how many seconds. None if it is not."""
        place, committed, state = partition.partition_id, partition.image.committed, partition.block_reason
        known = self._seen.get(place)
        if known is not None and known[0] != committed:
            known = None
        if state in (None, "running", DELAYED):  # an attempt of the same change does not end its block
            state = known[2] if known is not None and partition.in_flight is not None else None
        if state is None or not (partition.has_next or state == "halted"):
            self._seen.pop(place, None)
            return None, 0.0
        since = now if known is None else known[1]
        self._seen[place] = committed, since, state
        return state, now - since
