"""
One attempt of a transaction, with either kind of PyMongo client: a body, then a commit or an abort.

An abort has its own time limit, and a commit is repeated while its result is unknown. asyncio differs in two ways.

A task may be canceled at each `await`. In the body this is an error like any other: the attempt is aborted, and the
error raised. A commit or abort runs in its own task, which a cancel does not reach. Otherwise an interrupted commit
would be unknown, and an interrupted abort would leave documents locked. The cancel is kept until they have ended within
their time. anyio cancels again at each turn of the event loop while a task runs, so a shielded scope delays it.

A discarded coroutine (`close`, or an event loop that has ended) cannot await. If a loop runs, a new task aborts its
transaction. Otherwise the server ends it.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import pymongo
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.client_session import ClientSession
from pymongo.errors import PyMongoError

from mongo_celery.mongo.driver_internals import hide_transaction, show_transaction
from mongo_celery.mongo.transaction import ending
from mongo_celery.mongo.transaction.scopes import TransactionScope
from mongo_celery.mongo.verdicts import standalone_refused

_ABORT_SECONDS = 2.0
"""Time limit of an abort, even after the deadline: a transaction that is not aborted keeps its documents locked."""

Collecting = Callable[[ClientSession], AbstractContextManager[object]]

_aborting: set[asyncio.Task[None]] = set()


# -- threads ---------------------------------------------------------------------------------------


@contextmanager
def attempt(scope: TransactionScope, session: ClientSession, collecting: Collecting) -> Iterator[None]:
    """Commit a session's started transaction when the block ends. Abort it after any error."""
    try:
        threading.Event().wait(ending.begin_attempt(scope))
        with standalone_refused(), collecting(session), _abort_on_error(scope, session):
            yield
            ending.raise_rollback_only(scope, session)
            scope.begin_end()
        if ending.needs_commit(scope, session):
            with scope.limit_calls():
                _commit(scope, session)
    except BaseException as error:
        _abort(scope, session)
        ending.raise_verdict(scope, error)
        raise


@contextmanager
def _abort_on_error(scope: TransactionScope, session: ClientSession) -> Iterator[None]:
    """Abort before the messages of a failed body are collected. They are then dropped instead of written."""
    try:
        yield
    except BaseException:
        _abort(scope, session)
        raise


def _commit(scope: TransactionScope, session: ClientSession) -> None:
    for count in itertools.count():
        try:
            session.commit_transaction()
        except PyMongoError as error:
            threading.Event().wait(ending.pause_before_commit(scope, error, count))
        else:
            return


def _abort(scope: TransactionScope, session: ClientSession) -> None:
    """Free the locked documents if the server answers. Otherwise it frees them itself after a while."""
    if scope.is_inherited:
        hide_transaction(session)
    elif session.in_transaction:
        # In a new context: an expired time limit must not prevent the abort.
        contextvars.Context().run(_abort_within_its_time, session)


def _abort_within_its_time(session: ClientSession) -> None:
    with pymongo.timeout(_ABORT_SECONDS), suppress(PyMongoError):
        session.abort_transaction()


# -- asyncio ---------------------------------------------------------------------------------------


@asynccontextmanager
async def attempt_async(scope: TransactionScope, session: AsyncClientSession) -> AsyncIterator[None]:
    """Commit a session's started transaction when the block ends. Abort it after any error."""
    try:
        if pause := ending.begin_attempt(scope):
            await asyncio.sleep(pause)
        with standalone_refused():
            yield
            ending.raise_rollback_only(scope, session)
            await scope.await_writes()
        if ending.needs_commit(scope, session):
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
async def end_session_afterwards(session: AsyncClientSession) -> AsyncIterator[None]:
    """End a session after the block. For a closed coroutine, the task that aborts later does it."""
    ends = True
    try:
        yield
    except GeneratorExit:
        ends = False
        raise
    finally:
        if ends:
            await session.end_session()


def shield_from_anyio() -> AbstractContextManager[object]:
    """Delay an anyio scope's cancel until the end of the block, like asyncio's."""
    anyio: Any = sys.modules.get("anyio")
    shield: AbstractContextManager[object] = nullcontext() if anyio is None else anyio.CancelScope(shield=True)
    return shield


async def _run_shielded(
    call: Callable[[], Coroutine[Any, Any, None]],
    is_due: Callable[[], bool],
    context: contextvars.Context | None = None,
) -> asyncio.CancelledError | None:
    """
    Run a call in its own task, and return a cancel that came meanwhile.

    Raises:
        CancelledError: a cancel came meanwhile, and the call failed.
    """
    canceled = None
    while True:
        task = asyncio.create_task(call(), context=context)
        with shield_from_anyio():
            while not task.done():
                try:
                    await asyncio.wait({task})  # does not affect the task when it is canceled
                except asyncio.CancelledError as error:
                    canceled = error
        # An ending event loop cancels all tasks once. A commit is sent again, and the server reports the result.
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
    for count in itertools.count():
        try:
            await session.commit_transaction()
        except PyMongoError as error:
            await asyncio.sleep(ending.pause_before_commit(scope, error, count))
        else:
            return


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
    state = hide_transaction(session)  # PyMongo's loop would await an abort here

    async def abort() -> None:
        show_transaction(session, state)
        await _abort_async_within_its_time(session)

    with suppress(RuntimeError):  # no event loop runs here any more
        aborting = asyncio.get_running_loop().create_task(abort(), context=contextvars.Context())
        _aborting.add(aborting)  # a loop keeps only weak references to its tasks
        aborting.add_done_callback(_aborting.discard)
