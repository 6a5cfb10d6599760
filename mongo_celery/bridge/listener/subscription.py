"""One subscription in one term: its window, its partitions, and which of them may run next."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bson import Timestamp

from mongo_celery.bridge.change import describe
from mongo_celery.bridge.handlers import Handler
from mongo_celery.bridge.listener.admission import MOST_REFUSED, Admission, Notes
from mongo_celery.bridge.listener.dispatcher import Dispatch
from mongo_celery.bridge.listener.tracker import GracePeriods, Step, Tracker
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.partitioning import Partitioner
from mongo_celery.bridge.state.leases import Layout
from mongo_celery.bridge.state.partitions import Image
from mongo_celery.bridge.stream.reader import ChangeEvent
from mongo_celery.bridge.stream.source import Selector
from mongo_celery.bridge.window import Mark, PendingChange, Window
from mongo_celery.bridge.worker.envelope import Run


@dataclass(frozen=True, slots=True)
class Plan:
    """
    What a term fixes for a subscription.

    Attributes:
        refused: what an earlier term has noted of refused changes, as it is stored.
    """

    handler: Handler
    selector: Selector
    partitioner: Partitioner
    layout: Layout
    version: int
    start: Timestamp
    watermark: Mark | None
    refused: Mapping[str, Any] | None = None


class Subscription:
    """
    A subscription that is being led.

    Args:
        options: the bridge's options.
        plan: what this term fixes.
        trackers: its partitions, by index.

    Attributes:
        admission: what it owes of what was read.
        until: while an old layout is drained, the place up to which this is done.
        left: the first place behind it that was read, and left.
        lost: whether its history is lost: nothing more is read for it, and its watermark stands. What is buffered
            runs, since it was read before.
        has_gap: whether its history is lost, or was given up in this term; what is buffered is older then.
    """

    def __init__(self, options: BridgeOptions, plan: Plan, trackers: Mapping[int, Tracker]) -> None:
        self.name = plan.handler.name
        self.plan = plan
        self.trackers = trackers
        self.window = Window(plan.watermark)
        self.until: Mark | None = None
        self.left: str | None = None
        self.lost = False
        self.has_gap = False
        self.stored: Mark | None = plan.watermark
        self.admission = Admission(plan.selector, plan.partitioner, plan.layout, plan.refused)
        self._options = options
        self._candidates: set[int] = set()

    @property
    def outstanding(self) -> list[Tracker]:
        """Partitions with a run under way."""
        return [tracker for tracker in self.trackers.values() if tracker.outstanding is not None]

    @property
    def standing(self) -> list[Tracker]:
        """Partitions whose next change waits for a person, or for its retry time."""
        return [
            tracker
            for index, tracker in self.trackers.items()
            if tracker.image.state == "halted"
            or (self.window.depth(index) and (tracker.image.state != "flowing" or tracker.image.parked))
        ]

    @property
    def is_full(self) -> bool:
        """Whether no more may be read for this subscription: refused changes have a bound too, that of their notes."""
        is_full = self.window.count >= self._options.buffer_changes or self.window.refused >= MOST_REFUSED
        return is_full and not self.lost

    def take_in(self, item: ChangeEvent | Mark) -> None:
        """Put what the reader handed over into the window."""
        mark = item if isinstance(item, Mark) else item.mark
        if self.lost or not self.window.is_new(mark.data):
            return
        if self.until is not None and mark.data > self.until.data:
            if self.left is None:  # up to here old partitions are drained; all behind it is left for the new layout
                self.left = mark.data
                self.window.pass_over(self.until)
            return
        change = None if isinstance(item, Mark) else self._owed(item)
        if change is None or mark.data <= self.trackers[change.index].image.data:
            self.window.pass_over(mark)
            return
        self.window.add(change)
        self._candidates.add(change.index)
        if change.refusal is not None:
            self.admission.note(change)

    def _owed(self, event: ChangeEvent) -> PendingChange | None:
        time_ = event.mark.cluster_time
        if time_ is not None and time_ < self.plan.start:
            return None
        return self.admission.admit(event)

    def notes_of_refused(self) -> Notes:
        """What is to be stored with the subscription of its refused changes."""
        return self.admission.notes({index: tracker.image.data for index, tracker in self.trackers.items()})

    def held(self) -> list[dict[str, Any]]:
        """Partitions that stand still with changes in the buffer, which need not be read again."""
        return [
            {"subscription": self.name, "partition": index}
            for index, tracker in self.trackers.items()
            if tracker.image.state != "flowing" and self.window.depth(index)
        ]

    def observe(self, image: Image, now: float) -> Step:
        """Take in an image of one of the partitions."""
        tracker = self.trackers[image.index]
        step = tracker.observe(image, now)
        if step is Step.ENDED:
            self.window.complete(image.index, image.data)
        if tracker.outstanding is None and self.window.depth(image.index):
            self._candidates.add(image.index)
        return step

    def due(self, now: float) -> Iterable[tuple[Tracker, Dispatch]]:
        """Runs that may be dispatched now: numbered against what is committed now. None before refusals are noted."""
        if not self.admission.is_noted:
            return
        for index in list(self._candidates):
            tracker = self.trackers[index]
            if tracker.outstanding is not None:
                self._candidates.discard(index)
                continue
            if tracker.ready_at > now:
                continue
            self.window.complete(index, tracker.image.data)
            changes = _alike(self.window.head(index, self._limit(tracker), self._options.run_bytes))
            if changes:
                yield tracker, self._dispatch(tracker, changes)
            else:
                self._candidates.discard(index)

    def next_due(self) -> float:
        """Monotonic time at which the next waiting run becomes ready; infinite when none waits for a time alone."""
        if not self.admission.is_noted:
            return math.inf
        return min((self.trackers[index].ready_at for index in self._candidates), default=math.inf)

    def _limit(self, tracker: Tracker) -> int:
        """After an unclean end or a rejection runs are one change each, so that only the guilty change is charged."""
        claim = tracker.image.claim  # a lapsed one: its successor will note it in `single`
        unclean = max(tracker.image.single, claim["last"] if claim else 0)
        if self.plan.handler.transactional or tracker.next_sequence <= unclean or tracker.rejection is not None:
            return 1
        return self._options.run_size

    def _dispatch(self, tracker: Tracker, changes: list[PendingChange]) -> Dispatch:
        first = tracker.next_sequence
        run = Run(
            self._options.name,
            self.name,
            self.plan.layout.generation,
            tracker.image.index,
            self.plan.version,
            first,
            first + len(changes) - 1,
            [change.raw for change in changes],
            refusal=changes[0].refusal,
            token=changes[0].mark.token if changes[0].refusal is not None else None,
        )
        return Dispatch(run, self.plan.handler.task_name, tracker.attempt, _label(changes, first))

    @property
    def is_idle(self) -> bool:
        """Whether nothing is buffered or under way."""
        return not self.window.count and not self.outstanding


def _alike(changes: list[PendingChange]) -> list[PendingChange]:
    """A refused change is a run of its own."""
    refused = next((place for place, change in enumerate(changes) if change.refusal is not None), len(changes))
    return changes[: max(refused, 1)]


def _label(changes: list[PendingChange], first: int) -> str:
    more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
    return f"({describe(changes[0].raw)} seq={first}{more})"


def make_trackers(
    images: Iterable[Image],
    ids: Mapping[int, str],
    version: int,
    options: BridgeOptions,
) -> dict[int, Tracker]:
    """Trackers of a subscription's partitions, from the images of the take-over."""
    graces = GracePeriods(options.grace, options.commit_grace)
    now = time.monotonic()
    return {image.index: Tracker(ids[image.index], image, version, graces, now) for image in images}
