"""
The current transaction of a thread or an asyncio task, and the state of one `transactional` call.

A *scope* is a transaction that `transactional` runs, over all its attempts. There are two ways to find it:

- a context variable contains the innermost one. asyncio copies contexts for every task, and frameworks for every thread
  that they borrow. So a scope counts only for the thread and task that began it (its *owner*). A session serves one
  thread at a time, and a copied context outlives the transaction;
- its session identifies it, in any thread.

Only `current` decides if a client's transaction is open here. It refuses a transaction of another client of the same
cluster: writes outside it would repeat with each attempt.

A scope that ends in another context than it began in cannot be removed from the first one. It is marked as closed.
Nothing joins a closed scope.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, overload
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import pymongo
from celery.exceptions import SoftTimeLimitExceeded
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.client_session import ClientSession

from mongo_celery.errors import ConfigurationError, DocumentLockedError, TransactionError
from mongo_celery.mongo.cluster import connections_in_transaction, is_same_cluster, wait_for_answer
from mongo_celery.mongo.opening import AsyncClient, Client, resolve_client
from mongo_celery.mongo.redaction import format_traceback
from mongo_celery.mongo.steps import Session

logger = logging.getLogger("mongo_celery.locking")

_LEAST_SECONDS = 0.001
"""An expired limit. PyMongo takes 0 for no limit."""

Result = TypeVar("Result")
Callback = Callable[[], object]

Owner = tuple[int, int, "asyncio.Task[Any] | None"]
"""A process, a thread and a task: a forked child has the same thread numbers as its parent."""


@dataclass(slots=True, eq=False)
class TransactionScope:
    """
    A transaction that `transactional` runs, with all its attempts.

    Attributes:
        client: the session's client.
        reference: a weak reference to its session.
        deadline: the deadline on the monotonic clock. No attempt begins after it. Infinite while a `with` has no limit.
        owner: the process, thread and asyncio task that began it.
        seconds: the seconds for the commit of a `with` whose body has no limit.
        around: the sessions of Django's transactions that were open when it began.
        is_open: False after its end.
        attempts: number of attempts so far.
        transient_error: the last error that another attempt followed.
        rollback_reason: the first error of a joined call in this attempt, which makes it rollback-only.
        callbacks: the callbacks to run after the commit. A failed attempt drops its own.
        joined_calls: joined calls of this attempt that have not ended.
        writes: asyncio writes for the end of the body, from code that cannot await. A failed attempt drops its own.
        takes_writes: True while an attempt's body runs.
        cancel: a cancel that arrived during an asyncio commit.
    """

    client: Any
    reference: ReferenceType[Session]
    deadline: float
    owner: Owner
    seconds: float
    around: WeakSet[Session] = field(default_factory=WeakSet)
    is_open: bool = True
    attempts: int = 0
    transient_error: BaseException | None = None
    rollback_reason: BaseException | None = None
    callbacks: list[Callback] = field(default_factory=list)
    joined_calls: set[object] = field(default_factory=set)
    writes: list[Callable[[], Awaitable[object]]] = field(default_factory=list)
    takes_writes: bool = False
    cancel: asyncio.CancelledError | None = None

    @property
    def remaining(self) -> float:
        """Seconds until the deadline. Negative after it."""
        return self.deadline - time.monotonic()

    @property
    def is_inherited(self) -> bool:
        """Return True if a parent process began this transaction and forked inside. Only the parent may end it."""
        return self.owner[0] != os.getpid()

    @property
    def is_in_transaction(self) -> bool:
        """Return True if the session of the scope has a transaction in progress."""
        session = self.reference()
        return session is not None and session.in_transaction

    @property
    def lock_error(self) -> DocumentLockedError | None:
        """The error of a lock that this attempt gave up. The server has then ended the transaction."""
        return self.rollback_reason if isinstance(self.rollback_reason, DocumentLockedError) else None

    def reset_attempt(self) -> None:
        """Begin an attempt without the last one's state."""
        self.attempts += 1
        self.rollback_reason = None
        self.callbacks.clear()
        self.joined_calls.clear()
        self.writes.clear()
        self.takes_writes = True

    def close(self) -> None:
        """Mark the scope as ended. Another context may keep it for long, but must not keep other objects alive."""
        self.is_open = False
        self.joined_calls.clear()
        self.writes.clear()
        self.owner, self.transient_error, self.rollback_reason = (0, 0, None), None, None

    def mark_rollback_only(self, error: BaseException) -> None:
        """Note the error of a joined call. The first one is the reason."""
        if self.rollback_reason is None:
            self.rollback_reason = error

    def begin_end(self) -> None:
        """Record the end of the body. If the body had no limit, the time of the commit begins now."""
        if self.deadline == math.inf:
            self.deadline = time.monotonic() + self.seconds

    async def await_writes(self) -> None:
        """Await the writes for the end of the body, also those that other tasks add meanwhile."""
        for write in self.writes:
            await write()
        self.takes_writes = False

    def limit_calls(self) -> AbstractContextManager[None]:
        """Limit calls in the block to the remaining time, in any thread."""
        return pymongo.timeout(max(self.remaining, _LEAST_SECONDS))

    def run_callbacks(self) -> None:
        """Run each callback once. Log errors, and raise Celery's time limit after all have run."""
        with ExitStack() as stack:
            for callback in reversed(self.callbacks):
                stack.callback(_run_callback, callback)
            self.callbacks.clear()

    async def await_callbacks(self) -> None:
        """Run each callback once, also coroutine functions. Raise a cancel after all have run."""
        async with AsyncExitStack() as stack:
            for callback in reversed(self.callbacks):
                stack.push_async_callback(_await_callback, callback)
            self.callbacks.clear()


