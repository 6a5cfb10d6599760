"""
Storing the changes of partitions that cannot run them soon, so that the watermark passes and the stream is read on.

The order of writes is what nothing is lost by:

1. the first changes of the partition's buffer are inserted, by majority; each is there afterwards, under this term.
2. the partition is marked up to the last of them, guarded by the epoch.
3. only then they are complete for the window, and a watermark behind them may be stored.

A crash between 1 and 2 leaves changes that nobody reads, between 2 and 3 changes that are read and stored again. Any
error means that nothing is complete; it is tried again after a pause. While the mark lies behind what is committed,
the partition runs from what is stored (`spilled`, `read_back`); when that is done the mark is cleared, and what is
committed is removed (`removal`).

When it is done, and for whom, says `shares`. `spill_bytes` bounds what is stored: at the bound nothing more is, and
the stream waits for those who hold it, loudly. The bound does not hold back what must be stored again before its
partition can go on: that makes room.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import UTC, datetime
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from bson.errors import BSONError
from pymongo.client_session import ClientSession
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery.bridge.listener.read_back import ReadBack
from mongo_celery.bridge.listener.removal import Removal
from mongo_celery.bridge.listener.shares import (
    AT_RISK,
    TAIL_BYTES,
    TAIL_CHANGES,
    Key,
    Share,
    Since,
    Starvation,
    reason_of,
    standing_of,
    victim,
)
from mongo_celery.bridge.listener.spilled import stored_change
from mongo_celery.bridge.listener.stock import LEVELS, Stock
from mongo_celery.bridge.listener.subscription import Subscription
from mongo_celery.bridge.listener.tracker import Tracker
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.state.partitions import MOVING
from mongo_celery.bridge.state.spill import Amount
from mongo_celery.errors import LeaseLostError
from mongo_celery.mongo.verdicts import Concern, brief, raise_if_final

if TYPE_CHECKING:
    from mongo_celery.bridge.state.partitions import Image
    from mongo_celery.bridge.state.store import Store
    from mongo_celery.bridge.window import PendingChange

logger = logging.getLogger("mongo_celery.listener")

_JUDGED_SECONDS = 0.25
_TURN_SECONDS = 0.2
_PAUSE_SECONDS = 1.0
_LONGEST_REST = 16.0
_SWEEP_SECONDS = 1.0
_COMPLAINT_SECONDS = 30.0
_BULK_BYTES = 4 << 20
_REPORTED_MAX = 50
_STARVING = "starving"
_NEVER = (0.0, 0.0)


class Spilling:
    """
    The stored changes of one term. Used by the leading thread.

    Args:
        store: the state database.
        options: of the bridge.
        concern: whom an error of the state database concerns.
        share_behind: which share of the oplog's window lies behind a subscription.

    Attributes:
        session: in which everything is read that decides what runs: images and stored changes.
        waits: why something is not stored that should be, as a sentence; empty while nothing waits.
    """

    def __init__(
        self, store: Store, options: BridgeOptions, concern: Concern, share_behind: Callable[[Subscription], float]
    ) -> None:
        self.session: ClientSession = store.start_session()
        self.waits = ""
        self._state = store
        self._options = options
        self._concern = concern
        self._share_behind = share_behind
        self._led: Mapping[str, Subscription] = {}
        self._version = 0
        self._share = 0
        self._stock = Stock(options.spill_bytes)
        self._starvation = Starvation(options.buffer_bytes)
        self._stands, self._first = Since(), Since()
        self._removal: Removal | None = None
        self._reading: ReadBack | None = None
        self._documents: dict[str, str | None] = {}
        self._additions: Counter[str] = Counter()
        self._empty: set[str] = set()
        self._halts: dict[str, int] = {}
        self._begun: dict[Key, tuple[str, datetime]] = {}
        self._rests: dict[Key, tuple[float, float]] = {}  # until when, and for how long
        self._victim: Key | None = None
        self._ready_at = self._judged_at = self._swept_at = 0.0
        self._complained_at = -math.inf
        self._unfinished = False

    # -- a term ------------------------------------------------------------------------------------

    def begin(self, subscriptions: Mapping[str, Subscription], version: int) -> None:
        """Take over what is stored of these subscriptions."""
        self._led, self._version = subscriptions, version
        partitions = sum(len(each.trackers) for each in subscriptions.values())
        self._share = self._options.buffer_bytes // (4 * max(partitions, 1))
        self._reading = ReadBack(self._state, self._options, self.session, self._share)
        self._removal = Removal(self._state.spill, version)
        for subscription in subscriptions.values():
            self.follow(subscription)
        self._removal.start()

    def follow(self, subscription: Subscription) -> None:
        """Take in what is stored of a subscription, which may be under a new layout."""
        for index in [index for name, index in self._begun if name == subscription.name]:
            del self._begun[subscription.name, index]
        for tracker in subscription.trackers.values():
            if tracker.image.spilled is not None:
                self.has_documents(tracker.partition_id)

    def close(self) -> None:
        """Remove nothing more, and end the session."""
        if self._removal is not None:
            self._removal.stop()
        self.session.end_session()

    def has_documents(self, partition_id: str, amount: Amount | None = None) -> None:
        """
        Something is stored of a partition, with or without a mark: it is removed when it is committed.

        Args:
            amount: what was added; None where that is not known, so that all of it is counted.
        """
        self._additions[partition_id] += 1
        self._empty.discard(partition_id)
        if amount is None:
            self._stock.uncount(partition_id)
            self._documents[partition_id] = None
        else:
            self._stock.added(partition_id, amount)
            self._documents.setdefault(partition_id, None)

    @property
    def size(self) -> int:
        """Bytes of memory that changes take, of all subscriptions."""
        return sum(subscription.size for subscription in self._led.values())

    @property
    def is_full(self) -> bool:
        """Whether no more may be read."""
        return any(each.is_full for each in self._led.values()) or self.size >= self._options.buffer_bytes

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
            is_full = self.size >= self._options.buffer_bytes
            self._unfinished = not self._reading.read(self._led.values(), now, is_full=is_full)
            if now - self._swept_at >= _SWEEP_SECONDS:
                self._swept_at = now
                self._sweep(now)
        except PyMongoError as error:
            self._failed("reading or clearing stored changes", error)
            return
        if now - self._judged_at >= _JUDGED_SECONDS:
            self._judged_at = now
            self._store_due(now, at_end=at_end)

    # -- storing -----------------------------------------------------------------------------------

    def store(self, subscription: Subscription, index: int, reason: str, *, bounded: bool = True) -> bool:
        """
        Store all that a partition has in the buffer; afterwards it holds no watermark, and runs from what is stored.

        Args:
            reason: why, for people.
            bounded: whether `spill_bytes` counts.

        Returns:
            False where the bound does not allow it: then some of it may be stored, and the rest is as before.

        Raises:
            LeaseLostError: the term has ended.
            PyMongoError: the rest is as before; to be tried again.
        """
        while subscription.window.depth(index):
            if not self._store(subscription, index, reason, bounded=bounded):
                return False
        return True

    def _store(self, subscription: Subscription, index: int, reason: str, *, bounded: bool) -> bool:
        """One bulk of it; False where the bound does not allow it."""
        tracker = subscription.trackers[index]
        subscription.window.complete(index, tracker.image.data)
        changes = self._bulk(subscription, index)
        if not changes:
            return True
        is_again = index in subscription.spilled and changes[-1].data <= subscription.spilled[index].to
        if bounded and not is_again:
            fitting = _fitting(changes, self._stock.room(tracker.partition_id))
            if not fitting:
                return False
            changes = fitting
        size = sum(change.weight for change in changes)  # before they are done: then the window lets go of their bytes
        stored = [stored_change(change) for change in changes]
        added = self._state.spill.insert(tracker.partition_id, stored, self._version, self.session)
        self.has_documents(tracker.partition_id, added)
        to = stored[-1].data
        if not self._state.partitions.mark_spilled(tracker.partition_id, self._version, to, reason, self.session):
            raise LeaseLostError
        # What was there before keeps its bytes: they are read back, since messages say by a digest what they refer to.
        subscription.spill(index, stored, self._share if added.count == len(stored) else 0)
        if reason == _STARVING:
            self._starvation.stored(size)
        self._say_begin(subscription, index, reason)
        return True

    def _bulk(self, subscription: Subscription, index: int) -> list[PendingChange]:
        """What is stored at once: what must be stored again is not mixed with what the bound may refuse."""
        changes = subscription.window.head(index, TAIL_CHANGES, _BULK_BYTES)
        spilled = subscription.spilled.get(index)
        if spilled is None:
            return changes
        again = [change for change in changes if change.data <= spilled.to]
        return again or changes

    def _store_due(self, now: float, *, at_end: bool) -> None:
        """Store what is due, one bulk after the other, within a bound of time; a failure ends the round."""
        until = time.monotonic() + _TURN_SECONDS
        resting = {key for key, (rests_until, _) in self._rests.items() if now < rests_until}
        parts = {key: part for key, part in self._parts(now).items() if key not in resting}
        fed = {(each.name, index) for each in self._led.values() for index in each.trackers if each.is_busy(index)}
        self._starvation.observe(fed, {} if at_end else self._idle(), self.size, now)
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
            self._store(self._led[name], index, reason, bounded=True)
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
                parts[name, each] = self._part(subscription, each, now)

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
        for part, reason in sorted(due, key=lambda each: (self._rests.get(each[0].key, _NEVER)[0], -each[0].size)):
            if self._has_room(part.key):
                self.waits = self._refuse(waiting) if waiting is not None else ""
                return part.key, reason
            waiting = waiting or part.key
        chosen = None
        if not at_end and starvation.starving():
            chosen = self._next_victim([part for part in parts if self._has_room(part.key)])
            without = victim(parts, self._options.buffer_bytes) if chosen is None else None
            waiting = waiting or (without.key if without is not None else None)
        self.waits = self._refuse(waiting) if waiting is not None else ""
        return (chosen, _STARVING) if chosen is not None else None

    def _next_victim(self, parts: Collection[Share]) -> Key | None:
        """The one of before as long as it has anything, then another one."""
        of_victim = next((part for part in parts if part.key == self._victim and part.count), None)
        found = of_victim or victim(parts, self._options.buffer_bytes)
        self._victim = found.key if found is not None else None
        return self._victim

    def _has_room(self, key: Key) -> bool:
        """Whether the bound allows the next change of a partition to be stored; it does what must be stored again."""
        subscription, index = self._led[key[0]], key[1]
        first, spilled = subscription.window.first(index), subscription.spilled.get(index)
        if first is None or (spilled is not None and first.data <= spilled.to):
            return True
        return self._stock.room(subscription.trackers[index].partition_id) >= first.weight

    def _idle(self) -> dict[Key, bool]:
        """Flowing partitions without anything to do; whether anything was ever committed there."""
        return {
            (subscription.name, index): tracker.image.committed > 0
            for subscription in self._led.values()
            if not subscription.lost
            for index, tracker in subscription.trackers.items()
            if tracker.image.state == "flowing" and not subscription.is_busy(index)
        }

    def _parts(self, now: float) -> dict[Key, Share]:
        """Those that have anything: of thousands of partitions most have not."""
        return {
            (subscription.name, index): self._part(subscription, index, now)
            for subscription in self._led.values()
            if subscription.admission.is_noted  # else a crash could leave a refused change here, and run it elsewhere
            for index, tracker in subscription.trackers.items()
            if subscription.has_next(index) and tracker.won
        }

    def _part(self, subscription: Subscription, index: int, now: float) -> Share:
        key, tracker = (subscription.name, index), subscription.trackers[index]
        first, oldest = subscription.window.first(index), subscription.window.oldest
        why = standing_of(tracker)
        stands = self._stands.seconds(key, tracker.image.committed, now) if why else 0.0
        if first is None:
            return Share(key, 0, 0)
        age = self._first.seconds(key, first.data, now)
        holds = oldest is not None and oldest.index == index
        is_spilled = index in subscription.spilled
        has_stood = (stands if is_spilled else min(stands, age)) >= self._options.spill_after
        size, count = subscription.window.size_of(index), subscription.window.depth(index)
        return Share(
            key,
            size,
            count,
            age=age,
            is_tail=count >= TAIL_CHANGES or size >= min(TAIL_BYTES, self._options.buffer_bytes // 8),
            holds=holds,
            stands=why if has_stood else None,
            spilled=is_spilled,
            blocks=subscription.is_blocked(index),
            at_risk=holds and self._share_behind(subscription) >= AT_RISK,
            refused=holds and subscription.is_full,
        )

    # -- clearing and removing ---------------------------------------------------------------------

    def _sweep(self, now: float) -> None:
        """Once a second: take in what was removed, ask for what is to be, and clear the marks that are passed."""
        self._take_in_removals()
        images: dict[str, Image] = {}
        for subscription in self._led.values():
            for tracker in subscription.trackers.values():
                images[tracker.partition_id] = tracker.image
                self._note_halt(tracker)
        for partition_id, removed_to in list(self._documents.items()):
            self._want(partition_id, images.get(partition_id), removed_to)
        for subscription in self._led.values():
            self._let_pass(subscription)
        self._clear()
        self._stock.observe(now)
        self._say_level()

    def _take_in_removals(self) -> None:
        assert self._removal is not None, "a term has begun"
        for finding in self._removal.findings():
            if finding.is_met:
                if finding.partition_id not in self._documents:  # to count reads all of it
                    self.has_documents(finding.partition_id)
            elif finding.amount is not None:
                self._stock.counted(finding.partition_id, finding.amount)
                if not finding.amount.count and finding.additions == self._additions[finding.partition_id]:
                    self._empty.add(finding.partition_id)
            else:
                self._stock.removed(finding.partition_id, finding.removed)

    def _let_pass(self, subscription: Subscription) -> None:
        """
        What is refused is to be read again once its cause is cured, while the oplog is sure to have it.

        Not where so much is refused that nothing more could be read, for anybody.
        """
        oldest = subscription.window.oldest
        if oldest is None or not subscription.window.is_held(oldest):
            return
        if self._share_behind(subscription) < AT_RISK and not subscription.is_full:
            return
        subscription.window.let_pass()
        logger.warning(
            "the watermark of handler %s passes changes that are refused, since the oplog will not keep them, or there "
            "are too many. They are stored with their reason, and no longer brought back without it by a restart",
            subscription.name,
            extra={"event": "refused_passed", "subscription": subscription.name},
        )

    def _note_halt(self, tracker: Tracker) -> None:
        """An execution that halts stores its change."""
        halted_at = tracker.image.committed if tracker.image.state == "halted" else None
        if halted_at is None or self._halts.get(tracker.partition_id) != halted_at:
            self._halts.pop(tracker.partition_id, None)
        if halted_at is not None and tracker.partition_id not in self._halts:
            self._halts[tracker.partition_id] = halted_at
            self.has_documents(tracker.partition_id)

    def _want(self, partition_id: str, image: Image | None, removed_to: str | None) -> None:
        """
        Ask for a removal where a partition has moved; let go of one of which nothing is left.

        Nothing else would remove what is forgotten here. So only a count says that nothing is left, and one that was
        asked for after the last addition: any other number may miss what was stored meanwhile.
        """
        assert self._removal is not None, "a term has begun"
        committed = image.data if image is not None else ""
        is_counted = self._stock.is_counted(partition_id)
        if is_counted and not self._stock.of(partition_id).count and (image is None or image.spilled is None):
            if partition_id in self._empty:
                self._empty.discard(partition_id)
                del self._documents[partition_id], self._additions[partition_id]
                return
            self._stock.uncount(partition_id)
            is_counted, removed_to = False, None
        if removed_to is None or committed != removed_to:
            self._documents[partition_id] = committed
            additions = None if is_counted else self._additions[partition_id]
            if additions is not None:
                self._stock.asked(partition_id)
            self._removal.want(partition_id, committed, additions)

    def _clear(self) -> None:
        """Clear the marks that are passed, and say where they are cleared."""
        passed = []
        for subscription in self._led.values():
            for index, tracker in subscription.trackers.items():
                key = subscription.name, index
                if not tracker.won or index in subscription.spilled:
                    continue
                if tracker.image.spilled is not None:
                    passed.append(tracker.partition_id)
                elif self._begun.pop(key, None) is not None:
                    logger.info(
                        "what was stored of partition %s is done: it runs from the stream again",
                        tracker.partition_id,
                        extra={"event": "spill_ended", "partition": tracker.partition_id},
                    )
        if passed:
            self._state.partitions.clear_spilled(passed, self._version)

    # -- what is said ------------------------------------------------------------------------------

    def _say_begin(self, subscription: Subscription, index: int, reason: str) -> None:
        key, tracker = (subscription.name, index), subscription.trackers[index]
        if key in self._begun or tracker.image.spilled is not None:
            self._begun.setdefault(key, (reason, datetime.now(UTC)))
            return
        self._begun[key] = reason, datetime.now(UTC)
        sentence = "changes of partition %s are stored in the state database from here on (%s), so that others go on"
        extra = {"partition": tracker.partition_id, "reason": reason}
        if tracker.image.state not in {"flowing", MOVING}:
            logger.warning(sentence, tracker.partition_id, reason, extra={"event": "spill_begun", **extra})
        else:
            logger.info(sentence, tracker.partition_id, reason, extra={"event": "spill_begun", **extra})

    def _say_level(self) -> None:
        level = self._stock.reached()
        if level is None:
            return
        lasts, share = self._stock.lasts, f"{level} % of spill_bytes ({self._stock.total.size} bytes)"
        logger.log(
            logging.ERROR if level > LEVELS[0] else logging.WARNING,
            "changes that are stored have reached %s; %s. At the bound nothing more is stored, and the stream waits "
            "for what stands: resume, retry or skip it (`changes status` names it), or raise spill_bytes",
            share,
            f"at the present rate the rest lasts for {lasts:.0f} s" if lasts is not None else "they do not grow now",
            extra={"event": "spill_bound", "percent": level, "lasts_seconds": lasts},
        )

    def _refuse(self, key: Key) -> str:
        """The sentence about a change that the bound keeps from being stored; logged now and then."""
        tracker, first = self._led[key[0]].trackers[key[1]], self._led[key[0]].window.first(key[1])
        size = first.weight if first is not None else 0
        sentence = (
            f"the next {size} bytes of changes of partition {tracker.partition_id} cannot be stored: "
            f"{self._stock.objection(tracker.partition_id)}. When the buffer is full the stream waits for them: "
            "resume, retry or skip what stands (`changes status` names it), or raise spill_bytes"
        )
        now = time.monotonic()
        if now - self._complained_at >= _COMPLAINT_SECONDS:
            self._complained_at = now
            extra = {"partition": tracker.partition_id, "bytes": size}
            logger.error("%s", sentence, extra={"event": "spill_full", **extra})
        return sentence

    def _failed(self, what: str, error: Exception, *, is_of_one: bool = False) -> None:
        if isinstance(error, PyMongoError):
            raise_if_final(error, self._concern)
        logger.warning("%s failed, trying again: %s", what, brief(error), extra={"event": "spill_failed"})
        if not is_of_one:
            self._ready_at = time.monotonic() + _PAUSE_SECONDS  # after the call, which may have taken longer than it

    def report(self) -> dict[str, Any]:
        """What `status` shows of stored changes."""
        led = {
            tracker.partition_id: (subscription, index)
            for subscription in list(self._led.values())
            for index, tracker in subscription.trackers.items()
            if index in subscription.spilled
        }
        total = self._stock.total
        return {
            "spillLimit": self._options.spill_bytes,
            "spilledCount": total.count,
            "spilledBytes": total.size,
            "spillBytesPerSecond": _rounded(self._stock.growth),
            "spillWaits": self.waits or None,
            "spilled": [{**row, **self._of(*led[row["partition"]])} for row in self._largest(led)],
        }

    def _largest(self, partition_ids: Iterable[str]) -> list[dict[str, Any]]:
        return self._stock.largest(partition_ids, _REPORTED_MAX)

    def _of(self, subscription: Subscription, index: int) -> dict[str, Any]:
        marked = subscription.trackers[index].image.spilled or {}
        reason, since = self._begun.get((subscription.name, index), (None, None))
        spilled = subscription.spilled.get(index)
        return {
            "since": marked.get("since", since),
            "reason": marked.get("reason", reason),
            "missing": spilled is not None and spilled.missing,
        }


def _fitting(changes: list[PendingChange], room: int) -> list[PendingChange]:
    """The longest prefix that has room."""
    sizes = accumulate(change.weight for change in changes)
    return [change for change, size in zip(changes, sizes, strict=True) if size <= room]


def _is_of_one(error: Exception) -> bool:
    """Whether a failure says nothing of other partitions: this one is locked, or its changes cannot be stored."""
    return isinstance(error, BSONError) or (isinstance(error, OperationFailure) and not error.timeout)


def _rounded(number: float) -> int:
    """Two digits: each report that differs from the last is written."""
    return int(float(f"{number:.2g}"))
