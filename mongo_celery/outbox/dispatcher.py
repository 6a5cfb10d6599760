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
- A claim whose time is half over is not relied on; the document is looked at as if somebody had asked for it.
- A broker that does not answer ends all turns: claims are let go, the queue is emptied, and this thread alone asks
  whether the broker is back. Then the index says what waits.
- A document that MongoDB does not answer for in time, since somebody's open transaction has written to it, has its turn
  later, and so has its removal; one that MongoDB refuses is left to the sweep. The others go on.
- After a fork the child makes a dispatcher of its own; what the parent's queue holds is the parent's to deliver.
- At the end of a process what is queued is published for a second, what was published is removed, and claims are let
  go; after two seconds the process ends in any case.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pymongo
from bson import ObjectId, Regex
from bson.codec_options import CodecOptions
from celery.exceptions import SoftTimeLimitExceeded
from pymongo.errors import PyMongoError

from mongo_celery.exits import close_at_exit
from mongo_celery.mongo.identity import NO_ID, demanded_id, id_key
from mongo_celery.mongo.redaction import short, traceback_of
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.outbox.failures import FailureKind
from mongo_celery.outbox.relay import (
    SETTLE_DOCUMENTS,
    SETTLE_SECONDS,
    Failure,
    HeldDocument,
    PublishedPart,
    Relay,
    tell_undeliverable,
)

logger = logging.getLogger("mongo_celery.outbox")

QUEUE_MAX = 1000
"""Documents; more than are published before a claim of some seconds lapses would be claimed in vain."""

_TURN = 50
"""Documents that are taken from the queue at once; those to be looked at are claimed by one command."""

_STALLED_SECONDS = 0.5
"""A message or a command that is under way for so long: who knows for how long yet; writes claim nothing for now."""

_REFUSALS_MAX = 3
"""So many documents in a row that a broker has refused with all others are an outage, too."""

_LOOK = 100
"""Documents that one look at the index finds."""

_REFUSED_SECONDS = 30.0
"""For so long what this process could not publish is not taken from the index again; the sweep takes it."""

_LATER = Pauses(first=1.0, longest=10.0)
"""Before a document is asked for again that MongoDB did not answer for in time."""

_PROBES = Pauses(first=0.5, longest=5.0)
_FAILURES = Pauses(first=1.0, longest=60.0)

_LOOKS_AFTER = (0.1, 0.5, 2.0)
"""When the index is looked at after a write that the outbox has prepared, and somebody else carries out."""

_LOOKS_MAX = 5
"""Looks at the index that are planned at any time."""

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


@dataclass(slots=True)
class _Errand:
    """A document in the queue: held with its entries, or to be looked at, and who waits for it."""

    document_id: Any
    held: HeldDocument | None = None
    owners: tuple[ObjectId, ...] = ()
    waiting: list[threading.Event] = field(default_factory=list)

    @property
    def all_owners(self) -> tuple[ObjectId, ...]:
        """Of every claim that this process may have on it."""
        return self.owners if self.held is None else (*self.owners, self.held.owner)


@dataclass(slots=True)
class _Later:
    """What MongoDB did not answer for in time: what has been published, to be removed, or what is to be looked at."""

    at: float
    times: int = 0
    parts: list[PublishedPart] = field(default_factory=list)
    errand: _Errand | None = None


