"""
Storing changes in the state database, so that watermarks and reading can advance.

The order of writes prevents losses:

1. the first changes of the partition's buffer are inserted by majority. Afterwards each exists under this term.
2. the partition is marked up to the last of them, guarded by the term.
3. only then they are complete for the window, and a watermark after them may be stored.

A crash between 1 and 2 leaves changes that no run reads. A crash between 2 and 3 leaves changes that are read and
stored again. After any error nothing is complete, and storing is tried again after a pause. While the mark is after the
committed position, the partition runs from stored changes, by reference (`stored_range`, `read_back`). When that is
done, the mark is cleared, and committed changes are removed (`removal`).

| a partition's changes are stored | when | beyond the bound |
|---|---|---|
| again | its buffered changes are at or below its mark, so they cannot run before | yes |
| undeliverable | one of them cannot be given to its handler: immediately, with all before it | yes |
| too large | no message has room for the next one | yes |
| blocked | its first change has not run for `spill_after`: halted, paused, parked, waiting, running, rejected | no |
| delayed | its first buffered change is older than `spill_after`, and the next one waits for its delay | no |
| oplog | one of them holds a watermark with a quarter of the oplog's window after it | no |
| full | the buffer is full, and another partition is idle (`pressure`): the largest first | no |

If the oplog cannot be read (no right `serverStatus`, or a mongos), the reason `oplog` never applies.

`spill_bytes` limits this bridge's stored changes, which the server measures every five seconds. At the limit only
changes that cannot run otherwise are stored, and the stream waits, with log records, until there is room. Bridges that
share a state database share the collection. Up to half of the limit the whole collection counts. Above, this bridge's
part is read about once a minute. If a bridge has too many to read within one call, the whole collection counts.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Any

from bson.errors import BSONError
from pymongo.client_session import ClientSession
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery.bridge.change import token_data
from mongo_celery.bridge.listener.housekeeping import Housekeeping
from mongo_celery.bridge.listener.pacing import LogThrottle, RetryGate
from mongo_celery.bridge.listener.partition import DELAYED, NotStored, Partition
from mongo_celery.bridge.listener.pressure import Pressure
from mongo_celery.bridge.listener.read_back import ReadBack
from mongo_celery.bridge.listener.removal import Removal
from mongo_celery.bridge.listener.storing_report import StoringReport
from mongo_celery.bridge.listener.subscription import Subscription
from mongo_celery.bridge.state.backlog import StoredChange
from mongo_celery.errors import LeaseLostError
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.verdicts import brief, explain_error, raise_if_final, storable

if TYPE_CHECKING:
    from mongo_celery.bridge.window import PendingChange
    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.listener")

AGAIN, UNDELIVERABLE, TOO_LARGE, OPLOG, FULL = "stored again", "undeliverable", "too large", "oplog", "buffer full"
"""Reasons for storing changes, in addition to the states of a blocked partition."""

_NEEDED = (AGAIN, UNDELIVERABLE, TOO_LARGE)
"""Reasons that the limit does not affect, because the change could not run otherwise."""

AT_RISK = 0.25
"""Share of the oplog's window after a watermark at which the changes that hold it are stored."""

_JUDGED_SECONDS = 0.25
_TURN_SECONDS = 0.2
_SWEEP_SECONDS = 1.0
_BULK_CHANGES = 1000
_BULK_BYTES = 4 << 20
_REASON_CHARS = 300
_PAUSES = Pauses(first=1.0, longest=16.0)


