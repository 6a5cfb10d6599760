"""
Bookkeeping as a change stream shows it: what outboxes, locks, transactions and fences really write.

The server leaves it out, or the selector does; the same events remain, and each can be gone on from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import bson
import pytest
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient, ReplaceOne
from pymongo.database import Database

from mongo_celery import STORED_ID, Bridge, Change, Changes, Participant, TwoPhaseCommit
from mongo_celery.bridge.operations import dead_letter_commands as letters
from mongo_celery.bridge.stream.bookkeeping import Bookkeeping
from mongo_celery.bridge.stream.source import Scope, Selector, make_scope, resolve_selectors
from mongo_celery.errors import TransactionCanceledError
from mongo_celery.locking import select_for_update, select_many_for_update, transactional
from mongo_celery.mongo.oplog import operation_time
from mongo_celery.testing import BridgeRunner
from tests.fixtures.process import wait_for
from tests.rig.fenced import Document, view
from tests.rig.outbox import Rig
from tests.rig.stream import StreamReading, now, selector_of

Events = list[Mapping[str, Any]]
LAST = "the last one"


def stream(database: Database[Document]) -> tuple[Selector, Scope]:
    bookkeeping = Bookkeeping({f"{database.name}.orders": frozenset({"pendingEvents"})})
    asked = selector_of(f"{database.name}.orders")
    scope = make_scope([asked], state_database="none", full_document="updateLookup", bookkeeping=bookkeeping)
    [asked] = resolve_selectors([asked], bookkeeping)
    return asked, scope


def read(opened_on: Any, pipeline: Any, start: Any) -> Events:
    """All events from a time up to the document that is called the last one."""
    found: Events = []
    options = {"full_document": "updateLookup", "max_await_time_ms": 100, "start_at_operation_time": start}
    with opened_on.watch(list(pipeline), **options) as events:
        for event in events:
            if event["documentKey"]["_id"] == LAST:
                return found
            found.append(event)
    raise AssertionError("the stream has ended")


def names_of(event: Mapping[str, Any]) -> set[str]:
    """The fields at the top of the document that an event has touched; none unless it is an update."""
    description = event.get("updateDescription") or {"updatedFields": {}, "removedFields": []}
    cut = [array["field"] for array in description.get("truncatedArrays") or ()]
    paths = [*description["updatedFields"], *description["removedFields"], *cut]
    return {path.partition(".")[0] for path in paths}


def with_an_outbox(rig: Rig, database: Database[Document]) -> None:
    """By the writer's dispatcher, by the sweep, as plain values, and entries without a change beside them."""
    outbox, left = rig.outbox(), rig.outbox("orders", name="left", at_once=False)
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])
    outbox.update_one({"_id": 1}, {"$set": {"paid": 1}}, tasks=[rig.add.s(1, 2), rig.add.s(1, 3)])
    left.insert_one({"_id": 2}, tasks=[rig.add.s(2, number) for number in range(3)])
    assert left.sweep(older_than=0).dispatched == 3
    left.update_one({"_id": 2}, {"$inc": {"paid": 1}}, tasks=[rig.add.s(2, 4)])
    database["orders"].update_one({"_id": 2}, left.with_tasks({"$inc": {"paid": 1}}, [rig.add.s(STORED_ID, 5)]))
    assert left.sweep(older_than=0).dispatched == 2


def with_an_outbox_in_a_large_document(rig: Rig, database: Database[Document]) -> None:
    left = rig.outbox(at_once=False)
    database["orders"].insert_one({"_id": 1, "paid": ["x" * 100] * 100})
    for number in range(3):
        update = {"$push": {"paid": number}}
        database["orders"].update_one({"_id": 1}, left.with_tasks(update, [rig.add.s(STORED_ID, number)]))
    database["orders"].update_one({"_id": 1}, left.with_tasks([{"$set": {"paid": 7}}], [rig.add.s(STORED_ID, 3)]))
    database["orders"].update_many({}, left.with_tasks({"$set": {"paid": 8}}, [rig.add.s(STORED_ID, 4)]))
    assert left.sweep(older_than=0).dispatched == 5


def with_locks(_rig: Rig, database: Database[Document]) -> None:
    database["orders"].insert_many([{"_id": number} for number in range(3)])

    @transactional(database.client)
    def pay(number: int, *, session: Any) -> None:
        locked = select_for_update(database["orders"], {"_id": number}, session=session)
        assert locked is not None
        select_many_for_update(database["orders"], {}, session=session)
        database["orders"].update_one({"_id": number}, {"$inc": {"paid": 1}}, session=session)

    for number in (1, 1, 2):
        pay(number)


def with_markers(_rig: Rig, database: Database[Document]) -> None:
    database["orders"].insert_many([{"_id": name, "paid": 10} for name in "AB"])
    bank = TwoPhaseCommit(None, database["transactions"], application="bank", protocol="documents")

    def parts(value: int) -> list[Participant]:
        sides = (("A", -value), ("B", value))
        enough = {"paid": {"$lte": 15}}
        return [Participant(database["orders"], name, {"$inc": {"paid": by}}, require=enough) for name, by in sides]

    for value in (3, 3):
        assert bank.run(bank.begin(parts(value))).state == "done"
    with pytest.raises(TransactionCanceledError):
        bank.run(bank.begin(parts(1)))


