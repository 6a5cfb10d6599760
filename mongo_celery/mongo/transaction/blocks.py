"""
What a `with` has begun, found again where it is left.

Python tells `__exit__` nothing of the `__enter__` before it. One object may be entered by many threads and tasks at a
time, and be left elsewhere: web frameworks run the two halves of a dependency in whatever thread is free. What stays
the same is the function, or the generator, in which the `with` stands. Where an object enters and leaves it by methods
of its own, as an ExitStack or a unit of work does, it is that object. Where neither is any help, it must be the only
one that it can be, or the last one of the only thread and task that has any.

Who enters and leaves by one and the same instruction calls whatever it is handed, as the loop of a pool's thread does:
its function, its object and its thread are everybody's. What was entered there must be the only one.
"""

from __future__ import annotations

import inspect
import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, _AsyncGeneratorContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, Generic, TypeVar

import pymongo
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.client_session import ClientSession

from mongo_celery.errors import TransactionError
from mongo_celery.mongo.opening import renew_connections
from mongo_celery.mongo.transaction import asynchronous, blocking
from mongo_celery.mongo.transaction.ending import check_time, doom_of, note_waiting, raise_locked, raise_timed_out
from mongo_celery.mongo.transaction.frames import Frame, Owner, is_known_here, owner_here
from mongo_celery.mongo.verdicts import refuse_standalone

_LEAST = 0.001
"""Seconds of a limit for which no time is left: PyMongo takes 0 for none."""

_LEFT_BY_CONTEXTLIB = _AsyncGeneratorContextManager.__aexit__.__code__
"""Where a context manager that is an async generator is told why its block is left."""

AnySession = TypeVar("AnySession", ClientSession, AsyncClientSession)
Call = tuple[CodeType, int]
"""An instruction of some function."""


@dataclass(slots=True, eq=False)
class Block(Generic[AnySession]):
    """
    One `with`.

    Attributes:
        place: the function or generator in which it stands.
        entered_by: the instruction there that has entered it.
        session: what it has given.
        frame: its transaction; None where it has joined one.
        seconds: for the end of a block that nothing limits.
        around: what is left last: the session, the frame, the limit.
        box: what is written just before the commit.
        owner: who has entered it.
        subject: whose method has entered it.
    """

    place: FrameType
    entered_by: Call
    session: AnySession
    frame: Frame | None
    seconds: float
    around: ExitStack
    box: ExitStack = field(default_factory=ExitStack)
    owner: Owner = field(default_factory=owner_here)
    subject: object = field(init=False)

    def __post_init__(self) -> None:
        """Ask now: by its end, the method may have given the name to something else."""
        self.subject = _subject_of(self.place)

    def is_of(self, owner: Owner) -> bool:
        """Whether the thread and task of an owner have entered it: a pool's thread does so in a context of its own."""
        return self.owner == owner and (self.frame is None or is_known_here(self.frame))

    def begin_to_end(self) -> Frame | None:
        """Its own transaction, which has a limit from here on; None where it is a part of another one."""
        if self.frame is not None and self.frame.deadline == math.inf:
            self.frame.deadline = time.monotonic() + self.seconds
        return self.frame

    @property
    def may_await(self) -> bool:
        """Whether it may while it is thrown away: only an async generator may, which is not told so by contextlib."""
        place: FrameType | None = self.place
        while place is not None and place.f_code.co_flags & inspect.CO_ASYNC_GENERATOR:
            caller = place.f_back
            if caller is None or caller.f_code is not _LEFT_BY_CONTEXTLIB:
                return True
            place = caller.f_back
        return False

    def close_box(self, error: BaseException | None) -> None:
        """Have written what goes with the commit, or dropped."""
        self.box.__exit__(*_details(error))

    def lose(self) -> None:
        """Nobody will be known to leave it: what is called from here on must not join it."""
        if self.frame is not None:
            self.frame.close()

    def close_around(self, error: BaseException | None) -> None:
        """Leave what stands around it; as a part, with its error."""
        self.around.__exit__(*_details(error))


class Blocks:
    """The blocks of one object that have been entered and not left."""

    def __init__(self) -> None:
        self._entered: list[Block[Any]] = []
        self._lock = threading.Lock()

    def add(self, block: Block[Any]) -> None:
        """Note one that is entered."""
        with self._lock:
            self._entered.append(block)

    def take(self, place: FrameType) -> Block[Any]:
        """
        The one that is left now.

        Raises:
            TransactionError: nobody can know which one it is. None of those that it may be is committed; the server
                ends them.
        """
        with self._lock:
            candidates = self._candidates(place)
            if len(candidates) == 1:
                self._entered.remove(candidates[0])
                return candidates[0]
            running = _running()
            for each in candidates:
                if id(each.place) not in running and not _may_wait(each.place):
                    self._entered.remove(each)
                    each.lose()
        raise TransactionError(
            "Which of several blocks of one transactional object ends here cannot be known, since another thread has "
            "begun it; nothing of it is committed. Make an object for each block: with transactional(client)."
        )

    def _candidates(self, place: FrameType) -> list[Block[Any]]:
        """The one that is left now; or all that it may be."""
        handed = [each for each in self._entered if each.entered_by == call_at(place)]
        if handed:
            return handed
        here = [each for each in self._entered if each.place is place]
        if here:
            return here[-1:]
        subject, owner = _subject_of(place), owner_here()
        same = [each for each in self._entered if subject is not None and each.subject is subject]
        if same:
            return same[-1:] if len({each.owner for each in same}) == 1 else same
        running = _running()
        found = [each for each in self._entered if each.is_of(owner) or id(each.place) not in running]
        if found and all(each.owner == owner for each in found):
            return found[-1:]
        return found or self._entered[:]


