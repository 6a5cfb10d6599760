"""An outbox's writes to several documents, its deletes, and tasks that are made of the `_id`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pymongo import DeleteMany, DeleteOne, InsertOne, MongoClient, ReplaceOne, ReturnDocument, UpdateMany, UpdateOne
from pymongo.collation import Collation
from pymongo.database import Database
from pymongo.errors import BulkWriteError, DuplicateKeyError, InvalidOperation
from pymongo.monitoring import CommandFailedEvent, CommandListener, CommandStartedEvent, CommandSucceededEvent

from mongo_celery import STORED_ID, Event, Outbox
from mongo_celery.errors import CommandRefusedError, OutboxRefusedError
from mongo_celery.mongo.identity import NO_ID
from mongo_celery.outbox import Write
from mongo_celery.outbox.canvas import bound
from mongo_celery.outbox.deletes import Deletes
from mongo_celery.outbox.delivery import Delivery
from mongo_celery.outbox.entries import Entry, entries_of
from mongo_celery.outbox.pending import UNCLAIMED, PendingField
from mongo_celery.outbox.replay import dead_letters, replay
from tests.integration.outbox_rig import Rig, hold, opened, pending

Document = dict[str, Any]


class Commands(CommandListener):
    """What a client asks the server."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def started(self, event: CommandStartedEvent) -> None:
        self.names.append(event.command_name)

    def succeeded(self, event: CommandSucceededEvent) -> None: ...

    def failed(self, event: CommandFailedEvent) -> None: ...


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
    """PyMongo's result; a full document refuses the whole before anything is written."""
    database["orders"].insert_many([{"_id": each, "n": each % 2} for each in range(4)])
    done = outbox.update_many({"n": 1}, {"$set": {"seen": 1}}, tasks=[rig.add.s(STORED_ID, 1)])
    assert (done.matched_count, done.modified_count, done.upserted_id) == (2, 2, None)
    done = outbox.update_many({"_id": 9}, {"$set": {"n": 9}}, upsert=True, tasks=[lambda key: rig.add.s(key, 2)])
    assert done.upserted_id == 9
    assert outbox.update_many({"n": 77}, {"$set": {"n": 9}}, tasks=[rig.add.s(1, 2)]).matched_count == 0
    ids = {each["id"] for key in (1, 3) for each in pending(database, key)["events"]}
    assert len(ids) == 1, "the same entry, which is bound when it is published"
    narrow = rig.outbox(name="narrow", at_once=False, max_pending=1)
    with pytest.raises(OutboxRefusedError, match="max_pending=1"):
        narrow.update_many({}, {"$set": {"seen": 2}}, tasks=[rig.add.s(1, 1)])
    assert database["orders"].count_documents({"seen": 2}) == 0


def test_a_delete_of_many_delivers_first(rig: Rig, outbox: Outbox, database: Database[Document]) -> None:
    """And where one is held by another relay nothing is deleted."""
    outbox.insert_many([{"_id": each} for each in range(3)], tasks=[rig.add.s(STORED_ID, 0)])
    assert outbox.delete_many({"_id": {"$lt": 2}}).deleted_count == 2
    assert sorted(rig.sent()) == [[0, 0], [1, 0]]
    assert outbox.delete_many({"_id": 0}).deleted_count == 0
    database["orders"].insert_one({"_id": 5})
    hold(database["orders"], 2)
    with pytest.raises(OutboxRefusedError, match="none of the filter's documents were deleted"):
        outbox.delete_many({})
    assert database["orders"].count_documents({}) == 2


def test_a_delete_of_many_ends_where_others_keep_writing(database: Database[Document]) -> None:
    """Each delivery is followed by an entry in another document of the filter."""
    orders, waiting = database["orders"], {"pendingEvents": {"count": 1}}
    orders.insert_one({"_id": 0, **waiting})

    def deliver(identity: int) -> Delivery:
        orders.update_one({"_id": identity}, {"$unset": {"pendingEvents": 1}})
        orders.insert_one({"_id": identity + 1, **waiting})
        return Delivery(dispatched=1)

    with pytest.raises(OutboxRefusedError, match="faster than they are delivered; 0 were deleted"):
        Deletes(orders, {PendingField(): deliver}).many({}, None)


