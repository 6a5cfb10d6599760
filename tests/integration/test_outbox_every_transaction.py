"""An outbox that stores what the app sends in any open transaction: no call names it."""

from __future__ import annotations

import asyncio
import contextvars
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from celery import Task, chain, chord, group
from celery._state import _task_stack  # type: ignore[attr-defined]
from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import OperationFailure

from mongo_celery import OutboxCollection, transactional
from mongo_celery.errors import OutboxRefusedError, TransactionError
from mongo_celery.locking import after_commit
from mongo_celery.outbox.pending import NOBODY
from mongo_celery.testing import assert_pending
from tests.rig.outbox import Document, Rig, due_again, hold

TRANSIENT: Any = {"errorLabels": ["TransientTransactionError"]}


@pytest.fixture
def outbox(rig: Rig) -> OutboxCollection:
    return rig.messages(every_transaction=True)


def deliver(outbox: OutboxCollection) -> None:
    outbox.sweep(older_than=0)
    assert outbox.status().pending == 0


def test_all_ways_to_send_wait_for_the_commit_and_keep_their_order(rig: Rig, outbox: OutboxCollection) -> None:
    add = rig.add

    def body(session: Any) -> list[str]:
        rig.database["seats"].insert_one({"_id": 1}, session=session)
        ids = [add.delay(0, 0).id, add.apply_async((0, 1), countdown=60, expires=90, link=add.s(7)).id]
        rig.app.send_task("add", args=(0, 2), headers={"tenant": "a"})
        chain(add.s(0, 3), add.s(4)).delay()
        group(add.s(0, each) for each in (4, 5)).delay()
        assert rig.drain() == []
        return ids

    ids = rig.run(body)
    assert len(rig.stored) == 1
    assert_pending(outbox, "add", [0, 1])
    assert rig.drain() == []
    add.delay(9, 9)
    assert rig.sent() == [[9, 9]]
    deliver(outbox)
    messages = rig.drain()
    assert [message.args for message in messages] == [[0, each] for each in range(6)]
    assert [message.id for message in messages[:2]] == ids
    assert all(messages[1].headers[name] for name in ("eta", "expires"))
    assert messages[2].headers["tenant"] == "a"
    assert [len(message.body[2]["callbacks"] or ()) for message in messages[:2]] == [0, 1]


def test_rolled_back_and_repeated_bodies_send_once_or_never(rig: Rig, outbox: OutboxCollection) -> None:
    runs: list[int] = []

    def repeated(_session: Any) -> None:
        runs.append(1)
        rig.add.delay(1, len(runs))
        transactional(rig.database.client).run(lambda _: rig.add.delay(2, len(runs)))
        if len(runs) == 1:
            raise OperationFailure("conflict", 112, TRANSIENT)

    def caught(_session: Any) -> None:
        with suppress(ZeroDivisionError), transactional(rig.database.client):
            rig.add.delay(3, 3)
            raise ZeroDivisionError

    with rig.database.client.start_session() as session:
        for _ in range(2):
            transactional(rig.database.client).run(repeated, session=session)
    with pytest.raises(TransactionError):
        rig.run(caught)
    with suppress(ZeroDivisionError), transactional(rig.database.client):
        rig.add.delay(4, 4)
        raise ZeroDivisionError
    assert len(rig.stored) == 2
    deliver(outbox)
    sent = rig.sent()
    assert sorted(sent) == [[1, 2], [1, 3], [2, 2], [2, 3]]
    assert all(sent.index([1, run]) < sent.index([2, run]) for run in (2, 3))


def test_a_block_is_the_first_use_of_the_collection(rig: Rig, outbox: OutboxCollection) -> None:
    """A snapshot that is older than the collection or its index would be refused, and a block is not repeated."""
    with transactional(rig.database.client) as session:
        rig.database["seats"].find_one(session=session)
        rig.add.delay(1, 1)
    deliver(outbox)
    assert rig.sent() == [[1, 1]]


@pytest.mark.parametrize("is_named", [False, True])
def test_an_independent_transaction_has_its_own_fate(rig: Rig, outbox: OutboxCollection, is_named: bool) -> None:
    """And a callback after its commit is outside of the outer one."""

    def inner(_session: Any) -> None:
        rig.add.delay(2, 2)
        after_commit(lambda: rig.add.delay(3, 3))

    named: Any = {"outbox": outbox} if is_named else {}
    with suppress(ZeroDivisionError), transactional(rig.database.client, **named):
        rig.add.delay(1, 1)
        transactional(rig.database.client, independent=True, **named).run(inner)
        assert rig.sent() == [[3, 3]]
        raise ZeroDivisionError
    deliver(outbox)
    assert rig.sent() == [[2, 2]]


