"""
Queues of which no worker takes a run: after the grace the workers are asked, and one warning says why.

Either no worker consumes a queue, or workers take its messages and claim nothing, as without a right in MongoDB.

The housekeeping thread asks them, only while something has waited for longer than `dispatch_grace`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
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
    The queues that nobody consumes, in one term. Used by the leading thread.

    Args:
        wiring: of the bridge.
        housekeeping: of the term.
    """

    def __init__(self, wiring: Wiring, housekeeping: Housekeeping) -> None:
        self._app = wiring.app
        self._grace = wiring.options.grace
        self._since: dict[str, float] = {}
        self._repeated: set[str] = set()
        self._names: list[str] = []
        self._is_unclaimed = False
        self._answered: bool | None = None
        self._is_told = False
        self._polled_at = self._asked_at = -math.inf
        self._is_asking = self._has_asked = False
        self._consumed: Mapping[str, set[str]] | None = None
        self._job = housekeeping.add(self.ask_workers)

    def report(self) -> dict[str, Any] | None:
        """
        Return the queues of which no worker takes a run. None where all is taken.

        Beside them: whether any worker `answered` (None: it cannot be asked), and whether workers take the messages and
        leave the runs `unclaimed`.
        """
        if not self._names:
            return None
        return {"queues": list(self._names), "answered": self._answered, "unclaimed": self._is_unclaimed}

    def turn(self, subscriptions: Collection[Subscription], now: float) -> None:
        """Find out who should take what has waited for longer than the grace. Log it once until it is taken."""
        if now - self._polled_at < _POLL_SECONDS:
            return
        self._polled_at = now
        self._note_waiting(subscriptions)
        late = {queue for queue, since in self._since.items() if now - since >= self._grace}
        if not late:
            self._names, self._is_told = [], False
            return
        self._names = [name for name in self._names if name in late]
        is_working = _is_working(subscriptions)
        if self._has_asked:
            self._has_asked = False
            self._judge(late, is_working=is_working)
        elif not self._is_asking and now - self._asked_at >= _ASK_SECONDS:
            self._asked_at, self._is_asking = now, True
            self._job.wake()
        if self._answered and not is_working and (self._is_unclaimed or not self._names):
            self._judge_unclaimed(late)

    def _note_waiting(self, subscriptions: Collection[Subscription]) -> None:
        """Keep since when nothing of a queue has been taken, for those to which something was sent."""
        self._repeated.clear()
        waiting: dict[str, float] = {}
        taken: dict[str, float] = {}
        for subscription in subscriptions:
            for index, partition in subscription.partitions.items():
                queue = subscription.queue_name(index)
                if partition.repeats >= _REPEATS:
                    self._repeated.add(queue)
                taken[queue] = max(partition.taken_at, taken.get(queue, -math.inf))
                if partition.is_unclaimed and partition.in_flight is not None:
                    sent_at = min(partition.in_flight.sent_at, self._since.get(queue, math.inf))
                    waiting[queue] = min(sent_at, waiting.get(queue, math.inf))
                elif partition.is_repeated and queue in self._since:
                    waiting.setdefault(queue, self._since[queue])
        self._since = {queue: max(since, taken.get(queue, -math.inf)) for queue, since in waiting.items()}

    def ask_workers(self) -> float:
        """Ask the workers for their queues, once if that is wanted."""
        if not self._is_asking:
            return math.inf
        try:
            self._consumed = ask_for_queues(self._app, _ANSWER_SECONDS)
        except Exception as error:  # noqa: BLE001 - every transport raises its own; some have no remote control
            logger.debug("workers cannot be asked for their queues: %s", short(error))
            self._consumed = None
        self._is_asking, self._has_asked = False, True
        return math.inf

    def _judge(self, late: set[str], *, is_working: bool) -> None:
        self._answered = None if self._consumed is None else bool(self._consumed)
        consumed = set().union(*(self._consumed or {}).values())
        # A solo pool that is busy does not answer.
        self._names = [] if is_working and not self._answered else sorted(late - consumed)
        self._is_unclaimed = False
        if not self._names or self._is_told:
            return
        self._is_told = True
        why = "no worker answers"
        if self._answered is not False:
            why = "the workers that answer consume other queues" if self._answered else "workers cannot be asked"
        line = CommandLine.of(self._app)
        logger.warning(
            "nobody takes what was sent to %s: %s. Changes there wait. Run: %s",
            self._shown,
            why,
            f'{line.celery("worker")} -Q "$({line.changes("queues")})"',
            extra={"event": "queues_unconsumed", "queues": list(self._names)},
        )

    def _judge_unclaimed(self, late: set[str]) -> None:
        """Name the queues whose messages workers take again and again, and leave."""
        self._names, self._is_unclaimed = sorted(late & self._repeated), True
        if not self._names or self._is_told:
            return
        self._is_told = True
        logger.error(
            "workers take what was sent to %s and claim nothing. Changes there wait. Look for claim_failed in the log "
            "of the workers, and run there: %s",
            self._shown,
            CommandLine.of(self._app).changes("check"),
            extra={"event": "runs_unclaimed", "queues": list(self._names)},
        )

    @property
    def _shown(self) -> str:
        more = f" and {len(self._names) - _NAMED} more" if len(self._names) > _NAMED else ""
        return ", ".join(self._names[:_NAMED]) + more


def _is_working(subscriptions: Collection[Subscription]) -> bool:
    return any(partition.image.live for led in subscriptions for partition in led.partitions.values())
