"""The writes of an outbox: PyMongo's results, one atomic write, and what is refused."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pymongo import ReturnDocument
from pymongo.database import Database

from mongo_celery import Event, Outbox
from mongo_celery.errors import OutboxRefusedError
from mongo_celery.locking import transactional
from tests.fixtures.process import wait_for
from tests.integration.outbox_rig import Rig, opened, pending

Document = dict[str, Any]


@pytest.fixture
def rig(database: Database[Document], redis_url: str) -> Iterator[Rig]:
    with opened(database, redis_url) as made:
        yield made


def stored(database: Database[Document], identity: Any) -> Document:
    """The document without the outbox's field."""
    document = database["orders"].find_one({"_id": identity})
    assert document is not None
    document.pop("pendingEvents", None)
    return document


def test_an_insert_writes_the_document_and_dispatches_in_order(rig: Rig, database: Database[Document]) -> None:
    order: Document = {"lines": [1]}
    result = rig.outbox().insert_one(order, tasks=[rig.add.s(1, 1), rig.add.s(2, 2)])

    assert result.acknowledged
    assert order == {"lines": [1], "_id": result.inserted_id}
    assert stored(database, result.inserted_id) == order
    assert rig.sent() == [[1, 1], [2, 2]]
    assert pending(database, result.inserted_id)["count"] == 0


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
@pytest.mark.parametrize("at_once", ["wait", False])
def test_an_update_does_what_pymongos_does_and_adds_the_entry(
    rig: Rig, database: Database[Document], name: str, at_once: Any
) -> None:
    """The same document and the same result as the plain method gives on a copy."""
    filter_, update, options = UPDATES[name]
    document = {"_id": 1, "a": 1, "b": 0, "items": [{"sku": "x", "n": 1}, {"sku": "y", "n": 1}]}
    database["orders"].insert_one(dict(document))
    database["plain"].insert_one(dict(document))
    plain = database["plain"].update_one(filter_, update, **options)

    result = rig.outbox(at_once=at_once).update_one(filter_, update, tasks=[rig.add.s(1, 2)], **options)

    assert result.matched_count == plain.matched_count
    assert (result.upserted_id is None) == (plain.upserted_id is None)
    left, right = (
        [{k: v for k, v in each.items() if k not in {"_id", "pendingEvents"}} for each in database[c].find()]
        for c in ("orders", "plain")
    )
    assert left == right
    written = bool(result.matched_count or plain.upserted_id is not None or name == "null id")
    waiting = sum(
        each["pendingEvents"]["count"] for each in database["orders"].find({"pendingEvents": {"$exists": True}})
    )
    assert (len(rig.drain()), waiting) == ((int(written), 0) if at_once else (0, int(written)))
    if plain.upserted_id is not None and "_id" not in filter_:
        assert database["orders"].find_one({"_id": result.upserted_id}) is not None


def test_the_first_of_a_sort_is_the_one_that_is_updated(rig: Rig, database: Database[Document]) -> None:
    database["orders"].insert_many([{"_id": each, "n": each} for each in range(5)])
    outbox = rig.outbox()
    found = outbox.find_one_and_update(
        {}, {"$set": {"hit": True}}, sort=[("n", -1)], projection={"n": 1}, tasks=[rig.add.s(1, 1)]
    )
    assert found == {"_id": 4, "n": 4}
    after = outbox.find_one_and_update(
        {"_id": 2},
        {"$inc": {"n": 1}},
        projection={"n": 1},
        return_document=ReturnDocument.AFTER,
        tasks=[rig.add.s(2, 2)],
    )
    assert after == {"_id": 2, "n": 3}
    assert outbox.find_one_and_update({"_id": 9}, {"$set": {"n": 1}}, tasks=[rig.add.s(3, 3)]) is None
    assert rig.sent() == [[1, 1], [2, 2]]


