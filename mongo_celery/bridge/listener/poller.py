"""
Reading partitions: when, which of them, and what is seen.

What an execution does shows in its partition alone, so partitions are read again and again while something is out.
Two kinds of reading share that:

- The **sweep** reads all of them, once a second. It alone is needed: it shows all that happens, whoever does it.
- A **poll** reads those with something out, sooner. Of them the server leaves out where nothing has happened that
  counts: a run that nobody has claimed yet, where the fence is as it was (every claim, and every command that moves a
  position, raises it), and one that runs, where the claim is unchanged and nothing is handled. That needs no clock, no
  order of writes, and nothing that a write would have to leave for it: each partition is compared with what was seen of
  itself. So nothing is missed, however late a majority has it.

What happens without a write, or by one that is not compared (a claim lapses, a list moves its position under its
claim, a person pauses what nobody has claimed), is seen by the sweep: at most a second later.

While much is out, its queues give workers enough to do, and nobody gains by knowing immediately. So the pause between
polls is then a part of the time that the quickest runs take from their dispatch to their end, within bounds.

Positions are written with w:1, and on a set of one member a majority read shows such a write when the journal is
flushed: by the next majority write, which under load there always is, else up to a tenth of a second later. So a poll
that follows one in vain has it flushed, where a run was claimed and may have ended. Not after a second without
anything, when a tenth is little.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pymongo.errors import PyMongoError

from mongo_celery.bridge.listener.partition import Partition, Step
from mongo_celery.bridge.listener.takeover import LockedPartitions
from mongo_celery.errors import LeaseLostError
from mongo_celery.mongo.opening import renew_connections
from mongo_celery.mongo.verdicts import brief, raise_if_final

if TYPE_CHECKING:
    from pymongo.client_session import ClientSession

    from mongo_celery.bridge.listener.activity import Activity
    from mongo_celery.bridge.listener.fairness import Fairness
    from mongo_celery.bridge.listener.subscription import Subscription
    from mongo_celery.bridge.state.partitions import Image, Seen
    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.listener")

SWEEP_SECONDS = 1.0
BUSY_SECONDS = 0.03
_LONGEST_PAUSE = 0.25
_LONGEST_BUSY_PAUSE = 0.1  # `fairness` wants to know who waits for so long
_SHORTEST_PAUSE = 0.005
_BUSY = 3
_SHARE = 4
"""The pause after a poll is one part in so many of the time that runs take."""

_WEIGHT = 0.2
_FLUSHING_SECONDS = 1.0
_NAMED = 10


class PollTimes:
    """
    The times of the polls of a term. Pure.

    Attributes:
        moved_at: monotonic time at which something last went out, or was seen to have ended.
        polled_at, swept_at: of the last poll, and of the last one of all partitions.
    """

    def __init__(self) -> None:
        self.moved_at = 0.0
        self.polled_at = self.swept_at = 0.0
        self._taken: dict[str, float] = {}

    def note_end(self, subscription: str, sent_at: float | None, now: float) -> None:
        """Note that a run was seen to have ended. If this term has sent it, at that time."""
        self.moved_at = now
        if sent_at is not None:
            before = self._taken.get(subscription, now - sent_at)
            self._taken[subscription] = before + _WEIGHT * (now - sent_at - before)

    def next_poll_time(self, in_flight: Mapping[str, int]) -> float:
        """Return the monotonic time of the next poll, with so many runs of each handler in flight, none without any."""
        sweep_at = self.swept_at + SWEEP_SECONDS
        return min(sweep_at, self.polled_at + self._pause(in_flight)) if in_flight else sweep_at

    def _pause(self, in_flight: Mapping[str, int]) -> float:
        """Short after something moved, longer while handlers take their time: in the end a quarter of that."""
        least = _SHORTEST_PAUSE
        if sum(in_flight.values()) >= _BUSY:
            quickest = min(self._taken.get(name, 0.0) for name in in_flight)
            least = min(max(quickest / _SHARE, BUSY_SECONDS), _LONGEST_BUSY_PAUSE)
        return min(max((self.polled_at - self.moved_at) / 3, least), _LONGEST_PAUSE)

    def may_be_unflushed(self, seen: Iterable[Seen | None], now: float) -> bool:
        """Return True if the last poll was in vain, and runs that were claimed before it may have ended."""
        if self.moved_at >= self.polled_at or now - self.moved_at > _FLUSHING_SECONDS:
            return False
        return any(each is None or each.claimed for each in seen)


class PartitionPoller:
    """
    The polls of one term. Used by the leading thread.

    Args:
        wiring: of the bridge.
        session: in which all that decides what runs is read.
        led: the subscriptions of this term.
        activity: what this process has counted.

    Attributes:
        times: of the polls.
        due_at: monotonic time of the next poll.
        locked: partitions that the take-over could not win.
        is_blind: whether the last poll has failed.
        began_at, read_at: monotonic times of the last poll that was answered.
    """

    def __init__(
        self, wiring: Wiring, session: ClientSession, led: Mapping[str, Subscription], activity: Activity
    ) -> None:
        self.times = PollTimes()
        self.due_at = 0.0
        self.locked = LockedPartitions(wiring.store, 0, ())
        self.is_blind = False
        self.began_at = self.read_at = 0.0
        self._fairness: Fairness | None = None
        self._known: Mapping[bytes, Image] = {}
        self._wiring = wiring
        self._partitions = wiring.store.partitions
        self._session = session
        self._led = led
        self._activity = activity

    def begin(self, version: int, fairness: Fairness) -> None:
        """Begin a term. `fairness` is notified how long runs take."""
        partitions = [each for led in self._led.values() for each in led.partitions.values()]
        self.locked = LockedPartitions(self._wiring.store, version, partitions)
        self._fairness = fairness

    def plan(self) -> None:
        """Find out when the next poll is due."""
        in_flight: dict[str, int] = {}
        for name, led in self._led.items():
            for partition in led.partitions.values():
                if partition.in_flight is not None:
                    in_flight[name] = in_flight.get(name, 0) + 1
        self.due_at = self.times.next_poll_time(in_flight)

    def note_dispatch(self) -> None:
        """Note that runs were sent: they are polled soon."""
        self.times.moved_at = time.monotonic()
        self.plan()

    def sweep_now(self) -> None:
        """Have the next poll read all partitions, whenever that would have been due."""
        self.times.swept_at = self.due_at = -math.inf

    def poll(self, now: float, reopenings: int) -> bool:
        """
        Read partitions, all of them if that is due, and take in what is seen.

        Returns:
            False if they could not be read.

        Raises:
            LeaseLostError: somebody else leads.
            MongoCeleryError: something that waiting cannot fix.
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
        self.times.swept_at = self.times.polled_at = now
        generations = {name: led.plan.layout.term for name, led in self._led.items()}
        self._known = self._partitions.sweep(generations, self._session, self._known)
        for subscription in self._led.values():
            self._activity.of(subscription.name).add_counts(subscription.counted)
        self._activity.note_sweep(reopenings)
        return list(self._known.values())

    def _read_changed(self, now: float) -> list[Image]:
        """Read the partitions with a run in flight of which the server knows something new."""
        times = self.times
        seen = {each.partition_id: each.seen for led in self._led.values() for each in led.in_flight}
        if times.may_be_unflushed(seen.values(), now):
            with contextlib.suppress(PyMongoError):  # if something is wrong, the poll says what
                self._partitions.flush()
        times.polled_at = now
        return self._partitions.list_changed(seen, self._session)

    def _observe(self, images: Iterable[Image], now: float) -> list[Image]:
        """Take in images. Return those of partitions that are to be committed."""
        late = []
        for image in images:
            subscription = self._led[image.subscription]
            partition = subscription.partitions.get(image.index)
            if partition is None or partition.is_unchanged(image):  # none: read before its handler was repartitioned
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
        if is_held and run is not None and run.left_at is not None and run.taken_at is not None and self._fairness:
            self._fairness.note_run(image.subscription, run.left_at - run.taken_at)
        if step is Step.ENDED:
            self.times.note_end(image.subscription, run.sent_at if run is not None else None, now)
        return step

    def _commit_late(self, images: Sequence[Image]) -> None:
        """Commit what is handled and whose commit messages are late, with one command for all."""
        heads = {
            self._led[image.subscription].partitions[image.index].partition_id: image.committed + 1 for image in images
        }
        named = [*list(heads)[:_NAMED], *([f"{len(heads) - _NAMED} more"] if len(heads) > _NAMED else [])]
        logger.info("committing %s, whose commit message is late", ", ".join(named), extra={"event": "commit_late"})
        self._wiring.store.claims.commit_all(heads)

    def _win_locked(self, now: float) -> None:
        """Take over, one by one, what an open transaction had kept from the take-over."""
        try:
            self._observe(self.locked.win(now), time.monotonic())
        except PyMongoError as error:  # all others are polled all the same
            self._note_failure(error)

    def _note_failure(self, error: PyMongoError) -> None:
        renew_connections(self._wiring.client, error)
        raise_if_final(error, self._wiring.state_concern)
        logger.warning(
            "reading partitions failed, trying again: %s", brief(error), extra={"event": "partitions_unread"}
        )
