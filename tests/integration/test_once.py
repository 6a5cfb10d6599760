"""What has run under an id does not run again: ids and keys, marks in a transaction, claims, results and faults."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from celery.exceptions import Retry, SoftTimeLimitExceeded
from pymongo import AsyncMongoClient
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import OperationFailure

from mongo_celery import Bridge, Change, OutboxCollection, TwoPhaseCommit, once, transactional
from mongo_celery.errors import ConfigurationError
from mongo_celery.locking import after_commit
from mongo_celery.testing import BridgeRunner
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.mongo import Document, MakeClient
from tests.fixtures.process import wait_for
from tests.rig.commands import CommandRecorder

Run = Callable[..., Any]


@pytest.fixture
def app() -> Iterator[Celery]:
    with Celery("once", broker="memory://", set_as_current=False) as made:
        yield made


def run(task: Any, task_id: str = "t1", *args: object) -> Any:
    return task.apply(args=args, task_id=task_id, throw=True).result


@pytest.mark.parametrize("with_session", [False, True])
def test_what_has_run_under_an_id_does_not_run_again(
    app: Celery, database: Database[Document], with_session: bool
) -> None:
    """A failure leaves no record. With a session its effect is gone, too, and Celery sees no parameter `session`."""
    effects, fails = database.create_collection("effects"), [ValueError("no")]

    def pay(amount: int) -> str:
        return pay_within(amount, session=None)

    def pay_within(amount: int, *, session: Any) -> str:
        effects.insert_one({"amount": amount}, session=session)
        if fails:
            raise fails.pop()
        return f"paid {amount}"

    task = app.task(shared=False)(once(lambda: database["done"])(pay_within if with_session else pay))
    with pytest.raises(ValueError):  # noqa: PT011
        run(task, "t1", 5)
    assert [run(task, task_id, 5) for task_id in ("t1", "t1", "t2")] == ["paid 5"] * 3
    assert effects.count_documents({}) == (2 if with_session else 3)
    assert {each["_id"]: each["state"] for each in database["done"].find()} == {"t1": "done", "t2": "done"}
    assert database["done"].index_information()["expires-at"]["expireAfterSeconds"] == 0
    if with_session:
        with pytest.raises(TypeError):
            task.delay()


@pytest.mark.parametrize("with_session", [False, True])
def test_a_duplicate_of_what_runs_is_retried_later_and_one_of_what_crashed_runs(
    app: Celery, marks: Collection[Document], with_session: bool
) -> None:
    """A live claim keeps it away; a lapsed one does not. A deploy may have added the session meanwhile."""
    effects = marks.database.create_collection("effects")

    def pay() -> None:
        pay_within(session=None)

    def pay_within(*, session: Any) -> None:
        effects.insert_one({}, session=session)

    task = app.task(shared=False)(once(marks, claim_ttl=3600)(pay_within if with_session else pay))
    hold(marks, 3600)
    with pytest.raises(Retry):
        run(task)
    assert effects.count_documents({}) == 0
    hold(marks, -1)
    run(task)
    run(task)
    assert effects.count_documents({}) == 1


def test_two_tasks_with_one_key_each_run_once(app: Celery, database: Database[Document]) -> None:
    """A key is the task's own, and what a message runs a direct call of the task does not run again."""
    runs: list[str] = []

    @app.task(shared=False, name="pay")
    @once(database["done"], key=lambda order: order)
    def pay(order: int) -> str:
        runs.append(f"pay {order}")
        return "paid"

    @app.task(shared=False, name="ship", autoretry_for=(ConnectionError,))
    @once(database["done"], key=lambda order: order)
    def ship(order: int) -> str:
        runs.append(f"ship {order}")
        return "shipped"

    assert [run(pay, "t1", 1), run(ship, "t2", 1), run(pay, "t3", 1), run(ship, "t4", 1)] == [
        *("paid", "shipped"),
        *("paid", "shipped"),
    ]
    assert [pay(1), ship(1), pay(2)] == ["paid", "shipped", "paid"]
    assert runs == ["pay 1", "ship 1", "pay 2"]
    stored = [mark["_id"] for mark in database["done"].find().sort("_id", 1)]
    assert stored == [{"t": "pay", "k": 1}, {"t": "pay", "k": 2}, {"t": "ship", "k": 1}]


def test_steps_that_a_task_calls_have_records_of_their_own(app: Celery, database: Database[Document]) -> None:
    """P1: under the task's name or id, the second step would not run. A duplicate of a step ends no task."""
    done = database["done"]

    @once(done, key=lambda order: order)
    def reserve(_order: int) -> object:
        return object()

    @once(done, key=lambda order: order)
    def charge(_order: int) -> str:
        return "charged"

    @once(done)
    def mail(_to: str) -> None: ...

    @app.task(shared=False)
    def order(number: int) -> str:
        reserve(number)
        return str(charge(number))

    @app.task(shared=False)
    def notify() -> None:
        mail("ann")

    assert [run(order, "t1", 1), run(order, "t2", 1)] == ["charged"] * 2
    with pytest.raises(ConfigurationError):
        run(notify, "t3")