def test_a_document_is_delivered_deleted_and_returned(rig: Rig, outbox: Outbox, database: Database[Document]) -> None:
    """The first of the user's order, also where another has nothing pending."""
    outbox.insert_many([{"_id": each, "n": -each} for each in range(3)], tasks=[rig.add.s(STORED_ID, 0)])
    database["orders"].insert_one({"_id": 9, "n": 9})
    found = outbox.find_one_and_delete({}, sort=[("n", 1)], projection={"n": 1})
    assert found == {"_id": 2, "n": -2}
    assert rig.sent() == [[2, 0]]
    assert outbox.find_one_and_delete({"n": 77}, sort=[("n", 1)]) is None
    assert outbox.find_one_and_delete({"n": 77}) is None
    hold(database["orders"], 0)
    with pytest.raises(OutboxRefusedError, match="not deleted"):
        outbox.find_one_and_delete({"_id": 0})


def test_a_document_is_replaced_and_returned(rig: Rig, outbox: Outbox) -> None:
    """As PyMongo does it; what is pending stays."""
    outbox.insert_one({"_id": 1, "n": 1}, tasks=[rig.add.s(1, 0)])
    after: Any = {"return_document": ReturnDocument.AFTER, "projection": {"n": 1, "_id": 0}}
    assert outbox.find_one_and_replace({"n": 1}, {"n": 2}, tasks=[rig.add.s(1, 1)], **after) == {"n": 2}
    assert outbox.find_one_and_replace({"_id": 1}, {"n": 3}, projection={"n": 1}) == {"_id": 1, "n": 2}
    assert outbox.find_one_and_replace({"k": 7}, {"k": 7}, upsert=True, tasks=[rig.add.s(7, 7)]) is None
    assert outbox.find_one_and_replace({"k": 8}, {"k": 8}, tasks=[rig.add.s(8, 8)]) is None
    assert delivered(rig, outbox) == [[1, 0], [1, 1], [7, 7]]


def test_deletes_keep_their_place_in_a_bulk_write(rig: Rig, outbox: Outbox, database: Database[Document]) -> None:
    """What an earlier request of the same write has stored is delivered before its document goes."""
    database["orders"].insert_many([{"_id": 1}, {"_id": 2}, {"_id": 3, "n": 3}])
    done = outbox.bulk_write(
        [
            Write(UpdateOne({"_id": 1}, {"$set": {"a": 1}}), tasks=[rig.add.s(1, 1)]),
            DeleteOne({"_id": 1}),
            (InsertOne({"_id": 1, "new": True}), [rig.add.s(1, 2)]),
            DeleteMany({"n": 3}),
            UpdateMany({}, {"$set": {"b": 1}}),
            UpdateOne({"_id": 8}, {"$set": {"b": 1}}, upsert=True),
        ]
    )
    assert (done.deleted_count, done.inserted_count, done.matched_count, done.upserted_ids) == (2, 1, 3, {5: 8})
    assert rig.sent() == [[1, 1]]
    assert pending(database, 1)["count"] == 1
    with pytest.raises(BulkWriteError) as caught:
        outbox.bulk_write([DeleteOne({"_id": 2}), InsertOne({"_id": 4}), InsertOne({"_id": 1}), DeleteOne({"_id": 8})])
    details = caught.value.details or {}
    assert [each["index"] for each in details["writeErrors"]] == [2]
    assert (details["nRemoved"], details["nInserted"]) == (1, 1)
    assert database["orders"].find_one({"_id": 8}) is not None
    with pytest.raises(BulkWriteError):
        outbox.bulk_write([InsertOne({"_id": 1}), DeleteOne({"_id": 8})], ordered=False)
    assert database["orders"].find_one({"_id": 8}) is None


def test_a_bulk_write_that_could_not_deliver_has_written_nothing(
    rig: Rig, outbox: Outbox, database: Database[Document]
) -> None:
    """What its deletes would need is done before its first write."""
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])
    hold(database["orders"], 1)
    with pytest.raises(OutboxRefusedError, match="could not be delivered"):
        outbox.bulk_write([InsertOne({"_id": 2}), DeleteOne({"_id": 1})])
    assert database["orders"].count_documents({}) == 1


def test_a_bulk_write_deletes_what_it_has_inserted(rig: Rig) -> None:
    """Although it dispatches at once: it holds no document that one of its own deletes has to deliver."""
    outbox = rig.outbox()
    done = outbox.bulk_write([Write(InsertOne({"_id": 1}), tasks=[rig.add.s(1, 1)]), DeleteOne({"_id": 1})])
    assert (done.inserted_count, done.deleted_count) == (1, 1)
    assert rig.sent() == [[1, 1]]


