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

COUNT = 150
"""More than a first answer of MongoDB has by default."""


class Things:
    def __init__(self, collection: Collection[Document], way: Threads | Tasks) -> None:
        self.collection, self.way = collection, way

    def lock(self, filter_: Document, **options: Any) -> list[Document]:
        found: list[Document] = self.way.lock("select_many_for_update", self.collection, filter_, **options)
        return found


@pytest.fixture(params=[Threads, Tasks])
def things(request: pytest.FixtureRequest, database: Database[Document], mongo_url: str) -> Iterator[Things]:
    """By both ways: what is shown of the locks for threads is true of those for asyncio."""
    database["things"].insert_many([{"_id": number, "n": COUNT - number, "x": 1} for number in range(COUNT)])
    with closing(request.param(mongo_url)) as way:
        yield Things(database["things"], way)


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
def test_filter_order_limit_and_projection_are_pymongos(things: Things, filter_: Document, options: Document) -> None:
    """They see the documents as they were before the lock, and no others are locked."""
    field = options.get("field", "_lock")
    reading = {"sort": [("_id", 1)], **{name: value for name, value in options.items() if name != "field"}}
    before = list(things.collection.find(filter_, **reading))
    assert things.lock(filter_, **options) == before
    locked = [each["_id"] for each in things.collection.find({field: {"$exists": True}})]
    assert sorted(locked) == sorted(each["_id"] for each in before)
    assert len(things.collection.distinct(f"{field}.id")) == 1
    assert things.lock({"x": 2}) == []


def test_a_projection_shows_the_id_and_what_it_takes_from_the_filter(things: Things) -> None:
    """A place in an array, and the score of a search. By their ids the documents are locked."""
    assert things.lock({"_id": 7}, projection={"n": 1, "_id": 0}) == [{"_id": 7, "n": COUNT - 7}]
    assert things.lock({"_id": 7}, projection={"_id": 0})[0].keys() == {"_id", "n", "x", "_lock"}
    things.collection.insert_one({"_id": "a", "items": [{"n": 1}, {"n": 2}], "text": "red lamp"})
    things.collection.create_index([("text", "text")])
    found = things.lock({"items.n": 2}, limit=1, projection={"items.$": 1})
    assert found == [{"_id": "a", "items": [{"n": 2}]}]
    score = {"score": {"$meta": "textScore"}}
    found = things.lock({"$text": {"$search": "lamp"}}, projection=score, sort=[("score", {"$meta": "textScore"})])
    assert [(each["_id"], each["score"] > 0) for each in found] == [("a", True)]
    assert things.collection.distinct("_id", {"_lock": {"$exists": True}}) == [7, "a"]


def test_an_id_that_is_decoded_with_loss_is_refused(database: Database[Document]) -> None:
    class Rounding(TypeDecoder):
        bson_type = Int64

        def transform_bson(self, value: Int64) -> int:
            return int(value) // 10 * 10

    database["things"].insert_one({"_id": Int64(2**40 + 1)})
    lossy: Database[Any] = database.with_options(codec_options=CodecOptions(type_registry=TypeRegistry([Rounding()])))
    with pytest.raises(ConfigurationError):
        transactional(database.client)(select_many_for_update)(lossy["things"], {})


def test_raw_documents_are_locked_and_read_too(things: Things) -> None:
    raw = things.collection.with_options(codec_options=CodecOptions(document_class=RawBSONDocument))
    found = things.way.lock("select_many_for_update", raw, {}, limit=2)
    locked = things.collection.distinct("_id", {"_lock": {"$exists": True}})
    assert [each["_id"] for each in found] == locked == [0, 1]


def test_one_that_is_held_refuses_all_and_leaves_none_locked(things: Things) -> None:
    """Who meets a conflict has nothing, so no two can hold what the other wants."""
    with held(things.collection, 50):
        for options in ({}, {"limit": 99, "sort": [("_id", 1)]}):
            with pytest.raises(DocumentLockedError):
                things.lock({}, nowait=True, **options)
        with pytest.raises(DocumentLockedError):
            things.way.lock("select_for_update", things.collection, {"_id": 50}, nowait=True)
        assert len(things.lock({"_id": {"$ne": 50}}, nowait=True)) == COUNT - 1


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


def test_a_collection_that_an_operation_waits_for_is_refused_like_a_document(things: Things) -> None:
    """It stands before everybody who comes later, as long as an older transaction keeps it waiting."""
    database = things.collection.database
    change = {"collMod": things.collection.name, "validationLevel": "moderate"}
    waiting: list[Document] = [
        {"$currentOp": {}},
        {"$match": {"command.collMod": things.collection.name, "waitingForLock": True}},
        {"$project": {"op": 1}},
    ]
    with ThreadPoolExecutor(1) as pool, held(things.collection, 0):
        changing = pool.submit(database.command, change)
        wait_for(lambda: list(database.client.admin.aggregate(waiting)), message="an operation that waits")
        with pytest.raises(DocumentLockedError) as caught:
            things.lock({"_id": 1}, nowait=True)
    assert changing.result()["ok"] == 1
    assert isinstance(caught.value.__cause__, OperationFailure)
