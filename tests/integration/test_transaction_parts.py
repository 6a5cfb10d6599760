"""
`transactional` inside `transactional`, in threads, and left elsewhere: whose transaction it is, and what becomes of it.

Twins for asyncio are in `test_transaction_tasks.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from pymongo.client_session import ClientSession
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery import OutboxCollection
from mongo_celery.errors import ConfigurationError, TopologyError, TransactionError, TransactionTimeoutError
from mongo_celery.locking import after_commit, current, select_for_update, transactional
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.forking import fork
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import wait_for
from tests.fixtures.proxy import Proxy
from tests.integration.locking_rig import CONFLICT, GENEROUS, SHORT, Client, Notes, as_block_or_function, held, texts
from tests.rig.commands import CommandRecorder

TRANSIENT = "TransientTransactionError"

Write = Callable[..., None]


@pytest.fixture
def write(notes: Notes, client: Client) -> Write:
    @transactional(client)
    def write(text: str, error: BaseException | None = None, *, session: ClientSession) -> None:
        notes.insert_one({"text": text}, session=session)
        if error is not None:
            raise error

    return write


def test_a_conflict_in_a_part_repeats_the_whole(
    notes: Notes, client: Client, write: Write, failpoint: Failpoint
) -> None:
    """Also where the body catches it, and a later part fails: the server has aborted the transaction by then."""
    runs: list[int] = []
    called: list[type[Exception]] = []

    @transactional(client)
    def fail(*, session: ClientSession) -> None:
        del session
        raise ZeroDivisionError

    def body(_: ClientSession, catch: type[Exception]) -> None:
        runs.append(1)
        after_commit(lambda: called.append(catch))
        with suppress(catch):
            write("inner")
        if len(runs) == 1:
            with suppress(ZeroDivisionError):
                fail()

    for catch in (KeyError, OperationFailure):
        runs.clear()
        with failpoint(mode={"times": 1}, **CONFLICT):
            transactional(client).run(lambda session, catch=catch: body(session, catch))  # type: ignore[misc]
        assert len(runs) == 2
    assert (texts(notes), called) == (["inner", "inner"], [KeyError, OperationFailure])


def test_another_client_of_the_cluster_joins_nothing(notes: Notes, client: Client, make_client: MakeClient) -> None:
    client.admin.command("ping")
    member = f"localhost:{client.address[1] if client.address else 0}"
    for other in (make_client(), make_client(f"mongodb://{member}"), make_client(member, directConnection=True)):
        with transactional(client) as outer, suppress(ZeroDivisionError):
            with pytest.raises(ConfigurationError), transactional(other):
                raise AssertionError
            with pytest.raises(ConfigurationError):
                current(other)
            with pytest.raises(ConfigurationError):
                transactional(other, durable=True).run(print)
            with transactional(other, independent=True) as inner:
                assert (current(client), current(other)) == (outer, inner)
                notes.insert_one({"text": "outer"}, session=outer)
                other[notes.database.name]["notes"].insert_one({"text": "inner"}, session=inner)
                raise ZeroDivisionError
    assert texts(notes) == ["outer"] * 3


def test_a_client_of_another_cluster_is_in_no_transaction(
    client: Client, standalone_url: str, make_client: MakeClient
) -> None:
    elsewhere = make_client(standalone_url)
    with transactional(client):
        assert current(elsewhere) is None
        with pytest.raises(TopologyError):
            transactional(elsewhere, durable=True).run(lambda session: elsewhere.x.x.find_one({}, session=session))
    with transactional(elsewhere):
        assert current(client) is None


@pytest.mark.parametrize("as_block", [False, True])
def test_a_part_that_fails_makes_the_whole_rollback_only_though_its_error_is_caught(
    notes: Notes, client: Client, write: Write, sent: CommandRecorder, as_block: bool
) -> None:
    """Its partial writes would be committed; what is written after it goes to nowhere either."""

    def body(session: ClientSession) -> str:
        with suppress(ZeroDivisionError):
            write("partial", ZeroDivisionError("by nought"))
        notes.insert_one({"text": "after"}, session=session)
        after_commit(lambda: pytest.fail("it is not committed"))
        return "done"

    with pytest.raises(TransactionError) as caught:
        as_block_or_function(client, body, as_block=as_block)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert texts(notes) == []
    assert (len(sent.named("abortTransaction")), len(sent.named("commitTransaction"))) == (1, 0)


@pytest.mark.parametrize("error", [None, ZeroDivisionError(), PyMongoError("", [TRANSIENT])], ids=repr)
@pytest.mark.parametrize("as_block", [False, True])
def test_a_part_that_ends_the_transaction_is_no_success(
    notes: Notes, client: Client, as_block: bool, error: Exception | None
) -> None:
    """After an abort PyMongo would send what follows outside of any transaction. It is never run again."""
    runs: list[int] = []

    @transactional(client)
    def give_up(*, session: ClientSession) -> None:
        session.abort_transaction()
        assert current(client) is None
        assert after_commit(lambda: runs.append(0)), "at once"
        if error is not None:
            raise error

    def body(session: ClientSession) -> None:
        runs.append(1)
        notes.insert_one({"text": "before"}, session=session)
        with suppress(ZeroDivisionError, PyMongoError):
            give_up()
        if error is None:
            notes.insert_one({"text": "after"}, session=session)

    with pytest.raises(TransactionError) as caught:
        as_block_or_function(client, body, as_block=as_block)
    assert error is None or caught.value.__cause__ is error
    assert (texts(notes), runs) == ([], [1, 0])


def test_one_of_its_own_is_committed_for_itself(notes: Notes, client: Client, write: Write) -> None:
    own = transactional(client, independent=True)

    def body(session: ClientSession) -> None:
        with suppress(ZeroDivisionError), own:
            write("refused", ZeroDivisionError())
        with own as inner:
            assert inner is not session
            assert current(client) is inner
            write("kept")
        own.run(lambda _: write("kept, too"), session=session)
        assert current(client) is session
        write("outer")
        assert texts(notes) == ["kept", "kept, too"]
        raise LookupError

    with pytest.raises(LookupError):
        transactional(client).run(body)
    assert texts(notes) == ["kept", "kept, too"]


def test_no_transaction_outlasts_the_time_of_the_one_around(notes: Notes, client: Client) -> None:
    """When that has passed, nothing can be answered any more."""
    notes.insert_one({"_id": 1})
    begun = time.monotonic()
    with held(notes, 1), pytest.raises(TransactionTimeoutError), transactional(client, timeout=SHORT):
        transactional(client, independent=True, timeout=100 * SHORT)(select_for_update)(notes, {"_id": 1})
    assert time.monotonic() - begun < 50 * SHORT


def test_a_durable_one_refuses_to_join_a_transaction_of_the_driver(client: Client) -> None:
    """As Django's: what it has written is committed when it returns. `test_inside_a_transaction.py` has the others."""
    with client.start_session() as foreign, foreign.start_transaction(), pytest.raises(ConfigurationError):
        transactional(client, durable=True).run(lambda _: pytest.fail("not run"), session=foreign)
    with pytest.raises(ConfigurationError):
        transactional(client, independent=True, durable=True)


