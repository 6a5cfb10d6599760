"""
The dispatcher: one thread in each process that writes to an outbox, which publishes what was written.

Callers never wait for the broker. They hand over a document that their write has claimed, with its entries, or the
`_id` of one that may have something pending; the thread claims that, publishes, and removes in bulk.

::

    write --add/hint--> queue --(a turn)--> publish --> what was published --(100 ms or 100 documents)--> remove
                          ^                                                                                  |
                          +--------- back to the end of the queue, if more was added meanwhile <-------------+

- The queue holds a document once and is bounded. Where it is full, a write claims nothing, and the index is looked at
  later: nothing is lost, since everything is in the documents.
- A document has some entries published in its turn, and goes back to the end: nobody's documents wait for a hot one.
- Turns begin some milliseconds apart, unless somebody waits: what gathers meanwhile goes to the broker together.
- A claim whose time is half over is not relied on; the document is looked at as if somebody had asked for it.
- A broker that does not answer ends all turns: claims are let go, the queue is emptied, and this thread alone asks
  whether the broker is back. Then the index says what waits.
- A document that MongoDB does not answer for in time, since somebody's open transaction has written to it, has its turn
  later, and so has its removal; one that MongoDB refuses is left to the sweep. The others go on.
- With nothing to do for some seconds the thread ends, since it keeps its outbox and so its app; a write starts another.
- After a fork the child makes a dispatcher of its own; what the parent's queue holds is the parent's to deliver.
- At the end of a process what is queued is published for a second, what was published is removed, and claims are let
  go, also of documents of which a message is under way; after two seconds the process ends in any case.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pymongo
from bson import ObjectId, Regex
from bson.codec_options import CodecOptions
from celery.exceptions import SoftTimeLimitExceeded
from pymongo.errors import ExecutionTimeout, PyMongoError

from mongo_celery.exits import close_at_exit
from mongo_celery.mongo.identity import NO_ID, demanded_id, id_key
from mongo_celery.mongo.redaction import short, traceback_of
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.outbox.commands import Failure, tell_undeliverable
from mongo_celery.outbox.delivery import HeldDocument, PublishedPart
from mongo_celery.outbox.document_queue import QUEUE_MAX, DocumentQueue, LateDocuments, QueuedDocument
from mongo_celery.outbox.groups import groups_of
from mongo_celery.outbox.looks import LOOKS_AFTER, PlannedLooks
from mongo_celery.outbox.outage_watch import OutageWatch
from mongo_celery.outbox.relay import Relay
from mongo_celery.outbox.removals import SETTLE_DOCUMENTS, SETTLE_SECONDS

logger = logging.getLogger("mongo_celery.outbox")

_APART_SECONDS = 0.02
"""Between the beginnings of two turns, unless somebody waits: what is written meanwhile goes out by one command."""

_STALLED_SECONDS = 0.5
"""A message or a command that is under way for so long: who knows for how long yet; writes claim nothing for now."""

_LOOK = 100
"""Documents that one look at the index finds."""

_REFUSED_SECONDS = 30.0
"""For so long what this process could not publish is not taken from the index again; the sweep takes it."""

_IDLE_SECONDS = 5.0
"""After which a thread with nothing to do ends."""

_FAILURES = Pauses(first=1.0, longest=60.0)

CLOSE_SECONDS = 2.0
"""How long the end of a process may take, whatever broker and MongoDB do."""


@dataclass(frozen=True, slots=True)
class DispatcherState:
    """
    A dispatcher at one moment.

    Attributes:
        queued: documents that wait for their turn.
        unsettled: documents with entries that were published, and are not removed yet.
        broker_down: whether it waits for the broker to come back.
        passed_over: how many documents were left to the sweep or to a look at the index, since the queue was full or
            the broker down; since the process started.
    """

    queued: int = 0
    unsettled: int = 0
    broker_down: bool = False
    passed_over: int = 0


class OutboxDispatcher:
    """
    Publishes what this process has written to one outbox.

    `accepts`, `add`, `hint` and `expect` are for any thread; they never block and never fail. Nothing starts before
    the first of them.

    Args:
        name: gives what logs call the outbox.
        relay: gives the relay of this process; asked by the thread only.
        waiting: gives `_id`s of documents that may be claimed, as the index says, some at most and none of those given;
            the server may be given a bound for it, since it reads the whole collection where the index is missing.
        answers: whether the broker takes a new connection; may take some seconds.
        claim_ttl: seconds of a claim.
        codec: of the collection, by which `_id`s are compared.
        expects: whether writes that others carry out are looked for.
    """

    def __init__(
        self,
        name: Callable[[], str],
        relay: Callable[[], Relay],
        *,
        waiting: Callable[[int, Sequence[Any]], Sequence[Any]],
        answers: Callable[[], bool],
        claim_ttl: float,
        codec: Callable[[], CodecOptions[Any]],
        expects: bool = True,
    ) -> None:
        self._name = name
        self._relay = relay
        self._waiting = waiting
        self._claim_ttl = claim_ttl
        self._codec = codec
        self._expects = expects
        self._changed = threading.Condition()
        self._queue = DocumentQueue()
        self._late = LateDocuments()
        self._looks = PlannedLooks()
        self._broker = OutageWatch(name, answers)
        self._unsettled: list[PublishedPart] = []
        self._settled_by = 0.0
        self._unwanted: list[QueuedDocument] = []
        self._in_turn: dict[Hashable, QueuedDocument] = {}
        self._waiters: list[threading.Event] = []
        self._paused_until = 0.0
        self._failures = 0
        self._step_since: float | None = None
        self._passed_over = 0
        self._refused: OrderedDict[Hashable, tuple[float, Any]] = OrderedDict()
        self._published = 0
        self._published_at_look = -1
        self._turn_began = -math.inf
        self._sleeps_until: float | None = None
        self._closing_by: float | None = None
        self._thread: threading.Thread | None = None

    # -- for callers -------------------------------------------------------------------------------

    @property
    def accepts(self) -> bool:
        """Whether a write may claim its document: it will be published soon."""
        since = self._step_since
        return (
            not self._broker.is_down
            and self._closing_by is None
            and not self._queue.is_full
            and time.monotonic() >= self._paused_until
            and (since is None or time.monotonic() - since < _STALLED_SECONDS)
        )

    @property
    def state(self) -> DispatcherState:
        """For people and metrics."""
        late = self._late.all
        return DispatcherState(
            len(self._queue) + sum(each.look is not None for each in late),
            len(self._unsettled) + sum(bool(each.parts) for each in late),
            self._broker.is_down,
            self._passed_over,
        )

    def add(self, held: HeldDocument) -> None:
        """Have a document delivered that the write has claimed."""
        self._put([QueuedDocument(held.document_id, held)])

    def hint(self, *document_ids: object) -> None:
        """Have documents looked at that may have something pending; without any, look at the index."""
        if not document_ids:
            self._look_after(0.0)
            return
        stored = [each for each in document_ids if _may_be_stored(each)]
        if len(stored) < len(document_ids):
            self._leave(
                ValueError(f"no document has such an _id: {next(e for e in document_ids if e not in stored)!r}")
            )
        self._put([QueuedDocument(document_id) for document_id in stored])

    def expect(self) -> None:
        """Have the index looked at soon, and again: somebody will carry out a write that carries tasks."""
        if self._expects:
            self._look_after(*LOOKS_AFTER)

    def wait(self, held: HeldDocument | None, document_id: object, seconds: float) -> bool:
        """Have a document delivered, and wait until it was its turn; False if it was not within so many seconds."""
        return self.wait_all([(held, document_id)], seconds)

    def wait_all(self, documents: Sequence[tuple[HeldDocument | None, Any]], seconds: float) -> bool:
        """As `wait`, for documents that are delivered together, within one time for all of them."""
        deadline = time.monotonic() + seconds
        events = [threading.Event() for _ in documents]
        self._put(
            [
                QueuedDocument(document_id, held, waiting=[event])
                for (held, document_id), event in zip(documents, events, strict=True)
            ]
        )
        return all(event.wait(max(0.0, deadline - time.monotonic())) for event in events)

    def close_soon(self) -> None:
        """Begin to close, so that many dispatchers can be closed within the time of one."""
        with self._changed:
            if self._thread is None or self._closing_by is not None:
                return
            self._closing_by = time.monotonic() + CLOSE_SECONDS / 2
            self._looks.end_with_one()
            self._changed.notify_all()

    def close(self) -> None:
        """Publish what is queued for half of the time, remove what was published, let claims go, and end the thread."""
        self.close_soon()
        with self._changed:
            thread, closing_by = self._thread, self._closing_by
            if thread is None or closing_by is None or thread is threading.current_thread():
                return
        thread.join(max(0.0, closing_by + CLOSE_SECONDS / 4 - time.monotonic()))
        if thread.is_alive():  # it is in the middle of a message that the broker does not take
            with suppress(Exception), pymongo.timeout(max(0.1, closing_by + CLOSE_SECONDS / 2 - time.monotonic())):
                self._let_go()
            return
        with self._changed:  # whoever writes after this, in a process that goes on after all, starts another
            self._thread = self._closing_by = None

    def _put(self, documents: Sequence[QueuedDocument]) -> None:
        """Queue documents, or leave them to the index."""
        try:
            keys = [id_key(queued.document_id, self._codec()) for queued in documents]
            with self._changed:
                for key, queued in zip(keys, documents, strict=True):
                    self._queue_one(key, queued)
                self._wake()
        except SoftTimeLimitExceeded:  # of the task that writes
            raise
        except Exception as error:  # noqa: BLE001 - the write is acknowledged: nothing that comes after it may say otherwise
            self._leave(error)
            for queued in documents:
                _tell(queued.waiting)

    def _queue_one(self, key: Hashable, queued: QueuedDocument) -> None:
        if time.monotonic() < self._paused_until:  # nobody is to wait for MongoDB
            _tell(queued.waiting)
            queued.waiting = []
        if self._queue.join(key, queued):
            return
        if self._broker.is_down or self._closing_by is not None or self._queue.is_full:
            self._passed_over += 1
            self._looks.plan(LOOKS_AFTER[-1])
            if queued.all_owners:  # the write has claimed it before anybody knew
                self._unwanted.append(queued)
            _tell(queued.waiting)
        else:
            self._queue.append(key, queued)

    def _look_after(self, *seconds: float) -> None:
        try:
            with self._changed:
                self._looks.plan(*seconds)
                self._wake()
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001 - see `_put`
            self._leave(error)

    def _wake(self) -> None:
        if self._closing_by is not None:
            return
        if self._thread is None or not self._thread.is_alive():
            close_at_exit(self)
            self._thread = threading.Thread(target=self._run, name="mongo_celery-outbox", daemon=True)
            self._thread.start()
        if self._sleeps_until is not None:  # else it looks by itself what there is to do
            due = self._next_at(time.monotonic())
            if due is not None and due < self._sleeps_until:
                self._changed.notify_all()

    def _leave(self, error: BaseException) -> None:
        logger.warning(
            "outbox %s: what was written is left to the sweep: %s",
            self._name(),
            short(error),
            extra={"event": "left_to_sweep"},
        )

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._wait_for_work():
            try:
                self._work()
                self._failures = 0
            except PyMongoError as error:
                self._leave(error)
                self._forget_queue()
            except Exception as error:  # noqa: BLE001 - a dispatcher that ends would deliver nothing from then on
                logger.error(
                    "outbox %s: the dispatcher met an error of its own, and the sweep delivers what it had: %s",
                    self._name(),
                    traceback_of(error),
                    extra={"event": "dispatcher_failed"},
                )
                self._forget_queue()
            finally:
                self._step_since = None
        if self._thread is not threading.current_thread():
            return  # it had nothing to do, and may have a successor by now
        with suppress(Exception), pymongo.timeout(CLOSE_SECONDS / 4):
            self._let_go()

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do; False if there is nothing for long, or the process ends."""
        with self._changed:
            while True:
                now = time.monotonic()
                if self._closing_by is not None:
                    has_work = len(self._queue) > 0 or self._looks.is_last_due
                    return has_work and not self._broker.is_down and now < self._closing_by
                due = self._next_at(now)
                if due is not None and due <= now:
                    return True
                self._sleeps_until = math.inf if due is None else due
                is_woken = self._changed.wait(_IDLE_SECONDS if due is None else due - now)
                self._sleeps_until = None
                if due is None and not is_woken and self._is_idle():
                    self._thread = None
                    return False

    def _is_idle(self) -> bool:
        return self._closing_by is None and self._next_at(time.monotonic()) is None

    def _next_at(self, now: float) -> float | None:
        """When there is something to do; None if nothing is planned."""
        times = [self._looks.next if self._broker.down_until is None else self._broker.down_until]
        if self._unsettled:
            times.append(self._settled_by)
        if len(self._queue) and not self._broker.is_down:
            times.append(now if self._queue.is_urgent else self._turn_began + _APART_SECONDS)
        if self._unwanted:
            times.append(now)
        planned = [*(each for each in times if each is not None), *(each.at for each in self._late.all)]
        return max(min(planned), self._paused_until) if planned else None

    def _work(self) -> None:
        """One turn: ask a broker that was away, look at the index, deliver some documents, remove, and what is late."""
        if self._broker.probe():
            with self._changed:
                self._looks.plan(0.0, *LOOKS_AFTER[1:])
        if not self._broker.is_down:
            self._look()
            self._deliver(self._taken())
            self._in_turn = {}
        if self._unsettled and (self._waiters or not self._may_settle_later()):
            self._settle()
        self._release_unwanted()
        self._tell_waiting()
        self._catch_up()

    def _taken(self) -> list[QueuedDocument]:
        with self._changed:
            if len(self._queue):
                self._turn_began = time.monotonic()
            documents = self._queue.take()
            self._in_turn = {id_key(queued.document_id, self._codec()): queued for queued in documents}
            return documents

    def _deliver(self, documents: Sequence[QueuedDocument]) -> None:
        """Publish what is held, then claim and publish what is to be looked at."""
        fresh, looks = list[HeldDocument](), list[QueuedDocument]()
        for queued in documents:
            self._waiters += queued.waiting
            if queued.held is not None and not self._is_old(queued.held):
                fresh.append(queued.held)
            else:
                looks.append(QueuedDocument(queued.document_id, None, queued.all_owners))
        if not self._publish_all(fresh):
            self._release(looks)
            return
        if looks:
            self._settle()  # what was published there is still pending, and this process still holds it
            self._deliver_looks([queued for queued in looks if not self._waits_for_removal(queued)])

    def _deliver_looks(self, looks: Sequence[QueuedDocument], times: int = 0) -> None:
        ids = [queued.document_id for queued in looks]
        owner, missed = ObjectId(), list[Failure]()
        self._step()
        held = [each for queued in looks for each in queued.owners]
        self._claims(ids, owner)
        claimed = self._relay().claim(ids, held=held, owner=owner, missed=missed)
        if not self._publish_all(claimed):
            self._relay().removals.release(ids, [owner])
        owners = {id_key(queued.document_id, self._codec()): queued.owners for queued in looks}
        for document_id, error in missed:
            key = id_key(document_id, self._codec())
            if error.timeout:
                self._put_off(key, times, look=QueuedDocument(document_id, None, (*owners.get(key, ()), owner)))
            else:
                tell_undeliverable(self._name(), document_id, error)
                self._refuse(document_id)

    def _claims(self, document_ids: Sequence[Any], owner: ObjectId) -> None:
        """Documents of this turn are claimed once more: the end of the process lets that go, too."""
        with self._changed:
            for document_id in document_ids:
                key = id_key(document_id, self._codec())
                there = self._in_turn.get(key, QueuedDocument(document_id))
                self._in_turn[key] = QueuedDocument(document_id, None, (*there.all_owners, owner))

    def _publish_all(self, documents: Iterable[HeldDocument]) -> bool:
        """Publish from documents that are held; False if the broker does not answer."""
        groups = groups_of(self._relied_on(documents))
        for group in groups:
            self._make_room(len(group))
            rest = {id(held): held for held in group}
            parts = self._relay().pending.publish_together(group, judge=False, step=self._make_room)
            for part in parts:
                self._note(part)
                del rest[id(part.held)]
                if self._broker.takes_nothing(part):
                    others = (each for other in groups for each in other) if isinstance(documents, list) else ()
                    held = self._not_begun(parts) if part.is_outage else rest.values()
                    self._pause_for_broker([*held, *others])
                    return False
            self._step()  # the next ones may have to be read
        self._make_room(0)
        return True

    def _make_room(self, documents: int = 1) -> None:
        """Something is to be published; what was published before is removed, if it is time."""
        if len(self._unsettled) + documents > SETTLE_DOCUMENTS or not self._may_settle_later():
            self._settle()
        self._step()

    def _relied_on(self, documents: Iterable[HeldDocument]) -> Iterator[HeldDocument]:
        """Those of which the claim has time; the others are looked at as if somebody had asked for them."""
        for held in documents:
            if self._is_old(held):
                self._look_again(held.document_id, (held.owner,))
            else:
                yield held

    def _not_begun(self, parts: Iterable[PublishedPart]) -> Iterator[HeldDocument]:
        """Of documents that went together until the broker fell silent, those of which it has nothing."""
        for part in parts:
            if part.names:
                self._note(part)
            else:
                yield part.held

    def _step(self) -> None:
        """Something begins that takes long only where the broker or MongoDB does not answer."""
        self._step_since = time.monotonic()

    def _is_old(self, held: HeldDocument) -> bool:
        """Whether a claim is not relied on any more."""
        return time.monotonic() - held.claimed_at >= self._claim_ttl / 2

    def _look_again(self, document_id: object, owners: tuple[ObjectId, ...]) -> None:
        """Have a document that this process holds looked at after all others, also beyond the bound of the queue."""
        with self._changed:
            self._queue.look_at(id_key(document_id, self._codec()), document_id, owners)

    def _note(self, part: PublishedPart) -> None:
        self._went_out(part.dispatched)
        if part.ran_out:
            self._look_again(part.held.document_id, (part.held.owner,))
        elif part.lets_go and not part.is_outage:  # a process that knows more than this one delivers it
            self._refuse(part.held.document_id)
        with self._changed:
            if not self._unsettled:
                self._settled_by = time.monotonic() + SETTLE_SECONDS
            self._unsettled.append(part)
            self._in_turn.pop(id_key(part.held.document_id, self._codec()), None)  # its removal lets it go

    def _went_out(self, count: int) -> None:
        """So many entries were published."""
        if count:
            self._published += count
            self._broker.went_out()

    def _refuse(self, document_id: object) -> None:
        self._refused[id_key(document_id, self._codec())] = time.monotonic() + _REFUSED_SECONDS, document_id
        if len(self._refused) > QUEUE_MAX:
            self._refused.popitem(last=False)

    def _may_settle_later(self) -> bool:
        return len(self._unsettled) < SETTLE_DOCUMENTS and time.monotonic() < self._settled_by

    def _settle(self) -> None:
        """Remove what was published; what has got more meanwhile goes to the end of the queue."""
        with self._changed:
            parts, self._unsettled = self._unsettled, []
        try:
            self._remove(parts)
        except PyMongoError:
            with self._changed:  # removing by name may be done at any time
                self._unsettled = [*parts, *self._unsettled]
            raise

    def _remove(self, parts: Sequence[PublishedPart], times: int = 0) -> None:
        if not parts:
            return
        self._step()
        remainder = self._relay().removals.settle(parts)
        for document_id in remainder.document_ids:
            self._look_again(document_id, tuple(remainder.owners))
        for part, error in remainder.failed:
            key = id_key(part.held.document_id, self._codec())
            if error.timeout:
                self._put_off(key, times, part=part)
            else:
                tell_undeliverable(self._name(), part.held.document_id, error)
                self._refuse(part.held.document_id)

    # -- what is late ------------------------------------------------------------------------------

    def _put_off(self, key: Hashable, times: int, **what: Any) -> None:
        """Ask for a document later that MongoDB did not answer for in time."""
        with self._changed:
            self._late.put_off(key, times, **what)

    def _waits_for_removal(self, look: QueuedDocument) -> bool:
        """Whether what was published of a document is still to be removed; it is looked at afterwards."""
        with self._changed:
            return self._late.wait_for_removal(id_key(look.document_id, self._codec()), look)

    def _catch_up(self) -> None:
        """Ask again, one document at a time and after all others, for what MongoDB did not answer for in time."""
        with self._changed:
            found = self._late.take_one(time.monotonic())
        if found is None:
            return
        key, late = found
        try:
            self._remove(late.parts, late.times + 1)
        except PyMongoError:
            with self._changed:
                self._unsettled += late.parts
            raise
        if late.look is None:
            return
        with self._changed:
            if self._late.put_back(key, late.look):  # its removal is put off again
                return
        if self._broker.is_down:
            self._release([late.look])
        else:
            self._deliver_looks([late.look], late.times + 1)

    # -- what is away ------------------------------------------------------------------------------

    def _pause_for_broker(self, held: Sequence[HeldDocument]) -> None:
        """The broker takes nothing: let all claims go, leave everything to the index, and ask from time to time."""
        with self._changed:
            documents = self._queue.take_all()
            self._passed_over += len(documents) + len(held)
            self._broker.went_down()
            for queued in documents:
                self._waiters += queued.waiting
        with suppress(PyMongoError):  # claims lapse
            self._release([*documents, *(QueuedDocument(each.document_id, each) for each in held)])
        self._settle()

    def _release(self, documents: Sequence[QueuedDocument]) -> None:
        owned = [(queued.document_id, queued.all_owners) for queued in documents if queued.all_owners]
        if owned:
            self._step()
            self._relay().removals.release(
                [each for each, _ in owned], [owner for _, owners in owned for owner in owners]
            )

    def _release_unwanted(self) -> None:
        """Let claims go that writes have taken, of documents that are left to a look at the index."""
        with self._changed:
            documents, self._unwanted = self._unwanted, []
        self._release(documents)

    def _look(self) -> None:
        """Queue what the index says is waiting, if a look is planned for now."""
        with self._changed:
            if self._queue.is_full or not self._looks.begin():
                return
        now = time.monotonic()
        self._step()
        refused = [document_id for until, document_id in self._refused.values() if until > now]
        try:
            found = self._waiting(_LOOK, refused)
        except ExecutionTimeout:
            with self._changed:
                self._looks.rest()
            return
        keys = [id_key(each, self._codec()) for each in found]
        with self._changed:
            self._looks.succeeded()
            for key, document_id in zip(keys, found, strict=True):
                if key not in self._late:
                    self._queue.look_at(key, document_id)
            if len(found) >= _LOOK and self._published > self._published_at_look:
                self._looks.plan(0.0)
        self._published_at_look = self._published

    def _forget_queue(self) -> None:
        """MongoDB does not answer: claims are let go when it does, or lapse, and the index is looked at later."""
        with self._changed:
            documents, self._in_turn = self._queue.take_all(), {}
            for queued in documents:
                self._waiters += queued.waiting
            self._passed_over += len(documents)
            self._unwanted = [*self._unwanted, *documents][-QUEUE_MAX:]
            pause = _FAILURES.nth(self._failures)
            self._failures += 1
            self._paused_until = time.monotonic() + pause
            self._looks.plan_only(pause, pause + self._claim_ttl)  # at once, and when the claims have lapsed
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        waiters, self._waiters = self._waiters, []
        _tell(waiters)

    def _let_go(self) -> None:
        """At the end: remove what was published, and release what was not, also what the thread is in the middle of."""
        with self._changed:
            late = self._late.take_all()
            parts, self._unsettled = [*self._unsettled, *(part for each in late for part in each.parts)], []
            documents = [*self._unwanted, *self._queue.take_all(), *self._in_turn.values()]
            documents += [each.look for each in late if each.look is not None]
            self._unwanted = []
        _tell([each for queued in documents for each in queued.waiting])
        _tell(self._waiters)
        remainder = self._relay().removals.settle(parts)
        self._relay().removals.release(remainder.document_ids, remainder.owners)
        self._release(documents)


def _may_be_stored(document_id: object) -> bool:
    """Whether a document may have such an `_id`; what is an operator or a pattern would name others."""
    return not isinstance(document_id, (list, tuple, Regex)) and demanded_id({"_id": document_id}) is not NO_ID


def _tell(waiting: Sequence[threading.Event]) -> None:
    for each in waiting:
        each.set()
