"""Writes that carry tasks: plain values that any driver writes, and the outbox's own methods."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from bson import Decimal128, ObjectId, encode
from bson.codec_options import CodecOptions, TypeCodec, TypeRegistry
from bson.raw_bson import RawBSONDocument
from celery import chain, chord, group
from pymongo import (
    AsyncMongoClient,
    DeleteMany,
    DeleteOne,
    InsertOne,
    ReplaceOne,
    ReturnDocument,
    UpdateMany,
    UpdateOne,
)
from pymongo.client_session import ClientSession
from pymongo.errors import BulkWriteError, WriteError

from mongo_celery import STORED_ID, Bridge, Change, Event, Outbox, transactional
from mongo_celery.errors import CommandRefusedError, OutboxRefusedError
from mongo_celery.mongo.writes import BulkRequest
from mongo_celery.outbox import dispatcher
from mongo_celery.outbox.canvas import bind_message
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.pending import NOBODY
from mongo_celery.outbox.replay import replay
from mongo_celery.testing import pending_entries
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import PATIENCE_SECONDS, wait_for
from tests.rig.outbox import Document, Rig, held_up, hold, opened, settled


@pytest.fixture(name="outbox")
def an_outbox(rig: Rig) -> Outbox:
    return rig.outbox(at_once=False)


def args_in(outbox: Outbox, identity: Any) -> list[Any]:
    return [list(each.args) for each in pending_entries(outbox) if each.place == identity]


def count_ids(outbox: Outbox) -> int:
    return len({each.id for each in pending_entries(outbox)})


def without(document: Any) -> Any:
    return {name: value for name, value in (document or {}).items() if name != "pendingEvents"}


def test_an_update_appends_and_leaves_the_claim_of_others(outbox: Outbox, rig: Rig) -> None:
    """Whatever was pending stays in front. `$max` compares whole documents, key by key."""
    orders = rig.orders
    orders.insert_one({"_id": 1})
    updates: list[Any] = [
        {"$set": {"a": 1}, "$push": {"list": 7}, "$max": {"n": 5}},
        {"$set": {"a": 1}, "$setOnInsert": {"b": 2}},
        [{"$set": {"a": {"$add": [0, 1]}}}],
    ]
    for update in updates:
        orders.update_one({"_id": 1}, {"$unset": {"pendingEvents": ""}})
        orders.update_one({"_id": 1}, outbox.with_tasks(update, [rig.add.s(0, 0)]))
        assert rig.pending(1)["claim"]["owner"] == NOBODY
        for held in (ObjectId(), NOBODY):  # held by a relay, or held back after a failure
            hold(orders, 1, owner=held)
            before = rig.pending(1)["claim"]
            orders.update_one({"_id": 1}, outbox.with_tasks(update, [rig.add.s(1, 1)]))
            assert rig.pending(1)["claim"] == before
        assert args_in(outbox, 1) == [[0, 0], [1, 1], [1, 1]]


def test_a_document_to_insert_gets_its_id_in_a_copy(outbox: Outbox, rig: Rig) -> None:
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
    orders, keys = rig.orders, [ObjectId(), 7, "seven", {"a": 1}]
    orders.insert_many([{"_id": each} for each in keys])
    orders.update_many({}, outbox.with_tasks({"$set": {"a": 1}}, [rig.add.s(1, 1)]))
    orders.update_many({}, outbox.with_tasks([{"$set": {"a": 2}}], [rig.add.s(STORED_ID, 2)]))
    assert count_ids(outbox) == 8
    assert [args_in(outbox, each)[1] for each in keys] == [[str(keys[0]), 2], [7, 2], ["seven", 2], [{"a": 1}, 2]]


def test_requests_of_a_bulk_write_carry_tasks_and_keep_their_kind(outbox: Outbox, rig: Rig) -> None:
    orders, task = rig.orders, [rig.add.s(STORED_ID, 1)]
    orders.insert_many([{"_id": each, "lines": [1]} for each in (1, 2, 3)])
    raw: list[Any] = [
        InsertOne({"_id": 4}),
        UpdateOne({"_id": 1}, {"$set": {"lines.$[x]": 9}}, array_filters=[{"x": 1}]),
        UpdateMany({"_id": {"$in": [1, 2]}}, {"$set": {"many": True}}, hint="_id_"),
        ReplaceOne({"_id": 3}, {"new": "$x"}),
        UpdateOne({"k": 1}, [{"$set": {"up": 1}}], upsert=True),
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


def test_requests_of_a_clients_bulk_write_carry_tasks_and_keep_their_namespace(outbox: Outbox, rig: Rig) -> None:
    """`MongoClient.bulk_write` needs MongoDB 8, and the tests' servers are older."""
    place: dict[str, Any] = {"namespace": rig.orders.full_name}
    raw: list[Any] = [
        InsertOne({}, **place),
        UpdateOne({}, {"$set": {"a": 1}}, **place),
        UpdateMany({}, {"$set": {"a": 1}}, **place),
        ReplaceOne({}, {}, **place),
    ]
    for request in [outbox.with_tasks(each, [rig.add.s(1, 1)]) for each in raw]:
        assert BulkRequest.of(request).namespace == rig.orders.full_name
        assert "pendingEvents" in str(request)


