"""The writes of an outbox: PyMongo's results, one atomic write, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pymongo import ReturnDocument
from pymongo.database import Database

from mongo_celery import Event
from mongo_celery.errors import OutboxRefusedError
from tests.fixtures.mongo import MakeClient
from tests.rig.outbox import Document, Rig, opened


def stored(database: Database[Document], identity: Any) -> Document:
    document = database["orders"].find_one({"_id": identity})
    assert document is not None
    document.pop("pendingEvents", None)
    return document


def test_an_insert_writes_the_document_and_dispatches_in_order(rig: Rig) -> None:
    order: Document = {"lines": [1]}
    result = rig.outbox().insert_one(order, tasks=[rig.add.s(1, 1), rig.add.s(2, 2)])

    assert result.acknowledged
    assert order == {"lines": [1], "_id": result.inserted_id}
    assert stored(rig.database, result.inserted_id) == order
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


def test_a_document_near_16_mb_is_refused_or_delivered_never_stuck(rig: Rig) -> None:
    outbox = rig.outbox(at_once=False)
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


def test_a_delete_is_refused_while_something_is_pending(rig: Rig) -> None:
    outbox = rig.outbox(at_once=False)
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
