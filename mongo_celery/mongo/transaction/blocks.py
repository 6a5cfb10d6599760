"""
What a `with` has begun, found again where it is left.

Python tells `__exit__` nothing of the `__enter__` before it. One object may be entered by many threads and tasks at a
time, and be left elsewhere: web frameworks run the two halves of a dependency in whatever thread is free. What stays
the same is the function, or the generator, in which the `with` stands. Where that is no help, as with an ExitStack, it
is the thread and task, or there is only one that it can be.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Generic, TypeVar

import pymongo
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.client_session import ClientSession

from mongo_celery.errors import TransactionError
from mongo_celery.mongo.transaction import asynchronous, blocking
from mongo_celery.mongo.transaction.ending import check_time, doom_of, raise_locked
from mongo_celery.mongo.transaction.frames import Frame, Owner, owner_here
from mongo_celery.mongo.verdicts import refuse_standalone

AnySession = TypeVar("AnySession", ClientSession, AsyncClientSession)


@dataclass(slots=True, eq=False)
class Block(Generic[AnySession]):
    """
    One `with`.

    Attributes:
        place: the function or generator in which it stands.
        session: what it has given.
        frame: its transaction; None where it has joined one.
        seconds: for the end of a block that nothing limits.
        around: what is left last: the session, the frame, the limit.
        box: what is written just before the commit.
        owner: who has entered it.
    """

    place: FrameType
    session: AnySession
    frame: Frame | None
    seconds: float
    around: ExitStack
    box: ExitStack = field(default_factory=ExitStack)
    owner: Owner = field(default_factory=owner_here)

    def begin_to_end(self) -> Frame | None:
        """Its own transaction, which has a limit from here on; None where it is a part of another one."""
        if self.frame is not None and self.frame.deadline == math.inf:
            self.frame.deadline = time.monotonic() + self.seconds
        return self.frame

    def close_box(self, error: BaseException | None) -> None:
        """Have written what goes with the commit, or dropped."""
        self.box.__exit__(*_details(error))

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
            TransactionError: nobody can know which one it is. None is committed; the server ends them all.
        """
        with self._lock:
            found = self._found(place)
            self._entered.remove(found)
        return found

    def _found(self, place: FrameType) -> Block[Any]:
        here = [each for each in self._entered if each.place is place]
        owned = [each for each in self._entered if each.owner == owner_here()]
        if here or owned:
            return (here or owned)[-1]
        if len(self._entered) == 1:
            return self._entered[0]
        raise TransactionError(
            "Which of several blocks of one transactional object ends here cannot be known, since another thread has "
            "begun it; nothing of it is committed. Make an object for each block: with transactional(client)."
        )


def leave(block: Block[ClientSession], error: BaseException | None) -> None:
    """End a block's transaction by a commit, or by an abort after an error; what it was a part of goes on."""
    frame = block.begin_to_end()
    if frame is None:
        try:
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
    failure = doom_of(frame) if error is None and session.in_transaction else error
    if failure is not None:
        blocking.abort(session)  # before the box is closed: what is in it is dropped
        block.close_box(failure)
        _pass(frame, failure, error)
        return
    try:
        block.close_box(None)
        if session.in_transaction:
            check_time(frame, session)
    except BaseException:
        blocking.abort(session)
        raise
    if session.in_transaction:
        with pymongo.timeout(frame.remaining):  # another thread's limit is not here
            blocking.commit(frame, session)
    else:
        frame.callbacks.clear()


async def leave_async(block: Block[AsyncClientSession], error: BaseException | None) -> None:
    """As `leave`."""
    frame = block.begin_to_end()
    if frame is None:
        block.close_around(error)
        return
    canceled = None
    try:
        with block.around:
            canceled = await _leave_own_async(block, frame, error)
    finally:
        await block.session.end_session()
    if error is None:
        await frame.await_callbacks()
    if canceled is not None:
        raise canceled


async def _leave_own_async(
    block: Block[AsyncClientSession], frame: Frame, error: BaseException | None
) -> asynchronous.Cancel:
    session = block.session
    failure = doom_of(frame) if error is None and session.in_transaction else error
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
    with pymongo.timeout(frame.remaining):  # another task's limit is not here
        return await asynchronous.commit(frame, session)


def _pass(frame: Frame, failure: BaseException, error: BaseException | None) -> None:
    """Raise what a block ends with that its body has not raised itself."""
    if error is None:
        raise failure
    refuse_standalone(error)
    raise_locked(frame, error)


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
