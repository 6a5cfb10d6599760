"""Where a write of the outbox could differ from PyMongo's: the same outcome or error, document for document."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from uuid import uuid4

import pytest
from bson import Decimal128
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions
from pymongo import InsertOne, ReplaceOne, UpdateOne, WriteConcern
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import BulkWriteError, DuplicateKeyError, OperationFailure

from mongo_celery import Outbox
from mongo_celery.errors import OutboxRefusedError
from mongo_celery.outbox import Write
from tests.fixtures.process import wait_for
from tests.integration.outbox_rig import Rig, opened, pending

Document = dict[str, Any]
Operation = Callable[[Any, Document], Any]


@pytest.fixture
def rig(database: Database[Document], redis_url: str) -> Iterator[Rig]:
    with opened(database, redis_url) as made:
        yield made


def outcome(act: Callable[[], Any], collection: Collection[Document]) -> tuple[Any, list[Document]]:
    """What an operation returned or raised, and what the collection holds afterwards, but for the outbox's field."""
    try:
        result = act()
        said: Any = result if isinstance(result, Mapping) else _told(result)
    except OperationFailure as error:  # an update and a findAndModify raise different classes of it
        said = f"code {error.code}"
    except ValueError as error:
        said = str(error)
    documents = [{k: v for k, v in each.items() if k != "pendingEvents"} for each in collection.find().sort("_id", 1)]
    return said, documents


def _told(result: Any) -> Any:
    if result is None:
        return None
    matched = result.matched_count
    upserted = result.upserted_id if hasattr(result, "upserted_id") else result.upserted_ids
    return matched, upserted


OPERATIONS: dict[str, Operation] = {
    "replacement with the id of a new document": lambda c, o: c.replace_one({"k": 9}, {"_id": 7, "k": 9}, True, **o),
    "replacement with another id": lambda c, o: c.replace_one({"_id": 1}, {"_id": 7, "k": 1}, **o),
    "replacement with its own id": lambda c, o: c.replace_one({"k": 1}, {"_id": 1, "k": 5}, **o),
    "upsert with the id in $and": lambda c, o: c.update_one({"$and": [{"_id": 5}]}, {"$set": {"a": 1}}, True, **o),
    "replacement with the id in $and": lambda c, o: c.replace_one({"$and": [{"_id": 5}]}, {"a": 1}, True, **o),
    "upsert with the id in $in": lambda c, o: c.update_one({"_id": {"$in": [5]}}, {"$set": {"a": 1}}, True, **o),
    "upsert that sets the id": lambda c, o: c.update_one({"k": 9}, {"$set": {"_id": 0}}, True, **o),
    "pipeline upsert that sets the id": lambda c, o: c.update_one({"k": 9}, [{"$set": {"_id": 9}}], True, **o),
    "upsert that meets its id with other values": lambda c, o: c.update_one(
        {"_id": 1, "k": "other"}, {"$set": {"a": 1}}, True, **o
    ),
    "upsert that sets a part of the id": lambda c, o: c.update_one({"k": 9}, {"$set": {"_id.a": 1}}, True, **o),
    "upsert that renames to the id": lambda c, o: c.update_one({"x": 9}, {"$rename": {"x": "_id"}}, True, **o),
    "an id that is a pattern": lambda c, o: c.update_one({"_id": re.compile("^a"), "k": 2}, {"$set": {"a": 1}}, **o),
    "bulk: replacement that is an update": lambda c, o: c.bulk_write(
        [_write(ReplaceOne({"_id": 1}, {"$set": {"a": 5}}), o)]
    ),
    "bulk: replacement with the id of a new document": lambda c, o: c.bulk_write(
        [_write(ReplaceOne({"k": 9}, {"_id": 7, "k": 9}, upsert=True), o)]
    ),
    "bulk: an id that is a document": lambda c, o: c.bulk_write([_write(InsertOne({"_id": {"a": 1}}), o)]),
}


def _write(request: Any, options: Document) -> Any:
    return Write(request, **options) if options else request


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_the_outcome_is_pymongos(rig: Rig, database: Database[Document], operation: Operation) -> None:
    """Results, errors and documents; and what was accepted is dispatched from the document that was written."""
    seed: list[Document] = [{"_id": 1, "k": 1}, {"_id": "ab", "k": 2}, {"_id": "a", "k": 3}]
    for name in ("twin", "orders"):
        database[name].insert_many(seed)
    outbox = _PositionalUpsert(rig.outbox())

    expected = outcome(lambda: operation(database["twin"], {}), database["twin"])
    found = outcome(lambda: operation(outbox, {"tasks": [rig.add.s(1, 1)]}), database["orders"])

    assert found == expected
    accepted = not isinstance(expected[0], str)
    wait_for(lambda: outbox.whole.sweep(older_than=0) and not outbox.whole.status().pending)
    assert rig.sent() == [[1, 1]] * accepted
    assert database["orders"].count_documents({"pendingEvents.count": {"$gt": 0}}) == 0


