"""MongoEngine's documents with `OutboxMixin`: read while something is pending, and saved with their tasks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import mongoengine
import pytest
from bson import ObjectId
from bson.json_util import RELAXED_JSON_OPTIONS
from celery import Celery
from mongoengine.errors import FieldDoesNotExist, NotUniqueError, ValidationError
from pymongo.database import Database

from mongo_celery import STORED_ID, Event, Outbox, select_for_update, transactional
from mongo_celery.contrib.mongoengine import OutboxMixin
from mongo_celery.errors import ConfigurationError, OutboxRefusedError
from tests.rig.fenced import stamp, view

Db = Database[dict[str, Any]]


META = {"collection": "orders"}


class Plain(mongoengine.Document):  # type: ignore[misc] # MongoEngine has no types
    """A model that knows nothing of the outbox, as strict as models are by default."""

    customer = mongoengine.StringField(required=True)
    meta = META


class Order(OutboxMixin, mongoengine.Document):  # type: ignore[misc]
    customer = mongoengine.StringField(required=True)
    number = mongoengine.IntField(unique=True, sparse=True)
    lines = mongoengine.ListField(mongoengine.StringField())
    meta = META


class Locked(OutboxMixin, mongoengine.Document):  # type: ignore[misc]
    """One that declares locks and stamps."""

    customer = mongoengine.StringField(required=True)
    fence = mongoengine.DictField(db_field="_fence")
    lock = mongoengine.DictField(db_field="_lock")
    meta = META


@pytest.fixture(autouse=True)
def connected(database: Db, mongo_url: str) -> Iterator[None]:
    mongoengine.connect(database.name, host=mongo_url, uuidRepresentation="standard")
    yield
    mongoengine.disconnect()


@pytest.fixture
def outbox(database: Db) -> Iterator[Outbox]:
    """Give an outbox whose broker never answers: what is written stays."""
    app = Celery("shop", broker="redis://localhost:1", set_as_current=False)
    made = Outbox(app, database["orders"], at_once=False, sweep_every=None)
    yield made
    made.runtime.close()
    app.close()


@pytest.fixture
def note(outbox: Outbox) -> Any:
    @outbox.app.task(name="note", shared=False)
    def note(order: str) -> None: ...

    return note


def pending(database: Db) -> list[Any]:
    (stored,) = database["orders"].find()
    assert stored["pendingEvents"]["count"] == len(stored["pendingEvents"]["events"])
    return [each["id"] for each in stored["pendingEvents"]["events"]]


def test_a_strict_model_reads_a_document_while_something_is_pending(outbox: Outbox, database: Db, note: Any) -> None:
    outbox.insert_one({"_id": ObjectId(), "customer": "Ann"}, tasks=[note.s("1")])
    before = database["orders"].find_one()
    with pytest.raises(FieldDoesNotExist):
        Plain.objects.first()

    order = Order.objects.get(customer="Ann")
    assert order.pendingEvents is None
    assert set(json.loads(order.to_json(json_options=RELAXED_JSON_OPTIONS))) == {"_id", "customer", "lines"}
    order.lines.append("lamp")
    order.save()
    order.reload()
    order.modify(customer="Bob")
    order.customer = "Eve"
    order.save(save_condition={"customer": "Bob"})
    after = database["orders"].find_one()
    assert before is not None
    assert after == {**before, "customer": "Eve", "lines": ["lamp"]}
    assert Order.objects(pendingEvents__exists=True).only("customer").count() == 1


def test_no_save_takes_away_what_is_pending(outbox: Outbox, database: Db, note: Any) -> None:
    """MongoEngine replaces the document of an instance that was made with its primary key."""
    identity = ObjectId()
    outbox.insert_one({"_id": identity, "customer": "Ann", "number": 7}, tasks=[note.s("1")])
    before = pending(database)
    Order(id=identity, customer="Bob").save()
    assert pending(database) == before
    stored = database["orders"].find_one()
    assert stored is not None
    assert {**stored, "pendingEvents": 0} == {"_id": identity, "customer": "Bob", "lines": [], "pendingEvents": 0}

    database["orders"].delete_many({})
    Order(id=identity, customer="$customer").save()
    assert database["orders"].find_one() == {"_id": identity, "customer": "$customer", "lines": []}
    Order(id=identity, customer="$Eve").save()
    assert database["orders"].find_one() == {"_id": identity, "customer": "$Eve", "lines": []}


def test_an_instance_is_saved_with_its_tasks(outbox: Outbox, database: Db, note: Any) -> None:
    order = Order(customer="Ann")
    order.save(outbox=outbox, tasks=[note.s(STORED_ID)], events=[Event("order.placed", {})])
    (stored,) = database["orders"].find()
    assert (order.pk, len(pending(database))) == (stored["_id"], 2)
    assert str(order.pk) in str(stored["pendingEvents"])

    order.customer = "Bob"
    order.save(outbox=outbox, tasks=[note.s("changed"), note.s(STORED_ID)])
    order.save(outbox=outbox, tasks=[note.s("unchanged")])
    Order(id=order.pk, customer="Eve").save(outbox=outbox, tasks=[note.s("replaced")])
    order.save()
    assert len(pending(database)) == 6
    assert order.reload().customer == "Eve"

    database["orders"].delete_many({})
    Order(id=order.pk, customer="new").save(outbox=outbox, tasks=[note.s("new")])
    Order(id=ObjectId(), customer="forced").save(force_insert=True, outbox=outbox, tasks=[note.s("forced")])
    assert [each["pendingEvents"]["count"] for each in database["orders"].find()] == [1, 1]


def test_a_strict_model_that_declares_locks_and_stamps_reads_and_saves_what_has_them(
    outbox: Outbox, database: Db, note: Any
) -> None:
    order = Locked(customer="Ann").save()
    view(database["orders"], 1).update_one({"_id": order.pk}, {"$set": {"customer": "Bob"}})
    locked = transactional(database.client)(select_for_update)(database["orders"], {"_id": order.pk})
    found = Locked.objects.get(pk=order.pk)
    assert (found.customer, found.lock["id"], found.fence) == ("Bob", locked["_lock"]["id"], stamp(1))
    found.customer = "Cyd"
    found.save(outbox=outbox, tasks=[note.s("1")])
    view(database["orders"], 2).update_one({"_id": order.pk}, {"$set": {"customer": "Dan"}})
    assert Locked.objects.get(pk=order.pk).customer == "Dan"
    assert len(pending(database)) == 1


def test_a_receiver_that_saves_once_more_does_not_repeat_the_tasks(outbox: Outbox, database: Db, note: Any) -> None:
    """MongoEngine's signals are sent inside `save`."""

    def number(_sender: Any, document: Any, **_: Any) -> None:
        if document.number is None:
            document.number = 7
            document.save()

    mongoengine.signals.post_save.connect(number, sender=Order)
    try:
        Order(customer="Ann").save(outbox=outbox, tasks=[note.s("1")])
    finally:
        mongoengine.signals.post_save.disconnect(number, sender=Order)
    assert len(pending(database)) == 1
    assert Order.objects.get().number == 7


