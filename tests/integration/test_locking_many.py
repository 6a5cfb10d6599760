"""Many documents locked at once: two commands however many they are, in every form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from bson import Int64
from bson.codec_options import CodecOptions, TypeDecoder, TypeRegistry
from bson.raw_bson import RawBSONDocument
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import OperationFailure

from mongo_celery.errors import ConfigurationError, DocumentLockedError
from mongo_celery.locking import select_for_update, select_many_for_update, transactional
from tests.fixtures.process import wait_for
from tests.integration.locking_rig import Document, Tasks, Threads, held
from tests.rig.commands import CommandRecorder

COUNT = 150
"""More than a first answer of MongoDB has by default."""

LOCKS = ("find", "getMore", "update", "findAndModify")


class Spied:
    def __init__(self, collection: Collection[Document], way: Threads | Tasks, sent: CommandRecorder) -> None:
        self.collection, self.way, self.sent = collection, way, sent

    def locked(self, filter_: Document, **options: Any) -> tuple[list[Document], list[str]]:
        """What a call gives, and by which commands."""
        self.sent.sent.clear()
        found = self.way.lock("select_many_for_update", self.collection, filter_, **options)
        return found, [name for name in self.sent.names if name in LOCKS]


@pytest.fixture(params=[Threads, Tasks])
def spied(request: pytest.FixtureRequest, database: Database[Document], mongo_url: str) -> Iterator[Spied]:
    """By both ways: what is shown of the locks for threads is true of those for asyncio."""
    database["things"].insert_many([{"_id": number, "n": COUNT - number, "x": 1} for number in range(COUNT)])
    sent = CommandRecorder()
    with closing(request.param(mongo_url, event_listeners=[sent])) as way:
        yield Spied(database["things"], way, sent)


@pytest.mark.parametrize(
    ("filter_", "options"),
    [
        ({"x": 1}, {}),
        ({"_id": 7}, {}),
        ({"_id": {"$in": [7, 3]}}, {"projection": ["n"], "limit": 1}),
        ({"_id": {"$in": [7, 3, 7.0, True]}}, {"sort": [("n", 1)]}),
        ({}, {"limit": 5, "sort": [("n", 1)], "projection": {"n": 0}}),
        ({}, {"limit": 5, "projection": {"_id": 1}}),
        ({}, {"limit": 5, "projection": {"_id": True, "x": 0}}),
        ({}, {"limit": 5, "projection": {}}),
        ({"_lock": None, "_id": {"$lt": 5}}, {}),
        ({"$expr": {"$lt": ["$_lock.at", "$$NOW"]}, "_id": {"$lt": 5}}, {}),
        ({"_id": {"$lt": 5}}, {"sort": [("_lock.at", 1), ("n", 1)]}),
        ({"$where": "return this.x == 1"}, {"field": "meta.lock"}),
    ],
    ids=str,
)
def test_filter_order_limit_and_projection_are_pymongos(spied: Spied, filter_: Document, options: Document) -> None:
    """They see the documents as they were before the lock, and no others are locked. Two commands lock them all."""
    field = options.get("field", "_lock")
    reading = {"sort": [("_id", 1)], **{name: value for name, value in options.items() if name != "field"}}
    before = list(spied.collection.find(filter_, **reading))
    assert spied.locked(filter_, **options) == (before, ["find", "update"])
    locked = [each["_id"] for each in spied.collection.find({field: {"$exists": True}})]
    assert sorted(locked) == sorted(each["_id"] for each in before)
    assert len(spied.collection.distinct(f"{field}.id")) == 1
    assert spied.locked({"x": 2}) == ([], ["find"]), "where nothing matches, nothing is written"


def test_a_projection_shows_the_id_and_what_it_takes_from_the_filter(spied: Spied) -> None:
    """A place in an array, and the score of a search. By their ids the documents are locked."""
    assert spied.locked({"_id": 7}, projection={"n": 1, "_id": 0})[0] == [{"_id": 7, "n": COUNT - 7}]
    assert spied.locked({"_id": 7}, projection={"_id": 0})[0][0].keys() == {"_id", "n", "x", "_lock"}
    spied.collection.insert_one({"_id": "a", "items": [{"n": 1}, {"n": 2}], "text": "red lamp"})
    spied.collection.create_index([("text", "text")])
    found, _ = spied.locked({"items.n": 2}, limit=1, projection={"items.$": 1})
    assert found == [{"_id": "a", "items": [{"n": 2}]}]
    score = {"score": {"$meta": "textScore"}}
    found, _ = spied.locked({"$text": {"$search": "lamp"}}, projection=score, sort=[("score", {"$meta": "textScore"})])
    assert [(each["_id"], each["score"] > 0) for each in found] == [("a", True)]
    assert spied.collection.distinct("_id", {"_lock": {"$exists": True}}) == [7, "a"]


def test_an_id_that_is_decoded_with_loss_is_refused(database: Database[Document]) -> None:
    class Rounding(TypeDecoder):
        bson_type = Int64

        def transform_bson(self, value: Int64) -> int:
            return int(value) // 10 * 10

    database["things"].insert_one({"_id": Int64(2**40 + 1)})
    lossy: Database[Any] = database.with_options(codec_options=CodecOptions(type_registry=TypeRegistry([Rounding()])))
    with pytest.raises(ConfigurationError):
        transactional(database.client)(select_many_for_update)(lossy["things"], {})


def test_raw_documents_are_locked_and_read_too(spied: Spied) -> None:
    raw = spied.collection.with_options(codec_options=CodecOptions(document_class=RawBSONDocument))
    found = spied.way.lock("select_many_for_update", raw, {}, limit=2)
    locked = spied.collection.distinct("_id", {"_lock": {"$exists": True}})
    assert [each["_id"] for each in found] == locked == [0, 1]


def test_one_that_is_held_refuses_all_and_leaves_none_locked(spied: Spied) -> None:
    """Who meets a conflict has nothing, so no two can hold what the other wants."""
    with held(spied.collection, 50):
        for options in ({}, {"limit": 99, "sort": [("_id", 1)]}):
            with pytest.raises(DocumentLockedError):
                spied.locked({}, nowait=True, **options)
        with pytest.raises(DocumentLockedError):
            spied.way.lock("select_for_update", spied.collection, {"_id": 50}, nowait=True)
        assert len(spied.locked({"_id": {"$ne": 50}}, nowait=True)[0]) == COUNT - 1


@pytest.mark.parametrize("select", [select_for_update, select_many_for_update])
def test_a_validator_that_refuses_the_lock_is_named_with_the_cure(
    database: Database[Document], select: Callable[..., Any]
) -> None:
    """Nothing repeats it, and another field that it allows is enough."""
    schema = {"properties": {"_id": {}, "state": {"bsonType": "object"}}, "additionalProperties": False}
    strict = database.create_collection("strict", validator={"$jsonSchema": schema})
    strict.insert_one({"_id": 1})
    lock = transactional(database.client)(select)
    with pytest.raises(ConfigurationError, match="_lock") as caught:
        lock(strict, {"_id": 1})
    assert isinstance(caught.value.__cause__, OperationFailure)
    assert strict.find_one() == {"_id": 1}
    assert lock(strict, {"_id": 1}, field="state")


def test_a_collection_that_an_operation_waits_for_is_refused_like_a_document(spied: Spied) -> None:
    """It stands before everybody who comes later, as long as an older transaction keeps it waiting."""
    database = spied.collection.database
    change = {"collMod": spied.collection.name, "validationLevel": "moderate"}
    waiting: list[Document] = [
        {"$currentOp": {}},
        {"$match": {"command.collMod": spied.collection.name, "waitingForLock": True}},
        {"$project": {"op": 1}},
    ]
    with ThreadPoolExecutor(1) as pool, held(spied.collection, 0):
        changing = pool.submit(database.command, change)
        wait_for(lambda: list(database.client.admin.aggregate(waiting)), message="an operation that waits")
        with pytest.raises(DocumentLockedError) as caught:
            spied.locked({"_id": 1}, nowait=True)
    assert changing.result()["ok"] == 1
    assert isinstance(caught.value.__cause__, OperationFailure)