def test_a_bulk_write_deletes_one_of_those_that_a_filter_finds(
    rig: Rig, outbox: Outbox, database: Database[Document]
) -> None:
    """What it leaves is not delivered, and need not be."""
    for each in (1, 2):
        outbox.insert_one({"_id": each, "k": 1}, tasks=[rig.add.s(each, 1)])
    hold(database["orders"], 2)
    assert outbox.bulk_write([DeleteOne({"k": 1})]).deleted_count == 1
    assert rig.sent() == [[1, 1]]
    assert database["orders"].count_documents({}) == 1


def test_a_refused_delete_of_a_bulk_write_says_what_was_done(
    rig: Rig, outbox: Outbox, database: Database[Document]
) -> None:
    """Also where a request before it had failed."""
    database["orders"].insert_one({"_id": 1})
    outbox.insert_one({"_id": 2, "k": 1}, tasks=[rig.add.s(1, 1)])
    hold(database["orders"], 2)
    requests = [InsertOne({"_id": 1}), InsertOne({"_id": 3}), DeleteOne({"k": 1})]
    with pytest.raises(OutboxRefusedError, match="1 of the 2 requests before it failed") as caught:
        outbox.bulk_write(requests, ordered=False)
    details: Any = vars(caught.value)["details"]
    assert ([each["index"] for each in details["writeErrors"]], details["nInserted"]) == ([0], 1)
    assert isinstance(caught.value.__cause__, BulkWriteError)
    with pytest.raises(InvalidOperation):
        outbox.bulk_write([])


def test_a_delete_that_fails_is_one_request_of_a_bulk_write(outbox: Outbox, database: Database[Document]) -> None:
    """PyMongo's error with its place, and those behind it are carried out as `ordered` says."""
    for ordered in (True, False):
        database["orders"].insert_one({"_id": 1})
        with pytest.raises(BulkWriteError) as caught:
            outbox.bulk_write([InsertOne({}), DeleteOne({"$bad": 1}), DeleteOne({"_id": 1})], ordered=ordered)
        details = caught.value.details or {}
        assert ([each["index"] for each in details["writeErrors"]], details["nInserted"]) == ([1], 1)
        assert database["orders"].count_documents({"_id": 1}) == details["nRemoved"] ^ 1 == int(ordered)
        database["orders"].delete_many({})


def test_a_bulk_write_s_let_and_collation_say_which_documents_are_meant(
    rig: Rig, outbox: Outbox, database: Database[Document]
) -> None:
    """Where it looks for room, and where it deletes."""
    database["orders"].insert_many([{"_id": each, "k": "A"} for each in (1, 2, 3)])
    same: Any = {"$expr": {"$eq": ["$k", "$$v"]}}
    any_case = Collation("en", strength=2)
    tasks = [rig.add.s(STORED_ID, 1)]
    requests = [
        Write(UpdateOne({"k": "a", "_id": {"$lt": 2}}, {"$set": {"a": 1}}, collation=any_case), tasks=tasks),
        Write(UpdateOne({**same, "_id": {"$gt": 2}}, {"$set": {"a": 1}}), tasks=tasks),
        Write(UpdateMany({**same, "_id": {"$lt": 3}}, {"$set": {"b": 1}}), tasks=tasks),
        DeleteOne({**same, "_id": {"$gt": 2}}),
        DeleteMany({**same, "_id": {"$gt": 1}}),
    ]
    done = outbox.bulk_write(requests, let={"v": "A"})
    assert (done.matched_count, done.deleted_count) == (4, 2)
    assert delivered(rig, outbox) == [[1, 1], [1, 1], [2, 1], [3, 1]]
    full = rig.outbox(at_once=False, max_pending=2, name="full")
    full.insert_one({"_id": 9, "k": "B"}, tasks=[*tasks, *tasks])
    with pytest.raises(OutboxRefusedError, match="max_pending"):
        full.bulk_write([Write(UpdateOne({"k": "b"}, {"$set": {"a": 1}}, collation=any_case), tasks=tasks)])


def test_looking_for_room_in_a_bulk_write_is_one_query(rig: Rig, mongo_url: str, database: Database[Document]) -> None:
    """However many of its filters do not name the `_id`."""
    heard = Commands()
    with MongoClient[Document](mongo_url, event_listeners=[heard]) as client:
        watched = Outbox(rig.app, client[database.name]["orders"], at_once=False, sweep_every=None, name="watched")
        watched.backing.signer.read()
        heard.names.clear()
        requests = [UpdateOne({"k": each}, {"$set": {"a": 1}}, upsert=True) for each in range(50)]
        watched.bulk_write([Write(each, tasks=[rig.add.s(1, 1)]) for each in requests])
        watched.backing.close()
    assert heard.names.count("find") == 1
    assert database["orders"].count_documents({"pendingEvents.count": 1}) == 50


