"""What has run under an id does not run again: ids and keys, marks in a transaction, claims, and results."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery
from celery._state import _task_stack  # type: ignore[attr-defined] # what current_task looks at
from celery.exceptions import Retry
from pymongo.database import Database

from mongo_celery import Bridge, Change, OutboxCollection, once
from mongo_celery.errors import ConfigurationError

Document = dict[str, Any]
Run = Callable[..., Any]


@pytest.fixture
def app() -> Iterator[Celery]:
    with Celery("once", broker="memory://", set_as_current=False) as made:
        yield made


def run(task: Any, task_id: str, *args: object) -> Any:
    """Run a task as a worker does, under an id; what it raises is raised here."""
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
    with pytest.raises(ValueError, match="no"):
        run(task, "t1", 5)
    assert [run(task, task_id, 5) for task_id in ("t1", "t1", "t2")] == ["paid 5"] * 3
    assert effects.count_documents({}) == (2 if with_session else 3)
    assert {each["_id"]: each["state"] for each in database["done"].find()} == {"t1": "done", "t2": "done"}
    assert database["done"].index_information()["expires-at"]["expireAfterSeconds"] == 0
    if with_session:
        with pytest.raises(TypeError):
            task.delay()


def test_a_duplicate_of_what_runs_is_retried_later_and_one_of_what_crashed_runs(
    app: Celery, database: Database[Document]
) -> None:
    """A live claim keeps it away; a lapsed one does not."""
    runs: list[str] = []

    @app.task(shared=False)
    @once(database["done"], claim_ttl=3600)
    def send() -> None:
        runs.append("run")

    run(send, "other")
    database["done"].insert_one({"_id": "t1", "state": "running", "owner": 1, "until": 0})
    database["done"].update_one({"_id": "t1"}, [{"$set": {"until": {"$add": ["$$NOW", 60_000]}}}])
    with pytest.raises(Retry):
        send.apply(task_id="t1", throw=True)
    assert runs == ["run"]

    database["done"].update_one({"_id": "t1"}, [{"$set": {"until": "$$NOW"}}])
    run(send, "t1")
    assert runs == ["run", "run"]


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
    """Otherwise the second step would end with the result of the first one, under the same key."""
    runs: list[str] = []

    @once(database["done"], key=lambda order: order)
    def reserve(_order: int) -> str:
        runs.append("reserve")
        return "reserved"

    @once(database["done"], key=lambda order: order)
    def charge(_order: int, *, session: Any) -> str:
        runs.append("charge")
        return f"charged {session.in_transaction}"

    @app.task(shared=False)
    def order(number: int) -> list[str]:
        return [reserve(number), charge(number)]

    assert [run(order, "t1", 1), run(order, "t2", 1)] == [["reserved", "charged True"]] * 2
    run(order, "t1", 2)
    assert runs == ["reserve", "charge"] * 2


def test_a_key_that_no_mark_can_have_is_refused_and_none_asks_for_no_mark(database: Database[Document]) -> None:
    """A key that looks like a condition is a value as any other."""
    runs: list[object] = []

    @once(database["done"], key=lambda order: order)
    def keyed(order: object) -> None:
        runs.append(order)

    for wrong in (object(), 2**70, "\ud800", {1: 2}):
        with pytest.raises(ConfigurationError, match="cannot be stored"):
            keyed(wrong)
    for order in (None, None, ["a", 1], ("a", 1), "$where", "$where", re.compile("a"), re.compile("a")):
        keyed(order)
    assert runs == [None, None, ["a", 1], "$where", re.compile("a")]


@pytest.mark.needs_mongodb(5, 0)
def test_what_a_function_sends_goes_with_its_mark(app: Celery, database: Database[Document]) -> None:
    """The inbox and the outbox are one transaction: effect, mark and messages are there together or not at all."""
    outbox = OutboxCollection(app, database["outbox"], sweep_every=None, at_once=False)
    fail = [True]

    @app.task(shared=False)
    def note(text: str) -> None: ...

    @app.task(shared=False)
    @once(database["done"], outbox=outbox)
    def pay(account: str, *, session: Any) -> str:
        note.delay(f"{account} has paid")
        database["accounts"].update_one({"_id": account}, {"$inc": {"balance": 5}}, upsert=True, session=session)
        if fail.pop():
            fail.append(False)
            raise ValueError("no")
        return "paid"

    with pytest.raises(ValueError, match="no"):
        run(pay, "t1", "A")
    assert [database[each].count_documents({}) for each in ("accounts", "outbox", "done")] == [0, 0, 0]
    assert [run(pay, "t1", "A"), run(pay, "t1", "A")] == ["paid", "paid"]
    assert [database[each].count_documents({}) for each in ("accounts", "outbox", "done")] == [1, 1, 1]
    outbox.runtime.close()


def test_a_handler_of_a_bridge_needs_a_key(app: Celery, database: Database[Document], mongo_url: str) -> None:
    """Several changes may come with one message: by its id, the second one would not be handled."""
    bridge = Bridge(app, mongo_url, name="once")
    tokens: list[object] = []

    @bridge.on_change("shop.orders")
    @once(database["done"])
    def by_message(_change: Change) -> None: ...

    @bridge.on_change("shop.orders")
    @once(database["done"], key=lambda change: change.resume_token)
    def by_change(change: Change) -> None:
        tokens.append(change.resume_token)

    changes = [Change.build("insert", ns="shop.orders", _id={"_data": each}) for each in "aab"]
    with bound(by_message), pytest.raises(ConfigurationError, match=r"key=lambda change: change.resume_token"):
        by_message.run(changes[0])  # type: ignore[attr-defined] # as workers call it
    with bound(by_change):
        for change in changes:
            by_change.run(change)  # type: ignore[attr-defined]
    assert tokens == [{"_data": "a"}, {"_data": "b"}]


@contextmanager
def bound(task: Any) -> Iterator[None]:
    """As within a worker's message for a task."""
    _task_stack.push(task)
    task.push_request(id="t1", called_directly=False)
    try:
        yield
    finally:
        task.pop_request()
        _task_stack.pop()


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
    with pytest.raises(ConfigurationError, match="for 2 is running in another process"):
        keyed(2)


def test_wrong_use_is_refused_when_the_decorator_runs(app: Celery, database: Database[Document]) -> None:
    with pytest.raises(ConfigurationError, match="keep"):
        once(database["done"], keep=0)
    with pytest.raises(ConfigurationError, match="collection"):
        once("done")  # type: ignore[arg-type]

    with pytest.raises(ConfigurationError, match="must take session"):
        once(database["done"], outbox=OutboxCollection(app, database["outbox"], sweep_every=None))(lambda: None)
    with pytest.raises(ConfigurationError, match="needs an OutboxCollection"):
        once(database["done"], outbox=database["outbox"].name)(lambda session: session)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="lambda order: order"):
        once(database["done"], key="order")  # type: ignore[arg-type]

    @app.task(shared=False)
    def send() -> None: ...

    async def coroutine() -> None: ...

    def generator() -> Iterator[int]:
        yield 1

    for refused, reason in ((send, "below"), (coroutine, "plain functions"), (generator, "plain"), (int, "type")):
        with pytest.raises(ConfigurationError, match=reason):
            once(database["done"])(refused)
