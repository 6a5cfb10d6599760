"""
Blocks of `transactional` that are left by hand, elsewhere, in another order or never.

What is left by the generator in which it stands is in `test_transaction_parts.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from typing import Any

import pytest
from celery import Celery
from pymongo.client_session import ClientSession

from mongo_celery import OutboxCollection
from mongo_celery.errors import TransactionError, TransactionTimeoutError
from mongo_celery.locking import after_commit, current, transactional
from tests.fixtures.forking import fork, holds_after_a_fork
from tests.fixtures.process import wait_for
from tests.fixtures.proxy import Proxy
from tests.integration.locking_rig import GENEROUS, SHORT, Client, Notes, texts


def in_copy(pool: ThreadPoolExecutor, call: Callable[..., Any], *args: Any) -> Any:
    """Run it as frameworks do: in whatever thread, in a copy of the context."""
    return pool.submit(copy_context().run, call, *args).result(GENEROUS)


def make_box(client: Client, notes: Notes) -> tuple[Celery, OutboxCollection]:
    app = Celery("blocks", broker="memory://", set_as_current=False)
    return app, OutboxCollection(app, client[notes.database.name]["box"], at_once=False, sweep_every=None)


def test_two_stacks_of_one_thread_may_be_left_in_any_order(notes: Notes, client: Client) -> None:
    bad, good = ExitStack(), ExitStack()
    for stack, text in ((bad, "bad"), (good, "good")):
        notes.insert_one({"text": text}, session=stack.enter_context(transactional(client, independent=True)))
    bad.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    good.close()
    assert texts(notes) == ["good"]


def test_a_body_that_leaves_a_part_behind_is_not_committed(notes: Notes, client: Client) -> None:
    """As where a thread goes on with the session; the part is told, too."""
    left = ExitStack()

    def body(session: ClientSession) -> None:
        notes.insert_one({"text": "half"}, session=session)
        left.enter_context(transactional(client))

    with pytest.raises(TransactionError):
        transactional(client).run(body)
    with pytest.raises(TransactionError):
        left.close()
    assert texts(notes) == []


def test_a_box_may_be_left_in_another_context(notes: Notes, client: Client) -> None:
    """What its thread sends while it is open goes with the transaction; afterwards it is sent as ever."""
    app, box = make_box(client, notes)
    block = transactional(client, outbox=box)
    with ThreadPoolExecutor(1) as entering, ThreadPoolExecutor(1) as leaving:
        session = entering.submit(block.__enter__).result(GENEROUS)
        notes.insert_one({"text": "inside"}, session=session)
        entering.submit(app.send_task, "inside", queue="blocks").result(GENEROUS)
        in_copy(leaving, block.__exit__, None, None, None)
        entering.submit(app.send_task, "afterwards", queue="blocks").result(GENEROUS)  # is not refused
    assert texts(notes) == ["inside"]
    assert notes.database["box"].count_documents({}) == 1


def _is_left_to_the_parent(stack: ExitStack, session: ClientSession, error: BaseException | None) -> bool:
    """Return True if a forked child can neither join its parent's block nor end it, and its own error passes."""
    with pytest.raises(TransactionError):
        transactional(session.client).run(lambda _: None, session=session)
    try:
        stack.__exit__(type(error) if error else None, error, None)
    except TransactionError:
        return error is None and current(session.client) is None
    return error is not None


@pytest.mark.parametrize("error", [None, ZeroDivisionError()], ids=repr)
def test_a_forked_process_ends_no_block_of_its_parents(
    client: Client, notes: Notes, error: BaseException | None
) -> None:
    """P18: it reaches the end too, as a daemon does. Only its parent commits or aborts."""
    called: list[int] = []
    with ExitStack() as stack:
        session = stack.enter_context(transactional(client))
        notes.insert_one({"_id": 1}, session=session)
        after_commit(lambda: called.append(1))
        assert holds_after_a_fork(lambda: _is_left_to_the_parent(stack, session, error) and not called)
    assert called == [1]
    assert notes.count_documents({}) == 1


@pytest.mark.parametrize("error", [None, ZeroDivisionError()], ids=repr)
def test_a_forked_process_ends_no_transaction_of_its_parents(
    client: Client, notes: Notes, error: BaseException | None
) -> None:
    parent, attempts = os.getpid(), []

    def body(session: ClientSession) -> None:
        attempts.append(session)
        notes.insert_one({"_id": 1}, session=session)
        child = fork()
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        elif error is not None:
            raise error

    try:
        transactional(client).run(body)
    except (TransactionError, ZeroDivisionError) as caught:
        if os.getpid() != parent:
            os._exit(0 if caught is error or isinstance(caught, TransactionError) else 1)
        raise
    finally:
        if os.getpid() != parent:
            os._exit(2)
    assert len(attempts) == 1
    assert notes.count_documents({}) == 1


def test_a_block_without_a_limit_has_time_for_its_commit(client: Client, notes: Notes) -> None:
    """A body of two minutes, an import say, is not thrown away at its end."""
    block = transactional(client)
    block._seconds, begun = SHORT, time.monotonic()  # `timeout=` would bound the body as well
    with block as session:
        notes.insert_one({"text": "long"}, session=session)
        wait_for(lambda: time.monotonic() - begun > SHORT)
    assert texts(notes) == ["long"]


def test_the_write_of_a_box_ends_with_the_time_of_its_block(
    notes: Notes, proxy: Proxy, make_client: Callable[..., Client]
) -> None:
    """The block itself has no limit, but its end has: also where the server stands still just then."""
    through = make_client(proxy.mongo_url)
    app, box = make_box(through, notes)
    block = transactional(through, outbox=box)
    block._seconds = SHORT  # `timeout=` would bound the body as well

    @contextmanager
    def frozen() -> Iterator[None]:
        yield
        proxy.hold(b"update")

    with pytest.raises(TransactionTimeoutError) as caught, block, frozen():
        app.send_task("inside", queue="blocks")
    proxy.close()  # what it holds never arrives: it would begin a transaction again
    assert caught.value.outcome == "aborted"  # type: ignore[attr-defined]
    assert notes.database["box"].find_one() is None