def with_fences(_rig: Rig, database: Database[Document]) -> None:
    database["orders"].insert_one({"_id": 1})
    for token in range(3):
        view(database["orders"], token).update_one({"_id": 1}, {"$set": {"paid": min(token, 1)}})
    view(database["orders"], 1, partitioning=2).update_one({"_id": 1}, {"$set": {"paid": 1}})


def test_a_handler_may_copy_what_it_is_given(rig: Rig, database: Database[Document], mongo_url: str) -> None:
    """
    While something is pending in the source: by a chain of fenced copies, as lists, with tasks, of documents that
    exist, and by the replay of a dead letter. No entry is sent twice, stays in a copy, or is taken from one.
    """
    orders, copies = rig.outbox(at_once=False), rig.outbox("copies", name="copies", at_once=False)
    bridge = Bridge(rig.app, mongo_url, name="shop", autodiscover=False)
    failing = [ValueError("once")]
    options: Document = {"failure_policy": "dead_letter"}

    def copy(change: Change, name: str) -> None:
        document: Any = change.full_document
        change.fenced(f"{database.name}.{name}").replace_one(change.document_key, document, upsert=True)

    @bridge.on_change(f"{database.name}.orders", **options)
    def first(change: Change) -> None:
        copy(change, "copies")

    @bridge.on_change(f"{database.name}.copies", **options)
    def second(change: Change) -> None:
        copy(change, "third")

    @bridge.on_changes(f"{database.name}.third", **options)
    def third(changes: Changes) -> None:
        requests = [ReplaceOne(change.document_key, change.full_document or {}, upsert=True) for change in changes]
        changes.fenced(f"{database.name}.last").bulk_write(requests)

    @bridge.on_change(f"{database.name}.orders", **options)
    def with_a_task(change: Change) -> None:
        if change.operation_type == "insert" and failing:
            raise failing.pop()
        replace = ReplaceOne(change.document_key, change.full_document or {}, upsert=True)
        change.fenced(f"{database.name}.copies").bulk_write([copies.with_tasks(replace, [rig.add.s(7, 7)])])

    @bridge.on_change(f"{database.name}.orders", bookkeeping=True, operations={"insert"})
    def whole(change: Change) -> None:
        assert "pendingEvents" in (change.full_document or {})

    with BridgeRunner(bridge) as runner:
        orders.insert_one({"_id": "a", "n": 1}, tasks=[rig.add.s(1, 1)])
        runner.deliver(raises=False)
        orders.update_one({"_id": "a"}, {"$set": {"n": 2}}, tasks=[rig.add.s(1, 2)])
        runner.deliver()
        assert bridge.operations.replay_dead_letters(over_newer=True).run().fields["done"] == 1
        runner.snapshot("first")
        wait_for(lambda: not runner.deliver().calls and not letters.find(bridge.wiring).letters)
        ours = {"_fence": 0, "pendingEvents": 0}
        copied, *others = (list(database[name].find({}, ours)) for name in ("copies", "third", "last"))
        assert others == [copied] * 2
        assert database["third"].count_documents({"pendingEvents": {"$exists": True}}) == 0
        assert orders.sweep(older_than=0).dispatched == 2
        assert copies.sweep(older_than=0).dispatched == 2
        assert [sent.args for sent in runner.sent("add")] == [(1, 1), (1, 2), (7, 7), (7, 7)]


FEATURES: list[Callable[[Rig, Database[Document]], None]] = [
    with_an_outbox,
    with_an_outbox_in_a_large_document,
    with_locks,
    with_markers,
    with_fences,
]


@pytest.mark.parametrize("act", FEATURES, ids=lambda act: act.__name__)
def test_handlers_get_what_users_change_and_no_bookkeeping(
    rig: Rig, database: Database[Document], act: Callable[[Rig, Database[Document]], None]
) -> None:
    start = now(database.client).time
    act(rig, database)
    database["orders"].insert_one({"_id": LAST})
    asked, scope = stream(database)
    whole = read(database["orders"], [], start)
    given = [event for event in whole if asked.selects(event)]
    filtered = [event for event in read(database["orders"], scope.pipeline, start) if asked.selects(event)]
    assert [event["_id"] for event in filtered] == [event["_id"] for event in given]
    updates = [event for event in whole if event["operationType"] == "update"]
    wanted = [event for event in updates if "paid" in names_of(event)]
    assert [event for event in given if event["operationType"] == "update"] == wanted
    assert 0 < len(wanted) < len(updates)


def test_a_stream_passes_bookkeeping_that_it_does_not_give(
    mongo_url: str, mongo_client: MongoClient[Document], database: Database[Document]
) -> None:
    """P1, P12: its marks move on, and a name that is no valid text stops nothing, whichever field it stands in."""
    orders = database["orders"]
    _, scope = stream(database)
    orders.insert_one({"_id": 1})
    with StreamReading(mongo_url, scope, now(mongo_client)) as reading:
        for before in ("pendingEvents.", ""):
            update = bson.encode({"$set": {f"{before}##": 1}}).replace(b"##", b"\xff\xfe")
            database.command("update", "orders", updates=[{"q": {"_id": 1}, "u": RawBSONDocument(update)}])
        orders.update_one({"_id": 1}, {"$unset": {"pendingEvents": 1}})
        orders.insert_one({"_id": 2})
        reading.wait_for_keys(1, 2)
        orders.update_one({"_id": 1}, {"$set": {"pendingEvents.count": 2}})
        behind = operation_time(mongo_client)
        wait_for(lambda: any(mark.cluster_time and mark.cluster_time >= behind for mark in reading.marks))
        assert reading.keys == [1, 2]
    assert reading.read_errors == {}
