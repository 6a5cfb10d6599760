"""
The transaction that a thread or an asyncio task is in, and the state of one call of `transactional`.

A *scope* is a transaction that `transactional` runs, over all its attempts. There are two ways to find it:

- a context variable holds the innermost one. asyncio copies contexts for every task, frameworks do for every thread
  that they borrow. So a scope counts only for the thread and task that began it (its *owner*): a session serves one at
  a time, and a copy outlives the transaction;
- its session leads to it, in any thread.

`current` alone answers if a transaction of a client is open here. It refuses a transaction of another client of the
same cluster: writes that join nothing would be made again with each attempt.

A scope that ends in another context than it began in cannot be removed from the first one. So it notes that it is
closed. Nothing joins a closed scope.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, overload
from weakref import ReferenceType, WeakKeyDictionary, ref

import pymongo
from celery.exceptions import SoftTimeLimitExceeded
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.client_session import ClientSession

from mongo_celery.errors import ConfigurationError, DocumentLockedError, TransactionError
from mongo_celery.mongo.cluster import is_same_cluster, wait_for_answer
from mongo_celery.mongo.opening import AsyncClient, Client, renewing_connections, resolve_client
from mongo_celery.mongo.redaction import format_traceback
from mongo_celery.mongo.repeating import Pauses

logger = logging.getLogger("mongo_celery.locking")

_PAUSES = Pauses(first=0.005, longest=0.5, growth=1.5, jitter=1.0)
"""Those of the drivers' specification, "Convenient API for Transactions"."""

_LEAST_SECONDS = 0.001
"""A limit that has passed: PyMongo takes 0 for none."""

Session = ClientSession | AsyncClientSession
"""Of either of PyMongo's clients."""

Result = TypeVar("Result")
Callback = Callable[[], object]

Owner = tuple[int, int, "asyncio.Task[Any] | None"]
"""A process, one of its threads, and a task: a forked child has its parent's threads by their numbers."""


