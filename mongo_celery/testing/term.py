"""
A term in steps, in a test's thread, with the listener's own lease, renewal and leader.

When no other work is left, the term ends a listener's waits: it moves stored times in MongoDB into the past, and sends
lost messages again. It knows the lost ones, because broker and worker run in this process.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bson import Timestamp
from pymongo.collection import Collection

from mongo_celery.bridge.identity import build_identity
from mongo_celery.bridge.listener.activity import Activity
from mongo_celery.bridge.listener.leader import Leader
from mongo_celery.bridge.listener.listener import check_app
from mongo_celery.bridge.listener.partition import Partition
from mongo_celery.bridge.listener.renewal import Renewal
from mongo_celery.bridge.listener.subscription import Subscription
from mongo_celery.bridge.listener.takeover import begin_term
from mongo_celery.bridge.operations.operations import Operations
from mongo_celery.bridge.state.snapshots import DONE, RUNNING
from mongo_celery.bridge.stream.isolator import find_refused_matches
from mongo_celery.bridge.wiring import Wiring
from mongo_celery.errors import LeaseLostError, StreamRefusedError
from mongo_celery.mongo.opening import with_majority
from mongo_celery.mongo.oplog import check_topology, operation_time

_OF_A_TERM = {f"mongo_celery-{name}" for name in ("reader", "snapshot", "removal", "housekeeping")}
__tracebackhide__ = True  # for pytest: show the line of the test or the handler
_ENDING_SECONDS = 10.0
_OUTAGES_MAX = 3
_CHOSEN_HERE = {"start_pinned", "subscription_added"}  # otherwise they would fill the output of each failed test


class SteppedTerm:
    """
    A bridge's term that advances only on request.

    Args:
        wiring: the bridge's wiring.
    """

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._leader: Leader | None = None
        self._renewal: Renewal | None = None
        self._aim: Timestamp | None = None
        self._asked: set[str] = set()

    @property
    def queues(self) -> list[str]:
        """The queues of the bridge's messages."""
        return self._wiring.queue_names

    @contextlib.contextmanager
    def led(self) -> Iterator[None]:
        """Lead the bridge in this thread during the block."""
        wiring = self._wiring
        check_app(wiring.app)
        leases = wiring.store.leases
        selectors, scope = wiring.stream()
        check_topology(wiring.client)
        refused = find_refused_matches(wiring.stream_client, scope)
        if refused:
            raise StreamRefusedError(
                "the server refuses match= of " + "; of ".join(f"{name}: {said}" for name, said in refused.items())
            )
        leases.ensure()
        term = leases.acquire(build_identity(wiring).plain())
        if term is None:
            raise LeaseLostError
        renewal = self._renewal = Renewal(
            leases, wiring.store.signing, term, wiring.options.lease_ttl, patience=math.inf
        )
        renewal.start()
        log = logging.getLogger("mongo_celery.listener")
        log.addFilter(_is_news)
        try:
            activity = Activity(wiring.name, [handler.name for handler in wiring.handlers], wiring.options.lease_ttl)
            led = list(zip(wiring.handlers, selectors, strict=True))
            beginning = begin_term(wiring, renewal, led, wiring.handlers)
            leader = Leader(
                wiring, renewal, beginning, scope, threading.Event(), wiring.options.on_history_lost, activity
            )
            leader.intake.is_hurried = True
            with leader.led():
                self._leader = leader
                yield
        finally:
            self._leader = None
            log.removeFilter(_is_news)
            renewal.stop()
            leases.release(renewal.term)

    @property
    def leader(self) -> Leader:
        """The listener's own leader."""
        assert self._leader is not None, "turns are taken inside"
        return self._leader

    def aim(self) -> None:
        """Store the current time. `has_read_all` compares the progress of reading with it."""
        self._aim = operation_time(self._wiring.client)

    def has_read_all(self) -> bool:
        """Return True if all changes before the call of `aim` were read."""
        return self._aim is not None and has_read_until(self.leader, self._aim)

    def ask(self, handler: str, sources: Sequence[str], match: str | None) -> None:
        """
        Request a snapshot, like the command, and let the listener find the request.

        Raises:
            CommandRefusedError: the snapshot is impossible, and was not requested.
        """
        before = {each.id for each in self._wiring.store.snapshots.read()}
        Operations(self._wiring).start_snapshot(handler, sources=sources, match=match).run()
        self._asked.update({each.id for each in self._wiring.store.snapshots.read()} - before)
        self.leader.snapshots.thread.poll_now()

    def reads_snapshot(self) -> bool:
        """Return True if a snapshot is in progress. It may wait for the retry of its own row."""
        return bool(self.leader.snapshots.thread.records)

    def has_snapshots(self) -> bool:
        """
        Return True if a requested snapshot is still running.

        Raises:
            AssertionError: a snapshot failed.
        """
        if not self._asked:
            return False
        asked = [each for each in self._wiring.store.snapshots.read() if each.id in self._asked]
        self._asked = {each.id for each in asked if each.state == RUNNING}
        for each in asked:
            if each.state not in (RUNNING, DONE):
                raise AssertionError(f"The snapshot of {each.source} for {each.subscription} ended: {each.sentence}")
        return bool(self._asked)

    def turn(self) -> None:
        """
        Take one turn of the listener.

        Raises:
            LeaseLostError: another listener leads, or MongoDB was unavailable for too long.
        """
        leader = self.leader
        assert self._renewal is not None, "it is led"
        if not self._renewal.is_trusted():
            raise LeaseLostError
        leader.turn()

    def look(self) -> None:
        """Read all partitions, then take one turn."""
        self._wiring.store.partitions.flush()
        self.leader.poller.sweep_now()
        self.turn()

    def is_busy(self) -> bool:
        """Return True if a run is in flight, or waits only for its turn or for a limit."""
        now = time.monotonic()
        return any(each.waiting_for_limit for each in self.leader.subscriptions.values()) or any(
            partition.in_flight is not None or _is_due(partition, now) for _, partition in self._partitions()
        )

    def waits(self) -> bool:
        """Return True if a change waits for its retry time."""
        now = time.monotonic()
        return any(
            partition.has_next and now < partition.ready_at < math.inf for subscription, partition in self._partitions()
        )

    def end_waits(self) -> None:
        """
        Move the retry times of waiting changes into the past.

        Raises:
            AssertionError: a change has waited for a server many times. These waits are not counted as attempts.
        """
        for _, partition in self._partitions():
            if partition.image.parked:
                _demand_servers(partition)
                self._set_past(partition, "retry.notBefore", {"$gt": ["$retry.notBefore", "$$NOW"]})

    def end_delays(self) -> bool:
        """Let changes be due that wait for their handler's delay. Return True if there were any."""
        delayed = [pair for pair in self._partitions() if pair[1].delayed_until and pair[1].in_flight is None]
        for subscription, partition in delayed:
            assert subscription.delay is not None, "its partitions wait for it"
            subscription.delay.elapse(subscription.window.seen)
            partition.delayed_until = 0.0
        return bool(delayed)

    def make_up(self) -> None:
        """
        Commit handled runs and send lost runs again, if no messages are left.

        A live claim belongs to a killed or hanging process, so let it lapse. A rate takes no time.
        """
        for subscription in self.leader.subscriptions.values():
            if subscription.limit.per_second and subscription.waiting_for_limit:
                self._fill(subscription)
        for subscription, partition in self._partitions():
            run, image = partition.in_flight, partition.image
            if run is None:
                continue
            if image.handled is not None:
                run.handled_at = -math.inf  # do not wait longer for a commit message
            elif image.live and image.claim is not None:
                self._set_past(partition, "claim.until", {"$eq": ["$claim.owner", {"$literal": image.claim["owner"]}]})
            else:
                subscription.repeat(partition, time.monotonic())

    def list_blocked(self) -> list[str]:
        """Return state, change and error of each blocked partition."""
        return [
            f"{partition.partition_id} is {partition.image.state}: {partition.image.error or 'no error is recorded'}"
            for _, partition in self._partitions()
            if partition.image.state != "flowing"
        ]

    def _partitions(self) -> list[tuple[Subscription, Partition]]:
        return [
            (each, partition) for each in self.leader.subscriptions.values() for partition in each.partitions.values()
        ]

    def _fill(self, subscription: Subscription) -> None:
        """Give a handler all tokens of its rate."""
        document = {"bridge": self._wiring.name, "handler": subscription.name}
        self._documents("handlers").update_one(document, {"$unset": {"tokens": ""}})
        subscription.limit.refill()

    def _set_past(self, partition: Partition, field: str, condition: dict[str, Any]) -> None:
        found = {"_id": partition.partition_id, "$expr": condition}
        self._documents("partitions").update_one(found, [{"$set": {field: {"$subtract": ["$$NOW", 1]}}}])

    def _documents(self, name: str) -> Collection[dict[str, Any]]:
        return with_majority(self._wiring.client[self._wiring.options.database])[name]


