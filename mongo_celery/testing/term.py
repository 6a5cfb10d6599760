"""
A term that is led turn by turn, in the thread of a test: the listener's own lease, renewal and leader.

What a listener only waits for is brought about where nothing else is left to do: the times that are stored in MongoDB
are moved into the past, and what has been lost is known to be lost, since broker and worker are of this process.
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
from mongo_celery.bridge.operations.operations import Operations
from mongo_celery.bridge.state.snapshots import DONE, RUNNING
from mongo_celery.bridge.stream.isolator import find_refused_matches
from mongo_celery.bridge.wiring import Wiring
from mongo_celery.errors import LeaseLostError, StreamRefusedError
from mongo_celery.mongo.opening import with_majority
from mongo_celery.mongo.oplog import check_topology, operation_time

_OF_A_TERM = {f"mongo_celery-{name}" for name in ("reader", "snapshot", "removal", "housekeeping")}
__tracebackhide__ = True  # for pytest: what fails is the test's line, and the handler's
_ENDING_SECONDS = 10.0
_OUTAGES_MAX = 3
_CHOSEN_HERE = {"start_pinned", "subscription_added"}  # else they would stand above the output of each failed test


class SteppedTerm:
    """
    One term of a bridge, which moves only when it is asked to.

    Args:
        wiring: of the bridge.
    """

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._leader: Leader | None = None
        self._renewal: Renewal | None = None
        self._aim: Timestamp | None = None
        self._asked: set[str] = set()

    @property
    def queues(self) -> list[str]:
        """Where its messages go."""
        return self._wiring.queue_names

    @contextlib.contextmanager
    def led(self) -> Iterator[None]:
        """Inside, the bridge is led by this thread."""
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
            leader = Leader(
                wiring, renewal, selectors, scope, threading.Event(), wiring.options.on_history_lost, activity
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
        """The listener's own."""
        assert self._leader is not None, "turns are taken inside"
        return self._leader

    def aim(self) -> None:
        """From now on `has_read_all` is about what was written until now."""
        self._aim = operation_time(self._wiring.client)

    def has_read_all(self) -> bool:
        """Whether it has taken in all that was written until `aim`."""
        return self._aim is not None and has_read_to(self.leader, self._aim)

    def ask(self, handler: str, sources: Sequence[str], match: str | None) -> None:
        """
        Ask for a snapshot, as the command does, and have the listener find it.

        Raises:
            CommandRefusedError: it cannot be; then nothing is asked for.
        """
        started = Operations(self._wiring).start_snapshot(handler, sources=sources, match=match).run()
        self._asked.update(each["id"] for each in started.fields["snapshots"])
        self.leader.snapshots.thread.poll_now()

    def reads_snapshot(self) -> bool:
        """Return True if a snapshot is under way; it may wait for the retry of one of its own rows."""
        return bool(self.leader.snapshots.thread.records)

    def has_snapshots(self) -> bool:
        """
        Whether a snapshot that was asked for still runs.

        Raises:
            AssertionError: one has failed.
        """
        if not self._asked:
            return False
        asked = [each for each in self._wiring.store.snapshots.read() if each.id in self._asked]
        self._asked = {each.id for each in asked if each.state == RUNNING}
        for each in asked:
            if each.state not in (RUNNING, DONE):
                raise AssertionError(f"the snapshot of {each.source} for {each.subscription} ended: {each.sentence}")
        return bool(self._asked)

    def turn(self) -> None:
        """
        One turn of the listener.

        Raises:
            LeaseLostError: somebody else leads, or MongoDB was away for too long.
        """
        leader = self.leader
        assert self._renewal is not None, "it is led"
        if not self._renewal.is_trusted():
            raise LeaseLostError
        leader.turn()

    def look(self) -> None:
        """One turn, with all partitions as they are by now."""
        self._wiring.store.partitions.flush()
        self.leader.poller.sweep_now()
        self.turn()

    def is_busy(self) -> bool:
        """Whether a run is out, or waits for nothing but its turn."""
        now = time.monotonic()
        return any(
            partition.in_flight is not None or _is_due(partition, now) for subscription, partition in self._partitions()
        )

    def waits(self) -> bool:
        """Whether a change waits for its time."""
        now = time.monotonic()
        return any(
            partition.has_next and now < partition.ready_at < math.inf for subscription, partition in self._partitions()
        )

    def end_waits(self) -> None:
        """
        Move the times for which changes wait into the past.

        Raises:
            AssertionError: one has waited for a server again and again, which nobody counts.
        """
        for _, partition in self._partitions():
            if partition.image.parked:
                _demand_servers(partition)
                self._set_past(partition, "retry.notBefore", {"$gt": ["$retry.notBefore", "$$NOW"]})

    def make_up(self) -> None:
        """
        See to what is out while there are no messages: what is handled is committed, what was lost is sent again.

        A claim that stands belongs to a process that was killed, or stands still: its time is over.
        """
        for subscription, partition in self._partitions():
            run, image = partition.in_flight, partition.image
            if run is None:
                continue
            if image.handled is not None:
                run.handled_at = -math.inf  # the time for which a commit message is waited for is over
            elif image.live and image.claim is not None:
                self._set_past(partition, "claim.until", {"$eq": ["$claim.owner", {"$literal": image.claim["owner"]}]})
            else:
                subscription.repeat(partition, time.monotonic())

    def standing(self) -> list[str]:
        """Of each partition that a person has to see to, its state, its change and the error."""
        return [
            f"{partition.partition_id} is {partition.image.state}: {partition.image.error or 'no error is recorded'}"
            for _, partition in self._partitions()
            if partition.image.state != "flowing"
        ]

    def _partitions(self) -> list[tuple[Subscription, Partition]]:
        return [
            (each, partition) for each in self.leader.subscriptions.values() for partition in each.partitions.values()
        ]

    def _set_past(self, partition: Partition, field: str, condition: dict[str, Any]) -> None:
        found = {"_id": partition.partition_id, "$expr": condition}
        self._documents().update_one(found, [{"$set": {field: {"$subtract": ["$$NOW", 1]}}}])

    def _documents(self) -> Collection[dict[str, Any]]:
        return with_majority(self._wiring.client[self._wiring.options.database])["partitions"]