@pytest.mark.parametrize(
    "write",
    [
        lambda outbox, task: outbox.insert_one({"pendingEvents": 1}, tasks=[task]),
        lambda outbox, task: outbox.update_one({"_id": 1}, {"$set": {"pendingEvents.count": 0}}, tasks=[task]),
        lambda outbox, _task: outbox.update_one({"_id": 1}, {"$unset": {"pendingEvents": ""}}),
        lambda outbox, task: outbox.update_one({"_id": 1}, {"$rename": {"a": "pendingEvents.a"}}, tasks=[task]),
        lambda outbox, task: outbox.update_one({"_id": 1}, [{"$unset": "pendingEvents"}], tasks=[task]),
        lambda outbox, task: outbox.update_one({"_id": 1}, [{"$replaceWith": {"a": 1}}], tasks=[task]),
        lambda outbox, task: outbox.update_one({"_id": 1}, {"$set": {"a": 1}}, tasks=task),
        lambda outbox, _task: outbox.update_one({"_id": 1}, {"$set": {"a": 1}}, events=[{"a": 1}]),
        lambda outbox, _task: outbox.update_one({"_id": 1}, {"$set": {"a": 1}}, events=[Event("", 1)]),
        lambda outbox, _task: outbox.update_one({"_id": 1}, {"$set": {"a": 1}}, events=[Event("k", object())]),
    ],
)
def test_what_would_harm_the_outbox_is_refused(
    rig: Rig, database: Database[Document], write: Callable[[Outbox, Any], object]
) -> None:
    """And nothing is written."""
    database["orders"].insert_one({"_id": 1, "a": 0})
    with pytest.raises(OutboxRefusedError):
        write(rig.outbox(), rig.add.s(1, 2))
    assert list(database["orders"].find()) == [{"_id": 1, "a": 0}]


def test_a_document_near_16_mb_is_refused_or_delivered_never_stuck(rig: Rig, database: Database[Document]) -> None:
    """What could be written can be claimed and emptied, to the last byte; what cannot is refused as it is written."""
    outbox = rig.outbox(at_once=False)
    outbox.insert_one({"_id": "probe", "pad": ""}, tasks=[rig.add.s(1, 1)])
    probe = next(database["orders"].aggregate([{"$project": {"size": {"$bsonSize": "$$ROOT"}}}]))["size"]
    room = 16 * 1024 * 1024 - probe + 4  # the id is shorter

    with pytest.raises(OutboxRefusedError, match="16 MB"):
        outbox.insert_one({"_id": "x", "pad": "p" * (room + 1)}, tasks=[rig.add.s(1, 1)])
    outbox.insert_one({"_id": "x", "pad": "p" * room}, tasks=[rig.add.s(1, 1)])
    with pytest.raises(OutboxRefusedError, match="16 MB"):
        outbox.update_one({"_id": "x"}, {"$set": {"a": 1}}, tasks=[rig.add.s(2, 2)])
    assert outbox.backing.relay.deliver("x").dispatched == 1
    assert rig.sent() == [[1, 1]]


def test_writers_at_the_same_time_lose_no_entry_and_keep_the_order_of_each(
    rig: Rig, database: Database[Document]
) -> None:
    """Eight threads on two documents: each entry is sent once, those of a thread in its order."""
    outbox = rig.outbox()
    database["orders"].insert_many([{"_id": 0}, {"_id": 1}])

    def write(number: int) -> None:
        for step in range(15):
            outbox.update_one({"_id": number % 2}, {"$set": {"last": number}}, tasks=[rig.add.s(number, step)])

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_for(lambda: outbox.sweep(older_than=0) and not outbox.status().pending)

    sent = rig.sent()
    for number in range(8):
        assert [step for writer, step in sent if writer == number] == list(range(15))
    assert len(sent) == 120
    assert pending(database, 0)["count"] == pending(database, 1)["count"] == 0


def test_inside_a_transaction_nothing_is_dispatched_before_the_commit(rig: Rig, database: Database[Document]) -> None:
    """Committed by `transactional`: at once afterwards. By the driver's own: the index is looked at. Aborted: never."""
    outbox = rig.outbox()
    database["orders"].insert_one({"_id": 1})
    client = database.client

    @transactional(client)
    def book(*, session: Any) -> None:
        outbox.insert_one({"_id": 2}, tasks=[rig.add.s(2, 2)], session=session)
        outbox.update_one({"_id": 1}, {"$set": {"a": 1}}, tasks=[rig.add.s(1, 1)], session=session)
        assert rig.sent() == []

    book()
    assert sorted(rig.sent()) == [[1, 1], [2, 2]]

    with client.start_session() as session:
        session.with_transaction(
            lambda session: outbox.update_one({"_id": 1}, {"$set": {"a": 2}}, tasks=[rig.add.s(3, 3)], session=session)
        )
        session.start_transaction()
        outbox.insert_one({"_id": 3}, tasks=[rig.add.s(4, 4)], session=session)
        session.abort_transaction()
    wait_for(lambda: not outbox.status().pending)
    assert rig.sent() == [[3, 3]]
    assert database["orders"].find_one({"_id": 3}) is None


