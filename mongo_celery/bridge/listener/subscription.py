"""One subscription in one term: its window, its partitions, and the next runs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any

from bson import Timestamp

from mongo_celery.bridge.change import describe
from mongo_celery.bridge.listener.admission import Admission
from mongo_celery.bridge.listener.delay import Delay
from mongo_celery.bridge.listener.feedback import Feedback
from mongo_celery.bridge.listener.limit import Limit
from mongo_celery.bridge.listener.partition import GracePeriods, Partition, Step
from mongo_celery.bridge.listener.stored_range import StoredRange
from mongo_celery.bridge.listener.term_facts import TermFacts
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.state.backlog import StoredChange
from mongo_celery.bridge.state.dead_letters import ReplayRequest
from mongo_celery.bridge.state.partitions import Image, Partitions
from mongo_celery.bridge.stream.items import ChangeEvent
from mongo_celery.bridge.window import Mark, PendingChange, Window
from mongo_celery.bridge.worker.envelope import Run

_raw, _hash, _data = map(attrgetter, ("raw", "hash", "data"))


@dataclass(frozen=True, slots=True)
class Dispatch:
    """
    A run to be sent to its partition's queue.

    Attributes:
        partition: the partition, which is notified of the message's outcome.
        task_name: the handler's task.
        label: the label for logs and monitors, in place of the arguments. It contains no document.
        queue: the queue of its partition.
        commits: True if the commit task follows. Otherwise the execution writes everything.
        size: bytes of its changes. The encoded message is larger.
    """

    partition: Partition
    run: Run
    task_name: str
    label: str
    queue: str
    commits: bool = True
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", sum(map(len, self.run.changes)))


class Subscription:
    """
    A subscription in a leading term.

    Args:
        options: the bridge's options.
        plan: the facts that this term fixes.
        partitions: the partitions, by index.

    Attributes:
        admission: selects its changes among those read.
        is_draining: True if it takes in nothing more, so that its partitions finish for another partitioning.
            Afterwards the stream must be read again.
        lost: True if its history is lost: nothing more is read for it, and its watermark does not move. Buffered
            changes run, because they were read before.
        has_gap: True if its history is lost or was given up in this term. Buffered changes are then older.
        candidates: partitions that may have a run to dispatch, the most recently served ones last.
        stored_partitions: partitions that run from stored changes.
        undeliverable: partitions that may have an undeliverable, unstored change.
        too_large: partitions whose next change is too large for a message, and not stored yet.
        run_size: largest number of changes in a run.
        delay: the delay of its changes. None if they run immediately.
        limit: its limits over all workers.
        feedback: detects whether the handler seems to trigger itself.
        has_replays: True if partitions have dead letters to replay.
        has_ended_replay: True if a sent dead letter is no longer in flight, so another may be next.
        counted: stored and refused changes since these numbers were last read.
    """

    def __init__(self, options: BridgeOptions, plan: TermFacts, partitions: Mapping[int, Partition]) -> None:
        self.name = plan.handler.name
        self.plan = plan
        self.partitions = partitions
        self.window = Window(plan.watermark)
        self.is_draining = False
        self.lost = False
        self.has_gap = False
        self.stored: Mark | None = plan.watermark
        self.admission = Admission(plan.selector, plan.partitioner, plan.layout, plan.undeliverable)
        self.run_size = plan.handler.run_size(options, is_rate_limited=plan.token_seconds > 0)
        wanted = plan.handler.delay
        self.delay = None if wanted is None else Delay(wanted, coalesces=plan.handler.coalesce)
        self.has_replays = False
        self._options = options
        self._run_bytes = min(options.run_bytes, options.max_message_bytes)
        self._commits = not plan.handler.commits_inline(options)
        self._queue_names = {index: options.queue_name(index, plan.handler.group) for index in partitions}
        self.candidates: dict[Partition, None] = {}
        self.stored_partitions: dict[Partition, None] = {}
        self.too_large: set[Partition] = set()
        self.counted = [0, 0]
        self.has_ended_replay = False
        self.limit = Limit(plan.handler)
        self.feedback = Feedback()
        self.undeliverable: list[Partition] = []
        self._has_begun = False  # True after an item at or after its start: then all later ones are too
        for partition in partitions.values():
            partition.token_seconds = plan.token_seconds * len(partitions)
            self._follow_stored(partition)

    def move(self, start: Timestamp) -> None:
        """
        Continue at another start. Buffered changes still run, and no change between them and the start is
        missing.
        """
        self.plan = replace(self.plan, start=start, watermark=None)
        self.stored = None
        self.lost, self.has_gap = False, True
        self._has_begun = False

    @property
    def in_flight(self) -> list[Partition]:
        """Partitions with a run in flight."""
        return [partition for partition in self.partitions.values() if partition.in_flight is not None]

    @property
    def blocked(self) -> list[Partition]:
        """Partitions whose next change waits for a person or its retry time."""
        return [partition for partition in self.partitions.values() if partition.is_blocked]

    @property
    def backlogs(self) -> list[tuple[Partition, StoredRange]]:
        """Partitions that run from stored changes, and these changes."""
        return [(each, each.backlog) for each in list(self.stored_partitions) if each.backlog is not None]

    @property
    def is_stopped(self) -> bool:
        """Return True if the partition rule is unknown, so that nothing is read until there are new partitions."""
        return self.plan.layout.key != self.plan.partitioner.layout_key

    @property
    def is_runnable(self) -> bool:
        """Return True if read or stored changes are left to run, whatever happens to the stream."""
        return bool(self.window.count) or any(self._may_run(backlog) for _, backlog in self.backlogs)

    def ingest_item(self, item: ChangeEvent | Mark) -> PendingChange | None:
        """Put a reader's item into the window. Return its change if this handler must run it."""
        mark = item if isinstance(item, Mark) else item.mark
        if self.lost or self.is_draining or mark.data <= self.window.seen:  # a reopened stream may repeat items
            return None
        change = None
        if not isinstance(item, Mark) and (self._has_begun or not self._precedes_start(mark)):
            change = self.admission.admit(item)
        partition = self.partitions[change.index] if change is not None else None
        if change is None or partition is None or mark.data <= partition.image.data:
            self.window.pass_over(mark)
            return None
        self.window.add(change, partition.queue)
        self.candidates[partition] = None
        if change.refusal is not None:
            self._note_undeliverable(partition, change)
        return change

    def _note_undeliverable(self, partition: Partition, change: PendingChange) -> None:
        self.counted[1] += 1
        self.admission.report(change)
        partition.undeliverable.append(change.data)
        if partition not in self.undeliverable:
            self.undeliverable.append(partition)

    def _precedes_start(self, mark: Mark) -> bool:
        time_ = mark.cluster_time
        if time_ is not None and time_ < self.plan.start:
            return True
        self._has_begun = time_ is not None
        return False

    def append(self, documents: Sequence[PendingChange]) -> bool:
        """
        Append existing documents after everything that was read. The next item's place is after theirs.

        Returns:
            False if one of them counts as done, because its partition is already after it. Then none is appended.
        """
        if any(each.data <= self.partitions[each.index].image.data for each in documents):
            return False
        for each in documents:
            partition = self.partitions[each.index]
            self.window.add_existing(each, partition.queue)
            self.candidates[partition] = None
            if each.refusal is not None:
                self._note_undeliverable(partition, each)
        return True

    def list_held(self) -> list[dict[str, Any]]:
        """Return the blocked partitions with buffered or stored changes, which need not be read again."""
        return [
            {"subscription": self.name, "partition": index}
            for index, partition in self.partitions.items()
            if partition.image.state != "flowing"
            and (partition.queue or (partition.backlog is not None and self._may_run(partition.backlog)))
        ]

    def observe(self, image: Image, now: float) -> Step:
        """Take in an image of one of the partitions."""
        partition = self.partitions[image.index]
        step = partition.observe(image, now)
        if step is Step.ENDED and partition.sent_key is not None:
            partition.sent_key.note_end(image)
            partition.sent_key = None
        if step in (Step.ENDED, Step.MOVED):
            self.window.complete(partition.queue, image.data)
        if partition.backlog is not None or image.stored is not None:
            self._follow_stored(partition)
        if partition.in_flight is None:
            self.has_ended_replay |= partition.is_replaying
            if partition.backlog is not None or partition.queue.changes:
                self.candidates[partition] = None
        return step

    def repeat(self, partition: Partition, now: float) -> None:
        """Send a partition's message again, because no worker will take it."""
        partition.repeat(now)
        self.candidates[partition] = None

    # -- stored changes ----------------------------------------------------------------------------

    def _follow_stored(self, partition: Partition) -> None:
        """Apply a new mark of a partition, and forget its committed stored changes."""
        backlog, image = partition.backlog, partition.image
        marked = image.stored["to"] if image.stored is not None else ""
        if backlog is None:
            if marked > image.data:
                self.run_stored(partition, StoredRange(marked, image.data))
            return
        backlog.to = max(backlog.to, marked)
        backlog.complete(image.data)
        if image.data >= backlog.to:
            self.run_stored(partition, None)

    def run_stored(self, partition: Partition, backlog: StoredRange | None) -> None:
        """Run a partition from its stored changes. With None, run it from its queue again."""
        partition.backlog = backlog
        if backlog is None:
            self.stored_partitions.pop(partition, None)
        else:
            self.stored_partitions[partition] = None

    def note_stored(self, partition: Partition, to: str, count: int) -> None:
        """
        Run a partition from stored changes: the first ones of its queue are stored, and the mark is after them.

        Afterwards they hold no watermark.

        Args:
            to: comparable part of the last one's token.
            count: number of them.
        """
        backlog = partition.backlog or StoredRange(to, partition.image.data)
        self.run_stored(partition, backlog)
        backlog.to = max(backlog.to, to)
        self.counted[0] += count
        self.window.complete(partition.queue, to)
        partition.stored_to = to
        self.too_large.discard(partition)

    def last_readable_place(self, partition: Partition) -> str:
        """Return the place up to which a partition's stored changes may run. Empty for none."""
        self.window.complete(partition.queue, partition.image.data)
        if partition.backlog is None or partition.must_store_again:
            return ""
        return min(partition.backlog.to, max(self.window.seen, partition.stored_to))

    def add_stored(self, partition: Partition, changes: Sequence[StoredChange]) -> None:
        """Add a partition's next stored changes."""
        assert partition.backlog is not None, "it runs from stored changes"
        partition.backlog.add(changes)
        if partition.in_flight is None:
            self.candidates[partition] = None

    def _may_run(self, backlog: StoredRange) -> bool:
        """Return True if stored changes may remain to be run, as far as known."""
        return bool(backlog.ahead) or backlog.read_to < min(backlog.to, self.window.seen)

    @property
    def unstored(self) -> str | None:
        """
        Return the comparable part of the first undeliverable, unstored change's token. None if there is none.

        No change from there on is dispatched: if the cause is fixed and the change is read again, its new partition
        must not have passed it.
        """
        if not self.undeliverable:
            return None
        self.undeliverable = [each for each in self.undeliverable if each.must_store]
        return min((each.undeliverable[0] for each in self.undeliverable), default=None)

    # -- runs ----------------------------------------------------------------------------------------

    @property
    def waiting_for_limit(self) -> int:
        """Return the number of partitions whose next run waits only for a limit of the handler."""
        return self.limit.waiting if self.candidates or self.has_replays else 0

    def list_orphans(self) -> list[Partition]:
        """Return partitions that hold a slot of a limited handler although no run is in flight."""
        if not self.limit.is_limited:
            return []
        return [each for each in self.partitions.values() if each.won and each.in_flight is None and each.holds_slot]

    def due(self, now: float) -> Iterable[Dispatch]:
        """Yield the runs to dispatch now, numbered from the committed position."""
        unstored, limit = self.unstored, self.limit
        limit.begin(self.partitions.values(), now)
        holds_replays = self.is_draining and not self.is_stopped  # a stopped one waits for its parked keys
        chosen = [*self.candidates]
        if self.has_replays and not holds_replays:
            replays = (each for each in self.partitions.values() if each.replay is not None)
            chosen += [each for each in replays if each not in self.candidates]
        for partition in chosen:
            if partition.in_flight is not None:
                self.candidates.pop(partition, None)
                continue
            replay = partition.replay if not holds_replays and partition.is_free(now) else None
            if not self._is_admitted(partition, replay, now):
                continue
            if replay is None or partition.has_replayed:  # a partition's changes and its dead letters take turns
                partition.has_replayed = False
                changes = self._due_changes(partition, now, unstored)
                if changes:
                    del self.candidates[partition]
                    self.candidates[partition] = None
                    limit.note_chosen(partition)
                    yield self._dispatch(partition, changes)
                    continue
            if replay is not None:
                partition.has_replayed = partition.is_replaying = True
                partition.replay = None
                limit.note_chosen(partition)
                yield self._dispatch_replay(partition, replay)

    def _is_admitted(self, partition: Partition, replay: ReplayRequest | None, now: float) -> bool:
        """Return True if the limit allows a run of a partition. A partition that is not ready does not wait for it."""
        is_ready = replay is not None or (partition.next_time <= now and partition.has_next)
        return not is_ready or self.limit.admit(partition)

    def _due_changes(
        self, partition: Partition, now: float, before: str | None
    ) -> Sequence[PendingChange | StoredChange]:
        """
        Return the next run of a partition. If stored changes are uncommitted, take it only from them.

        A change that is too large for a message is stored before it runs. After an unclean end or a rejection, runs
        have one change each, so that only the responsible change is counted.
        """
        if partition.next_time > now or partition not in self.candidates:
            return []
        image, queue = partition.image, partition.queue
        if queue.changes and queue.changes[0].mark.data <= image.data:
            self.window.complete(queue, image.data)
        claim = image.claim  # a lapsed one: its successor will note it in `single`
        unclean = max(image.one_by_one_until, claim["last"] if claim else 0)
        is_tried = self.delay is not None and self.delay.coalesces and image.retry is not None  # its burst is over
        limit = 1 if image.committed < unclean or partition.rejection is not None or is_tried else self.run_size
        changes: Sequence[PendingChange | StoredChange]
        if partition.backlog is not None:
            changes = partition.backlog.head(limit, self._options.run_bytes)
        else:
            changes = queue.head(limit, self._run_bytes)
            if changes and len(changes[0].raw) > self._options.max_message_bytes:
                self.too_large.add(partition)
                changes = []
        if not changes:
            self.candidates.pop(partition)
        elif self.delay is not None:
            changes = self._without_delayed(self.delay, partition, changes, limit, now)
        if len(changes) > 1:
            changes = _alike(changes)
        return changes if before is None else [each for each in changes if each.data < before]

    def _without_delayed(
        self,
        delay: Delay,
        partition: Partition,
        changes: Sequence[PendingChange | StoredChange],
        limit: int,
        now: float,
    ) -> Sequence[PendingChange | StoredChange]:
        """Return the changes of a run that are due. If none is due, note the time of the first."""
        known, backlog = [*changes], partition.backlog
        if backlog is not None and len(changes) == len(backlog.ahead):  # later ones are in the queue
            known += partition.queue.head(limit - len(changes), self._run_bytes)
        count, next_at = delay.count_due(known, now)
        partition.delayed_until = 0.0 if count else next_at
        return changes[:count]

    def queue_name(self, index: int) -> str:
        """Return the queue of a partition's runs."""
        return self._queue_names[index]

    def next_due(self) -> float:
        """Return the monotonic time of the next run that waits only for a time. Infinite if there is none."""
        if not self.candidates or self.unstored is not None:
            return math.inf
        return max(min(each.next_time for each in self.candidates), self.limit.opens_at)

    def report_delayed(self) -> dict[str, Any] | None:
        """Return the number of partitions that wait for the delay, and the time of the first run. None without any."""
        times = [each.delayed_until for each in self.candidates if each.delayed_until and each.in_flight is None]
        if self.delay is None or not times:
            return None
        until = datetime.fromtimestamp(round(self.delay.server_time(min(times))), UTC)
        return {"partitions": len(times), "until": until}

    def _dispatch(self, partition: Partition, changes: Sequence[PendingChange | StoredChange]) -> Dispatch:
        head, plan, index, first = changes[0], self.plan, partition.index, partition.image.committed + 1
        travels, raws = isinstance(head, PendingChange), list[bytes]()
        if travels:
            raws.extend(map(_raw, changes))
        partition.sent_key = self.feedback.note_dispatch(head) if isinstance(head, PendingChange) else None
        run = Run(
            self._options.name,
            self.name,
            plan.layout.term,
            index,
            plan.version,
            first,
            first + len(changes) - 1,
            raws,
            refusal=head.refusal,
            token=None if head.refusal is None else head.token,
            hash=head.hash,
            stored=() if travels else tuple(map(_data, changes)),
            hashes=tuple(map(_hash, changes)) if len(changes) > 1 or partition.image.parked_keys else (),
            fencing_token=self._expect(partition),
        )
        label = _label(changes, first)
        return Dispatch(partition, run, plan.handler.task_name, label, self._queue_names[index], self._commits)

    def _expect(self, partition: Partition) -> int | None:
        """Return the fencing token that the claim of a message needs. None without a limit."""
        return partition.image.fencing_token if self.limit.is_limited else None

    def _dispatch_replay(self, partition: Partition, replay: ReplayRequest) -> Dispatch:
        index, first = partition.index, partition.next_sequence
        partitioning, version = self.plan.layout.term, self.plan.version
        run = Run(
            self._options.name,
            self.name,
            partitioning,
            index,
            version,
            first,
            first,
            dead_letter=replay.letter,
            starts=replay.starts,
            hashes=(replay.hash,) if replay.parked else (),
            fencing_token=self._expect(partition),
        )
        label, queue = f"({replay.key} replayed)", self.queue_name(index)
        # It moves no position: only its execution writes the outcome.
        return Dispatch(partition, run, self.plan.handler.task_name, label, queue, commits=False)


def _alike(changes: Sequence[PendingChange | StoredChange]) -> Sequence[PendingChange | StoredChange]:
    """Return the changes of one run. An undeliverable change is its own run."""
    for place, change in enumerate(changes):
        if change.refusal is not None:
            return changes[: place or 1]
    return changes


def _label(changes: Sequence[PendingChange | StoredChange], first: int) -> str:
    more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
    what = describe(changes[0].raw) if changes[0].raw else "stored"
    return f"({what} seq={first}{more})"


def make_partitions(
    images: Sequence[Image], partitions: Partitions, partitioning: int, version: int, options: BridgeOptions
) -> dict[int, Partition]:
    """Return a subscription's partitions by index, from the images of the take-over."""
    graces = GracePeriods(options.grace, options.commit_grace)
    now = time.monotonic()
    ids = {each.index: partitions.partition_id(each.subscription, partitioning, each.index) for each in images}
    return {each.index: Partition(ids[each.index], each, version, graces, now) for each in images}
