"""Plain values that carry tasks, written by whatever driver there is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import mongoengine
import pytest
from bson import ObjectId
from celery import chain, chord, group
from pymongo import AsyncMongoClient, DeleteMany, DeleteOne, InsertOne, ReplaceOne, UpdateMany, UpdateOne
from pymongo.client_session import ClientSession
from pymongo.errors import BulkWriteError, WriteError

from mongo_celery import STORED_ID, Bridge, Change, Event, Outbox, transactional
from mongo_celery.errors import OutboxRefusedError
from mongo_celery.outbox import dispatcher
from mongo_celery.outbox.pending import NOBODY
from mongo_celery.testing import pending_entries
from tests.fixtures.process import wait_for
from tests.rig.outbox import Rig, hold

Document = dict[str, Any]


@pytest.fixture(name="outbox")
def an_outbox(rig: Rig) -> Outbox:
    return rig.outbox(at_once=False)


def args_in(outbox: Outbox, identity: Any) -> list[Any]:
    """Arguments of the tasks that wait in a document, as a relay would publish them."""
    return [list(each.args) for each in pending_entries(outbox) if each.place == identity]


def count_ids(outbox: Outbox) -> int:
    """How many ids the waiting tasks have, as a relay would publish them."""
    return len({each.id for each in pending_entries(outbox)})


def without(document: Any) -> Any:
    return {name: value for name, value in (document or {}).items() if name != "pendingEvents"}


Make = Callable[[Outbox, Any], Any]

UPDATES: dict[str, tuple[Any, Document]] = {
    "operators": ({"$set": {"a": 1}, "$push": {"list": 7}, "$max": {"n": 5}}, {"a": 1, "list": [7], "n": 5}),
    "set on insert": ({"$set": {"a": 1}, "$setOnInsert": {"b": 2}}, {"a": 1}),
    "pipeline": ([{"$set": {"a": {"$add": [0, 1]}}}], {"a": 1}),
}


@pytest.mark.parametrize("there", [False, True], ids=["no field", "the field"])
@pytest.mark.parametrize(("update", "result"), UPDATES.values(), ids=UPDATES.keys())
def test_an_update_appends_and_does_what_it_did(
    outbox: Outbox, rig: Rig, update: Any, result: Document, there: bool
) -> None:
    """Whatever was pending stays in front; the claim of others stays, and its place is filled where it is missing."""
    orders = rig.orders
    orders.insert_one({"_id": 1})
    if there:
        orders.update_one({"_id": 1}, outbox.with_tasks({"$set": {"old": 1}}, [rig.add.s(0, 0)]))
    orders.update_one({"_id": 1}, outbox.with_tasks(update, [rig.add.s(1, 2)], id=1))
    field = rig.pending(1)
    assert args_in(outbox, 1) == [*([[0, 0]] if there else []), [1, 2]]
    assert list(field["claim"]) == ["owner", "until"]
    assert field["claim"]["owner"] == NOBODY
    found = without(orders.find_one())
    assert {name: found.get(name) for name in result} == result
    assert outbox.sweep(older_than=0).dispatched == 1 + bool(there)


def test_a_claim_that_somebody_holds_outlasts_a_plain_write(outbox: Outbox, rig: Rig) -> None:
    """`$max` compares whole documents, key by key."""
    orders = rig.orders
    orders.insert_one({"_id": 1})
    for update, _ in UPDATES.values():
        owner = ObjectId()
        orders.update_one({"_id": 1}, {"$unset": {"pendingEvents": ""}})
        orders.update_one({"_id": 1}, outbox.with_tasks({"$set": {"x": 1}}, [rig.add.s(0, 0)]))
        for held in (owner, NOBODY):  # held by a relay, or held back after a failure
            hold(orders, 1, owner=held)
            before = rig.pending(1)["claim"]
            orders.update_one({"_id": 1}, outbox.with_tasks(update, [rig.add.s(1, 1)]))
            assert rig.pending(1)["claim"] == before


def test_a_write_to_an_element_of_an_array_stays_possible(outbox: Outbox, rig: Rig) -> None:
    """Operators stay operators: `$`, `$[]` and array filters find their places."""
    orders = rig.orders
    orders.insert_one({"_id": 1, "lines": [{"sku": 1}, {"sku": 2}]})
    task = [rig.add.s(1, 1)]
    orders.update_one({"_id": 1, "lines.sku": 2}, outbox.with_tasks({"$set": {"lines.$.sent": True}}, task))
    orders.update_one(
        {"_id": 1},
        outbox.with_tasks({"$set": {"lines.$[one].paid": True, "lines.$[].seen": True}}, task),
        array_filters=[{"one.sku": 1}],
    )
    assert without(orders.find_one())["lines"] == [
        {"sku": 1, "paid": True, "seen": True},
        {"sku": 2, "sent": True, "seen": True},
    ]
    assert rig.pending(1)["count"] == 2


def test_an_upsert_creates_a_document_with_its_tasks(outbox: Outbox, rig: Rig) -> None:
    """By operators and a pipeline, and the `_id` that the server makes is the one that tasks get."""
    orders, task = rig.orders, [rig.add.s(STORED_ID, 1)]
    for number, update in enumerate(({"$set": {"a": 1}}, [{"$set": {"a": 1}}])):
        value = outbox.with_tasks(update, task)
        made = orders.update_one({"k": number}, value, upsert=True).upserted_id
        assert isinstance(made, ObjectId)
        assert args_in(outbox, made) == [[str(made), 1]]
        known = orders.update_one({"_id": number}, value, upsert=True).upserted_id
        assert args_in(outbox, known) == [[number, 1]]
    assert outbox.sweep(older_than=0).dispatched == 4


def test_a_document_to_insert_gets_its_id_in_a_copy(outbox: Outbox, rig: Rig) -> None:
    """The user's own stays as it was."""
    document = {"n": 1}
    whole = outbox.with_tasks(document, [rig.add.s(STORED_ID, 1)], [Event("placed", STORED_ID)])
    assert document == {"n": 1}
    made = rig.orders.insert_one(whole).inserted_id
    task, event = rig.pending(made)["events"]
    assert json.loads(task["payload"])["args"] == [str(made), 1]
    assert json.loads(event["payload"])["data"] == json.loads(event["payload"])["subject"] == str(made)
    assert outbox.with_tasks({"_id": 5}, [rig.add.s(STORED_ID, 1)])["_id"] == 5
    assert outbox.with_tasks({"a": 1}, [rig.add.s(STORED_ID, 1)], id=6)["_id"] == 6
    assert "pendingEvents" not in outbox.with_tasks({"a": 1})