Act = Callable[[Outbox, Any], Any]

KNOWN: dict[str, Act] = {
    "insert": lambda outbox, make: outbox.insert_one({"_id": 7}, tasks=[make]),
    "by its id": lambda outbox, make: outbox.update_one({"_id": 7}, {"$set": {"a": 1}}, upsert=True, tasks=[make]),
    "by eq": lambda outbox, make: outbox.update_one({"_id": {"$eq": 7}}, {"$inc": {"a": 1}}, upsert=True, tasks=[make]),
    "a replacement": lambda outbox, make: outbox.replace_one({"_id": 7}, {"a": 1}, upsert=True, tasks=[make]),
}


@pytest.mark.parametrize("act", KNOWN.values(), ids=KNOWN.keys())
def test_a_task_is_made_of_an_id_that_the_write_says(rig: Rig, outbox: Outbox, act: Act) -> None:
    """By an insert, or by a filter that demands it."""
    act(outbox, lambda key: rig.add.s(key, "x"))
    assert delivered(rig, outbox) == [[7, "x"]]


UPSERTS: dict[str, Act] = {
    "operators": lambda outbox, make: outbox.update_one({"k": 1}, {"$inc": {"n": 1}}, upsert=True, tasks=[make]),
    "a pipeline": lambda outbox, make: outbox.update_one({"k": 1}, [{"$set": {"n": 1}}], upsert=True, tasks=[make]),
    "a replacement": lambda outbox, make: outbox.replace_one({"k": 1}, {"k": 1}, upsert=True, tasks=[make]),
    "found": lambda outbox, make: outbox.find_one_and_update({"k": 1}, {"$inc": {"n": 1}}, upsert=True, tasks=[make]),
}


@pytest.mark.parametrize("act", UPSERTS.values(), ids=UPSERTS.keys())
def test_a_task_is_made_of_the_id_that_an_upsert_finds_or_makes(
    rig: Rig, outbox: Outbox, database: Database[Document], act: Act
) -> None:
    """Neither filter nor update says anything of it."""
    for _ in range(2):
        act(outbox, lambda key: rig.add.s(str(key), "x"))
    [document] = database["orders"].find()
    assert document["k"] == 1
    assert delivered(rig, outbox) == [[str(document["_id"]), "x"]] * 2


