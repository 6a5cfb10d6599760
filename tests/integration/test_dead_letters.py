"""Dead letters of an outbox put back into their documents: nothing is lost, whatever a relay does meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from bson import CodecOptions
from bson.binary import UuidRepresentation
from celery import Celery
from pymongo.database import Database

from mongo_celery import Event, Outbox
from mongo_celery.errors import CommandRefusedError
from mongo_celery.outbox import claims
from mongo_celery.outbox.replay import replay
from tests.fixtures.serializer import ACCEPTED, NEW
from tests.fixtures.tasks import register_tasks
from tests.rig.outbox import Document, ripen

TASK = "shop.bill"


class Orders:
    """A collection, a writer that leaves delivery to others, and a relay that cannot read the task."""

    def __init__(self, database: Database[Document], broker: str, broker_client: Any, **options: Any) -> None:
        self.orders = database["orders"]
        self.stored = database["outbox_dead_letters"]
        given: Document = {"at_once": False, "sweep_every": None, "database": database.name, **options}
        self.writer = Outbox(Celery("shop", broker=broker, accept_content=ACCEPTED), self.orders, **given)
        register_tasks(self.writer.app, TASK)
        lacking = Celery("shop", broker=broker)
        self.outbox = Outbox(lacking, self.orders, failure_policy="dead_letter", **given)
        self._broker = broker_client

    def bill(self, order: object) -> Any:
        return self.writer.app.signature(TASK, args=(str(order),), serializer=NEW)

    def make_dead_letter(self, order: object) -> str:
        """Insert an order with that task and let the relay try it; the dead letter's id."""
        self.writer.insert_one({"_id": order}, tasks=[self.bill(order)])
        ripen(self.orders, order)
        assert self.outbox.runtime.relay.deliver(order).dead == 1
        (found,) = [each.id for each in self.outbox.runtime.dead_letters.find() if each.document == order]
        return found

    def entries(self, order: object) -> list[Document]:
        (document,) = self.orders.find({"_id": order})
        field: Any = document.get("pendingEvents", {"count": 0, "events": []})
        assert field["count"] == len(field["events"]), "the index is on the count"
        return list(field["events"])

    def ids(self, order: object) -> list[str]:
        return [entry["id"] for entry in self.entries(order)]

    def published(self) -> list[str]:
        return [json.loads(text)["headers"]["id"] for text in reversed(self._broker.lrange("celery", 0, -1))]

    def close(self) -> None:
        for each in (self.writer, self.outbox):
            each.runtime.publisher.close()


@pytest.fixture
def orders(database: Database[Document], redis_url: str, redis_client: Any) -> Iterator[Orders]:
    made = Orders(database, redis_url, redis_client)
    yield made
    made.close()


def test_a_replayed_entry_is_last_with_a_new_id_and_its_tasks_own(orders: Orders) -> None:
    """What was written meanwhile goes before it; the task is published under the id that it was stored with."""
    id_ = orders.make_dead_letter(1)
    orders.writer.update_one({"_id": 1}, {"$set": {"paid": True}}, tasks=[orders.bill(2)])
    (other,) = orders.ids(1)
    assert replay(orders.outbox, id_) == f"{id_}~1"
    relay = orders.outbox.runtime.relay
    for removed in (claims.build_removal, claims.build_any_removal):  # by a relay that wakes up late
        relay.removals.quick.update_one(*removed(1, [id_]))
    assert orders.ids(1) == [other, f"{id_}~1"]
    assert orders.entries(1)[1]["attempts"] == 0
    assert orders.outbox.runtime.dead_letters.find() == []
    assert orders.writer.runtime.relay.deliver(1).dispatched == 2
    assert orders.published() == [other, id_]


def test_a_letter_whose_entry_is_still_in_the_document_is_kept(orders: Orders) -> None:
    """A relay may be about to remove that entry: without the dead letter nothing would be left."""
    id_ = orders.make_dead_letter(1)
    found: Any = orders.outbox.runtime.dead_letters.get(id_)
    orders.orders.update_one({"_id": 1}, {"$set": {"pendingEvents.events": [found.entry], "pendingEvents.count": 1}})
    with pytest.raises(CommandRefusedError):
        replay(orders.outbox, id_)
    assert orders.ids(1) == [id_]
    assert orders.outbox.runtime.dead_letters.get(id_) == found