class _PositionalUpsert:
    """An outbox whose `upsert` may be the third argument, as it may with PyMongo."""

    def __init__(self, outbox: Outbox) -> None:
        self.whole = outbox

    def update_one(self, which: Any, update: Any, upsert: bool = False, **options: Any) -> Any:
        return self.whole.update_one(which, update, upsert=upsert, **options)

    def replace_one(self, which: Any, new: Any, upsert: bool = False, **options: Any) -> Any:
        return self.whole.replace_one(which, new, upsert=upsert, **options)

    def bulk_write(self, requests: Any) -> Any:
        return self.whole.bulk_write(requests)


def test_a_document_that_a_majority_does_not_have_yet_is_found(rig: Rig, database: Database[Document]) -> None:
    """Written with w=1 a moment ago: an update sees it, so the search before an update must see it too."""
    quick = database["orders"].with_options(write_concern=WriteConcern(w=1))
    outbox = rig.outbox(at_once=False, max_pending=2)
    for number in range(20):
        quick.insert_one({"_id": number, "k": number})
        assert outbox.update_one({"k": number}, {"$set": {"a": 1}}, tasks=[rig.add.s(1, 1)]).matched_count == 1
    for number in range(20, 40):
        quick.insert_one({"_id": number, "k": number, "pendingEvents": {"count": 2, "events": [{}, {}]}})
        with pytest.raises(OutboxRefusedError, match="max_pending"):
            outbox.update_one({"k": number}, {"$set": {"a": 1}}, upsert=True, tasks=[rig.add.s(1, 1)])
    assert database["orders"].count_documents({}) == 40


def test_an_upsert_that_meets_its_id_fails_at_once_in_a_transaction_too(rig: Rig, database: Database[Document]) -> None:
    """As PyMongo's: no repetition of the body can help."""
    database["orders"].insert_one({"_id": 1, "status": "old"})
    outbox, bodies = rig.outbox(), []

    def body(session: Any) -> None:
        bodies.append(1)
        outbox.update_one(
            {"_id": 1, "status": "new"}, {"$set": {"a": 1}}, upsert=True, tasks=[rig.add.s(1, 1)], session=session
        )

    with database.client.start_session() as session, pytest.raises(DuplicateKeyError):
        session.with_transaction(body)
    assert len(bodies) <= 2
    assert rig.sent() == []


@pytest.mark.parametrize(
    "condition",
    [{"_id": 1, "pendingEvents.count": 5}, {"$and": [{"_id": 1}, {"pendingEvents": {"count": 5}}]}],
    ids=["path", "in $and"],
)
def test_an_upsert_cannot_bring_the_outboxs_field_by_its_filter(
    rig: Rig, database: Database[Document], condition: Document
) -> None:
    """The server copies what a filter demands into the new document."""
    outbox = rig.outbox()
    change = {"$set": {"a": 1}}
    for tasks in ([], [rig.add.s(1, 1)]):
        with pytest.raises(OutboxRefusedError, match="pendingEvents"):
            outbox.update_one(condition, change, upsert=True, tasks=tasks)
        with pytest.raises(OutboxRefusedError, match="pendingEvents"):
            outbox.bulk_write([Write(UpdateOne(condition, change, upsert=True), tasks=tasks)])
    with pytest.raises(OutboxRefusedError, match="pendingEvents"):
        outbox.insert_one({"_id": 1, "$a": 1, "pendingEvents": {"count": 9}})
    assert database["orders"].count_documents({}) == 0


def test_a_bulk_write_looks_at_how_full_each_document_is(rig: Rig, database: Database[Document]) -> None:
    """Also where the filter does not name the `_id`; nothing is written."""
    database["orders"].insert_one({"_id": 1, "k": 1})
    outbox = rig.outbox(at_once=False, max_pending=3)
    two = [rig.add.s(1, 1), rig.add.s(2, 2)]
    with pytest.raises(OutboxRefusedError, match="max_pending"):
        outbox.bulk_write([Write(UpdateOne({"k": 1}, {"$set": {"a": each}}), tasks=two) for each in range(2)])
    assert database["orders"].find_one() == {"_id": 1, "k": 1}