@dataclass(slots=True, eq=False)
class TransactionScope:
    """
    A transaction that `transactional` runs, over all its attempts.

    Attributes:
        client: of its session.
        reference: to its session, which it does not keep alive.
        deadline: on the monotonic clock; no attempt begins after it. Infinite while nothing limits a `with`.
        owner: the process, the thread and the asyncio task that began it.
        seconds: for the end of a `with` whose body nothing limits.
        client_name: the expression by which its body reaches its client, for messages.
        is_open: False once it has ended.
        attempts: attempts begun so far.
        pauses: pauses made so far.
        transient_error: the last error after which there was another attempt.
        rollback_reason: the first error of a joined call in this attempt. The attempt is rollback-only then.
        callbacks: to run after the commit; those of a failed attempt are dropped.
        joined_calls: those of this attempt that have not ended.
        describe_holders: returns in words who may hold the document of its last refused lock; None without one.
        cancel: a cancel that an asyncio task got during its commit.
    """

    client: Any
    reference: ReferenceType[Session]
    deadline: float
    owner: Owner
    seconds: float = math.inf
    client_name: str = "session.client"
    is_open: bool = True
    attempts: int = 0
    pauses: int = 0
    transient_error: BaseException | None = None
    rollback_reason: BaseException | None = None
    callbacks: list[Callback] = field(default_factory=list)
    joined_calls: set[object] = field(default_factory=set)
    describe_holders: Callable[[Session], str] | None = None
    cancel: asyncio.CancelledError | None = None

    @property
    def remaining(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self.deadline - time.monotonic()

    @property
    def is_inherited(self) -> bool:
        """Return True if another process began it, and forked this one inside: only that one may end it."""
        return self.owner[0] != os.getpid()

    @property
    def is_in_transaction(self) -> bool:
        """Return True if its session has a transaction in progress."""
        session = self.reference()
        return session is not None and session.in_transaction

    @property
    def lock_error(self) -> DocumentLockedError | None:
        """The error of a lock that this attempt gave up: the server ended the transaction by then."""
        return self.rollback_reason if isinstance(self.rollback_reason, DocumentLockedError) else None

    def reset_attempt(self) -> None:
        """Begin an attempt without the state of the one before."""
        self.attempts += 1
        self.rollback_reason = None
        self.callbacks.clear()
        self.joined_calls.clear()

    def close(self) -> None:
        """Note that it ended. Another context may hold it for long, but nothing else through it."""
        self.is_open = False
        self.owner, self.transient_error, self.rollback_reason = (0, 0, None), None, None

    def mark_rollback_only(self, error: BaseException) -> None:
        """Note the error of a joined call; the first one is the reason."""
        if self.rollback_reason is None:
            self.rollback_reason = error

    def next_pause(self) -> float:
        """Return the seconds to wait before the next attempt: growing, with full jitter."""
        self.pauses += 1
        return _PAUSES.nth(self.pauses - 1)

    def begin_end(self) -> None:
        """Note that the body ended. If nothing limited it, `seconds` begin now."""
        if self.deadline == math.inf:
            self.deadline = time.monotonic() + self.seconds

    def limit_calls(self) -> AbstractContextManager[None]:
        """Bound calls inside to the time left, in any thread."""
        return pymongo.timeout(max(self.remaining, _LEAST_SECONDS))

    def run_callbacks(self) -> None:
        """Run each callback once. It logs their errors, and raises Celery's time limit once all have run."""
        passing: list[BaseException] = []
        waiting, self.callbacks = self.callbacks, []
        for callback in waiting:
            with _logging_errors(passing):
                refuse_coroutine(callback(), _CALLBACK)
        if passing:
            raise passing[-1]

    async def await_callbacks(self) -> None:
        """Do the same with callbacks that may be coroutine functions. A cancel passes once all have run."""
        passing: list[BaseException] = []
        waiting, self.callbacks = self.callbacks, []
        for callback in waiting:
            with _logging_errors(passing):
                result = callback()
                if inspect.isawaitable(result):
                    await result
        if passing:
            raise passing[-1]


_scopes: ContextVar[tuple[TransactionScope, ...]] = ContextVar("mongo_celery_transactions", default=())
"""Those that this context has entered, the innermost first; other contexts may have closed some."""

_of_session: WeakKeyDictionary[Session, TransactionScope] = WeakKeyDictionary()
_cleared: list[ContextVar[Any]] = []


# -- entering and leaving --------------------------------------------------------------------------


@contextmanager
def open_scope(
    session: Session, seconds: float, client_name: str = "session.client", *, is_limited: bool = True
) -> Iterator[TransactionScope]:
    """
    Open a scope for the block. Its session leads to it inside, and afterwards to the scope before.

    Args:
        session: of the transaction.
        seconds: for all attempts; less if a scope around it has less left. All loops inside end by one deadline.
        client_name: the expression by which the body reaches the session's client, for messages.
        is_limited: False if the seconds begin when the body ends.
    """
    deadlines = [each.deadline for each in _scopes_here()]
    scope = TransactionScope(
        client=session.client,
        reference=ref(session),
        deadline=min([time.monotonic() + seconds if is_limited else math.inf, *deadlines]),
        owner=get_owner(),
        seconds=seconds,
        client_name=client_name,
    )
    before = _of_session.get(session)
    _of_session[session] = scope
    _scopes.set((scope, *_open_scopes()))
    try:
        with renewing_connections(session.client):
            yield scope
    finally:
        scope.close()
        if before is None:
            _of_session.pop(session, None)
        else:
            _of_session[session] = before
        _scopes.set(_open_scopes())


def _open_scopes() -> tuple[TransactionScope, ...]:
    return tuple(scope for scope in _scopes.get() if scope.is_open)


@contextmanager
def join_transaction(session: Session) -> Iterator[None]:
    """
    Join the transaction of a session for the block: an error of the block makes the whole rollback-only.

    It does not abort here: PyMongo runs what a session sends after an abort outside of any transaction.
    """
    scope = _of_session.get(session)
    if scope is None:
        yield
        return
    if scope.is_inherited:
        raise TransactionError(
            "The transaction of this session belongs to the process that forked this one. Nothing joined it. Begin a "
            "transaction here, without session=."
        )
    call = object()
    scope.joined_calls.add(call)
    try:
        yield
        if call not in scope.joined_calls or not scope.is_open:
            raise TransactionError(
                "The transaction has ended before this joined call, so some of the call's writes may be outside of it. "
                "End the call first, or make it independent with own=True."
            )
        if not session.in_transaction:
            raise TransactionError(
                "This joined call has ended the transaction, so the writes after it would be outside of any. Make the "
                "call independent with own=True."
            )
    except BaseException as error:
        # A generator of an earlier attempt that is closed now has nothing to do with this attempt.
        if scope.is_open and (call in scope.joined_calls or not isinstance(error, GeneratorExit)):
            scope.mark_rollback_only(error)
        raise
    finally:
        scope.joined_calls.discard(call)


def get_owner() -> Owner:
    """Return the calling process, thread and asyncio task."""
    try:
        return os.getpid(), threading.get_ident(), asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        return os.getpid(), threading.get_ident(), None


def _scopes_here() -> tuple[TransactionScope, ...]:
    """
    Return the open scopes that this thread and task began, the innermost first.

    One that this thread began outside of any task counts: the event loop runs inside of it.
    """
    scopes = _open_scopes()
    if not scopes:
        return ()
    owner = get_owner()
    return tuple(scope for scope in scopes if scope.owner in {owner, (*owner[:2], None)})


def clear_in_callbacks(variable: ContextVar[Any]) -> None:
    """Have a variable of transactions be None in the callbacks of a commit."""
    _cleared.append(variable)


@contextmanager
def outside_transactions() -> Iterator[None]:
    """Have the block's messages belong to no transaction around: they are sent immediately."""
    tokens = [(variable, variable.set(None)) for variable in _cleared]
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)