def test_a_replacement_keeps_id_and_entries_and_replaces_the_rest(outbox: Outbox, rig: Rig) -> None:
    """Strings that look like paths stay strings; without tasks and without anything pending no field comes to be."""
    orders = rig.orders
    orders.insert_one({"_id": 1, "gone": 1})

    def replace(condition: Document, document: Document, *tasks: Any) -> None:
        orders.bulk_write([outbox.with_tasks(ReplaceOne(condition, document), tasks)])

    replace({"_id": 1}, {"price": "$old"})
    assert orders.find_one() == {"_id": 1, "price": "$old"}
    replace({"_id": 1}, {"n": 1}, rig.add.s(STORED_ID, 1))
    replace({"n": 1}, {"n": 2}, rig.add.s(2, 2))
    replace({"_id": 1}, {"_id": 1, "n": 3})
    assert without(orders.find_one()) == {"_id": 1, "n": 3}
    assert args_in(outbox, 1) == [[1, 1], [2, 2]]
    with pytest.raises(BulkWriteError):
        replace({"_id": 1}, {"_id": 2})


def test_one_update_of_many_documents_is_a_task_of_its_own_in_each(outbox: Outbox, rig: Rig) -> None:
    """With an id of its own, also where `STORED_ID` is among its arguments."""
    orders, keys = rig.orders, [ObjectId(), 7, "seven", {"a": 1}]
    orders.insert_many([{"_id": each} for each in keys])
    orders.update_many({}, outbox.with_tasks({"$set": {"a": 1}}, [rig.add.s(1, 1)]))
    orders.update_many({}, outbox.with_tasks([{"$set": {"a": 2}}], [rig.add.s(STORED_ID, 2)]))
    assert count_ids(outbox) == 8
    assert [args_in(outbox, each)[1] for each in keys] == [[str(keys[0]), 2], [7, 2], ["seven", 2], [{"a": 1}, 2]]


