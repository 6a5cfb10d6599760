"""
The transactions of asyncio, over `AsyncMongoClient`: as `blocking`, with two things more.

A task may be canceled at each `await`. In the body that is an error like any other: aborted, and passed on. Not so
during a commit and an abort: whoever left these in the middle would not know what is committed, or would leave
documents locked. They run in tasks of their own, which a cancel does not reach; it is kept until they have ended, which
they do within their time.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

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
            raise  # the coroutine is thrown away, and must not await anything any more
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
    while not task.done():
        try:
            await asyncio.wait({task})  # which leaves the task alone when it is canceled
        except asyncio.CancelledError as error:
            canceled = error
    return canceled
