"""Plain values that carry tasks, written by whatever driver there is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mongoengine
import pytest
from bson import ObjectId
from celery import Signature, chain, chord, group
from pymongo import AsyncMongoClient, DeleteMany, DeleteOne, InsertOne, ReplaceOne, UpdateMany, UpdateOne
from pymongo.client_session import ClientSession
from pymongo.database import Database
from pymongo.errors import BulkWriteError, WriteError

from mongo_celery import STORED_ID, Bridge, Change, Event, Outbox, OutboxCollection, transactional
from mongo_celery.errors import OutboxRefusedError
from mongo_celery.outbox import dispatcher
from mongo_celery.outbox.canvas import bind_message
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.pending import NOBODY
from tests.fixtures.process import wait_for
from tests.integration.outbox_rig import Rig, hold, opened, pending

Document = dict[str, Any]


@pytest.fixture(name="rig")
def a_rig(database: Database[Document], redis_url: str) -> Iterator[Rig]:
    with opened(database, redis_url) as rig:
        yield rig


@pytest.fixture(name="outbox")
def an_outbox(rig: Rig) -> Outbox:
    return rig.outbox(at_once=False)


def args_in(database: Database[Document], identity: Any, collection: str = "orders") -> list[Any]:
    """Arguments of the tasks that wait in a document, as a relay would publish them."""
    found = []
    for stored in pending(database, identity, collection)["events"]:
        entry = Entry.from_document(stored)
        canvas = json.loads(entry.payload)
        found.append((bind_message(canvas, entry.bind, identity) if entry.bind else canvas)["args"])
    return found


def ids_in(database: Database[Document], collection: str = "orders") -> list[str]:
    """Ids of the tasks that wait in all documents, as a relay would publish them."""
    found = []
    for document in database[collection].find():
        for stored in document["pendingEvents"]["events"]:
            entry = Entry.from_document(stored)
            canvas = json.loads(entry.payload)
            found.append(bind_message(canvas, entry.bind, document["_id"]) if entry.bind else canvas)
    return [each["options"]["task_id"] for each in found]


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
    outbox: Outbox, rig: Rig, database: Database[Document], update: Any, result: Document, there: bool
) -> None:
    """Whatever was pending stays in front; the claim of others stays, and its place is filled where it is missing."""
    orders = database["orders"]
    orders.insert_one({"_id": 1})
    if there:
        orders.update_one({"_id": 1}, outbox.with_tasks({"$set": {"old": 1}}, [rig.add.s(0, 0)]))
    orders.update_one({"_id": 1}, outbox.with_tasks(update, [rig.add.s(1, 2)], id=1))
    field = pending(database, 1)
    assert args_in(database, 1) == [*([[0, 0]] if there else []), [1, 2]]
    assert list(field["claim"]) == ["owner", "until"]
    assert field["claim"]["owner"] == NOBODY
    found = without(orders.find_one())
    assert {name: found.get(name) for name in result} == result
    assert outbox.sweep(older_than=0).dispatched == 1 + bool(there)


def test_a_claim_that_somebody_holds_outlasts_a_plain_write(
    outbox: Outbox, rig: Rig, database: Database[Document]
) -> None:
    """`$max` compares whole documents, key by key."""
    orders = database["orders"]
    orders.insert_one({"_id": 1})
    for update, _ in UPDATES.values():
        owner = ObjectId()
        orders.update_one({"_id": 1}, {"$unset": {"pendingEvents": ""}})
        orders.update_one({"_id": 1}, outbox.with_tasks({"$set": {"x": 1}}, [rig.add.s(0, 0)]))
        for held in (owner, NOBODY):  # held by a relay, or held back after a failure
            hold(orders, 1, owner=held)
            before = pending(database, 1)["claim"]
            orders.update_one({"_id": 1}, outbox.with_tasks(update, [rig.add.s(1, 1)]))
            assert pending(database, 1)["claim"] == before


def test_a_write_to_an_element_of_an_array_stays_possible(
    outbox: Outbox, rig: Rig, database: Database[Document]
) -> None:
    """Operators stay operators: `$`, `$[]` and array filters find their places."""
    orders = database["orders"]
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
    assert pending(database, 1)["count"] == 2


def test_an_upsert_creates_a_document_with_its_tasks(outbox: Outbox, rig: Rig, database: Database[Document]) -> None:
    """By operators and a pipeline, and the `_id` that the server makes is the one that tasks get."""
    orders, task = database["orders"], [rig.add.s(STORED_ID, 1)]
    values = [
        outbox.with_tasks({"$set": {"a": 1}}, task),
        outbox.with_tasks([{"$set": {"a": 1}}], task),
    ]
    for number, value in enumerate(values):
        made = orders.update_one({"k": number}, value, upsert=True).upserted_id
        assert isinstance(made, ObjectId)
        assert args_in(database, made) == [[str(made), 1]]
        known = orders.update_one({"_id": number}, value, upsert=True).upserted_id
        assert args_in(database, known) == [[number, 1]]
    assert outbox.sweep(older_than=0).dispatched == 4


def test_a_document_to_insert_gets_its_id_in_a_copy(outbox: Outbox, rig: Rig, database: Database[Document]) -> None:
    """The user's own stays as it was, and a callable gets the `_id` that will be stored."""
    document = {"n": 1}
    whole = outbox.with_tasks(
        document, [rig.add.s(STORED_ID, 1), lambda key: rig.add.s(str(key), 2)], [lambda key: Event("placed", key)]
    )
    assert document == {"n": 1}
    made = database["orders"].insert_one(whole).inserted_id
    *tasks, event = pending(database, made)["events"]
    assert [json.loads(each["payload"])["args"] for each in tasks] == [[str(made), 1], [str(made), 2]]
    assert json.loads(event["payload"])["data"] == json.loads(event["payload"])["subject"] == str(made)
    assert outbox.with_tasks({"_id": 5}, [lambda key: rig.add.s(key, 1)])["_id"] == 5
    assert outbox.with_tasks({"a": 1}, [lambda key: rig.add.s(key, 1)], id=6)["_id"] == 6
    assert "pendingEvents" not in outbox.with_tasks({"a": 1})


