"""
Queues of which no worker takes a run: after the grace the workers are asked, and one record says why.

Either no worker consumes a queue, or workers take its messages and claim nothing, as without a right in MongoDB.

The leading thread sees what is late. The housekeeping thread asks, only while something is, and judges the answer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.listener.housekeeping import Housekeeping
from mongo_celery.bridge.listener.subscription import Subscription
from mongo_celery.broker.workers import ask_for_queues
from mongo_celery.command_line import CommandLine
from mongo_celery.mongo.redaction import short

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.listener")

_POLL_SECONDS = 0.5
_ASK_SECONDS = 30.0
_ANSWER_SECONDS = 1.5
_NAMED = 4
_REPEATS = 2
"""A run that is sent again so often, while nothing runs, was taken by workers that did not claim it."""


class UntakenQueues:
    """
    The queues that nobody consumes, in one term. `turn` is called by the leading thread.

    Args:
        wiring: of the bridge.
        housekeeping: of the term.
    """

    def __init__(self, wiring: Wiring, housekeeping: Housekeeping) -> None:
        self._app = wiring.app
        self._grace = wiring.options.grace
        self._since: dict[str, float] = {}
        self._late: frozenset[str] = frozenset()
        self._repeated: set[str] = set()
        self._is_working = False
        self._finding: dict[str, Any] | None = None
        self._polled_at = -math.inf
        self._job = housekeeping.add(self.ask_workers)

    def report(self) -> dict[str, Any] | None:
        """
        Return the queues of which no worker takes a run. None where all is taken.

        Beside them: whether any worker `answered` (None: it cannot be asked), and whether workers take the messages and
        leave the runs `unclaimed`.
        """
        found, late = self._finding, self._late
        queues = [name for name in found["queues"] if name in late] if found is not None else []
        return {**found, "queues": queues} if found is not None and queues else None

    def turn(self, subscriptions: Collection[Subscription], now: float) -> None:
        """Find out what has waited for longer than the grace, and have the workers asked."""
        if now - self._polled_at < _POLL_SECONDS:
            return
        self._polled_at = now
        waiting: dict[str, float] = {}
        repeated: set[str] = set()
        for subscription in subscriptions:
            for index, partition in subscription.partitions.items():
                if partition.in_flight is not None and partition.is_unclaimed:
                    queue = subscription.queue_name(index)
                    waiting[queue] = min(partition.in_flight.sent_at, waiting.get(queue, math.inf))
                elif partition.is_repeated:
                    waiting.setdefault(subscription.queue_name(index), now)
                if partition.repeats >= _REPEATS:
                    repeated.add(subscription.queue_name(index))
        taken = _find_last_claims(subscriptions) if waiting else {}
        self._since = {queue: max(min(at, self._since.get(queue, at)), taken[queue]) for queue, at in waiting.items()}
        was_late = bool(self._late)
        self._repeated = repeated
        late = frozenset(queue for queue, since in self._since.items() if now - since >= self._grace)
        if late:
            self._is_working = any(each.image.live for led in subscriptions for each in led.partitions.values())
        self._late = late
        if self._late and not was_late:
            self._finding = None
            self._job.wake()

    def ask_workers(self) -> float:
        """Ask the workers for their queues, if anything is late. Return the seconds until the next question."""
        if not self._late:
            return math.inf
        try:
            consumed: Mapping[str, set[str]] | None = ask_for_queues(self._app, _ANSWER_SECONDS)
        except Exception as error:  # noqa: BLE001 - every transport raises its own; some have no remote control
            logger.debug("workers cannot be asked for their queues: %s", short(error))
            consumed = None
        before, self._finding = self._finding, self._judge(consumed)
        if before is None and self._finding is not None:
            self._log(**self._finding)
        return _ASK_SECONDS

    def _judge(self, consumed: Mapping[str, set[str]] | None) -> dict[str, Any] | None:
        """Return why nobody takes what is late. None where workers will, for all that they say."""
        if self._is_working and not consumed:  # a solo pool that is busy does not answer
            return None
        unconsumed = self._late - set().union(*(consumed or {}).values())
        answered = None if consumed is None else bool(consumed)
        late = unconsumed or (frozenset() if self._is_working else self._late & self._repeated)
        return {"queues": sorted(late), "answered": answered, "unclaimed": not unconsumed} if late else None

    def _log(self, *, queues: list[str], answered: bool | None, unclaimed: bool) -> None:
        line = CommandLine.of(self._app)
        more = f" and {len(queues) - _NAMED} more" if len(queues) > _NAMED else ""
        shown = ", ".join(queues[:_NAMED]) + more
        if unclaimed:
            logger.error(
                "workers take what was sent to %s and claim nothing. Changes there wait. Look for claim_failed in the "
                "log of the workers, and run there: %s",
                shown,
                line.changes("check"),
                extra={"event": "runs_unclaimed", "queues": queues},
            )
            return
        why = "workers cannot be asked"
        if answered is not None:
            why = "the workers that answer consume other queues" if answered else "no worker answers"
        logger.warning(
            "nobody takes what was sent to %s: %s. Changes there wait. Run: %s",
            shown,
            why,
            f'{line.celery("worker")} -Q "$({line.changes("queues")})"',
            extra={"event": "queues_unconsumed", "queues": queues},
        )


def _find_last_claims(subscriptions: Iterable[Subscription]) -> Mapping[str, float]:
    """Return when a run of each queue was last seen to be claimed for the first time."""
    found: dict[str, float] = {}
    for subscription in subscriptions:
        for index, partition in subscription.partitions.items():
            queue = subscription.queue_name(index)
            found[queue] = max(partition.taken_at, found.get(queue, -math.inf))
    return found