def test_a_replay_that_was_cut_short_adds_nothing_twice_and_may_be_replayed_again(orders: Orders) -> None:
    """The entry is back and its dead letter was not removed: the repetition only removes it."""
    id_ = orders.make_dead_letter(1)
    (stored,) = orders.stored.find()
    replay(orders.outbox, id_)
    orders.stored.insert_one(stored)
    assert replay(orders.outbox, id_) == f"{id_}~1"
    assert orders.ids(1) == [f"{id_}~1"]
    assert orders.outbox.runtime.dead_letters.find() == []
    ripen(orders.orders, 1)
    assert orders.outbox.runtime.relay.deliver(1).dead == 1
    (again,) = orders.outbox.runtime.dead_letters.find()
    assert again.id == f"{id_}~1"
    assert replay(orders.outbox, again.id) == f"{id_}~2", "a name that no earlier relay knows"


def test_without_its_document_a_letter_is_kept_or_published_on_request(orders: Orders) -> None:
    id_ = orders.make_dead_letter(1)
    orders.orders.delete_one({"_id": 1})
    with pytest.raises(CommandRefusedError):
        replay(orders.outbox, id_)
    with pytest.raises(CommandRefusedError):
        replay(orders.outbox, id_, without_document=True)
    assert orders.outbox.runtime.dead_letters.get(id_) is not None
    done = replay(orders.writer, id_, without_document=True)
    assert (done, orders.published()) == (None, [id_])
    assert orders.orders.count_documents({}) == 0
    assert orders.outbox.runtime.dead_letters.find() == []


def test_an_event_keeps_its_own_id(orders: Orders) -> None:
    """Consumers deduplicate by the id in the event, which is not that of the entry any more."""
    orders.writer.insert_one({"_id": 1}, events=[Event("order.placed", {"n": 1})])
    (entry,) = orders.entries(1)
    orders.outbox.runtime.dead_letters.add(1, entry, ValueError("no"))
    orders.orders.update_one({"_id": 1}, {"$set": {"pendingEvents.events": [], "pendingEvents.count": 0}})
    replay(orders.outbox, entry["id"])
    (again,) = orders.entries(1)
    assert again["id"] == f"{entry['id']}~1"
    assert again["payload"] == entry["payload"]
    assert json.loads(again["payload"])["id"] == entry["id"]


def test_an_entry_that_cannot_be_read_can_only_be_discarded(orders: Orders) -> None:
    """Somebody else has written to the field; what they wrote is there to be looked at."""
    orders.outbox.runtime.dead_letters.add(1, {"id": "x", "at": "noon"}, ValueError("no"))
    with pytest.raises(CommandRefusedError):
        replay(orders.outbox, "x")
    found: Any = orders.outbox.runtime.dead_letters.get("x")
    assert found.plain()["entry"] == {"id": "x", "at": "noon"}
    assert orders.outbox.runtime.dead_letters.remove("x")
    assert not orders.outbox.runtime.dead_letters.remove("x")
    with pytest.raises(CommandRefusedError):
        replay(orders.outbox, "x")


@pytest.mark.parametrize("id_", [UUID(int=7), datetime(2026, 1, 2, 3, tzinfo=UTC), {"a": 1, "b": [2]}, 2**40, "a/b"])
def test_documents_are_found_again_whatever_their_id_is(
    database: Database[Document], redis_url: str, redis_client: Any, id_: Any
) -> None:
    options: CodecOptions[Document] = CodecOptions(uuid_representation=UuidRepresentation.STANDARD, tz_aware=True)
    orders = Orders(database.with_options(codec_options=options), redis_url, redis_client)
    orders.writer.insert_one({"_id": id_}, tasks=[orders.bill(1)])
    ripen(orders.orders, id_)
    assert orders.outbox.sweep(older_than=0).dead == 1
    (found,) = orders.outbox.runtime.dead_letters.find()
    replay(orders.outbox, found.id)
    assert orders.ids(id_) == [f"{found.id}~1"]
    assert json.loads(json.dumps(found.plain()))["id"] == found.id
    orders.close()
