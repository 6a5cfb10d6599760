"""
`async def` handlers: what only they have. The loop, its clients, fenced writes, transactions and cancels.

`acceptance/test_async_handlers.py` has workers, their limits and their ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import pytest
from celery import Celery, Task, current_task
from celery.exceptions import SoftTimeLimitExceeded
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.database import Database

from mongo_celery import AsyncFencedCollection, Bridge, Change, Changes, OutboxCollection
from mongo_celery.bridge import event_loop
from mongo_celery.bridge.declarations import OnChange
from mongo_celery.bridge.event_loop import EVENT_LOOP
from mongo_celery.errors import ConfigurationError, HandlerUsageError, StaleFencingTokenError
from mongo_celery.testing import BridgeRunner
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.process import wait_for
from tests.rig.fenced import Act, Document, every_write, fence, view

TRACE: ContextVar[str] = ContextVar("trace", default="none")


class TracedTask(Task):  # type: ignore[type-arg] # generic for type checkers only
    """Opens a context around each call, as Flask's application context and traces do."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = TRACE.set("around")
        try:
            return self.run(*args, **kwargs)
        finally:
            TRACE.reset(token)


class Shop:
    """A bridge whose handlers a test defines, and what they have seen."""

    def __init__(self, database: Database[Document], url: str, task_cls: Any = Task) -> None:
        self.data, self.name = database, database.name
        self.app = Celery("shop", broker="memory://", set_as_current=False, task_cls=task_cls)
        self.bridge = Bridge(self.app, url, name="shop", autodiscover=False, failure_policy="dead_letter")
        self.seen: list[Any] = []

    def on_change(self, **options: Any) -> OnChange:
        return self.bridge.on_change(f"{self.name}.orders", **options)

    def fenced(self, change: Any) -> AsyncFencedCollection:
        made: AsyncFencedCollection = change.fenced(self.bridge.async_client[self.name]["copies"])
        return made

    def deliver(self, *keys: Any, **options: Any) -> Any:
        with BridgeRunner(self.bridge) as runner:
            self.data["orders"].insert_many([{"_id": key} for key in keys])
            return runner.deliver(**options)

    @property
    def copies(self) -> list[Any]:
        return [each["_id"] for each in self.data["copies"].find().sort("_id", 1)]


@pytest.fixture
def shop(database: Database[Document], mongo_url: str) -> Shop:
    return Shop(database, mongo_url)


def test_all_handlers_share_a_loop_and_see_their_task(database: Database[Document], mongo_url: str) -> None:
    """
    The task, its request and its context reach the coroutine; the request also its tasks and threads.

    A retry counts as that of a plain handler.
    """
    shop = Shop(database, mongo_url, TracedTask)

    @shop.on_change(bind=True)
    async def first(self: Any, change: Change) -> None:
        async def child() -> int:
            return int(self.request.retries)

        for _ in range(2):  # in each step of the coroutine
            assert current_task.name == self.name
            await asyncio.sleep(0)
        assert self.request.id
        assert TRACE.get() == "around"
        retries = (await asyncio.gather(child()), await asyncio.to_thread(lambda: self.request.retries))
        shop.seen.append((asyncio.get_running_loop(), retries))
        if self.request.retries == 0:
            raise self.retry(countdown=9, exc=ValueError())
        await shop.fenced(change).replace_one(change.document_key, {}, upsert=True)

    @shop.on_change()
    async def second(_: Change) -> None:
        shop.seen.append((asyncio.get_running_loop(), ([9], 9)))

    assert len(shop.deliver(1).retries) == 1
    loops, retries = zip(*shop.seen, strict=True)
    assert len(set(loops)) == 1
    assert sorted(retries) == [([0], 0), ([1], 1), ([9], 9)]
    assert shop.copies == [1]


def test_a_direct_call_returns_the_coroutine(shop: Shop) -> None:
    """In a unit test, with a loop of its own, and where one handler calls another. All run on the handlers' loop."""

    @shop.on_change()
    async def inner(change: Change) -> Any:
        await shop.bridge.async_client.admin.command("ping")
        return change.document_key["_id"]

    @shop.on_change()
    async def outer(change: Change) -> None:
        shop.seen.append(await inner(change))

    for key in (7, 8):
        assert asyncio.run(inner(Change.build("insert", ns="shop.orders", document_key={"_id": key}))) == key
    shop.deliver(1)
    assert shop.seen == [1]


class Answer:
    def __await__(self) -> Iterator[None]:
        yield


