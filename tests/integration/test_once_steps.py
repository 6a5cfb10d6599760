"""`once` around a step, which a handler, a task or a transaction calls: its caller continues, and loses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from pymongo import AsyncMongoClient
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import OperationFailure

from mongo_celery import Bridge, Change, Changes, TwoPhaseCommit, once, transactional
from mongo_celery.errors import ConfigurationError
from mongo_celery.locking import after_commit, current
from mongo_celery.testing import BridgeRunner

Document = dict[str, Any]


class Shop:
    """An app with a bridge; `run` notes names in the collection `notes`, with or without a session."""

    def __init__(self, database: Database[Document], url: str) -> None:
        self.database = database
        self.url = url
        self.app = Celery("shop", broker="memory://", set_as_current=False)
        self.bridge = Bridge(self.app, url, name=f"b{uuid4().hex[:8]}", autodiscover=False, partitions=1)

    def collection(self, name: str) -> Collection[Document]:
        """By the bridge's own client."""
        return self.bridge.client[self.database.name][name]

    def note(self, what: str, session: Any = None) -> None:
        self.collection("notes").insert_one({"what": what}, session=session)

    @property
    def notes(self) -> list[str]:
        return sorted(each["what"] for each in self.database["notes"].find())

    def runner(self) -> BridgeRunner:
        return BridgeRunner(self.bridge, url=self.url)


@pytest.fixture
def shop(database: Database[Document], mongo_url: str) -> Iterator[Shop]:
    database.create_collection("notes")
    made = Shop(database, mongo_url)
    yield made
    made.app.close()


def events(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.__dict__.get("event") == name]


