"""
Blocks of `transactional` that are left by hand, elsewhere, in another order or never.

What is left by the generator in which it stands is in `test_transaction_parts.py`.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import copy_context
from typing import Any

import pytest
from celery import Celery
from celery.canvas import Signature
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import InvalidOperation
from pymongo.uri_parser import parse_uri

from mongo_celery import OutboxCollection
from mongo_celery.errors import TransactionError, TransactionTimeoutError
from mongo_celery.locking import after_commit, current, transactional
from mongo_celery.mongo.transaction import ending
from mongo_celery.mongo.transaction.scopes import TransactionScope
from tests.fixtures.forking import fork, holds_after_a_fork
from tests.fixtures.process import wait_for
from tests.fixtures.proxy import Proxy
from tests.integration.locking_rig import Document

Client = MongoClient[Document]
SHORT = 1.5
GENEROUS = 30.0


@pytest.fixture
def notes(database: Database[Document]) -> Collection[Document]:
    """Give an empty collection."""
    return database.create_collection("notes")


@pytest.fixture
def client(notes: Collection[Document]) -> Client:
    """Give its client."""
    return notes.database.client


def texts(notes: Collection[Document]) -> list[Any]:
    """What is committed."""
    return [note["text"] for note in notes.find().sort("_id", 1)]


def in_copy(pool: ThreadPoolExecutor, call: Callable[..., Any], *args: Any) -> Any:
    """Run it as frameworks do: in whatever thread, in a copy of the context."""
    return pool.submit(copy_context().run, call, *args).result(GENEROUS)


# -- order -----------------------------------------------------------------------------------------


def test_two_stacks_of_one_thread_may_be_left_in_any_order(notes: Collection[Document], client: Client) -> None:
    """Each ends its own."""
    bad, good = ExitStack(), ExitStack()
    for stack, text in ((bad, "bad"), (good, "good")):
        notes.insert_one({"text": text}, session=stack.enter_context(transactional(client, independent=True)))
    bad.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    good.close()
    assert texts(notes) == ["good"]


# -- parts that outlive the whole ------------------------------------------------------------------


def test_a_body_that_leaves_a_part_behind_is_not_committed(notes: Collection[Document], client: Client) -> None:
    """As where a thread goes on with the session; the part is told, too."""
    left = ExitStack()

    def body(session: ClientSession) -> None:
        notes.insert_one({"text": "half"}, session=session)
        left.enter_context(transactional(client))

    with pytest.raises(TransactionError, match="still running"):
        transactional(client).run(body)
    with pytest.raises(TransactionError, match="ended before"):
        left.close()
    assert texts(notes) == []


def test_a_part_of_an_attempt_before_that_is_thrown_away_does_not_end_this_one(
    notes: Collection[Document], client: Client
) -> None:
    """Its generator is closed late."""
    parts: list[Any] = []

    def part() -> Iterator[None]:
        with transactional(client):
            yield

    def body(session: ClientSession) -> int:
        notes.insert_one({"text": "a"}, session=session)
        if not parts:
            parts.append(part())
            next(parts[0])
            error = InvalidOperation("once more")
            error._add_error_label("TransientTransactionError")
            raise error
        parts[0].close()
        return len(parts)

    assert transactional(client).run(body) == 1
    assert texts(notes) == ["a"]


def test_a_part_that_failed_and_has_ended_the_transaction_is_no_success(
    notes: Collection[Document], client: Client
) -> None:
    """What the body had written before is gone, and what it writes then stays: it cannot be told that all is well."""

    @transactional(client)
    def give_up(*, session: ClientSession) -> None:
        session.abort_transaction()
        raise ZeroDivisionError

    def body(session: ClientSession) -> str:
        notes.insert_one({"text": "before"}, session=session)
        with pytest.raises(ZeroDivisionError):
            give_up()
        return "success"

    with pytest.raises(TransactionError, match="had ended the transaction") as caught:
        transactional(client).run(body)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(TransactionError, match="had ended the transaction"), transactional(client) as session:
        body(session)
    assert texts(notes) == []


# -- other contexts --------------------------------------------------------------------------------


def test_a_box_may_be_left_in_another_context(notes: Collection[Document], client: Client) -> None:
    """What its thread sends while it is open goes with the transaction; afterwards it is sent as ever."""
    app = Celery("blocks", broker="memory://", set_as_current=False)
    box = OutboxCollection(app, notes.database["box"], at_once=False, sweep_every=None)
    block = transactional(client, outbox=box)
    with ThreadPoolExecutor(1) as entering, ThreadPoolExecutor(1) as leaving:
        session = entering.submit(block.__enter__).result(GENEROUS)
        notes.insert_one({"text": "inside"}, session=session)
        entering.submit(app.send_task, "inside", queue="blocks").result(GENEROUS)
        in_copy(leaving, block.__exit__, None, None, None)
        entering.submit(app.send_task, "afterwards", queue="blocks").result(GENEROUS)  # is not refused
    assert texts(notes) == ["inside"]
    assert notes.database["box"].count_documents({}) == 1


def test_a_callback_of_its_own_is_sent_though_the_one_around_is_aborted(
    notes: Collection[Document], client: Client
) -> None:
    """It is committed by then; in the box of the one around it would be lost."""
    app = Celery("blocks", broker="memory://", set_as_current=False)
    outer = transactional(client, outbox=OutboxCollection(app, notes.database["box"], at_once=False, sweep_every=None))

    def own(_: ClientSession) -> None:
        after_commit(lambda: app.send_task("receipt", queue="receipts"))

    def body(_: ClientSession) -> None:
        transactional(client, independent=True).run(own)
        app.send_task("lost", queue="receipts")
        raise ZeroDivisionError

    with app.connection_for_read() as connection, connection.SimpleQueue("receipts") as queue:
        queue.clear()
        with pytest.raises(ZeroDivisionError):
            outer.run(body)
        assert [queue.get(timeout=GENEROUS).headers["task"] for _ in range(len(queue))] == ["receipt"]


def test_a_part_that_fails_keeps_its_error_where_its_box_cannot_be_written(
    notes: Collection[Document],
    make_client: Callable[..., Client],
    failpoint: Callable[..., AbstractContextManager[None]],
) -> None:
    """A lost connection there is transient; the body would be repeated for an error that is not."""
    mine = make_client(appName="blocks")
    app = Celery("blocks", broker="memory://", set_as_current=False)
    box = OutboxCollection(app, mine[notes.database.name]["box"], at_once=False, sweep_every=None)
    attempts: list[int] = []

    def part(_: ClientSession) -> None:
        app.send_task("lost", queue="blocks")
        raise ZeroDivisionError

    def body(session: ClientSession) -> None:
        attempts.append(1)
        mine[notes.database.name]["notes"].find_one({}, session=session)
        transactional(mine, outbox=box).run(part)

    box.add([Signature("first", app=app)])  # which makes what it needs
    lost = {"failCommands": ["insert", "update"], "appName": "blocks", "closeConnection": True}
    with failpoint(mode="alwaysOn", **lost), pytest.raises(ZeroDivisionError):
        transactional(mine).run(body)
    assert attempts == [1]


def _ask_in_child(session: ClientSession, answers: Any) -> None:
    parent = session.client
    try:
        transactional(parent).run(lambda _: None, session=session)
    except TransactionError as error:
        answers.put((current(parent) is None, str(error)))


def test_a_process_that_is_forked_inside_is_in_no_transaction(client: Client) -> None:
    """P18: its thread has the number of the parent's. Statements of two processes in one transaction would be lost."""
    fork = multiprocessing.get_context("fork")
    with transactional(client) as session:
        answers = fork.SimpleQueue()
        child = fork.Process(target=_ask_in_child, args=(session, answers))
        child.start()
        child.join(GENEROUS)
        assert child.exitcode == 0
        is_outside, message = answers.get()
    assert is_outside
    assert "forked" in message