def call_at(place: FrameType) -> Call:
    """The instruction of a function or generator that is being carried out now."""
    return place.f_code, place.f_lasti


def _subject_of(place: FrameType) -> object:
    """What a function was called with first: the object, if it is a method; None if it was with nothing."""
    code = place.f_code
    return place.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def _running() -> set[int]:
    """The frames that run in any thread. A `with` in one of these is left there."""
    found: set[int] = set()
    for frame in sys._current_frames().values():  # noqa: SLF001 - documented, with this name
        inner: FrameType | None = frame
        while inner is not None:
            found.add(id(inner))
            inner = inner.f_back
    return found


def _may_wait(place: FrameType) -> bool:
    """Whether it may be a generator or coroutine that goes on later, and leaves its block itself."""
    waiting = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    return bool(place.f_code.co_flags & waiting)


def leave(block: Block[ClientSession], error: BaseException | None) -> None:
    """End a block's transaction by a commit, or by an abort after an error; what it was a part of goes on."""
    frame = block.begin_to_end()
    if frame is None:
        try:
            with pymongo.timeout(block.seconds):
                block.close_box(error)
        except BaseException as failure:
            block.close_around(failure)
            raise
        block.close_around(error)
        return
    with block.around:
        _leave_own(block, frame, error)
    if error is None:
        frame.run_callbacks()


def _leave_own(block: Block[ClientSession], frame: Frame, error: BaseException | None) -> None:
    session = block.session
    failure = doom_of(frame, session) if error is None else error
    if failure is not None:
        blocking.abort(session)  # before the box is closed: what is in it is dropped
        block.close_box(failure)
        _pass(frame, failure, error)
        return
    try:
        if session.in_transaction:
            check_time(frame, session)
        with _time_of(frame):
            block.close_box(None)
        if session.in_transaction:
            check_time(frame, session)
    except BaseException as met:
        blocking.abort(session)
        raise_timed_out(frame, met)
        raise
    if session.in_transaction:
        with _time_of(frame):  # another thread's limit is not here
            blocking.commit(frame, session)
    else:
        frame.callbacks.clear()


async def leave_async(block: Block[AsyncClientSession], error: BaseException | None) -> None:
    """As `leave`."""
    frame = block.begin_to_end()
    if frame is None:
        block.close_around(error)
        return
    if isinstance(error, GeneratorExit) and not block.may_await:
        block.close_around(error)
        asynchronous.abandon(block.session, is_own=True)
        return
    canceled = None
    try:
        with block.around:
            canceled = await _leave_own_async(block, frame, error)
    finally:
        await block.session.end_session()
    if error is None:
        with asynchronous.waiting_for_callbacks():
            await frame.await_callbacks()
    if canceled is not None:
        raise canceled


async def _leave_own_async(
    block: Block[AsyncClientSession], frame: Frame, error: BaseException | None
) -> asynchronous.Cancel:
    session = block.session
    failure = doom_of(frame, session) if error is None else error
    if failure is not None:
        await asynchronous.abort(session)
        _pass(frame, failure, error)
        return None
    if not session.in_transaction:
        frame.callbacks.clear()
        return None
    try:
        check_time(frame, session)
    except BaseException:
        await asynchronous.abort(session)
        raise
    with _time_of(frame):  # another task's limit is not here
        return await asynchronous.commit(frame, session)


def _pass(frame: Frame, failure: BaseException, error: BaseException | None) -> None:
    """Raise what a block ends with that its body has not raised itself."""
    renew_connections(frame.client, failure)
    if error is None:
        raise failure
    refuse_standalone(error)
    raise_locked(frame, error)
    note_waiting(error)


def _time_of(frame: Frame) -> AbstractContextManager[None]:
    """What is left of a transaction's time, for calls inside; a thread may have stood still since it was looked at."""
    return pymongo.timeout(max(frame.remaining, _LEAST))


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Calls inside take no longer; left in another thread or task, there is no limit to take back."""
    limit = pymongo.timeout(seconds)
    limit.__enter__()
    try:
        yield
    finally:
        with suppress(ValueError):  # another context's
            limit.__exit__(None, None, None)


def _details(error: BaseException | None) -> tuple[Any, Any, Any]:
    return (None, None, None) if error is None else (type(error), error, error.__traceback__)