def test_a_save_that_fails_writes_neither(outbox: Outbox, database: Db, note: Any) -> None:
    Order(customer="Ann", number=1).save()
    with pytest.raises(ValidationError):
        Order(number=2).save(outbox=outbox, tasks=[note.s("1")])
    with pytest.raises(NotUniqueError):
        Order(customer="Bob", number=1).save(outbox=outbox, tasks=[note.s("1")])
    order = Order.objects.get(number=1)
    order.customer = "Bob"
    with pytest.raises(OutboxRefusedError):
        order.save(outbox=outbox, tasks=[note.s(object())])
    (stored,) = database["orders"].find()
    assert (stored["customer"], "pendingEvents" in stored) == ("Ann", False)
    order.save()
    assert "pendingEvents" not in database["orders"].find()[0]

    database["orders"].delete_many({})  # tasks alone create no document
    with pytest.raises(OutboxRefusedError):
        order.save(outbox=outbox, tasks=[note.s("1")])
    assert database["orders"].count_documents({}) == 0
    order.save(force_insert=True)
    assert database["orders"].find_one() == {"_id": order.pk, "customer": "Bob", "number": 1, "lines": []}


def test_wrong_use_is_refused_in_one_sentence(outbox: Outbox, database: Db, note: Any) -> None:
    other = Outbox(outbox.app, database["others"], at_once=False, sweep_every=None)
    for wrong in (other, None):
        with pytest.raises(ConfigurationError):
            Order(customer="Ann").save(outbox=wrong, tasks=[note.s("1")])
    with pytest.raises(ValidationError):
        Order(customer="Ann").pendingEvents = {}
    with pytest.raises(ValidationError):
        Order.objects.update(set__pendingEvents=[1])
    with pytest.raises(ConfigurationError):
        type("Wrong", (mongoengine.Document, OutboxMixin), {})
    assert outbox.collection.count_documents({}) == 0
