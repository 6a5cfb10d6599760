"""
Polling of partitions: when to read, which ones, and what to do with the results.

An execution's effects show only in its partition, so partitions are read repeatedly while runs are in flight. There are
two kinds of reading:

- The **sweep** reads all of them once a second. It is sufficient: it shows every effect of every process.
- A **poll** reads those with a run in flight, more often. The server omits partitions without relevant news: an
  unclaimed run with an unchanged fencing token (every claim, and every command that moves a position, raises it), and a
  running one with an unchanged claim and nothing handled. That needs no clock, no order of writes, and no extra data in
  a write: each partition is compared with its last observed state. So no news is missed, even if a majority has it
  late.

Some news comes without a write, or with a write that is not compared: a claim lapses, a list moves its position under
its claim, a person pauses unclaimed runs. The sweep sees it at most a second later.

While many runs are in flight, their queues keep workers busy, and an immediate answer gains nothing. So the pause
between polls is then a share of the time from dispatch to end of the fastest runs, within bounds.

Positions are written with w:1. On a set of one member, a majority read shows such a write when the journal is flushed:
by the next majority write, which is frequent under load, otherwise up to a tenth of a second later. So if a poll found
nothing and a claimed run may have ended, the next poll flushes the journal first. After a second without news it does
not, because a tenth of a second is then short.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pymongo.errors import PyMongoError

from mongo_celery.bridge.listener.fairness import make_fairness
from mongo_celery.bridge.listener.partition import Partition, Step
from mongo_celery.bridge.state.claims import name_place
from mongo_celery.errors import LeaseLostError
from mongo_celery.findings import list_some
from mongo_celery.mongo.opening import renew_connections
from mongo_celery.mongo.verdicts import brief, raise_if_final

if TYPE_CHECKING:
    from pymongo.client_session import ClientSession

    from mongo_celery.bridge.listener.activity import Activity
    from mongo_celery.bridge.listener.subscription import Subscription
    from mongo_celery.bridge.state.partitions import Image, Seen, Swept
    from mongo_celery.bridge.state.store import Store
    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.listener")

SWEEP_SECONDS = 1.0
BUSY_SECONDS = 0.03
_LONGEST_PAUSE = 0.25
_LONGEST_BUSY_PAUSE = 0.1  # `fairness` needs to know which runs wait this long
_SHORTEST_PAUSE = 0.005
_BUSY = 3
_SHARE = 4
"""The pause after a poll is this fraction of a run's time."""

_WEIGHT = 0.2
_FLUSHING_SECONDS = 1.0
_NAMED = 10
_LOCKED_PAUSE = 0.5  # tried with each sweep, unless a slow server has used most of the time between two


class PollTimes:
    """
    The poll times of a term. The class is pure.

    Attributes:
        moved_at: monotonic time when a run was last sent, or seen to have ended.
        polled_at, swept_at: times of the last poll, and of the last sweep.
    """

    def __init__(self) -> None:
        self.moved_at = 0.0
        self.polled_at = self.swept_at = 0.0
        self._taken: dict[str, float] = {}

    def note_end(self, subscription: str, sent_at: float | None, now: float) -> None:
        """Note the observed end of a run, and its sending time if this term sent it."""
        self.moved_at = now
        if sent_at is not None:
            before = self._taken.get(subscription, now - sent_at)
            self._taken[subscription] = before + _WEIGHT * (now - sent_at - before)

    def next_poll_time(self, in_flight: Mapping[str, int]) -> float:
        """
        Return the monotonic time of the next poll for these numbers of runs in flight by handler. None
        without any.
        """
        sweep_at = self.swept_at + SWEEP_SECONDS
        return min(sweep_at, self.polled_at + self._pause(in_flight)) if in_flight else sweep_at

    def _pause(self, in_flight: Mapping[str, int]) -> float:
        """
        Return a short pause after news, and a longer one while handlers are working, up to a quarter of
        their time.
        """
        least = _SHORTEST_PAUSE
        if sum(in_flight.values()) >= _BUSY:
            quickest = min(self._taken.get(name, 0.0) for name in in_flight)
            least = min(max(quickest / _SHARE, BUSY_SECONDS), _LONGEST_BUSY_PAUSE)
        return min(max((self.polled_at - self.moved_at) / 3, least), _LONGEST_PAUSE)

    def may_be_unflushed(self, seen: Iterable[Seen | None], now: float) -> bool:
        """Return True if the last poll found nothing, and runs that were claimed before it may have ended."""
        if self.moved_at >= self.polled_at or now - self.moved_at > _FLUSHING_SECONDS:
            return False
        return any(each is None or each.claimed for each in seen)