def _is_left_to_the_parent(stack: ExitStack, error: BaseException | None) -> bool:
    """Return True if leaving a block in a forked child raises its own error, or that only its parent commits."""
    try:
        stack.__exit__(type(error) if error else None, error, None)
    except TransactionError as caught:
        return error is None and "forked" in str(caught)
    return error is not None


@pytest.mark.parametrize("error", [None, ZeroDivisionError()], ids=repr)
def test_a_forked_process_ends_no_block_of_its_parents(
    client: Client, notes: Collection[Document], error: BaseException | None
) -> None:
    """P18: it reaches the end too, as a daemon does. Only its parent commits or aborts."""
    called: list[int] = []
    with ExitStack() as stack:
        session = stack.enter_context(transactional(client))
        notes.insert_one({"_id": 1}, session=session)
        after_commit(lambda: called.append(1))
        assert holds_after_a_fork(lambda: _is_left_to_the_parent(stack, error) and not called)
    assert called == [1]
    assert notes.count_documents({}) == 1


@pytest.mark.parametrize("error", [None, ZeroDivisionError()], ids=repr)
def test_a_forked_process_ends_no_transaction_of_its_parents(
    client: Client, notes: Collection[Document], error: BaseException | None
) -> None:
    """The same where the body is a function, which is not repeated by its parent either."""
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
            os._exit(0 if caught is error or "forked" in str(caught) else 1)
        raise
    finally:
        if os.getpid() != parent:
            os._exit(2)
    assert len(attempts) == 1
    assert notes.count_documents({}) == 1


def test_a_thread_that_stands_still_before_the_commit_is_told_that_the_time_is_used_up(
    client: Client, notes: Collection[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit that has passed by then is none that PyMongo takes."""
    needs_commit = ending.needs_commit

    def stand_still(scope: TransactionScope, session: ClientSession) -> bool:
        needs = needs_commit(scope, session)
        wait_for(lambda: scope.remaining < 0)
        return needs

    monkeypatch.setattr(ending, "needs_commit", stand_still)
    block = transactional(client, timeout=1.0)
    with pytest.raises(TransactionTimeoutError) as caught, block as session:
        notes.insert_one({"text": "late"}, session=session)
    assert caught.value.outcome == "unknown"  # type: ignore[attr-defined]
    client.admin.command("killAllSessions", [])  # it was not sent, and nobody else ends it soon
    assert texts(notes) == []


def test_a_block_without_a_limit_has_time_for_its_commit(client: Client, notes: Collection[Document]) -> None:
    """A body of two minutes, an import say, is not thrown away at its end."""
    block = transactional(client)
    block._seconds, begun = SHORT, time.monotonic()  # `timeout=` would bound the body as well
    with block as session:
        notes.insert_one({"text": "long"}, session=session)
        wait_for(lambda: time.monotonic() - begun > SHORT)
    assert texts(notes) == ["long"]


def test_the_write_of_a_box_ends_with_the_time_of_its_block(
    notes: Collection[Document], mongo_url: str, make_proxy: Callable[[int], Proxy], make_client: Callable[..., Client]
) -> None:
    """The block itself has no limit, but its end has: also where the server stands still just then."""
    proxy = make_proxy(parse_uri(mongo_url)["nodelist"][0][1])
    through = make_client(proxy.mongo_url)
    app = Celery("blocks", broker="memory://", set_as_current=False)
    box = OutboxCollection(app, through[notes.database.name]["box"])
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