def test_what_cannot_carry_tasks_is_refused_when_the_value_is_made(outbox: Outbox, rig: Rig) -> None:
    task, carry = rig.add.s(1, 1), outbox.with_tasks
    # The server copies what a filter demands into the new document.
    upsert = UpdateOne({"$and": [{"_id": 1}, {"pendingEvents": {"count": 5}}]}, {"$inc": {"a": 1}}, upsert=True)
    path: Document = {"_id": 1, "pendingEvents.count": 5}
    refused: dict[str, Callable[[], object]] = {
        "a document and operators": lambda: carry({"a": 1, "$set": {"b": 1}}, [task]),
        "a text": lambda: carry("x", [task]),
        "a document with the field": lambda: carry({"pendingEvents": 1}, [task]),
        "a path": lambda: carry({"$set": {"pendingEvents.count": 1}}, [task]),
        "without tasks": lambda: carry({"$unset": {"pendingEvents": 1}}),
        "a stage that could drop it": lambda: carry([{"$replaceWith": {"a": 1}}], [task]),
        "a stage that unsets": lambda: carry([{"$unset": "pendingEvents"}]),
        "a rename": lambda: carry({"$rename": {"a": "pendingEvents.a"}}),
        "an upsert": lambda: carry(upsert, [task]),
        "an upsert of the outbox": lambda: outbox.update_one(path, {"$set": {"a": 1}}, upsert=True),
        "a replacement": lambda: carry(ReplaceOne({"_id": 1}, {"pendingEvents": 1}), [task]),
        "a delete": lambda: carry(DeleteMany({}), [task]),
        "two ids": lambda: carry({"_id": 1}, [task], id=2),
        "an id of a request": lambda: carry(InsertOne({}), [task], id=2),
        "an operator of nothing": lambda: carry({"$max": 5}, [task]),
        "no list": lambda: carry({"a": 1}, None),  # type: ignore[arg-type]
        "a task, no list": lambda: carry({"a": 1}, task),  # type: ignore[arg-type]
        "delay": lambda: carry({"a": 1}, [rig.add.delay]),
        "what makes a signature": lambda: carry({"a": 1}, [rig.add.s]),
        "no event": lambda: carry({"a": 1}, events=[{"a": 1}]),
        "no routing key": lambda: carry({"a": 1}, events=[Event("", 1)]),
        "half of a character in a routing key": lambda: carry({"a": 1}, events=[Event("\ud800", 1)]),
        "an event's body": lambda: carry({"a": 1}, events=[Event("k", object())]),
    }
    accepted = []
    for name, make in refused.items():
        with suppress(OutboxRefusedError):
            make()
            accepted.append(name)
    assert accepted == []
    assert (rig.drain(), rig.orders.count_documents({})) == ([], 0)


