"""
The decorator and context manager.

The loop is that of `withTransaction` in MongoDB's specifications ("Convenient API for Transactions"): an error
labelled TransientTransactionError repeats the body, an unknown result of the commit repeats the commit, and
whatever else the body raises ends the transaction and passes through. PyMongo's own has a fixed limit of 120
seconds that does not bound a call to a server that hangs; here the limit is the caller's, and bounds those too.

What is known of a transaction belongs to the call (`frames`), not to this object or to a thread: one object serves any
number of calls, threads and asyncio tasks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, ExitStack
from types import FrameType, TracebackType
from typing import Any, Protocol, TypeVar, cast

import pymongo
from pymongo import AsyncMongoClient, MongoClient, ReadPreference, WriteConcern
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.client_session import ClientSession
from pymongo.read_concern import ReadConcern

from mongo_celery.arguments import Duration, check_flags, positive
from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.opening import AsyncClient, Client, client_of
from mongo_celery.mongo.transaction import asynchronous, blocking
from mongo_celery.mongo.transaction.blocks import Block, Blocks, Call, call_at, leave, leave_async, limited
from mongo_celery.mongo.transaction.frames import current, entered, part_of, prepare_current

Result = TypeVar("Result")

TIMEOUT = 120.0
"""Seconds for which a transaction is repeated by default, as long as the drivers' own."""


class _HasSignature(Protocol):
    __signature__: inspect.Signature
    __wrapped__: object


class Collects(Protocol):
    """What gathers, while the body runs, what is to be written just before the commit: an `OutboxCollection`."""

    def collect(self, session: ClientSession) -> AbstractContextManager[object]:
        """Gather inside; it is written when the block ends, in the session's transaction unless that has ended."""


def hide_session(call: Callable[..., Any], function: Callable[..., Any]) -> None:
    """
    Give a wrapper the signature of its function without `session`: Celery and FastAPI read a call's arguments from it.

    Annotations that are text are evaluated where the function was written: FastAPI would look in the wrapper's module.
    """
    try:
        signature = inspect.signature(function, eval_str=True)
    except Exception:  # noqa: BLE001 - they may be whatever text, and names for type checkers only
        signature = inspect.signature(function)
    shown = cast("_HasSignature", call)
    visible = [each for name, each in signature.parameters.items() if name != "session"]
    shown.__signature__ = signature.replace(parameters=visible)
    del shown.__wrapped__