class LockedPartitions:
    """
    The partitions that a take-over could not win, because an abandoned transaction has written them.

    Usually its client died in a transactional handler, or while moving a change to the dead letters. Such a transaction
    is ended when the claim has lapsed. The server ends others after `transactionLifetimeLimitSeconds`. Until then the
    partition keeps its older term. Messages of that term may still claim and commit there, in order, as before the
    take-over. This term dispatches nothing there and counts the partition as in flight, so watermarks pass it only by
    its commits.

    Args:
        store: the state of the bridge.
        version: the number of this term.
        partitions: all partitions of this term.
    """

    def __init__(self, store: Store, version: int, partitions: Iterable[Partition]) -> None:
        self._store = store
        self._version = version
        self._locked = [partition for partition in partitions if not partition.won]
        self._tried_at = time.monotonic()
        if self._locked:
            logger.warning(
                "open transactions lock %d partitions: %s. Their changes wait, and other partitions "
                "continue. Nothing needs to be done: MongoDB ends them after transactionLifetimeLimitSeconds",
                len(self._locked),
                list_some([*map(name_place, self.names)], _NAMED),
                extra={"event": "partitions_locked", "count": len(self._locked)},
            )

    @property
    def names(self) -> list[str]:
        """Return the `_id`s of the partitions that are not won yet."""
        return [partition.partition_id for partition in self._locked]

    def win(self, now: float) -> list[Image]:
        """Try again to take over the locked partitions, without waiting for locks. Return their images."""
        self._locked = [partition for partition in self._locked if not partition.won]
        if not self._locked or now - self._tried_at < _LOCKED_PAUSE:
            return []
        try:
            self._store.claims.end_transactions(self.names)
            images = self._store.partitions.win(self.names, self._version)
        finally:
            self._tried_at = time.monotonic()  # a slow server may have taken longer than the pause
        won = [f"{image.subscription}/{image.index}" for image in images if image.term == self._version]
        if won:
            logger.info(
                "%d partitions are no longer locked and continue: %s",
                len(won),
                list_some(won, _NAMED),
                extra={"event": "partitions_unlocked", "count": len(won)},
            )
        return images