def test_asyncio_transactions_store_what_their_tasks_send(rig: Rig, outbox: OutboxCollection, mongo_url: str) -> None:
    runs: list[int] = []

    async def main() -> None:
        async with AsyncMongoClient[Document](mongo_url) as client:
            ended = asyncio.Event()

            async def send(*numbers: int) -> None:
                rig.add.delay(*numbers)

            async def late() -> None:
                await ended.wait()
                rig.add.delay(9, 9)

            async def body(session: Any) -> asyncio.Task[None]:
                runs.append(1)
                await client[rig.database.name]["seats"].insert_one({}, session=session)
                rig.add.delay(1, len(runs))
                await asyncio.gather(send(2, 1), send(2, 2))
                if len(runs) == 1:
                    raise OperationFailure("conflict", 112, TRANSIENT)
                return asyncio.create_task(late())

            outliving = await transactional(client).arun(body)
            with suppress(ZeroDivisionError):
                async with transactional(client):
                    await send(3, 3)
                    raise ZeroDivisionError
            async with transactional(client):
                await send(4, 4)
                ended.set()
                await outliving

    asyncio.run(main())
    assert rig.sent() == [[9, 9]]
    assert [each["pendingEvents"]["count"] for each in rig.stored] == [3, 1]
    deliver(outbox)
    assert [each for each in rig.sent() if each != [4, 4]] == [[1, 2], [2, 1], [2, 2]]


def test_what_cannot_be_stored_is_refused_when_it_is_sent(rig: Rig, outbox: OutboxCollection, mongo_url: str) -> None:
    big = "x" * 9_000_000

    def body(_session: Any) -> None:
        with pytest.raises(OutboxRefusedError):
            rig.add.delay(object(), 1)
        with pytest.raises(OutboxRefusedError):
            chord([rig.add.s(1, 1)], rig.total.s()).delay()
        send: Any = rig.app.send_task
        with pytest.raises(OutboxRefusedError):
            send("add", (1, 1), connection=object())
        waits = [rig.add.delay(1, 1), chain(rig.add.s(1, 2), rig.add.s(3)).delay(), group(rig.add.s(1, 3)).delay()]
        for each in waits:
            with pytest.raises(OutboxRefusedError):
                each.get(timeout=0.1)

    rig.run(body)
    deliver(outbox)
    assert rig.sent() == [[1, 1], [1, 2], [1, 3]]

    def too_large(_session: Any) -> None:
        rig.add.delay(big, 1)
        rig.add.delay(big, 2)

    with pytest.raises(OutboxRefusedError):
        rig.run(too_large)

    async def too_late() -> None:
        async with AsyncMongoClient[Document](mongo_url) as client, transactional(client):
            rig.add.delay(big, 1)
            rig.add.delay(big, 2)

    with pytest.raises(OutboxRefusedError):
        asyncio.run(too_late())
    assert rig.stored == []


def test_eager_tasks_run_in_the_body_and_keys_are_chosen_by_collect(rig: Rig, outbox: OutboxCollection) -> None:
    def body(session: Any) -> None:
        with outbox.collect(session, key="a"):
            rig.add.delay(1, 1)
        rig.app.conf.task_always_eager = True
        assert chain(rig.add.s(1, 2), rig.add.s(1)).delay().get() == 4

    rig.run(body)
    assert_pending(outbox, "add", [1, 1], place="a")
    assert len(rig.stored) == 1


class Once(Task):  # type: ignore[type-arg]
    """As celery-singleton and others: a lock is taken when a task is sent."""

    locks: set[Any]

    def apply_async(self, args: Any = None, *given: Any, **options: Any) -> Any:
        assert tuple(args) not in self.locks
        self.locks.add(tuple(args))
        return super().apply_async(args, *given, **{**options, "headers": {"locked": True}})


def _nothing(_number: int) -> None: ...


def test_a_task_class_that_sends_in_its_own_way_runs_once(rig: Rig, outbox: OutboxCollection) -> None:
    task: Any = rig.app.task(name="once", base=Once, shared=False, expires=60)(_nothing)
    task.locks = set()

    def body(_session: Any) -> None:
        task.delay(1)
        task.apply_async((2,), countdown=1, expires=None)
        group(task.s(3)).delay()
        rig.app.send_task("pickled", args=(4,), serializer="pickle")

    rig.run(body)
    deliver(outbox)
    *messages, by_name = rig.drain()
    assert isinstance(by_name.body, bytes)
    assert [message.args for message in messages] == [[1], [2], [3]]
    assert all(message.headers["locked"] for message in messages)
    assert [bool(message.headers["expires"]) for message in messages] == [True, False, True]