def test_a_replacement_keeps_id_and_entries_and_replaces_the_rest(
    outbox: Outbox, rig: Rig, database: Database[Document]
) -> None:
    """Strings that look like paths stay strings; without tasks and without anything pending no field comes to be."""
    orders = database["orders"]
    orders.insert_one({"_id": 1, "gone": 1})

    def replace(condition: Document, document: Document, *tasks: Any) -> None:
        orders.bulk_write([outbox.with_tasks(ReplaceOne(condition, document), tasks)])

    replace({"_id": 1}, {"price": "$old"})
    assert orders.find_one() == {"_id": 1, "price": "$old"}
    replace({"_id": 1}, {"n": 1}, rig.add.s(STORED_ID, 1))
    replace({"n": 1}, {"n": 2}, rig.add.s(2, 2))
    replace({"_id": 1}, {"_id": 1, "n": 3})
    assert without(orders.find_one()) == {"_id": 1, "n": 3}
    assert args_in(database, 1) == [[1, 1], [2, 2]]
    with pytest.raises(BulkWriteError):
        replace({"_id": 1}, {"_id": 2})


def test_one_update_of_many_documents_is_a_task_of_its_own_in_each(
    outbox: Outbox, rig: Rig, database: Database[Document]
) -> None:
    """An id that the user chose is the same in each; beside `STORED_ID` it is another one."""
    orders, keys = database["orders"], [ObjectId(), 7, "seven", {"a": 1}]
    orders.insert_many([{"_id": each} for each in keys])
    orders.update_many({}, outbox.with_tasks({"$set": {"a": 1}}, [rig.add.s(1, 1)]))
    chosen = rig.add.s(STORED_ID, 2).set(task_id="mine")
    orders.update_many({}, outbox.with_tasks([{"$set": {"a": 2}}], [chosen]))
    assert len(set(ids_in(database))) == 8
    assert [args_in(database, each)[1] for each in keys] == [[str(keys[0]), 2], [7, 2], ["seven", 2], [{"a": 1}, 2]]


