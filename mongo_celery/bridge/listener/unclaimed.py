"""
Runs that no worker claims in time: their messages are lost, or no worker consumes their queue.

This table decides about the message of such a run:

| the broker | the run |
|---|---|
| has nothing in the queue, and no worker holds a message of the task | is sent again |
| answers again after a failure, or a queue has more consumers | gets its grace period again |
| has messages in the queue, and workers took no later one | gets its grace period again, because it waits its turn |
| anything else | is sent again after its grace period, which doubles |

The first row needs partitions that were read after the answer: by then, a message taken before it has claimed its run.
A needlessly repeated message meets a claim, and the worker drops it.

Workers without a handler's code drop all its messages. So a run that is lost again waits twice as long, at most
`dispatch_grace`.

If no run of a queue is claimed for `dispatch_grace`, the workers are queried, and one log record gives the reason.
Either no worker consumes the queue, or workers take its messages without a claim, for example without a right in
MongoDB.

The leading thread finds late runs. Only while there are any, the housekeeping thread queries the broker once a second,
and the workers every 30.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery import Celery
from kombu import Connection

from mongo_celery.bridge.listener.housekeeping import Housekeeping
from mongo_celery.bridge.listener.partition import Partition
from mongo_celery.bridge.listener.subscription import Subscription
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.broker.connection import bounded_connection, demand_answer
from mongo_celery.broker.occupancy import Occupancy, read_occupancy
from mongo_celery.broker.workers import ask_for_queues
from mongo_celery.command_line import CommandLine
from mongo_celery.findings import list_some
from mongo_celery.mongo.redaction import short

logger = logging.getLogger("mongo_celery.listener")

_ASK_SECONDS = 1.0
_ANSWER_SECONDS = 3
_IDLE_SECONDS = 30.0
_OVERDUE_SECONDS = 2.0
_CHECK_SECONDS = 0.2
_DOUBLINGS = 16
_LONGEST_WAIT = 900.0  # for a queue that never empties, for example of foreign messages
_WORKERS_SECONDS = 30.0
_WORKERS_ANSWER_SECONDS = 1.5
_NAMED = 4
_REPEATS = 2
"""If a run is sent again this often while nothing runs, workers took it without a claim."""


@dataclass(frozen=True, slots=True)
class BrokerAnswer:
    """The broker's answer about some queues, with the monotonic times of question and answer."""

    asked_at: float
    answered_at: float
    queues: Mapping[str, Occupancy] = field(default_factory=dict)


class BrokerWatch:
    """
    Queries the broker about queues once a second, while needed.

    Attributes:
        answer: the last answer. None if the last query failed.
        returned_at: monotonic time of the last answer that followed a failure, or that showed another consumer.
    """

    def __init__(self, app: Celery, housekeeping: Housekeeping) -> None:
        self.answer: BrokerAnswer | None = None
        self.returned_at = -math.inf
        self._app = app
        self._queues: frozenset[str] = frozenset()
        self._connection: Connection | None = None
        self._consumers: dict[str, int] = {}
        self._is_failing = False
        self._asked_at = -math.inf
        self._job = housekeeping.add(self.ask_broker, self._disconnect)

    def watch(self, queues: Collection[str]) -> None:
        """Watch these queues from now on, or none. Returns immediately."""
        was_idle, self._queues = not self._queues, frozenset(queues)
        if queues and was_idle:
            self._job.wake()

    def ask_broker(self) -> float:
        """Query the broker about the queues. Return the seconds until the next query."""
        if self._queues:
            self._ask(self._queues)
            return _ASK_SECONDS
        if self._connection is None:
            return math.inf
        if time.monotonic() - self._asked_at < _IDLE_SECONDS:
            return _IDLE_SECONDS
        self._disconnect()
        return math.inf

    def _ask(self, queues: frozenset[str]) -> None:
        asked_at = self._asked_at = time.monotonic()
        try:
            if self._connection is None:
                self._connection = bounded_connection(self._app, _ANSWER_SECONDS)
                demand_answer(self._connection, _ANSWER_SECONDS)
            found = read_occupancy(self._connection, queues)
        except Exception as error:  # noqa: BLE001 - every transport raises its own, and publishing logs it
            logger.debug("the broker did not answer a query about its queues: %s", short(error))
            self.answer, self._is_failing = None, True
            self._disconnect()
            return
        self.answer = BrokerAnswer(asked_at, time.monotonic(), found)
        if self._has_more_consumers(found) or self._is_failing:
            self._is_failing = False
            self.returned_at = self.answer.answered_at

    def _has_more_consumers(self, found: Mapping[str, Occupancy]) -> bool:
        before, now = (
            self._consumers,
            {name: each.consumers for name, each in found.items() if each.consumers is not None},
        )
        self._consumers = {**before, **now}
        return any(count > before.get(name, count) for name, count in now.items())

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.release()


