"""
Which transaction a thread or an asyncio task is in, and what one call of `transactional` remembers of it.

A *frame* is a transaction that `transactional` has begun. It is found in two ways:

- by a context variable, which holds the innermost one. Contexts are copied, by asyncio for every task and by frameworks
  for every thread that they borrow, so a frame counts only for the thread and task that has begun it (its *owner*):
  a session serves one at a time, and a copy outlives the transaction;
- by its session, for whoever is handed that, in whatever thread.

`current` alone answers whether there is an open transaction here for a client. A transaction of another client of the
same cluster is refused there: what joined nothing would be done again at each repetition.

A frame that is left in another context than it was entered in cannot be taken out of that one. So it says itself that
it is closed, and a closed one is neither joined nor chained to.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast, overload
from weakref import ReferenceType, WeakKeyDictionary, ref

from celery.exceptions import SoftTimeLimitExceeded
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.client_session import ClientSession

from mongo_celery.errors import ConfigurationError, DocumentLockedError, TransactionError
from mongo_celery.mongo.cluster import is_same_cluster, wait_for_answer
from mongo_celery.mongo.opening import AsyncClient, Client, client_of, renewing_connections
from mongo_celery.mongo.redaction import traceback_of
from mongo_celery.mongo.repeating import Pauses

logger = logging.getLogger("mongo_celery.locking")

_PAUSES = Pauses(first=0.005, longest=0.5, growth=1.5, jitter=1.0)

_REPETITION_SECONDS = 1.0
"""A driver's attempt that conflicts later than this after the one before is taken for another transaction's."""

Session = ClientSession | AsyncClientSession
"""Of either of PyMongo's clients."""

Callback = Callable[[], object]

Place = tuple[str, int, Hashable]
"""A lock: its namespace, the number of its call in the attempt, and which of the call's documents."""

Owner = tuple[int, int, "asyncio.Task[Any] | None"]
"""A process, one of its threads, and a task: a child that is forked has its parent's threads by their numbers."""


@dataclass(slots=True)
class Waits:
    """
    How long the locks of one transaction have met conflicts, over its attempts.

    A lock is known by its place in the body: a filter may be another one at each attempt, as one with the time is.

    Attributes:
        forget_after: seconds without a conflict after which a wait begins anew.
        calls: lock calls of the attempt so far.
        conflicts: the first and the last conflict of each lock, on the monotonic clock.
    """

    forget_after: float = math.inf
    calls: int = 0
    conflicts: dict[Place, tuple[float, float]] = field(default_factory=dict)

    def next_call(self) -> int:
        """The number of a call that begins now."""
        self.calls += 1
        return self.calls

    def failed(self) -> None:
        """The attempt has come to its end by an error, so the next call is the first one of another."""
        self.calls = 0

    def conflicted(self, place: Place) -> float:
        """Note a conflict; the seconds since the first one of this wait."""
        now = time.monotonic()
        self.conflicts = {each: met for each, met in self.conflicts.items() if now - met[1] <= self.forget_after}
        first, _ = self.conflicts.get(place, (now, now))
        self.conflicts[place] = (first, now)
        return now - first

    def ended(self, place: Place) -> None:
        """It was locked or given up: the next wait begins anew."""
        self.conflicts.pop(place, None)


