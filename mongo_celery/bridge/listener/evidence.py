"""
Evidence of what became of messages that nobody has taken yet.

A run that is out without a claim may wait in its queue, wait inside a worker behind slow ones or for a token of its
rate limit, or be lost. To send it again too soon costs a rate limit its tokens; too late, and its partition stands
still. So, only while something is overdue, the broker is asked once a second what it holds, and it is seen what other
runs do:

| what is seen | what follows |
|---|---|
| the broker answers again, or a consumer more | a sign of life for all that is out |
| the queue is not empty, and nothing that was sent later to it was taken | the message waits: a sign of life |
| something that was sent earlier, to this queue or for this handler, is taken | the turn comes nearer: a sign of life |
| the queue is empty, and no worker has such a message, twice in a row | it is lost, and sent again at once |
| anything else | the grace of the sweep, which doubles |

There are finitely many earlier runs, so none of this can put off a message for ever. What is lost again and again
(workers without this handler's code drop it) is sent again every few seconds for one partition of the handler; as
soon as one of its runs is taken, the others follow.

The broker is asked by a thread of its own: a frozen one never holds the leading thread.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import math
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from celery import Celery
from celery.utils.time import rate
from kombu import Connection

from mongo_celery.bridge.listener.subscription import Subscription
from mongo_celery.bridge.listener.tracker import Tracker
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.broker.connection import bounded_connection, demand_answer
from mongo_celery.broker.occupancy import Occupancy, occupancy_of
from mongo_celery.mongo.redaction import short

logger = logging.getLogger("mongo_celery.listener")

_ASK_SECONDS = 1.0
_ANSWER_SECONDS = 3
_IDLE_SECONDS = 30.0
_OVERDUE_SECONDS = 2.0
_WEIGH_SECONDS = 0.2
_PROBE_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Sighting:
    """What the broker said of one queue, and the monotonic times of asking and of the answer."""

    asked_at: float
    answered_at: float
    occupancy: Occupancy


class BrokerWatch:
    """
    Asks the broker about queues, once a second, by a thread that runs only while there is something to ask.

    Attributes:
        sightings: the last answer about each queue that is asked for; replaced as a whole.
        returned_at: monotonic time of the last answer that came after a failure.
    """

    def __init__(self, app: Celery) -> None:
        self.sightings: Mapping[str, Sighting] = {}
        self.returned_at = -math.inf
        self._app = app
        self._queues: frozenset[str] = frozenset()
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._connection: Connection | None = None
        self._is_failing = False

    def ask(self, queues: Collection[str]) -> None:
        """From now on ask about these; none to ask nothing. Returns at once."""
        with self._changed:
            if self._queues == queues:
                return
            self._queues = frozenset(queues)
            self._changed.notify()
            if self._queues and self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="mongo_celery-evidence", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Ask no more; a call that is under way ends within its bound, and nobody waits for it."""
        self._closed.set()
        self.ask(())

    def _run(self) -> None:
        while not self._closed.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._queues or self._closed.is_set(), _IDLE_SECONDS)
                queues = self._queues
                if not queues:  # a thread that is started from now on makes a connection of its own
                    self._thread, connection, self._connection = None, self._connection, None
                    break
            self._ask(queues)
            self._closed.wait(_ASK_SECONDS)
        else:
            connection = self._connection
        _release(connection)

    def _ask(self, queues: frozenset[str]) -> None:
        asked_at = time.monotonic()
        try:
            if self._connection is None:
                self._connection = bounded_connection(self._app, _ANSWER_SECONDS)
                demand_answer(self._connection, _ANSWER_SECONDS)
            found = occupancy_of(self._connection, queues)
        except Exception as error:  # noqa: BLE001 - every transport raises its own, and publishing says it aloud
            logger.debug("the broker does not say what it holds: %s", short(error))
            self._is_failing = True
            self.sightings = {}
            connection, self._connection = self._connection, None
            _release(connection)
            return
        answered_at = time.monotonic()
        self.sightings = {name: Sighting(asked_at, answered_at, each) for name, each in found.items()}
        if self._is_failing:
            self._is_failing = False
            self.returned_at = answered_at


