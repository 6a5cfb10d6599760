"""
The dispatcher: one thread for all outboxes of an app in a process. It publishes what the process has written.

Callers never wait for the broker. They leave the `_id` of a document that may have something pending, or ask for a look
at the index. The thread claims documents in batches, has the relay of their outbox publish and remove, and takes the
outboxes in turns.

- The queue of an outbox holds a document once and is bounded. If it is full, the index is read later: everything is in
  the documents.
- Turns of an outbox begin some milliseconds apart, unless a caller waits: what gathers meanwhile is claimed, sent and
  removed together.
- A document has some entries published in its turn. The rest is found by a look, after all others.
- If the broker takes nothing, all turns end, and this thread alone asks whether it is back. Then the index is read.
- If MongoDB does not answer for an outbox, that outbox pauses. If it does not answer for a document, or this process
  cannot publish what is in it, the sweep takes that document.
- After some seconds with nothing to do the thread ends. The next write starts another.
- A forked child has a dispatcher of its own. The parent delivers what its own queue holds.
- At the end of a process the thread delivers for a second. After two seconds the process ends in any case, and claims
  lapse.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bson import Regex
from bson.codec_options import CodecOptions
from celery.exceptions import SoftTimeLimitExceeded
from pymongo.errors import PyMongoError

from mongo_celery.exits import close_at_exit
from mongo_celery.mongo.identity import NO_ID, id_key, parse_filter_id
from mongo_celery.mongo.redaction import format_traceback, short
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.outbox.delivery import Delivery
from mongo_celery.outbox.outage_watch import OutageWatch

logger = logging.getLogger("mongo_celery.outbox")

QUEUE_MAX = 1000
"""Documents that wait for their turn."""

TURN = 50
"""Documents of one turn."""

_APART_SECONDS = 0.1
"""Between the beginnings of two turns of an outbox, unless a caller waits."""

_LOOK = 100
"""Documents that one look at the index finds."""

_LOOKS_AFTER = (0.1, 0.5, 2.0)
"""Seconds from `with_tasks` to the look at the index: the caller carries out the write meanwhile."""

_REFUSED_SECONDS = 30.0
"""For so long a look passes over a document that this process could not deliver."""

_IDLE_SECONDS = 5.0
_FAILURES = Pauses(first=1.0, longest=60.0)
"""Before the next turn of an outbox for which MongoDB did not answer."""

_RESTS = Pauses(first=2.0, longest=60.0)
"""Before the next look, after one that MongoDB did not end in time: without the index it reads the whole collection."""

CLOSE_SECONDS = 2.0
"""How long the end of a process may take, whatever broker and MongoDB do."""


@dataclass(frozen=True, slots=True)
class DispatcherState:
    """
    One outbox in the dispatcher of a process, at one moment.

    Attributes:
        queued: documents that wait for their turn.
        broker_down: whether the dispatcher waits for the broker to come back.
        passed_over: how many documents were left to the sweep or to a look at the index, since the queue was full or
            the broker down; since the process started.
    """

    queued: int = 0
    broker_down: bool = False
    passed_over: int = 0


class AppDispatcher:
    """
    The thread of one app in this process.

    It starts with the first document, ends when it has nothing to do, and keeps neither its app nor an outbox.
    """

    def __init__(self, _app: Any = None) -> None:
        self.changed = threading.Condition()
        self.broker = OutageWatch()
        self.closing_by: float | None = None
        self._outboxes: weakref.WeakSet[OutboxDispatcher] = weakref.WeakSet()
        self._sleeps_until: float | None = None
        self._thread: threading.Thread | None = None

    def wake(self, outbox: OutboxDispatcher) -> None:
        """Let the thread take an outbox's turn when it is due; the caller has the lock."""
        is_running = self._thread is not None and self._thread.is_alive()
        if self.closing_by is not None and is_running:
            return
        self.closing_by = None  # the process goes on after a close that took too long
        self._outboxes.add(outbox)
        if not is_running:
            close_at_exit(self)
            self._thread = threading.Thread(target=self._run, name="mongo_celery-outbox", daemon=True)
            self._thread.start()
        due = outbox.next_at() if self._sleeps_until is not None else None
        if due is not None and self._sleeps_until is not None and due < self._sleeps_until:
            self.changed.notify_all()

    def close_soon(self) -> None:
        """Begin to close, so that many things can be closed within the time of one."""
        with self.changed:
            if self._thread is None or self.closing_by is not None:
                return
            self.closing_by = time.monotonic() + CLOSE_SECONDS / 2
            for outbox in list(self._outboxes):
                outbox.plan_last_look()
            self.changed.notify_all()

    def close(self) -> None:
        """Deliver what is queued for half of the time, and end the thread."""
        self.close_soon()
        with self.changed:
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(CLOSE_SECONDS)
        if not thread.is_alive():
            with self.changed:  # a process that goes on after all starts another, and may have done so
                if self._thread is thread:
                    self._thread = self.closing_by = None

    def _run(self) -> None:
        while (outbox := self._next()) is not None:
            outbox.take_turn()
            del outbox  # nothing keeps an outbox, and so its app, while the thread sleeps

    def _next(self) -> OutboxDispatcher | None:
        """Wait for a turn; None if there is nothing to do for long, or the process ends."""
        with self.changed:
            while True:
                now = time.monotonic()
                due, outbox = self._first()
                if outbox is not None and due <= now and self._may_continue(now):
                    return outbox
                if self.closing_by is not None:
                    return None
                is_idle = outbox is None
                del outbox
                self._sleeps_until = due
                is_woken = self.changed.wait(_IDLE_SECONDS if is_idle else due - now)
                self._sleeps_until = None
                if is_idle and not is_woken and self.closing_by is None and self._first()[1] is None:
                    self._thread = None
                    return None

    def _may_continue(self, now: float) -> bool:
        return self.closing_by is None or (now < self.closing_by and not self.broker.is_down)

    def _first(self) -> tuple[float, OutboxDispatcher | None]:
        """
        Return the outbox whose turn is due first, and when.

        Of several that are due at one time, as when the broker is asked again, the one whose last turn is longest ago.
        """
        dues = [(due, outbox) for outbox in list(self._outboxes) if (due := outbox.next_at()) is not None]
        return min(dues, key=lambda each: (each[0], each[1].turn_began), default=(math.inf, None))