@dataclass(slots=True, eq=False)
class Frame:
    """
    A transaction that `transactional` has begun, over all its attempts.

    Attributes:
        client: whose it is.
        reference: to its session, which is not kept alive.
        deadline: on the monotonic clock; no attempt begins after it. Infinite while nothing limits a `with`.
        owner: the process, the thread and the asyncio task that are in it.
        client_name: the expression by which its body reaches its client, for messages.
        outer: the one around it, if any.
        is_open: whether it has not been left yet.
        count: attempts that have failed.
        transient: the last error after which there was another attempt.
        waits: how long its locks have met conflicts.
        doom: what a part of this attempt has failed with, whoever has caught it; it is not committed then.
        callbacks: to run after the commit; those of an attempt that failed are dropped.
        parts: those of this attempt that have not ended.
        suspects: says in words who may hold what a lock of it was refused last; None where none was.
    """

    client: Any
    reference: ReferenceType[Session]
    deadline: float
    owner: Owner
    client_name: str = "session.client"
    outer: Frame | None = None
    is_open: bool = True
    count: int = 0
    transient: BaseException | None = None
    waits: Waits = field(default_factory=Waits)
    doom: BaseException | None = None
    callbacks: list[Callback] = field(default_factory=list)
    parts: set[object] = field(default_factory=set)
    suspects: Callable[[Session], str] | None = None

    @property
    def remaining(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self.deadline - time.monotonic()

    @property
    def is_inherited(self) -> bool:
        """Whether another process has begun it, and has forked this one inside: it ends there."""
        return self.owner[0] != os.getpid()

    @property
    def locked(self) -> DocumentLockedError | None:
        """What a lock was given up with in this attempt: the server has ended the transaction by then."""
        return self.doom if isinstance(self.doom, DocumentLockedError) else None

    def begin(self) -> None:
        """Forget what belonged to the attempt before."""
        self.doom = None
        self.waits.calls = 0
        self.callbacks.clear()
        self.parts.clear()

    def close(self) -> None:
        """It is left, or given up; a context out of reach from here may hold it for long, but nothing else by it."""
        self.is_open = False
        self.owner, self.transient, self.doom = (0, 0, None), None, None

    def failed(self, error: BaseException) -> None:
        """A part of it has failed; of several errors the first is the reason."""
        if self.doom is None:
            self.doom = error

    def next_pause(self) -> float:
        """
        Seconds to wait before the next attempt: exponential with full jitter, as the drivers' specification has it.

        Source: MongoDB specifications, "Convenient API for Transactions", backoff of `withTransaction`.
        """
        self.count += 1
        return _PAUSES.nth(self.count - 1)

    def run_callbacks(self) -> None:
        """Run what waits for the commit, each once. What fails is logged and stops nothing; a time limit passes."""
        limit = None
        for callback in self._taken():
            try:
                with outside():
                    _awaited_nowhere(callback())
            except SoftTimeLimitExceeded as error:  # the task's, which wherever it arrives is to end the task
                limit = error
            except Exception as error:  # noqa: BLE001 - whatever a user's function raises
                _log_failed(error)
        if limit is not None:
            raise limit

    async def await_callbacks(self) -> None:
        """As `run_callbacks`, for callbacks that may have to be awaited; who is canceled meanwhile is so at the end."""
        canceled: BaseException | None = None
        for callback in self._taken():
            try:
                with outside():
                    result = callback()
                    if inspect.isawaitable(result):
                        await result
            except (asyncio.CancelledError, SoftTimeLimitExceeded) as error:
                canceled = error
            except Exception as error:  # noqa: BLE001 - whatever a user's function raises
                _log_failed(error)
        if canceled is not None:
            raise canceled

    def _taken(self) -> list[Callback]:
        waiting, self.callbacks = self.callbacks, []
        return waiting


_innermost: ContextVar[Frame | None] = ContextVar("mongo_celery_transaction", default=None)
_of_session: WeakKeyDictionary[Session, Frame] = WeakKeyDictionary()
_foreign: WeakKeyDictionary[Session, Waits] = WeakKeyDictionary()
_belonging: list[ContextVar[Any]] = []


# -- entering and leaving --------------------------------------------------------------------------


@contextmanager
def entered(session: Session, seconds: float, client_name: str = "session.client") -> Iterator[Frame]:
    """
    A frame that is open inside. The session is its own there; afterwards it belongs to whom it did before.

    Args:
        session: of the transaction.
        seconds: for all attempts; less where a frame around it has less left. All loops inside end by one deadline.
        client_name: the expression by which the body reaches the session's client, for messages.
    """
    limits = [each.deadline for each in _around()]
    frame = Frame(
        client=session.client,
        reference=ref(session),
        deadline=min([time.monotonic() + seconds, *limits]),
        owner=owner_here(),
        client_name=client_name,
        outer=_open_one(_innermost.get()),
    )
    before = _of_session.get(session)
    _of_session[session] = frame
    _innermost.set(frame)
    try:
        with renewing_connections(session.client):
            yield frame
    finally:
        is_given_up = not frame.is_open
        frame.close()
        if is_given_up:  # its session goes on saying so
            pass
        elif before is None:
            _of_session.pop(session, None)
        else:
            _of_session[session] = before
        if _innermost.get() is frame:  # else this is another context; there it counts no more
            _innermost.set(_open_one(frame.outer))


@contextmanager
def part_of(session: Session) -> Iterator[None]:
    """
    Inside, a part of a transaction that was begun around it: the part's failure is the whole's, whoever catches it.

    An abort here and now would be no help: PyMongo runs what is sent by a session after one outside of any transaction.
    """
    frame = _of_session.get(session)
    if frame is None:
        yield
        return
    _refuse_to_join(frame)
    part = object()
    frame.parts.add(part)
    try:
        yield
        if part not in frame.parts or not frame.is_open:
            raise TransactionError(
                "The transaction that a part had joined has ended before the part; it is not known what of it was "
                "inside. Have the part end first, or give it a transaction of its own, with own=True."
            )
        if not session.in_transaction:
            raise TransactionError(
                "A function has ended the transaction that it had joined; what follows in the transaction's body would "
                "be outside of it. Give the function a transaction of its own, with own=True."
            )
    except BaseException as error:
        # A generator of an attempt before, which is thrown away now, has nothing to do with this one.
        if frame.is_open and (part in frame.parts or not isinstance(error, GeneratorExit)):
            frame.failed(error)
        raise
    finally:
        frame.parts.discard(part)


def _refuse_to_join(frame: Frame) -> None:
    if not frame.is_open:
        raise TransactionError(
            "The transaction of this session was given up, and will not be committed: nothing joins it. Use the "
            "session of one in progress."
        )
    if frame.is_inherited:
        raise TransactionError(
            "The transaction of this session belongs to the process that has forked this one; begin one here, without "
            "session=."
        )


def _open_one(frame: Frame | None) -> Frame | None:
    while frame is not None and not frame.is_open:
        frame = frame.outer
    return frame


def owner_here() -> Owner:
    """The process, the thread and the asyncio task that ask."""
    try:
        return os.getpid(), threading.get_ident(), asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        return os.getpid(), threading.get_ident(), None


def _around() -> Iterator[Frame]:
    """
    Yield the frames that this thread and task is in, the innermost first.

    A frame of this thread that was begun outside of any task is one of them: the event loop runs inside of it.
    """
    frame = _open_one(_innermost.get())
    if frame is None:
        return
    owner = owner_here()
    owners = (owner, (owner[0], owner[1], None))
    while frame is not None:
        if frame.owner in owners:
            yield frame
        frame = _open_one(frame.outer)


def is_known_here(frame: Frame) -> bool:
    """Whether this context has entered a frame, or is a copy of one that had."""
    around = _open_one(_innermost.get())
    while around is not None and around is not frame:
        around = _open_one(around.outer)
    return around is frame


def belongs_to_transactions(variable: ContextVar[Any]) -> None:
    """What it holds belongs to a transaction in progress, and is None in what is called after another one's commit."""
    _belonging.append(variable)


@contextmanager
def outside() -> Iterator[None]:
    """Inside, nothing belongs to a transaction around: what is sent there is sent at once, whatever becomes of that."""
    tokens = [(variable, variable.set(None)) for variable in _belonging]
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)