def test_a_key_that_no_mark_can_have_is_refused_and_none_asks_for_no_mark(database: Database[Document]) -> None:
    runs: list[object] = []

    @once(database["done"], key=lambda order: order)
    def keyed(order: object) -> None:
        runs.append(order)

    for wrong in (object(), 2**70, "\ud800", {1: 2}):
        with pytest.raises(ConfigurationError):
            keyed(wrong)
    for order in (None, None, ["a", 1], ("a", 1), "$where", "$where", re.compile("a"), re.compile("a")):
        keyed(order)
    assert runs == [None, None, ["a", 1], "$where", re.compile("a")]


def test_a_handler_of_a_bridge_needs_a_key(app: Celery, database: Database[Document], mongo_url: str) -> None:
    """Several changes may come with one message: by its id, the second one would not be handled."""
    bridge, source = Bridge(app, mongo_url, name="once", autodiscover=False, partitions=1), f"{database.name}.orders"
    tokens: list[object] = []

    @bridge.on_change(source, failure_policy="dead_letter")
    @once(database["done"])
    def by_message(_change: Change) -> None:
        tokens.append("by message")

    @bridge.on_change(source)
    @once(database["done"], key=lambda change: change.resume_token)
    def by_change(change: Change) -> None:
        tokens.append(change.document_key["_id"])

    with BridgeRunner(bridge, url=mongo_url) as runner:
        database["orders"].insert_many([{"_id": 1}, {"_id": 2}])
        failures = runner.deliver(raises=False).failures
    assert [type(each.error) for each in failures] == [ConfigurationError] * 2
    assert tokens == [1, 2]


def test_a_result_that_cannot_be_remembered_ends_a_duplicate_without_successors(
    app: Celery, database: Database[Document]
) -> None:
    """In a worker; a direct call gets None, and one of a busy id an error instead of a message nobody asked for."""

    @app.task(shared=False)
    @once(database["done"])
    def large() -> str:
        return "x" * 2**21

    @once(database["done"], key=lambda order: order)
    def keyed(order: int) -> object:
        return object() if order == 1 else order

    run(large, "t1")
    assert str(large.apply(task_id="t1").state) == "IGNORED"
    assert [isinstance(keyed(1), object), keyed(1), keyed(2), keyed(2)] == [True, None, 2, 2]

    running = {"state": "running", "owner": 1, "until": {"$add": ["$$NOW", 60_000]}}
    database["done"].update_one({"_id.k": 2}, [{"$set": running}])
    with pytest.raises(ConfigurationError):
        keyed(2)


def test_wrong_use_is_refused_when_the_decorator_runs(app: Celery, database: Database[Document]) -> None:
    outbox, done = OutboxCollection(app, database["outbox"], sweep_every=None), database["done"]

    @app.task(shared=False)
    def send() -> None: ...

    async def coroutine() -> None: ...

    def generator() -> Iterator[int]:
        yield 1

    wrong: list[Callable[[], object]] = [
        lambda: once("done"),  # type: ignore[arg-type]
        lambda: once(done, outbox=outbox)(lambda: None),  # takes no session
        lambda: once(done, outbox="outbox")(lambda session: session),  # type: ignore[arg-type]
        *(partial(once(done), each) for each in (send, coroutine, generator, int)),
    ]
    for decorate in wrong:
        with pytest.raises(ConfigurationError):
            decorate()


