"""
The decorator and context manager for transactions.

PyMongo's `with_transaction` repeats a function's body, within `pymongo.timeout`. `attempts` commits and aborts. A
`with` is a single attempt.

The state of a transaction belongs to the call (`scopes`), not to this object or a thread. One object can decorate any
number of functions, and serves one `with` at a time.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from typing import Any, Protocol, TypeVar, cast

import pymongo
from pymongo import AsyncMongoClient, MongoClient, ReadPreference, WriteConcern
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.client_session import ClientSession
from pymongo.read_concern import ReadConcern

from mongo_celery.arguments import Duration, check_flags, positive
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.opening import AsyncClient, Client, resolve_client
from mongo_celery.mongo.transaction.attempts import attempt, attempt_async, end_session_afterwards, shield_from_anyio
from mongo_celery.mongo.transaction.ending import ending_with_time
from mongo_celery.mongo.transaction.scopes import (
    TransactionScope,
    current,
    join_transaction,
    open_scope,
    prepare_current,
    refuse_coroutine,
)

Result = TypeVar("Result")

TIMEOUT = 120.0
"""Default and largest repetition time of a transaction in seconds: PyMongo's own limit."""

_OPTIONS: dict[str, Any] = {
    "read_concern": ReadConcern("snapshot"),
    "write_concern": WriteConcern("majority"),
    "read_preference": ReadPreference.PRIMARY,
}

_BODY = (
    "The body returned a coroutine, which would run after the transaction. Make the body a coroutine function "
    "with an AsyncMongoClient, or use arun."
)

_ASYNC_KIND = "Coroutines, `async with` and arun need an AsyncMongoClient and its sessions."
_PLAIN_KIND = (
    "Plain functions, `with` and run need a MongoClient and its sessions. With an AsyncMongoClient use a "
    "coroutine function, `async with`, or arun."
)


class Collects(Protocol):
    """An object that collects writes for just before the commit: an `OutboxCollection`."""

    def collect(self, session: ClientSession) -> AbstractContextManager[object]:
        """Collect in the block. Its end writes them in the session's transaction, unless that has ended."""


def hide_session(call: Callable[..., Any], function: Callable[..., Any]) -> None:
    """
    Give a wrapper its function's signature without `session`, which Celery and FastAPI read.

    Text annotations are evaluated in the function's module, because FastAPI would use the wrapper's.
    """
    try:
        signature = inspect.signature(function, eval_str=True)
    except Exception:  # noqa: BLE001 - they may be whatever text, and names for type checkers only
        signature = inspect.signature(function)
    visible = [each for name, each in signature.parameters.items() if name != "session"]
    call.__signature__ = signature.replace(parameters=visible)  # type: ignore[attr-defined]
    del call.__wrapped__  # type: ignore[attr-defined]


