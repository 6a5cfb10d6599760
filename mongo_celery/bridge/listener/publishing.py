"""
Publish the due runs. All wait while the broker is away. One waits alone if the broker rejects its message.

A rejected run holds its own partition: it is tried again automatically, after pauses of its own that grow to
`LONGEST_REJECTION_PAUSE`, so that it goes out soon after the broker's limit was lifted. All others flow. A partition
that is rejected for `spill_after` is stored, so that its messages have no change in them any more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.listener.activity import Activity
from mongo_celery.bridge.listener.dispatcher import Dispatch, Dispatcher
from mongo_celery.bridge.listener.fairness import Fairness
from mongo_celery.bridge.listener.pacing import RetryGate
from mongo_celery.bridge.listener.partition import Partition, Rejection
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.verdicts import storable

if TYPE_CHECKING:
    from mongo_celery.bridge.listener.renewal import Renewal
    from mongo_celery.bridge.listener.subscription import Subscription
    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.listener")

LONGEST_REJECTION_PAUSE = 15.0
_REJECTION_PAUSES = Pauses(first=1.0, longest=LONGEST_REJECTION_PAUSE)
_BROKER_PAUSES = Pauses(first=0.5, longest=10.0)
_ALONE_A_TURN = 8
_REPEATS_A_RECORD = 20
_REPORTED_MAX = 10
_REASON_CHARS = 300


class Publishing:
    """
    The publishing of one term.

    Args:
        wiring: of the bridge.
        renewal: the term, by which messages are signed.
        activity: counts what is sent.

    Attributes:
        fairness: chooses between the handlers of a group.
        due_at: monotonic time of the next run that waits for a time alone.
    """

    def __init__(self, wiring: Wiring, renewal: Renewal, activity: Activity) -> None:
        self.fairness = Fairness({})
        self.due_at = 0.0
        self._activity = activity
        self._renewal = renewal
        self._dispatcher = Dispatcher(wiring.app, wiring.options, lambda: renewal.sealing, wiring.queue_names)
        self._broker = RetryGate(_BROKER_PAUSES)

    @property
    def is_down(self) -> bool:
        """Return True if the broker takes nothing."""
        return self._broker.failures > 0

    def retry_now(self) -> None:
        """Publish with the next turn, since the broker answers again."""
        self._broker.opens_at = 0.0

    def begin(self, subscriptions: Mapping[str, Subscription]) -> None:
        """Begin a term with these subscriptions."""
        groups = {name: each.plan.handler.group for name, each in subscriptions.items()}
        self.fairness = Fairness(groups, {name for name, each in subscriptions.items() if each.plan.token_seconds})

    def dispatch(self, subscriptions: Mapping[str, Subscription]) -> bool:
        """Publish the runs that are due, if the lease is trusted. True if any of them is in flight now."""
        now, is_sent = time.monotonic(), False
        if now >= self._broker.opens_at:
            due = self.fairness.due(subscriptions, now)
            is_sent = bool(due) and self._renewal.is_trusted() and self.publish(due)
        self.due_at = max(self.fairness.next_due(subscriptions), self._broker.opens_at)
        return is_sent

    def publish(self, due: Sequence[tuple[Partition, Dispatch]]) -> bool:
        """Publish the next runs of some partitions. True if any of them is in flight now."""
        if not due:  # the broker is not even asked: what is known of it stays
            return False
        together: list[Dispatch] = []
        alone: list[Dispatch] = []
        partitions: dict[int, Partition] = {}
        for partition, dispatch in due:
            partitions[id(dispatch)] = partition
            (together if partition.rejection is None else alone).append(dispatch)
        done = self._dispatcher.publish(together, alone[:_ALONE_A_TURN])
        now = time.monotonic()
        for dispatch in done.sent:
            self._note_sent(partitions[id(dispatch)], dispatch, now)
        for dispatch, error in done.rejected:
            self._note_rejection(partitions[id(dispatch)], dispatch, error, now)
        if done.failure is not None:
            self._note_failure(done.failure)
        elif self._broker.failures:
            self._broker.note_success()
        return bool(done.sent)

    def close(self) -> None:
        """Drop the connection."""
        self._dispatcher.close()

    def _note_sent(self, partition: Partition, dispatch: Dispatch, now: float) -> None:
        if partition.rejection is not None:
            logger.info(
                "the message of %s in partition %s was sent after earlier rejections",
                dispatch.label,
                partition.partition_id,
                extra={"event": "message_taken"},
            )
        self._activity.of(dispatch.run.subscription).note_sent(dispatch, again=partition.is_repeated)
        run = dispatch.run
        partition.note_sent(now, 0 if run.dead_letter is not None else run.last - run.first + 1)

    def _note_rejection(self, partition: Partition, dispatch: Dispatch, error: Exception, now: float) -> None:
        rejection = _rejection(partition, dispatch, error, now)
        partition.note_rejected(rejection)
        if rejection.count % _REPEATS_A_RECORD == 1:
            logger.error(
                "the broker rejects the message of %s in partition %s (%d bytes of changes): %s. The partition waits "
                "and others continue; the message is tried again at least every %.0f s. Raise the broker's limit "
                "(Redis: proto-max-bulk-len, maxmemory; RabbitMQ: max_message_size), or lower max_message_bytes: a run "
                "with more travels by reference",
                dispatch.label,
                partition.partition_id,
                dispatch.size,
                rejection.error,
                LONGEST_REJECTION_PAUSE,
                extra={"event": "message_rejected", "partition": partition.partition_id, "bytes": dispatch.size},
            )

    def _note_failure(self, error: Exception) -> None:
        self._broker.note_failure()
        logger.error(
            "publishing failed, next try in %.1f s: %s",
            self._broker.opens_at - time.monotonic(),
            _reason(error),
            extra={"event": "publish_failed"},
        )


def rejections(partitions: Iterable[Partition]) -> dict[str, Any]:
    """Return what the listener's report says of runs that the broker rejects: their number, and some of them."""
    rejected = [(each.partition_id, each.rejection) for each in partitions if each.rejection is not None]
    return {
        "rejectedCount": len(rejected),
        "rejected": [_describe_rejection(*pair) for pair in rejected[:_REPORTED_MAX]],
    }


def _describe_rejection(partition_id: str, rejection: Rejection) -> dict[str, Any]:
    return {
        "partition": partition_id,
        "key": storable(rejection.label),
        "bytes": rejection.size,
        "error": rejection.error,
        "since": rejection.since,
    }


def _rejection(partition: Partition, dispatch: Dispatch, error: Exception, now: float) -> Rejection:
    before = partition.rejection
    count = before.count if before else 0
    since = before.since if before else datetime.now(UTC)
    return Rejection(
        dispatch.label, dispatch.size, _reason(error), since, count + 1, now + _REJECTION_PAUSES.nth(count)
    )


def _reason(error: BaseException) -> str:
    """Return the error of the broker's client, without the errors that wrap it, bounded."""
    while error.__cause__ is not None:
        error = error.__cause__
    return storable(f"{type(error).__name__}: {short(error)}"[:_REASON_CHARS])