class OutboxDispatcher:
    """
    What this process is to deliver of one outbox.

    `hint`, `expect` and `wait_all` are for any thread. `hint` and `expect` never block, and none of them fails.

    Args:
        thread: of the app.
        name: gives what logs call the outbox.
        deliver: delivers documents, by their `_id`s.
        waiting: gives `_id`s of documents that may be claimed, as the index says, some at most and none of those given.
        answers: whether the broker takes a new connection; may take some seconds.
        claim_ttl: seconds of a claim.
        codec: of the collection, by which `_id`s are compared.
        expects: whether writes that others carry out are looked for.
    """

    def __init__(
        self,
        thread: AppDispatcher,
        name: Callable[[], str],
        *,
        deliver: Callable[[Sequence[Any]], Delivery],
        waiting: Callable[[int, Sequence[Any]], Sequence[Any]],
        answers: Callable[[], bool],
        claim_ttl: float,
        codec: Callable[[], CodecOptions[Any]],
        expects: bool = True,
    ) -> None:
        self._thread = thread
        self._name = name
        self._deliver = deliver
        self._waiting = waiting
        self._answers = answers
        self._claim_ttl = claim_ttl
        self._codec = codec
        self._expects = expects
        self._queue: dict[Hashable, tuple[Any, list[threading.Event]]] = {}
        self._in_turn: Sequence[threading.Event] | None = None
        self._looks: list[float] = []
        self._expected_looks: list[float] = []
        self._expected = 0
        self._refused: dict[Hashable, tuple[float, Any]] = {}
        self.turn_began = -math.inf
        self._not_before = -math.inf
        self._no_look_before = -math.inf
        self._failures = self._rests = self._passed_over = 0

    # -- for callers -------------------------------------------------------------------------------

    @property
    def state(self) -> DispatcherState:
        """For people and metrics."""
        return DispatcherState(len(self._queue), self._thread.broker.is_down, self._passed_over)

    def hint(self, *document_ids: object, expected: bool = False) -> None:
        """
        Deliver documents that may have something pending; without any, look at the index.

        Args:
            document_ids: their `_id`s.
            expected: whether these are writes that were expected: if all of them are known, nothing is looked for.
        """
        stored = [each for each in document_ids if _may_be_stored(each)]
        if len(stored) < len(document_ids):
            wrong = next(each for each in document_ids if not _may_be_stored(each))
            self._report(ValueError(f"no document has such an _id: {wrong!r}"))
        self._enqueue([(each, None) for each in stored], looks=() if document_ids else (0.0,))
        if expected and document_ids:
            with self._thread.changed:
                self._expected = max(0, self._expected - len(document_ids))
                if not self._expected:
                    self._expected_looks = []

    def expect(self) -> None:
        """Have the index looked at soon, and again: somebody will carry out a write that carries tasks."""
        if not self._expects:
            return
        with self._thread.changed:
            now = time.monotonic()
            first = min([now + _LOOKS_AFTER[0], *self._expected_looks[:1]])  # under any load it comes
            self._expected_looks = [first, *(now + each for each in _LOOKS_AFTER[1:])]
            self._expected += 1
        self._enqueue([])

    def wait_all(self, document_ids: Sequence[Any], seconds: float) -> bool:
        """Deliver documents, and wait until all had their turn; False if they had not within so many seconds."""
        deadline = time.monotonic() + seconds
        events = [threading.Event() for _ in document_ids]
        self._enqueue(list(zip(document_ids, events, strict=True)))
        return all(event.wait(max(0.0, deadline - time.monotonic())) for event in events)

    def close(self) -> None:
        """Deliver what is queued, for half of `CLOSE_SECONDS` at most; nothing is delivered afterwards."""
        with self._thread.changed:
            self._looks, self._expected_looks = [], []
            if self._queue:
                next(iter(self._queue.values()))[1].append(threading.Event())  # it is urgent
                self._thread.wake(self)
            self._thread.changed.wait_for(self._is_done, CLOSE_SECONDS / 2)
            self._pass_over()

    def _is_done(self) -> bool:
        return self._in_turn is None and (not self._queue or self._thread.broker.is_down)

    def _enqueue(self, documents: Sequence[tuple[Any, threading.Event | None]], looks: Sequence[float] = ()) -> None:
        """Queue documents, or leave them to the index."""
        try:
            keys = [id_key(document_id, self._codec()) for document_id, _ in documents]
            with self._thread.changed:
                self._plan(*looks)
                for key, (document_id, event) in zip(keys, documents, strict=True):
                    self._queue_one(key, document_id, event)
                self._thread.wake(self)
        except SoftTimeLimitExceeded:  # of the task that writes
            raise
        except Exception as error:  # noqa: BLE001 - the write is acknowledged: nothing that comes after it may say otherwise
            self._report(error)
            _notify(event for _, event in documents)

    def _queue_one(self, key: Hashable, document_id: Any, event: threading.Event | None) -> None:
        is_away = self._thread.broker.is_down or self._thread.closing_by is not None
        if key not in self._queue and (is_away or len(self._queue) >= QUEUE_MAX):
            self._passed_over += 1
            self._plan(_LOOKS_AFTER[-1])
            _notify([event])
            return
        if time.monotonic() < self._not_before:  # nobody waits for MongoDB
            _notify([event])
            event = None
        self._queue.setdefault(key, (document_id, []))[1].extend([] if event is None else [event])

    def _plan(self, *seconds: float) -> None:
        """Look at the index so many seconds from now; what is planned stays."""
        now = time.monotonic()
        self._looks = sorted({*self._looks[:1], *(now + each for each in seconds), *self._looks[-1:]})

    def plan_last_look(self) -> None:
        """The process ends: look at the index now, if that was planned and is answered."""
        planned = (self._looks or self._expected_looks) and not self._rests
        self._looks, self._expected_looks = [0.0] if planned else [], []

    def _report(self, error: BaseException) -> None:
        logger.warning(
            "outbox %s: what was written is left to the sweep: %s",
            self._name_here(),
            short(error),
            extra={"event": "left_to_sweep"},
        )

    def _name_here(self) -> str:
        try:
            return self._name()
        except Exception:  # noqa: BLE001 - the collection cannot be opened; the other outboxes need the thread
            return "(not opened yet)"

    # -- the thread --------------------------------------------------------------------------------

    def next_at(self) -> float | None:
        """Return when there is something to do; None if nothing is planned."""
        down_until = self._thread.broker.down_until
        looks = [max(each[0], self._no_look_before) for each in (self._looks, self._expected_looks) if each]
        if down_until is not None:
            return max(down_until, self._not_before) if looks or self._queue else None
        if self._queue:
            is_urgent = len(self._queue) >= TURN or any(waiting for _, waiting in self._queue.values())
            is_urgent = is_urgent or self._thread.closing_by is not None
            looks.append(self.turn_began if is_urgent else self.turn_began + _APART_SECONDS)
        return max(min(looks), self._not_before) if looks else None

    def take_turn(self) -> None:
        """Ask a broker that was away; else look at the index if that is due, and deliver some documents."""
        self.turn_began = time.monotonic()
        try:
            if self._thread.broker.is_down and not self._thread.broker.probe(self._answers):
                return
            with self._thread.changed:
                batch = [self._queue.pop(key) for key in list(self._queue)[:TURN]]
                is_look_due = self._is_look_due(self.turn_began)
                self._in_turn = [event for _, waiting in batch for event in waiting]
            is_whole = self._deliver_some([document_id for document_id, _ in batch], is_look_due=is_look_due)
            self._failures = 0 if is_whole else self._failures + 1
        except PyMongoError as error:
            self._report(error)
            self._pause()
        except BaseException as error:  # noqa: BLE001 - a thread that ends would deliver nothing from then on
            logger.error(
                "outbox %s: the dispatcher met an error of its own, and the sweep delivers what it had: %s",
                self._name_here(),
                format_traceback(error),
                extra={"event": "dispatcher_failed"},
            )
            self._pause()
        finally:
            with self._thread.changed:
                _notify(self._in_turn)
                self._in_turn = None
                self._thread.changed.notify_all()

    def _is_look_due(self, now: float) -> bool:
        """Return True if a look is due; all that are due are one."""
        if now < self._no_look_before or len(self._queue) >= QUEUE_MAX:
            return False
        due = [each for each in (*self._looks, *self._expected_looks) if each <= now]
        self._looks = [each for each in self._looks if each > now]
        self._expected_looks = [each for each in self._expected_looks if each > now]
        if not self._expected_looks:
            self._expected = 0
        return bool(due)

    def _deliver_some(self, document_ids: list[Any], *, is_look_due: bool) -> bool:
        """Deliver documents; False where MongoDB did not answer for one of them in time."""
        found = self._look_up() if is_look_due else []
        keys = {id_key(each, self._codec()): each for each in (*document_ids, *found)}
        delivery = self._deliver(list(keys.values()))  # of none, too: something may have to be removed yet
        if delivery.dispatched:
            self._thread.broker.went_out()
        until = time.monotonic() + _REFUSED_SECONDS
        self._refused.update((id_key(each, self._codec()), (until, each)) for each in delivery.refused)
        self._refused = dict(list(self._refused.items())[-QUEUE_MAX:])
        with self._thread.changed:
            if delivery.broker_down:
                self._thread.broker.went_down()
                self._pass_over()
                self._plan(0.0, *_LOOKS_AFTER[1:])
            elif delivery.is_late:
                self._plan(_FAILURES.nth(self._failures))
            elif (len(found) >= _LOOK and delivery.dispatched) or delivery.has_more:
                self._plan(0.0)
        return not delivery.is_late

    def _look_up(self) -> list[Any]:
        """Return what the index says is waiting."""
        now = time.monotonic()
        self._refused = {key: each for key, each in self._refused.items() if each[0] > now}
        try:
            found = self._waiting(_LOOK, [document_id for _, document_id in self._refused.values()])
        except PyMongoError as error:
            if not error.timeout:
                raise
            with self._thread.changed:
                self._no_look_before = time.monotonic() + _RESTS.nth(self._rests)
                self._rests += 1
                self._plan(0.0)
            return []
        self._no_look_before, self._rests = -math.inf, 0
        return list(found)

    def _pass_over(self) -> None:
        """Leave what is queued to the index."""
        self._passed_over += len(self._queue)
        _notify(event for _, waiting in self._queue.values() for event in waiting)
        self._queue = {}

    def _pause(self) -> None:
        """MongoDB does not answer: claims lapse, and the index is looked at after a pause, and when they have."""
        with self._thread.changed:
            self._pass_over()
            pause = _FAILURES.nth(self._failures)
            self._failures += 1
            now = time.monotonic()
            self._not_before = now + pause
            self._looks = [now + pause, now + pause + self._claim_ttl]


def _may_be_stored(document_id: object) -> bool:
    """Whether a document may have such an `_id`; what is an operator or a pattern would name others."""
    return not isinstance(document_id, (list, tuple, Regex)) and parse_filter_id({"_id": document_id}) is not NO_ID


def _notify(waiting: Iterable[threading.Event | None] | None) -> None:
    for each in waiting or ():
        if each is not None:
            each.set()