def _release(connection: Connection | None) -> None:
    if connection is not None:
        with contextlib.suppress(Exception):
            connection.release()


class Lane:
    """
    Runs that are taken in about the order in which they were sent: those of one queue, or of one handler.

    Args:
        taken: of each partition in it, when its last taken run was sent and when that was seen.
    """

    def __init__(self, taken: Iterable[tuple[float, float]]) -> None:
        ordered = sorted(taken)
        self._sent = [sent for sent, _ in ordered]
        self._seen = list(accumulate((seen for _, seen in ordered), max))

    def progress_before(self, sent_at: float) -> float:
        """When something that was sent no later was last seen to be taken; minus infinity for never."""
        number = bisect.bisect_right(self._sent, sent_at)
        return self._seen[number - 1] if number else -math.inf

    def has_passed(self, sent_at: float) -> bool:
        """Whether something that was sent later was taken."""
        return bool(self._sent) and self._sent[-1] > sent_at


@dataclass(slots=True)
class Overdue:
    """One partition whose message should have been taken by now."""

    subscription: Subscription
    tracker: Tracker
    sent_at: float
    queue: str


class MessageEvidence:
    """
    What is known of the messages of one term. Used by the leading thread.

    Args:
        app: the Celery app, for the rate limits of its tasks.
        options: of the bridge.
        watch: of its broker.
    """

    def __init__(self, app: Celery, options: BridgeOptions, watch: BrokerWatch) -> None:
        self._app = app
        self._options = options
        self._watch = watch
        self._overdue_after = min(_OVERDUE_SECONDS, options.grace / 2)
        self._weighed_at = -math.inf
        self._returned_at = -math.inf
        self._consumers: dict[str, int] = {}
        self._missed: dict[str, tuple[float, Sighting]] = {}
        self._probed: dict[str, float] = {}

    def close(self) -> None:
        """Ask the broker no more."""
        self._watch.close()

    def weigh(
        self, subscriptions: Collection[Subscription], read_at: float, now: float, *, broker_down: bool = False
    ) -> bool:
        """
        Tell the partitions that wait what is known, after their images were read.

        Args:
            subscriptions: that are led.
            read_at: monotonic time at which reading the images began.
            now: monotonic time.
            broker_down: whether publishing fails, so that the broker's return is of interest by itself.

        Returns:
            Whether the broker has just come back.
        """
        if now - self._weighed_at < _WEIGH_SECONDS:
            return False
        self._weighed_at = now
        awaited = self._awaited(subscriptions)
        overdue = [each for each in awaited if now - each.sent_at >= self._overdue_after]
        queues = {each.queue for each in awaited} if overdue else set()
        if broker_down and not queues:
            queues = {self._options.queue_of(0)}
        self._watch.ask(queues)
        returned = self._watch.returned_at > self._returned_at
        if returned:
            self._returned_at = self._watch.returned_at
            for each in awaited:
                each.tracker.sign_of_life(now)
        if overdue:
            self._judge(subscriptions, overdue, read_at, now)
        else:
            self._missed.clear()
        return returned

    def _awaited(self, subscriptions: Iterable[Subscription]) -> list[Overdue]:
        return [
            Overdue(subscription, tracker, run.sent_at, subscription.queue_of(index))
            for subscription in subscriptions
            for index, tracker in subscription.trackers.items()
            if tracker.is_awaited and (run := tracker.outstanding) is not None
        ]

    def _judge(
        self, subscriptions: Collection[Subscription], overdue: list[Overdue], read_at: float, now: float
    ) -> None:
        by_queue, by_handler, running = self._surroundings(subscriptions)
        sightings, arrived = self._watch.sightings, self._arrivals()
        missed: dict[str, tuple[float, Sighting]] = {}
        for each in overdue:
            queue, handler = by_queue[each.queue], by_handler[each.subscription.name]
            progress = max(queue.progress_before(each.sent_at), handler.progress_before(each.sent_at))
            if progress > -math.inf:
                each.tracker.sign_of_life(progress + token_seconds(self._app, each.subscription.plan.handler.task_name))
            sighting = sightings.get(each.queue)
            if sighting is None or sighting.asked_at < each.sent_at:
                continue
            if sighting.occupancy.waiting and not queue.has_passed(each.sent_at):
                each.tracker.sign_of_life(sighting.answered_at)
                continue
            place = each.queue, each.subscription.plan.handler.task_name
            if each.queue in arrived and not sighting.occupancy.waiting:
                each.subscription.repeat(each.tracker.image.index, now)
            elif _is_missing(sighting.occupancy, place[1], running.get(place, 0)):
                self._miss(each, sighting, missed, handler, (read_at, now))
        self._missed = missed

    def _surroundings(
        self, subscriptions: Iterable[Subscription]
    ) -> tuple[dict[str, Lane], dict[str, Lane], dict[tuple[str, str], int]]:
        """The lanes, by queue and by handler, and how many runs of a queue and task are known to be executed."""
        taken: dict[str, list[tuple[float, float]]] = {}
        handlers, running = {}, dict[tuple[str, str], int]()
        for subscription in subscriptions:
            own = []
            for index, tracker in subscription.trackers.items():
                queue = subscription.queue_of(index)
                in_queue = taken.setdefault(queue, [])
                if tracker.taken is not None:
                    in_queue.append(tracker.taken)
                    own.append(tracker.taken)
                if tracker.outstanding is not None and not tracker.is_awaited:
                    place = queue, subscription.plan.handler.task_name
                    running[place] = running.get(place, 0) + 1
            handlers[subscription.name] = Lane(own)
        return {name: Lane(each) for name, each in taken.items()}, handlers, running

    def _arrivals(self) -> set[str]:
        """Queues that have more consumers than a moment ago."""
        found = set()
        for queue, sighting in self._watch.sightings.items():
            consumers = sighting.occupancy.consumers
            if consumers is not None:
                if consumers > self._consumers.get(queue, consumers):
                    found.add(queue)
                self._consumers[queue] = consumers
        return found

    def _miss(
        self,
        each: Overdue,
        sighting: Sighting,
        missed: dict[str, tuple[float, Sighting]],
        handler: Lane,
        times: tuple[float, float],
    ) -> None:
        """Send again what two sightings in a row did not find, and what was not claimed after the first of them."""
        read_at, now = times
        sent_at, first = self._missed.get(each.tracker.partition_id, (each.sent_at, sighting))
        if sent_at != each.sent_at:
            first = sighting
        missed[each.tracker.partition_id] = each.sent_at, first
        if sighting.asked_at <= first.answered_at or read_at <= first.answered_at:
            return
        name = each.subscription.name
        if each.tracker.repeats and not handler.has_passed(each.sent_at):
            if now - self._probed.get(name, -math.inf) < _PROBE_SECONDS:
                return
            self._probed[name] = now
        each.subscription.repeat(each.tracker.image.index, now)


def token_seconds(app: Celery, task_name: str) -> float:
    """How long a worker waits between two runs of a task with a rate limit; 0 without one."""
    limit: Any = getattr(app.tasks.get(task_name), "rate_limit", None)
    per_second = rate(limit) if limit else 0.0
    return 1 / per_second if per_second > 0 else 0.0


def _is_missing(occupancy: Occupancy, task: str, running: int) -> bool:
    """Whether the broker shows that neither it nor a worker has a message of this task that is not being run."""
    if occupancy.taken is not None:
        return occupancy.taken.get(task, 0) <= running
    return occupancy.consumers == 0
