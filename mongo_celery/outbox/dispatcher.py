"""
The dispatcher: one thread for all outboxes of an app in a process. It delivers the process's own writes.

Callers never wait for the broker. They leave the `_id` of a document that may have pending entries, or request a poll
of the index. The thread lets the outbox's relay deliver documents in batches, and the outboxes take turns.

- The queue of an outbox holds a document once and is bounded. If it is full, the index is polled later: everything is
  in the documents.
- Turns of an outbox begin some milliseconds apart, so that documents are claimed, sent and removed together.
- In its turn a document has some entries published, then goes to the end of the queue.
- If the broker accepts nothing, all turns end, and only this thread checks whether it is back. Then the index is
  polled.
- If MongoDB does not answer for an outbox, that outbox pauses. If it refuses a document, the sweep handles it.
- After some idle seconds the thread ends. The next write starts another.
- A forked child has its own dispatcher. The parent delivers its own queue.
- At the end of a process the thread delivers for one second. After two seconds the process ends in any case, and claims
  lapse.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bson import Regex
from celery.exceptions import SoftTimeLimitExceeded
from pymongo.collection import Collection
from pymongo.errors import PyMongoError

from mongo_celery.exits import close_at_exit
from mongo_celery.mongo.identity import NO_ID, id_key, parse_filter_id, to_stored
from mongo_celery.mongo.redaction import format_traceback, short
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.outbox.commands import log_undeliverable
from mongo_celery.outbox.delivery import Delivery
from mongo_celery.outbox.options import OutboxOptions
from mongo_celery.outbox.publisher import Publisher

logger = logging.getLogger("mongo_celery.outbox")

QUEUE_MAX = 1000
"""Largest number of queued documents."""

TURN = 50
"""Largest number of documents in a turn."""

_APART_SECONDS = 0.1
"""Seconds between the beginnings of two turns of an outbox."""

_POLL = 100
"""Largest number of documents from one poll of the index."""

_POLLS_AFTER = (0.1, 0.5, 2.0)
"""Seconds from `with_tasks` to the polls, while the caller writes."""

_IDLE_SECONDS = 5.0
_PROBES = Pauses(first=0.5, longest=5.0)
"""Pauses before checking whether the broker is back."""

_FAILURES = Pauses(first=1.0, longest=60.0)
"""Pauses before the next turn of an outbox after MongoDB did not answer."""

_RESTS = Pauses(first=2.0, longest=60.0)
"""Pauses before the next poll, after one that timed out in MongoDB or found documents that MongoDB refuses."""

_PROBE_SECONDS = 5
"""Time limit for a broker's answer whether it is back."""

CLOSE_SECONDS = 2.0
"""Time limit at the end of a process, whatever broker and MongoDB do."""


@dataclass(frozen=True, slots=True)
class DispatcherState:
    """
    One outbox in a process's dispatcher, at one moment.

    Attributes:
        queued: number of queued documents.
        broker_down: True if the dispatcher waits for the broker.
        passed_over: number of documents since the process started that were left to the sweep or a poll, because the
            queue was full or the broker down.
    """

    queued: int = 0
    broker_down: bool = False
    passed_over: int = 0


