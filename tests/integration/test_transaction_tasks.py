"""
`transactional` over `AsyncMongoClient`: the twins of its tests for threads, and what only asyncio has: tasks, cancels.

The loop decides by the same functions as that for threads (`mongo_celery/mongo/transaction/ending.py`). Its repetitions
are in `test_transaction_retries.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from pymongo import AsyncMongoClient, MongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.database import Database

from mongo_celery.errors import ConfigurationError, TransactionError, TransactionRequiredError, TransactionTimeoutError
from mongo_celery.locking import after_commit, asynchronous, current, select_for_update, transactional
from tests.fixtures.process import wait_for
from tests.fixtures.proxy import Direction, Proxy
from tests.integration.locking_rig import GENEROUS, NOTES_APP, SHORT, Document
from tests.rig.commands import CommandRecorder

Work = Callable[[AsyncCollection[Document]], Awaitable[None]]
OnLoop = Callable[[Work], None]
Texts = Callable[[], list[Any]]
Body = Callable[[AsyncClientSession], Awaitable[None]]
Cancel = Callable[[asyncio.Future[Any], set[asyncio.Task[Any]]], Awaitable[None]]

_TURNS = 20


@pytest.fixture
def on_loop(database: Database[Document], mongo_url: str, sent: CommandRecorder) -> Iterator[OnLoop]:
    """Give a function that runs work with the notes of an async client, on an event loop."""
    database.create_collection("notes")

    def run(work: Work, url: str = mongo_url) -> None:
        async def main() -> None:
            options: Any = {"appName": NOTES_APP, "event_listeners": [sent], "serverSelectionTimeoutMS": 10_000}
            async with AsyncMongoClient[Document](url, **options) as client:
                await work(client[database.name]["notes"])

        asyncio.run(main())

    yield run
    # A commit that never arrives leaves the transaction open, and its database cannot be dropped.
    database.client.admin.command("killAllSessions", [])


@pytest.fixture
def texts(database: Database[Document]) -> Texts:
    return lambda: [note["text"] for note in database["notes"].find().sort("_id", 1)]


async def run(client: Any, body: Body, *, as_block: bool, **options: Any) -> None:
    """Run a body in either form."""
    if not as_block:
        return await transactional(client, **options).arun(body)
    async with transactional(client, **options) as session:
        return await body(session)


async def write(notes: AsyncCollection[Document], text: str, error: BaseException | None = None) -> None:
    """Write a note in a part, or in a transaction; then raise what it is told to."""

    async def body(session: AsyncClientSession) -> None:
        await notes.insert_one({"text": text}, session=session)
        if error is not None:
            raise error

    await transactional(notes.database.client).arun(body)


def test_parts_join_and_make_the_whole_rollback_only(on_loop: OnLoop, texts: Texts, sent: CommandRecorder) -> None:
    async def work(notes: AsyncCollection[Document]) -> None:
        client = notes.database.client
        async with transactional(client) as session:
            await write(notes, "called")
            async with transactional(client) as inner:
                assert inner is session is current(client)
            with pytest.raises(ConfigurationError):
                await transactional(client, durable=True).arun(lambda _: pytest.fail("not run"))
            await notes.insert_one({"text": "outer"}, session=session)
        assert current(client) is None

        async def caught(_: AsyncClientSession) -> None:
            with suppress(ZeroDivisionError):
                await write(notes, "partial", ZeroDivisionError())

        for as_block in (False, True):
            with pytest.raises(TransactionError):
                await run(client, caught, as_block=as_block)

    on_loop(work)
    assert texts() == ["called", "outer"]
    assert (len(sent.named("commitTransaction")), len(sent.named("abortTransaction"))) == (1, 2)


def test_two_tasks_have_a_transaction_each(on_loop: OnLoop, texts: Texts) -> None:
    """The body that has raised was committed, and the good one lost, when blocks were kept by thread."""

    async def work(notes: AsyncCollection[Document]) -> None:
        client = notes.database.client
        both = asyncio.Barrier(2)

        async def bad() -> None:
            with suppress(ZeroDivisionError):
                async with transactional(client) as session:
                    await notes.insert_one({"text": "bad"}, session=session)
                    await both.wait()
                    raise ZeroDivisionError

        async def good() -> None:
            async with transactional(client) as session:
                await notes.insert_one({"text": "good"}, session=session)
                await both.wait()
                await write(notes, "good part")

        await asyncio.wait_for(asyncio.gather(bad(), good()), GENEROUS)

    on_loop(work)
    assert texts() == ["good", "good part"]


def test_tasks_and_threads_of_a_body_have_no_transaction(on_loop: OnLoop) -> None:
    """They have a copy of its context; its session serves one at a time."""

    async def work(notes: AsyncCollection[Document]) -> None:
        client = notes.database.client

        async def find() -> AsyncClientSession | None:
            return current(client)

        async with transactional(client) as session:
            assert await find() is session
            assert await asyncio.create_task(find()) is None
            assert await asyncio.to_thread(current, client) is None

    on_loop(work)


def test_callbacks_are_awaited_after_the_commit(on_loop: OnLoop, texts: Texts) -> None:
    """Functions and coroutine functions, in their order; what fails stops nothing."""
    seen: list[Any] = []

    async def later() -> None:
        seen.append(texts())

    async def work(notes: AsyncCollection[Document]) -> None:
        async def body(session: AsyncClientSession) -> None:
            after_commit(lambda: 1 // 0)
            after_commit(later)
            after_commit(lambda: seen.append("function"), session)
            await notes.insert_one({"text": "a"}, session=session)

        for as_block in (False, True):
            await run(notes.database.client, body, as_block=as_block)

    on_loop(work)
    assert seen == [["a"], "function", ["a", "a"], "function"]


def test_a_cancel_in_the_body_aborts(on_loop: OnLoop, texts: Texts, sent: CommandRecorder) -> None:
    async def work(notes: AsyncCollection[Document]) -> None:
        locked = asyncio.Event()

        async def body(session: AsyncClientSession) -> None:
            await notes.insert_one({"text": "a"}, session=session)
            locked.set()
            await asyncio.Event().wait()

        for as_block in (False, True):
            locked.clear()
            running = asyncio.create_task(run(notes.database.client, body, as_block=as_block))
            await asyncio.wait_for(locked.wait(), GENEROUS)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    on_loop(work)
    assert texts() == []
    assert len(sent.named("abortTransaction")) == 2


def cancel_during_the_commit(
    on_loop: Any, proxy: Proxy, cancel: Cancel, *, as_block: bool = False, timeout: float = GENEROUS
) -> list[str]:
    """Hold a commit in the network, and cancel its task, or all new tasks of the loop. Return the called callbacks."""
    called: list[str] = []

    async def work(notes: AsyncCollection[Document]) -> None:
        async def callback() -> None:
            await asyncio.sleep(0)
            called.append("callback")

        async def body(session: AsyncClientSession) -> None:
            after_commit(callback)
            await notes.insert_one({"text": "a"}, session=session)

        await notes.database.command("ping")
        before = asyncio.all_tasks()
        proxy.hold(b"commitTransaction")
        running = asyncio.create_task(run(notes.database.client, body, as_block=as_block, timeout=timeout))
        await asyncio.to_thread(proxy.wait_until_held)
        for _ in range(_TURNS):  # the driver has sent it, and now reads: `wait_for` of Python 3.11 can lose a cancel
            await asyncio.sleep(0)
        await cancel(running, asyncio.all_tasks() - before)

    on_loop(work, proxy.mongo_url)
    return called


@pytest.mark.parametrize("as_block", [False, True])
@pytest.mark.parametrize("everything", [False, True])
def test_a_cancel_during_the_commit_waits_for_its_answer(
    on_loop: Any, texts: Texts, proxy: Proxy, as_block: bool, everything: bool
) -> None:
    """Committed, callbacks run, then canceled. `asyncio.run` cancels every task, that of the commit as well."""

    async def cancel(running: asyncio.Future[Any], tasks: set[asyncio.Task[Any]]) -> None:
        for task in tasks if everything else [running]:
            task.cancel()
        for _ in range(0 if everything else 10):  # as a scope of anyio, which cancels at each turn of the loop
            await asyncio.sleep(0.001)
            running.cancel()
        assert everything or not running.done()
        proxy.release()
        with pytest.raises(asyncio.CancelledError):
            await running

    assert cancel_during_the_commit(on_loop, proxy, cancel, as_block=as_block) == ["callback"]
    assert texts() == ["a"]


def test_a_cancel_during_a_commit_without_an_answer_ends_with_the_time(on_loop: Any, proxy: Proxy) -> None:
    async def cancel(running: asyncio.Future[Any], _: object) -> None:
        running.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await running
        assert isinstance(caught.value.__cause__, TransactionTimeoutError)
        proxy.black_hole(Direction.TO_CLIENT)
        proxy.reset()
        proxy.pass_through()

    assert cancel_during_the_commit(on_loop, proxy, cancel, timeout=2 * SHORT) == []


def test_a_cancel_during_the_abort_waits_for_it(on_loop: Any, texts: Texts, proxy: Proxy) -> None:
    async def work(notes: AsyncCollection[Document]) -> None:
        async def body(session: AsyncClientSession) -> None:
            await notes.insert_one({"text": "a"}, session=session)
            proxy.hold(b"abortTransaction")
            raise ZeroDivisionError

        await notes.database.command("ping")
        running = asyncio.create_task(run(notes.database.client, body, as_block=True))
        await asyncio.to_thread(proxy.wait_until_held)
        running.cancel()
        await asyncio.sleep(0)
        assert not running.done()
        proxy.release()
        with pytest.raises(asyncio.CancelledError) as caught:
            await running
        assert isinstance(caught.value.__cause__, ZeroDivisionError)

    on_loop(work, proxy.mongo_url)
    assert texts() == []


SUSPENDED = object()


class Suspended:
    """What no event loop resumes."""

    def __await__(self) -> Generator[object]:
        yield SUSPENDED


class Driven:
    """Awaits a coroutine until it is suspended so."""

    def __init__(self, coroutine: Coroutine[Any, None, None]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[object]:
        while (waited := self._coroutine.send(None)) is not SUSPENDED:
            yield waited


@pytest.mark.parametrize("as_block", [False, True])
def test_a_coroutine_that_is_thrown_away_awaits_nothing_and_its_locks_are_freed(
    on_loop: OnLoop, texts: Texts, sent: CommandRecorder, as_block: bool
) -> None:
    """By a task of its own; else Python would say that it has ignored its end."""

    async def work(notes: AsyncCollection[Document]) -> None:
        async def body(session: AsyncClientSession) -> None:
            await notes.insert_one({"text": "a"}, session=session)
            await Suspended()

        coroutine = run(notes.database.client, body, as_block=as_block)
        await Driven(coroutine)
        coroutine.close()
        await asyncio.to_thread(wait_for, lambda: sent.named("abortTransaction"))
        assert current(notes.database.client) is None

    on_loop(work)
    assert texts() == []


def test_each_kind_of_client_has_its_own_forms(on_loop: OnLoop, mongo_client: MongoClient[Document]) -> None:
    async def work(notes: AsyncCollection[Document]) -> None:
        client = notes.database.client
        with pytest.raises(ConfigurationError):
            transactional(client).run(lambda _: None)
        with pytest.raises(ConfigurationError), transactional(client):
            pytest.fail("not run")
        with pytest.raises(ConfigurationError):
            async with transactional(mongo_client):
                pytest.fail("not run")

        @transactional(mongo_client)
        async def body(*, session: Any) -> None: ...

        with pytest.raises(ConfigurationError):
            await body()
        with mongo_client.start_session() as foreign, pytest.raises(ConfigurationError):
            await transactional(client).arun(lambda _: pytest.fail("not run"), session=foreign)  # type: ignore[arg-type]
        with pytest.raises(TransactionRequiredError):
            await asynchronous.select_for_update(notes, {"_id": 1}, session=None)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError):  # it writes by a plain client
            async with transactional(client, outbox=SimpleNamespace(collect=pytest.fail)):
                pytest.fail("not run")
        ours: Any = mongo_client[notes.database.name]["notes"]
        async with transactional(client) as session:
            with pytest.raises(ConfigurationError):
                await asynchronous.select_for_update(ours, {}, session=session)
            with pytest.raises(TransactionRequiredError):  # that of threads would not judge what it is refused
                select_for_update(notes, {"_id": 1}, session=session)  # type: ignore[arg-type]
        with transactional(mongo_client) as plain, pytest.raises(ConfigurationError):
            select_for_update(notes, {}, session=plain)  # type: ignore[arg-type]

    on_loop(work)
