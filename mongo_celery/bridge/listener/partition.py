"""
The listener's view of one partition, and its next step.

The class is pure: its input is images of the partition's document and the monotonic times of reading them. At most one
run per partition is in flight (window 1), which is kept here. The sweep is the protocol's only liveness rule:

1. handled: commit it after `commit_grace`, whatever the claim says.
2. a live claim of any owner: wait, so that handlers of an earlier term finish undisturbed.
3. a lapsed claim, or an unclaimed message: dispatch again after the grace. The monotonic clock counts it from the
   latest of: my last dispatch, the last change seen, the first read that showed the lapse, and the last return of the
   broker or a consumer. The grace doubles with each repetition up to five minutes, because a message may wait after
   slow ones. A return resets it. If a message is known to be lost (`unclaimed`), it is dispatched again immediately.
4. a partition that is not won yet belongs to an older term: wait, and take in that term's commits.
5. a claim ended without an outcome (a retry, a recorded crash): its message is used up, so the change is dispatched as
   soon as it is due.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, fields
from datetime import datetime
from enum import Enum
from operator import attrgetter

from mongo_celery.bridge.listener.feedback import SentKey
from mongo_celery.bridge.listener.pacing import RetryGate
from mongo_celery.bridge.listener.stored_range import StoredRange
from mongo_celery.bridge.state.claims import name_place
from mongo_celery.bridge.state.dead_letters import ReplayRequest
from mongo_celery.bridge.state.partitions import Image, Seen, visible_state
from mongo_celery.bridge.window import Queue

DELAYED = "delayed"
"""The reason why a partition waits that only waits for its handler's delay."""

LONGEST_GRACE = 300.0
_DOUBLINGS = 16
_NEVER = math.inf
_NO_PROGRESS = {"live", "due_in", "stored"}
_progress = attrgetter(*(each.name for each in fields(Image) if each.compare and each.name not in _NO_PROGRESS))
"""The fields of an image that workers and people change. Not those that time changes, or the listener by storing."""


class Step(Enum):
    """The leader's next step for a partition."""

    WAIT = "wait"
    ENDED = "ended"
    """The run in flight is over. The image shows the partition's progress."""

    MOVED = "moved"
    """The run in flight continues and has recorded progress. Its finished part is over."""

    COMMIT = "commit"
    SUPERSEDED = "superseded"


@dataclass(slots=True)
class InFlight:
    """
    A run that was dispatched, or that a take-over found running. It excludes changes that are already recorded.

    Attributes:
        taken_at: time when its claim was first seen. None before.
        left_at: time when it was first seen to have left its worker, handled or not. None before.
    """

    first: int
    fencing_token: int
    sent_at: float
    lapsed_at: float | None = None
    handled_at: float | None = None
    taken_at: float | None = None
    left_at: float | None = None


@dataclass(frozen=True, slots=True)
class GracePeriods:
    """The sweep's waiting times, in seconds."""

    dispatch_grace: float
    commit_grace: float


@dataclass(frozen=True, slots=True)
class Rejection:
    """
    A partition's next run cannot be sent: the broker rejects its message but accepts others.

    Attributes:
        label: text that names the change, without the contents of its document.
        size: bytes of the run's changes.
        error: the broker's reason.
        since: time of the first rejection.
        count: number of rejections.
        until: monotonic time of the next attempt.
    """

    label: str
    size: int
    error: str
    since: datetime
    count: int
    until: float


@dataclass(slots=True)
class NotStored:
    """
    The state database does not store a partition's changes.

    Attributes:
        gate: the next attempt.
        error: the last reason.
        since: time of the first failure.
    """

    gate: RetryGate
    error: str
    since: datetime