# -- being asked -----------------------------------------------------------------------------------


def frame_of(session: Session) -> Frame | None:
    """The frame of a session's transaction, if `transactional` runs it; in whatever thread or task."""
    return _of_session.get(session)


if TYPE_CHECKING:

    @overload
    def current(client: Client) -> ClientSession | None: ...
    @overload
    def current(client: AsyncClient) -> AsyncClientSession | None: ...


def current(client: Any) -> Any:
    """
    Return the session of the transaction that this thread and asyncio task is in.

    For code that is called inside a transaction without being handed its session: in the body of `transactional`, or
    in a handler with `transactional=True`. A thread or a task that the body starts is in none: a session serves one
    at a time. An event loop that a plain body runs in its own thread belongs to the body.

    Args:
        client: whose transaction, or a callable that returns it.

    Returns:
        The session of the innermost transaction of this client. None if there is none, or only those of clients of
        other clusters.

    Raises:
        ConfigurationError: a transaction of another client of the same cluster is in progress. The text names the
            client to use.
    """
    opened, others = client_of(client), list[Frame]()
    for frame in _in_transaction():
        if frame.client is opened:
            return frame.reference()
        others.append(frame)
    for frame in others:
        if is_same_cluster(frame.client, opened):
            raise ConfigurationError(
                "A transaction of another client of this cluster is open here. This client cannot join it: its writes "
                f"would stay after an abort, and be repeated with each attempt. Use {frame.client_name}, the client of "
                "the open transaction. For an independent transaction, use transactional(client, own=True)."
            )
    return None