class PartitionPoller:
    """
    The polls of one term. Used by the leading thread.

    Args:
        wiring: the wiring of the bridge.
        session: the session for all reads that decide what may run.
        led: the subscriptions of this term.
        version: the number of this term.
        activity: the counters of this process.

    Attributes:
        fairness: the fairness of this term. It gets the durations of runs.
        times: the times of the polls.
        due_at: monotonic time of the next poll.
        locked: partitions that the take-over could not win.
        is_blind: True if the last poll failed.
        began_at, read_at: monotonic times of the last answered poll.
    """

    def __init__(
        self,
        wiring: Wiring,
        session: ClientSession,
        led: Mapping[str, Subscription],
        version: int,
        activity: Activity,
    ) -> None:
        self.times = PollTimes()
        self.due_at = 0.0
        partitions = [partition for each in led.values() for partition in each.partitions.values()]
        self.locked = LockedPartitions(wiring.store, version, partitions)
        self.is_blind = False
        self.began_at = self.read_at = 0.0
        self.fairness = make_fairness(led)
        self._known: Swept = {}
        self._wiring = wiring
        self._partitions = wiring.store.partitions
        self._version = version
        self._session = session
        self._led = led
        self._activity = activity

    def plan(self) -> None:
        """Compute the time of the next poll."""
        in_flight: dict[str, int] = {}
        for name, led in self._led.items():
            for partition in led.partitions.values():
                if partition.in_flight is not None:
                    in_flight[name] = in_flight.get(name, 0) + 1
        self.due_at = self.times.next_poll_time(in_flight)

    def note_dispatch(self) -> None:
        """Note that runs were sent, so that they are polled soon."""
        self.times.moved_at = time.monotonic()
        self.plan()

    def sweep_now(self) -> None:
        """Make the next poll read all partitions."""
        self.times.swept_at = self.due_at = -math.inf

    def poll(self, now: float, reopenings: int) -> bool:
        """
        Read partitions, all of them if a sweep is due, and take in the results.

        Returns:
            False if they could not be read.

        Raises:
            LeaseLostError: another listener leads.
            MongoCeleryError: an error that waiting cannot fix.
        """
        began_at = time.monotonic()
        try:
            if now - self.times.swept_at >= SWEEP_SECONDS:
                self._win_locked(now)
                images = self._sweep(now, reopenings)
            else:
                images = self._read_changed(now)
            self.is_blind = False
            self.began_at, self.read_at = began_at, time.monotonic()
            late = self._observe(images, self.read_at)
            if late:
                self._commit_late(late)
        except PyMongoError as error:
            self.is_blind = True
            self._note_failure(error)
            self.times.polled_at = self.times.swept_at = now
            return False
        return True

    def _sweep(self, now: float, reopenings: int) -> list[Image]:
        self._void_orphans()
        self.times.swept_at = self.times.polled_at = now
        partitionings = {name: led.plan.layout.term for name, led in self._led.items()}
        self._known = self._partitions.sweep(partitionings, self._session, self._known)
        for subscription in self._led.values():
            self._activity.of(subscription.name).add_counts(subscription.counted)
        self._activity.note_sweep(reopenings)
        return [image for images in self._known.values() for image in images.values()]

    def _void_orphans(self) -> None:
        """End what may still run in partitions that hold a slot of a limited handler, but wait for something else."""
        orphans = [each for led in self._led.values() for each in led.list_orphans()]
        if orphans:
            self._wiring.store.claims.void(
                self._version, {each.partition_id: each.image.fencing_token for each in orphans}
            )
        for each in orphans:
            each.note_voided()

    def _read_changed(self, now: float) -> list[Image]:
        """Read the partitions with a run in flight and news in the server."""
        times = self.times
        seen = {each.partition_id: each.seen for led in self._led.values() for each in led.in_flight}
        if times.may_be_unflushed(seen.values(), now):
            with contextlib.suppress(PyMongoError):  # the poll reports errors
                self._partitions.flush()
        times.polled_at = now
        return self._partitions.list_changed(seen, self._session)

    def _observe(self, images: Iterable[Image], now: float) -> list[Image]:
        """Take in images. Return those of partitions to commit."""
        late = []
        for image in images:
            subscription = self._led[image.subscription]
            partition = subscription.partitions.get(image.index)
            if partition is None:  # it was read before its handler was repartitioned
                continue
            if partition.is_unchanged(image):
                partition.image = image  # the next comparison is one of identity
                continue
            if self._observe_partition(subscription, partition, image, now) is Step.COMMIT:
                late.append(image)
        return late

    def _observe_partition(self, subscription: Subscription, partition: Partition, image: Image, now: float) -> Step:
        self._activity.of(image.subscription).observe(partition, image, now)
        run = partition.in_flight
        is_held = run is not None and run.left_at is None
        step = subscription.observe(image, now)
        if step is Step.SUPERSEDED:
            raise LeaseLostError
        if is_held and run is not None and run.left_at is not None and run.taken_at is not None:
            self.fairness.note_run(image.subscription, run.left_at - run.taken_at)
        if step is Step.ENDED:
            self.times.note_end(image.subscription, run.sent_at if run is not None else None, now)
        return step

    def _commit_late(self, images: Sequence[Image]) -> None:
        """Commit handled runs with late commit messages, with one command for all."""
        heads = {
            self._led[image.subscription].partitions[image.index].partition_id: image.committed + 1 for image in images
        }
        logger.info(
            "the listener commits partitions %s, because their commit messages are late",
            list_some([*map(name_place, heads)], _NAMED),
            extra={"event": "commit_late"},
        )
        self._wiring.store.claims.commit_all(heads)

    def _win_locked(self, now: float) -> None:
        """Take over partitions, one by one, that an open transaction had locked."""
        try:
            self._observe(self.locked.win(now), time.monotonic())
        except PyMongoError as error:  # all others are polled anyway
            self._note_failure(error)

    def _note_failure(self, error: PyMongoError) -> None:
        renew_connections(self._wiring.client, error)
        raise_if_final(error, self._wiring.state_concern)
        logger.warning(
            "the listener could not read its partitions, and tries again: %s",
            brief(error),
            extra={"event": "partitions_unread"},
        )
