"""
Find lost messages: they were sent, nobody has claimed their run, and the broker no longer has them.

One rule decides about a run that is not claimed in time:

| the broker | the run |
|---|---|
| has nothing in the queue, and no worker holds a message of the task | is sent again |
| answers again after a failure, or a queue has more consumers | has its grace period anew |
| has messages in the queue, and workers took none that was sent later | has its grace period anew: it waits its turn |
| anything else | is sent again after its grace period, which doubles |

The first row needs partitions that were read after the answer: a message that was taken before it has claimed its run
by then. A message that is sent again without need meets a claim, and the worker drops it.

Workers without the code of a handler drop all its messages. So a run that is lost again waits twice as long, and at
most `dispatch_grace`.

The broker is asked once a second, only while a run is overdue, by the housekeeping thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from celery import Celery
from kombu import Connection

from mongo_celery.bridge.listener.housekeeping import Housekeeping
from mongo_celery.bridge.listener.subscription import Subscription
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.broker.connection import bounded_connection, demand_answer
from mongo_celery.broker.occupancy import Occupancy, read_occupancy
from mongo_celery.mongo.redaction import short

logger = logging.getLogger("mongo_celery.listener")

_ASK_SECONDS = 1.0
_ANSWER_SECONDS = 3
_IDLE_SECONDS = 30.0
_OVERDUE_SECONDS = 2.0
_CHECK_SECONDS = 0.2
_DOUBLINGS = 16
_LONGEST_WAIT = 900.0  # in a queue that never empties, as of foreign messages


@dataclass(frozen=True, slots=True)
class BrokerAnswer:
    """The broker's answer about some queues, with the monotonic times of the question and of the answer."""

    asked_at: float
    answered_at: float
    queues: Mapping[str, Occupancy] = field(default_factory=dict)


class BrokerWatch:
    """
    Ask the broker about queues once a second, while there is something to ask.

    Attributes:
        answer: the last one. None if the last question failed.
        returned_at: monotonic time of the last answer that followed a failure, or that showed a consumer more.
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
        """Have the broker asked about these queues from now on, or about none. Returns immediately."""
        was_idle, self._queues = not self._queues, frozenset(queues)
        if queues and was_idle:
            self._job.wake()

    def ask_broker(self) -> float:
        """Ask about the queues. Return the seconds until the next question."""
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
            logger.debug("the broker does not answer about its queues: %s", short(error))
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


class LostMessageDetector:
    """
    Have lost messages of one term sent again. Used by the leading thread.

    Args:
        options: of the bridge.
        watch: of its broker.
    """

    def __init__(self, options: BridgeOptions, watch: BrokerWatch) -> None:
        self._options = options
        self._watch = watch
        self._overdue_after = min(_OVERDUE_SECONDS, options.grace / 2)
        self._checked_at = -math.inf
        self._returned_at = -math.inf

    def check(
        self, subscriptions: Collection[Subscription], read_at: float, now: float, *, is_broker_down: bool = False
    ) -> bool:
        """
        Apply the rule to all unclaimed runs, after their partitions were read.

        Args:
            subscriptions: all that the term leads.
            read_at: monotonic time at which reading the partitions began.
            now: monotonic time.
            is_broker_down: True if publishing fails, so that the return of the broker matters in itself.

        Returns:
            True if the broker has just come back, or a consumer has.
        """
        if now - self._checked_at < _CHECK_SECONDS:
            return False
        self._checked_at = now
        unclaimed = [
            (subscription, index)
            for subscription in subscriptions
            for index, partition in subscription.partitions.items()
            if partition.in_flight is not None and partition.is_unclaimed
        ]
        overdue = [each for each in unclaimed if now >= self._due_time(*each)]
        queues = {subscription.queue_name(index) for subscription, index in overdue}
        self._watch.watch(queues or ({self._options.queue_name(0)} if is_broker_down else ()))
        has_returned = self._watch.returned_at > self._returned_at
        if has_returned:
            self._returned_at = self._watch.returned_at
            for subscription, index in unclaimed:
                subscription.partitions[index].reset_grace(now)
        self._judge(subscriptions, overdue, read_at, now)
        return has_returned

    def _judge(
        self,
        subscriptions: Collection[Subscription],
        overdue: list[tuple[Subscription, int]],
        read_at: float,
        now: float,
    ) -> None:
        answer, passed = self._watch.answer, dict[str, float]()
        if answer is None or not overdue:
            return
        for subscription in subscriptions:
            for index, partition in subscription.partitions.items():
                queue = subscription.queue_name(index)
                passed[queue] = max(passed.get(queue, -math.inf), partition.taken_sent_at)
        for subscription, index in overdue:
            queue, partition = subscription.queue_name(index), subscription.partitions[index]
            occupancy, run = answer.queues.get(queue), partition.in_flight
            if occupancy is None or run is None or answer.asked_at < self._due_time(subscription, index):
                continue
            if occupancy.waiting and passed[queue] <= run.sent_at and now - run.sent_at < _LONGEST_WAIT:
                partition.reset_grace(answer.answered_at)
            elif answer.answered_at <= read_at and occupancy.lacks(subscription.plan.handler.task_name):
                subscription.repeat(partition, now)

    def _due_time(self, subscription: Subscription, index: int) -> float:
        """Return the monotonic time at which a run should have been claimed."""
        partition = subscription.partitions[index]
        assert partition.in_flight is not None, "an unclaimed run was sent"
        patience: float = self._overdue_after * 2 ** min(partition.repeats, _DOUBLINGS)
        return partition.in_flight.sent_at + min(patience, self._options.grace)