def test_a_change_handler_is_refused_in_every_canvas(outbox: Outbox, rig: Rig, mongo_url: str) -> None:
    bridge = Bridge(rig.app, mongo_url, name="refused", autodiscover=False)

    @bridge.on_change(f"{rig.database.name}.orders")
    def handle(_change: Change) -> None:
        """Never called."""

    one, handler = rig.add.s(1, 1), rig.app.signature(handle.name)
    link = rig.add.s(1, 1).on_error(handler)
    for task in (handler, chain(one, handler), group(one, handler), chord([one], handler), link):
        for write in (partial(outbox.with_tasks, {"_id": 1}), rig.messages().add):
            with pytest.raises(OutboxRefusedError):
                write([task])


def test_beanie_writes_the_same_values(outbox: Outbox, rig: Rig, mongo_url: str) -> None:
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
        with pytest.raises(OutboxRefusedError):
            act()
    assert orders.find_one() == {"_id": 1, "pendingEvents": None}
    orders.update_one({"_id": 1}, outbox.with_tasks([{"$set": {"a": 1}}], [rig.add.s(1, 1)]))
    assert rig.pending(1)["count"] == 1


@pytest.mark.parametrize("ids", [("slow",), (), None], ids=["dispatch(id)", "dispatch()", "with_tasks alone"])
def test_what_a_slow_transaction_writes_is_dispatched_after_its_commit(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, ids: tuple[str, ...] | None
) -> None:
    """All looks that a write plans are over before the commit, and nobody sweeps. An aborted one dispatches nothing."""
    monkeypatch.setattr(dispatcher, "_POLLS_AFTER", (0.0, 0.01, 0.02))
    outbox, looks = rig.outbox(at_once=True), list[float]()
    find_due, turns = outbox.runtime.pending.find_due, outbox.runtime.dispatcher
    outbox.sweep()  # which makes the index: a look would wait for it

    def find(older_than: float, *given: Any) -> Any:
        looks.append(older_than)
        return find_due(older_than, *given)

    monkeypatch.setattr(outbox.runtime.pending, "find_due", find)

    @transactional(rig.database.client)
    def write(fails: bool, *, session: ClientSession) -> None:
        order = outbox.with_tasks({"_id": "slow"}, [rig.add.s(1, int(fails))])
        rig.orders.insert_one(order, session=session)
        if ids is not None:
            outbox.dispatch(*ids)
        wait_for(lambda: looks and turns.next_turn() is None and not turns._is_in_turn, message="all looks")
        looks.clear()
        if fails:
            raise KeyError

    with pytest.raises(KeyError):
        write(True)
    write(False)
    wait_for(lambda: outbox.status().pending == 0, message="no sweep")
    assert rig.sent() == [[1, 0]]


def delivered(rig: Rig, outbox: Outbox) -> list[list[Any]]:
    outbox.sweep(older_than=0)
    return sorted(rig.sent(), key=repr)


def test_inserted_documents_get_tasks_of_their_own(rig: Rig, outbox: Outbox) -> None:
    documents: list[Document] = [{"_id": 1}, {"n": 2}]
    done = outbox.insert_many(documents, tasks=[rig.add.s(STORED_ID, 1), rig.add.s(2, STORED_ID)])
    assert done.inserted_ids == [1, documents[1]["_id"]]
    made = str(documents[1]["_id"])
    assert delivered(rig, outbox) == sorted([[1, 1], [2, 1], [made, 1], [2, made]], key=repr)