class Storing:
    """
    The stored changes of one term. The leading thread uses it.

    Args:
        wiring: the wiring of the bridge.
        led: the subscriptions of this term.
        version: the number of this term.
        share_behind: returns the share of the oplog's window after a subscription.
        housekeeping: the housekeeping of this term.

    Attributes:
        session: the session for all reads that decide what may run: images and stored changes.
        waits: reason why a change that should be stored is not, as a sentence. Empty if none waits.
    """

    def __init__(
        self,
        wiring: Wiring,
        led: Mapping[str, Subscription],
        version: int,
        share_behind: Callable[[Subscription], float],
        housekeeping: Housekeeping,
    ) -> None:
        store, options = wiring.store, wiring.options
        self.session: ClientSession = store.start_session()
        self.waits = ""
        self._state = store
        self._options = options
        self._concern = wiring.state_concern
        self._share_behind = share_behind
        self._led, self._version = led, version
        self._removal = Removal(store.backlog, version, options.spill_bytes)
        self._removing = housekeeping.add(self._removal.work)
        self._report = StoringReport(options.spill_bytes, wiring.line)
        self._pressure = Pressure(options.buffer_bytes)
        self._reading = ReadBack(store, self.session)
        self._gate = RetryGate()
        self._throttle = LogThrottle()
        self._judged_at = self._swept_at = 0.0
        self._unfinished = self._has_swept = False

    def close(self) -> None:
        """End the session."""
        self.session.end_session()

    @property
    def size(self) -> int:
        """Bytes of memory used by changes, of all subscriptions."""
        size = 0
        for subscription in self._led.values():
            size += subscription.window.size
        return size

    @property
    def is_full(self) -> bool:
        """Return True if no more changes may be read."""
        return self.size >= self._options.buffer_bytes

    def report(self) -> dict[str, Any]:
        """Return the stored changes as `status` shows them."""
        return self._report.report(list(self._led.values()), self._removal.size, self.waits)

    def next_turn_time(self) -> float:
        """Return the monotonic time of the next turn with work, as far as known."""
        due = 0.0 if self._unfinished else math.inf
        for subscription in self._led.values():
            for partition in subscription.too_large:
                failed = partition.not_stored
                due = min(due, 0.0 if failed is None else failed.gate.opens_at)
        return max(due, self._gate.opens_at)

    def is_due(self, now: float) -> bool:
        """Return True if a turn is due, or changes must be stored or read back immediately."""
        if self._unfinished or now - self._judged_at >= _JUDGED_SECONDS:
            return True
        return any(each.stored_partitions or each.too_large or each.undeliverable for each in self._led.values())

    def turn(self, now: float, *, at_end: bool) -> None:
        """
        Do the due storing and reading back in bounded time.

        Args:
            at_end: True if the stream has no more changes now.

        Raises:
            LeaseLostError: the term has ended.
            MongoCeleryError: an error that waiting cannot fix.
        """
        if not self._gate.is_open(now) or self.session.operation_time is None:  # no image was read in it
            return
        self._unfinished = False
        is_urgent = any(each.too_large or each.unstored is not None for each in self._led.values())
        try:
            if now - self._swept_at >= _SWEEP_SECONDS:
                self._swept_at = now
                self._sweep()
            if is_urgent or now - self._judged_at >= _JUDGED_SECONDS:
                self._judged_at = now
                self._store_due(now, at_end=at_end)
            if not self._reading.read(self._led.values(), now):  # changes stored just now may run immediately
                self._unfinished = True
        except PyMongoError as error:
            self._note_failure("reading or removing stored changes", error)

    # -- storing -----------------------------------------------------------------------------------

    def store(self, subscription: Subscription, partition: Partition, reason: str) -> int:
        """
        Store a bulk of a partition's queue. The queue then holds no watermark, and the partition runs from stored
        changes.

        Args:
            reason: the reason, for people.

        Returns:
            The number of changes. 0 if nothing is left to store, or the limit does not allow it.

        Raises:
            LeaseLostError: the term has ended.
            PyMongoError: nothing has changed. Try again.
        """
        subscription.window.complete(partition.queue, partition.image.data)
        changes = self._next_bulk(subscription, partition, reason)
        if not changes:
            return 0
        size = sum(change.weight for change in changes)  # before they are done: then the window frees their bytes
        stored = [StoredChange(each.data, each.raw, each.hash, each.refusal, each.token) for each in changes]
        to = changes[-1].data
        self._removal.note(partition.partition_id, to, 0 if reason == AGAIN else size)
        self._state.backlog.insert(partition.partition_id, stored, self._version, self.session)
        if not self._state.partitions.mark_stored(partition.partition_id, self._version, to, reason, self.session):
            raise LeaseLostError
        subscription.note_stored(partition, to, len(stored))
        if reason == FULL:
            self._pressure.note_stored(size, self.size)
        if reason not in (UNDELIVERABLE, TOO_LARGE, DELAYED):  # the change was logged, runs immediately, or is on time
            self._report.note_begun(partition, reason)
        return len(stored)

    def _next_bulk(self, subscription: Subscription, partition: Partition, reason: str) -> list[PendingChange]:
        """Return the changes to store next. Above the limit, only the needed ones, or none."""
        if reason == TOO_LARGE:  # even if nothing is left of it
            subscription.too_large.discard(partition)
        first, room = partition.queue.first, self._options.spill_bytes - self._removal.size
        if first is None or (reason not in _NEEDED and first.weight > room):
            return []
        changes = partition.queue.head(_BULK_CHANGES, _BULK_BYTES)
        if reason == AGAIN:
            to = partition.backlog.to if partition.backlog is not None else ""
            return [change for change in changes if change.data <= to]
        if reason == TOO_LARGE:
            return list(takewhile(lambda change: len(change.raw) > self._options.max_message_bytes, changes))
        if reason == UNDELIVERABLE:
            needed = max((number for number, change in enumerate(changes, 1) if change.refusal), default=len(changes))
            return changes[:needed]
        sizes = accumulate(change.weight for change in changes)
        return [change for change, size in zip(changes, sizes, strict=True) if size <= room]

    def _store_due(self, now: float, *, at_end: bool) -> None:
        """Store due changes, one bulk after another, in bounded time."""
        until, waits = time.monotonic() + _TURN_SECONDS, ""
        idle = [] if at_end or not (self.is_full or self._pressure.is_full) else self._find_idle()
        self._pressure.observe(self.size, idle, now)
        for subscription, partition, due in self._find_due(now):
            reason = self._reason(subscription, partition, now) if due == FULL else due  # others may have made room
            try:
                while reason is not None and self.store(subscription, partition, reason):
                    partition.not_stored = None
                    if time.monotonic() > until:
                        self._judged_at, self._unfinished = 0.0, True
                        return
                    reason = self._reason(subscription, partition, now)
            except (PyMongoError, BSONError) as error:
                self._note_failure(f"storing changes of partition {partition.place}", error, partition)
                if not _concerns_one_partition(error):
                    return
                continue
            if reason is not None and reason not in _NEEDED and partition.queue:
                waits = waits or self._report.complain(partition, self._removal.size)
        self.waits, self._has_swept = waits, False

    def _find_due(self, now: float) -> list[tuple[Subscription, Partition, str]]:
        """Return the partitions to store now, with reasons: first those that cannot run otherwise, then the largest."""
        found = []
        for subscription in self._led.values():
            for partition in subscription.partitions.values():
                if not partition.queue.changes:
                    subscription.too_large.discard(partition)
                    partition.not_stored = None
                    continue
                if partition.not_stored is not None and not partition.not_stored.gate.is_open(now):
                    continue
                reason = self._reason(subscription, partition, now)
                if reason is None:
                    partition.not_stored = None
                else:
                    found.append((subscription, partition, reason))
        return sorted(found, key=lambda each: (each[2] in _NEEDED, each[1].queue.size), reverse=True)

    def _reason(self, subscription: Subscription, partition: Partition, now: float) -> str | None:
        """Return the reason to store a partition's changes now. None if there is none."""
        if not partition.won:
            return None
        if partition.must_store_again:
            return AGAIN
        if partition.must_store:
            return UNDELIVERABLE
        if partition in subscription.too_large:
            return TOO_LARGE
        why, oldest = self._lasting_block_reason(subscription, partition, now), subscription.window.oldest
        holds = oldest is not None and oldest.index == partition.index  # existing documents may be before it
        if why is None and holds and self._share_behind(subscription) >= AT_RISK:
            return OPLOG
        return FULL if why is None and self._pressure.must_store else why

    def _lasting_block_reason(self, subscription: Subscription, partition: Partition, now: float) -> str | None:
        """Return the reason of a block that has lasted for `spill_after`. Later changes are stored once a second."""
        why = partition.block_reason
        if why is None:
            return None
        if partition.blocked_since[0] != partition.image.committed:
            partition.blocked_since = partition.image.committed, now
        is_tail = partition.backlog is not None and len(partition.queue) < _BULK_CHANGES
        waits = is_tail and not (self._has_swept or self.is_full)
        seconds, first = now - partition.blocked_since[1], partition.queue.first
        if why == DELAYED and subscription.delay is not None and first is not None:
            partition.blocked_since = -1, 0.0  # a run after the delay is not slow yet
            seconds = subscription.delay.age(first.data, now)  # with a steady stream, no change blocks for long
            if partition.backlog is not None and subscription.delay.coalesces:
                seconds = math.inf  # a run has either stored changes or buffered ones, and must have a whole burst
        return why if seconds >= self._options.spill_after and not waits else None

    def _find_idle(self) -> list[Partition]:
        """
        Return the idle flowing partitions that may get the next changes: those that had work before, and all of a
        handler that never had any.
        """
        found: list[Partition] = []
        for subscription in self._led.values():
            if subscription.lost or subscription.is_draining:
                continue
            partitions = subscription.partitions.values()
            is_new = not any(each.image.committed or each.is_busy for each in partitions)
            free = (each for each in partitions if each.image.state == "flowing" and not each.is_busy)
            found += [each for each in free if is_new or each.image.committed]
        return found

    # -- failures and removals ---------------------------------------------------------------------

    def _sweep(self) -> None:
        """Request removals and clear passed marks, once a second."""
        partitions = [partition for each in self._led.values() for partition in each.partitions.values()]
        watermarks = {each.name: each.stored.data for each in self._led.values() if each.stored is not None}
        for partition in partitions:
            if partition.image.head is not None:  # the halted execution may have stored its change
                self._removal.note(partition.partition_id, token_data(partition.image.head["resumeToken"]))
        if self._removal.ask({each.partition_id: each.image for each in partitions}, watermarks):
            self._removing.wake()
        self._clear_marks(partitions)
        self._report.note_size(self._removal.size)
        self._has_swept = True

    def _clear_marks(self, partitions: Iterable[Partition]) -> None:
        """Clear passed marks, and log it."""
        passed = []
        for partition in partitions:
            if partition.won and partition.backlog is None:
                if partition.image.stored is not None:
                    passed.append(partition.partition_id)
                else:
                    self._report.note_ended(partition.partition_id)
        if passed:
            self._state.partitions.clear_stored(passed, self._version)

    def _note_failure(self, what: str, error: Exception, partition: Partition | None = None) -> None:
        """Try again after a pause. A lasting failure stops only the partition that it concerns."""
        text = str(explain_error(error, self._concern) or brief(error))
        if partition is not None:
            failed = partition.not_stored or NotStored(RetryGate(_PAUSES), "", datetime.now(UTC))
            failed.error = storable(text[:_REASON_CHARS])
            failed.gate.note_failure()
            partition.not_stored = failed
        elif isinstance(error, PyMongoError):
            raise_if_final(error, self._concern)
        if partition is None or self._throttle.may_log():  # thousands of partitions may fail, each separately
            more = self._throttle.describe_left_out()
            logger.warning(
                "%s has failed. The listener tries again: %s%s", what, text, more, extra={"event": "spill_failed"}
            )
        if partition is None or not _concerns_one_partition(error):
            self._gate.note_failure()


def _concerns_one_partition(error: Exception) -> bool:
    """Return True if a failure concerns one partition only: it is locked, or its changes cannot be stored."""
    return isinstance(error, BSONError) or (isinstance(error, OperationFailure) and not error.timeout)
