"""Which transaction a thread or a task is in, as far as no server is needed: scopes, their chain, one deadline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from contextvars import Context
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.client_session import ClientSession

from mongo_celery.mongo.transaction.scopes import TransactionScope, after_commit, current, open_scope

SECONDS = 30.0


@pytest.fixture
def client() -> Iterator[MongoClient[Any]]:
    with MongoClient[Any]("mongodb://localhost:1", connect=False) as made:
        yield made


@pytest.fixture
def session(client: MongoClient[Any]) -> ClientSession:
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