async def prepare_current(client: Any) -> None:
    """Have `current` know the clusters of an asyncio client and of the transactions around: nothing waits there."""
    for frame in _in_transaction():
        await wait_for_answer(frame.client)
        await wait_for_answer(client_of(client))


def after_commit(callback: Callback | Session, session: Session | Callback | None = None) -> bool:
    """
    Run something once a transaction has been committed.

    It is called once, outside the transaction and without its time limit. It is dropped if the transaction is
    aborted, if its body is repeated (which registers it again), and if the body ends the transaction itself. What
    it raises after a commit is logged, but for Celery's soft time limit, which passes once all have been called. Not
    promised: that it is called at all, if the process dies after the commit.

    Args:
        callback: without arguments; in an async transaction it may be a coroutine function. The earlier order,
            `after_commit(session, callback)`, is understood as well.
        session: of the transaction. By default that of the innermost one that this thread and asyncio task is in; if
            there is none, nothing is to be waited for, and the callback is called at once.

    Returns:
        Whether it has been called, or will be after a commit; False for a session whose transaction `transactional`
        does not run: then it never will be.

    Raises:
        ConfigurationError: it is no function, or a coroutine function where nobody could await it.
    """
    if isinstance(callback, Session):
        return after_commit(cast("Callback", session), callback)
    if not callable(callback) or not isinstance(session, Session | None):
        raise ConfigurationError("after_commit takes a function without arguments, and the session of a transaction.")
    frame = next(_in_transaction(), None) if session is None else frame_of(session)
    if frame is None and session is not None:
        return False
    is_async = frame is not None and isinstance(frame.reference(), AsyncClientSession)
    if inspect.iscoroutinefunction(callback) and not is_async:
        raise ConfigurationError(
            "after_commit takes a coroutine function in an async transaction only; give a function."
        )
    if frame is None:
        _awaited_nowhere(callback())
    else:
        frame.callbacks.append(callback)
    return True


def _awaited_nowhere(result: object) -> None:
    if inspect.iscoroutine(result):
        result.close()
        raise ConfigurationError(
            "A callback of after_commit has returned a coroutine, which nobody awaits outside of an async transaction; "
            "give a function."
        )


def _in_transaction() -> Iterator[Frame]:
    for frame in _around():
        session = frame.reference()
        if session is not None and session.in_transaction:
            yield frame


def innermost_session() -> Session | None:
    """Return the session of the innermost transaction that this thread and asyncio task is in, of whatever client."""
    return next((frame.reference() for frame in _in_transaction()), None)


def is_beside_transaction() -> bool:
    """Return True if another thread or task of this process has started this one inside an open transaction."""
    frame, owner = _open_one(_innermost.get()), owner_here()
    while frame is not None:
        session = frame.reference()
        is_here = frame.owner in {owner, (*owner[:2], None)}
        if not is_here and not frame.is_inherited and session is not None and session.in_transaction:
            return True
        frame = _open_one(frame.outer)
    return False


def waits_of(session: Session) -> Waits:
    """
    The waits of a session's transaction.

    Nobody says when a driver's transaction begins, or whether it repeats another: only the time between conflicts
    tells that, and an error that the attempt has ended.
    """
    frame = _of_session.get(session)
    return frame.waits if frame is not None else _foreign.setdefault(session, Waits(_REPETITION_SECONDS))


def note_locked(session: Session, error: DocumentLockedError) -> None:
    """The server has ended the transaction by this error, also if its body catches it."""
    frame = _of_session.get(session)
    if frame is not None:
        frame.doom = error


def note_conflict(session: Session, suspects: Callable[[Session], str]) -> None:
    """A lock of the transaction was refused, and is to be tried again; this says who may hold it, if the time ends."""
    frame = _of_session.get(session)
    if frame is not None:
        frame.suspects = suspects


def _log_failed(error: BaseException) -> None:
    logger.error(
        "a callback after a commit failed; the transaction is committed: %s",
        traceback_of(error),
        extra={"event": "callback_failed"},
    )