class transactional:  # noqa: N801 - a decorator and context manager, used like a function
    """
    Run a function in a MongoDB transaction, and repeat it when MongoDB requests that.

    When the call returns, a majority has committed all writes of the function. If the function raises, no write is
    committed, and its error is raised unchanged, also Celery's `Retry`. The function may run several times. Its other
    effects must allow that, or wait for the commit in `after_commit`.

    ::

        @app.task(autoretry_for=(TransactionTimeoutError,))     # outside: it must not see transient errors
        @transactional(lambda: client)
        def book(seat, *, session):
            client.shop.seats.update_one({"_id": seat}, {"$set": {"taken": True}}, session=session)

        book("A1")

    As a decorator, it passes `session=` to the function. Pass the session to every operation: an operation without it
    is not part of the transaction. A coroutine function needs an `AsyncMongoClient`.

    As a context manager, `with transactional(client) as session:` or `async with`, it cannot repeat the body. Transient
    errors are raised with their labels. A commit with an unknown result is repeated. Each `with` needs an object that
    no other `with` is using, so make one each time.

    In a transaction of the same client, a call or a block *joins*: it becomes part of that transaction and gets its
    session. A call with the `session` of a transaction in progress joins that one, in any thread. If a joined call
    fails, the whole transaction is rollback-only: it is aborted, even if the body catches the error. Threads and
    asyncio tasks that the body starts do not join.

    Catch `DocumentLockedError` outside, because the server has aborted the transaction. If the body catches it, the
    call raises it anyway.

    Args:
        client: a `MongoClient`, an `AsyncMongoClient`, or a callable that returns one and is called each time.
        timeout: seconds, or a `timedelta`, for all attempts, calls and commits, 120 by default. An abort may take 2 s
            more, because without it documents stay locked. Code without server calls is not interrupted. If the time is
            used up when the body returns, the transaction is aborted. PyMongo starts no attempt after 120 s. Without
            this option, a plain `with` does not limit its body's calls, and its commit has 120 s. With it, the thread
            that entered the block must leave it. A joined call has the remaining outer time, or less if you set less.
            An asyncio task that the body starts inherits the limit, as with `pymongo.timeout`.
        outbox: an `OutboxCollection`. The transaction stores the tasks that the body sends with `delay` and similar
            calls, and they are dispatched after the commit: see `OutboxCollection.collect`. Not for an
            `AsyncMongoClient`.
        independent: True to run a separate transaction, even inside another one. It is committed even if the outer one
            is aborted, and again with each repetition of the outer one. Its failure does not affect the outer one. It
            has the outer time limit. It cannot write documents that the outer one has written.
        durable: True to refuse to join: when the call returns, its writes are committed.

    Raises:
        ConfigurationError: it decorates something that it cannot run, such as a Celery task. From the call: the client
            has the wrong kind, another `with` uses the object, or with `durable` a transaction is open.
        TransactionTimeoutError: from the call, when the time is used up. `outcome` is `aborted`, or `unknown` if no
            commit was answered: it may be done, or may never have been sent. Then the documents stay locked until the
            server ends the transaction. A shorter `pymongo.timeout` of yours can also cause `unknown`. If a joined
            call's own `timeout` ends it, PyMongo's error is raised.
        DocumentLockedError: from the call, even if the body caught this error of a lock.
        TransactionError: from the call. The body caught the error of a joined call, and nothing was committed.
        TopologyError: from the call, on a standalone server.
    """

    def __init__(
        self,
        client: Client | AsyncClient,
        *,
        timeout: Duration | None = None,
        outbox: Collects | None = None,
        independent: bool = False,
        durable: bool = False,
    ) -> None:
        if not isinstance(client, MongoClient | AsyncMongoClient) and not callable(client):
            raise ConfigurationError(
                f"transactional needs a MongoClient, or a callable that returns one, not {type(client).__name__}.",
            )
        if outbox is not None and not hasattr(outbox, "collect"):
            raise ConfigurationError(
                f"transactional(outbox=...) needs an OutboxCollection, not {type(outbox).__name__}. An Outbox "
                "stores tasks in documents instead.",
            )
        check_flags(independent=independent, durable=durable)
        if independent and durable:
            raise ConfigurationError("independent=True and durable=True exclude each other. Leave one of them out.")
        self._client: Any = client
        self._is_limited = timeout is not None
        self._seconds = TIMEOUT if timeout is None else positive(timeout, "timeout")
        self._outbox = outbox
        self._is_independent = independent
        self._is_durable = durable
        self._busy = threading.Lock()
        self._block: Any = None

    # -- functions ---------------------------------------------------------------------------------

    def __call__(self, function: Callable[..., Result]) -> Callable[..., Result]:
        """Decorate a function or a coroutine function."""
        _refuse(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.pop("session", None)
            return self.run(lambda session: function(*args, session=session, **kwargs), session=given)

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.pop("session", None)
            awaited = cast("Callable[..., Awaitable[Any]]", function)
            return await self.arun(lambda session: awaited(*args, session=session, **kwargs), session=given)

        chosen: Callable[..., Any] = call_async if inspect.iscoroutinefunction(function) else call
        hide_session(chosen, function)
        return chosen

    def run(self, body: Callable[[ClientSession], Result], *, session: ClientSession | None = None) -> Result:
        """
        Run a body in a transaction, like the decorator.

        Args:
            body: called with the session, maybe several times.
            session: the session of a transaction in progress to join, or a session to use. By default a new one.

        Returns:
            The body's result in the committed attempt.
        """
        with self._enter(session, is_limited=True) as (used, scope):
            if scope is None:
                return refuse_coroutine(body(used), _BODY)

            def run_attempt(_: ClientSession) -> Result:
                with attempt(scope, used, self._collecting):
                    return refuse_coroutine(body(used), _BODY)

            with ending_with_time(scope):
                return used.with_transaction(run_attempt, **_OPTIONS)

    async def arun(
        self, body: Callable[[AsyncClientSession], Awaitable[Result]], *, session: AsyncClientSession | None = None
    ) -> Result:
        """
        Run a body in a transaction of an `AsyncMongoClient`, like the decorator of a coroutine function.

        If a task is canceled in the body, its transaction is aborted. A cancel during the commit is kept until the
        answer arrives, or the time is used up, and callbacks have run. Then the transaction is committed.

        Args:
            body: called with the session and awaited, maybe several times.
            session: the session of a transaction in progress to join, or a session to use. By default a new one.

        Returns:
            The body's result in the committed attempt.
        """
        async with self._enter_async(session) as (used, scope):
            if scope is None:
                return await body(used)

            async def run_attempt(_: AsyncClientSession) -> Result:
                async with attempt_async(scope, used):
                    return await body(used)

            with ending_with_time(scope):
                return await used.with_transaction(run_attempt, **_OPTIONS)

    # -- blocks ------------------------------------------------------------------------------------

    def __enter__(self) -> ClientSession:
        block = self._run_block()
        session = block.__enter__()
        self._block = block
        return session

    def __exit__(self, *details: object) -> None:
        self._block.__exit__(*details)

    async def __aenter__(self) -> AsyncClientSession:
        block = self._run_block_async()
        session = await block.__aenter__()
        self._block = block
        return session

    async def __aexit__(self, *details: object) -> None:
        await self._block.__aexit__(*details)

    @contextmanager
    def _run_block(self) -> Iterator[ClientSession]:
        with self._hold_object(), self._enter(None, is_limited=self._is_limited) as (session, scope):
            if scope is None:
                yield session
                return
            session.start_transaction(**_OPTIONS)
            with attempt(scope, session, self._collecting):
                yield session

    @asynccontextmanager
    async def _run_block_async(self) -> AsyncIterator[AsyncClientSession]:
        with self._hold_object():
            async with self._enter_async(None) as (session, scope):
                if scope is None:
                    yield session
                    return
                await session.start_transaction(**_OPTIONS)
                async with attempt_async(scope, session):
                    yield session

    @contextmanager
    def _hold_object(self) -> Iterator[None]:
        """Reserve this object for one `with` block."""
        if not self._busy.acquire(blocking=False):
            raise ConfigurationError(
                "Another `with` already uses this transactional object, so no transaction was started. Make an "
                "object for each block: with transactional(client) as session:"
            )
        try:
            yield
        finally:
            self._busy.release()

    # -- choice of the transaction -------------------------------------------------------------------

    @contextmanager
    def _enter(
        self, given: ClientSession | None, *, is_limited: bool
    ) -> Iterator[tuple[ClientSession, TransactionScope | None]]:
        """Yield the session of the joined transaction, or of a new scope, and then run the new scope's callbacks."""
        session, is_joined = self._choose_session(given, ClientSession)
        if is_joined:
            with join_transaction(session), self._limit_calls(self._is_limited), self._collecting(session):
                yield session, None
            return
        with (
            contextlib.nullcontext() if session is given else session,
            open_scope(session, self._seconds, is_limited=is_limited) as scope,
            self._limit_calls(is_limited),
        ):
            yield session, scope
        scope.run_callbacks()

    @asynccontextmanager
    async def _enter_async(
        self, given: AsyncClientSession | None
    ) -> AsyncIterator[tuple[AsyncClientSession, TransactionScope | None]]:
        """Do the same for asyncio, where a new scope always has a limit."""
        await prepare_current(self._client)
        session, is_joined = self._choose_session(given, AsyncClientSession)
        if is_joined:
            with join_transaction(session), self._limit_calls(self._is_limited):
                yield session, None
            return
        async with contextlib.nullcontext() if session is given else end_session_afterwards(session):
            with open_scope(session, self._seconds) as scope, self._limit_calls(is_limited=True):
                yield session, scope
        with shield_from_anyio():
            await scope.await_callbacks()
        if scope.cancel is not None:
            raise scope.cancel

    def _choose_session(self, given: Any, kind: type[Any]) -> tuple[Any, bool]:
        """Return the session to use, and True if its transaction is joined."""
        is_async = kind is AsyncClientSession
        if is_async and self._outbox is not None:
            raise ConfigurationError(
                "transactional(outbox=...) needs a MongoClient. With an AsyncMongoClient use with_tasks of an Outbox."
            )
        client: Any = resolve_client(self._client) if given is None else getattr(given, "client", None)
        if isinstance(client, AsyncMongoClient) is not is_async or not isinstance(given, kind | None):
            raise ConfigurationError(_ASYNC_KIND if is_async else _PLAIN_KIND)
        is_open = given is not None and given.in_transaction
        around = None if self._is_independent else given if is_open else current(client)
        if self._is_durable and around is not None:
            raise ConfigurationError(
                "transactional(durable=True) must commit when it returns, but a transaction is open here. "
                "Nothing was run. Call it outside of that transaction, or without durable.",
            )
        if given is not None and not is_open:
            return given, False
        return (client.start_session(), False) if around is None else (around, True)

    @contextmanager
    def _limit_calls(self, is_limited: bool) -> Iterator[None]:
        """Limit calls in the block. If another thread or task leaves it, there is no limit to remove."""
        limit = pymongo.timeout(self._seconds) if is_limited else contextlib.nullcontext()
        limit.__enter__()
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # from another context
                limit.__exit__(None, None, None)

    @contextmanager
    def _collecting(self, session: ClientSession) -> Iterator[None]:
        """Collect for the outbox in the block. Its own calls are limited even if the body is not."""
        if self._outbox is None:
            yield
            return
        with ExitStack() as box:
            with pymongo.timeout(self._seconds):
                box.enter_context(self._outbox.collect(session))
            yield
            with pymongo.timeout(self._seconds):
                box.close()


def check_function(function: object) -> None:
    """
    Check that a transaction can surround a function, whatever other arguments there are.

    Raises:
        ConfigurationError: it is not a function or coroutine function.
    """
    if hasattr(function, "apply_async"):
        raise ConfigurationError(
            "transactional is above @app.task(...), where autoretry_for would catch transient errors first. Put "
            "it below: first @app.task(...), then @transactional(client), then the function.",
        )
    if not callable(function) or isinstance(function, type):
        raise ConfigurationError(f"transactional needs a function, not {type(function).__name__}.")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError("transactional runs functions and coroutine functions, not generators.")


def _refuse(function: Callable[..., Any]) -> None:
    check_function(function)
    parameters = inspect.signature(function).parameters
    named = parameters.get("session")
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if not takes_any and (named is None or named.kind is named.POSITIONAL_ONLY):
        raise ConfigurationError(
            f"{getattr(function, '__name__', 'the function')} must take session=, and pass it to every operation.",
        )