def test_a_duplicate_of_a_step_lets_its_caller_continue(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """P1: a result that no JSON can have ends no handler, no list, no transaction and no task; it is named once."""
    source = shop.database["orders"].full_name

    @once(lambda: shop.collection("done"), key=lambda number: number)
    def greet(number: int) -> object:
        shop.note(f"greeted {number}")
        return shop

    @once(lambda: shop.collection("done"), key=lambda number, caller: [number, caller])
    def book(number: int, caller: str, *, session: Any) -> object:
        shop.note(f"booked {number} for {caller}", session)
        return session

    @shop.bridge.on_change(source, name="plain")
    def plain(change: Change) -> None:
        greet(change.document_key["_id"])
        shop.note(f"plain {change.operation_type}")

    @shop.bridge.on_changes(source, name="listed")
    def listed(changes: Changes) -> None:
        for change in changes:
            greet(change.document_key["_id"])
            shop.note("listed")

    @shop.bridge.on_change(source, name="whole", transactional=True)
    def whole(change: Change) -> None:
        book(change.document_key["_id"], "handler")
        shop.note(f"whole {change.operation_type}", change.session)

    @shop.app.task(name="ship", shared=False)
    def ship(number: int) -> None:
        greet(number)
        shop.note("shipped")

    @shop.app.task(name="bill", shared=False)
    @transactional(lambda: shop.bridge.client)
    def bill(number: int, *, session: Any) -> None:
        book(number, "task")
        shop.note("billed", session)

    with shop.runner() as runner:
        shop.database["orders"].insert_one({"_id": 1})
        shop.database["orders"].replace_one({"_id": 1}, {"n": 2})
        runner.deliver()
        for _ in range(2):
            ship.delay(1)
            bill.delay(1)
        runner.run_tasks()
    assert shop.notes == [
        *("billed", "billed", "booked 1 for handler", "booked 1 for task", "greeted 1"),
        *("listed", "listed"),
        *("plain insert", "plain replace", "shipped", "shipped", "whole insert", "whole replace"),
    ]
    named = events(caplog, "result_not_kept")
    assert sorted(("greet" in each, "book" in each) for each in named) == [(False, True), (True, False)]


def test_a_step_needs_a_key(shop: Shop) -> None:
    """By its task's id all calls but the first one would be duplicates; a direct call and a task's own need none."""

    @once(lambda: shop.collection("done"))
    def mail(to: str) -> None:
        shop.note(to)

    @shop.app.task(name="notify", shared=False)
    def notify() -> None:
        for to in ("ann", "bob"):
            mail(to)

    with pytest.raises(ConfigurationError, match="key="):
        notify.apply(throw=True)
    mail("eve")
    assert shop.notes == ["eve"]


def test_a_result_is_kept_as_json_alone(shop: Shop) -> None:
    """Whatever an app's serializers are; times, ids and numbers that Celery's JSON knows come back as they were."""
    shop.app.conf.update(result_serializer="pickle", task_serializer="pickle", accept_content=["pickle"])
    now = datetime.now(UTC)

    @once(lambda: shop.collection("done"), key=repr)
    def give(result: Any) -> Any:
        return result

    values = [None, "a\ud800\0", [1, {"at": now}], now, uuid4()]
    assert [give(each) for each in values] == [give(each) for each in values] == values
    assert [give({1, 2}), give({1, 2})] == [{1, 2}, None]
    kept = {type(record.get("result")) for record in shop.database["done"].find()}
    assert kept == {str, type(None)}


def test_waiting_for_another_run_uses_up_no_retries_of_a_handler(shop: Shop) -> None:
    """Nor of a list; what fails afterwards has all of them."""
    source, starts, failing = shop.database["orders"].full_name, list[tuple[str, int]](), ["plain"]

    @once(lambda: shop.collection("done"), key=lambda name: name)
    def effect(name: str) -> None:
        if name in failing:
            failing.remove(name)
            raise OSError("the service is away")
        shop.note(name)

    def begin(name: str, task: Any) -> None:
        starts.append((name, task.request.retries))
        if starts.count((name, 0)) == 3:
            shop.database["done"].update_one({"_id.k": name}, [{"$set": {"until": "$$NOW"}}])
        effect(name)

    options: dict[str, Any] = {"autoretry_for": (Exception,), "max_retries": 1, "failure_policy": "dead_letter"}

    @shop.bridge.on_change(source, name="plain", bind=True, **options)
    def plain(self: Any, _change: Change) -> None:
        begin("plain", self)

    @shop.bridge.on_changes(source, name="listed", bind=True, **options)
    def listed(self: Any, _changes: Changes) -> None:
        begin("listed", self)

    step = f"{effect.__module__}.{effect.__qualname__}"
    held = {"state": "running", "owner": 1}
    shop.database["done"].insert_many([{"_id": {"t": step, "k": name}, **held} for name in ("plain", "listed")])
    shop.database["done"].update_many({}, [{"$set": {"until": {"$add": ["$$NOW", 3_600_000]}}}])
    with shop.runner() as runner:
        shop.database["orders"].insert_many([{"_id": 1}, {"_id": 2}])
        delivered = runner.deliver()
    assert (delivered.failures, delivered.standing, shop.notes) == ((), (), ["listed", "plain"])
    assert [retries for name, retries in starts if name == "plain"] == [0, 0, 0, 1, 0]
    assert [retries for name, retries in starts if name == "listed"] == [0, 0, 0, 0]


def make_step(shop: Shop, by: str) -> Callable[[Any], object]:
    """A step that learns of its transaction by `current`, by a session among its arguments, or by its own `session`."""
    done = partial(shop.collection, "done")
    if by == "current":
        alone = once(done, key=lambda: 1)(lambda: shop.note("step", current(shop.bridge.client)))
        return lambda _session: alone()
    if by == "argument":
        return once(done, key=lambda _given: 1)(lambda given: shop.note("step", given))
    own = once(done, key=lambda: 1)(lambda *, session: shop.note("step", session))
    return lambda session: own(session=session)


@pytest.mark.parametrize(
    ("by", "of_the_driver"),
    [("current", False), ("argument", False), ("argument", True), ("session", False), ("session", True)],
)
def test_a_record_is_committed_and_aborted_with_the_transaction_around_it(
    shop: Shop, by: str, of_the_driver: bool
) -> None:
    """P18: no record stays of an effect that is gone, whether the transaction is aborted or repeated."""
    step = make_step(shop, by)
    shop.database.create_collection("done")
    failing: list[Exception] = [ValueError("aborted"), OperationFailure("repeated", 112, CONFLICT)]

    def body(session: Any) -> None:
        step(session)
        if failing:
            raise failing.pop(0)

    def run() -> None:
        if not of_the_driver:
            transactional(shop.bridge.client).run(body)
            return
        with shop.bridge.client.start_session() as session:
            session.with_transaction(body)

    with pytest.raises(ValueError, match="aborted"):
        run()
    assert (shop.notes, shop.database["done"].count_documents({})) == ([], 0)
    run()
    run()
    assert (shop.notes, shop.database["done"].count_documents({})) == (["step"], 1)


CONFLICT = {"errorLabels": ["TransientTransactionError"]}


def test_a_step_that_failed_leaves_no_record_in_a_transaction_of_the_driver(shop: Shop) -> None:
    """The driver knows nothing of parts: it commits what is there, if the error is caught."""
    shop.database.create_collection("done")

    @once(lambda: shop.collection("done"), key=lambda _session: 1)
    def step(_session: Any) -> None:
        raise ValueError("no")

    with shop.bridge.client.start_session() as session, session.start_transaction():
        with pytest.raises(ValueError, match="no"):
            step(session)
        shop.note("caught", session)
    assert (shop.notes, shop.database["done"].count_documents({})) == (["caught"], 0)


def test_a_record_cannot_be_part_of_an_async_transaction(shop: Shop) -> None:
    """It is refused there; after the commit, or in a thread of its own, it is in no transaction."""

    @once(lambda: shop.collection("done"), key=lambda what: what)
    def step(what: str) -> None:
        shop.note(what)

    async def body(_session: Any) -> None:
        with pytest.raises(ConfigurationError, match="after_commit"):
            step("inside")
        await asyncio.to_thread(step, "in a thread")
        after_commit(lambda: step("after it"))

    async def run() -> None:
        async with AsyncMongoClient[Document](shop.url) as client:
            await transactional(client).arun(body)

    asyncio.run(run())
    assert shop.notes == ["after it", "in a thread"]


def test_a_handler_of_a_whole_database_is_not_fed_by_its_own_steps(shop: Shop) -> None:
    """Neither by idempotency records nor by transfers and their recoveries; a handler that names them gets them."""
    name, seen, named = shop.database.name, list[str](), list[str]()
    bank = TwoPhaseCommit(shop.app, lambda: shop.collection("transfers"), accounts=lambda: shop.collection("accounts"))

    @once(lambda: shop.collection("done"), key=lambda change: change.resume_token["_data"])
    def step(_change: Change) -> None:
        bank.transfer("A", "B", 1)
        bank.recover()

    @shop.bridge.on_change(f"{name}.*", name="all")
    def wide(change: Change) -> None:
        seen.append(change.ns["coll"])
        if change.ns["coll"] == "orders":
            step(change)

    @shop.bridge.on_change(f"{name}.done", f"{name}.transfers", f"{name}.transactionRecoveries", name="named")
    def narrow(change: Change) -> None:
        named.append(change.ns["coll"])

    shop.database["accounts"].insert_many([{"_id": "A", "balance": 10}, {"_id": "B", "balance": 0}])
    with shop.runner() as runner:
        shop.database["orders"].insert_one({"_id": 1})
        runner.deliver(limit=50)
    assert seen == ["orders", "accounts", "accounts"]
    assert set(named) == {"done", "transfers", "transactionRecoveries"}
