"""
The leading thread: it ingests what was read, polls partitions, dispatches runs, and moves watermarks.

Each turn of the loop asks only those parts that are due, and then waits for the next item or time. A part says when it
is due by an attribute, which costs nothing to read. Nothing in a turn waits for a worker. The order of stepping down:
stop to read and to dispatch, store the watermarks, end the renewal thread, release. Handlers that run are left alone.
The next term adopts them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pymongo.errors import PyMongoError

from mongo_celery.bridge.listener.history import LostHistory
from mongo_celery.bridge.listener.horizon import Horizon
from mongo_celery.bridge.listener.housekeeping import Housekeeping
from mongo_celery.bridge.listener.lost_messages import BrokerWatch, LostMessageDetector
from mongo_celery.bridge.listener.poller import PartitionPoller
from mongo_celery.bridge.listener.publishing import Publishing, rejections
from mongo_celery.bridge.listener.repartitioning import Repartitioning
from mongo_celery.bridge.listener.replaying import Replaying
from mongo_celery.bridge.listener.snapshotting import Snapshotting
from mongo_celery.bridge.listener.storing import Storing
from mongo_celery.bridge.listener.stream_intake import StreamIntake
from mongo_celery.bridge.listener.takeover import begin_term
from mongo_celery.bridge.listener.untaken import UntakenQueues
from mongo_celery.bridge.listener.watermarks import Watermarks
from mongo_celery.errors import HistoryLostError, LeaseLostError

if TYPE_CHECKING:
    from mongo_celery.bridge.listener.activity import Activity
    from mongo_celery.bridge.listener.renewal import Renewal
    from mongo_celery.bridge.listener.subscription import Subscription
    from mongo_celery.bridge.stream.source import Scope, Selector
    from mongo_celery.bridge.wiring import Wiring

_NAMED = 10


class Leader:
    """
    The listener's work in one term.

    Args:
        wiring: configuration, clients and handlers.
        renewal: the lease, already being renewed.
        selectors: resolved sources and filters, in the order of the handlers.
        scope: the stream.
        stopping: set when the process has to end.
        on_history_lost: `halt`, `oldest` or `now`.
        activity: counts what is done.
        refused: what the server said of a `match` that it refuses, by handler. These are not led: they keep their
            positions, and `selectors` and `scope` are without them.

    Attributes:
        subscriptions: those that are led, by name.
        intake: of the stream.
        poller: of the partitions.
        snapshots: of this term.
        housekeeping: what is done beside, in another thread.
    """

    def __init__(
        self,
        wiring: Wiring,
        renewal: Renewal,
        selectors: Sequence[Selector],
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
        handlers = [handler for handler in wiring.handlers if handler.name not in self._refused]
        self._led = list(zip(handlers, selectors, strict=True))
        self.subscriptions: dict[str, Subscription] = {}
        self._is_reading, self._has_snapshots = True, False
        self.housekeeping = Housekeeping()
        self._horizon = Horizon(wiring)
        self.housekeeping.add(self._horizon.read_oplog)
        self._watermarks = Watermarks(wiring.store, renewal, scope.fingerprint, self.report)
        self._history = LostHistory(wiring, renewal, decision=on_history_lost, fingerprint=scope.fingerprint)
        self._storing = Storing(wiring, self._horizon.share)
        self.snapshots = Snapshotting(wiring, self.wake)
        self.intake = StreamIntake(
            wiring, scope, self.subscriptions, self._storing, self.snapshots, self._note_progress
        )
        self.poller = PartitionPoller(wiring, self._storing.session, self.subscriptions, activity)
        self._repartitioning = Repartitioning(wiring, self._watermarks, self._storing, self.snapshots)
        self._replaying = Replaying(wiring)
        self._publishing = Publishing(wiring, renewal, activity)
        self._lost_messages = LostMessageDetector(options, BrokerWatch(wiring.app, self.housekeeping))
        self._untaken = UntakenQueues(wiring, self.housekeeping)

    def lead(self) -> None:
        """
        Lead until told to stop, or until the lease is no longer trusted.

        Raises:
            LeaseLostError: somebody else leads.
            MongoCeleryError: something that waiting cannot fix.
        """
        with self.led():
            while not self._stopping.is_set():
                if not self._renewal.is_trusted():
                    raise LeaseLostError
                self.turn()
                self._wait()

    @contextlib.contextmanager
    def led(self) -> Iterator[None]:
        """Take over and read, from whatever thread turns inside. Step down at the end, but for renewal and release."""
        try:
            self.housekeeping.start()
            self._begin()
            try:
                yield
            finally:
                self.intake.stop()
                self._watermarks.store_last(self.subscriptions.values(), self._options.lease_ttl)
        finally:
            self._publishing.close()
            self.housekeeping.stop()
            self.snapshots.thread.close()
            self._storing.close()

    def wake(self) -> None:
        """End the current wait. Callable from any thread."""
        self.intake.wake()

    def report(self) -> dict[str, Any]:
        """Return what `status` shows of this term beside the stored positions."""
        subscriptions = list(self.subscriptions.values())
        blocked = sum(len(subscription.blocked) for subscription in subscriptions)
        lost = (subscription.lost for subscription in subscriptions)
        reading = self.intake.report()
        rejected = rejections(
            partition for subscription in subscriptions for partition in subscription.partitions.values()
        )
        stored = self._storing.report()
        has_stored = any(each.backlogs for each in subscriptions)
        waits = rejected["rejectedCount"] or stored["notStoredCount"] or reading["unreadSeconds"]
        stopped = self._repartitioning.stopped
        stuck = stopped or self._refused or blocked or waits
        return {
            "partitions": self._options.partitions,
            "outstanding": sum(len(subscription.in_flight) for subscription in subscriptions),
            "rates": self._measure_rates(),
            "buffered": sum(subscription.window.count for subscription in subscriptions),
            "bufferedBytes": sum(subscription.window.size for subscription in subscriptions),
            "standing": blocked,
            "caughtUp": self.intake.at_end and not (stuck or has_stored or any(lost)),
            "brokerDown": self._publishing.is_down,
            "untaken": self._untaken.report(),
            "locked": self.poller.locked.names[:_NAMED],
            **rejected,
            **reading,
            "moving": self._repartitioning.report(),
            **stored,
            "atRisk": [risk.report() for risk in self._horizon.risks],
            "snapshots": self.snapshots.report(),
            "refusedMatches": [{"subscription": name, "error": said} for name, said in self._refused.items()],
            "stopped": [{"subscription": name, "reason": reason} for name, reason in stopped.items()],
            "fedBack": [
                {"subscription": each.name, **found}
                for each in subscriptions
                if (found := each.feedback.report()) is not None
            ],
            "held": [place for each in subscriptions if each.has_gap for place in each.list_held()],
        }

    def _measure_rates(self) -> dict[str, float]:
        """Return the changes that are committed a second, by handler."""
        now = time.monotonic()
        rates = {name: self._activity.of(name).sample_rate(now) for name in list(self.subscriptions)}
        return {name: rate for name, rate in rates.items() if rate is not None}

    def _begin(self) -> None:
        beginning = begin_term(self._wiring, self._renewal, self._led, self._wiring.handlers)
        version, subscriptions = beginning.takeover.version, beginning.subscriptions
        self.subscriptions.update(subscriptions)
        self._publishing.begin(subscriptions)
        self.poller.begin(version, self._publishing.fairness)
        self._storing.begin(self.subscriptions, version, self.housekeeping)
        self.snapshots.begin(self.subscriptions, version, beginning.owed_snapshots)
        for subscription in self._repartitioning.begin(self.subscriptions, beginning.takeover):
            self._replace(subscription)
        position = self._history.begin(self.subscriptions, beginning.starts)
        self._renewal.alive()
        self.intake.open_reader(position)

    # -- one turn ----------------------------------------------------------------------------------

    def turn(self) -> None:
        """
        Do what is due, and wait for nothing. Whoever asks for it trusts the lease.

        Raises:
            LeaseLostError: somebody else leads.
            MongoCeleryError: something that waiting cannot fix.
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
        if now >= self._repartitioning.due():
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
        if now >= self._watermarks.due_at:
            self._note_progress()
            if not self._history.is_unread:
                self._horizon.judge(self.subscriptions.values())
            self._watermarks.flush(self.subscriptions.values(), now, self.poller.times.moved_at)

    def _note_progress(self) -> None:
        """Have the lease renewed, unless partitions or the stream cannot be read."""
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
        """Read partitions, and find messages that are lost, or that nobody takes."""
        if self.poller.poll(now, self.intake.reopenings):
            self._judge_runs(now)
        self.poller.plan()

    def _judge_runs(self, now: float) -> None:
        led, is_down = self.subscriptions.values(), self._publishing.is_down
        began_at, read_at = self.poller.began_at, self.poller.read_at
        if self._lost_messages.check(led, began_at, read_at, is_broker_down=is_down):
            self._publishing.retry_now()
        if not is_down:
            self._untaken.turn(led, read_at)
        if any(each.has_ended_replay for each in led):
            self._replaying.due_at = now

    def _follow_history(self, now: float) -> None:
        """Read on behind a history that was lost."""
        self._history.tick(self.subscriptions, self._watermarks, now, self.intake.open_reader)

    def _repartition(self, now: float) -> None:
        """Go on with new partitionings, and read again what a handler has left meanwhile."""
        if self.poller.is_blind:
            self._repartitioning.postpone(now)
            return
        for subscription in self._repartitioning.turn(now):
            self._replace(subscription)
        if self._history.is_unread or self.snapshots.reads_again():  # it would repeat what was appended
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
        """Put a handler under its new partitioning in the place of what it was."""
        self._activity.of(subscription.name).add_counts(self.subscriptions[subscription.name].counted)
        self.subscriptions[subscription.name] = subscription

    def _snapshot(self) -> None:
        """Go on with existing documents, between the changes."""
        may_begin = self.intake.has_stream and not self.intake.full and not self._storing.waits
        self.snapshots.turn(room=self._options.buffer_bytes - self._storing.size, may_begin=may_begin)
        self.intake.hurry()

    def _dispatch(self) -> None:
        if self._publishing.dispatch(self.subscriptions):
            self.poller.note_dispatch()

    def _wait(self) -> None:
        until = min(
            self.poller.due_at, self._publishing.due_at, self._repartitioning.due(), self._storing.next_turn_time()
        )
        self.intake.wait(max(until - time.monotonic(), 0.0))