@pytest.mark.parametrize("ordered", [True, False])
def test_what_was_inserted_before_an_error_is_dispatched_at_once(rig: Rig, ordered: bool) -> None:
    outbox = rig.outbox()
    rig.orders.insert_one({"_id": 2})
    with pytest.raises(BulkWriteError) as caught:
        outbox.insert_many([{"_id": 1}, {"_id": 2}, {"_id": 3}], tasks=[rig.add.s(STORED_ID, 0)], ordered=ordered)
    assert [each["index"] for each in (caught.value.details or {})["writeErrors"]] == [1]
    assert sorted(rig.sent()) == ([[1, 0]] if ordered else [[1, 0], [3, 0]])


def test_an_update_of_many_is_a_task_in_each(rig: Rig, outbox: Outbox) -> None:
    rig.orders.insert_many([{"_id": each, "n": each % 2} for each in range(4)])
    done = outbox.update_many({"n": 1}, {"$set": {"seen": 1}}, tasks=[rig.add.s(STORED_ID, 1)])
    assert (done.matched_count, done.modified_count, done.upserted_id) == (2, 2, None)
    done = outbox.update_many({"_id": 9}, {"$set": {"n": 9}}, upsert=True, tasks=[rig.add.s(STORED_ID, 2)])
    assert done.upserted_id == 9
    assert outbox.update_many({"n": 77}, {"$set": {"n": 9}}, tasks=[rig.add.s(1, 2)]).matched_count == 0
    ids = {each["id"] for key in (1, 3) for each in rig.pending(key)["events"]}
    assert len(ids) == 1, "the same entry, which is bound when it is published"


def test_what_lies_in_many_documents_is_set_aside_and_replayed_in_each(rig: Rig, outbox: Outbox) -> None:
    """One entry under one id, also under one that the user chose; a replay sends the ids that it would have had."""
    orders, letters, keys = rig.orders, outbox.runtime.dead_letters, [1, 2, {"a": 1}]
    orders.insert_many([{"_id": each} for each in keys])
    mine, event = rig.add.s(1, 1).set(task_id="mine"), Event("late", [STORED_ID])
    outbox.update_many({}, {"$set": {"a": 1}}, tasks=[rig.add.s(STORED_ID, 1)], events=[event])
    orders.update_many({}, outbox.with_tasks({"$set": {"a": 1}}, [mine], id=1))  # made for one document, by mistake
    ids = []
    for key in keys:
        stored = [Entry.from_document(each) for each in rig.pending(key)["events"]]
        ids += [bind_message(json.loads(stored[0].payload), stored[0].bind, key)["options"]["task_id"]]
        for entry in [*stored, *stored]:
            letters.add(key, entry, ValueError("x"))
    with pytest.raises(CommandRefusedError):  # it is still in the document
        replay(outbox, letters.find()[-1].id)
    orders.update_many({}, {"$unset": {"pendingEvents": ""}})
    found = letters.find()
    assert sorted((each.document for each in found), key=repr) == [*[1] * 3, *[2] * 3, *[{"a": 1}] * 3]
    for letter in found:
        assert replay(outbox, letter.id) == f"{letter.id}~1"
    assert outbox.sweep(older_than=0).dispatched == 9
    sent = [(message.args, message.id) for message in rig.drain()]
    own = [([key, 1], id_) for key, id_ in zip(keys, ids, strict=True)]
    assert sorted((each for each in sent if each[1] != "mine"), key=repr) == sorted(own, key=repr)
    assert [args for args, id_ in sent if id_ == "mine"] == [[1, 1]] * 3
    assert letters.count() == 0


def test_tasks_may_be_gone_through_only_once(rig: Rig, outbox: Outbox) -> None:
    """A generator's tasks are those of every document, and of an upsert that looks at them first."""
    once: Any = (rig.add.s(STORED_ID, each) for each in (1, 2))
    outbox.insert_many([{"_id": 1}, {"_id": 2}], tasks=once)
    once = (rig.add.s(3, each) for each in (1,))
    outbox.update_one({"k": 3}, {"$set": {"a": 1}}, upsert=True, tasks=once)
    assert delivered(rig, outbox) == [[1, 1], [1, 2], [2, 1], [2, 2], [3, 1]]