def test_requests_of_a_bulk_write_carry_tasks_and_keep_their_kind(
    outbox: Outbox, rig: Rig, database: Database[Document]
) -> None:
    """Options too; a replacement becomes the update that does the same, and deletes stay as they are."""
    orders, task = database["orders"], [rig.add.s(STORED_ID, 1)]
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
    assert {each: args_in(database, each) for each in found} == expected
    assert len(set(ids_in(database))) == 6


REFUSED: dict[str, tuple[str, Make]] = {
    "both": ("side by side", lambda outbox, task: outbox.with_tasks({"a": 1, "$set": {"b": 1}}, [task])),
    "a text": ("can carry no tasks", lambda outbox, task: outbox.with_tasks("x", [task])),
    "a document with the field": ("belongs to", lambda outbox, task: outbox.with_tasks({"pendingEvents": 1}, [task])),
    "a path": ("belongs to", lambda outbox, task: outbox.with_tasks({"$set": {"pendingEvents.count": 1}}, [task])),
    "without tasks": ("belongs to", lambda outbox, _: outbox.with_tasks({"$unset": {"pendingEvents": 1}})),
    "a stage": ("could drop", lambda outbox, task: outbox.with_tasks([{"$replaceWith": {"a": 1}}], [task])),
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
    "a callable": ("STORED_ID", lambda outbox, task: outbox.with_tasks({"$set": {"a": 1}}, [lambda _: task])),
    "a callable for many": (
        "STORED_ID",
        lambda outbox, task: outbox.with_tasks(UpdateMany({}, {"$set": {"a": 1}}), [lambda _: task]),
    ),
    "a callable of a vague id": (
        "STORED_ID",
        lambda outbox, task: outbox.with_tasks(UpdateOne({"_id": {"$in": [1]}}, {"$set": {"a": 1}}), [lambda _: task]),
    ),
    "a callable under a collation": (
        "STORED_ID",
        lambda outbox, task: outbox.with_tasks(
            UpdateOne({"_id": "a"}, {"$set": {"a": 1}}, collation={"locale": "en"}), [lambda _: task]
        ),
    ),
    "two ids": ("leave one of them out", lambda outbox, task: outbox.with_tasks({"_id": 1}, [task], id=2)),
    "an id of a request": ("says itself", lambda outbox, task: outbox.with_tasks(InsertOne({}), [task], id=2)),
    "an operator of nothing": ("takes a document", lambda outbox, task: outbox.with_tasks({"$max": 5}, [task])),
    "no list at all": ("are lists", lambda outbox, _: outbox.with_tasks({"a": 1}, None)),  # type: ignore[arg-type]
    "a task, no list": ("are lists", lambda outbox, task: outbox.with_tasks({"a": 1}, task)),
    "delay, no list": ("are lists", lambda outbox, task: outbox.with_tasks({"a": 1}, task.type.delay)),
    "delay": (r"add\.s", lambda outbox, task: outbox.with_tasks({"a": 1}, [task.type.delay])),
    "apply_async": (r"add\.s", lambda outbox, task: outbox.with_tasks({"a": 1}, [partial(task.type.apply_async, 1)])),
    "delay of a signature": (r"add\.s", lambda outbox, task: outbox.with_tasks({"a": 1}, [task.delay])),
}