def test_a_result_is_kept_as_json_alone(
    app: Celery, database: Database[Document], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever an app's serializers are; times, ids and numbers that Celery's JSON knows come back as they were."""
    app.conf.update(result_serializer="pickle", task_serializer="pickle", accept_content=["pickle"])
    now = datetime.now(UTC)

    @once(lambda: database["done"], key=repr)
    def give(result: Any) -> Any:
        return result

    values = [None, "a\ud800\0", [1, {"at": now}], now, uuid4()]
    assert [give(each) for each in values] == [give(each) for each in values] == values
    assert [give({1, 2}), give({1, 2}), give({3})] == [{1, 2}, None, {3}]
    assert {type(record.get("result")) for record in database["done"].find()} == {str, type(None)}
    assert [each.__dict__["event"] for each in caplog.records] == ["result_not_kept"]


def test_a_record_is_committed_and_aborted_with_a_transaction_of_the_driver(database: Database[Document]) -> None:
    """P18: no record stays of an effect that is gone, whether the transaction is aborted, repeated, or a step fails."""
    effects, done = database.create_collection("effects"), database.create_collection("done")
    repeated = OperationFailure("repeated", 112, {"errorLabels": ["TransientTransactionError"]})
    fails: list[Exception] = [ValueError("the step"), ValueError("aborted"), repeated]

    @once(done, key=lambda _session: 1)
    def step(given: Any) -> None:
        effects.insert_one({"what": "step"}, session=given)
        if len(fails) == 3:
            raise fails.pop(0)

    def body(session: ClientSession) -> None:
        step(session)
        if fails:
            raise fails.pop(0)

    with database.client.start_session() as session:
        for _ in range(2):
            with pytest.raises(ValueError):  # noqa: PT011
                session.with_transaction(body)
            assert (effects.count_documents({}), done.count_documents({})) == (0, 0)
        for _ in range(2):
            session.with_transaction(body)
        assert (effects.count_documents({}), done.count_documents({})) == (1, 1)
        done.delete_many({})
        fails += [ValueError("the step")] * 3
        with session.start_transaction(), pytest.raises(ValueError):  # noqa: PT011
            step(session)
    assert (effects.count_documents({}), done.count_documents({})) == (2, 0), "the driver commits what is there"


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_commit_whose_answer_is_lost_with_its_transaction_has_run(
    app: Celery, database: Database[Document], monkeypatch: pytest.MonkeyPatch, *, is_kept: bool
) -> None:
    """
    The server has committed, and when the commit is repeated it no longer knows the transaction.

    The call returns its result, also one that cannot be stored. Otherwise its task's links would never be sent.
    """
    effects, commit, lost = database.create_collection("effects"), ClientSession.commit_transaction, [1]

    def commit_and_forget(self: ClientSession) -> None:
        commit(self)
        if lost:
            lost.pop()
            raise OperationFailure("gone", 251, {"errorLabels": ["TransientTransactionError"]})

    @app.task(shared=False)
    @once(database["done"])
    def pay(amount: int, *, session: Any) -> Any:
        paid = effects.insert_one({"amount": amount}, session=session).inserted_id
        return str(paid) if is_kept else {paid}

    database["done"].insert_one({"_id": "its index"})
    monkeypatch.setattr(ClientSession, "commit_transaction", commit_and_forget)
    paid = run(pay, "t1", 5)
    assert lost == []
    assert [str(each["_id"]) if is_kept else {each["_id"]} for each in effects.find()] == [paid]


def test_a_record_cannot_be_part_of_an_async_transaction(database: Database[Document], mongo_url: str) -> None:
    """It is refused there; after the commit, or in a thread of its own, it is in no transaction."""
    steps: list[str] = []

    @once(database["done"], key=lambda what: what)
    def step(what: str) -> None:
        steps.append(what)

    async def body(_session: Any) -> None:
        with pytest.raises(ConfigurationError):
            step("inside")
        await asyncio.to_thread(step, "in a thread")
        after_commit(lambda: step("after it"))

    async def run_body() -> None:
        async with AsyncMongoClient[Document](mongo_url) as client:
            await transactional(client).arun(body)

    asyncio.run(run_body())
    assert steps == ["in a thread", "after it"]


def test_a_handler_of_a_whole_database_is_not_fed_by_its_own_records(
    app: Celery, database: Database[Document], mongo_url: str
) -> None:
    """P9: each idempotency record and each transfer would start the handler that makes the next one."""
    bridge, seen = Bridge(app, mongo_url, name="once", autodiscover=False, partitions=1), list[str]()
    bank = TwoPhaseCommit(app, database["transfers"])
    database["accounts"].insert_many([{"_id": "A", "balance": 10}, {"_id": "B", "balance": 0}])

    @once(database["done"], key=lambda change: change.document_key["_id"])
    def pay(_change: Change) -> None:
        bank.transfer("A", "B", 1)

    @bridge.on_change(f"{database.name}.*")
    def wide(change: Change) -> None:
        seen.append(change.ns["coll"])
        if change.ns["coll"] != "accounts":
            pay(change)

    with BridgeRunner(bridge, url=mongo_url) as runner:
        database["orders"].insert_one({"_id": 1})
        runner.deliver(limit=20)
    assert seen == ["orders", "accounts", "accounts"]


APP_NAME = "once-faults"


@pytest.fixture
def marks(database: Database[Document], make_client: MakeClient) -> Collection[Document]:
    """The collection of marks, by a client that failpoints can tell from others; its index is made."""
    opened = make_client(appname=APP_NAME)[database.name]["done"]

    @once(opened, key=lambda: "warm")
    def warm() -> None: ...

    warm()
    return opened


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.__dict__["event"] for each in caplog.records if "event" in each.__dict__]


def mark_of(marks: Collection[Document]) -> Document:
    return marks.find_one({"_id": "t1"}) or {}


def hold(marks: Collection[Document], seconds: float) -> None:
    """A run of somebody else, which is claimed for so long, or was so long ago."""
    marks.replace_one({"_id": "t1"}, {"state": "running", "owner": 1}, upsert=True)
    marks.update_one({"_id": "t1"}, [{"$set": {"until": {"$add": ["$$NOW", round(seconds * 1000)]}}}])


def test_a_run_keeps_its_mark_for_as_long_as_it_takes(
    app: Celery, marks: Collection[Document], failpoint: Failpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """It is renewed beyond its first time, also after MongoDB has refused one renewal."""

    @app.task(shared=False)
    @once(marks, claim_ttl=1)
    def long() -> None:
        first = mark_of(marks)["until"]
        with failpoint(failCommands=["update"], appName=APP_NAME, errorCode=13):
            wait_for(lambda: "mark_renewal_failed" in events(caplog))
        wait_for(lambda: (mark_of(marks)["until"] - first).total_seconds() > 1)

    run(long)
    assert mark_of(marks)["state"] == "done"
    assert set(events(caplog)) == {"mark_renewal_failed"}


def test_a_run_that_was_taken_over_says_so_and_leaves_the_mark_to_the_other(
    app: Celery, marks: Collection[Document], caplog: pytest.LogCaptureFixture
) -> None:
    """A process that stood still cannot be kept from this without a transaction; its result is its own."""
    fails = [LookupError()]

    @app.task(shared=False)
    @once(marks, claim_ttl=3600)
    def short() -> str:
        hold(marks, 3600)
        if fails:
            raise fails.pop()
        return "mine"

    with pytest.raises(LookupError):
        run(short)
    assert events(caplog) == ["mark_lost"]
    marks.delete_one({"_id": "t1"})
    assert run(short) == "mine"
    assert events(caplog) == ["mark_lost", "mark_lost"]
    assert mark_of(marks).items() >= {"state": "running", "owner": 1}.items()


def test_a_failover_between_claim_and_mark_costs_nothing(
    app: Celery, marks: Collection[Document], failpoint: Failpoint
) -> None:
    """Claim and mark are repeated until they are answered; the function is not."""
    runs: list[int] = []

    @app.task(shared=False)
    @once(marks)
    def send() -> str:
        runs.append(1)
        return "sent"

    unanswered = {"appName": APP_NAME, "closeConnection": True, "mode": {"times": 3}}
    with failpoint(failCommands=["findAndModify", "update"], **unanswered):
        assert run(send) == "sent"
    with failpoint(failCommands=["update"], **unanswered):
        assert run(send, "t2") == "sent"
    assert [run(send), run(send, "t2")] == ["sent", "sent"]
    assert runs == [1, 1]


def test_a_mark_that_cannot_be_written_is_logged_and_the_task_has_succeeded(
    app: Celery, marks: Collection[Document], failpoint: Failpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure would be retried, and what the function did with it. The claim keeps duplicates away until it ends."""

    @app.task(shared=False)
    @once(marks)
    def send() -> str:
        return "sent"

    with failpoint(failCommands=["update"], appName=APP_NAME, errorCode=13):
        assert run(send) == "sent"
    assert events(caplog) == ["mark_unwritten"]
    assert caplog.records[-1].levelno == logging.WARNING
    with pytest.raises(Retry):
        run(send)

    with failpoint(failCommands=["findAndModify"], appName=APP_NAME, errorCode=13), pytest.raises(OperationFailure):
        run(send, "t2")


def test_a_soft_time_limit_passes_whatever_it_interrupts(app: Celery, marks: Collection[Document]) -> None:
    """It is Celery's, and no fault of a result that is being encoded."""

    class Interrupted:
        def __json__(self) -> str:
            raise SoftTimeLimitExceeded

    @app.task(shared=False)
    @once(marks)
    def send() -> Interrupted:
        return Interrupted()

    with pytest.raises(SoftTimeLimitExceeded):
        run(send)


def test_of_two_runs_with_a_session_one_commits(
    app: Celery, marks: Collection[Document], make_client: MakeClient
) -> None:
    """A run that stands still keeps its mark by its transaction; the other one waits, and has its result."""
    begun, go, bodies, conflicts = threading.Event(), threading.Event(), list[str](), CommandRecorder()
    marks = make_client(event_listeners=[conflicts])[marks.database.name]["done"]

    @app.task(shared=False)
    @once(marks)
    def pay(*, session: Any) -> int:
        bodies.append("run")
        marks.database["effects"].insert_one({}, session=session)
        begun.set()
        assert go.wait(60)
        return len(bodies)

    marks.database.create_collection("effects")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run, pay)
        assert begun.wait(60)
        second = pool.submit(run, pay)
        wait_for(conflicts.failures.is_set)
        go.set()
        assert [first.result(60), second.result(60)] == [1, 1]
    assert (marks.database["effects"].count_documents({}), bodies) == (1, ["run"])
