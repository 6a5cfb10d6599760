"""A handler's fenced writes that carry tasks: the document changes and the tasks wait, or neither."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from pymongo import DeleteOne, ReplaceOne, UpdateOne
from pymongo.database import Database

from mongo_celery import STORED_ID, FencedCollection, Outbox
from mongo_celery.bridge.worker.attribution import conflict_cause, infrastructure_cause
from mongo_celery.errors import OutboxRefusedError, StaleFencingTokenError
from tests.rig.fenced import FENCE, Document, fence, stamp, view
from tests.rig.outbox import Rig, due_again, hold, opened

Write = Callable[[FencedCollection, Outbox, Any], Any]


WRITES: dict[str, Write] = {
    "update": lambda orders, outbox, task: orders.update_one({"_id": 1}, outbox.with_tasks({"$set": {"a": 1}}, [task])),
    "update by another filter": lambda orders, outbox, task: orders.update_one(
        {"k": 1}, outbox.with_tasks({"$set": {"a": 1}}, [task])
    ),
    "pipeline": lambda orders, outbox, task: orders.update_one(
        {"_id": 1}, outbox.with_tasks([{"$set": {"a": 1}}], [task])
    ),
    "find and update": lambda orders, outbox, task: orders.find_one_and_update(
        {"_id": 1}, outbox.with_tasks({"$set": {"a": 1}}, [task], id=1)
    ),
    "many": lambda orders, outbox, task: orders.update_many({"k": 1}, outbox.with_tasks({"$set": {"a": 1}}, [task])),
    "bulk": lambda orders, outbox, task: orders.bulk_write(
        [outbox.with_tasks(UpdateOne({"_id": 1}, {"$set": {"a": 1}}), [task])]
    ),
    "bulk replacement": lambda orders, outbox, task: orders.bulk_write(
        [outbox.with_tasks(ReplaceOne({"_id": 1}, {"a": 1}), [task])]
    ),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_fenced_write_carries_its_tasks(rig: Rig, write: Write) -> None:
    """
    Stamp, change and entry by one write. The stamp and what was pending before stay, in a new partitioning too.

    A stale execution enqueues nothing.
    """
    outbox = rig.outbox(at_once=False)
    outbox.insert_one({"_id": 1, "k": 1}, tasks=[rig.add.s(0, 0)])
    write(view(rig.orders, 5), outbox, rig.add.s(STORED_ID, 5))
    [document] = rig.orders.find()
    assert (document["a"], document[FENCE], rig.pending(1)["count"]) == (1, stamp(5), 2)
    rig.orders.update_one({"_id": 1}, {"$set": {"k": 1}})
    write(view(rig.orders, 2, partitioning=2), outbox, rig.add.s(STORED_ID, 6))
    assert outbox.sweep(older_than=0).dispatched == 3
    sent = rig.drain()
    assert [message.args for message in sent] == [[0, 0], [1, 5], [1, 6]]
    assert len({message.id for message in sent}) == 3
    before = {"_id": 1, "k": 1, FENCE: stamp(9)}
    rig.orders.replace_one({"_id": 1}, before)
    with pytest.raises(StaleFencingTokenError):
        write(view(rig.orders, 5), outbox, rig.add.s(STORED_ID, 5))
    assert list(rig.orders.find()) == [before]


@pytest.mark.parametrize("update", [{"$set": {"a": 1}}, [{"$set": {"a": 1}}]], ids=["operators", "a pipeline"])
def test_a_fenced_upsert_creates_the_document_with_its_tasks(rig: Rig, update: Any) -> None:
    """In the transaction in which the stamp's tombstone is looked at."""
    outbox = rig.outbox(at_once=False)
    given = outbox.with_tasks(update, [rig.add.s(STORED_ID, 5)])
    view(rig.orders, 5).update_one({"_id": 1}, given, upsert=True)
    [document] = rig.orders.find()
    assert (document["a"], document[FENCE], rig.pending(1)["count"]) == (1, stamp(5), 1)
    assert outbox.sweep(older_than=0).dispatched == 1
    view(rig.orders, 6).delete_one({"_id": 1})
    with pytest.raises(StaleFencingTokenError):
        view(rig.orders, 5).update_one({"_id": 1}, given, upsert=True)
    assert rig.orders.count_documents({}) == 0


# -- what is pending survives ----------------------------------------------------------------------

Others = Callable[[FencedCollection], Any]
NEW_ROOT = {"$mergeObjects": [{"_id": "$_id"}, {"a": 1}]}
DROPPING: dict[str, Others] = {
    "replace": lambda orders: orders.replace_one({"_id": 1}, {"a": 1}),
    "upsert": lambda orders: orders.replace_one({"_id": 1}, {"a": 1}, upsert=True),
    "bulk replace": lambda orders: orders.bulk_write([ReplaceOne({"_id": 1}, {"a": 1})]),
    "new root": lambda orders: orders.update_one({"_id": 1}, [{"$replaceWith": NEW_ROOT}]),
    "old spelling": lambda orders: orders.find_one_and_update({"_id": 1}, [{"$replaceRoot": {"newRoot": NEW_ROOT}}]),
    "projection": lambda orders: orders.update_one({"_id": 1}, [{"$set": {"a": 1}}, {"$project": {"a": 1}}]),
}


