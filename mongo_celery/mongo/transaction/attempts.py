"""
One attempt of a transaction, over either of PyMongo's clients: a body, then a commit or an abort.

An abort has a time of its own, and a commit is repeated while its result is unknown. asyncio differs in two ways.

A task may be canceled at each `await`. In the body that is an error like any other: aborted, and passed on. A commit
and an abort run in tasks of their own, which a cancel does not reach: cut in the middle, a commit would be unknown, and
an abort would leave documents locked. The cancel is kept until they have ended within their time. anyio cancels again
at each turn of the event loop while a task runs, so a shielded scope makes it wait.

A coroutine that is thrown away (`close`, or an event loop that has ended) may not await. A task of its own aborts its
transaction if a loop runs; otherwise the server ends it.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import pymongo
from pymongo import AsyncMongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.client_session import ClientSession
from pymongo.errors import PyMongoError

from mongo_celery.mongo.transaction import ending
from mongo_celery.mongo.transaction.scopes import Session, TransactionScope
from mongo_celery.mongo.verdicts import standalone_refused

_ABORT_SECONDS = 2.0
"""The time of an abort, also after the limit: a transaction that is not aborted keeps its documents locked."""

Collecting = Callable[[ClientSession], AbstractContextManager[object]]

_aborting: set[asyncio.Task[None]] = set()


# -- threads ---------------------------------------------------------------------------------------


@contextmanager
def attempt(scope: TransactionScope, session: ClientSession, collecting: Collecting) -> Iterator[None]:
    """Commit the started transaction of a session when the block ends; abort it if anything fails."""
    try:
        if pause := ending.begin_attempt(scope):
            threading.Event().wait(pause)
        with standalone_refused(), collecting(session), _aborted_by_errors(scope, session):
            yield
            ending.raise_rollback_only(scope, session)
            scope.begin_end()
        if not session.in_transaction:  # the body has ended it
            scope.callbacks.clear()
            return
        ending.check_time(scope, session)
        with scope.limit_calls():
            _commit(scope, session)
    except BaseException as error:
        _abort(scope, session)
        ending.raise_verdict(scope, error)
        raise


@contextmanager
def _aborted_by_errors(scope: TransactionScope, session: ClientSession) -> Iterator[None]:
    """Abort before a failed body's messages are collected: they are dropped then, instead of written."""
    try:
        yield
    except BaseException:
        _abort(scope, session)
        raise


def _commit(scope: TransactionScope, session: ClientSession) -> None:
    while True:
        try:
            return session.commit_transaction()
        except PyMongoError as error:
            threading.Event().wait(ending.pause_before_commit(scope, error))


def _abort(scope: TransactionScope, session: ClientSession) -> None:
    """Free the locked documents, as far as the server answers; else it does so itself after a while."""
    if scope.is_inherited:
        _skip_abort(session)
    elif session.in_transaction:
        # In a context of its own: a time limit that has passed must not keep the abort from the server.
        contextvars.Context().run(_abort_within_its_time, session)


def _abort_within_its_time(session: ClientSession) -> None:
    with pymongo.timeout(_ABORT_SECONDS), suppress(PyMongoError):
        session.abort_transaction()


def _skip_abort(session: Session) -> Callable[[], None]:
    """Keep PyMongo's loop from aborting a session's transaction; return a function that allows it again."""
    transaction: Any = session._transaction  # noqa: SLF001 - there is no public way
    state, transaction.state = transaction.state, None
    return lambda: setattr(transaction, "state", state)


# -- asyncio ---------------------------------------------------------------------------------------


@asynccontextmanager
async def attempt_async(scope: TransactionScope, session: AsyncClientSession) -> AsyncIterator[None]:
    """Commit the started transaction of a session when the block ends; abort it if anything fails."""
    try:
        if pause := ending.begin_attempt(scope):
            await asyncio.sleep(pause)
        with standalone_refused():
            yield
        ending.raise_rollback_only(scope, session)
        if not session.in_transaction:  # the body has ended it
            scope.callbacks.clear()
            return
        ending.check_time(scope, session)
        with scope.limit_calls():
            scope.cancel = await _run_shielded(partial(_commit_async, scope, session), lambda: scope.remaining > 0)
    except GeneratorExit:
        _abort_later(session)
        raise
    except BaseException as error:
        if session.in_transaction and (canceled := await _abort_async(session)) is not None:
            raise canceled from error
        ending.raise_verdict(scope, error)
        raise


@asynccontextmanager
async def open_async_session(
    client: AsyncMongoClient[Any], given: AsyncClientSession | None
) -> AsyncIterator[AsyncClientSession]:
    """Give a session, and end a new one. That of a closed coroutine is left to the task that aborts later."""
    session, ends = given or client.start_session(), given is None
    try:
        yield session
    except GeneratorExit:
        ends = False
        raise
    finally:
        if ends:
            await session.end_session()


def shield_callbacks() -> AbstractContextManager[object]:
    """Have a cancel by anyio that came during the commit wait for callbacks, as one by asyncio does."""
    anyio = sys.modules.get("anyio")
    is_canceled = anyio is not None and anyio.current_effective_deadline() == -math.inf
    return _shield_from_anyio() if is_canceled else nullcontext()


def _shield_from_anyio() -> AbstractContextManager[object]:
    anyio: Any = sys.modules.get("anyio")
    shield: AbstractContextManager[object] = nullcontext() if anyio is None else anyio.CancelScope(shield=True)
    return shield


async def _run_shielded(
    call: Callable[[], Coroutine[Any, Any, None]],
    is_due: Callable[[], bool],
    context: contextvars.Context | None = None,
) -> asyncio.CancelledError | None:
    """
    Run a call in a task of its own, and return a cancel that came meanwhile.

    Raises:
        CancelledError: it came meanwhile, and the call failed.
    """
    canceled = None
    while True:
        task = asyncio.create_task(call(), context=context)
        with _shield_from_anyio():
            while not task.done():
                try:
                    await asyncio.wait({task})  # which leaves the task alone when it is canceled
                except asyncio.CancelledError as error:
                    canceled = error
        # An event loop that ends cancels all tasks, once. A commit is sent again: the server tells the result.
        if not (task.cancelled() and is_due()):
            break
    try:
        task.result()
    except BaseException as error:
        if canceled is not None:
            raise canceled from error
        raise
    return canceled


async def _commit_async(scope: TransactionScope, session: AsyncClientSession) -> None:
    while True:
        try:
            return await session.commit_transaction()
        except PyMongoError as error:
            await asyncio.sleep(ending.pause_before_commit(scope, error))


async def _abort_async(session: AsyncClientSession) -> asyncio.CancelledError | None:
    abort = partial(_abort_async_within_its_time, session)
    return await _run_shielded(abort, lambda: session.in_transaction, contextvars.Context())


async def _abort_async_within_its_time(session: AsyncClientSession) -> None:
    with pymongo.timeout(_ABORT_SECONDS), suppress(PyMongoError):
        await session.abort_transaction()


def _abort_later(session: AsyncClientSession) -> None:
    """Free the locked documents without awaiting."""
    if not session.in_transaction:
        return
    allow_abort = _skip_abort(session)  # PyMongo's loop would await it here

    async def abort() -> None:
        allow_abort()
        await _abort_async_within_its_time(session)

    with suppress(RuntimeError):  # no event loop runs here any more
        aborting = asyncio.get_running_loop().create_task(abort(), context=contextvars.Context())
        _aborting.add(aborting)  # a loop keeps only weak references to its tasks
        aborting.add_done_callback(_aborting.discard)
