"""An outbox's writes to several documents, its deletes, and tasks that are made of the `_id`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pymongo.database import Database
from pymongo.errors import BulkWriteError, DuplicateKeyError

from mongo_celery import STORED_ID, Event, Outbox
from mongo_celery.errors import CommandRefusedError, OutboxRefusedError
from mongo_celery.outbox.canvas import bind_message
from mongo_celery.outbox.entries import Entry, read_entries
from mongo_celery.outbox.replay import dead_letters, replay
from tests.integration.outbox_rig import Rig, opened, pending

Document = dict[str, Any]


@pytest.fixture(name="rig")
def a_rig(database: Database[Document], redis_url: str) -> Iterator[Rig]:
    with opened(database, redis_url) as rig:
        yield rig


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
    done = outbox.insert_many(documents, tasks=[rig.add.s(STORED_ID, 1), lambda key: rig.add.s(str(key), 2)])
    assert done.inserted_ids == [1, documents[1]["_id"]]
    made = str(documents[1]["_id"])
    assert delivered(rig, outbox) == sorted([[1, 1], ["1", 2], [made, 1], [made, 2]], key=repr)
    with pytest.raises(TypeError, match="non-empty"):
        outbox.insert_many([])


@pytest.mark.parametrize("ordered", [True, False])
def test_what_was_inserted_before_an_error_is_dispatched_at_once(
    rig: Rig, database: Database[Document], ordered: bool
) -> None:
    """And nothing of what was not: its entries were never stored."""
    outbox = rig.outbox()
    database["orders"].insert_one({"_id": 2})
    with pytest.raises(BulkWriteError) as caught:
        outbox.insert_many([{"_id": 1}, {"_id": 2}, {"_id": 3}], tasks=[rig.add.s(STORED_ID, 0)], ordered=ordered)
    assert [each["index"] for each in (caught.value.details or {})["writeErrors"]] == [1]
    assert sorted(rig.sent()) == ([[1, 0]] if ordered else [[1, 0], [3, 0]])


def test_an_update_of_many_is_a_task_in_each(rig: Rig, outbox: Outbox, database: Database[Document]) -> None:
    """PyMongo's result."""
    database["orders"].insert_many([{"_id": each, "n": each % 2} for each in range(4)])
    done = outbox.update_many({"n": 1}, {"$set": {"seen": 1}}, tasks=[rig.add.s(STORED_ID, 1)])
    assert (done.matched_count, done.modified_count, done.upserted_id) == (2, 2, None)
    done = outbox.update_many({"_id": 9}, {"$set": {"n": 9}}, upsert=True, tasks=[lambda key: rig.add.s(key, 2)])
    assert done.upserted_id == 9
    assert outbox.update_many({"n": 77}, {"$set": {"n": 9}}, tasks=[rig.add.s(1, 2)]).matched_count == 0
    ids = {each["id"] for key in (1, 3) for each in pending(database, key)["events"]}
    assert len(ids) == 1, "the same entry, which is bound when it is published"


Act = Callable[[Outbox, Any], Any]

KNOWN: dict[str, Act] = {
    "insert": lambda outbox, make: outbox.insert_one({"_id": 7}, tasks=[make]),
    "by its id": lambda outbox, make: outbox.update_one({"_id": 7}, {"$set": {"a": 1}}, upsert=True, tasks=[make]),
    "by eq": lambda outbox, make: outbox.update_one({"_id": {"$eq": 7}}, {"$inc": {"a": 1}}, upsert=True, tasks=[make]),
}


@pytest.mark.parametrize("act", KNOWN.values(), ids=KNOWN.keys())
def test_a_task_is_made_of_an_id_that_the_write_says(rig: Rig, outbox: Outbox, act: Act) -> None:
    """By an insert, or by a filter that demands it."""
    act(outbox, lambda key: rig.add.s(key, "x"))
    assert delivered(rig, outbox) == [[7, "x"]]


VAGUE: dict[str, Act] = {
    "a list of ids": lambda outbox, make: outbox.update_one(
        {"_id": {"$in": [801, 802]}}, {"$set": {"a": 1}}, upsert=True, tasks=[make]
    ),
    "another field": lambda outbox, make: outbox.update_one({"k": 1}, {"$set": {"a": 1}}, tasks=[make]),
    "an id on insert": lambda outbox, make: outbox.update_one(
        {"k": 1}, {"$setOnInsert": {"_id": 5}}, upsert=True, tasks=[make]
    ),
    "a collation": lambda outbox, make: outbox.update_one(
        {"_id": "a"}, {"$set": {"a": 1}}, collation={"locale": "en"}, tasks=[make]
    ),
    "many": lambda outbox, make: outbox.update_many({}, {"$set": {"a": 1}}, tasks=[make]),
    "an upsert": lambda outbox, make: outbox.update_one({"k": 1}, {"$set": {"a": 1}}, upsert=True, tasks=[make]),
}