class OutboxDispatcher:
    """
    Publishes what this process has written to one outbox.

    `accepts`, `add`, `hint` and `expect` are for any thread; they never block and never fail. Nothing starts before
    the first of them.

    Args:
        name: gives what logs call the outbox.
        relay: gives the relay of this process; asked by the thread only.
        waiting: gives `_id`s of documents that may be claimed, as the index says, some at most and none of those given.
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
        self._answers = answers
        self._claim_ttl = claim_ttl
        self._codec = codec
        self._expects = expects
        self._changed = threading.Condition()
        self._queue: OrderedDict[Hashable, _Errand] = OrderedDict()
        self._unsettled: list[PublishedPart] = []
        self._settled_by = 0.0
        self._later: dict[Hashable, _Later] = {}
        self._unwanted: list[_Errand] = []
        self._waiters: list[threading.Event] = []
        self._looks_at: list[float] = []
        self._down_until: float | None = None
        self._probes = 0
        self._is_on_trial = False
        self._refusals = 0
        self._paused_until = 0.0
        self._failures = 0
        self._step_since: float | None = None
        self._passed_over = 0
        self._refused: OrderedDict[Hashable, tuple[float, Any]] = OrderedDict()
        self._published = 0
        self._published_at_look = -1
        self._closing_by: float | None = None
        self._thread: threading.Thread | None = None

    # -- for callers -------------------------------------------------------------------------------

    @property
    def accepts(self) -> bool:
        """Whether a write may claim its document: it will be published soon."""
        since = self._step_since
        return (
            self._down_until is None
            and self._closing_by is None
            and len(self._queue) < QUEUE_MAX
            and time.monotonic() >= self._paused_until
            and (since is None or time.monotonic() - since < _STALLED_SECONDS)
        )

    @property
    def state(self) -> DispatcherState:
        """For people and metrics."""
        late = list(self._later.values())
        return DispatcherState(
            len(self._queue) + sum(each.errand is not None for each in late),
            len(self._unsettled) + sum(bool(each.parts) for each in late),
            self._down_until is not None,
            self._passed_over,
        )

    def add(self, held: HeldDocument) -> None:
        """Have a document delivered that the write has claimed."""
        self._put([_Errand(held.document_id, held)])

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
        self._put([_Errand(document_id) for document_id in stored])

    def expect(self) -> None:
        """Have the index looked at soon, and again: somebody will carry out a write that carries tasks."""
        if self._expects:
            self._look_after(*_LOOKS_AFTER)

    def wait(self, held: HeldDocument | None, document_id: object, seconds: float) -> bool:
        """Have a document delivered, and wait until it was its turn; False if it was not within so many seconds."""
        return self.wait_all([(held, document_id)], seconds)

    def wait_all(self, documents: Sequence[tuple[HeldDocument | None, Any]], seconds: float) -> bool:
        """As `wait`, for documents that are delivered together, within one time for all of them."""
        deadline = time.monotonic() + seconds
        errands = [_Errand(document_id, held, waiting=[threading.Event()]) for held, document_id in documents]
        events = [errand.waiting[0] for errand in errands]
        self._put(errands)
        return all(event.wait(max(0.0, deadline - time.monotonic())) for event in events)

    def close_soon(self) -> None:
        """Begin to close, so that many dispatchers can be closed within the time of one."""
        with self._changed:
            if self._thread is None or self._closing_by is not None:
                return
            self._closing_by = time.monotonic() + CLOSE_SECONDS / 2
            self._looks_at = [0.0] if self._looks_at else []  # one, now, for what somebody has hinted at
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

    def _put(self, errands: Sequence[_Errand]) -> None:
        """Queue documents, or leave them to the index."""
        try:
            keys = [id_key(errand.document_id, self._codec()) for errand in errands]
            with self._changed:
                for key, errand in zip(keys, errands, strict=True):
                    self._queue_one(key, errand)
                self._wake()
        except SoftTimeLimitExceeded:  # of the task that writes
            raise
        except Exception as error:  # noqa: BLE001 - the write is acknowledged: nothing that comes after it may say otherwise
            self._leave(error)
            for errand in errands:
                _tell(errand.waiting)

    def _queue_one(self, key: Hashable, errand: _Errand) -> None:
        if time.monotonic() < self._paused_until:  # nobody is to wait for MongoDB
            _tell(errand.waiting)
            errand.waiting = []
        there = self._queue.get(key)
        if there is not None:  # what is added behind its entries is found when these are removed
            if errand.held is not None:
                there.owners, there.held = there.all_owners, None
            there.owners = (*there.owners, *errand.all_owners)
            there.waiting += errand.waiting
        elif self._down_until is not None or self._closing_by is not None or len(self._queue) >= QUEUE_MAX:
            self._passed_over += 1
            self._plan_looks(_LOOKS_AFTER[-1])
            if errand.all_owners:  # the write has claimed it before anybody knew
                self._unwanted.append(errand)
            _tell(errand.waiting)
        else:
            self._queue[key] = errand

    def _look_after(self, *seconds: float) -> None:
        try:
            with self._changed:
                self._plan_looks(*seconds)
                self._wake()
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001 - see `_put`
            self._leave(error)

    def _plan_looks(self, *seconds: float) -> None:
        """
        Plan looks at the index, few at any time.

        The first that is planned already stays, so that they go on under any load; and so do those that lie behind the
        new ones, which wait for something else, such as the end of a claim.
        """
        now = time.monotonic()
        new = [now + each for each in seconds]
        first = min([new[0], *self._looks_at[:1]])
        behind = [each for each in self._looks_at if each > new[-1]] if len(new) > 1 else self._looks_at
        self._looks_at = sorted({first, *new[1:], *behind})[:_LOOKS_MAX]

    def _wake(self) -> None:
        if self._closing_by is not None:
            return
        if self._thread is None or not self._thread.is_alive():
            close_at_exit(self)
            self._thread = threading.Thread(target=self._run, name="mongo_celery-outbox", daemon=True)
            self._thread.start()
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
        with suppress(Exception), pymongo.timeout(CLOSE_SECONDS / 4):
            self._let_go()

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do; False when the process ends and nothing is left to publish."""
        with self._changed:
            while True:
                now = time.monotonic()
                if self._closing_by is not None:
                    has_work = bool(self._queue) or self._looks_at[:1] == [0.0]
                    return has_work and self._down_until is None and now < self._closing_by
                due = self._next_at(now)
                if due is not None and due <= now:
                    return True
                self._changed.wait(None if due is None else due - now)

    def _next_at(self, now: float) -> float | None:
        """When there is something to do; None if nothing is planned."""
        times = [self._down_until] if self._down_until is not None else list(self._looks_at[:1])
        if self._unsettled:
            times.append(self._settled_by)
        if (self._queue and self._down_until is None) or self._unwanted:
            times.append(now)
        times += [each.at for each in self._later.values()]
        return max(min(times), self._paused_until) if times else None

    def _work(self) -> None:
        """One turn: ask a broker that was away, look at the index, deliver some documents, remove, and what is late."""
        if self._down_until is not None and time.monotonic() >= self._down_until:
            self._probe()
        if self._down_until is None:
            self._look()
            self._deliver(self._taken())
        if self._unsettled and (self._waiters or not self._may_settle_later()):
            self._settle()
        self._release_unwanted()
        self._tell_waiting()
        self._catch_up()

    def _taken(self) -> list[_Errand]:
        with self._changed:
            return [self._queue.popitem(last=False)[1] for _ in range(min(_TURN, len(self._queue)))]

    def _deliver(self, errands: Sequence[_Errand]) -> None:
        """Publish what is held, then claim and publish what is to be looked at."""
        fresh, looks = list[HeldDocument](), list[_Errand]()
        for errand in errands:
            self._waiters += errand.waiting
            if errand.held is not None and not self._is_old(errand.held):
                fresh.append(errand.held)
            else:
                looks.append(_Errand(errand.document_id, None, errand.all_owners))
        if not self._publish_all(fresh):
            self._release(looks)
            return
        if looks:
            self._settle()  # what was published there is still pending, and this process still holds it
            self._deliver_looks([errand for errand in looks if not self._waits_for_removal(errand)])

    def _deliver_looks(self, looks: Sequence[_Errand], times: int = 0) -> None:
        ids = [errand.document_id for errand in looks]
        owner, missed = ObjectId(), list[Failure]()
        self._step()
        held = [each for errand in looks for each in errand.owners]
        claimed = self._relay().claim(ids, held=held, owner=owner, missed=missed)
        if not self._publish_all(claimed):
            self._relay().release(ids, [owner])
        owners = {id_key(errand.document_id, self._codec()): errand.owners for errand in looks}
        for document_id, error in missed:
            key = id_key(document_id, self._codec())
            if error.timeout:
                self._put_off(key, times, errand=_Errand(document_id, None, (*owners.get(key, ()), owner)))
            else:
                tell_undeliverable(self._name(), document_id, error)
                self._refuse(document_id)

    def _publish_all(self, documents: Any) -> bool:
        """Publish from documents that are held; False if the broker does not answer."""
        rest = iter(documents)
        for held in rest:
            if self._is_old(held):
                self._look_again(held.document_id, (held.owner,))
                continue
            self._step()
            part = self._relay().publish(held, judge=False)
            self._note(part)
            refused = part.verdict is not None and part.verdict.kind is FailureKind.WAIT_FOR_BROKER
            self._refusals = self._refusals + 1 if refused else 0
            if part.is_outage or self._refusals >= _REFUSALS_MAX:
                self._pause_for_broker([*rest] if isinstance(documents, list) else [])
                return False
            if not self._may_settle_later():
                self._settle()
            self._step()  # the next one may have to be read
        return True

    def _step(self) -> None:
        """Something begins that takes long only where the broker or MongoDB does not answer."""
        self._step_since = time.monotonic()

    def _is_old(self, held: HeldDocument) -> bool:
        """Whether a claim is not relied on any more."""
        return time.monotonic() - held.claimed_at >= self._claim_ttl / 2

    def _look_again(self, document_id: object, owners: tuple[ObjectId, ...]) -> None:
        """Have a document that this process holds looked at after all others, also beyond the bound of the queue."""
        errand = _Errand(document_id, None, owners)
        with self._changed:
            there = self._queue.setdefault(id_key(document_id, self._codec()), errand)
            if there is not errand:
                there.owners += owners

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

    def _went_out(self, count: int) -> None:
        """So many entries were published."""
        self._published += count
        if count and self._is_on_trial:
            self._is_on_trial, self._probes = False, 0
            logger.info(
                "outbox %s: the broker answers again; what waits is delivered",
                self._name(),
                extra={"event": "broker_back"},
            )

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
        remainder = self._relay().settle(parts)
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

    def _put_off(
        self, key: Hashable, times: int = 0, *, part: PublishedPart | None = None, errand: _Errand | None = None
    ) -> None:
        """Ask for a document later that MongoDB did not answer for in time."""
        with self._changed:
            late = self._later.setdefault(key, _Later(0.0))
            late.times = max(late.times, times)
            late.at = time.monotonic() + _LATER.nth(late.times)
            late.parts += [part] if part is not None else []
            late.errand = errand or late.errand

    def _waits_for_removal(self, look: _Errand) -> bool:
        """Whether what was published of a document is still to be removed; it is looked at afterwards."""
        late = self._later.get(id_key(look.document_id, self._codec()))
        if late is None or not late.parts:
            return False
        with self._changed:
            if late.errand is not None:
                look.owners = (*late.errand.owners, *look.owners)
            late.errand = look
        return True

    def _catch_up(self) -> None:
        """Ask again, one document at a time and after all others, for what MongoDB did not answer for in time."""
        now = time.monotonic()
        key = next((each for each, late in self._later.items() if late.at <= now), None)
        if key is None:
            return
        with self._changed:
            late = self._later.pop(key)
        try:
            self._remove(late.parts, late.times + 1)
        except PyMongoError:
            with self._changed:
                self._unsettled += late.parts
            raise
        if late.errand is None:
            return
        there = self._later.get(key)
        if there is not None:  # its removal is put off again
            there.errand = late.errand
        elif self._down_until is not None:
            self._release([late.errand])
        else:
            self._deliver_looks([late.errand], late.times + 1)

    # -- what is away ------------------------------------------------------------------------------

    def _pause_for_broker(self, held: Sequence[HeldDocument]) -> None:
        """The broker takes nothing: let all claims go, leave everything to the index, and ask from time to time."""
        with self._changed:
            errands, self._queue = list(self._queue.values()), OrderedDict()
            self._passed_over += len(errands) + len(held)
            self._refusals = 0
            self._down_until = time.monotonic() + _PROBES.nth(self._probes)
            for errand in errands:
                self._waiters += errand.waiting
        with suppress(PyMongoError):  # claims lapse
            self._release([*errands, *(_Errand(each.document_id, each) for each in held)])
        self._settle()

    def _release(self, errands: Sequence[_Errand]) -> None:
        owned = [(errand.document_id, errand.all_owners) for errand in errands if errand.all_owners]
        if owned:
            self._step()
            self._relay().release([each for each, _ in owned], [owner for _, owners in owned for owner in owners])

    def _release_unwanted(self) -> None:
        """Let claims go that writes have taken, of documents that are left to a look at the index."""
        with self._changed:
            errands, self._unwanted = self._unwanted, []
        self._release(errands)

    def _probe(self) -> None:
        answers = self._answers()
        self._probes += 1  # until something has gone out: a broker may take connections, and refuse every message
        if not answers:
            self._down_until = time.monotonic() + _PROBES.nth(self._probes)
            return
        with self._changed:
            self._down_until, self._is_on_trial = None, True
            self._plan_looks(0.0, *_LOOKS_AFTER[1:])

    def _look(self) -> None:
        """Queue what the index says is waiting, if a look is planned for now."""
        with self._changed:
            now = time.monotonic()
            if not self._looks_at or self._looks_at[0] > now or len(self._queue) >= QUEUE_MAX:
                return
            self._looks_at = [each for each in self._looks_at if each > now]
        found = self._waiting(_LOOK, [document_id for until, document_id in self._refused.values() if until > now])
        keys = [id_key(each, self._codec()) for each in found]
        with self._changed:
            for key, document_id in zip(keys, found, strict=True):
                if key not in self._later:
                    self._queue.setdefault(key, _Errand(document_id))
            if len(found) >= _LOOK and self._published > self._published_at_look:
                self._plan_looks(0.0)
        self._published_at_look = self._published

    def _forget_queue(self) -> None:
        """MongoDB does not answer: claims are let go when it does, or lapse, and the index is looked at later."""
        with self._changed:
            for errand in self._queue.values():
                self._waiters += errand.waiting
            self._passed_over += len(self._queue)
            self._unwanted = [*self._unwanted, *self._queue.values()][-QUEUE_MAX:]
            self._queue.clear()
            pause = _FAILURES.nth(self._failures)
            self._failures += 1
            self._paused_until = time.monotonic() + pause
            self._looks_at = []
            self._plan_looks(pause, pause + self._claim_ttl)  # at once, and when the claims have lapsed
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        waiters, self._waiters = self._waiters, []
        _tell(waiters)

    def _let_go(self) -> None:
        """At the end: remove what was published, and release what was not."""
        with self._changed:
            late, self._later = list(self._later.values()), {}
            parts, self._unsettled = [*self._unsettled, *(part for each in late for part in each.parts)], []
            errands, self._queue = [*self._unwanted, *self._queue.values()], OrderedDict()
            errands += [each.errand for each in late if each.errand is not None]
            self._unwanted = []
        _tell([each for errand in errands for each in errand.waiting])
        _tell(self._waiters)
        remainder = self._relay().settle(parts)
        self._relay().release(remainder.document_ids, remainder.owners)
        self._release(errands)


def _may_be_stored(document_id: object) -> bool:
    """Whether a document may have such an `_id`; what is an operator or a pattern would name others."""
    return not isinstance(document_id, (list, tuple, Regex)) and demanded_id({"_id": document_id}) is not NO_ID


def _tell(waiting: Sequence[threading.Event]) -> None:
    for each in waiting:
        each.set()