@pytest.mark.parametrize(("words", "make"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_carry_tasks_is_refused_in_one_sentence(outbox: Outbox, rig: Rig, words: str, make: Make) -> None:
    """When the value is made, so nothing can have been written."""
    with pytest.raises(OutboxRefusedError, match=words) as caught:
        make(outbox, rig.add.s(1, 1))
    assert "\n" not in str(caught.value)
    assert rig.drain() == []


def test_a_function_that_sends_its_task_itself_is_told_what_it_has_to_return(outbox: Outbox, rig: Rig) -> None:
    """It cannot be taken back, and nothing is written."""
    with pytest.raises(OutboxRefusedError, match="signature"):
        outbox.insert_one({"_id": 1}, tasks=[lambda _id: rig.add.delay(_id, 1)])
    assert rig.sent() == [[1, 1]]
    assert outbox.collection.count_documents({}) == 0


HANDLERS: dict[str, Callable[[Rig, Any], Any]] = {
    "a signature": lambda _, handler: handler.s(1),
    "by name": lambda rig, handler: rig.app.signature(handler.name, args=(1,)),
    "as a function of the _id": lambda _, handler: handler.s,
    "in a chain": lambda rig, handler: chain(rig.add.s(1, 1), handler.s()),
    "in a group": lambda rig, handler: group(rig.add.s(1, 1), handler.s(1)),
    "as the body of a chord": lambda rig, handler: chord([rig.add.s(1, 1)], handler.s()),
    "as a link": lambda rig, handler: rig.add.s(1, 1).on_error(handler.s()),
}


@pytest.mark.parametrize("make", HANDLERS.values(), ids=HANDLERS)
def test_a_change_handler_is_refused_by_every_write(
    outbox: Outbox, rig: Rig, database: Database[Document], mongo_url: str, make: Callable[[Rig, Any], Any]
) -> None:
    """As by its `delay()`: only the listener sends it."""
    bridge = Bridge(rig.app, mongo_url, name="refused", autodiscover=False)

    @bridge.on_change(f"{database.name}.orders")
    def handle(_change: Change) -> None:
        """Never called."""

    leaving = OutboxCollection(rig.app, database["leaving"], sweep_every=None, at_once=False)
    task = make(rig, handle)
    for write in (
        lambda: outbox.with_tasks({"_id": 1}, [task]),
        lambda: outbox.insert_one({"_id": 1}, tasks=[task]),
        lambda: outbox.with_tasks(InsertOne({"_id": 1}), [task]),
        lambda: leaving.add([task(1) if callable(task) and not isinstance(task, Signature) else task]),
    ):
        with pytest.raises(OutboxRefusedError, match="change handler"):
            write()
    assert database["orders"].count_documents({}) == 0


def test_an_async_client_writes_the_same_values(outbox: Outbox, rig: Rig, mongo_url: str) -> None:
    """PyMongo's AsyncMongoClient: inserts, updates, bulk writes, in a transaction too."""
    name = outbox.collection.database.name

    async def write() -> list[Any]:
        async with AsyncMongoClient[Document](mongo_url) as client:
            orders: Any = client[name]["orders"]
            made = await orders.insert_one(outbox.with_tasks({"n": 1}, [lambda key: rig.add.s(str(key), 1)]))
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
    assert args_in(rig.database, made) == [[str(made), number] for number in (1, 2, 3, 4)]
    assert len(set(ids_in(rig.database))) == 4


def test_mongoengine_writes_the_same_values(outbox: Outbox, rig: Rig, mongo_url: str) -> None:
    """By `__raw__`, and by a document of its own to insert."""
    database = rig.database

    class LooseOrder(mongoengine.Document):  # type: ignore[misc]
        paid = mongoengine.BooleanField()
        meta = {"collection": "orders", "strict": False, "db_alias": "with-tasks"}  # noqa: RUF012 - MongoEngine's way

    mongoengine.connect(database.name, host=mongo_url, alias="with-tasks", uuidRepresentation="standard")
    try:
        order = LooseOrder(paid=False)
        whole = outbox.with_tasks(order.to_mongo().to_dict(), [rig.add.s(STORED_ID, 1)])
        made = LooseOrder._get_collection().insert_one(whole)
        identity = made.inserted_id
        paid = outbox.with_tasks({"$set": {"paid": True}}, [lambda key: rig.add.s(str(key), 2)], id=identity)
        assert LooseOrder.objects(id=identity).update_one(__raw__=paid) == 1
        seen = outbox.with_tasks({"$set": {"seen": 1}}, [rig.add.s(STORED_ID, 3)])
        LooseOrder.objects(paid=True).update(__raw__=seen)
        assert LooseOrder.objects.get(id=identity).paid
    finally:
        mongoengine.disconnect("with-tasks")
    assert args_in(database, identity) == [[str(identity), number] for number in (1, 2, 3)]


def test_beanie_writes_the_same_values(outbox: Outbox, rig: Rig, mongo_url: str) -> None:
    """By its updates of one and of many, and by a document of its own to insert."""
    beanie = pytest.importorskip("beanie", reason="beanie is not installed: pip install -e '.[dev]'")
    database = rig.database

    class Order(beanie.Document):  # type: ignore[misc, name-defined]
        paid: bool = False

        class Settings:
            name = "orders"

    async def write() -> Any:
        async with AsyncMongoClient[Document](mongo_url) as client:
            await beanie.init_beanie(database=client[database.name], document_models=[Order])
            whole = outbox.with_tasks(Order().model_dump(exclude={"id"}), [rig.add.s(STORED_ID, 1)])
            made = (await Order.get_pymongo_collection().insert_one(whole)).inserted_id
            paid = outbox.with_tasks({"$set": {"paid": True}}, [lambda key: rig.add.s(str(key), 2)], id=made)
            await Order.find_one(Order.id == made).update(paid)
            await Order.find(Order.paid == True).update(  # noqa: E712 - Beanie's expression
                outbox.with_tasks({"$set": {"seen": 1}}, [rig.add.s(STORED_ID, 3)])
            )
            found = await Order.get(made)
            assert found is not None
            assert found.paid
            return made

    identity = asyncio.run(write())
    assert args_in(database, identity) == [[str(identity), number] for number in (1, 2, 3)]


def test_a_value_that_an_odm_wrote_as_null_is_refused_by_the_server(
    outbox: Outbox, rig: Rig, database: Database[Document]
) -> None:
    """The user's own write fails then, and nothing of it happens; a pipeline can do without."""
    orders = database["orders"]
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
    assert pending(database, 1)["count"] == 1


def test_what_somebody_else_has_written_is_dispatched_soon(rig: Rig, database: Database[Document]) -> None:
    """By itself, within a transaction too, and at once where `dispatch` names it; each document has its own."""
    outbox, orders = rig.outbox(at_once=True, sweep_after=3600), database["orders"]
    orders.insert_many([{"_id": each} for each in (1, 2)])
    orders.update_many({}, outbox.with_tasks({"$set": {"a": 1}}, [rig.add.s(STORED_ID, 1)]))
    messages: list[Any] = []

    def have(count: int) -> bool:
        messages.extend(rig.drain())
        return len(messages) == count

    wait_for(lambda: have(2), message="two tasks")
    with database.client.start_session() as session, session.start_transaction():
        orders.insert_one(outbox.with_tasks({"_id": 3}, [rig.add.s(STORED_ID, 2)]), session=session)
    outbox.dispatch(3)
    wait_for(lambda: have(3), message="the task of the transaction")
    assert sorted(message.args for message in messages) == [[1, 1], [2, 1], [3, 2]]
    assert len({message.id for message in messages}) == 3
    wait_for(lambda: orders.count_documents({"pendingEvents": {"$exists": True}}) == 0, message="no residue")


@pytest.mark.parametrize("ids", [("slow",), (), None], ids=["dispatch(id)", "dispatch()", "with_tasks alone"])
def test_what_a_slow_transaction_writes_is_dispatched_after_its_commit(
    rig: Rig, database: Database[Document], monkeypatch: pytest.MonkeyPatch, ids: tuple[str, ...] | None
) -> None:
    """All looks that a write plans are over before the commit, and nobody sweeps. An aborted one dispatches nothing."""
    monkeypatch.setattr(dispatcher, "_LOOKS_AFTER", (0.0, 0.01, 0.02))
    outbox, looks = rig.outbox(at_once=True), list[float]()
    waiting = outbox.backing.due

    def due(older_than: float, *given: Any, **more: Any) -> Any:
        looks.append(older_than)
        return waiting(older_than, *given, **more)

    monkeypatch.setattr(outbox.backing, "due", due)
    database.create_collection("orders")

    @transactional(database.client)
    def write(fails: bool, *, session: ClientSession) -> None:
        order = outbox.with_tasks({"_id": "slow"}, [rig.add.s(1, int(fails))])
        database["orders"].insert_one(order, session=session)
        if ids is not None:
            outbox.dispatch(*ids)
        wait_for(lambda: looks and outbox.backing.dispatcher.next_at() is None, message="all looks")
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