def test_an_insert_writes_the_document_and_dispatches_in_order(rig: Rig) -> None:
    order: Document = {"lines": [1]}
    result = rig.outbox().insert_one(order, tasks=[rig.add.s(1, 1), rig.add.s(2, 2)])

    assert result.acknowledged
    assert order == {"lines": [1], "_id": result.inserted_id}
    assert without(rig.orders.find_one()) == order
    assert rig.sent() == [[1, 1], [2, 2]]
    assert rig.pending(result.inserted_id)["count"] == 0


UPDATES: dict[str, tuple[Document, Any, Document]] = {
    "by id": ({"_id": 1}, {"$set": {"a": 9}}, {}),
    "by field": ({"a": 1}, {"$inc": {"a": 1}}, {}),
    "by id and field": ({"_id": 1, "a": 1}, {"$set": {"a": 2}}, {}),
    "field that differs": ({"_id": 1, "a": 5}, {"$set": {"a": 2}}, {}),
    "none": ({"_id": 77}, {"$set": {"a": 2}}, {}),
    "operators on the id": ({"_id": {"$in": [1, 5]}}, {"$set": {"a": 2}}, {}),
    "or": ({"$or": [{"a": 1}, {"a": 50}]}, {"$set": {"b": 2}}, {}),
    "and": ({"$and": [{"a": 1}, {"_id": 1}]}, {"$set": {"b": 2}}, {}),
    "expression": ({"$expr": {"$eq": ["$a", 1]}}, {"$set": {"b": 2}}, {}),
    "positional": ({"_id": 1, "items.sku": "y"}, {"$set": {"items.$.n": 7}}, {}),
    "array filters": ({"_id": 1}, {"$set": {"items.$[i].n": 7}}, {"array_filters": [{"i.sku": "x"}]}),
    "pipeline": ({"_id": 1}, [{"$set": {"a": {"$add": ["$a", 5]}}}, {"$unset": "b"}], {}),
    "upsert by id": ({"_id": 8}, {"$set": {"a": 2}}, {"upsert": True}),
    "upsert by field": ({"a": 99}, {"$set": {"b": 2}}, {"upsert": True}),
    "upsert by field, pipeline": ({"a": 99}, [{"$set": {"b": 2}}], {"upsert": True}),
    "upsert of what is there": ({"_id": 1}, {"$set": {"a": 2}}, {"upsert": True}),
    "push and inc of the user's own": ({"_id": 1}, {"$push": {"l": 1}, "$inc": {"a": 1}, "$max": {"m": 1}}, {}),
    "null id": ({"_id": None}, {"$set": {"a": 2}}, {"upsert": True}),
}


@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("way", ["delivered in the write", "left to a sweep", "by the driver"])
def test_an_update_does_what_pymongos_does_and_adds_the_entry(rig: Rig, name: str, way: str) -> None:
    filter_, update, options = UPDATES[name]
    document = {"_id": 1, "a": 1, "b": 0, "items": [{"sku": "x", "n": 1}, {"sku": "y", "n": 1}]}
    rig.orders.insert_one(dict(document))
    rig.database["plain"].insert_one(dict(document))
    plain = rig.database["plain"].update_one(filter_, update, **options)

    at_once, tasks = way == "delivered in the write", [rig.add.s(1, 2)]
    outbox = rig.outbox() if at_once else rig.outbox(at_once=False)
    if way == "by the driver":
        result = rig.orders.update_one(filter_, outbox.with_tasks(update, tasks), **options)
    else:
        result = outbox.update_one(filter_, update, tasks=tasks, **options)

    assert result.matched_count == plain.matched_count
    assert (result.upserted_id is None) == (plain.upserted_id is None)
    left, right = (
        [{k: v for k, v in each.items() if k not in {"_id", "pendingEvents"}} for each in rig.database[c].find()]
        for c in ("orders", "plain")
    )
    assert left == right
    written = bool(result.matched_count or plain.upserted_id is not None or name == "null id")
    waiting = sum(each["pendingEvents"]["count"] for each in rig.orders.find({"pendingEvents": {"$exists": True}}))
    assert (len(rig.drain()), waiting) == ((int(written), 0) if at_once else (0, int(written)))
    if plain.upserted_id is not None and "_id" not in filter_:
        assert rig.orders.find_one({"_id": result.upserted_id}) is not None