def has_read_until(leader: Leader, place: Timestamp) -> bool:
    """Return True if all changes and snapshot rows up to a cluster time were read."""
    return leader.intake.has_reached(place) and leader.snapshots.thread.is_idle


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for log records about the runner's own decisions."""
    return getattr(record, "event", None) not in _CHOSEN_HERE


def _demand_servers(partition: Partition) -> None:
    """Fail the test if a change waits for an unavailable server, because these waits are not counted."""
    waiting = partition.image.waiting or {}
    if waiting.get("doubts") or waiting.get("count", 0) < _OUTAGES_MAX:
        return
    raise AssertionError(
        f"A change of {partition.partition_id} has waited {_OUTAGES_MAX} times in a row: {waiting['cause']}. If "
        "the handler makes a client, make it from mongo_celery_mongodb_url.",
    )


def _is_due(partition: Partition, now: float) -> bool:
    return partition.has_next and partition.next_time <= now


def await_ends(before: set[threading.Thread]) -> None:
    """
    Wait for the threads of ended terms, so their last writes do not reach the bridges' next MongoDB.

    A listener need not wait: its process ends, and all calls have time limits.
    """
    until = time.monotonic() + _ENDING_SECONDS
    for thread in set(threading.enumerate()) - before:
        if thread.name in _OF_A_TERM:
            thread.join(max(until - time.monotonic(), 0.0))