def test_options_about_the_sending_itself_do_not_keep_a_message_from_the_broker(
    rig: Rig, outbox: OutboxCollection
) -> None:
    """The dispatcher has its own connection and repetitions. Whatever else the user gives reaches the worker."""
    policy = {"max_retries": 3, "errback": print}
    rig.app.conf.task_routes = {"routed.*": {"queue": "routed"}}
    shown: Any = {"shadow": "shown", "ignore_result": True, "reply_to": "me", "root_id": "root", "parent_id": "parent"}
    add: Any = rig.add
    send: Any = rig.app.send_task

    def body(_session: Any) -> None:
        add.apply_async((1, 1), retry=True, retry_policy=policy, timeout=3.0, confirm_timeout=3.0)
        add.apply_async((1, 2), producer=object(), add_to_parent=False, **shown)
        send("add", (1, 3), retry=False, publisher=object(), result_cls=rig.app.AsyncResult)
        chain(add.s(1, 4), add.s(1)).apply_async(retry=True, retry_policy={"max_retries": 3})
        add.apply_async((1, 5), eta=datetime(2030, 1, 1, tzinfo=UTC), expires=datetime(2031, 1, 1, tzinfo=UTC))
        add.apply_async((1, 6), route_name="routed.add")

    rig.run(body)
    deliver(outbox)
    messages = rig.drain()
    assert [message.args for message in messages] == [[1, each] for each in range(1, 6)]
    assert {name: messages[1].headers.get(name) for name in shown if name != "reply_to"} == {
        name: value for name, value in shown.items() if name != "reply_to"
    }
    assert [messages[4].headers[name][:4] for name in ("eta", "expires")] == ["2030", "2031"]
    assert [message.args for message in rig.drain("routed")] == [[1, 6]]


def test_tasks_of_another_app_are_sent_by_name(rig: Rig, outbox: OutboxCollection) -> None:
    """No process of this app knows them, so none may wait for such a process. One that this app knew still waits."""

    def body(_session: Any) -> None:
        rig.app.send_task("elsewhere.ship", args=(1, 1), link=rig.app.signature("elsewhere.bill"))
        rig.add.delay(2, 2)

    rig.run(body)
    deliver(outbox)
    assert rig.sent() == [[1, 1], [2, 2]]
    rig.run(lambda _: rig.app.send_task("elsewhere.ship", args=(4, 4)))
    for identity in rig.database["outbox"].distinct("_id"):
        hold(rig.database["outbox"], identity, owner=NOBODY)
    assert outbox.runtime.find_unknown_tasks() == [], "it waits for the broker"
    due_again(rig.database["outbox"])
    deliver(outbox)
    assert rig.sent() == [[4, 4]]
    rig.run(lambda _: rig.app.send_task("add", args=(3, 3)))
    rig.app.tasks.pop("add")
    outbox.sweep(older_than=0)
    assert [each.name for each in outbox.runtime.find_unknown_tasks()] == ["add"]
    assert rig.sent() == []


def test_what_outlives_its_body_is_refused(rig: Rig) -> None:
    """It would be lost in silence, or be sent without the commit that it belongs to."""
    with rig.database.client.start_session() as session, session.start_transaction():
        with rig.messages().collect(session):
            copied = contextvars.copy_context()
        with pytest.raises(OutboxRefusedError):
            copied.run(rig.add.delay, 1, 1)


def test_a_running_task_that_continues_is_sent_at_once(rig: Rig, outbox: OutboxCollection) -> None:
    """What `retry` and `replace` raise aborts the transaction: stored with it they would be lost."""
    add, running = rig.add, rig.total
    running.push_request(id="mine", called_directly=False, root_id="mine", children=[])  # as a worker begins one
    _task_stack.push(running)
    try:
        with transactional(rig.database.client):
            add.s(1, 1).set(task_id="mine").apply_async()
            chain(add.s(1, 1), add.s(2).set(task_id="mine")).apply_async()
            assert rig.sent() == [[1, 1], [1, 1]]
            result, trail = add.delay(5, 5), list[Any](running.request.children or ())
            assert trail[-1].id == result.id
    finally:
        _task_stack.pop()
        running.pop_request()
    deliver(outbox)
    assert rig.sent() == [[5, 5]]


def test_a_transaction_of_a_cluster_without_an_outbox_refuses(rig: Rig, standalone_url: str) -> None:
    """Both or neither is impossible there. What is made for a cluster serves it, whichever was made first."""
    with MongoClient[Document](standalone_url) as elsewhere:
        rig.messages(elsewhere[rig.database.name]["outbox"], every_transaction=True)

        def refused(_session: Any) -> None:
            with pytest.raises(OutboxRefusedError):
                rig.add.delay(1, 1)
            after_commit(lambda: rig.add.delay(2, 2))

        rig.run(refused)
        assert rig.sent() == [[2, 2]]
        outbox = rig.messages(every_transaction=True)
        rig.run(lambda _: rig.add.delay(3, 3))
        deliver(outbox)
        assert rig.sent() == [[3, 3]]