class AppDispatcher:
    """
    The thread of one app in this process, and its knowledge of the broker.

    It starts with the first document, ends when idle, and keeps no reference to its app or an outbox.

    A broker may accept connections but refuse every message. Until it accepts one, the pauses grow.
    """

    def __init__(self, _app: Any = None) -> None:
        self.changed = threading.Condition()
        self.down_until: float | None = None
        """Time of the next check of the broker. None if it is not known to be down."""
        self.closing_by: float | None = None
        self._probes = 0
        self._outboxes: weakref.WeakSet[OutboxDispatcher] = weakref.WeakSet()
        self._sleeps_until: float | None = None
        self._thread: threading.Thread | None = None

    # -- the broker --------------------------------------------------------------------------------

    def note_outage(self) -> None:
        """Record that the broker accepts nothing."""
        self.down_until = time.monotonic() + _PROBES.nth(self._probes)

    def is_back(self, answers: Callable[[], bool]) -> bool:
        """Check whether a broker that was down accepts a new connection. Return True if publishing may be tried."""
        if self.down_until is None:
            return True
        is_there = answers()
        self._probes += 1
        if is_there:
            self.down_until = None
        else:
            self.note_outage()
        return is_there

    def note_success(self) -> None:
        """Note a successful publish."""
        if self._probes:
            self._probes = 0
            logger.info(
                "outbox: the broker answers again. Waiting entries are being delivered", extra={"event": "broker_back"}
            )

    # -- the thread --------------------------------------------------------------------------------

    def wake(self, outbox: OutboxDispatcher) -> None:
        """Let the thread take an outbox's turn when due. The caller holds the lock."""
        is_running = self._thread is not None and self._thread.is_alive()
        if self.closing_by is not None and is_running:
            return
        self.closing_by = None  # the process continues after a close that took too long
        self._outboxes.add(outbox)
        if not is_running:
            close_at_exit(self)
            self._thread = threading.Thread(target=self._run, name="mongo_celery-outbox", daemon=True)
            self._thread.start()
        due = outbox.next_turn() if self._sleeps_until is not None else None
        if due is not None and self._sleeps_until is not None and due < self._sleeps_until:
            self.changed.notify_all()

    def close_soon(self) -> None:
        """Begin to close, so that several objects can close concurrently."""
        with self.changed:
            if self._thread is None or self.closing_by is not None:
                return
            self.closing_by = time.monotonic() + CLOSE_SECONDS / 2
            for outbox in list(self._outboxes):
                outbox.plan_last_poll()
            self.changed.notify_all()

    def close(self) -> None:
        """Deliver queued documents for half of the time, and end the thread."""
        self.close_soon()
        with self.changed:
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(CLOSE_SECONDS)
        if not thread.is_alive():
            with self.changed:  # a process that continues may start another, or already has
                if self._thread is thread:
                    self._thread = self.closing_by = None

    def _run(self) -> None:
        while (outbox := self._wait_for_turn()) is not None:
            outbox.take_turn()
            del outbox  # while the thread sleeps, nothing refers to an outbox and its app

    def _wait_for_turn(self) -> OutboxDispatcher | None:
        """Return the outbox whose turn it is. None if the thread has long been idle, or the process ends."""
        with self.changed:
            while True:
                now = time.monotonic()
                due, outbox = self._find_first()
                may_continue = self.closing_by is None or (now < self.closing_by and self.down_until is None)
                if outbox is not None and due <= now and may_continue:
                    return outbox
                if self.closing_by is not None:
                    return None
                is_idle = outbox is None
                del outbox
                self._sleeps_until = due
                is_woken = self.changed.wait(_IDLE_SECONDS if is_idle else due - now)
                self._sleeps_until = None
                if is_idle and not is_woken and self.closing_by is None and self._find_first()[1] is None:
                    self._thread = None
                    return None

    def _find_first(self) -> tuple[float, OutboxDispatcher | None]:
        """
        Return the outbox whose turn is due first, and the time.

        If several are due, for example after a broker pause, take the one with the oldest last turn.
        """
        dues = [(due, outbox) for outbox in list(self._outboxes) if (due := outbox.next_turn()) is not None]
        return min(dues, key=lambda each: (each[0], each[1].turn_began), default=(math.inf, None))


class DispatchedOutbox(Protocol):
    """The dispatcher's view of an outbox. `OutboxRuntime` describes its parts."""

    options: OutboxOptions

    @property
    def collection(self) -> Collection[Any]:
        """The user's collection."""

    @property
    def publisher(self) -> Publisher:
        """Publishes entries."""

    def deliver_queued(self, document_ids: Sequence[Any]) -> Delivery:
        """Deliver documents."""

    def find_due(self, limit: int) -> Sequence[Any]:
        """Return up to this many `_id`s of documents that may be claimed."""