def test_a_bulk_write_takes_any_id_and_compares_ids_as_the_server_does(rig: Rig, database: Database[Document]) -> None:
    """Those that only the collection's codec can encode; 1, which finds the document whose `_id` is 1.0; and 1e300."""
    rig.database = database.client.get_database(
        database.name, codec_options=CodecOptions(uuid_representation=UuidRepresentation.STANDARD)
    )
    outbox, identity = rig.outbox(at_once=False, max_pending=2), uuid4()
    tasks = [rig.add.s(1, 1), rig.add.s(2, 2)]
    outbox.bulk_write([Write(InsertOne({"_id": identity}), tasks=tasks[:1])])
    outbox.bulk_write([Write(UpdateOne({"_id": identity}, {"$set": {"a": 1}}), tasks=tasks[:1])])
    database["orders"].insert_one({"_id": 1.0})
    database["orders"].insert_one({"_id": 1e300})
    outbox.bulk_write([Write(UpdateOne({"_id": each}, {"$set": {"a": 1}}), tasks=tasks) for each in (1, 1e300)])
    for known in (identity, 1, 1e300):
        with pytest.raises(OutboxRefusedError, match="max_pending"):
            outbox.bulk_write([Write(UpdateOne({"_id": known}, {"$set": {"a": 2}}), tasks=tasks[:1])])
    assert outbox.sweep(older_than=0).dispatched == 6


def test_ids_that_share_a_float_are_two_documents_of_a_bulk_write(rig: Rig, database: Database[Document]) -> None:
    """Neither fills up for the other, and what is pending in both is dispatched at once."""
    outbox, ids = rig.outbox(max_pending=2), [0.1, Decimal128("0.1")]
    database["orders"].insert_many([{"_id": each} for each in ids])
    tasks = [rig.add.s(1, 1), rig.add.s(2, 2)]
    outbox.bulk_write([Write(UpdateOne({"_id": each}, {"$set": {"a": 1}}), tasks=tasks) for each in ids])
    assert sorted(rig.sent()) == [[1, 1], [1, 1], [2, 2], [2, 2]]  # documents have no order among them


def test_an_upsert_whose_document_is_deleted_meanwhile_creates_it(
    rig: Rig, database: Database[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between being found and being written; nothing is dropped."""
    database["orders"].insert_one({"_id": 1})
    outbox = rig.outbox(at_once=False)
    find = outbox.backing.writer._find

    def then_deleted(*given: Any) -> Any:
        found = find(*given)
        database["orders"].delete_one({"_id": 1, "a": {"$exists": False}})
        return found

    monkeypatch.setattr(outbox.backing.writer, "_find", then_deleted)
    result = outbox.update_one({"_id": 1}, {"$set": {"a": 1}}, upsert=True, tasks=[rig.add.s(1, 1)])
    assert (result.matched_count, result.upserted_id) == (0, 1)
    assert pending(database, 1)["count"] == 1


def test_a_bulk_write_says_what_was_written_before_a_document_was_too_large(
    rig: Rig, database: Database[Document]
) -> None:
    """In PyMongo's words: it does not claim that nothing was written."""
    database["orders"].insert_one({"_id": 1})
    database["orders"].insert_one({"_id": 2, "x": "y" * (16 * 2**20 - 100)})
    outbox = rig.outbox(at_once=False)
    with pytest.raises(BulkWriteError) as caught:
        outbox.bulk_write(
            [Write(UpdateOne({"_id": each}, {"$set": {"a": 1}}), tasks=[rig.add.s(1, 1)]) for each in (1, 2)]
        )
    assert (caught.value.details or {})["nModified"] == 1
    assert pending(database, 1)["count"] == 1


def test_many_writers_that_take_the_next_document_each_get_one(rig: Rig, database: Database[Document]) -> None:
    """A queue in a collection, popped by sort: losing a race is no reason to refuse."""
    database["orders"].insert_many([{"_id": number, "s": "new"} for number in range(120)])
    outbox = rig.outbox(at_once=False)
    taken: list[int] = []
    errors: list[Exception] = []

    def take() -> None:
        try:
            while True:
                found = outbox.find_one_and_update(
                    {"s": "new"}, {"$set": {"s": "taken"}}, sort=[("_id", 1)], tasks=[rig.add.s(1, 1)]
                )
                if found is None:
                    return
                taken.append(found["_id"])
        except Exception as error:  # noqa: BLE001 - shown by the assertion
            errors.append(error)

    threads = [threading.Thread(target=take) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(taken) == list(range(120))
    assert database["orders"].count_documents({"pendingEvents.count": 1}) == 120
