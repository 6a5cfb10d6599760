"""Storing the progress of a term's subscriptions: within a second while anything moves, less often when idle."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import bson
import pymongo
from pymongo.errors import PyMongoError

from mongo_celery.bridge.listener.pacing import LogThrottle
from mongo_celery.bridge.listener.renewal import Renewal
from mongo_celery.bridge.listener.subscription import Subscription
from mongo_celery.bridge.state.subscriptions import Advance
from mongo_celery.bridge.window import Mark
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.table import call_timeout
from mongo_celery.mongo.verdicts import brief

if TYPE_CHECKING:
    from mongo_celery.bridge.state.store import Store

logger = logging.getLogger("mongo_celery.listener")

_PAUSE_SECONDS = 1.0
_IDLE_PAUSE_SECONDS = 5.0


class Watermarks:
    """
    Stores the watermarks of one term, and its report in the lease.

    Args:
        store: the collection of the watermarks. The term guards each write.
        renewal: the term.
        fingerprint: the fingerprint of the stream of the tokens.
        report: returns the listener's report for `status`.

    Attributes:
        due_at: monotonic time of the next flush.
    """

    def __init__(
        self,
        store: Store,
        renewal: Renewal,
        fingerprint: str,
        report: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._store = store
        self._renewal = renewal
        self._fingerprint = fingerprint
        self._report = report
        self._reported: Mapping[str, Any] = {}
        self.due_at = 0.0
        self._flushed_at = 0.0
        self._throttle = LogThrottle()

    def flush(self, subscriptions: Collection[Subscription], now: float, moved_at: float) -> None:
        """Store moved watermarks, less often when idle. `moved_at` is when a change was last dispatched or done."""
        self.due_at = now + _PAUSE_SECONDS
        is_idle = now - moved_at > _IDLE_PAUSE_SECONDS and self._make_report() == self._reported
        if not is_idle or now - self._flushed_at >= _IDLE_PAUSE_SECONDS:
            self.store(subscriptions, now)

    def _make_report(self) -> Mapping[str, Any]:
        """Return the report for the lease. If that fails, return an empty one: a report must not end a term."""
        try:
            report = self._report()
            bson.encode(report)
        except Exception as error:  # noqa: BLE001 - of whatever it is made of
            if self._throttle.may_log():
                logger.error(
                    "a bug: the listener could not make its report, so `status` lacks it. Report this error: %s: %s",
                    type(error).__name__,
                    short(error),
                    extra={"event": "report_failed"},
                )
            return {}
        return report

    def store(self, subscriptions: Collection[Subscription], now: float) -> None:
        """Store watermarks that have moved. A failure is harmless, because the next call repeats it."""
        self._flushed_at = now
        try:
            self._advance(subscriptions)
            report = self._make_report()
            self._store.leases.record_report(self._renewal.term, report)
            self._reported = report
        except PyMongoError as error:
            logger.warning(
                "the listener could not store its positions, and tries again: %s",
                brief(error),
                extra={"event": "watermark_failed"},
            )

    def store_last(self, subscriptions: Collection[Subscription], lease_ttl: float) -> None:
        """Store the watermarks at the end of the term, within one call's time for all."""
        with pymongo.timeout(call_timeout(lease_ttl)):
            self.store(subscriptions, time.monotonic())

    def _advance(self, subscriptions: Collection[Subscription]) -> None:
        """Store the watermarks of several subscriptions by one write."""
        moved = [(each, mark) for each in subscriptions if (mark := self._find_moved(each)) is not None]
        self._store.subscriptions.advance_all(
            [Advance(each.name, each.plan.version, mark.token, mark.cluster_time) for each, mark in moved],
            self._fingerprint,
        )
        for each, mark in moved:
            each.stored = mark

    def _find_moved(self, subscription: Subscription) -> Mark | None:
        mark = subscription.window.watermark
        if subscription.lost or mark is None or mark is subscription.stored or _is_given_up(subscription, mark):
            return None
        return mark


def _is_given_up(subscription: Subscription, mark: Mark) -> bool:
    """Return True if a place is in a skipped oplog gap, so it must not overwrite the new start."""
    start = subscription.plan.start
    return subscription.has_gap and (mark.cluster_time is None or mark.cluster_time <= start)