def test_an_upsert_with_tasks_of_its_id_never_updates_another_document(
    rig: Rig, outbox: Outbox, database: Database[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else is faster, where an index says that there is one: the task names the one that is there."""
    database["orders"].create_index("k", unique=True)
    writer = outbox.backing.writer
    find = writer._find

    def then_created(*given: Any) -> Any:
        found = find(*given)
        if found is NO_ID:
            database["orders"].insert_one({"_id": "rival", "k": 1})
        return found

    monkeypatch.setattr(writer, "_find", then_created)
    task = [lambda key: rig.add.s(str(key), "x")]
    assert outbox.update_one({"k": 1}, {"$inc": {"n": 1}}, upsert=True, tasks=task).matched_count == 1
    assert database["orders"].count_documents({"k": 1}) == 1
    assert delivered(rig, outbox) == [["rival", "x"]]


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
    "a bulk write": lambda outbox, make: outbox.bulk_write([UpdateOne({"k": 1}, {"$set": {"a": 1}})], tasks=[make]),
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
        ids += [bound(json.loads(stored[0].payload), stored[0].bind, key)["options"]["task_id"]]
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
        (stored,) = entries_of(pending(database, key)["events"], outbox.backing.signer.is_signed)
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
        outbox.bulk_write([Write(InsertOne({"_id": 9}), rig.add.s(1, 1))])  # type: ignore[arg-type]
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


# -- two outboxes on one collection ----------------------------------------------------------------


@pytest.fixture(name="beside")
def an_outbox_beside(rig: Rig, outbox: Outbox) -> Outbox:
    """Give a second outbox on the collection, with one entry in each of two documents."""
    assert outbox.field.name == "pendingEvents"
    made = rig.outbox(name="beside", field="notices", at_once=False)
    for key in (1, 2):
        made.insert_one({"_id": key, "n": 0}, tasks=[rig.add.s(key, 0)])
    return made


REPLACEMENTS: dict[str, Callable[[Outbox, list[Any]], Any]] = {
    "replace_one": lambda outbox, tasks: outbox.replace_one({"_id": 1}, {"n": 1}, tasks=tasks),
    "replace_one of a filter": lambda outbox, tasks: outbox.replace_one({"_id": {"$lt": 2}}, {"n": 1}, tasks=tasks),
    "find_one_and_replace": lambda outbox, tasks: outbox.find_one_and_replace({"_id": 1}, {"n": 1}, tasks=tasks),
    "upsert": lambda outbox, tasks: outbox.replace_one({"_id": 1}, {"n": 1}, upsert=True, tasks=tasks),
    "bulk_write": lambda outbox, tasks: outbox.bulk_write([Write(ReplaceOne({"_id": 1}, {"n": 1}), tasks=tasks)]),
    "replacement": lambda outbox, tasks: outbox.collection.update_one({"_id": 1}, outbox.replacement({"n": 1}, tasks)),
    "with_tasks": lambda outbox, tasks: outbox.collection.bulk_write(
        [outbox.with_tasks(ReplaceOne({"_id": 1}, {"n": 1}), tasks)]
    ),
    "a pipeline": lambda outbox, tasks: outbox.update_one({"_id": 1}, [{"$set": {"n": 1}}], tasks=tasks),
}


@pytest.mark.parametrize("replace", REPLACEMENTS)
def test_a_replacement_keeps_what_another_outbox_has_pending(
    rig: Rig, outbox: Outbox, beside: Outbox, database: Database[Document], replace: str
) -> None:
    """With tasks of its own and without; a document without the other's field gets none."""
    for tasks in ([rig.add.s(3, 3)], []):
        REPLACEMENTS[replace](outbox, tasks)
    assert delivered(rig, outbox) == [[3, 3]]
    assert delivered(rig, beside) == [[1, 0], [2, 0]]
    REPLACEMENTS[replace](outbox, [])
    assert sorted(database["orders"].find(), key=repr) == [{"_id": 1, "n": 1}, {"_id": 2, "n": 0}]


def test_a_replacement_may_carry_the_tasks_of_both(
    rig: Rig, outbox: Outbox, beside: Outbox, database: Database[Document]
) -> None:
    """The other's new entries come behind those that wait. A field that was read is refused: it may have been sent."""
    carried = beside.with_tasks({"_id": 1, "n": 1}, [rig.add.s(1, 1)])
    database["orders"].update_one({"_id": 1}, outbox.replacement(carried, [rig.add.s(5, 5)]))
    read = database["orders"].find_one({"_id": 1}, {"pendingEvents": 0})
    assert read is not None
    beside.sweep(older_than=0)
    assert [each for each in rig.sent() if each[0] == 1] == [[1, 0], [1, 1]]
    with pytest.raises(OutboxRefusedError, match="leave it out"):
        outbox.replace_one({"_id": 1}, read)
    del read["notices"]
    outbox.replace_one({"_id": 1}, read)
    assert beside.sweep(older_than=0).dispatched == 0
    outbox.sweep(older_than=0)
    assert rig.sent() == [[5, 5]]
    assert database["orders"].find_one({"_id": 1}) == {"_id": 1, "n": 1}


DELETES: dict[str, Callable[[Outbox], Any]] = {
    "delete_one": lambda outbox: outbox.delete_one({"_id": 1}).deleted_count,
    "delete_many": lambda outbox: outbox.delete_many({"_id": 1}).deleted_count,
    "find_one_and_delete": lambda outbox: len([outbox.find_one_and_delete({"n": 0}, sort=[("_id", 1)])]),
    "bulk_write": lambda outbox: outbox.bulk_write([DeleteOne({"_id": 1})]).deleted_count,
}


@pytest.mark.parametrize("delete", DELETES)
def test_a_delete_delivers_what_another_outbox_has_pending_or_is_refused(
    rig: Rig, outbox: Outbox, beside: Outbox, database: Database[Document], delete: str
) -> None:
    """Also where its own has something pending, too; a relay that holds the other's keeps the document."""
    outbox.update_one({"_id": 1}, {"$set": {"a": 1}}, tasks=[rig.add.s(1, 1)])
    hold(database["orders"], 1, field="notices")
    with pytest.raises(OutboxRefusedError):
        DELETES[delete](outbox)
    database["orders"].update_one({"_id": 1}, {"$set": {"notices.claim": UNCLAIMED}})

    assert DELETES[delete](outbox) == 1
    assert sorted(rig.sent()) == [[1, 0], [1, 1]]
    assert beside.status().pending == 1
    assert [each["_id"] for each in database["orders"].find()] == [2]