Queues = Mapping[str, Sequence[Partition]]
"""The partitions of each queue."""


class UnclaimedRuns:
    """
    The unclaimed runs of one term. The leading thread uses it.

    Args:
        app: the Celery app.
        options: the options of the bridge.
        housekeeping: the housekeeping of the term.
        watch: the watch of the broker.
    """

    def __init__(self, app: Celery, options: BridgeOptions, housekeeping: Housekeeping, watch: BrokerWatch) -> None:
        self._app = app
        self._options = options
        self._watch = watch
        self._overdue_after = min(_OVERDUE_SECONDS, options.grace / 2)
        self._checked_at = -math.inf
        self._returned_at = -math.inf
        self._late: frozenset[str] = frozenset()
        self._repeated: frozenset[str] = frozenset()
        self._is_working = False
        self._finding: dict[str, Any] | None = None
        self._asking = housekeeping.add(self.ask_workers)

    def check(
        self, subscriptions: Collection[Subscription], read_at: float, now: float, *, is_broker_down: bool = False
    ) -> bool:
        """
        Apply the rule to all unclaimed runs, after their partitions were read.

        Args:
            subscriptions: all subscriptions of the term.
            read_at: monotonic time at which reading the partitions began.
            now: monotonic time.
            is_broker_down: True if publishing fails, so that the broker's return matters in itself.

        Returns:
            True if the broker or a consumer has just returned.
        """
        if now - self._checked_at < _CHECK_SECONDS:
            return False
        self._checked_at = now
        waiting = [
            (subscription, partition)
            for subscription in subscriptions
            for partition in subscription.partitions.values()
            if partition.is_repeated or partition.is_unclaimed
        ]
        is_late = any(now - each.unclaimed_since >= self._overdue_after for _, each in waiting)
        queues = _group_by_queue(subscriptions) if is_late else {}
        overdue = [each for each in waiting if each[1].in_flight is not None and now >= self._due_time(each[1])]
        down = {self._options.queue_name(0)} if is_broker_down else set()
        self._watch.watch({subscription.queue_name(each.index) for subscription, each in overdue} or down)
        has_returned = self._watch.returned_at > self._returned_at
        if has_returned:
            self._returned_at = self._watch.returned_at
            for _, partition in waiting:
                partition.reset_grace(now)
        for subscription, partition in overdue:
            self._judge(subscription, partition, queues, read_at, now)
        if not is_broker_down:
            self._find_late(queues, now)
        return has_returned

    def _judge(
        self, subscription: Subscription, partition: Partition, queues: Queues, read_at: float, now: float
    ) -> None:
        queue = subscription.queue_name(partition.index)
        answer, run = self._watch.answer, partition.in_flight
        occupancy = answer.queues.get(queue) if answer is not None else None
        if answer is None or occupancy is None or run is None or answer.asked_at < self._due_time(partition):
            return
        passed = max(each.taken_sent_at for each in queues[queue])
        if occupancy.waiting and passed <= run.sent_at and now - run.sent_at < _LONGEST_WAIT:
            partition.reset_grace(answer.answered_at)
        elif answer.answered_at <= read_at and occupancy.lacks(subscription.plan.handler.task_name):
            subscription.repeat(partition, now)

    def _due_time(self, partition: Partition) -> float:
        """Return the monotonic time by which a run should have been claimed."""
        assert partition.in_flight is not None, "an unclaimed run was sent"
        patience: float = self._overdue_after * 2 ** min(partition.repeats, _DOUBLINGS)
        return partition.in_flight.sent_at + min(patience, self._options.grace)

    # -- queues without a worker ---------------------------------------------------------------------

    def report(self) -> dict[str, Any] | None:
        """
        Return the queues from which no worker takes a run. None if all are taken.

        The report also contains `answered`, whether any worker answered (None: it cannot be queried), and `unclaimed`,
        whether workers take the messages without claiming the runs.
        """
        found, late = self._finding, self._late
        queues = [name for name in found["queues"] if name in late] if found is not None else []
        return {**found, "queues": queues} if found is not None and queues else None

    def _find_late(self, queues: Queues, now: float) -> None:
        """Find the queues in which nothing was claimed for longer than the grace, and have the workers queried."""
        was_late, late, repeated = bool(self._late), set[str](), set[str]()
        for queue, found in queues.items():
            waiting = [each.unclaimed_since for each in found if each.is_unclaimed or each.is_repeated]
            if waiting and now - max(min(waiting), *(each.taken_at for each in found)) >= self._options.grace:
                late.add(queue)
            if any(each.repeats >= _REPEATS for each in found):
                repeated.add(queue)
        if late:
            self._is_working = any(each.image.live for found in queues.values() for each in found)
        self._repeated, self._late = frozenset(repeated), frozenset(late)
        if late and not was_late:
            self._finding = None
            self._asking.wake()

    def ask_workers(self) -> float:
        """Query the workers for their queues, if anything is late. Return the seconds until the next query."""
        if not self._late:
            return math.inf
        try:
            consumed: Mapping[str, set[str]] | None = ask_for_queues(self._app, _WORKERS_ANSWER_SECONDS)
        except Exception as error:  # noqa: BLE001 - every transport raises its own; some have no remote control
            logger.debug("workers cannot be queried for their queues: %s", short(error))
            consumed = None
        before, self._finding = self._finding, self._judge_answer(consumed)
        if before is None and self._finding is not None:
            self._log(**self._finding)
        return _WORKERS_SECONDS

    def _judge_answer(self, consumed: Mapping[str, set[str]] | None) -> dict[str, Any] | None:
        """Return the reason why no worker takes late runs. None if workers report that they will."""
        if self._is_working and not consumed:  # a busy solo pool does not answer
            return None
        unconsumed = self._late - set().union(*(consumed or {}).values())
        answered = None if consumed is None else bool(consumed)
        late = unconsumed or (frozenset() if self._is_working else self._late & self._repeated)
        return {"queues": sorted(late), "answered": answered, "unclaimed": not unconsumed} if late else None

    def _log(self, *, queues: list[str], answered: bool | None, unclaimed: bool) -> None:
        line = CommandLine.of(self._app)
        shown = list_some(queues, _NAMED)
        if unclaimed:
            logger.error(
                "workers took messages from %s, but ran none of them. Changes there wait. These workers cannot use "
                "MongoDB, or run other code without the task. Search their logs for envelope_unverified, claim_failed "
                "and unregistered tasks, and run on their host: %s",
                shown,
                line.changes("check"),
                extra={"event": "runs_unclaimed", "queues": queues},
            )
            return
        why = "workers cannot be asked"
        if answered is not None:
            why = "the workers that answer consume other queues" if answered else "no worker answers"
        logger.warning(
            "no worker takes messages from %s, so changes there wait: %s. Start a worker: %s",
            shown,
            why,
            f'{line.celery("worker")} -Q "$({line.changes("queues")})"',
            extra={"event": "queues_unconsumed", "queues": queues},
        )


def _group_by_queue(subscriptions: Collection[Subscription]) -> Queues:
    queues: dict[str, list[Partition]] = {}
    for subscription in subscriptions:
        for index, partition in subscription.partitions.items():
            queues.setdefault(subscription.queue_name(index), []).append(partition)
    return queues