def test_what_nothing_would_await_is_refused(shop: Shop) -> None:
    """P9: a plain function that returns a coroutine would count as done; and a generator does nothing at all."""

    @shop.on_change()
    def plain(_: Change) -> Any:
        return asyncio.sleep(0)

    @shop.on_change(transactional=True)
    def together(_: Change) -> Any:
        return asyncio.sleep(0)

    @shop.on_change()
    def future(_: Change) -> Any:
        return Answer()

    failures = shop.deliver(1, raises=False).failures
    assert sorted(call.handler for call in failures) == ["future", "plain", "together"]
    with pytest.raises(ConfigurationError):

        @shop.on_change()
        async def generator(change: Change) -> Any:
            yield change


@pytest.fixture
def limit() -> Iterator[Callable[[], None]]:
    """Give a function that has a soft time limit raised in the waiting thread, as Celery's pools do, by a signal."""

    def raise_limit(*_: object) -> None:
        raise SoftTimeLimitExceeded

    before = signal.signal(signal.SIGUSR1, raise_limit)
    yield lambda: os.kill(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


async def _end(end: str, stays: asyncio.Event, left: list[bool]) -> None:
    if end == "canceled":
        raise asyncio.CancelledError
    if end == "raises":
        raise KeyError from None
    if end == "again":
        await asyncio.Event().wait()
    while end == "stays" and not left:
        with suppress(asyncio.CancelledError):
            left.append(await stays.wait())


@pytest.mark.parametrize("transactional", [False, True], ids=["plain", "transactional"])
@pytest.mark.parametrize("end", ["canceled", "again", "returns", "raises", "stays"])
def test_a_soft_time_limit_cancels_the_coroutine(
    shop: Shop, limit: Callable[[], None], monkeypatch: pytest.MonkeyPatch, end: str, *, transactional: bool
) -> None:
    """
    Its end decides, as with a plain handler that catches the limit; one that stays is waited for only so long.

    One that loses the first cancel, as in `wait_for` of Python 3.11, is canceled again.
    """
    stays, left = asyncio.Event(), list[bool]()

    async def set_event() -> None:
        stays.set()

    monkeypatch.setattr(event_loop, "_ENDING_SECONDS", {"again": 2, "stays": 0.05}.get(end, 5))

    @shop.on_change(transactional=transactional)
    async def slow(change: Change) -> None:
        await shop.fenced(change).replace_one(change.document_key, {}, upsert=True)
        limit()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            shop.seen.append("canceled")
            await _end(end, stays, left)

    failed = shop.deliver(1, raises=False).failures
    assert wait_for(lambda: shop.seen) == ["canceled"]
    assert shop.copies == ([] if transactional and end != "returns" else [1])
    expected = {"canceled": [SoftTimeLimitExceeded], "returns": [], "raises": [KeyError]}
    assert [type(call.error) for call in failed] == expected.get(end, [SoftTimeLimitExceeded])
    if end in ("canceled", "again"):
        assert isinstance(failed[0].error.__cause__, asyncio.CancelledError)
    if end == "stays":
        EVENT_LOOP.get().run(set_event)
        wait_for(lambda: left)


def test_a_commit_that_the_limit_interrupts_blocks_no_outcome(
    database: Database[Document], mongo_url: str, limit: Callable[[], None], failpoint: Failpoint
) -> None:
    """P2: PyMongo does not abort a transaction whose commit has begun, and its locks would stop the outcome."""
    shop = Shop(database, f"{mongo_url}&appName=interrupted")
    match = {"command.commitTransaction": 1, "appName": "interrupted"}
    slow = {"failCommands": ["commitTransaction"], "blockConnection": True, "blockTimeMS": 2500, "errorCode": 50}

    def interrupt() -> None:
        wait_for(lambda: list(database.client.admin.aggregate([{"$currentOp": {}}, {"$match": match}])))
        limit()

    @shop.on_change(transactional=True)
    async def together(change: Change) -> None:
        await shop.fenced(change).replace_one({"_id": 1}, {}, upsert=True)
        threading.Thread(target=interrupt).start()

    with BridgeRunner(shop.bridge) as runner, failpoint(mode={"times": 1}, appName="interrupted", **slow):
        shop.data["orders"].insert_one({"_id": 1})
        failures = runner.deliver(raises=False).failures
        assert [type(call.error) for call in failures] == [SoftTimeLimitExceeded]
        assert len(shop.bridge.operations.find_dead_letters().letters) == 1
    assert shop.copies == []


def test_a_handler_that_cancels_itself_has_failed(shop: Shop) -> None:
    """P12: the error is the handler's, and the process lives on; as it does if a coroutine raises SystemExit."""

    @shop.on_change()
    async def canceled(_: Change) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    assert [type(call.error) for call in shop.deliver(1, raises=False).failures] == [HandlerUsageError]

    async def leave() -> None:
        raise SystemExit(3)

    for _ in range(2):
        with pytest.raises(SystemExit):
            EVENT_LOOP.get().run(leave)


class Awaited:
    """A view whose coroutines run on the loop, for acts that are written for plain ones."""

    def __init__(self, fenced: AsyncFencedCollection) -> None:
        self._fenced = fenced

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._fenced, name)
        return lambda *args, **kwargs: EVENT_LOOP.get().run(lambda: method(*args, **kwargs))


