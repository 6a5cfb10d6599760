"""Which transaction a thread or a task is in, as far as no server is needed: scopes, their chain, one deadline."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import Context, copy_context
from typing import Any

import pytest
from pymongo import AsyncMongoClient, MongoClient
from pymongo.client_session import ClientSession

from mongo_celery.errors import ConfigurationError
from mongo_celery.mongo.transaction.scopes import TransactionScope, after_commit, current, open_scope, scope_of

SECONDS = 30.0


@pytest.fixture
def client() -> Iterator[MongoClient[Any]]:
    """Give a client that never connects."""
    with MongoClient[Any]("mongodb://localhost:1", connect=False) as made:
        yield made


@pytest.fixture
def session(client: MongoClient[Any]) -> ClientSession:
    """Give a session in a transaction of which no server knows."""
    made = client.start_session()
    made.start_transaction()
    return made


def test_all_loops_inside_have_one_deadline(client: MongoClient[Any], session: ClientSession) -> None:
    """The nearest one, whoever gave it; a loop of its own would go on when nothing can be answered any more."""
    with open_scope(session, 5) as outer, open_scope(client.start_session(), 600) as inner:
        assert inner.deadline == outer.deadline
        with open_scope(client.start_session(), 1) as innermost_one:
            assert innermost_one.deadline < inner.deadline


def test_a_closed_scope_counts_no_more(client: MongoClient[Any], session: ClientSession) -> None:
    """Left in another context it stays where it was entered: it is passed over, and its deadline with it."""
    here = Context()
    stack = ExitStack()
    closed = here.run(stack.enter_context, open_scope(session, 0.001))
    stack.close()  # in the context of this test
    assert here.run(current, client) is None

    def inside() -> TransactionScope:
        with open_scope(client.start_session(), SECONDS) as scope:
            return scope

    assert here.run(inside).deadline - time.monotonic() > 1
    assert (closed.is_open, closed.owner) == (False, (0, 0, None))


def test_a_copy_of_the_context_is_in_no_transaction(client: MongoClient[Any], session: ClientSession) -> None:
    """Neither in another thread, nor in a task beside; the session leads to the scope anywhere."""

    async def beside() -> Any:
        with open_scope(session, SECONDS):
            assert current(client) is session
            return await asyncio.create_task(_current())

    async def _current() -> Any:
        return current(client)

    assert asyncio.run(beside()) is None
    with open_scope(session, SECONDS) as scope, ThreadPoolExecutor(1) as pool:
        assert current(client) is session
        assert pool.submit(copy_context().run, current, client).result(SECONDS) is None
        assert asyncio.run(_current()) is session  # the whole loop runs inside
        assert pool.submit(scope_of, session).result(SECONDS) is scope


def test_another_client_of_the_cluster_is_refused(session: ClientSession) -> None:
    """Threads and asyncio alike: it is known by the address, before anything has connected."""
    others: list[Any] = [MongoClient("mongodb://localhost:1", connect=False), AsyncMongoClient("mongodb://localhost:1")]

    async def _current(other: Any) -> Any:
        return current(other)

    for other in others:
        assert current(other) is None
        with open_scope(session, SECONDS):
            with pytest.raises(ConfigurationError, match=r"bridge\.client"):
                current(other)
            with pytest.raises(ConfigurationError, match=r"bridge\.client"):
                asyncio.run(_current(other))


def test_only_a_transaction_in_progress_is_current(client: MongoClient[Any], session: ClientSession) -> None:
    """The innermost one that is: what its body has ended is passed over."""
    with open_scope(session, SECONDS), open_scope(client.start_session(), SECONDS) as inner:
        assert inner.is_open
        assert current(lambda: client) is session
        session.abort_transaction()
        assert current(client) is None
        called: list[int] = []
        assert after_commit(lambda: called.append(1))
        assert called == [1]


def test_a_frame_keeps_no_session_alive(client: MongoClient[Any]) -> None:
    """A block that is thrown away without being left must not stay for ever."""
    made = client.start_session()
    with ExitStack() as stack:
        scope = stack.enter_context(open_scope(made, SECONDS))
        gone = weakref.ref(made)
        generator = stack.pop_all()
    assert scope.reference() is made
    del made, generator
    gc.collect()
    assert gone() is None
    assert scope.reference() is None
