"""
Storing the changes of partitions that cannot run them soon, so that the watermark passes and the stream is read on.

The order of writes is what nothing is lost by:

1. the first changes of the partition's buffer are inserted, by majority; each is there afterwards, under this term.
2. the partition is marked up to the last of them, guarded by the epoch.
3. only then they are complete for the window, and a watermark behind them may be stored.

A crash between 1 and 2 leaves changes that nobody reads, between 2 and 3 changes that are read and stored again. Any
error means that nothing is complete; it is tried again after a pause. While the mark lies behind what is committed,
the partition runs from what is stored (`spilled`, `read_back`); when that is done the mark is cleared, and what is
committed is removed (`inventory`, `removal`).

When it is done, and for whom, `shares` decides on what the `buffer` measures. `spill_bytes` bounds what is stored: at
the bound nothing more is, and the stream waits for those who hold it, loudly. The bound does not hold back what must be
stored again before its partition can go on: that makes room. Nor does it hold back an undeliverable change and what is
before it in its partition: else all partitions of its handler would wait. What is said stands in `spill_report`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from bson.errors import BSONError
from pymongo.client_session import ClientSession
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery.bridge.listener.buffer import Buffer
from mongo_celery.bridge.listener.inventory import Inventory
from mongo_celery.bridge.listener.read_back import ReadBack
from mongo_celery.bridge.listener.shares import TAIL_CHANGES, UNDELIVERABLE, Key, Share, Starvation, reason_of, victim
from mongo_celery.bridge.listener.spill_report import SpillReport
from mongo_celery.bridge.listener.spilled import stored_change
from mongo_celery.bridge.listener.subscription import Subscription
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.state.spill import Amount
from mongo_celery.command_line import ANY_APP, CommandLine
from mongo_celery.errors import LeaseLostError
from mongo_celery.mongo.verdicts import Concern, brief, raise_if_final

if TYPE_CHECKING:
    from mongo_celery.bridge.listener.partition import Partition
    from mongo_celery.bridge.state.store import Store
    from mongo_celery.bridge.window import PendingChange

logger = logging.getLogger("mongo_celery.listener")

_JUDGED_SECONDS = 0.25
_TURN_SECONDS = 0.2
_PAUSE_SECONDS = 1.0
_LONGEST_REST = 16.0
_SWEEP_SECONDS = 1.0
_BULK_BYTES = 4 << 20
_STARVING = "starving"
_NEVER = (0.0, 0.0)


class Spilling:
    """
    The stored changes of one term. Used by the leading thread; `report` by the one that renews the lease, too.

    Args:
        store: the state database.
        options: of the bridge.
        concern: whom an error of the state database concerns.
        share_behind: which share of the oplog's window lies behind a subscription.
        line: how commands about the bridge begin.

    Attributes:
        session: in which everything is read that decides what runs: images and stored changes.
        waits: why something is not stored that should be, as a sentence; empty while nothing waits.
    """

    def __init__(
        self,
        store: Store,
        options: BridgeOptions,
        concern: Concern,
        share_behind: Callable[[Subscription], float],
        line: CommandLine = ANY_APP,
    ) -> None:
        self.session: ClientSession = store.start_session()
        self.waits = ""
        self._state = store
        self._options = options
        self._concern = concern
        self._led: Mapping[str, Subscription] = {}
        self._version = 0
        self._share = 0
        self._buffer = Buffer(options, share_behind)
        self._inventory = Inventory(store.spill, options.spill_bytes)
        self._stock = self._inventory.stock
        self._said = SpillReport(self._stock, line)
        self._starvation = Starvation(options.buffer_bytes)
        self._reading: ReadBack | None = None
        self._rests: dict[Key, tuple[float, float]] = {}  # until when, and for how long
        self._victim: Key | None = None
        self._ready_at = self._judged_at = self._swept_at = 0.0
        self._unfinished = False

    # -- a term ------------------------------------------------------------------------------------

    def begin(self, subscriptions: Mapping[str, Subscription], version: int) -> None:
        """Take over what is stored of these subscriptions."""
        self._led = self._buffer.subscriptions = subscriptions
        self._version = version
        partitions = sum(len(each.partitions) for each in subscriptions.values())
        self._share = self._options.buffer_bytes // (4 * max(partitions, 1))
        self._reading = ReadBack(self._state, self._options, self.session, self._share)
        for subscription in subscriptions.values():
            self.follow(subscription)
        self._inventory.begin(version)

    def follow(self, subscription: Subscription) -> None:
        """Take in what is stored of a subscription, which may have new partitions."""
        self._said.forget(subscription)
        for partition in subscription.partitions.values():
            if partition.image.spilled is not None:
                self.has_documents(partition.partition_id)

    def close(self) -> None:
        """Remove nothing more, and end the session."""
        self._inventory.close()
        self.session.end_session()

    def has_documents(self, partition_id: str, amount: Amount | None = None) -> None:
        """Something is stored of a partition. See `Inventory.has_documents`."""
        self._inventory.has_documents(partition_id, amount)

    @property
    def size(self) -> int:
        """Bytes of memory that changes take, of all subscriptions."""
        return self._buffer.size

    @property
    def is_full(self) -> bool:
        """Whether no more may be read."""
        return not self._buffer.has_room

    def report(self) -> dict[str, Any]:
        """What `status` shows of stored changes."""
        return self._said.report(list(self._led.values()), self.waits)

    def next_at(self) -> float:
        """Monotonic time of the next turn that has something to do, as far as that is known."""
        return 0.0 if self._unfinished else math.inf

    def turn(self, now: float, *, at_end: bool) -> None:
        """
        Do what is due, within a bound of time.

        Args:
            at_end: whether the stream has no more to give at this moment.

        Raises:
            LeaseLostError: the term has ended.
            MongoCeleryError: something that waiting cannot cure.
        """
        if now < self._ready_at or self.session.operation_time is None:  # no image was seen in it
            return
        self._unfinished = False
        try:
            assert self._reading is not None, "a term has begun"
            is_full = not self._buffer.has_room
            self._unfinished = not self._reading.read(self._led.values(), now, is_full=is_full)
            if now - self._swept_at >= _SWEEP_SECONDS:
                self._swept_at = now
                self._sweep(now)
        except PyMongoError as error:
            self._failed("reading or clearing stored changes", error)
            return
        if now - self._judged_at >= _JUDGED_SECONDS or any(each.unstored is not None for each in self._led.values()):
            self._judged_at = now
            self._store_due(now, at_end=at_end)

    # -- storing -----------------------------------------------------------------------------------

    def store(self, subscription: Subscription, index: int, reason: str) -> bool:
        """
        Store a bulk of what a partition has in the buffer; it holds no watermark then, and runs from what is stored.

        Args:
            reason: why, for people.

        Returns:
            False where the bound does not allow it: then all is as before.

        Raises:
            LeaseLostError: the term has ended.
            PyMongoError: all is as before; to be tried again.
        """
        partition = subscription.partitions[index]
        subscription.window.complete(partition.queue, partition.image.data)
        changes = _next_bulk(partition)
        if not changes:
            return True
        is_again = partition.spilled is not None and changes[-1].data <= partition.spilled.to
        if not is_again:
            fitting = _fitting(changes, self._stock.room(partition.partition_id), _needed(changes, reason))
            if not fitting:
                return False
            changes = fitting
        size = sum(change.weight for change in changes)  # before they are done: then the window lets go of their bytes
        stored = [stored_change(change) for change in changes]
        try:
            added = self._state.spill.insert(partition.partition_id, stored, self._version, self.session)
        except (PyMongoError, BSONError):
            self.has_documents(partition.partition_id)  # some of them may be there: count anew
            raise
        self.has_documents(partition.partition_id, added)
        to = stored[-1].data
        if not self._state.partitions.mark_spilled(partition.partition_id, self._version, to, reason, self.session):
            raise LeaseLostError
        # What was there before keeps its bytes: they are read back, since messages say by a digest what they refer to.
        subscription.spill(partition, stored, self._share if added.count == len(stored) else 0)
        if reason == _STARVING:
            self._starvation.stored(size)
        if reason != UNDELIVERABLE:  # the change itself was logged
            self._said.begun(subscription, index, reason)
        return True

    def _store_due(self, now: float, *, at_end: bool) -> None:
        """Store what is due, one bulk after the other, within a bound of time; a failure ends the round."""
        until = time.monotonic() + _TURN_SECONDS
        resting = {key for key, (rests_until, _) in self._rests.items() if now < rests_until}
        parts = {key: part for key, part in self._buffer.shares(now).items() if key not in resting}
        self._starvation.observe(self._buffer.fed(), {} if at_end else self._buffer.idle(), self.size, now)
        while (chosen := self._choose(parts.values(), at_end=at_end)) is not None:
            key, reason = chosen
            if not self._try_to_store(key, reason):
                return
            if key in self._rests:
                del parts[key]
            if time.monotonic() > until:
                self._judged_at, self._unfinished = 0.0, True
                return
            self._judge_again(key, parts, now)
            self._starvation.fill(self.size, now)

    def _try_to_store(self, key: Key, reason: str) -> bool:
        """Store a bulk of a partition; False after a failure that concerns more than this one, which rests then."""
        name, index = key
        try:
            self.store(self._led[name], index, reason)
        except (PyMongoError, BSONError) as error:
            self._rest(key)
            self._failed(f"storing changes of partition {name}/{index}", error, is_of_one=_is_of_one(error))
            return _is_of_one(error)
        self._rests.pop(key, None)
        return True

    def _judge_again(self, key: Key, parts: dict[Key, Share], now: float) -> None:
        """What has changed after a bulk was stored: its partition, and the one that holds the watermark now."""
        (name, index), subscription = key, self._led[key[0]]
        oldest = subscription.window.oldest
        for each in {index, oldest.index if oldest is not None else index}:
            if (name, each) in parts:
                parts[name, each] = self._buffer.share(subscription, each, now)

    def _rest(self, key: Key) -> None:
        """A partition that could not be stored is tried again after a pause, each twice as long as the one before."""
        pause = min(max(2 * self._rests.get(key, _NEVER)[1], _PAUSE_SECONDS), _LONGEST_REST)
        self._rests[key] = time.monotonic() + pause, pause

    def _choose(self, parts: Collection[Share], *, at_end: bool) -> tuple[Key, str] | None:
        """What is stored next, and why. What has no room is left out, and told."""
        starvation, waiting = self._starvation, None
        eager = starvation.is_eager and 4 * self.size >= self._options.buffer_bytes
        found = ((part, reason_of(part, eager=eager, pressed=starvation.is_pressed)) for part in parts)
        due = [(part, reason) for part, reason in found if reason is not None]
        for part, reason in sorted(due, key=self._urgency):
            if reason == UNDELIVERABLE or self._has_room(part.key):
                self._wait_for_room(waiting)
                return part.key, reason
            waiting = waiting or part.key
        chosen = None
        if not at_end and starvation.starving():
            chosen = self._next_victim([part for part in parts if self._has_room(part.key)])
            without = victim(parts, self._options.buffer_bytes) if chosen is None else None
            waiting = waiting or (without.key if without is not None else None)
        self._wait_for_room(waiting)
        return (chosen, _STARVING) if chosen is not None else None

    def _urgency(self, due: tuple[Share, str]) -> tuple[bool, float, int]:
        """Sort first what keeps its handler from running, then what has failed least, then the largest."""
        part, _ = due
        return not part.undeliverable, self._rests.get(part.key, _NEVER)[0], -part.size

    def _wait_for_room(self, key: Key | None) -> None:
        """Tell of a partition whose next change has no room; of none, where all have."""
        self.waits = self._said.no_room(self._led[key[0]], key[1]) if key is not None else ""

    def _next_victim(self, parts: Collection[Share]) -> Key | None:
        """The one of before as long as it has anything, then another one."""
        of_victim = next((part for part in parts if part.key == self._victim and part.count), None)
        found = of_victim or victim(parts, self._options.buffer_bytes)
        self._victim = found.key if found is not None else None
        return self._victim

    def _has_room(self, key: Key) -> bool:
        """Whether the bound allows the next change of a partition to be stored; it does what must be stored again."""
        partition = self._led[key[0]].partitions[key[1]]
        first, spilled = partition.queue.first, partition.spilled
        if first is None or (spilled is not None and first.data <= spilled.to):
            return True
        return self._stock.room(partition.partition_id) >= first.weight

    # -- clearing and removing ---------------------------------------------------------------------

    def _sweep(self, now: float) -> None:
        """Once a second: take in what was removed, ask for what is to be, and clear the marks that are passed."""
        partitions = (partition for each in self._led.values() for partition in each.partitions.values())
        watermarks = {each.name: each.stored.data for each in self._led.values() if each.stored is not None}
        self._inventory.sweep({partition.partition_id: partition.image for partition in partitions}, watermarks)
        self._clear()
        self._stock.observe(now)
        self._said.level()

    def _clear(self) -> None:
        """Clear the marks that are passed, and say where they are cleared."""
        passed = []
        for subscription in self._led.values():
            for index, partition in subscription.partitions.items():
                if not partition.won or partition.spilled is not None:
                    continue
                if partition.image.spilled is not None:
                    passed.append(partition.partition_id)
                else:
                    self._said.ended(subscription, index)
        if passed:
            self._state.partitions.clear_spilled(passed, self._version)

    def _failed(self, what: str, error: Exception, *, is_of_one: bool = False) -> None:
        if isinstance(error, PyMongoError):
            raise_if_final(error, self._concern)
        logger.warning("%s failed, trying again: %s", what, brief(error), extra={"event": "spill_failed"})
        if not is_of_one:
            self._ready_at = time.monotonic() + _PAUSE_SECONDS  # after the call, which may have taken longer than it


def _next_bulk(partition: Partition) -> list[PendingChange]:
    """Return what is stored next: what must be stored again is not mixed with what the bound may refuse."""
    changes, spilled = partition.queue.head(TAIL_CHANGES, _BULK_BYTES), partition.spilled
    if spilled is None:
        return changes
    again = [change for change in changes if change.data <= spilled.to]
    return again or changes


def _needed(changes: list[PendingChange], reason: str) -> int:
    """Return the number of these that are stored beyond the bound: undeliverable ones, and those before them."""
    if reason != UNDELIVERABLE:
        return 0
    return max((number for number, change in enumerate(changes, 1) if change.refusal), default=len(changes))


def _fitting(changes: list[PendingChange], room: int, needed: int) -> list[PendingChange]:
    """The longest prefix that has room, or is needed."""
    sizes = accumulate(change.weight for change in changes)
    return [
        change
        for number, (change, size) in enumerate(zip(changes, sizes, strict=True))
        if size <= room or number < needed
    ]


def _is_of_one(error: Exception) -> bool:
    """Whether a failure says nothing of other partitions: this one is locked, or its changes cannot be stored."""
    return isinstance(error, BSONError) or (isinstance(error, OperationFailure) and not error.timeout)