@pytest.mark.parametrize("act", VAGUE.values(), ids=VAGUE.keys())
def test_a_task_is_not_made_of_an_id_that_nobody_knows(
    rig: Rig, outbox: Outbox, database: Database[Document], act: Act
) -> None:
    """Nothing is written, and the sentence names what helps."""
    database["orders"].insert_one({"_id": 1, "k": 1})
    with pytest.raises(OutboxRefusedError, match="STORED_ID"):
        act(outbox, lambda key: rig.add.s(key, 1))
    assert list(database["orders"].find()) == [{"_id": 1, "k": 1}]


def test_what_lies_in_many_documents_is_set_aside_and_replayed_in_each(
    rig: Rig, outbox: Outbox, database: Database[Document]
) -> None:
    """One entry under one id, and yet a dead letter for every document; a replay sends the ids that it would have."""
    database["orders"].insert_many([{"_id": each} for each in (1, 2)])
    outbox.update_many({}, {"$set": {"a": 1}}, tasks=[rig.add.s(STORED_ID, 1)], events=[Event("late", [STORED_ID])])
    ids = []
    for key in (1, 2):
        stored = [Entry.from_document(each) for each in pending(database, key)["events"]]
        ids += [bind_message(json.loads(stored[0].payload), stored[0].bind, key)["options"]["task_id"]]
        for entry in stored:
            outbox.dead_letters.add(key, entry, ValueError("x"))
            outbox.dead_letters.add(key, entry, ValueError("once more"))
        with pytest.raises(CommandRefusedError, match="still in document"):
            replay(outbox, outbox.dead_letters.find()[-1]["_id"].partition("/")[2])
    database["orders"].update_many({}, {"$unset": {"pendingEvents": ""}})
    letters = outbox.dead_letters.find()
    assert sorted(each["document"] for each in letters) == [1, 1, 2, 2]
    for letter in letters:
        assert replay(outbox, letter["_id"].partition("/")[2]).result == "pending"
    assert outbox.sweep(older_than=0).dispatched == 4
    assert sorted((message.args, message.id) for message in rig.drain()) == [([1, 1], ids[0]), ([2, 1], ids[1])]
    assert outbox.dead_letters.count() == 0


def test_a_task_whose_id_the_user_chose_is_set_aside_for_each_document(
    rig: Rig, outbox: Outbox, database: Database[Document]
) -> None:
    """One entry under one id and bound to none, since nothing said that it goes to many: no letter hides another."""
    orders, keys = database["orders"], [1, 2, {"a": 1}]
    orders.insert_many([{"_id": each} for each in keys])
    orders.update_many({}, outbox.with_tasks({"$set": {"a": 1}}, [rig.add.s(1, 1).set(task_id="mine")]))
    for key in (*keys, *keys):
        (stored,) = read_entries(pending(database, key)["events"], outbox.backing.signer.is_signed)
        assert isinstance(stored, Entry)
        outbox.dead_letters.add(key, stored, ValueError("x"))
    letters = sorted(dead_letters(outbox, 0), key=lambda letter: repr(letter.document))
    assert [each.document for each in letters] == keys
    assert letters[0].id == letters[0].entry["id"], "as the log names it"
    orders.update_many({}, {"$unset": {"pendingEvents": ""}})
    assert {replay(outbox, letter.id).result for letter in letters} == {"pending"}
    assert outbox.sweep(older_than=0).dispatched == 3
    assert [message.id for message in rig.drain()] == ["mine"] * 3
    assert outbox.dead_letters.count() == 0


def test_tasks_may_be_gone_through_only_once(rig: Rig, outbox: Outbox) -> None:
    """A generator's tasks are those of every document, and of an upsert that looks at them first."""
    once: Any = (rig.add.s(STORED_ID, each) for each in (1, 2))
    outbox.insert_many([{"_id": 1}, {"_id": 2}], tasks=once)
    once = (rig.add.s(3, each) for each in (1,))
    outbox.update_one({"k": 3}, {"$set": {"a": 1}}, upsert=True, tasks=once)
    assert delivered(rig, outbox) == [[1, 1], [1, 2], [2, 1], [2, 2], [3, 1]]
    with pytest.raises(OutboxRefusedError, match="are lists"):
        outbox.insert_one({"_id": 9}, tasks=rig.add.s(1, 1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="document must be an instance"):
        outbox.insert_many(["text"], tasks=[rig.add.s(1, 1)])


def test_a_duplicate_is_pymongo_s_error(rig: Rig, outbox: Outbox) -> None:
    """With tasks as without."""
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])
    with pytest.raises(DuplicateKeyError):
        outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 2)])
    with pytest.raises(DuplicateKeyError):
        outbox.update_one({"_id": 1, "k": 2}, {"$set": {"a": 1}}, upsert=True, tasks=[lambda key: rig.add.s(key, 3)])
    assert delivered(rig, outbox) == [[1, 1]]
