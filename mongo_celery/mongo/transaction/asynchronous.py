"""
The transactions of asyncio, over `AsyncMongoClient`: as `blocking`, with two things more.

A task may be canceled at each `await`. In the body that is an error like any other: aborted, and passed on. Not so
during a commit and an abort: whoever left these in the middle would not know what is committed, or would leave
documents locked. They run in tasks of their own, which a cancel does not reach; it is kept until they have ended, which
they do within their time. anyio cancels again at each turn of the event loop for as long as a task goes on; so it is
told to wait, too, where a program uses it.

A coroutine that is thrown away (`close`, or an event loop that is gone) may not await anything any more. Its
transaction is aborted by a task of its own, where there is a loop left; else the server ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import pymongo
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import PyMongoError

from mongo_celery.mongo.transaction.ending import (
    ABORT_SECONDS,
    check_time,
    doom_of,
    pause_before_body,
    pause_before_commit,
)
from mongo_celery.mongo.transaction.frames import Frame
from mongo_celery.mongo.verdicts import standalone_refused

Result = TypeVar("Result")
Cancel = asyncio.CancelledError | None
"""A cancel that came while nothing could be left; to be raised once the callbacks have run."""

_abandoning: set[asyncio.Task[None]] = set()


async def repeat(
    frame: Frame,
    session: AsyncClientSession,
    body: Callable[[AsyncClientSession], Awaitable[Result]],
    options: Mapping[str, Any],
) -> tuple[Result, Cancel]:
    """Run a body in a transaction until it is committed, or must not be repeated; what it has returned then."""
    while True:
        frame.begin()
        await session.start_transaction(**options)
        try:
            with standalone_refused():
                result = await body(session)
            if (doom := doom_of(frame, session)) is not None:
                raise doom
            if not session.in_transaction:
                frame.callbacks.clear()  # the body has ended the transaction itself; who knows how
                return result, None
            check_time(frame, session)
            canceled = await commit(frame, session)
        except GeneratorExit:
            raise  # the coroutine is thrown away; who has made the session abandons it
        except BaseException as error:
            await abort(session)
            pause = pause_before_body(frame, error)
            if pause is None:
                raise
        else:
            return result, canceled
        await asyncio.sleep(pause)


async def commit(frame: Frame, session: AsyncClientSession) -> Cancel:
    """
    Commit, again and again while the result is unknown. An error labelled as transient means: not committed.

    Returns:
        A cancel that came meanwhile; it is committed all the same.

    Raises:
        CancelledError: it came meanwhile, and it was not committed, or nobody knows.
    """
    canceled = None
    while True:
        committing = asyncio.create_task(_commit(frame, session))
        canceled = await _ended(committing) or canceled
        # An event loop that ends cancels all tasks, once: sent again, the server says what became of it.
        if not committing.cancelled() or frame.remaining <= 0:
            break
    try:
        committing.result()
    except BaseException as error:
        if canceled is not None:
            raise canceled from error
        raise
    return canceled


async def abort(session: AsyncClientSession) -> None:
    """Free what is locked, as far as the server can be reached; CancelledError where that came meanwhile."""
    canceled = None
    while session.in_transaction:  # still, where an event loop that ends has canceled the task before it began
        # In a context of its own: a time limit that has passed must not keep the abort from the server.
        aborting = asyncio.create_task(_abort_within_its_time(session), context=contextvars.Context())
        canceled = await _ended(aborting) or canceled
    if canceled is not None:
        raise canceled


def abandon(session: AsyncClientSession, *, is_own: bool) -> None:
    """
    Free what is locked without awaiting anything.

    Args:
        session: whose transaction is aborted.
        is_own: whether it is ended, too.
    """
    with contextlib.suppress(RuntimeError):  # no event loop runs here any more
        loop = asyncio.get_running_loop()
        abandoning = loop.create_task(_abandoned(session, is_own), context=contextvars.Context())
        _abandoning.add(abandoning)  # a loop keeps only weak references to its tasks
        abandoning.add_done_callback(_abandoning.discard)


async def _abandoned(session: AsyncClientSession, is_own: bool) -> None:
    await _abort_within_its_time(session)
    if is_own:
        await session.end_session()


def waiting_for_callbacks() -> AbstractContextManager[object]:
    """Inside, a cancel by anyio that came during the commit waits, as one by asyncio does."""
    anyio = sys.modules.get("anyio")
    is_canceled = anyio is not None and anyio.current_effective_deadline() == -math.inf
    return _waited_for_by_anyio() if is_canceled else contextlib.nullcontext()


def _waited_for_by_anyio() -> AbstractContextManager[object]:
    anyio = sys.modules.get("anyio")
    if anyio is None:
        return contextlib.nullcontext()
    return cast("AbstractContextManager[object]", anyio.CancelScope(shield=True))


async def _commit(frame: Frame, session: AsyncClientSession) -> None:
    while True:
        try:
            await session.commit_transaction()
        except PyMongoError as error:
            pause = pause_before_commit(frame, error)
            if pause is None:
                raise
        else:
            return
        await asyncio.sleep(pause)


async def _abort_within_its_time(session: AsyncClientSession) -> None:
    with pymongo.timeout(ABORT_SECONDS), contextlib.suppress(PyMongoError):
        await session.abort_transaction()


async def _ended(task: asyncio.Task[None]) -> Cancel:
    """Wait until a task has ended, whatever happens to who waits; the last cancel that did."""
    canceled = None
    with _waited_for_by_anyio():
        while not task.done():
            try:
                await asyncio.wait({task})  # which leaves the task alone when it is canceled
            except asyncio.CancelledError as error:
                canceled = error
    return canceled