def fenced(rig: Rig, outbox: Outbox, token: int = 5) -> FencedCollection:
    """As `change.fenced` gives it: it knows the outboxes of the app."""
    return FencedCollection(rig.orders, fence(token), outboxes=lambda: [outbox])


@pytest.mark.parametrize("drop", DROPPING.values(), ids=DROPPING.keys())
def test_a_replacement_keeps_what_is_pending(rig: Rig, drop: Others) -> None:
    """And where nothing is pending no field comes to be."""
    outbox = rig.outbox(at_once=False)
    outbox.update_one({"_id": 1}, {"$set": {"b": 1}}, upsert=True, tasks=[rig.add.s(0, 0)])
    kept = rig.orders.find_one({}, {"_id": 1, "pendingEvents": 1}) or {}
    drop(fenced(rig, outbox))
    assert rig.orders.find_one() == {**kept, "a": 1, FENCE: stamp(5)}
    assert outbox.sweep(older_than=0).dispatched == 1
    drop(fenced(rig, outbox, 6))
    assert rig.orders.find_one() == {"_id": 1, "a": 1, FENCE: stamp(6)}
    assert rig.sent() == [[0, 0]]


def test_a_replacement_that_brings_entries_is_refused(rig: Rig) -> None:
    """P9: it would take others' away, and without an `_id` the server has no good word for it."""
    outbox = rig.outbox(at_once=False)
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(0, 0)])
    orders, insert = fenced(rig, outbox), UpdateOne({"_id": 2}, {"$set": {"a": 1}}, upsert=True)
    for given in ({"a": 1}, {"a": 1, "_id": 1}):
        document = outbox.with_tasks(given, [rig.add.s(1, 1)])
        with pytest.raises(OutboxRefusedError):
            orders.replace_one({"_id": 1}, document, upsert=True)
        with pytest.raises(OutboxRefusedError):
            orders.bulk_write([insert, ReplaceOne({"_id": 1}, document)])
    assert (rig.orders.count_documents({}), rig.pending(1)["count"]) == (1, 1)


DELETES: dict[str, Others] = {
    "delete": lambda orders: orders.delete_one({"_id": 1}),
    "by another field": lambda orders: orders.delete_one({"k": 1}),
    "bulk delete": lambda orders: orders.bulk_write([DeleteOne({"_id": number}) for number in range(4)]),
}


@pytest.mark.parametrize("delete", DELETES.values(), ids=DELETES.keys())
def test_a_delete_delivers_what_is_pending(rig: Rig, delete: Others) -> None:
    """
    As `Outbox.delete_one`. A stale execution deletes nothing.

    In a transaction nothing is delivered, since a relay would wait for it: the delete is refused.
    """
    outbox = rig.outbox(at_once=False)
    outbox.insert_one({"_id": 1, "k": 1, FENCE: stamp(4)}, tasks=[rig.add.s(1, 1), rig.add.s(1, 2)])
    with pytest.raises(StaleFencingTokenError):
        delete(fenced(rig, outbox, 3))
    orders = fenced(rig, outbox)
    orders.delete_one({"_id": "another"})  # tombstones are there before the transaction begins
    with rig.database.client.start_session() as session, session.start_transaction():
        for name in ("delete_one", "bulk_write"):
            setattr(orders, name, partial(getattr(orders, name), session=session))
        with pytest.raises(OutboxRefusedError) as refused:
            delete(orders)
    assert conflict_cause(refused.value) is not None, "a handler waits for it, in doubt"
    assert (rig.orders.count_documents({}), rig.sent()) == (1, [])
    delete(fenced(rig, outbox))
    assert (rig.orders.count_documents({}), rig.sent()) == (0, [[1, 1], [1, 2]])


def test_a_delete_waits_for_a_broker_that_is_away(database: Database[Document]) -> None:
    """P14: an outage counts against no change, so the cause of the refusal is one; the document stays."""
    with opened(database, "redis://127.0.0.1:1/0") as away:
        outbox = away.outbox(at_once=False)
        database["orders"].insert_one(outbox.with_tasks({"_id": 1}, [away.add.s(1, 1)]))
        with pytest.raises(OutboxRefusedError) as refused:
            fenced(away, outbox).delete_one({"_id": 1})
        assert infrastructure_cause(refused.value) is not None
        assert database["orders"].count_documents({}) == 1


def test_a_delete_waits_for_another_relay(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is done in a moment, as a rule: a handler must not fail for it."""
    outbox, deliveries = rig.outbox(at_once=False), list[Any]()
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])
    hold(rig.orders, 1)
    deliver_now = outbox.runtime.deliver_now

    def deliver(document_id: Any) -> Any:
        deliveries.append(deliver_now(document_id))
        due_again(rig.orders)  # the other relay has failed
        return deliveries[-1]

    monkeypatch.setattr(outbox.runtime, "deliver_now", deliver)
    fenced(rig, outbox).delete_one({"_id": 1})
    assert [each.dispatched for each in deliveries] == [0, 1]
    assert (rig.orders.count_documents({}), rig.sent()) == (0, [[1, 1]])
