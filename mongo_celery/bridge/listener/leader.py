"""
Leading: one thread that takes in what was read, looks at partitions, dispatches, and moves watermarks.

Each turn of the loop does what is due and then waits for the next item or time. Nothing in it waits for a
worker. The order of stepping down: stop to read and to dispatch, store the watermarks, end the renewal
thread, release. Handlers that run are left alone; the next term adopts them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pymongo
from bson import Timestamp
from pymongo.errors import PyMongoError

from mongo_celery.bridge.handlers import token_seconds
from mongo_celery.bridge.listener.activity import Activity
from mongo_celery.bridge.listener.claim_check import ClaimCheck
from mongo_celery.bridge.listener.dispatcher import Dispatcher
from mongo_celery.bridge.listener.fairness import Fairness
from mongo_celery.bridge.listener.history import LostHistory
from mongo_celery.bridge.listener.horizon import Horizon
from mongo_celery.bridge.listener.housekeeping import Housekeeping
from mongo_celery.bridge.listener.inbox import Inbox
from mongo_celery.bridge.listener.initial_snapshots import InitialSnapshots
from mongo_celery.bridge.listener.looks import BUSY_LOOK, Looks
from mongo_celery.bridge.listener.lost_messages import BrokerWatch, LostMessageDetector
from mongo_celery.bridge.listener.pacing import LogThrottle, RetryGate
from mongo_celery.bridge.listener.partition import Step
from mongo_celery.bridge.listener.publishing import Publishing, rejections
from mongo_celery.bridge.listener.renewal import Renewal
from mongo_celery.bridge.listener.repartitioning import Repartitioning
from mongo_celery.bridge.listener.replaying import Replaying
from mongo_celery.bridge.listener.rules import Rules, find_rules
from mongo_celery.bridge.listener.snapshotting import Snapshotting
from mongo_celery.bridge.listener.spilling import Spilling
from mongo_celery.bridge.listener.starts import find_starts
from mongo_celery.bridge.listener.subscription import Plan, Subscription, make_partitions
from mongo_celery.bridge.listener.takeover import LockedPartitions, Takeover, find_undeliverable, take_over
from mongo_celery.bridge.listener.untaken import UntakenQueues
from mongo_celery.bridge.listener.watermarks import Watermarks
from mongo_celery.bridge.stream.items import Failed
from mongo_celery.bridge.stream.reader import Position, StreamReader, StreamStatus
from mongo_celery.errors import HistoryLostError, LeaseLostError, MongoCeleryError
from mongo_celery.mongo.opening import renew_connections
from mongo_celery.mongo.table import call_timeout
from mongo_celery.mongo.verdicts import brief, raise_if_final

if TYPE_CHECKING:
    from mongo_celery.bridge.state.partitions import Image
    from mongo_celery.bridge.stream.source import Scope, Selector
    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.listener")

_ITEMS_A_TURN = 2000
_ITEMS_A_CHECK = 16
_READ_AHEAD = 2000
_NAMED = 10
_SILENCE_SECONDS = 5


class Leader:
    """
    The listener's work in one term.

    Args:
        wiring: configuration, clients and handlers.
        renewal: the lease, already being renewed.
        selectors: resolved sources and filters, in the order of the handlers.
        scope: the stream.
        stopping: set when the process is told to end.
        on_history_lost: `halt`, `oldest` or `now`.
        activity: is told what is done.
        refused: what the server said of a `match` that it refuses, by handler. These are not led: they keep their
            positions, and `selectors` and `scope` are without them.

    Attributes:
        is_hurried: whether the stream says soon how far it is, also where nothing comes: while somebody waits for it.
    """

    is_hurried = False

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
        self._refused = refused or {}
        self._led = [handler for handler in wiring.handlers if handler.name not in self._refused]
        self._activity = activity
        self._options = wiring.options
        self._store = wiring.store
        self._renewal = renewal
        self._selectors = selectors
        self._scope = scope
        self._stopping = stopping
        self._inbox = Inbox()
        self._reader: StreamReader | None = None
        self._stream_status: StreamStatus | None = None
        self._is_blind = False
        self._lost: HistoryLostError | None = None
        self._resuming = RetryGate()
        self._subscriptions: dict[str, Subscription] = {}
        self._stopped: Mapping[str, str] = {}
        self._locked: LockedPartitions | None = None
        self._watermarks = Watermarks(self._store, renewal, scope.fingerprint, self.report)
        self._history = LostHistory(
            self._store,
            wiring.client,
            renewal,
            self._options,
            decision=on_history_lost,
            fingerprint=scope.fingerprint,
            line=wiring.line,
        )
        self.housekeeping = Housekeeping()
        self._horizon = Horizon(wiring)
        self.housekeeping.add(self._horizon.read_oplog)
        self._spilling = Spilling(self._store, self._options, wiring.state_concern, self._horizon.share, wiring.line)
        self._looks = Looks(self._store.partitions, self._spilling.session)
        self._snapshots = Snapshotting(wiring, self.wake)
        self._repartitioning = Repartitioning(
            self._store,
            self._options,
            wiring.state_concern,
            self._watermarks,
            self._spilling,
            wiring.line,
            self._snapshots,
        )
        self._replaying = Replaying(self._store.replays, wiring.state_concern, wiring.line)
        self._at_end = self._is_held_up = False
        self._full, self._full_at = "", math.inf
        self._opened_at = 0.0
        self._throttle = LogThrottle()
        self._claim_check = ClaimCheck(self._store.spill, self._options.max_message_bytes)
        self._publishing = Publishing(
            Dispatcher(wiring.app, self._options, lambda: renewal.sealing, wiring.queue_names),
            self._claim_check,
            activity,
        )
        self._lost_messages = LostMessageDetector(self._options, BrokerWatch(wiring.app, self.housekeeping))
        self._untaken = UntakenQueues(wiring, self.housekeeping)
        self._fairness = Fairness({})

    def lead(self) -> None:
        """
        Lead until told to stop, or until the lease is no longer trusted.

        Raises:
            LeaseLostError: somebody else leads.
            MongoCeleryError: something that waiting cannot cure.
        """
        with self.led():
            while not self._stopping.is_set():
                if not self._renewal.trusted():
                    raise LeaseLostError
                self.turn()
                self._wait()

    @contextlib.contextmanager
    def led(self) -> Iterator[None]:
        """Take over and read, from whatever thread turns inside; step down at the end, but for renewal and release."""
        try:
            self.housekeeping.start()
            self._begin()
            try:
                yield
            finally:
                if self._reader is not None:
                    self._reader.stop()
                with pymongo.timeout(call_timeout(self._options.lease_ttl)):  # one call's time for all, however it ends
                    self._watermarks.store(self._subscriptions.values(), time.monotonic())
        finally:
            self._publishing.close()
            self.housekeeping.stop()
            self._snapshots.close()
            self._spilling.close()

    @property
    def subscriptions(self) -> Mapping[str, Subscription]:
        """What is led, by name."""
        return self._subscriptions

    def has_read_to(self, place: Timestamp) -> bool:
        """Whether everything up to a cluster time was read and taken in, with what a snapshot gives before it."""
        reader = self._reader
        read_to = reader.read_to if reader is not None else None
        if read_to is None or read_to < place or self._is_held_up:
            return False
        return self._inbox.peek() is None and self._snapshots.is_idle

    @property
    def reads_snapshot(self) -> bool:
        """True while a snapshot is under way."""
        return self._snapshots.is_active

    def look_now(self) -> None:
        """Have the next turn read all partitions, as they are by then, whenever that would have been due."""
        self._store.partitions.flush()
        self._looks.look_now()

    def look_for_snapshots(self) -> None:
        """Have the next turn find the snapshots that were asked for, whenever that would have been due."""
        self._snapshots.look_now()

    def wake(self) -> None:
        """End the current wait; callable from any thread."""
        self._inbox.put(())

    def report(self) -> dict[str, Any]:
        """What `status` shows of this term beside the stored positions."""
        subscriptions = list(self._subscriptions.values())
        blocked = sum(len(subscription.blocked) for subscription in subscriptions)
        lost = (subscription.lost for subscription in subscriptions)
        reading = self._reading()
        rejected = rejections(
            partition for subscription in subscriptions for partition in subscription.partitions.values()
        )
        is_spilled = any(each.spilled for each in subscriptions)
        waits = rejected["rejectedCount"] or rejected["notStoredCount"] or reading["unreadSeconds"]
        stopped = {**self._stopped, **self._repartitioning.stopped}
        stuck = stopped or self._refused or blocked or waits
        return {
            "partitions": self._options.partitions,
            "outstanding": sum(len(subscription.in_flight) for subscription in subscriptions),
            "buffered": sum(subscription.window.count for subscription in subscriptions),
            "bufferedBytes": sum(subscription.size for subscription in subscriptions),
            "standing": blocked,
            "caughtUp": self._at_end and not (stuck or is_spilled or any(lost)),
            "brokerDown": self._publishing.is_down,
            "untaken": self._untaken.report(),
            "locked": self._locked.names[:_NAMED] if self._locked is not None else [],
            **rejected,
            **reading,
            "moving": self._repartitioning.report(),
            **self._spilling.report(),
            "atRisk": [risk.report() for risk in self._horizon.risks],
            "snapshots": self._snapshots.report(),
            "refusedMatches": [{"subscription": name, "error": said} for name, said in self._refused.items()],
            "stopped": [{"subscription": name, "reason": reason} for name, reason in stopped.items()],
            "fedBack": [
                {"subscription": each.name, **found}
                for each in subscriptions
                if (found := each.feedback.report()) is not None
            ],
            "held": [place for each in subscriptions if each.has_gap for place in each.held()],
        }

    def _reading(self) -> dict[str, Any]:
        """How reading goes. A silence counts after some seconds; before that each report would differ from the last."""
        reader = self._reader
        if reader is None:
            return {"unreadSeconds": 0, "readingWaits": None, "reopenings": 0}
        status = reader.status
        last_read = status.last_read or self._opened_at
        silent = int(time.monotonic() - (min(last_read, self._full_at) if self._full else last_read))
        waits = self._full or status.last_error
        return {
            "unreadSeconds": silent if silent >= _SILENCE_SECONDS else 0,
            "readingWaits": waits,
            "reopenings": status.reopenings,
        }

    # -- beginning ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        handlers = self._wiring.handlers
        takeover = take_over(self._store, self._renewal, self._options, handlers)
        self._renewal.alive()
        rules = self._find_rules(takeover)
        found = find_starts(self._store, self._wiring.client, self._renewal, self._options, handlers, takeover)
        led = [each for each in zip(self._led, self._selectors, strict=True) if each[0].name not in rules.missing]
        starts = {handler.name: found[handler.name] for handler, _ in led}
        subscriptions: dict[str, Subscription] = {}
        for handler, selector in led:
            start, rule = starts[handler.name], rules.in_force[handler.name]
            plan = Plan(
                handler,
                selector,
                rule,
                takeover.layouts[handler.name],
                takeover.version,
                start.time,
                start.watermark,
                find_undeliverable(self._store, self._renewal, takeover, handler.name, rule, start.watermark),
                token_seconds=token_seconds(self._wiring.app, handler.task_name),
            )
            images = takeover.images[handler.name]
            generation = plan.layout.generation
            ids = {
                image.index: self._store.partitions.partition_id(handler.name, generation, image.index)
                for image in images
            }
            partitions = make_partitions(images, ids, takeover.version, self._options)
            subscriptions[handler.name] = Subscription(self._options, plan, partitions)
        self._renewal.alive()
        self._locked = LockedPartitions(
            self._store, takeover.version, [each for led in subscriptions.values() for each in led.partitions.values()]
        )
        self._subscriptions = subscriptions  # at once: the renewal thread reports from it
        self._fairness = Fairness(
            {name: each.plan.handler.group for name, each in subscriptions.items()},
            {name for name, each in subscriptions.items() if each.plan.token_seconds},
        )
        self._spilling.begin(subscriptions, takeover.version)
        owed = [(each.plan, at) for each in subscriptions.values() if (at := starts[each.name].owed_from) is not None]
        self._snapshots.begin(subscriptions, takeover.version, InitialSnapshots(self._wiring, owed))
        position = self._history.begin(subscriptions, starts) if subscriptions else None
        self._renewal.alive()
        for subscription in self._repartitioning.begin(subscriptions, takeover):
            self._replace(subscription)
        self._read_on(position)

    def _find_rules(self, takeover: Takeover) -> Rules:
        """
        Find the partition rules, and say which handlers are not led since theirs is not registered.

        Raises:
            LayoutError: no handler is left.
        """
        rules = find_rules(self._options, self._wiring.handlers, takeover)
        for name, error in rules.missing.items():
            if all(handler.name in rules.missing for handler in self._led):
                raise error
            logger.error(
                "handler %s is stopped, and the others are led: %s",
                name,
                str(error),
                extra={"event": "handler_stopped", "subscription": name},
            )
        self._stopped = {name: str(error) for name, error in rules.missing.items()}
        return rules

    def _read_on(self, position: Position | None) -> None:
        """Read from there, and nothing more of what was read before; or not at all, where nobody can be read."""
        if self._reader is not None:
            self._reader.stop()
            self._stream_status, self._reader = replace(self._reader.status), None
        # A place that the reader before hands over at this very moment must not be taken for the new one's.
        self._inbox = Inbox()
        self._at_end = False
        self._snapshots.reopened()
        if position is not None:
            self._read_from(position)

    def _read_from(self, position: Position) -> None:
        logger.info(
            "reading from %s",
            "a stored token" if position.token else position.time,
            extra={"event": "stream_opening"},
        )
        self._opened_at = time.monotonic()
        self._reader = StreamReader(
            self._wiring.stream_client,
            self._scope,
            position,
            deliver=self._inbox.put,
            room=_READ_AHEAD,
            batch_size=self._options.batch_size,
            comment=self._options.comment,
            status=self._stream_status,
        )
        self._reader.set_low_latency(self.is_hurried)
        self._reader.start()

    # -- one turn ----------------------------------------------------------------------------------

    def turn(self) -> None:
        """
        Do what is due, and wait for nothing; whoever asks for it trusts the lease.

        Raises:
            LeaseLostError: somebody else leads.
            MongoCeleryError: something that waiting cannot cure.
        """
        self._activity.turns()
        now = time.monotonic()
        self._note_progress()
        self._take_in(now)
        self._note_progress()
        self._win_locked(now)
        try:
            self._look(now)
            self._look_at_history(now)
        except PyMongoError as error:
            self._is_blind = True
            self._unread(error)
            self._looks.failed(now)
            self._repartitioning.put_off(now)
        else:
            self._repartition(now)
        self._note_progress()
        self._spilling.turn(now, at_end=self._at_end)
        self._snapshot(now)
        self._replaying.turn(self._subscriptions, now)
        self._note_progress()
        self._dispatch()
        self._note_progress()
        self._watermarks.flush(self._subscriptions.values(), now, self._looks.moved_at)

    def _note_progress(self) -> None:
        """Have the lease renewed, unless partitions or the stream cannot be read."""
        is_reading = self._reader is None or self._reader.is_running or self._inbox.peek() is not None
        if is_reading and self._lost is None and not self._is_blind:
            self._renewal.alive()

    def _take_in(self, now: float) -> None:
        inbox = self._inbox
        self._is_held_up = False
        for number in range(_ITEMS_A_TURN):
            item = inbox.peek()
            if item is None:
                return
            if isinstance(item, Failed):
                inbox.take()
                self._failed(item.error)
                return
            if number % _ITEMS_A_CHECK == 0:
                self._note_progress()
                if self._spilling.is_full:
                    self._wait_for_room(now)
                    self._is_held_up = True
                    return
            self._full, self._full_at = "", math.inf
            self._snapshots.comes_to(item)  # existing documents come before it
            self._at_end = not hasattr(item, "raw")
            for subscription in self._subscriptions.values():
                change = subscription.take_in(item)
                if change is not None:
                    self._snapshots.took_change(subscription, item, change)
            self._snapshots.took_in(item)
            batch = inbox.take()
            if batch and self._reader is not None:
                self._reader.grant_credit(batch)

    def _wait_for_room(self, now: float) -> None:
        """A full buffer is normal under backlog; it is loud where nothing more may be stored of what stands."""
        largest = max(self._subscriptions.values(), key=lambda subscription: subscription.window.size)
        is_held = bool(self._spilling.waits)
        self._at_end = False
        self._full_at = min(self._full_at, now)
        waits = f"; {self._spilling.waits}" if is_held else ""
        most = f"{largest.name} ({largest.window.count})"
        self._full = f"the buffer is full, most of it with changes of handler {most}{waits}"
        if not self._throttle.may_log():
            return
        logger.log(
            logging.ERROR if is_held else logging.INFO,
            "%s. The stream is not read until workers have made room",
            self._full,
            extra={"event": "buffer_full"},
        )

    # -- looking at partitions ---------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """Read partitions, as far as it is time for it, and find lost messages."""
        began = time.monotonic()
        images = self._looks.look(self._subscriptions, now)
        if images is None:
            return
        self._is_blind = False
        if self._looks.has_swept:
            self._count()
        seen = time.monotonic()
        late = [image for image in images if self._observe(image, seen) is Step.COMMIT]
        if late:
            self._commit_late(late)
        down = self._publishing.is_down
        if self._lost_messages.check(self._subscriptions.values(), began, seen, is_broker_down=down):
            self._publishing.ready_at = 0.0  # it answers again: publish now, not at the next try
        if not self._publishing.is_down:
            self._untaken.turn(self._subscriptions.values(), seen)

    def _count(self) -> None:
        for subscription in self._subscriptions.values():
            self._activity.of(subscription.name).took(subscription.counted)
        self._activity.swept(self._reader.status.reopenings if self._reader is not None else 0)

    def _observe(self, image: Image, now: float) -> Step | None:
        subscription = self._subscriptions[image.subscription]
        partition = subscription.partitions.get(image.index)
        if partition is None:  # read before its handler was repartitioned
            return None
        self._activity.of(image.subscription).observe(partition, image, now)
        run = partition.in_flight
        is_held = run is not None and run.left_at is None
        step = subscription.observe(image, now)
        if step is Step.SUPERSEDED:
            raise LeaseLostError
        if is_held and run is not None and run.left_at is not None and run.taken_at is not None:
            self._fairness.note_run(image.subscription, run.left_at - run.taken_at)
        if step is Step.ENDED:
            self._looks.ended(image.subscription, run.sent_at if run is not None else None, now)
        return step

    def _commit_late(self, images: Sequence[Image]) -> None:
        """Commit what is handled and whose commit messages are late, with one command for all."""
        heads = {
            self._subscriptions[image.subscription].partitions[image.index].partition_id: image.committed + 1
            for image in images
        }
        named = [*list(heads)[:_NAMED], *([f"{len(heads) - _NAMED} more"] if len(heads) > _NAMED else [])]
        logger.info("committing %s, whose commit message is late", ", ".join(named), extra={"event": "commit_late"})
        self._store.claims.commit_all(heads)

    def _win_locked(self, now: float) -> None:
        """Take over, one by one, what an open transaction had kept from the take-over."""
        assert self._locked is not None, "a term wins the rest after it has taken over"
        try:
            for image in self._locked.win(now):
                self._observe(image, time.monotonic())
        except PyMongoError as error:  # all others are looked at all the same
            self._unread(error)

    def _unread(self, error: PyMongoError) -> None:
        renew_connections(self._wiring.client, error)
        raise_if_final(error, self._wiring.state_concern)
        logger.warning(
            "reading partitions failed, trying again: %s", brief(error), extra={"event": "partitions_unread"}
        )

    def _repartition(self, now: float) -> None:
        """Go on with new partitionings, and read again what a handler has left meanwhile."""
        for subscription in self._repartitioning.turn(now):
            self._replace(subscription)
        if self._lost is None and self._repartitioning.wants_reading(now):
            try:
                position = self._history.place(self._subscriptions)
            except PyMongoError as error:
                self._repartitioning.note_failure(error)
                return
            self._read_on(position)
            self._repartitioning.reads_again(now)

    def _replace(self, subscription: Subscription) -> None:
        """Put a handler under its new partitioning in the place of what it was."""
        self._activity.of(subscription.name).took(self._subscriptions[subscription.name].counted)
        self._subscriptions[subscription.name] = subscription
        self._spilling.follow(subscription)

    def _snapshot(self, now: float) -> None:
        """Go on with existing documents, between the changes."""
        may_begin = self._reader is not None and not self._full and not self._spilling.waits
        room = self._options.buffer_bytes - self._spilling.size
        self._snapshots.turn(now, room=room, may_begin=may_begin)
        if self._reader is not None:
            self._reader.set_low_latency(self.is_hurried or self._snapshots.is_busy)

    # -- dispatching -------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        now = time.monotonic()
        if now < self._publishing.ready_at:
            return
        due = self._fairness.due(self._subscriptions, now)
        if due and self._renewal.trusted() and self._publishing.publish(due):
            self._looks.moved_at = time.monotonic()
        while self._claim_check.stored:
            self._spilling.has_documents(self._claim_check.stored.pop())

    # -- failures of the stream --------------------------------------------------------------------

    def _failed(self, error: MongoCeleryError) -> None:
        if not isinstance(error, HistoryLostError):
            raise error
        self._read_on(None)
        self._lost = error

    def _resume_behind_gap(self, error: HistoryLostError, now: float) -> None:
        """Settle a history that was lost, and read on; a server that does not answer is asked again after a pause."""
        if not self._resuming.is_open(now):
            return
        try:
            position = self._history.go_on(error, self._subscriptions, self._watermarks)
        except PyMongoError as trouble:
            renew_connections(self._wiring.client, trouble)
            raise_if_final(trouble, self._wiring.state_concern)
            self._resuming.note_failure()
            logger.warning(
                "resuming after an oplog gap failed, trying again: %s",
                brief(trouble),
                extra={"event": "history_unsettled"},
            )
            return
        self._lost = None
        self._read_on(position)

    def _look_at_history(self, now: float) -> None:
        """Warn of histories that are about to be lost, and read on where a command has moved a lost one."""
        if self._lost is not None:
            self._resume_behind_gap(self._lost, now)
            return
        self._horizon.judge(self._subscriptions.values())
        position = self._history.look(self._subscriptions, now)
        if position is not None:
            self._read_on(position)

    # -- waiting -----------------------------------------------------------------------------------

    def _wait(self) -> None:
        now = time.monotonic()
        next_run = self._fairness.next_due(self._subscriptions)
        until = min(
            self._looks.due(self._subscriptions, now),
            max(next_run, self._publishing.ready_at),
            self._repartitioning.due(),
            self._spilling.next_at(),
        )
        pause = max(until - now, 0.0)
        if self._is_held_up:  # full: new items cannot be taken in
            self._stopping.wait(min(pause, BUSY_LOOK))
        else:
            self._inbox.wait(pause)