_scopes: ContextVar[tuple[TransactionScope, ...]] = ContextVar("mongo_celery_transactions", default=())
"""The scopes that this context has entered, innermost first. Other contexts may have closed some."""

_skipped: ContextVar[tuple[Session, ...]] = ContextVar("mongo_celery_skipped_transactions", default=())
"""The transactions that messages of this context do not belong to."""

_of_session: WeakKeyDictionary[Session, TransactionScope] = WeakKeyDictionary()
_cleared: list[ContextVar[Any]] = []


# -- entering and leaving --------------------------------------------------------------------------


@contextmanager
def open_scope(session: Session, seconds: float, *, is_limited: bool = True) -> Iterator[TransactionScope]:
    """
    Open a scope for the block. Inside, its session identifies it.

    Args:
        session: the session of the transaction.
        seconds: the seconds for all attempts, at most the remaining time of a surrounding scope. All loops inside share
            one deadline.
        is_limited: False if the time begins when the body ends.
    """
    scope = TransactionScope(
        client=session.client,
        reference=ref(session),
        deadline=min(
            [time.monotonic() + seconds if is_limited else math.inf, *(each.deadline for each in _scopes_here())]
        ),
        owner=get_owner(),
        seconds=seconds,
        around=WeakSet(connection.session for connection in connections_in_transaction()),
    )
    _of_session[session] = scope
    _scopes.set((scope, *_open_scopes()))
    try:
        yield scope
    finally:
        scope.close()
        _of_session.pop(session, None)
        _scopes.set(_open_scopes())


def _open_scopes() -> tuple[TransactionScope, ...]:
    return tuple(scope for scope in _scopes.get() if scope.is_open)


@contextmanager
def join_transaction(session: Session) -> Iterator[None]:
    """
    Join a session's transaction for the block. An error in the block makes the whole transaction rollback-only.

    It does not abort here: PyMongo runs statements after an abort outside any transaction.
    """
    scope = _of_session.get(session)
    if scope is None:
        yield
        return
    if scope.is_open and scope.is_inherited:
        raise TransactionError(
            "This process was forked inside a transaction of its parent and cannot join it, because MongoDB "
            "would lose some of the writes. Nothing was run. Use a client that this process has created."
        )
    call = object()
    scope.joined_calls.add(call)
    try:
        yield
        if call not in scope.joined_calls or not session.in_transaction:
            raise TransactionError(
                "The transaction ended before this joined call, so some writes of the call may be outside of "
                "it. Wait for the call before you end the transaction, or make it independent with "
                "independent=True."
            )
    except BaseException as error:
        # A generator of an earlier attempt that closes now does not affect this attempt.
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
    Return the open scopes of this thread and task, innermost first.

    A scope that this thread began outside any task counts too, because the event loop runs inside it.
    """
    scopes = _open_scopes()
    if not scopes:
        return ()
    owner = get_owner()
    return tuple(scope for scope in scopes if scope.owner in {owner, (*owner[:2], None)})


def clear_in_callbacks(variable: ContextVar[Any]) -> None:
    """Make a variable of transactions None in commit callbacks."""
    _cleared.append(variable)


@contextmanager
def outside_transactions() -> Iterator[None]:
    """Send the block's messages immediately, outside any surrounding transaction."""
    values: list[tuple[ContextVar[Any], object]] = [(variable, None) for variable in _cleared]
    tokens = [(each, each.set(value)) for each, value in [*values, (_skipped, tuple(_sending_sessions()))]]
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)


@contextmanager
def _logging_errors() -> Iterator[None]:
    """Log a callback's error. Raise a cancel, and a time limit, which ends the task wherever it arrives."""
    try:
        with outside_transactions():
            yield
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a user's function raises
        logger.error(
            "A callback of after_commit failed. The transaction is committed: %s",
            format_traceback(error),
            extra={"event": "callback_failed"},
        )