def test_a_callback_without_a_session_waits_for_the_transaction_around(
    notes: Notes, client: Client, write: Write
) -> None:
    seen: list[Any] = []

    @transactional(client)
    def outer(*, fail: bool, session: ClientSession) -> None:
        transactional(client).run(lambda _: after_commit(lambda: seen.append(texts(notes))))
        write("a", session=session)
        if fail:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        outer(fail=True)
    outer(fail=False)
    assert seen == [["a"]]
    assert after_commit(lambda: seen.append("at once"))
    assert seen == [["a"], "at once"]


def test_a_soft_time_limit_in_a_callback_passes_when_all_have_run(notes: Notes, write: Write) -> None:
    called: list[str] = []

    def stop() -> None:
        raise SoftTimeLimitExceeded

    def body(session: ClientSession) -> None:
        write("a", session=session)
        after_commit(stop)
        after_commit(lambda: called.append("the other"))

    with pytest.raises(SoftTimeLimitExceeded):
        transactional(notes.database.client).run(body)
    assert (texts(notes), called) == (["a"], ["the other"])


def test_a_coroutine_is_no_body_and_no_callback_where_nobody_awaits(
    notes: Notes, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """It would run after the commit and outside, or be thrown away; also where only its result says what it is."""

    async def coroutine(*_: ClientSession) -> None:
        notes.insert_one({"text": "outside"})

    body: Callable[[ClientSession], Any] = coroutine
    inner: Any = transactional(client)
    for run in (body, lambda _: inner.run(body)):
        with pytest.raises(ConfigurationError):
            transactional(client).run(run)
    with transactional(client), pytest.raises(ConfigurationError):
        after_commit(coroutine)
    with pytest.raises(ConfigurationError):
        after_commit(lambda: [coroutine()][0])
    with transactional(client):
        after_commit(lambda: [coroutine()][0])
    assert caplog.records
    assert texts(notes) == []


def test_a_block_may_be_left_by_another_thread(notes: Notes, client: Client, write: Write) -> None:
    """As frameworks run the halves of a dependency; whoever is handed its session joins it, in whatever thread."""

    @contextmanager
    def dependency() -> Iterator[ClientSession]:
        with transactional(client) as session:
            yield session

    for error in (None, ZeroDivisionError()):
        with ThreadPoolExecutor(1) as entering, ThreadPoolExecutor(1) as using, ThreadPoolExecutor(1) as leaving:
            block = dependency()
            session = entering.submit(block.__enter__).result(GENEROUS)
            using.submit(write, f"before {error!r}", session=session).result(GENEROUS)
            left = leaving.submit(block.__exit__, type(error) if error else None, error, None)
            assert not left.result(GENEROUS)  # nothing is swallowed
            entering.submit(write, f"alone {error!r}").result(GENEROUS)  # joins nothing, and has no limit left over
    expected = ["before None", "alone None", "alone ZeroDivisionError()"]
    assert texts(notes) == expected


def test_an_object_serves_one_block_at_a_time(notes: Notes, client: Client, write: Write) -> None:
    """Also after a failure to begin or inside; functions that it decorates are not concerned."""
    shared = transactional(client, durable=True)
    with transactional(client), pytest.raises(ConfigurationError), shared:
        pytest.fail("not run")
    with shared as session:
        notes.insert_one({"text": "first"}, session=session)
        with ThreadPoolExecutor(1) as pool:
            with pytest.raises(ConfigurationError):
                pool.submit(shared.__enter__).result(GENEROUS)
            pool.submit(shared.run, lambda session: write("function", session=session)).result(GENEROUS)
    with suppress(ZeroDivisionError), shared:
        raise ZeroDivisionError
    with shared:
        write("last")
    assert texts(notes) == ["first", "function", "last"]


def test_a_generator_that_is_thrown_away_aborts(notes: Notes, client: Client) -> None:
    def work() -> Iterator[None]:
        with transactional(client) as session:
            notes.insert_one({"text": "left"}, session=session)
            yield

    generator = work()
    next(generator)
    generator.close()  # type: ignore[attr-defined]
    assert texts(notes) == []
    assert current(client) is None


@pytest.mark.parametrize("as_block", [False, True])
@pytest.mark.parametrize("error", [None, ZeroDivisionError()], ids=repr)
def test_a_forked_process_ends_no_transaction_of_its_parents(
    client: Client, notes: Notes, error: BaseException | None, as_block: bool
) -> None:
    """P18: it reaches the end too, as a daemon does. It can neither join, commit nor abort, and repeats nothing."""
    parent, called = os.getpid(), list[str]()

    def body(session: ClientSession) -> None:
        called.append("run")
        notes.insert_one({"_id": 1}, session=session)
        after_commit(lambda: called.append("committed"))
        if child := fork():
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            return
        with pytest.raises(TransactionError):
            transactional(client).run(lambda _: None, session=session)
        if error is not None:
            raise error

    try:
        as_block_or_function(client, body, as_block=as_block)
    except (TransactionError, ZeroDivisionError) as caught:
        if os.getpid() != parent:
            os._exit(0 if caught is error or (error is None and called == ["run"]) else 1)
        raise
    finally:
        if os.getpid() != parent:
            os._exit(2)
    assert called == ["run", "committed"]
    assert notes.count_documents({}) == 1


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
        leaving.submit(copy_context().run, block.__exit__, None, None, None).result(GENEROUS)
        entering.submit(app.send_task, "afterwards", queue="blocks").result(GENEROUS)  # is not refused
    assert texts(notes) == ["inside"]
    assert notes.database["box"].count_documents({}) == 1


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
