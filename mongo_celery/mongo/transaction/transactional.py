"""
The decorator and context manager.

PyMongo's `with_transaction` repeats a function's body, under `pymongo.timeout`. `attempts` commits and aborts. A `with`
is one attempt without the repetition.

The state of a transaction belongs to the call (`scopes`), not to this object or to a thread. One object decorates any
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
from mongo_celery.mongo.transaction.attempts import attempt, attempt_async, open_async_session, shield_callbacks
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
"""Seconds for which a transaction is repeated by default, and at most: PyMongo's own limit."""

_BODY = (
    "The body has returned a coroutine, which would run after the transaction and outside of it. Make the body a "
    "coroutine function with an AsyncMongoClient, or use arun."
)

_ASYNC_KIND = "Coroutines, async with and arun need an AsyncMongoClient and its sessions."
_PLAIN_KIND = (
    "Plain functions, with and run need a MongoClient and its sessions; with an AsyncMongoClient use a coroutine "
    "function, async with, or arun."
)


class Collects(Protocol):
    """A collector of what is to be written just before the commit: an `OutboxCollection`."""

    def collect(self, session: ClientSession) -> AbstractContextManager[object]:
        """Collect inside. The end of the block writes it in the session's transaction, unless that has ended."""


def hide_session(call: Callable[..., Any], function: Callable[..., Any]) -> None:
    """
    Give a wrapper the signature of its function without `session`: Celery and FastAPI read a call's arguments from it.

    Annotations that are text are evaluated in the function's module: FastAPI would look in the wrapper's.
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
    Run a function in a transaction, repeated as long as MongoDB asks for it.

    As a decorator, it calls the function with `session=`. Pass the session to every operation. When the call returns,
    its writes are committed by a majority, all or none. The body may run several times, so its other effects must bear
    repetition (see `after_commit`). Errors that are not MongoDB's abort the transaction and pass through, Celery's
    `Retry` too. A coroutine function is decorated in the same way, with an `AsyncMongoClient`.

    ::

        @app.task(autoretry_for=(TransactionTimeoutError,))     # outside: it must not see transient errors
        @transactional(lambda: bridge.client)
        def book(seat, *, session): ...

    As a context manager, `with transactional(client) as session:` or `async with`, a body cannot be repeated. A
    commit whose result is unknown is repeated. Transient errors pass to the caller with their labels. Another thread
    than the one that entered a block may leave it.

    Inside a transaction of the same client, a call or a block *joins*: it becomes part of that transaction, and gets
    its session. A call with the `session` of a transaction in progress joins that one, in any thread. If a joined call
    fails, the whole is rollback-only: it is aborted also if the body catches the error. Threads and asyncio tasks
    that the body starts do not join.

    One object decorates any number of functions, for any number of threads and tasks. A `with` needs an object that
    no other `with` is using: write `with transactional(client) as session:` each time.

    Catch a `DocumentLockedError` outside: the server has aborted the transaction. If the body catches it and returns,
    or continues with the session, the transaction still ends with that error.

    Args:
        client: the client, or a callable that returns it (prefork workers make theirs after the fork).
        timeout: seconds or `timedelta` for all attempts, 120 by default. No attempt begins later, and no call to a
            server inside lasts longer, by any client. PyMongo begins no attempt after 120 s, whatever is given. Code
            that calls no server is not interrupted. If the time is used up when the body returns, the transaction is
            aborted instead of committed. An abort, and the question who holds a document, have up to 2 s more: a
            transaction that is not aborted keeps its documents locked. If your own, shorter `pymongo.timeout`
            interrupts the commit, `outcome` is `unknown`.
            The calls in the body of a `with` are bounded only if this is given. Then the thread that entered the block
            must leave it, as otherwise it would keep the limit. A joined call has the time that is left to the
            whole, or less if you give it less here. An asyncio task that the body starts inherits the limit, as with
            `pymongo.timeout`.
        read_concern: by default snapshot. A joined call ignores this and all that follow, except `outbox`.
        write_concern: by default majority.
        read_preference: by default the primary.
        outbox: an `OutboxCollection`. The transaction then stores what the body sends with `delay` and its like, and
            it is dispatched after the commit; see its `collect`. Not with an `AsyncMongoClient`.
        own: run an independent transaction, also inside another one. It is committed whatever happens to the outer
            transaction, and again with each repetition of that one. Its failure leaves the outer one as it is. It ends
            by the deadline of the outer one. Documents that the outer one has written are locked for it.
        durable: refuse to join. When the call returns, its writes are committed.

    Raises:
        ConfigurationError: it decorates something that it cannot run, such as a Celery task; or, from the call, the
            client is of the other kind, another `with` uses the object, or with `durable` a transaction is open.
        TransactionTimeoutError: from the call, when the time is used up. Its attribute `outcome` is `aborted`, or
            `unknown` if a commit was tried and not answered: it may be done, or it may never have been sent. Then the
            documents stay locked until the server ends the transaction. A joined call with a `timeout` of its own,
            less than the whole has left, ends by PyMongo's error of the call that took too long.
        DocumentLockedError: from the call, when the body caught that of a lock inside.
        TransactionError: from the call, when the body caught the error of a joined call; aborted.
        TopologyError: from the call, on a standalone server.
    """

    def __init__(
        self,
        client: Client | AsyncClient,
        *,
        timeout: Duration | None = None,
        read_concern: ReadConcern | None = None,
        write_concern: WriteConcern | None = None,
        read_preference: Any = None,
        outbox: Collects | None = None,
        own: bool = False,
        durable: bool = False,
    ) -> None:
        if not isinstance(client, MongoClient | AsyncMongoClient) and not callable(client):
            raise ConfigurationError(
                f"transactional needs a MongoClient, or a callable that returns one, not {type(client).__name__}.",
            )
        if outbox is not None and not hasattr(outbox, "collect"):
            raise ConfigurationError(
                f"transactional(outbox=...) needs an OutboxCollection, not {type(outbox).__name__}; an Outbox stores "
                "tasks in the documents that it writes.",
            )
        check_flags(own=own, durable=durable)
        if own and durable:
            raise ConfigurationError("own=True and durable=True exclude each other: one may stand inside, one may not.")
        self._client: Any = client
        self._is_limited = timeout is not None
        self._seconds = TIMEOUT if timeout is None else positive(timeout, "timeout")
        self._options: dict[str, Any] = {
            "read_concern": read_concern or ReadConcern("snapshot"),
            "write_concern": write_concern or WriteConcern("majority"),
            "read_preference": read_preference or ReadPreference.PRIMARY,
        }
        self._outbox = outbox
        self._is_independent = own
        self._is_durable = durable
        self._busy = threading.Lock()
        self._block: Any = None

    # -- functions ---------------------------------------------------------------------------------

    def __call__(self, function: Callable[..., Result]) -> Callable[..., Result]:
        """Decorate a function, or a coroutine function."""
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
        Run a body in a transaction, as the decorator does.

        Args:
            body: called with the session, maybe several times.
            session: of a transaction in progress, to join; or to use. By default a new one.

        Returns:
            The body's result in the attempt that was committed.
        """
        with self._entered(session, is_limited=True) as (used, scope):
            if scope is None:
                return refuse_coroutine(body(used), _BODY)

            def run_attempt(_: ClientSession) -> Result:
                with attempt(scope, used, self._collecting):
                    return refuse_coroutine(body(used), _BODY)

            with ending_with_time(scope):
                return used.with_transaction(run_attempt, **self._options)

    async def arun(
        self, body: Callable[[AsyncClientSession], Awaitable[Result]], *, session: AsyncClientSession | None = None
    ) -> Result:
        """
        Run a body in a transaction of an `AsyncMongoClient`, as the decorator of a coroutine function does.

        A task that is canceled in the body has its transaction aborted. During the commit the cancel is kept until the
        answer has come, or the time is used up, and callbacks have run. Then the transaction is committed.

        Args:
            body: called with the session and awaited, maybe several times.
            session: of a transaction in progress, to join; or to use. By default a new one.

        Returns:
            The body's result in the attempt that was committed.
        """
        async with self._entered_async(session) as (used, scope):
            if scope is None:
                return await body(used)

            async def run_attempt(_: AsyncClientSession) -> Result:
                async with attempt_async(scope, used):
                    return await body(used)

            with ending_with_time(scope):
                return await used.with_transaction(run_attempt, **self._options)

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
        with self._taken(), self._entered(None, is_limited=self._is_limited) as (session, scope):
            if scope is None:
                yield session
                return
            session.start_transaction(**self._options)
            with attempt(scope, session, self._collecting):
                yield session

    @asynccontextmanager
    async def _run_block_async(self) -> AsyncIterator[AsyncClientSession]:
        with self._taken():
            async with self._entered_async(None) as (session, scope):
                if scope is None:
                    yield session
                    return
                await session.start_transaction(**self._options)
                async with attempt_async(scope, session):
                    yield session

    @contextmanager
    def _taken(self) -> Iterator[None]:
        """Take the object for one `with`."""
        if not self._busy.acquire(blocking=False):
            raise ConfigurationError(
                "Another `with` uses this transactional object, so no transaction was begun. Make an object for each "
                "block: with transactional(client) as session:"
            )
        try:
            yield
        finally:
            self._busy.release()

    # -- which transaction -------------------------------------------------------------------------

    @contextmanager
    def _entered(
        self, given: ClientSession | None, *, is_limited: bool
    ) -> Iterator[tuple[ClientSession, TransactionScope | None]]:
        """Give the session of the joined transaction, or one with a new scope; run the callbacks of that afterwards."""
        joined, given, client = self._find_session(given, ClientSession)
        if joined is not None:
            with join_transaction(joined), self._limited(self._is_limited), self._collecting(joined):
                yield joined, None
            return
        with (
            client.start_session() if given is None else contextlib.nullcontext(given) as session,
            open_scope(session, self._seconds, is_limited=is_limited) as scope,
            self._limited(is_limited),
        ):
            yield session, scope
        scope.run_callbacks()

    @asynccontextmanager
    async def _entered_async(
        self, given: AsyncClientSession | None
    ) -> AsyncIterator[tuple[AsyncClientSession, TransactionScope | None]]:
        """Do the same for asyncio, where a new scope always has a limit."""
        await prepare_current(self._client)
        joined, given, client = self._find_session(given, AsyncClientSession)
        if joined is not None:
            with join_transaction(joined), self._limited(self._is_limited):
                yield joined, None
            return
        async with open_async_session(client, given) as session:
            with open_scope(session, self._seconds) as scope, self._limited(is_limited=True):
                yield session, scope
        with shield_callbacks():
            await scope.await_callbacks()
        if scope.cancel is not None:
            raise scope.cancel

    def _find_session(self, given: Any, kind: type[Any]) -> tuple[Any, Any, Any]:
        """Return the session to join, or the one to use, or the client of a new one."""
        is_async = kind is AsyncClientSession
        if is_async and self._outbox is not None:
            raise ConfigurationError(
                "transactional(outbox=...) needs a MongoClient; with an AsyncMongoClient write with_tasks of an Outbox."
            )
        client: Any = resolve_client(self._client) if given is None else getattr(given, "client", None)
        if isinstance(client, AsyncMongoClient) is not is_async or not isinstance(given, kind | None):
            raise ConfigurationError(_ASYNC_KIND if is_async else _PLAIN_KIND)
        is_open = given is not None and given.in_transaction
        around = given if is_open else None if self._is_independent else current(client)
        if self._is_durable and around is not None:
            raise ConfigurationError(
                "transactional(durable=True) is committed when it returns, but a transaction is open here. Nothing was "
                "run. Call it outside of that transaction, or without durable.",
            )
        if self._is_independent or (given is not None and not is_open):
            return None, None if is_open else given, client
        return around, None, client

    @contextmanager
    def _limited(self, is_limited: bool) -> Iterator[None]:
        """Bound calls inside. Left in another thread or task, there is no limit to take back."""
        limit = pymongo.timeout(self._seconds) if is_limited else contextlib.nullcontext()
        limit.__enter__()
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # another context's
                limit.__exit__(None, None, None)

    @contextmanager
    def _collecting(self, session: ClientSession) -> Iterator[None]:
        """Collect for the outbox inside. Its own calls are bounded also in a block whose body is not."""
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
    Check that a transaction can be around a function, whatever else is given to the call.

    Raises:
        ConfigurationError: it is no function or coroutine function.
    """
    if hasattr(function, "apply_async"):
        raise ConfigurationError(
            "transactional stands on a Celery task; put it below, on the function: @app.task(...), then "
            "@transactional(client). Else autoretry_for would take the transient errors before they are repeated here.",
        )
    if not callable(function) or isinstance(function, type):
        raise ConfigurationError(f"transactional needs a function, not {type(function).__name__}.")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError("transactional runs functions and coroutine functions; no generators.")


def _refuse(function: Callable[..., Any]) -> None:
    check_function(function)
    parameters = inspect.signature(function).parameters
    named = parameters.get("session")
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if not takes_any and (named is None or named.kind is named.POSITIONAL_ONLY):
        raise ConfigurationError(
            f"{getattr(function, '__name__', 'the function')} must take session=, and pass it to every operation.",
        )