class transactional:  # noqa: N801 - a decorator and context manager, used like a function
    """
    Run a function in a transaction, repeated as long as MongoDB asks for it.

    As a decorator: the function is called with `session=`, and must pass it to every operation. Afterwards its
    writes are committed by a majority, all or none, and its return value is returned. Its body may run several
    times, so whatever else it does must bear repetition (see `after_commit`). Errors that are not MongoDB's
    abort the transaction and pass through, Celery's `Retry` too. A coroutine function is decorated in the same way,
    with an `AsyncMongoClient`.

    ::

        @app.task(autoretry_for=(TransactionTimeoutError,))     # outside: it must not see transient errors
        @transactional(lambda: bridge.client)
        def book(seat, *, session): ...

    As a context manager, `with transactional(client) as session:` or `async with`, a body cannot be repeated: a
    commit whose result is unknown is, but transient errors pass to the caller with their labels. A block may be left
    by another thread than the one that has entered it.

    Inside a transaction of the same client a call or a block *joins*: it is part of that one, which somebody else
    repeats and commits, and gets its session. So does a call that is given the `session` of a transaction in
    progress, in whatever thread. If a part fails, the whole is aborted, also if the error is caught on the way. What
    a thread or an asyncio task does that the body has started is no part of it.

    One object serves any number of calls, threads, tasks and functions.

    A `DocumentLockedError` is to be caught outside: the server has aborted the transaction by then. If the body
    catches it and returns, or goes on with the session, the transaction ends with that error all the same.

    Args:
        client: the client, or a callable that returns it (prefork workers make theirs after the fork).
        timeout: seconds or `timedelta` for all attempts, 120 by default; no attempt begins later, and no call to a
            server inside lasts longer, by whatever client. Code that calls no server is not interrupted; if the time is
            used up when the body returns, the transaction is aborted instead of committed. An abort has up to 2 s of
            its own: a transaction that is not aborted keeps its documents locked; and so has the question who holds
            what a lock has waited for, for the error. A shorter `pymongo.timeout` of the
            caller's ends the calls earlier, but is not known here: a commit that it forbids is `unknown`.
            The calls in the block of a `with` are bounded only if this is given; then it must be left by the thread
            that has entered it, which else would keep the limit. What joins has the time that is left to the whole, or
            less if it is given some here. An asyncio task that the body starts inherits the limit, as with
            `pymongo.timeout`.
        read_concern: by default snapshot. This, and all but `outbox` that follows, is of no account where it joins.
        write_concern: by default majority.
        read_preference: by default the primary.
        outbox: an `OutboxCollection`: what the body sends with `delay` and its like is then stored by the transaction,
            and dispatched after its commit; see its `collect`. Not with an `AsyncMongoClient`.
        own: have a transaction of its own, also inside another one: committed for itself, whatever becomes of that,
            and again at each repetition of it. What fails in it leaves the one around as it is. It ends by the
            deadline of the one around. Documents that the one around has written are locked for it.
        durable: refuse to join: when the call returns, what it has written is committed.

    Raises:
        ConfigurationError: it decorates what it cannot run, such as a Celery task; or, from the call, the client is of
            the other kind, or with `durable` there is a transaction around it.
        TransactionTimeoutError: from the call, when the time is used up. Its attribute `outcome` is `aborted`, or
            `unknown` when a commit was tried and not answered: it may be done, or may never have been sent, and
            then the documents stay locked until the server ends the transaction. What has joined with a `timeout`
            of its own, less than the whole has left, ends by PyMongo's error of the call that took too long.
        DocumentLockedError: from the call, when the body caught that of a lock inside.
        TransactionError: from the call, when the body caught the error of a part that had joined; aborted.
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
        self._own = own
        self._durable = durable
        self._blocks = Blocks()

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
            session: of a transaction in progress, to join; or to use. By default one is made.

        Returns:
            What the body has returned in the attempt that was committed.
        """
        joined, given, client = self._found(session, ClientSession)
        with ExitStack() as stack:
            if joined is not None:
                stack.enter_context(part_of(joined))
                if self._is_limited:
                    stack.enter_context(pymongo.timeout(self._seconds))
                stack.enter_context(self._collecting(joined))
                return blocking.awaited_nowhere(body(joined))
            if given is None:
                given = blocking.begin_session(client, stack)
            frame = stack.enter_context(entered(given, self._seconds))
            stack.enter_context(pymongo.timeout(self._seconds))
            result = blocking.repeat(frame, given, body, self._options, self._collecting)
        frame.run_callbacks()
        return result

    async def arun(
        self, body: Callable[[AsyncClientSession], Awaitable[Result]], *, session: AsyncClientSession | None = None
    ) -> Result:
        """
        Run a body in a transaction of an `AsyncMongoClient`, as the decorator of a coroutine function does.

        A task that is canceled in the body has its transaction aborted. During the commit the cancel is kept until the
        answer has come, or the time is used up, and callbacks have run: it is committed then.

        Args:
            body: called with the session and awaited, maybe several times.
            session: of a transaction in progress, to join; or to use. By default one is made.

        Returns:
            What the body has returned in the attempt that was committed.
        """
        await prepare_current(self._client)
        joined, given, client = self._found(session, AsyncClientSession)
        if joined is not None:
            with part_of(joined), limited(self._seconds) if self._is_limited else contextlib.nullcontext():
                return await body(joined)
        used = client.start_session() if given is None else given
        try:
            with entered(used, self._seconds) as frame, limited(self._seconds):
                result, canceled = await asynchronous.repeat(frame, used, body, self._options)
        except GeneratorExit:
            asynchronous.abandon(used, is_own=given is None)
            raise
        except BaseException:
            await _end(used, given)
            raise
        await _end(used, given)
        with asynchronous.waiting_for_callbacks():
            await frame.await_callbacks()
        if canceled is not None:
            raise canceled
        return result

    # -- blocks ------------------------------------------------------------------------------------

    def __enter__(self) -> ClientSession:
        place = sys._getframe(1)  # noqa: SLF001 - what alone is the same where the block is left
        joined, _, client = self._found(None, ClientSession)
        with ExitStack() as around:
            frame = None
            if joined is not None:
                around.enter_context(part_of(joined))
                session: ClientSession = joined
            else:
                session = blocking.begin_session(client, around)
                frame = around.enter_context(entered(session, self._seconds if self._is_limited else math.inf))
            if self._is_limited:
                around.enter_context(limited(self._seconds))
            if frame is not None:
                session.start_transaction(**self._options)
            block = Block(place, call_at(place), session, frame, self._seconds, around)
            with pymongo.timeout(self._seconds):
                block.box.enter_context(self._collecting(session))
            self._blocks.add(block)
            block.around = around.pop_all()
        return block.session

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        leave(self._blocks.take(sys._getframe(1)), error)  # noqa: SLF001

    def __aenter__(self) -> Coroutine[Any, Any, AsyncClientSession]:
        place = sys._getframe(1)  # noqa: SLF001
        return self._enter_async(place, call_at(place))

    def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Coroutine[Any, Any, None]:
        return leave_async(self._blocks.take(sys._getframe(1)), error)  # noqa: SLF001

    async def _enter_async(self, place: FrameType, entered_by: Call) -> AsyncClientSession:
        await prepare_current(self._client)
        joined, _, client = self._found(None, AsyncClientSession)
        with ExitStack() as around:
            frame = None
            if joined is not None:
                around.enter_context(part_of(joined))
                session: AsyncClientSession = joined
            else:
                session = client.start_session()
                frame = around.enter_context(entered(session, self._seconds))
            if frame is not None or self._is_limited:
                around.enter_context(limited(self._seconds))
            if frame is not None:
                await session.start_transaction(**self._options)
            block = Block(place, entered_by, session, frame, self._seconds, around.pop_all())
        self._blocks.add(block)
        return block.session

    # -- which transaction -------------------------------------------------------------------------

    def _found(self, given: Any, kind: type[Any]) -> tuple[Any, Any, Any]:
        """The session to join, or the one to use, or else the client that makes one; as far as there are any."""
        is_async = kind is AsyncClientSession
        if is_async and self._outbox is not None:
            raise ConfigurationError(
                "transactional(outbox=...) needs a MongoClient; with an AsyncMongoClient write with_tasks of an Outbox."
            )
        if given is not None and not isinstance(given, kind):
            raise _other_kind(is_async=is_async)
        client: Any = client_of(self._client) if given is None else given.client
        if isinstance(client, AsyncMongoClient) is not is_async:
            raise _other_kind(is_async=is_async)
        is_going_on = given is not None and given.in_transaction
        around = given if is_going_on else None if self._own else current(client)
        if self._durable and around is not None:
            raise ConfigurationError(
                "transactional(durable=True) is committed when it returns, and here it stands inside another one; "
                "call it outside of that, or without durable.",
            )
        if self._own or (given is not None and not is_going_on):
            return None, None if is_going_on else given, client
        return around, None, client

    def _collecting(self, session: ClientSession) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self._outbox is None else self._outbox.collect(session)


async def _end(used: AsyncClientSession, given: AsyncClientSession | None) -> None:
    """End a session that was made here."""
    if given is None:
        await used.end_session()


def _other_kind(*, is_async: bool) -> ConfigurationError:
    if is_async:
        return ConfigurationError("Coroutines, async with and arun need an AsyncMongoClient and its sessions.")
    return ConfigurationError(
        "Plain functions, with and run need a MongoClient and its sessions; with an AsyncMongoClient use a coroutine "
        "function, async with, or arun."
    )


def check_function(function: object) -> None:
    """
    Whatever else is given to the call, a transaction can be around it.

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