def _run_callback(callback: Callback) -> None:
    with _logging_errors():
        refuse_coroutine(callback(), _CALLBACK)


async def _await_callback(callback: Callback) -> None:
    with _logging_errors():
        result = callback()
        if inspect.isawaitable(result):
            await result


# -- the current transaction -----------------------------------------------------------------------


def scope_of(session: Session) -> TransactionScope | None:
    """Return a session's scope, in any thread or task. None if `transactional` does not run its transaction."""
    return _of_session.get(session)


if TYPE_CHECKING:

    @overload
    def current(client: Client) -> ClientSession | None: ...
    @overload
    def current(client: AsyncClient) -> AsyncClientSession | None: ...


def current(client: Any) -> Any:
    """
    Return the session of this thread's and asyncio task's transaction.

    Use it for code that gets no session, inside the body of `transactional` or in a handler with `transactional=True`.
    Threads and tasks that the body starts have no transaction, because a session serves one at a time. An event loop
    that a plain body runs in its own thread belongs to the body.

    Args:
        client: the client of the transaction, or a callable that returns it.

    Returns:
        The session of this client's innermost transaction. None if there is none, or only those of other clusters'
        clients.

    Raises:
        ConfigurationError: a transaction of another client of the same cluster is in progress. The message names the
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
                "A transaction of another client of this cluster is open here. This client cannot join it: its "
                "writes would stay after an abort. Use the client of the open transaction: session.client, or "
                "bridge.client in a handler, or bridge.async_client in an async handler. For an independent "
                "transaction, use transactional(client, independent=True)."
            )
    return None


async def prepare_current(client: Any) -> None:
    """
    Let `current` learn the clusters of an asyncio client and of surrounding transactions, because it
    does not wait.
    """
    for scope in _transactions_here():
        await wait_for_answer(scope.client)
        await wait_for_answer(resolve_client(client))


def after_commit(callback: Callback, session: Session | None = None) -> bool:
    """
    Call a function after a transaction's commit.

    It is called once, outside the transaction and without its time limit. It is dropped if the transaction is aborted,
    if its body repeats (which registers it again), and if the body itself ends the transaction. Its errors are logged.
    Only Celery's soft time limit is raised, after all callbacks have run. If the process dies after the commit, it may
    never be called.

    Args:
        callback: a function without arguments. In an async transaction it may be a coroutine function.
        session: the session of the transaction. By default this thread's and asyncio task's innermost one. If there is
            none, the callback is called immediately.

    Returns:
        True if it was called, or will be after a commit. False if `transactional` does not run the session's
        transaction: then it is never called.

    Raises:
        ConfigurationError: it is not a function, or it is a coroutine function outside an async transaction.
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
    "This callback of after_commit is a coroutine function, or has returned a coroutine. Only async "
    "transactions await coroutines. Pass a plain function."
)


def refuse_coroutine(result: Result, message: str) -> Result:
    """
    Return the result of a plain function.

    Raises:
        ConfigurationError: it is a coroutine or another awaitable, which nothing would await.
    """
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise ConfigurationError(message)
    return result


def _transactions_here() -> Iterator[TransactionScope]:
    return (scope for scope in _scopes_here() if scope.is_in_transaction)


def innermost_session() -> Session | None:
    """Return the session of the innermost transaction of this thread and asyncio task, of any client."""
    return next((scope.reference() for scope in _transactions_here()), None)


def sending_session() -> Session | None:
    """
    Return the session of the transaction to which a message from here belongs. None in `outside_transactions`.

    It is the innermost one of `transactional` and of Django's `atomic`. A transaction of `transactional` includes
    asyncio tasks that its body starts.
    """
    skipped = _skipped.get()
    return next((session for session in _sending_sessions() if session not in skipped), None)


def _sending_sessions() -> Iterator[Session]:
    """Yield the sessions of the transactions that are open here, innermost first."""
    here, others = get_owner()[:2], [connection.session for connection in connections_in_transaction()]
    for scope in _open_scopes():
        session = scope.reference()
        if scope.owner[:2] == here and scope.takes_writes and session is not None and session.in_transaction:
            yield from (other for other in others if other not in scope.around)
            others = [other for other in others if other in scope.around]
            yield session
    yield from others


def is_beside_transaction(client: Any = None) -> bool:
    """
    Return True if another thread or task of this process started this one inside an open transaction.

    Args:
        client: its cluster must be that of the transaction. By default any.
    """
    others = [scope for scope in {*_open_scopes()} - {*_scopes_here()} if scope.owner[0] == os.getpid()]
    return any(
        scope.is_in_transaction and (client is None or is_same_cluster(scope.client, client)) for scope in others
    )