def test_requests_of_a_bulk_write_carry_tasks_and_keep_their_kind(outbox: Outbox, rig: Rig) -> None:
    """Options too; a replacement becomes the update that does the same, and deletes stay as they are."""
    orders, task = rig.orders, [rig.add.s(STORED_ID, 1)]
    orders.insert_many([{"_id": each, "lines": [1]} for each in (1, 2, 3)])
    raw: list[Any] = [
        InsertOne({"_id": 4}),
        UpdateOne({"_id": 1}, {"$set": {"lines.$[x]": 9}}, array_filters=[{"x": 1}]),
        UpdateMany({"_id": {"$in": [1, 2]}}, {"$set": {"many": True}}, hint="_id_"),
        ReplaceOne({"_id": 3}, {"new": "$x"}),
        UpdateOne({"k": 1}, {"$set": {"up": 1}}, upsert=True),
    ]
    requests = [outbox.with_tasks(each, task) for each in raw]
    assert [type(each) for each in requests] == [InsertOne, UpdateOne, UpdateMany, UpdateOne, UpdateOne]
    done = orders.bulk_write([*requests, outbox.with_tasks(DeleteOne({"_id": 99}))])
    assert (done.inserted_count, done.matched_count, done.modified_count, done.upserted_count) == (1, 4, 4, 1)
    made = (done.upserted_ids or {})[4]
    found = {each["_id"]: without(each) for each in orders.find()}
    assert found[1] == {"_id": 1, "lines": [9], "many": True}
    assert found[3] == {"_id": 3, "new": "$x"}
    expected = {1: [[1, 1], [1, 1]], 2: [[2, 1]], 3: [[3, 1]], 4: [[4, 1]], made: [[str(made), 1]]}
    assert {each: args_in(outbox, each) for each in found} == expected
    assert count_ids(outbox) == 6


REFUSED: dict[str, tuple[str, Make]] = {
    "both": ("both operators and fields", lambda outbox, task: outbox.with_tasks({"a": 1, "$set": {"b": 1}}, [task])),
    "a text": ("cannot carry tasks", lambda outbox, task: outbox.with_tasks("x", [task])),
    "a document with the field": ("belongs to", lambda outbox, task: outbox.with_tasks({"pendingEvents": 1}, [task])),
    "a path": ("belongs to", lambda outbox, task: outbox.with_tasks({"$set": {"pendingEvents.count": 1}}, [task])),
    "without tasks": ("belongs to", lambda outbox, _: outbox.with_tasks({"$unset": {"pendingEvents": 1}})),
    "a stage": ("could remove", lambda outbox, task: outbox.with_tasks([{"$replaceWith": {"a": 1}}], [task])),
    "an upsert": (
        "belongs to",
        lambda outbox, task: outbox.with_tasks(
            UpdateOne({"pendingEvents": 1}, {"$inc": {"a": 1}}, upsert=True), [task]
        ),
    ),
    "a replacement": (
        "belongs to",
        lambda outbox, task: outbox.with_tasks(ReplaceOne({"_id": 1}, {"pendingEvents": 1}), [task]),
    ),
    "a delete": ("OutboxCollection", lambda outbox, task: outbox.with_tasks(DeleteMany({}), [task])),
    "two ids": ("Leave one of them out", lambda outbox, task: outbox.with_tasks({"_id": 1}, [task], id=2)),
    "an id of a request": ("leave id= out", lambda outbox, task: outbox.with_tasks(InsertOne({}), [task], id=2)),
    "an operator of nothing": ("takes a document", lambda outbox, task: outbox.with_tasks({"$max": 5}, [task])),
    "no list at all": ("must be lists", lambda outbox, _: outbox.with_tasks({"a": 1}, None)),  # type: ignore[arg-type]
    "a task, no list": ("must be lists", lambda outbox, task: outbox.with_tasks({"a": 1}, task)),
    "delay": ("not a Celery signature", lambda outbox, task: outbox.with_tasks({"a": 1}, [task.type.delay])),
    "what makes a signature": (
        "not a Celery signature",
        lambda outbox, task: outbox.with_tasks({"a": 1}, [task.type.s]),
    ),
    "a rename": ("belongs to", lambda outbox, _: outbox.with_tasks({"$rename": {"a": "pendingEvents.a"}})),
    "a stage that unsets": ("belongs to", lambda outbox, _: outbox.with_tasks([{"$unset": "pendingEvents"}])),
    "no event": ("is not an event", lambda outbox, _: outbox.with_tasks({"a": 1}, events=[{"a": 1}])),
    "no routing key": ("routing key", lambda outbox, _: outbox.with_tasks({"a": 1}, events=[Event("", 1)])),
    "an event's body": ("as JSON", lambda outbox, _: outbox.with_tasks({"a": 1}, events=[Event("k", object())])),
}


