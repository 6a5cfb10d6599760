"""
The leading thread: it takes in read changes, polls partitions, dispatches runs, and advances watermarks.

Each turn of the loop calls only the parts that are due, then waits for the next item or time. Each part has an
attribute for its due time, which is cheap to read. Nothing in a turn waits for a worker. The order of stepping down:
stop reading and dispatching, store the watermarks, end the renewal thread, release the lease. Running handlers are not
affected. The next term adopts them.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pymongo.errors import PyMongoError

from mongo_celery.bridge.listener.blocked import BlockedHandlers
from mongo_celery.bridge.listener.history import LostHistory
from mongo_celery.bridge.listener.horizon import Horizon
from mongo_celery.bridge.listener.housekeeping import Housekeeping
from mongo_celery.bridge.listener.poller import PartitionPoller
from mongo_celery.bridge.listener.publishing import RunPublisher, report_rejections
from mongo_celery.bridge.listener.repartitioning import Repartitioning
from mongo_celery.bridge.listener.replaying import Replaying
from mongo_celery.bridge.listener.snapshotting import Snapshotting
from mongo_celery.bridge.listener.storing import Storing
from mongo_celery.bridge.listener.stream_intake import StreamIntake
from mongo_celery.bridge.listener.unclaimed import BrokerWatch, UnclaimedRuns
from mongo_celery.bridge.listener.watermarks import Watermarks
from mongo_celery.errors import HistoryLostError, LeaseLostError

if TYPE_CHECKING:
    from mongo_celery.bridge.listener.activity import Activity
    from mongo_celery.bridge.listener.renewal import Renewal
    from mongo_celery.bridge.listener.subscription import Subscription
    from mongo_celery.bridge.listener.takeover import Beginning
    from mongo_celery.bridge.stream.source import Scope
    from mongo_celery.bridge.wiring import Wiring

_NAMED = 10


class Leader:
    """
    The listener's work in one term, after the take-over.

    Args:
        wiring: configuration, clients and handlers.
        renewal: the lease, which is already being renewed.
        beginning: the result of the take-over.
        scope: the stream.
        stopping: set when the process must end.
        on_history_lost: `halt`, `oldest` or `now`.
        activity: counts the work.
        refused: the server's message for a refused `match`, by handler. These handlers get no changes and keep
            their positions. `beginning` and `scope` do not include them.

    Attributes:
        subscriptions: the subscriptions that this listener leads, by name.
        intake: the intake of the stream.
        poller: the poller of the partitions.
        snapshots: the snapshots of this term.
        housekeeping: jobs in another thread.
    """

    def __init__(
        self,
        wiring: Wiring,
        renewal: Renewal,
        beginning: Beginning,
        scope: Scope,
        stopping: threading.Event,
        on_history_lost: str,
        activity: Activity,
        refused: Mapping[str, str] | None = None,
    ) -> None:
        self._wiring = wiring
        self._options = options = wiring.options
        self._renewal = renewal
        self._stopping = stopping
        self._activity = activity
        self._refused = refused or {}
        self._beginning = beginning
        self.subscriptions: dict[str, Subscription] = dict(beginning.subscriptions)
        self._is_reading, self._has_snapshots = True, False
        version = beginning.takeover.version
        self.housekeeping = Housekeeping()
        self._horizon = Horizon(wiring)
        self.housekeeping.add(self._horizon.read_oplog)
        self._watermarks = Watermarks(wiring.store, renewal, scope.fingerprint, self.report)
        self._history = LostHistory(wiring, renewal, decision=on_history_lost, fingerprint=scope.fingerprint)
        self._blocked = BlockedHandlers()
        self._storing = Storing(wiring, self.subscriptions, version, self._horizon.share, self.housekeeping)
        self.snapshots = Snapshotting(wiring, self.subscriptions, version, self.wake)
        self.intake = StreamIntake(
            wiring, scope, self.subscriptions, self._storing, self.snapshots, self._note_progress
        )
        self.poller = PartitionPoller(wiring, self._storing.session, self.subscriptions, version, activity)
        self._repartitioning = Repartitioning(wiring, self._watermarks, self._storing, self.snapshots)
        self._replaying = Replaying(wiring)
        self._publisher = RunPublisher(wiring, renewal, activity, self.poller.fairness)
        watch = BrokerWatch(wiring.app, self.housekeeping)
        self._unclaimed = UnclaimedRuns(wiring.app, options, self.housekeeping, watch)

    def lead(self) -> None:
        """
        Lead until asked to stop, or until the lease is no longer trusted.

        Raises:
            LeaseLostError: another listener leads.
            MongoCeleryError: an error that waiting cannot fix.
        """
        with self.led():
            while not self._stopping.is_set():
                if not self._renewal.is_trusted():
                    raise LeaseLostError
                self.turn()
                self._wait()

    @contextlib.contextmanager
    def led(self) -> Iterator[None]:
        """Read the stream while the block takes turns. At its end step down, without releasing the lease."""
        try:
            self.housekeeping.start()
            self._begin()
            try:
                yield
            finally:
                self.intake.stop()
                self._watermarks.store_last(self.subscriptions.values(), self._options.lease_ttl)
        finally:
            self._publisher.close()
            self.housekeeping.stop()
            self.snapshots.thread.close()
            self._storing.close()

    def wake(self) -> None:
        """End the current wait. Any thread may call this."""
        self.intake.wake()

    def report(self) -> dict[str, Any]:
        """Return this term's facts for `status`, in addition to stored positions."""
        subscriptions = list(self.subscriptions.values())
        blocked = sum(len(subscription.blocked) for subscription in subscriptions)
        lost = (subscription.lost for subscription in subscriptions)
        reading = self.intake.report()
        rejected = report_rejections(subscriptions)
        stored = self._storing.report()
        has_stored = any(each.backlogs for each in subscriptions)
        waits = rejected["rejectedCount"] or stored["notStoredCount"] or reading["unreadSeconds"]
        stopped = self._repartitioning.stopped
        stuck = stopped or self._refused or blocked or waits
        now = time.monotonic()
        return {
            "partitions": self._options.partitions,
            "inFlight": sum(len(subscription.in_flight) for subscription in subscriptions),
            "rates": self._measure_rates(now),
            "buffered": sum(subscription.window.count for subscription in subscriptions),
            "caughtUp": self.intake.at_end and not (stuck or has_stored or any(lost)),
            "brokerDown": self._publisher.is_down,
            "untaken": self._unclaimed.report(),
            "sentAgain": [each.name for each in subscriptions if self._activity.of(each.name).is_sending_again(now)],
            "limited": {each.name: count for each in subscriptions if (count := each.waiting_for_limit)},
            "locked": self.poller.locked.names[:_NAMED],
            **rejected,
            **reading,
            "repartitioning": self._repartitioning.report(),
            **stored,
            "snapshots": self.snapshots.report(),
            "unrequestedSnapshots": self.snapshots.report_unrequested(),
            "refusedMatches": [{"subscription": name, "error": said} for name, said in self._refused.items()],
            "stopped": [{"subscription": name, "reason": reason} for name, reason in stopped.items()],
            "fedBack": [
                {"subscription": each.name, **found}
                for each in subscriptions
                if (found := each.feedback.report()) is not None
            ],
            "delayed": [
                {"subscription": each.name, **found}
                for each in subscriptions
                if (found := each.report_delayed()) is not None
            ],
            "held": [place for each in subscriptions if each.has_gap for place in each.list_held()],
        }

    def _measure_rates(self, now: float) -> dict[str, float]:
        """Return the changes committed per second, by handler."""
        rates = {name: self._activity.of(name).sample_rate(now) for name in list(self.subscriptions)}
        return {name: rate for name, rate in rates.items() if rate is not None}

    def _begin(self) -> None:
        self.snapshots.thread.start(self._beginning.owed_snapshots)
        for subscription in self._repartitioning.begin(self.subscriptions, self._beginning.takeover):
            self._replace(subscription)
        position = self._history.begin(self.subscriptions, self._beginning.starts)
        self._renewal.alive()
        self.intake.open_reader(position)

    # -- one turn ----------------------------------------------------------------------------------

    def turn(self) -> None:
        """
        Do the due work without waiting. The caller trusts the lease.

        Raises:
            LeaseLostError: another listener leads.
            MongoCeleryError: an error that waiting cannot fix.
        """
        now = time.monotonic()
        self._activity.note_turn()
        self._is_reading = self.intake.is_alive
        self._ingest_items(now)
        self._note_progress()
        if now >= self.poller.due_at:
            self._poll(now)
            self._note_progress()
        if now >= self._history.due_at:
            self._follow_history(now)
        if now >= self._repartitioning.due_at:
            self._repartition(now)
            self._note_progress()
        if self._storing.is_due(now):
            self._storing.turn(now, at_end=self.intake.at_end)
        had_snapshots, self._has_snapshots = self._has_snapshots, self.snapshots.has_work
        if had_snapshots or self._has_snapshots:
            self._snapshot()
        if now >= self._replaying.due_at:
            self._replaying.turn(self.subscriptions, now)
            self._note_progress()
        self._dispatch()
        if now >= self._blocked.due_at:
            self._blocked.report(self._wiring, self.subscriptions.values(), now)
        if now >= self._watermarks.due_at:
            self._note_progress()
            if not self._history.is_unread:
                self._horizon.judge(self.subscriptions.values())
            self._watermarks.flush(self.subscriptions.values(), now, self.poller.times.moved_at)

    def _note_progress(self) -> None:
        """Allow renewals of the lease, unless partitions or the stream cannot be read."""
        if self._is_reading and not self._history.is_unread and not self.poller.is_blind:
            self._renewal.alive()

    def _ingest_items(self, now: float) -> None:
        error = self.intake.ingest_items(now)
        if error is None:
            return
        if not isinstance(error, HistoryLostError):
            raise error
        self.intake.open_reader(None)
        self._history.note_refusal(error)

    def _poll(self, now: float) -> None:
        """Read partitions, and find messages that are lost or that no worker takes."""
        if self.poller.poll(now, self.intake.reopenings):
            led, began_at, read_at = self.subscriptions.values(), self.poller.began_at, self.poller.read_at
            if self._unclaimed.check(led, began_at, read_at, is_broker_down=self._publisher.is_down):
                self._publisher.retry_now()
            if any(each.has_ended_replay for each in led):
                self._replaying.due_at = now
        self.poller.plan()

    def _follow_history(self, now: float) -> None:
        """Continue reading after an oplog gap. First finish a partly appended chunk."""
        if not self._history.is_unread and self.snapshots.reads_again():
            return
        self._history.tick(self.subscriptions, self._watermarks, now, self.intake.open_reader)

    def _repartition(self, now: float) -> None:
        """Advance new partitionings, and read changes again that a handler has skipped meanwhile."""
        if self.poller.is_blind:
            self._repartitioning.postpone(now)
            return
        for subscription in self._repartitioning.turn(now):
            self._replace(subscription)
        if self._history.is_unread or self.snapshots.reads_again():  # it would repeat appended documents
            return
        if self._repartitioning.wants_reading(now):
            try:
                position = self._history.find_position(self.subscriptions)
            except PyMongoError as error:
                self._repartitioning.note_failure(error)
                return
            self.intake.open_reader(position)
            self._repartitioning.resume_reading(now)

    def _replace(self, subscription: Subscription) -> None:
        """Replace a handler by its form under the new partitioning."""
        self._activity.of(subscription.name).add_counts(self.subscriptions[subscription.name].counted)
        self.subscriptions[subscription.name] = subscription

    def _snapshot(self) -> None:
        """Advance snapshots, between the changes."""
        may_begin = self.intake.has_stream and not self.intake.full and not self._storing.waits
        self.snapshots.turn(room=self._options.buffer_bytes - self._storing.size, may_begin=may_begin)
        self.intake.hurry()

    def _dispatch(self) -> None:
        for delay in [each.delay for each in self.subscriptions.values() if each.delay is not None]:
            place = self.intake.reading_time
            delay.observe(self._renewal.clock_ahead, math.inf if place is None else place.time)
        if self._publisher.dispatch(self.subscriptions):
            self.poller.note_dispatch()

    def _wait(self) -> None:
        until = min(
            self.poller.due_at, self._publisher.due_at, self._repartitioning.due_at, self._storing.next_turn_time()
        )
        self.intake.wait(max(until - time.monotonic(), 0.0))
