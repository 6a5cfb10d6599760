"""The transactions of threads, over `MongoClient`: a body, repeated; a commit, repeated; an abort within its time."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import pymongo
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.errors import PyMongoError

from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.transaction.ending import (
    ABORT_SECONDS,
    check_time,
    doom_of,
    pause_before_body,
    pause_before_commit,
)
from mongo_celery.mongo.transaction.frames import Frame, frame_of
from mongo_celery.mongo.verdicts import standalone_refused

Result = TypeVar("Result")
Collecting = Callable[[ClientSession], AbstractContextManager[object]]


def begin_session(client: MongoClient[Any], stack: ExitStack) -> ClientSession:
    """A session that is ended with a stack; not by a child, where that would abort the transaction of its parent."""
    session = client.start_session()
    stack.callback(_end_session, session, os.getpid())
    return session


def _end_session(session: ClientSession, pid: int) -> None:
    if os.getpid() == pid:
        session.end_session()


def repeat(
    frame: Frame,
    session: ClientSession,
    body: Callable[[ClientSession], Result],
    options: Mapping[str, Any],
    collecting: Collecting,
) -> Result:
    """Run a body in a transaction until it is committed, or must not be repeated; what it has returned then."""
    while True:
        frame.begin()
        session.start_transaction(**options)
        try:
            with standalone_refused(), collecting(session), aborted_by_errors(session):
                result = awaited_nowhere(body(session))
                if (doom := doom_of(frame, session)) is not None:
                    raise doom
            if not session.in_transaction:
                frame.callbacks.clear()  # the body has ended the transaction itself; who knows how
                return result
            check_time(frame, session)
            commit(frame, session)
        except BaseException as error:
            abort(session)
            pause = pause_before_body(frame, error)
            if pause is None:
                raise
        else:
            return result
        _wait(pause)


def commit(frame: Frame, session: ClientSession) -> None:
    """Commit, again and again while the result is unknown. An error labelled as transient means: not committed."""
    while True:
        try:
            session.commit_transaction()
        except PyMongoError as error:
            pause = pause_before_commit(frame, error)
            if pause is None:
                raise
        else:
            return
        _wait(pause)


def abort(session: ClientSession) -> None:
    """Free what is locked, as far as the server can be reached; else it does so itself after a while."""
    frame = frame_of(session)
    if session.in_transaction and not (frame is not None and frame.is_inherited):
        # In a context of its own: a time limit that has passed must not keep the abort from the server.
        contextvars.Context().run(_abort_within_its_time, session)


def _abort_within_its_time(session: ClientSession) -> None:
    with pymongo.timeout(ABORT_SECONDS), contextlib.suppress(PyMongoError):
        session.abort_transaction()


@contextlib.contextmanager
def aborted_by_errors(session: ClientSession) -> Iterator[None]:
    """Inside a box: what is sent in a body that fails is dropped, and need not be written for a commit."""
    try:
        yield
    except BaseException:
        abort(session)
        raise


def awaited_nowhere(result: Result) -> Result:
    """The result of a body; a coroutine would only run after the transaction, outside of it."""
    if inspect.iscoroutine(result):
        result.close()
        raise ConfigurationError(
            "The body has returned a coroutine, which would run after the transaction and outside of it; make it a "
            "coroutine function with an AsyncMongoClient, or use arun."
        )
    return result


def _wait(pause: float) -> None:
    threading.Event().wait(pause)