@pytest.mark.parametrize(("words", "make"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_carry_tasks_is_refused_in_one_sentence(outbox: Outbox, rig: Rig, words: str, make: Make) -> None:
    """When the value is made, so nothing can have been written."""
    with pytest.raises(OutboxRefusedError, match=words) as caught:
        make(outbox, rig.add.s(1, 1))
    assert "\n" not in str(caught.value)
    assert rig.drain() == []


HANDLERS: dict[str, Callable[[Rig, Any], Any]] = {
    "a signature": lambda _, handler: handler.s(1),
    "by name": lambda rig, handler: rig.app.signature(handler.name, args=(1,)),
    "in a chain": lambda rig, handler: chain(rig.add.s(1, 1), handler.s()),
    "in a group": lambda rig, handler: group(rig.add.s(1, 1), handler.s(1)),
    "as the body of a chord": lambda rig, handler: chord([rig.add.s(1, 1)], handler.s()),
    "as a link": lambda rig, handler: rig.add.s(1, 1).on_error(handler.s()),
}


@pytest.mark.parametrize("make", HANDLERS.values(), ids=HANDLERS)
def test_a_change_handler_is_refused_by_every_write(
    outbox: Outbox, rig: Rig, mongo_url: str, make: Callable[[Rig, Any], Any]
) -> None:
    """As by its `delay()`: only the listener sends it."""
    bridge = Bridge(rig.app, mongo_url, name="refused", autodiscover=False)

    @bridge.on_change(f"{rig.database.name}.orders")
    def handle(_change: Change) -> None:
        """Never called."""

    leaving = rig.messages()
    task = make(rig, handle)
    for write in (
        lambda: outbox.with_tasks({"_id": 1}, [task]),
        lambda: outbox.insert_one({"_id": 1}, tasks=[task]),
        lambda: outbox.with_tasks(InsertOne({"_id": 1}), [task]),
        lambda: leaving.add([task]),
    ):
        with pytest.raises(OutboxRefusedError, match="change handler"):
            write()
    assert rig.orders.count_documents({}) == 0


def test_an_async_client_writes_the_same_values(outbox: Outbox, rig: Rig, mongo_url: str) -> None:
    """PyMongo's AsyncMongoClient: inserts, updates, bulk writes, in a transaction too."""

    async def write() -> list[Any]:
        async with AsyncMongoClient[Document](mongo_url) as client:
            orders: Any = client[rig.database.name]["orders"]
            made = await orders.insert_one(outbox.with_tasks({"n": 1}, [rig.add.s(STORED_ID, 1)]))
            await orders.update_one({"n": 1}, outbox.with_tasks({"$set": {"n": 2}}, [rig.add.s(STORED_ID, 2)]))
            await orders.bulk_write(
                [outbox.with_tasks(UpdateOne({"n": 2}, {"$inc": {"n": 1}}), [rig.add.s(STORED_ID, 3)])]
            )
            async with client.start_session() as session, await session.start_transaction():
                update = outbox.with_tasks({"$inc": {"n": 1}}, [rig.add.s(STORED_ID, 4)])
                await orders.update_one({"_id": made.inserted_id}, update, session=session)
            return [made.inserted_id, (await orders.find_one())["n"]]

    made, n = asyncio.run(write())
    assert n == 4
    assert args_in(outbox, made) == [[str(made), number] for number in (1, 2, 3, 4)]
    assert count_ids(outbox) == 4


def test_mongoengine_writes_the_same_values(outbox: Outbox, rig: Rig, mongo_url: str) -> None:
    """By `__raw__`, and by a document of its own to insert."""

    class LooseOrder(mongoengine.Document):  # type: ignore[misc]
        paid = mongoengine.BooleanField()
        meta = {"collection": "orders", "strict": False, "db_alias": "with-tasks"}  # noqa: RUF012 - MongoEngine's way

    mongoengine.connect(rig.database.name, host=mongo_url, alias="with-tasks", uuidRepresentation="standard")
    try:
        order = LooseOrder(paid=False)
        whole = outbox.with_tasks(order.to_mongo().to_dict(), [rig.add.s(STORED_ID, 1)])
        made = LooseOrder._get_collection().insert_one(whole)
        identity = made.inserted_id
        paid = outbox.with_tasks({"$set": {"paid": True}}, [rig.add.s(STORED_ID, 2)], id=identity)
        assert LooseOrder.objects(id=identity).update_one(__raw__=paid) == 1
        seen = outbox.with_tasks({"$set": {"seen": 1}}, [rig.add.s(STORED_ID, 3)])
        LooseOrder.objects(paid=True).update(__raw__=seen)
        assert LooseOrder.objects.get(id=identity).paid
    finally:
        mongoengine.disconnect("with-tasks")
    assert args_in(outbox, identity) == [[str(identity), number] for number in (1, 2, 3)]


def test_beanie_writes_the_same_values(outbox: Outbox, rig: Rig, mongo_url: str) -> None:
    """By its updates of one and of many, and by a document of its own to insert."""
    beanie = pytest.importorskip("beanie", reason="beanie is not installed: pip install -e '.[dev]'")

    class Order(beanie.Document):  # type: ignore[misc, name-defined]
        paid: bool = False

        class Settings:
            name = "orders"

    async def write() -> Any:
        async with AsyncMongoClient[Document](mongo_url) as client:
            await beanie.init_beanie(database=client[rig.database.name], document_models=[Order])
            whole = outbox.with_tasks(Order().model_dump(exclude={"id"}), [rig.add.s(STORED_ID, 1)])
            made = (await Order.get_pymongo_collection().insert_one(whole)).inserted_id
            paid = outbox.with_tasks({"$set": {"paid": True}}, [rig.add.s(STORED_ID, 2)], id=made)
            await Order.find_one(Order.id == made).update(paid)
            await Order.find(Order.paid == True).update(  # noqa: E712 - Beanie's expression
                outbox.with_tasks({"$set": {"seen": 1}}, [rig.add.s(STORED_ID, 3)])
            )
            found = await Order.get(made)
            assert found is not None
            assert found.paid
            return made

    identity = asyncio.run(write())
    assert args_in(outbox, identity) == [[str(identity), number] for number in (1, 2, 3)]


def test_a_value_that_an_odm_wrote_as_null_is_refused_by_the_server(outbox: Outbox, rig: Rig) -> None:
    """The user's own write fails then, and nothing of it happens; a pipeline can do without."""
    orders = rig.orders
    orders.insert_one({"_id": 1, "pendingEvents": None})
    with pytest.raises(WriteError):
        orders.update_one({"_id": 1}, outbox.with_tasks({"$set": {"a": 1}}, [rig.add.s(1, 1)]))
    assert orders.find_one() == {"_id": 1, "pendingEvents": None}
    acts: list[Callable[[], Any]] = [
        lambda: outbox.update_one({"_id": 1}, {"$set": {"a": 1}}, tasks=[rig.add.s(1, 1)]),
        lambda: outbox.update_many({}, {"$set": {"a": 1}}, tasks=[rig.add.s(1, 1)]),
    ]
    for act in acts:
        with pytest.raises(OutboxRefusedError, match=r'update_many\(\{"pendingEvents": \{"\$type": "null"\}\}'):
            act()
    assert orders.find_one() == {"_id": 1, "pendingEvents": None}
    orders.update_one({"_id": 1}, outbox.with_tasks([{"$set": {"a": 1}}], [rig.add.s(1, 1)]))
    assert rig.pending(1)["count"] == 1


def test_what_somebody_else_has_written_is_dispatched_soon(rig: Rig) -> None:
    """By itself, within a transaction too, and at once where `dispatch` names it; each document has its own."""
    outbox, orders = rig.outbox(at_once=True, sweep_after=3600), rig.orders
    orders.insert_many([{"_id": each} for each in (1, 2)])
    orders.update_many({}, outbox.with_tasks({"$set": {"a": 1}}, [rig.add.s(STORED_ID, 1)]))
    messages: list[Any] = []

    def have(count: int) -> bool:
        messages.extend(rig.drain())
        return len(messages) == count

    wait_for(lambda: have(2), message="two tasks")
    with rig.database.client.start_session() as session, session.start_transaction():
        orders.insert_one(outbox.with_tasks({"_id": 3}, [rig.add.s(STORED_ID, 2)]), session=session)
    outbox.dispatch(3)
    wait_for(lambda: have(3), message="the task of the transaction")
    assert sorted(message.args for message in messages) == [[1, 1], [2, 1], [3, 2]]
    assert len({message.id for message in messages}) == 3
    wait_for(lambda: orders.count_documents({"pendingEvents": {"$exists": True}}) == 0, message="no residue")


@pytest.mark.parametrize("ids", [("slow",), (), None], ids=["dispatch(id)", "dispatch()", "with_tasks alone"])
def test_what_a_slow_transaction_writes_is_dispatched_after_its_commit(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, ids: tuple[str, ...] | None
) -> None:
    """All looks that a write plans are over before the commit, and nobody sweeps. An aborted one dispatches nothing."""
    monkeypatch.setattr(dispatcher, "_POLLS_AFTER", (0.0, 0.01, 0.02))
    outbox, looks = rig.outbox(at_once=True), list[float]()
    find_due = outbox.runtime.pending.find_due

    def find(older_than: float, *given: Any) -> Any:
        looks.append(older_than)
        return find_due(older_than, *given)

    monkeypatch.setattr(outbox.runtime.pending, "find_due", find)
    rig.database.create_collection("orders")

    @transactional(rig.database.client)
    def write(fails: bool, *, session: ClientSession) -> None:
        order = outbox.with_tasks({"_id": "slow"}, [rig.add.s(1, int(fails))])
        rig.orders.insert_one(order, session=session)
        if ids is not None:
            outbox.dispatch(*ids)
        wait_for(lambda: looks and outbox.runtime.dispatcher.next_turn() is None, message="all looks")
        looks.clear()
        if fails:
            raise KeyError

    with pytest.raises(KeyError):
        write(True)
    write(False)
    wait_for(lambda: outbox.status().pending == 0, 20, "no sweep")
    assert rig.sent() == [[1, 0]]


def test_client_bulk_writes_keep_their_namespace(outbox: Outbox) -> None:
    """PyMongo's `MongoClient.bulk_write` needs it; the servers that know it are newer than the tests'."""
    request = InsertOne({"a": 1}, namespace="shop.orders")
    carried = outbox.with_tasks(request, [outbox.app.signature("note")])
    assert carried._namespace == "shop.orders"
    assert carried._doc["pendingEvents"]["count"] == 1