def has_read_to(leader: Leader, place: Timestamp) -> bool:
    """Return True if everything up to a cluster time was taken in, with what a snapshot gives before it."""
    return leader.intake.has_reached(place) and leader.snapshots.thread.is_idle


def _is_news(record: logging.LogRecord) -> bool:
    """Whether the runner has not decided it."""
    return getattr(record, "event", None) not in _CHOSEN_HERE


def _demand_servers(partition: Partition) -> None:
    """In doubt (`timeOuts`) a change waits some times and then fails; for what is away it would wait for ever."""
    waiting = partition.image.waiting or {}
    if waiting.get("timeOuts") or waiting.get("count", 0) < _OUTAGES_MAX:
        return
    raise AssertionError(
        f"a change of {partition.partition_id} has waited {_OUTAGES_MAX} times in a row: {waiting['cause']}. If a "
        "server is away: has the handler a client of its own? Make it of mongo_celery_mongodb_url.",
    )


def _is_due(partition: Partition, now: float) -> bool:
    return partition.has_next and partition.ready_at <= now


def await_ends(before: set[threading.Thread]) -> None:
    """
    Wait for the threads of terms that have ended: what they still do must not come where their bridges work next.

    A listener need not: its process ends, and all calls have limits.
    """
    until = time.monotonic() + _ENDING_SECONDS
    for thread in set(threading.enumerate()) - before:
        if thread.name in _OF_A_TERM:
            thread.join(max(until - time.monotonic(), 0.0))
