"""
Publishing what is due: what waits when the broker is away, and what waits alone when it rejects one message.

A rejected run holds its own partition: it is tried again by itself, after pauses of its own that grow to
`LONGEST_REFUSAL_PAUSE`, so that it goes out soon after the broker's limit was lifted. All others flow.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from mongo_celery.bridge.error_text import storable
from mongo_celery.bridge.listener.dispatcher import Dispatch, Dispatcher
from mongo_celery.bridge.listener.tracker import Rejection, Tracker
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.repeating import Pauses

logger = logging.getLogger("mongo_celery.listener")

LONGEST_REFUSAL_PAUSE = 15.0
_REFUSAL_PAUSES = Pauses(first=1.0, longest=LONGEST_REFUSAL_PAUSE)
_BROKER_PAUSES = Pauses(first=0.5, longest=10.0)
_ALONE_A_TURN = 8
_REPEATS_A_RECORD = 20
_REPORTED_MAX = 10
_REASON_CHARS = 300


class Publishing:
    """
    The publishing of one term.

    Attributes:
        ready_at: monotonic time before which nothing is published, because the broker was away.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.ready_at = 0.0
        self._dispatcher = dispatcher
        self._failures = 0

    @property
    def is_down(self) -> bool:
        """Whether the broker takes nothing."""
        return self._failures > 0

    def publish(self, due: Sequence[tuple[Tracker, Dispatch]]) -> bool:
        """Publish the next runs of some partitions; whether any of them is out now."""
        alone = [dispatch for tracker, dispatch in due if tracker.rejection is not None][:_ALONE_A_TURN]
        trackers = {dispatch.run.partition_id: tracker for tracker, dispatch in due}
        done = self._dispatcher.publish([dispatch for tracker, dispatch in due if tracker.rejection is None], alone)
        now = time.monotonic()
        for dispatch in done.sent:
            self._sent(trackers[dispatch.run.partition_id], dispatch, now)
        for dispatch, error in done.rejected:
            self._rejected(trackers[dispatch.run.partition_id], dispatch, error, now)
        if done.failure is None:
            self._failures = 0
        else:
            self._failed(done.failure)
        return bool(done.sent)

    def close(self) -> None:
        """Drop the connection."""
        self._dispatcher.close()

    def _sent(self, tracker: Tracker, dispatch: Dispatch, now: float) -> None:
        if tracker.rejection is not None:
            logger.info(
                "the broker has taken the message of %s in partition %s, which it had rejected",
                dispatch.label,
                tracker.partition_id,
                extra={"event": "message_taken"},
            )
        tracker.sent(now)

    def _rejected(self, tracker: Tracker, dispatch: Dispatch, error: Exception, now: float) -> None:
        before = tracker.rejection
        count = before.count if before else 0
        pause = _REFUSAL_PAUSES.nth(count)
        since = before.since if before else datetime.now(UTC)
        tracker.rejected(Rejection(dispatch.label, dispatch.size, _reason(error), since, count + 1, now + pause))
        if count % _REPEATS_A_RECORD == 0:
            logger.error(
                "the broker rejects the message of %s in partition %s (%d bytes of changes): %s. The partition waits "
                "and others go on; the message is tried again at least every %.0f s. Raise the broker's limit (Redis: "
                "proto-max-bulk-len, maxmemory; RabbitMQ: max_message_size), or make the changes smaller: "
                "full_document=None, or a pipeline without the large fields",
                dispatch.label,
                tracker.partition_id,
                dispatch.size,
                _reason(error),
                LONGEST_REFUSAL_PAUSE,
                extra={"event": "message_rejected", "partition": tracker.partition_id, "bytes": dispatch.size},
            )

    def _failed(self, error: Exception) -> None:
        pause = _BROKER_PAUSES.nth(self._failures)
        self._failures += 1
        self.ready_at = time.monotonic() + pause
        logger.error(
            "publishing failed, next try in %.1f s: %s",
            pause,
            _reason(error),
            extra={"event": "publish_failed"},
        )


def rejections(trackers: Iterable[Tracker]) -> dict[str, Any]:
    """What the listener's report says of rejected messages: their number, and some of them."""
    rejected = [(tracker, tracker.rejection) for tracker in trackers if tracker.rejection is not None]
    return {
        "rejectedCount": len(rejected),
        "rejected": [
            {
                "partition": tracker.partition_id,
                "key": storable(rejection.label),
                "bytes": rejection.size,
                "error": rejection.error,
                "since": rejection.since,
            }
            for tracker, rejection in rejected[:_REPORTED_MAX]
            if rejection is not None
        ],
    }


def _reason(error: BaseException) -> str:
    """What the broker's client has said, and not what wraps it, in bounds."""
    while error.__cause__ is not None:
        error = error.__cause__
    return storable(f"{type(error).__name__}: {short(error)}"[:_REASON_CHARS])