def test_the_first_of_a_sort_is_the_one_that_is_updated(rig: Rig) -> None:
    rig.orders.insert_many([{"_id": each, "n": each} for each in range(5)])
    outbox = rig.outbox()
    change: Any = {"update": {"$inc": {"n": 1}}, "projection": {"n": 1}}
    found = outbox.find_one_and_update({}, sort=[("n", -1)], tasks=[rig.add.s(1, 1)], **change)
    assert found == {"_id": 4, "n": 4}
    change["return_document"] = ReturnDocument.AFTER
    assert outbox.find_one_and_update({"_id": 2}, tasks=[rig.add.s(2, 2)], **change) == {"_id": 2, "n": 3}
    assert outbox.find_one_and_update({"_id": 9}, {"$set": {"n": 1}}, tasks=[rig.add.s(3, 3)]) is None
    assert rig.sent() == [[1, 1], [2, 2]]


def test_a_document_near_16_mb_is_refused_or_delivered_never_stuck(rig: Rig, outbox: Outbox) -> None:
    outbox.insert_one({"_id": "probe", "pad": ""}, tasks=[rig.add.s(1, 1)])
    probe = next(rig.orders.aggregate([{"$project": {"size": {"$bsonSize": "$$ROOT"}}}]))["size"]
    room = 16 * 1024 * 1024 - probe + 4  # the id is shorter

    with pytest.raises(OutboxRefusedError):
        outbox.insert_one({"_id": "x", "pad": "p" * (room + 1)}, tasks=[rig.add.s(1, 1)])
    outbox.insert_one({"_id": "x", "pad": "p" * room}, tasks=[rig.add.s(1, 1)])
    with pytest.raises(OutboxRefusedError):
        outbox.update_one({"_id": "x"}, {"$set": {"a": 1}}, tasks=[rig.add.s(2, 2)])
    assert outbox.runtime.relay.deliver("x").dispatched == 1
    assert rig.sent() == [[1, 1]]


def test_a_document_that_cannot_be_changed_gets_an_id(rig: Rig, outbox: Outbox) -> None:
    raw: Any = RawBSONDocument(encode({"total": 1}))
    found = outbox.insert_one(raw, tasks=[rig.add.s(1, 1)]).inserted_id
    more = outbox.insert_many([raw, {"_id": "known"}], tasks=[rig.add.s(1, 2)]).inserted_ids
    assert {each["_id"] for each in rig.orders.find()} == {found, *more}
    outbox.sweep(older_than=0)
    assert sorted(rig.sent()) == [[1, 1], [1, 2], [1, 2]]


class Number:
    """A user's type for an `_id`."""

    def __init__(self, number: int) -> None:
        self.number = number


class NumberCodec(TypeCodec):
    python_type = Number
    bson_type = Decimal128

    def transform_python(self, value: Any) -> Any:
        return Decimal128(str(value.number))

    def transform_bson(self, value: Any) -> Any:
        return Number(int(value.to_decimal()))