class OutboxDispatcher:
    """
    The documents of one outbox that this process must deliver.

    Any thread may call `hint` and `expect`. They never block and never fail.

    Args:
        thread: the app's thread.
        outbox: the outbox.
    """

    def __init__(self, thread: AppDispatcher, outbox: DispatchedOutbox) -> None:
        self._thread = thread
        self._outbox = outbox
        self._queue: dict[Hashable, Any] = {}
        self._polls: list[float] = []
        self._expected_polls: list[float] = []
        self._expected = 0
        self._is_in_turn = False
        self.turn_began = -math.inf
        self._not_before = self._no_poll_before = -math.inf
        self._failures = self._rests = self._passed_over = 0

    # -- for callers -------------------------------------------------------------------------------

    @property
    def state(self) -> DispatcherState:
        """The dispatcher's current state, for status and metrics."""
        return DispatcherState(len(self._queue), self._thread.down_until is not None, self._passed_over)

    def hint(self, *document_ids: object, expected: bool = False) -> None:
        """
        Deliver documents that may have pending entries. If none is given, poll the index.

        Args:
            document_ids: `_id`s of the documents.
            expected: True for expected writes. If all of them are known, no poll is needed.
        """
        stored = [each for each in document_ids if _may_be_stored(each)]
        if len(stored) < len(document_ids):
            wrong = next(each for each in document_ids if not _may_be_stored(each))
            self._report(ValueError(f"No document can have the _id {wrong!r}"))

        def queue() -> None:
            self._enqueue(stored)
            if not document_ids:
                self._plan(0.0)
            elif expected:
                self._expected = max(0, self._expected - len(document_ids))
                self._expected_polls = self._expected_polls if self._expected else []

        self._change(queue)

    def expect(self) -> None:
        """Poll the index soon, and again, because a write with tasks will follow."""

        def expect() -> None:
            now = time.monotonic()
            first = min([now + _POLLS_AFTER[0], *self._expected_polls[:1]])  # it happens under any load
            self._expected_polls = [first, *(now + each for each in _POLLS_AFTER[1:])]
            self._expected += 1

        self._change(expect)

    def close(self) -> None:
        """Deliver queued documents, for at most half of `CLOSE_SECONDS`. Nothing is delivered afterwards."""
        with self._thread.changed:
            self._polls, self._expected_polls = [], []
            if self._queue:
                self.turn_began = -math.inf
                self._thread.wake(self)
            self._thread.changed.wait_for(self._is_done, CLOSE_SECONDS / 2)
            self._pass_over()

    def _is_done(self) -> bool:
        return not self._is_in_turn and (not self._queue or self._thread.down_until is not None)

    def _change(self, change: Callable[[], None]) -> None:
        """Change the pending work. The write is acknowledged, so nothing after it may fail."""
        try:
            with self._thread.changed:
                change()
                self._thread.wake(self)
        except SoftTimeLimitExceeded:  # from the task that writes
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is
            self._report(error)

    def _enqueue(self, document_ids: Sequence[Any]) -> None:
        """Queue documents, or leave them to the index."""
        is_away = self._thread.down_until is not None or self._thread.closing_by is not None
        for document_id in document_ids:
            codec = self._outbox.collection.codec_options
            key = id_key(document_id, codec)
            if key in self._queue or not (is_away or len(self._queue) >= QUEUE_MAX):
                self._queue[key] = to_stored(document_id, codec)
            else:
                self._passed_over += 1
                self._plan(_POLLS_AFTER[-1])

    def _plan(self, *seconds: float) -> None:
        """Plan polls of the index after these seconds. Of the earlier plans, keep the first and the last."""
        now = time.monotonic()
        self._polls = sorted({*self._polls[:1], *(now + each for each in seconds), *self._polls[-1:]})

    def plan_last_poll(self) -> None:
        """Poll the index now, if that is planned and MongoDB answers, because the process ends."""
        planned = (self._polls or self._expected_polls) and not self._rests
        self._polls, self._expected_polls = [0.0] if planned else [], []

    def _report(self, error: BaseException) -> None:
        logger.warning(
            "outbox %s: some entries are not delivered now. The sweep delivers them later: %s",
            self._name_safely(),
            short(error),
            extra={"event": "left_to_sweep"},
        )

    def _name_safely(self) -> str:
        try:
            return self._outbox.collection.full_name
        except Exception:  # noqa: BLE001 - the collection cannot be opened; the other outboxes need the thread
            return "(not opened yet)"

    # -- the thread --------------------------------------------------------------------------------

    def next_turn(self) -> float | None:
        """Return the time of the next work. None if nothing is planned."""
        dues = [max(each[0], self._no_poll_before) for each in (self._polls, self._expected_polls) if each]
        if self._thread.down_until is not None:
            return max(self._thread.down_until, self._not_before) if dues or self._queue else None
        if self._queue:
            is_urgent = len(self._queue) >= TURN or self._thread.closing_by is not None
            dues.append(self.turn_began if is_urgent else self.turn_began + _APART_SECONDS)
        return max(min(dues), self._not_before) if dues else None

    def take_turn(self) -> None:
        """Check a broker that was down. Otherwise poll the index if due, and deliver some documents."""
        self.turn_began = time.monotonic()
        try:
            if not self._thread.is_back(lambda: self._outbox.publisher.answers(_PROBE_SECONDS)):
                return
            with self._thread.changed:
                self._is_in_turn = True
                batch = [self._queue.pop(key) for key in list(self._queue)[:TURN]]
                is_poll_due = self._take_due_polls()
            found = self._poll() if is_poll_due else []
            keys = {id_key(each, self._outbox.collection.codec_options): each for each in (*batch, *found)}
            # Also without documents: something may still have to be removed.
            delivery = self._deliver(list(keys.values()))
            with self._thread.changed:
                self._note(delivery, found)
        except PyMongoError as error:
            self._report(error)
            self._pause()
        except BaseException as error:  # noqa: BLE001 - a thread that ends would deliver nothing from then on
            logger.error(
                "outbox %s: the dispatcher had an internal error. The sweep delivers its entries: %s",
                self._name_safely(),
                format_traceback(error),
                extra={"event": "dispatcher_failed"},
            )
            self._pause()
        finally:
            with self._thread.changed:
                self._is_in_turn = False
                self._thread.changed.notify_all()

    def _deliver(self, document_ids: Sequence[Any]) -> Delivery:
        """Deliver some documents. An unreadable one does not stop others."""
        try:
            return self._outbox.deliver_queued(document_ids)
        except PyMongoError:
            raise
        except Exception as error:
            if not document_ids:
                raise
            self._outbox.deliver_queued([])  # raises again if the error is not about a document
            if len(document_ids) == 1:
                log_undeliverable(self._name_safely(), document_ids[0], error)
                return Delivery(left=1, error=short(error), is_refused=True)
            total = Delivery()
            for document_id in document_ids:
                total = total.and_(self._deliver([document_id]))
            return total

    def _take_due_polls(self) -> bool:
        """Return True if a poll is due. Several due polls count as one."""
        now = self.turn_began
        if now < self._no_poll_before or len(self._queue) >= QUEUE_MAX:
            return False
        due = [each for each in (*self._polls, *self._expected_polls) if each <= now]
        self._polls = [each for each in self._polls if each > now]
        self._expected_polls = [each for each in self._expected_polls if each > now]
        if not self._expected_polls:
            self._expected = 0
        return bool(due)

    def _poll(self) -> Sequence[Any]:
        """Return due documents from the index."""
        try:
            found = self._outbox.find_due(_POLL)
        except PyMongoError as error:
            if not error.timeout:
                raise
            self._rest()
            return []
        self._no_poll_before = -math.inf
        return found

    def _rest(self) -> None:
        """Stop polling for a while: without the index a poll reads the whole collection."""
        with self._thread.changed:
            self._no_poll_before = time.monotonic() + _RESTS.nth(self._rests)
            self._rests += 1
            self._plan(0.0)

    def _note(self, delivery: Delivery, found: Sequence[Any]) -> None:
        """Plan what follows a delivery."""
        if delivery.dispatched:
            self._thread.note_success()
        if found and delivery.is_refused:  # the next poll would find the same documents
            self._rest()
        elif found:
            self._rests = 0
        self._failures = self._failures + 1 if delivery.is_late else 0
        if delivery.broker_down:
            self._thread.note_outage()
            self._pass_over()
            self._plan(0.0, *_POLLS_AFTER[1:])
            return
        self._enqueue(delivery.more)
        if delivery.is_late:
            self._plan(_FAILURES.nth(self._failures - 1))
        elif len(found) >= _POLL and delivery.dispatched:
            self._plan(0.0)

    def _pass_over(self) -> None:
        """Leave queued documents to the index."""
        self._passed_over += len(self._queue)
        self._queue = {}

    def _pause(self) -> None:
        """
        Deliver nothing for a while, because MongoDB does not answer. Then, and when claims have lapsed,
        poll the index.
        """
        with self._thread.changed:
            self._pass_over()
            pause = _FAILURES.nth(self._failures)
            self._failures += 1
            now = time.monotonic()
            self._not_before = now + pause
            self._polls = [now + pause, now + pause + self._outbox.options.claim_ttl]


def _may_be_stored(document_id: object) -> bool:
    """Return True if a document can have this `_id`. An operator or a pattern would match others."""
    return not isinstance(document_id, (list, tuple, Regex)) and parse_filter_id({"_id": document_id}) is not NO_ID