@contextmanager
def _logging_errors(passing: list[BaseException]) -> Iterator[None]:
    """Log the error of a callback. A cancel, and a time limit that ends the task wherever it arrives, are kept."""
    try:
        with outside_transactions():
            yield
    except (asyncio.CancelledError, SoftTimeLimitExceeded) as error:
        passing.append(error)
    except Exception as error:  # noqa: BLE001 - whatever a user's function raises
        logger.error(
            "a callback after a commit failed; the transaction is committed: %s",
            format_traceback(error),
            extra={"event": "callback_failed"},
        )


# -- the current transaction -----------------------------------------------------------------------


def scope_of(session: Session) -> TransactionScope | None:
    """Return the scope of a session, in any thread or task; None if `transactional` does not run its transaction."""
    return _of_session.get(session)


if TYPE_CHECKING:

    @overload
    def current(client: Client) -> ClientSession | None: ...
    @overload
    def current(client: AsyncClient) -> AsyncClientSession | None: ...


def current(client: Any) -> Any:
    """
    Return the session of the transaction that this thread and asyncio task is in.

    For code inside a transaction that gets no session: in the body of `transactional`, or in a handler with
    `transactional=True`. A thread or a task that the body starts is in none: a session serves one at a time. An event
    loop that a plain body runs in its own thread belongs to the body.

    Args:
        client: of the transaction, or a callable that returns it.

    Returns:
        The session of the innermost transaction of this client. None if there is none, or only those of clients of
        other clusters.

    Raises:
        ConfigurationError: a transaction of another client of the same cluster is in progress. The text names the
            client to use.
    """
    opened, others = resolve_client(client), list[TransactionScope]()
    for scope in _transactions_here():
        if scope.client is opened:
            return scope.reference()
        others.append(scope)
    for scope in others:
        if is_same_cluster(scope.client, opened):
            raise ConfigurationError(
                "A transaction of another client of this cluster is open here. This client cannot join it: its writes "
                f"would stay after an abort, and be repeated with each attempt. Use {scope.client_name}, the client of "
                "the open transaction. For an independent transaction, use transactional(client, own=True)."
            )
    return None


async def prepare_current(client: Any) -> None:
    """Have `current` know the clusters of an asyncio client and of the transactions around: nothing waits there."""
    for scope in _transactions_here():
        await wait_for_answer(scope.client)
        await wait_for_answer(resolve_client(client))


def after_commit(callback: Callback, session: Session | None = None) -> bool:
    """
    Call a function once a transaction is committed.

    It is called once, outside the transaction and without its time limit. It is dropped if the transaction is
    aborted, if its body is repeated (which registers it again), and if the body ends the transaction itself. Its
    errors are logged. Only Celery's soft time limit passes, once all callbacks have run. Not promised: that it is
    called at all, if the process dies after the commit.

    Args:
        callback: without arguments; in an async transaction it may be a coroutine function.
        session: of the transaction. By default the innermost one that this thread and asyncio task is in. If there is
            none, the callback is called immediately.

    Returns:
        True if it was called, or will be after a commit. False for a session whose transaction `transactional` does
        not run: it is never called.

    Raises:
        ConfigurationError: it is no function, or it is a coroutine function outside of an async transaction.
    """
    if not callable(callback) or not isinstance(session, Session | None):
        raise ConfigurationError("after_commit takes a function without arguments, and the session of a transaction.")
    scope = next(_transactions_here(), None) if session is None else scope_of(session)
    if scope is None and session is not None:
        return False
    is_async = scope is not None and isinstance(scope.reference(), AsyncClientSession)
    if inspect.iscoroutinefunction(callback) and not is_async:
        raise ConfigurationError(_CALLBACK)
    if scope is None:
        refuse_coroutine(callback(), _CALLBACK)
    else:
        scope.callbacks.append(callback)
    return True


_CALLBACK = (
    "This callback of after_commit is a coroutine function, or has returned a coroutine. Only async transactions await "
    "those. Give a plain function."
)


def refuse_coroutine(result: Result, message: str) -> Result:
    """
    Return the result of a plain function.

    Raises:
        ConfigurationError: it is a coroutine, which nothing would await.
    """
    if inspect.iscoroutine(result):
        result.close()
        raise ConfigurationError(message)
    return result


def _transactions_here() -> Iterator[TransactionScope]:
    return (scope for scope in _scopes_here() if scope.is_in_transaction)


def innermost_session() -> Session | None:
    """Return the session of the innermost transaction that this thread and asyncio task is in, of any client."""
    return next((scope.reference() for scope in _transactions_here()), None)


def is_beside_transaction() -> bool:
    """Return True if another thread or task of this process has started this one inside an open transaction."""
    here = _scopes_here()
    return any(scope.is_in_transaction and not scope.is_inherited and scope not in here for scope in _open_scopes())