@every_write
def test_each_asyncio_write_is_refused_or_done_as_a_plain_one(
    target: Collection[Document], shop: Shop, write: Act
) -> None:
    """P3: a stale one changes nothing; a newer one writes what the plain method writes."""
    copies = shop.bridge.async_client[shop.name][target.name]

    def awaited(token: int) -> Any:
        return Awaited(AsyncFencedCollection(copies, fence(token)))

    def fill(token: int) -> list[Document]:
        view(target, token).replace_one({"_id": 2}, {"kind": "b", "by": "newer"}, upsert=True)
        view(target, token).replace_one({"_id": 1}, {"kind": "a", "by": "newer"}, upsert=True)
        return read()

    def read() -> list[Document]:
        return list(target.find({}, {"_fence": 0}).sort("_id", 1))

    before = fill(5)
    with pytest.raises(StaleFencingTokenError):
        write(awaited(4))
    assert read() == before
    write(awaited(6))
    after = read()
    fill(7)
    write(view(target, 8))
    assert read() == after != before


def test_effects_and_mark_of_a_transaction_are_one(shop: Shop, mongo_client: MongoClient[Document]) -> None:
    """
    P1, P6: a process that dies behind the commit repeats nothing; an error undoes the writes.

    A write of another task or client, which would stay after an abort, is refused. What it sends is part of it.
    """
    box = OutboxCollection(shop.app, lambda: shop.bridge.collection(f"{shop.name}.box"), every_transaction=True)
    send = shop.app.task(name="send", shared=False)(_one_key)

    @shop.on_change(transactional=True, bind=True, max_retries=1)
    async def together(self: Any, change: Change) -> None:
        notes = shop.bridge.async_client[shop.name]["notes"]
        await notes.insert_one({"order": change.document_key["_id"]}, session=change.session)
        await shop.fenced(change).replace_one(change.document_key, {}, upsert=True)
        with pytest.raises(ConfigurationError):
            await asyncio.gather(shop.fenced(change).update_one(change.document_key, {"$set": {"a": 1}}))
        with pytest.raises(ConfigurationError):
            change.fenced(f"{shop.name}.copies").update_one(change.document_key, {"$set": {"a": 1}})
        send.delay(change.document_key["_id"])
        if self.request.retries == 0:
            raise self.retry(countdown=0)

    with BridgeRunner(shop.bridge) as runner:
        shop.data["orders"].insert_one({"_id": 1})
        runner.crash("called", "together")
        calls = runner.deliver().calls
        box.sweep(older_than=0)
        wait_for(lambda: runner.sent("send"))
        runner.assert_enqueued("send", [1], times=1)
    assert [(call.is_retry, call.was_killed) for call in calls] == [(True, False), (False, True)]
    assert [note["order"] for note in mongo_client[shop.name]["notes"].find()] == [1]
    assert shop.copies == [1]


def test_a_list_in_a_transaction_names_its_failed_change(shop: Shop) -> None:
    """And the replay of what was parked, with its key, ends in the transaction of the handler."""
    bad = {2}

    @shop.bridge.on_changes(f"{shop.name}.orders", transactional=True, failure_policy="park_key", partition_by=_one_key)
    async def listed(changes: Changes) -> None:
        for change in changes:
            if change.document_key["_id"] in bad:
                raise changes.failed_at(change) from KeyError("bad")
            await shop.fenced(change).replace_one(change.document_key, {}, upsert=True)

    with BridgeRunner(shop.bridge) as runner:
        shop.data["orders"].insert_many([{"_id": key} for key in (1, 2, 3)])
        runner.deliver(raises=False)
        letters = shop.bridge.operations.find_dead_letters().letters
        assert [letter.attempts for letter in letters] == [1, 0]
        bad.clear()
        shop.bridge.operations.replay_dead_letters(ids=[letters[0].document_id]).run()
        wait_for(lambda: runner.deliver() and not shop.bridge.operations.find_dead_letters().letters)
    assert shop.copies == [1, 2, 3]


def _one_key(_: Any) -> str:
    return "one"
