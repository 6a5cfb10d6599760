"""Brokers that refuse, backends that are gone, fields that somebody else has written: what each of them stops."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import redis
from amqp.exceptions import ChannelError as AMQPChannelError
from amqp.exceptions import NotFound, PreconditionFailed
from bson import encode

from mongo_celery.outbox.delivery import Delivery
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.publisher import BrokerUnavailableError
from mongo_celery.outbox.sweep import SWEEP_TASK
from tests.rig.outbox import Publish, Rig, due_again, publishing, ripen


def test_entries_that_the_broker_refuses_stop_no_others_and_become_dead_letters(rig: Rig, redis_url: str) -> None:
    """More refused documents than end a sweep when the broker is down, and they come first in the index."""
    first, second = (
        rig.outbox(at_once=False, sweep_after=0.001, failure_policy="dead_letter"),
        rig.outbox("others", at_once=False, sweep_after=0.001),
    )
    with redis.Redis.from_url(redis_url) as broker:
        broker.set("taken", "not a list")
    for number in range(4):
        first.insert_one({"_id": number}, tasks=[rig.add.s(number, 0).set(queue="taken")])
    first.insert_one({"_id": 10}, tasks=[rig.add.s(10, 1)])
    second.insert_one({"_id": 1}, tasks=[rig.add.s(11, 1)])

    rig.app.tasks[SWEEP_TASK]()
    assert sorted(rig.sent()) == [[10, 1], [11, 1]]
    assert first.status().failing == 4
    due_again(rig.orders)
    for number in range(4):
        ripen(rig.orders, number)
    rig.app.tasks[SWEEP_TASK]()
    assert first.runtime.dead_letters.count() == 4


def test_a_count_without_entries_is_put_right_and_stops_nobody(rig: Rig) -> None:
    outbox = rig.outbox(at_once=False, sweep_after=0.001)
    outbox.insert_one({"_id": 2}, tasks=[rig.add.s(1, 1)])
    rig.orders.insert_many(
        [{"_id": 0, "pendingEvents": {"count": 3}}, {"_id": 1, "pendingEvents": {"count": 3, "events": "none"}}]
    )
    for number in (0, 1):
        assert outbox.runtime.relay.deliver(number) == Delivery()
    rig.app.tasks[SWEEP_TASK]()
    assert rig.sent() == [[1, 1]]
    assert rig.orders.count_documents({"pendingEvents": {"$exists": True}}) == 0
    assert [found.entry for found in outbox.runtime.dead_letters.find()] == [{"events": "none"}], "it may be somebody's"


@pytest.mark.parametrize("change", ["replaced", "emptied", "deleted"])
def test_a_document_that_changes_while_its_entry_fails_is_left_as_it_is(rig: Rig, change: str) -> None:
    outbox, emptied = rig.outbox(at_once=False), {"$set": {"pendingEvents.events": [], "pendingEvents.count": 0}}
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])
    changes: dict[str, Callable[[], object]] = {
        "replaced": lambda: rig.orders.replace_one({"_id": 1}, {"fresh": 1}),
        "emptied": lambda: rig.orders.update_one({"_id": 1}, emptied),
        "deleted": lambda: rig.orders.delete_one({"_id": 1}),
    }

    def fail(_publish: Publish, entry: Entry) -> None:
        changes[change]()
        raise ValueError(entry.id)

    with publishing(outbox, fail):
        outbox.runtime.relay.deliver(1)
    if change == "replaced":
        assert rig.orders.find_one() == {"_id": 1, "fresh": 1}
    due_again(rig.orders)
    outbox.update_one({"_id": 1}, {"$set": {"a": 1}}, upsert=True, tasks=[rig.add.s(2, 2)])
    assert outbox.runtime.relay.deliver(1).dispatched == 1
    assert rig.sent() == [[2, 2]]


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (NotFound("Queue.declare: (404) NOT_FOUND - home node of durable queue 'q' is down", reply_code=404), True),
        (NotFound("Basic.publish: (404) NOT_FOUND - no exchange 'x' in vhost '/'", reply_code=404), False),
        (PreconditionFailed("inequivalent arg", reply_code=406), False),
        (ConnectionRefusedError("gone"), True),
        (ValueError("its own"), False),
    ],
    ids=["node down", "no exchange", "other arguments", "connection", "own"],
)
def test_what_rabbitmq_says_is_told_apart(rig: Rig, error: Exception, *, waits: bool) -> None:
    """An outage dead-letters nothing; what no other entry would get does not wait for ever."""
    outbox = rig.outbox(at_once=False)
    connection = SimpleNamespace(channel_errors=(AMQPChannelError,), connection_errors=(OSError,))
    verdict = outbox.runtime.publisher._judge(error, connection)
    assert isinstance(verdict, BrokerUnavailableError) == waits
    assert verdict is error or waits


def test_a_poison_entry_that_fills_its_document_becomes_a_dead_letter(rig: Rig) -> None:
    """A dead letter with its whole traceback would be larger than 16 MB."""
    outbox = rig.outbox(at_once=False, failure_policy="dead_letter")
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s("x" * (16 * 2**20 - 1300), 1)])
    ripen(rig.orders, 1)
    stored = rig.orders.find_one()
    assert stored is not None
    assert len(encode(stored)) > 16 * 2**20 - 1000

    def poison(_publish: Publish, entry: Entry) -> None:
        raise ValueError(entry.id * 500)

    with publishing(outbox, poison):
        assert outbox.runtime.relay.deliver(1).dead == 1
    assert outbox.runtime.dead_letters.count() == 1
    assert rig.pending(1)["count"] == 0