class Partition:
    """
    One partition in one term.

    Attributes:
        index: index of the partition.
        image: the last image that was read.
        in_flight: the run in flight, or None.
        ready_at: monotonic time from which the next run may be dispatched. Infinite while a run is in flight or the
            partition is blocked.
        delayed_until: monotonic time at which the next change may be due, if it waits for its handler's delay. Else 0.
        attempt: number of dispatches of the first change, for the task id.
        is_repeated: True if the next dispatch repeats a run without any visible effect.
        repeats: number of repeated dispatches since its last claim, or the broker's last return.
        unclaimed_since: time of the first sending of the run in flight, even if it was sent again. After a claim, the
            time when the claim was given up.
        taken_at: time when the claim of the latest claimed run was first seen.
        taken_sent_at: time when that run was sent.
        token_seconds: time that an unclaimed run may wait for a token of its handler's rate limit.
        rejection: reason why the next run cannot be sent. None if it can.
        won: True if the take-over has raised the partition's term to this one. Otherwise an open transaction has
            locked it, and an older term may still act there.
        queue: changes that were read but are neither committed nor stored.
        backlog: the stored changes of the partition. None if it runs from the queue.
        stored_to: the place up to which this term has stored and marked the queue.
        undeliverable: places of undeliverable changes that may not be stored yet.
        blocked_since: the committed position and the time when it was first seen blocked.
        not_stored: reason why changes of the partition are not stored. None without a failure.
        replay: the next dead letter to replay.
        is_replaying: True if a dead letter was sent since the requests were read.
        has_replayed: True if the last sent run was a dead letter.
        sent: numbers of the last sent changes, and the time. None after their commit was seen.
        sent_key: `feedback` about the last sent key.
    """

    def __init__(self, partition_id: str, image: Image, version: int, graces: GracePeriods, now: float) -> None:
        self.partition_id = partition_id
        self.index = image.index
        self.image = image
        self.in_flight: InFlight | None = None
        self.ready_at = _NEVER
        self.delayed_until = 0.0
        self.attempt = 0
        self.rejection: Rejection | None = None
        self.won = image.term >= version
        self._version = version
        self._graces = graces
        self.repeats = 0
        self.unclaimed_since = 0.0
        self.taken_at = self.taken_sent_at = -math.inf
        self.token_seconds = 0.0
        self.queue = Queue()
        self.backlog: StoredRange | None = None
        self.stored_to = ""
        self.undeliverable: deque[str] = deque()
        self.blocked_since: tuple[int, float] = (-1, 0.0)
        self.not_stored: NotStored | None = None
        self.replay: ReplayRequest | None = None
        self.is_replaying = self.has_replayed = False
        self.sent: tuple[range, float] = (range(0), 0.0)
        self.sent_key: SentKey | None = None
        self.is_repeated = False
        self._given_up: int | None = None
        self._message_token: int | None = None  # of the last message that may be in its queue
        self._changed_at = now
        self._progress = _progress(image)
        self.observe(image, now)

    @property
    def place(self) -> str:
        """Handler and index, as status and commands show them."""
        return name_place(self.partition_id)

    @property
    def next_sequence(self) -> int:
        """Number of the next change, assigned at dispatch."""
        return self.image.committed + 1

    @property
    def next_time(self) -> float:
        """Monotonic time from which the next run may be dispatched, as far as known, after a retry time and a delay."""
        return max(self.ready_at, self.delayed_until)

    @property
    def has_next(self) -> bool:
        """Return True if the partition has uncommitted changes, in the queue or stored."""
        return self.backlog is not None or bool(self.queue.changes)

    @property
    def is_busy(self) -> bool:
        """Return True if a change is uncommitted or in flight."""
        return self.in_flight is not None or self.has_next

    @property
    def block_reason(self) -> str | None:
        """The reason why the partition does not continue now. None if it waits for a worker."""
        state = visible_state(self.image)
        if state != "flowing":
            return state
        if self.rejection is not None:
            return "rejected"
        if self.image.claim is not None:
            return "running"
        return DELAYED if self.delayed_until else None

    @property
    def is_blocked(self) -> bool:
        """Return True if the next change of the partition waits for a person, or for its retry time."""
        image = self.image
        if image.state == "flowing" and image.due_in <= 0:
            return False
        return image.state == "halted" or self.has_next

    def is_secured(self, data: str) -> bool:
        """Return True if everything up to a token is committed, or stored and marked by this term."""
        return data <= max(self.image.data, self.stored_to)

    @property
    def must_store(self) -> bool:
        """Return True if the partition has an undeliverable change that is not stored yet."""
        while self.undeliverable and self.is_secured(self.undeliverable[0]):
            self.undeliverable.popleft()
        return bool(self.undeliverable)

    @property
    def must_store_again(self) -> bool:
        """Return True if queued changes are at or below its mark. They must be stored again before anything runs."""
        first = self.queue.first
        return self.backlog is not None and first is not None and first.data <= self.backlog.to

    @property
    def seen(self) -> Seen | None:
        """State with which the server may omit this partition from a poll. None if time alone may change it."""
        run, image = self.in_flight, self.image
        if run is None or not self.won or image.handled is not None:
            return None
        if image.claim is None:
            return Seen(image.fencing_token, claimed=False) if image.fencing_token == run.fencing_token else None
        return Seen(image.fencing_token, claimed=True) if image.live else None

    @property
    def is_unclaimed(self) -> bool:
        """Return True if a message is in flight, and no worker is known to have taken it."""
        run, image = self.in_flight, self.image
        if run is None or not self.won:
            return False
        return image.fencing_token == run.fencing_token and image.handled is None and not image.live

    @property
    def has_message(self) -> bool:
        """Return True if a message of a limited handler may still claim a run."""
        return self._message_token == self.image.fencing_token

    @property
    def holds_slot(self) -> bool:
        """Return True if a run is in flight, or a lapsed claim or a limited handler's message may still begin one."""
        return self.in_flight is not None or self.image.claim is not None or self.has_message

    def note_sending(self) -> None:
        """Note that a message of a limited handler may be in the queue from now on, even if sending it fails."""
        self._message_token = self.image.fencing_token

    def note_voided(self) -> None:
        """Note that no earlier message can claim, so the next one is no repetition. Its grace remains longer."""
        self.repeats += self.is_repeated
        self.is_repeated = False

    def is_free(self, now: float) -> bool:
        """Return True if a dead letter may be sent: nothing is in flight, and at most a retry time blocks."""
        rejected = self.rejection is not None and self.rejection.until > now
        return self.in_flight is None and self.won and self.ready_at < _NEVER and not rejected

    def reset_grace(self, at: float) -> None:
        """Restart the grace of the run in flight at this time, with its shortest length."""
        self._changed_at = max(self._changed_at, at)
        self.repeats = 0

    def repeat(self, now: float) -> None:
        """Let the change be dispatched again, because no worker will take the message in flight."""
        if self.in_flight is not None and self.in_flight.taken_at is not None:
            self.unclaimed_since = now
        self._give_up()
        self.is_repeated = True
        self.ready_at = now + max(self.image.due_in, 0.0)

    def note_sent(self, now: float, count: int = 1) -> None:
        """Note that a run of this many changes from `next_sequence` was published. 0 means a dead letter."""
        if count:
            self.sent = range(self.next_sequence, self.next_sequence + count), now
        if not self.is_repeated:
            self.unclaimed_since = now
        self.in_flight = InFlight(self.next_sequence, self.image.fencing_token, now)
        self.ready_at = _NEVER
        self.rejection = None
        self.attempt += 1
        self.repeats += self.is_repeated
        self.is_repeated = False

    def note_rejected(self, rejection: Rejection) -> None:
        """Note that the broker rejected the run from `next_sequence`. Only this partition waits."""
        self.rejection = rejection
        self.ready_at = rejection.until

    def is_unchanged(self, image: Image) -> bool:
        """Return True if a newer image has no news about a partition without work or pending times."""
        if self.in_flight is not None or self.backlog is not None or self.queue.changes or self.is_replaying:
            return False
        if image.claim is not None or image.due_in > 0 or self.image.due_in > 0 or not self.won:
            return False
        return image is self.image or bool(_progress(image) == self._progress and image.stored == self.image.stored)

    def observe(self, image: Image, now: float) -> Step:
        """Take in a newer image."""
        progress = _progress(image)
        if progress != self._progress:
            self._progress = progress
            self._changed_at = now
            if image.committed != self.image.committed:
                self.attempt = self.repeats = 0
                self.delayed_until = 0.0
                self.is_repeated = False
                self.rejection = None
        before, self.image = self.image, image
        if image.term != self._version or not self.won:
            return self._under_another_term(image, now)
        if self.in_flight is None:
            return self._without_run(image, now)
        self._note_claim(self.in_flight, now)
        if image.committed != self.in_flight.first - 1:
            return self._note_move(self.in_flight, before, now)
        if image.handled is not None:
            return self._note_handled(self.in_flight, now)
        if image.live:
            self.in_flight.lapsed_at = None
            return Step.WAIT
        return self._judge_unclaimed(self.in_flight, image, now)

    def _note_move(self, run: InFlight, before: Image, now: float) -> Step:
        """Note a moved position: the run is over, unless the position moved under the current run's claim."""
        image = self.image
        of_it = image.fencing_token == run.fencing_token + 1 or (
            before.live and image.fencing_token == before.fencing_token
        )
        if of_it and image.live and image.handled is None and image.committed >= run.first:
            run.first = image.committed + 1
            return Step.MOVED
        self.in_flight = None
        self._without_run(image, now)
        return Step.ENDED

    def _note_claim(self, run: InFlight, now: float) -> None:
        """Note when a run was first seen as claimed, and when it was first seen to have left its worker."""
        image = self.image
        if run.taken_at is None and (image.fencing_token > run.fencing_token or image.committed >= run.first):
            run.taken_at = self.taken_at = now
            self.taken_sent_at = run.sent_at
        if run.taken_at is not None and run.left_at is None and not (image.live and image.handled is None):
            run.left_at = now

    def _under_another_term(self, image: Image, now: float) -> Step:
        """
        Wait for an older term's work in a locked partition, as for a run of this term, until the partition is won.

        Otherwise this term is over. A smaller term means that the won partition was removed and written again.
        """
        if self.won or image.term > self._version:
            return Step.SUPERSEDED
        run, self.in_flight, self.ready_at = self.in_flight, None, _NEVER
        self.won = image.term == self._version
        if self.won:
            self._without_run(image, now)
            return Step.ENDED
        self.in_flight = InFlight(image.committed + 1, image.fencing_token, now)
        return Step.ENDED if run is not None and image.committed != run.first - 1 else Step.WAIT

    def _without_run(self, image: Image, now: float) -> Step:
        """Adopt an older term's run, or become ready when the first change is due. This term has not sent a run."""
        if image.handled is not None or (image.claim is not None and not self._is_given_up(image)):
            # One less than its fencing token, because an existing claim has used up its message.
            self.in_flight = InFlight(image.committed + 1, image.fencing_token - 1, now)
            self.ready_at = _NEVER
            self.is_repeated = False
        else:
            due = max(now + max(image.due_in, 0.0), self.rejection.until if self.rejection else 0.0)
            self.ready_at = due if image.state == "flowing" else _NEVER
        return Step.WAIT

    def _is_given_up(self, image: Image) -> bool:
        """Return True for a lapsed claim after its grace. It waits for the grace only once, even without a broker."""
        return not image.live and image.fencing_token == self._given_up

    def _note_handled(self, run: InFlight, now: float) -> Step:
        run.handled_at = run.handled_at or now
        return Step.COMMIT if now - run.handled_at >= self._graces.commit_grace else Step.WAIT

    def _judge_unclaimed(self, run: InFlight, image: Image, now: float) -> Step:
        if image.state != "flowing":
            self._give_up()
            self.ready_at = _NEVER
            return Step.WAIT
        if image.claim is None and image.fencing_token > run.fencing_token:
            self._give_up()
            self.repeats = 0
            self.ready_at = now + max(image.due_in, 0.0)
            return Step.WAIT
        if image.claim is not None:
            run.lapsed_at = run.lapsed_at or now
        since = max(run.sent_at, self._changed_at, run.lapsed_at or 0.0)
        doublings = min(self.repeats, _DOUBLINGS)  # without a limit, the power would overflow a float after some days
        least = self.token_seconds if image.claim is None else 0.0
        grace = min(max(self._graces.dispatch_grace * 2**doublings, least), LONGEST_GRACE)
        if now >= max(since + grace, now + image.due_in):
            self.repeat(now)
        return Step.WAIT

    def _give_up(self) -> None:
        self.in_flight = None
        self._given_up = self.image.fencing_token