def test_a_delete_is_refused_while_something_is_pending(rig: Rig, database: Database[Document]) -> None:
    outbox = rig.outbox(at_once=False)
    outbox.insert_one({"_id": 1, "a": 1}, tasks=[rig.add.s(1, 1)])
    with pytest.raises(OutboxRefusedError, match="not deleted") as caught:
        outbox.delete_one({"a": 1})
    assert caught.value.retryable
    assert database["orders"].count_documents({}) == 1
    assert outbox.sweep(older_than=0).dispatched == 1
    assert outbox.delete_one({"a": 1}).deleted_count == 1
    assert outbox.delete_one({"_id": 1}).deleted_count == 0

    eager = rig.outbox("others", at_once=True)
    eager.insert_one({"_id": 2}, tasks=[rig.add.s(2, 2)])

    def is_deleted() -> bool:
        try:
            return eager.delete_one({"_id": 2}).deleted_count == 1
        except OutboxRefusedError:
            return False

    wait_for(is_deleted)
    assert rig.sent() == [[1, 1], [2, 2]]


def test_a_delete_in_a_transaction_is_refused_too(rig: Rig, database: Database[Document]) -> None:
    outbox = rig.outbox(at_once=False)
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])
    outbox.insert_one({"_id": 2})
    with database.client.start_session() as session, session.start_transaction():
        outbox.update_one({"_id": 1}, {"$set": {"a": 1}}, session=session)
        with pytest.raises(OutboxRefusedError, match="not deleted"):
            outbox.delete_one({"_id": 1}, session=session)
        assert outbox.delete_one({"_id": 2}, session=session).deleted_count == 1
    assert [document["_id"] for document in database["orders"].find({}, {"_id": 1})] == [1]


def test_the_index_is_partial_has_its_name_and_is_used_by_the_sweep(rig: Rig, database: Database[Document]) -> None:
    outbox = rig.outbox()
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])
    index = database["orders"].index_information()["pendingEvents"]
    assert index["key"] == [("pendingEvents.count", 1), ("pendingEvents.claim.until", 1)]
    assert index["partialFilterExpression"] == {"pendingEvents.count": {"$gt": 0}}


def test_the_index_is_made_again_for_a_collection_that_was_dropped(rig: Rig, database: Database[Document]) -> None:
    """By the next outbox on it, as in a test suite that begins with empty databases."""
    rig.outbox(name="first").insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])
    database["orders"].drop()
    rig.outbox(name="second").insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])
    assert "pendingEvents" in database["orders"].index_information()


def test_an_option_that_no_write_knows_is_refused(rig: Rig, database: Database[Document]) -> None:
    """Dropped silently, it would be believed."""
    with pytest.raises(TypeError, match="hintt"):
        rig.outbox().update_one({"_id": 1}, {"$set": {"a": 1}}, upsert=True, tasks=[rig.add.s(1, 1)], hintt="x")
    assert database["orders"].count_documents({}) == 0


@pytest.mark.parametrize(
    ("condition", "subject"),
    [({"_id": 5}, "5"), ({"_id": {"$eq": 5}}, "5"), ({"_id": {"$gte": 5}}, None), ({"_id": re.compile("a")}, None)],
    ids=str,
)
def test_an_events_subject_is_the_id_that_the_filter_demands(
    rig: Rig, database: Database[Document], condition: Document, subject: str | None
) -> None:
    """And no condition: a pattern that was asked for is nobody's `_id`."""
    outbox = rig.outbox(at_once=False)
    database["orders"].insert_many([{"_id": 5}, {"_id": "a"}])
    outbox.update_one(condition, {"$set": {"n": 1}}, events=[Event("order.paid", {})])
    [changed] = database["orders"].find({"n": 1})
    assert json.loads(changed["pendingEvents"]["events"][0]["payload"]).get("subject") == subject
