"""An outbox's writes to several documents, and entries that lie in many."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pymongo.errors import BulkWriteError

from mongo_celery import STORED_ID, Event, Outbox
from mongo_celery.errors import CommandRefusedError, OutboxRefusedError
from mongo_celery.outbox.canvas import bind_message
from mongo_celery.outbox.entries import Entry, read_entries
from mongo_celery.outbox.replay import replay
from tests.rig.outbox import Rig

Document = dict[str, Any]


@pytest.fixture(name="outbox")
def an_outbox(rig: Rig) -> Outbox:
    return rig.outbox(at_once=False)


def delivered(rig: Rig, outbox: Outbox) -> list[list[Any]]:
    """Arguments of what a sweep publishes, in an order of their own."""
    outbox.sweep(older_than=0)
    return sorted(rig.sent(), key=repr)


def test_inserted_documents_get_tasks_of_their_own(rig: Rig, outbox: Outbox) -> None:
    """The `_id`s are in the user's documents and in the result, as PyMongo has it."""
    documents: list[Document] = [{"_id": 1}, {"n": 2}]
    done = outbox.insert_many(documents, tasks=[rig.add.s(STORED_ID, 1), rig.add.s(2, STORED_ID)])
    assert done.inserted_ids == [1, documents[1]["_id"]]
    made = str(documents[1]["_id"])
    assert delivered(rig, outbox) == sorted([[1, 1], [2, 1], [made, 1], [2, made]], key=repr)
    with pytest.raises(TypeError, match="non-empty"):
        outbox.insert_many([])


@pytest.mark.parametrize("ordered", [True, False])
def test_what_was_inserted_before_an_error_is_dispatched_at_once(rig: Rig, ordered: bool) -> None:
    """And nothing of what was not: its entries were never stored."""
    outbox = rig.outbox()
    rig.orders.insert_one({"_id": 2})
    with pytest.raises(BulkWriteError) as caught:
        outbox.insert_many([{"_id": 1}, {"_id": 2}, {"_id": 3}], tasks=[rig.add.s(STORED_ID, 0)], ordered=ordered)
    assert [each["index"] for each in (caught.value.details or {})["writeErrors"]] == [1]
    assert sorted(rig.sent()) == ([[1, 0]] if ordered else [[1, 0], [3, 0]])


def test_an_update_of_many_is_a_task_in_each(rig: Rig, outbox: Outbox) -> None:
    """PyMongo's result."""
    rig.orders.insert_many([{"_id": each, "n": each % 2} for each in range(4)])
    done = outbox.update_many({"n": 1}, {"$set": {"seen": 1}}, tasks=[rig.add.s(STORED_ID, 1)])
    assert (done.matched_count, done.modified_count, done.upserted_id) == (2, 2, None)
    done = outbox.update_many({"_id": 9}, {"$set": {"n": 9}}, upsert=True, tasks=[rig.add.s(STORED_ID, 2)])
    assert done.upserted_id == 9
    assert outbox.update_many({"n": 77}, {"$set": {"n": 9}}, tasks=[rig.add.s(1, 2)]).matched_count == 0
    ids = {each["id"] for key in (1, 3) for each in rig.pending(key)["events"]}
    assert len(ids) == 1, "the same entry, which is bound when it is published"


def test_what_lies_in_many_documents_is_set_aside_and_replayed_in_each(rig: Rig, outbox: Outbox) -> None:
    """One entry under one id, and yet a dead letter for every document; a replay sends the ids that it would have."""
    rig.orders.insert_many([{"_id": each} for each in (1, 2)])
    outbox.update_many({}, {"$set": {"a": 1}}, tasks=[rig.add.s(STORED_ID, 1)], events=[Event("late", [STORED_ID])])
    ids = []
    for key in (1, 2):
        stored = [Entry.from_document(each) for each in rig.pending(key)["events"]]
        ids += [bind_message(json.loads(stored[0].payload), stored[0].bind, key)["options"]["task_id"]]
        for entry in stored:
            outbox.runtime.dead_letters.add(key, entry, ValueError("x"))
            outbox.runtime.dead_letters.add(key, entry, ValueError("once more"))
        with pytest.raises(CommandRefusedError, match="still in document"):
            replay(outbox, outbox.runtime.dead_letters.find()[-1].id)
    rig.orders.update_many({}, {"$unset": {"pendingEvents": ""}})
    letters = outbox.runtime.dead_letters.find()
    assert sorted(each.document for each in letters) == [1, 1, 2, 2]
    for letter in letters:
        assert replay(outbox, letter.id) == f"{letter.id}~1"
    assert outbox.sweep(older_than=0).dispatched == 4
    assert sorted((message.args, message.id) for message in rig.drain()) == [([1, 1], ids[0]), ([2, 1], ids[1])]
    assert outbox.runtime.dead_letters.count() == 0


def test_a_task_whose_id_the_user_chose_is_set_aside_for_each_document(rig: Rig, outbox: Outbox) -> None:
    """One entry under one id, made for one document and written to many by mistake: no letter hides another."""
    orders, keys = rig.orders, [1, 2, {"a": 1}]
    orders.insert_many([{"_id": each} for each in keys])
    orders.update_many({}, outbox.with_tasks({"$set": {"a": 1}}, [rig.add.s(1, 1).set(task_id="mine")], id=1))
    for key in (*keys, *keys):
        (stored,) = read_entries(rig.pending(key)["events"], outbox.runtime.signer.is_signed)
        assert isinstance(stored, Entry)
        outbox.runtime.dead_letters.add(key, stored, ValueError("x"))
    letters = sorted(outbox.runtime.dead_letters.find(), key=lambda letter: repr(letter.document))
    assert [each.document for each in letters] == keys
    assert letters[0].id == letters[0].entry["id"], "as the log names it"
    orders.update_many({}, {"$unset": {"pendingEvents": ""}})
    assert all(replay(outbox, letter.id) for letter in letters)
    assert outbox.sweep(older_than=0).dispatched == 3
    assert [message.id for message in rig.drain()] == ["mine"] * 3
    assert outbox.runtime.dead_letters.count() == 0


def test_tasks_may_be_gone_through_only_once(rig: Rig, outbox: Outbox) -> None:
    """A generator's tasks are those of every document, and of an upsert that looks at them first."""
    once: Any = (rig.add.s(STORED_ID, each) for each in (1, 2))
    outbox.insert_many([{"_id": 1}, {"_id": 2}], tasks=once)
    once = (rig.add.s(3, each) for each in (1,))
    outbox.update_one({"k": 3}, {"$set": {"a": 1}}, upsert=True, tasks=once)
    assert delivered(rig, outbox) == [[1, 1], [1, 2], [2, 1], [2, 2], [3, 1]]
    with pytest.raises(OutboxRefusedError, match="must be lists"):
        outbox.insert_one({"_id": 9}, tasks=rig.add.s(1, 1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="document must be an instance"):
        outbox.insert_many(["text"], tasks=[rig.add.s(1, 1)])
