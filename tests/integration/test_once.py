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


def test_a_function_with_a_session_runs_once_under_an_id(app: Celery, database: Database[Document]) -> None:
    """Mark and effect are one transaction; Celery sees no parameter `session`."""

    @app.task(shared=False)
    @once(database["done"])
    def pay(account: str, amount: int, *, session: Any) -> str:
        update = {"$inc": {"balance": amount}}
        database["accounts"].update_one({"_id": account}, update, upsert=True, session=session)
        return "paid"

    database["accounts"].insert_one({"_id": "A", "balance": 0})
    assert run(pay, "t1", "A", 5) == "paid"
    assert run(pay, "t1", "A", 5) == "paid"
    assert run(pay, "t2", "A", 5) == "paid"
    assert database["accounts"].find_one({"_id": "A"}) == {"_id": "A", "balance": 10}
    with pytest.raises(TypeError):
        pay.delay("A")


def test_a_failure_inside_the_transaction_leaves_no_mark(app: Celery, database: Database[Document]) -> None:
    """Neither effect nor mark: the retry runs."""
    fail = [True]

    @app.task(shared=False)
    @once(database["done"])
    def pay(*, session: Any) -> None:
        database["effects"].insert_one({}, session=session)
        if fail.pop():
            fail.append(False)
            raise ValueError("no")

    database.create_collection("effects")
    with pytest.raises(ValueError, match="no"):
        run(pay, "t1")
    assert database["effects"].count_documents({}) == 0
    run(pay, "t1")
    run(pay, "t1")
    assert database["effects"].count_documents({}) == 1


def test_a_function_without_a_session_is_marked_when_it_has_succeeded(
    app: Celery, database: Database[Document]
) -> None:
    runs: list[int] = []

    @app.task(bind=True, shared=False)
    @once(lambda: database["done"])
    def send(_task: Any, number: int) -> int:
        runs.append(number)
        return number

    assert [run(send, "t1", 1), run(send, "t1", 1), run(send, "t2", 2)] == [1, 1, 2]
    assert runs == [1, 2]
    stored = database["done"].find_one({"_id": "t1"})
    assert stored is not None
    assert stored["state"] == "done"
    index = database["done"].index_information()["expires-at"]
    assert index["expireAfterSeconds"] == 0


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


def test_a_failure_frees_the_claim_at_once(app: Celery, database: Database[Document]) -> None:
    runs: list[int] = []

    @app.task(shared=False)
    @once(database["done"])
    def send() -> None:
        runs.append(1)
        if len(runs) == 1:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run(send, "t1")
    run(send, "t1")
    run(send, "t1")
    assert len(runs) == 2


def test_a_key_of_the_users_counts_also_outside_a_task(database: Database[Document]) -> None:
    """And without one, a direct call just runs."""
    runs: list[int] = []

    @once(database["done"], key=lambda order: order)
    def keyed(order: int) -> None:
        runs.append(order)

    @once(database["done"])
    def plain(order: int) -> None:
        runs.append(order)

    for _ in range(2):
        keyed(1)
        plain(2)
    assert runs == [1, 2, 2]


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
    outbox.backing.close()


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
    with pytest.raises(ConfigurationError, match="for 2 is running elsewhere"):
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