def test_a_collection_with_types_of_its_own_is_delivered_at_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    orders: Any = rig.orders.with_options(codec_options=CodecOptions(type_registry=TypeRegistry([NumberCodec()])))
    outbox = rig.outbox(orders, at_once=True)
    outbox.insert_one({"_id": Number(1)}, tasks=[rig.add.s(1, 1)])
    wait_for(lambda: settled(outbox))
    outbox.insert_many([{"_id": Number(2)}, {"_id": Number(3)}], tasks=[rig.add.s(2, 2)])
    outbox.update_one({"_id": Number(1)}, {"$set": {"paid": True}}, tasks=[rig.add.s(3, 3)])
    orders.insert_one(outbox.with_tasks({"_id": Number(4)}, [rig.add.s(4, 4)]))
    outbox.dispatch(Number(4))
    wait_for(lambda: settled(outbox))
    assert sorted(rig.sent()) == [[1, 1], [2, 2], [2, 2], [3, 3], [4, 4]]
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == []

    with held_up(outbox) as (_asked, begun):
        outbox.insert_one({"_id": Number(5)}, tasks=[rig.add.s(5, 5)])
        assert begun.wait(PATIENCE_SECONDS)
        with pytest.raises(OutboxRefusedError):
            outbox.delete_one({"_id": Number(5)})
    wait_for(lambda: settled(outbox))
    assert outbox.delete_one({"_id": Number(5)}).deleted_count == 1
    assert outbox.delete_one({"_id": Number(5)}).deleted_count == 0


def test_a_delete_is_refused_while_something_is_pending(rig: Rig, outbox: Outbox) -> None:
    outbox.insert_one({"_id": 1, "a": 1}, tasks=[rig.add.s(1, 1)])
    outbox.insert_one({"_id": 2})
    with pytest.raises(OutboxRefusedError) as caught:
        outbox.delete_one({"a": 1})
    assert caught.value.retryable
    with rig.database.client.start_session() as session, session.start_transaction():
        outbox.update_one({"_id": 1}, {"$set": {"b": 1}}, session=session)
        with pytest.raises(OutboxRefusedError):
            outbox.delete_one({"_id": 1}, session=session)
        assert outbox.delete_one({"_id": 2}, session=session).deleted_count == 1
    assert [document["_id"] for document in rig.orders.find({}, {"_id": 1})] == [1]
    assert outbox.sweep(older_than=0).dispatched == 1
    assert outbox.delete_one({"a": 1}).deleted_count == 1
    assert outbox.delete_one({"_id": 1}).deleted_count == 0
    assert rig.sent() == [[1, 1]]


@pytest.mark.parametrize(
    ("condition", "subject"),
    [({"_id": 5}, "5"), ({"_id": {"$eq": 5}}, "5"), ({"_id": {"$gte": 5}}, None), ({"_id": re.compile("a")}, None)],
    ids=str,
)
def test_an_events_subject_is_the_id_that_the_filter_demands(
    rig: Rig, condition: Document, subject: str | None
) -> None:
    """And no condition: a pattern that was asked for is nobody's `_id`."""
    outbox = rig.outbox(at_once=False)
    rig.orders.insert_many([{"_id": 5}, {"_id": "a"}])
    outbox.update_one(condition, {"$set": {"n": 1}}, events=[Event("order.paid", {})])
    [changed] = rig.orders.find({"n": 1})
    assert json.loads(changed["pendingEvents"]["events"][0]["payload"]).get("subject") == subject


def test_a_standalone_server_keeps_and_delivers_entries(
    standalone_url: str, make_client: MakeClient, redis_url: str
) -> None:
    database = make_client(standalone_url)["outbox_on_a_standalone"]
    with opened(database, redis_url) as rig:
        outbox = rig.outbox(at_once=False)
        outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 2)])
        assert rig.pending(1)["count"] == 1
        assert outbox.sweep(older_than=0).dispatched == 1
        assert rig.sent() == [[1, 2]]
        assert rig.orders.find_one({"_id": 1}) == {"_id": 1}
    database.client.drop_database(database.name)
