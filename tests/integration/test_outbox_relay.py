"""Relays on one document: claims that lapse, relays that sleep, entries that cannot be published or read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from amqp.exceptions import ChannelError as AMQPChannelError
from amqp.exceptions import NotFound, PreconditionFailed
from bson import DatetimeMS, Decimal128, Int64, MaxKey, Regex, Timestamp, encode
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from kombu.serialization import register, unregister

from mongo_celery import Event, Outbox
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.outbox import publisher as module
from mongo_celery.outbox.claims import build_count
from mongo_celery.outbox.delivery import Delivery
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.health import read_health
from mongo_celery.outbox.pending import EVENTS
from mongo_celery.outbox.publisher import BrokerUnavailableError
from mongo_celery.outbox.sweep import SWEEP_TASK, sweep_all
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import wait_for
from tests.fixtures.tasks import register_tasks
from tests.rig.commands import CommandRecorder
from tests.rig.outbox import Document, Publish, Rig, damage, due_again, hold, pause_of, publishing, ripen


def test_a_document_of_a_crashed_relay_is_free_again_by_the_servers_clock(rig: Rig) -> None:
    outbox = rig.outbox(at_once=False)
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])

    hold(rig.orders, 1, 600)
    assert outbox.runtime.relay.deliver(1).dispatched == 0
    hold(rig.orders, 1, -1)
    assert outbox.runtime.relay.deliver(1).dispatched == 1
    outbox.update_one({"_id": 1}, {"$set": {"a": 1}}, tasks=[rig.add.s(2, 2)])
    hold(rig.orders, 1, 3 * 3600)
    assert outbox.runtime.relay.deliver(1).dispatched == 1
    assert rig.sent() == [[1, 1], [2, 2]]

    for identity, ahead in ((1, 0), (2, 3600), (3, -3600)):
        outbox.update_one({"_id": identity}, {"$set": {"a": 2}}, upsert=True, tasks=[rig.add.s(identity, 0)])
        at = datetime.now(UTC) + timedelta(seconds=ahead)
        rig.orders.update_one({"_id": identity}, {"$set": {"pendingEvents.events.0.at": at}})
    assert outbox.sweep(older_than=60).dispatched == 2
    assert sorted(rig.sent()) == [[2, 0], [3, 0]]


def test_a_relay_that_sleeps_past_its_claim_repeats_one_entry_and_overtakes_none(rig: Rig) -> None:
    writer, sleeper = rig.outbox(at_once=False), rig.outbox(name="sleeper", claim_ttl=3.0, at_once=False)
    writer.insert_one({"_id": 1}, tasks=[rig.add.s(1, step) for step in range(3)])

    asleep = iter([True])

    def sleep(publish: Publish, _entry: Entry) -> None:
        if next(asleep, False):
            wait_for(lambda: writer.runtime.relay.deliver(1).dispatched == 3)
        publish()

    with publishing(sleeper, sleep):
        sleeper.runtime.relay.deliver(1)
    assert [step for _, step in rig.sent()] == [0, 1, 2, 0]
    assert rig.pending(1)["count"] == 0


def test_a_poison_entry_holds_back_its_own_document_and_becomes_a_dead_letter_in_the_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mongo_celery.outbox.failures._PAUSES", Pauses(first=60.0, longest=300.0))
    outbox = rig.outbox(at_once=False, failure_policy="dead_letter")
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, step) for step in range(3)])
    outbox.insert_one({"_id": 2}, tasks=[rig.add.s(2, 0)])
    damage(outbox, {"_id": 1}, 1, payload="{")

    outbox.sweep(older_than=0)
    assert sorted(rig.sent()) == [[1, 0], [2, 0]]
    waiting = rig.pending(1)
    assert (waiting["count"], waiting["events"][0]["attempts"]) == (2, 1)
    assert (outbox.status().failing, outbox.status().stuck) == (1, 0)
    assert outbox.runtime.relay.deliver(1) == Delivery(), "it is held back"
    ripen(rig.orders, 1)
    due_again(rig.orders)

    delivery = outbox.runtime.relay.deliver(1)

    assert (delivery.dead, delivery.dispatched) == (1, 1)
    assert rig.sent() == [[1, 2]]
    (dead_letter,) = outbox.runtime.dead_letters.find()
    assert dead_letter.document == 1
    assert outbox.status().dead_letters == 1
    assert "pendingEvents" not in (rig.orders.find_one({"_id": 1}) or {})


@pytest.mark.parametrize("retention", [None, 3600])
def test_dead_letters_expire_if_the_outbox_says_so(rig: Rig, retention: float | None) -> None:
    outbox = rig.outbox(at_once=False, dead_letter_retention=retention)
    for number in range(3):
        outbox.runtime.dead_letters.add(number, {"id": f"e{number}"}, ValueError("no"))
    letters = rig.database["outbox_dead_letters"]
    ages = {each["expiresAt"] - each["at"] if "expiresAt" in each else None for each in letters.find()}
    assert ages == {None if retention is None else timedelta(seconds=retention)}
    assert letters.index_information()["expired"]["expireAfterSeconds"] == 0


def test_by_default_a_poison_entry_stays_and_is_said_to_be_stuck(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing behind it overtakes it; `max_attempts` has no upper limit, the pause has one."""
    outbox = rig.outbox(at_once=False, max_attempts=2001)
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, step) for step in range(2)])
    damage(outbox, {"_id": 1}, payload="{")
    rig.orders.update_one({"_id": 1}, {"$set": {"pendingEvents.events.0.attempts": 2000}})

    with caplog.at_level(logging.ERROR, "mongo_celery.outbox"):
        assert outbox.runtime.relay.deliver(1).dispatched == 0

    waiting = rig.pending(1)
    assert waiting["events"][0]["attempts"] == 2001
    assert 120 < pause_of(rig.orders, 1) < 301
    assert (outbox.status().stuck, outbox.runtime.dead_letters.count(), rig.sent()) == (1, 0, [])
    setting_aside = rig.outbox(name="aside", at_once=False, failure_policy="dead_letter", max_attempts=1).status()
    assert (setting_aside.failing, setting_aside.stuck) == (1, 0), "what will be set aside is not stuck"
    assert [record.__dict__["event"] for record in caplog.records] == ["entry_stuck"]


@pytest.mark.parametrize("at_once", [False, True], ids=["by a sweep", "in the write"])
def test_a_task_that_no_process_knows_yet_waits_and_counts_nothing(
    rig: Rig, caplog: pytest.LogCaptureFixture, at_once: bool
) -> None:
    """A rolling deploy: the old process leaves it to the new one, with what is after it, and says what is missing."""
    given: Document = {} if at_once else {"at_once": False}
    old = rig.outbox(max_attempts=1, failure_policy="dead_letter", sweep_after=600, **given)
    later = rig.add.si(1, 1) | rig.app.signature("shop.new", args=(1, 2), immutable=True)
    old.insert_one({"_id": 1}, tasks=[rig.app.signature("shop.new", args=(1, 1)), rig.add.s(1, 3)])
    old.insert_one({"_id": 2}, tasks=[later])
    for document in (1, 2):
        for _ in range(3):
            due_again(rig.orders)
            delivery = old.runtime.relay.deliver(document)
            assert (delivery.dispatched, delivery.dead) == (0, 0)
            assert delivery.error is not None
            assert 0 < pause_of(rig.orders, document) < 6
    assert (old.status().failing, old.runtime.dead_letters.count(), old.runtime.counters.failures) == (0, 0, 0)
    assert rig.sent() == []
    due_again(rig.orders)
    assert old.runtime.relay.deliver_all([1, 2]).dispatched == 0
    assert severity_in_status(old, "unknown_tasks") == "degraded"
    rig.orders.update_one({"_id": 1}, {"$set": {f"{EVENTS}.0.at": datetime(2020, 1, 1, tzinfo=UTC)}})
    with caplog.at_level(logging.WARNING, "mongo_celery.outbox"):
        sweep_all([old.runtime])
    assert [record.__dict__["event"] for record in caplog.records] == ["task_unknown"]
    assert severity_in_status(old, "unknown_tasks") == "failing"

    register_tasks(rig.app, "shop.new")
    due_again(rig.orders)
    assert old.runtime.relay.deliver(1).dispatched == 2
    assert old.sweep(older_than=0).dispatched == 1
    assert rig.sent() == [[1, 1], [1, 3], [1, 1]]
    assert severity_in_status(old, "unknown_tasks") is None


def severity_in_status(outbox: Outbox, code: str) -> str | None:
    (health,) = read_health(outbox.app, [outbox])
    return {each.code: each.severity for each in health.findings}.get(code)


def test_an_entry_of_an_app_with_another_broker_waits_for_that_app(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """P9: whatever both know, nothing goes to the wrong broker. The log and the status name both brokers."""
    other = Celery("other", broker="memory://elsewhere/", set_as_current=False)
    register_tasks(other, rig.add.name)
    mine, theirs = rig.outbox(at_once=False), rig.outbox(app=other, name="theirs", at_once=False)
    mine.insert_one({"_id": 1}, tasks=[rig.add.s(1, 0)])
    theirs.update_one({"_id": 1}, {"$set": {"a": 1}}, tasks=[other.signature(rig.add.name, (1, 1))])
    mine.update_one({"_id": 1}, {"$set": {"a": 2}}, tasks=[rig.add.s(1, 2)])
    theirs.insert_one({"_id": 2}, events=[Event("order.paid", {})])

    with caplog.at_level(logging.ERROR, "mongo_celery.outbox"):
        first, second = (mine.runtime.relay.deliver(each) for each in (1, 2))
    assert (first.dispatched, first.left, second.dispatched) == (1, 2, 0)
    (record,) = caplog.records
    assert record.__dict__["event"] == "other_broker"
    assert (mine.status().failing, mine.runtime.dead_letters.count(), mine.status().other_brokers) == (0, 0, 2)
    assert severity_in_status(mine, "other_broker") == "failing"
    assert severity_in_status(theirs, "other_broker") is None

    due_again(rig.orders)
    assert [theirs.runtime.relay.deliver(each).dispatched for each in (1, 2)] == [1, 1]
    due_again(rig.orders)
    assert mine.runtime.relay.deliver(1).dispatched == 1

    moved = Celery(rig.app.main, broker="memory://elsewhere/", set_as_current=False)
    register_tasks(moved, rig.add.name)
    before = rig.outbox(app=moved, name="before", at_once=False)
    before.insert_one({"_id": 3}, tasks=[moved.signature(rig.add.name, (3, 3))])
    assert mine.runtime.relay.deliver(3).dispatched == 1, "one app knows its broker by two addresses"
    assert rig.sent() == [[1, 0], [1, 2], [3, 3]]


@pytest.mark.parametrize("collected", [1, 4])
def test_a_time_limit_is_no_entrys_fault_and_lets_every_claim_go(
    rig: Rig, caplog: pytest.LogCaptureFixture, collected: int
) -> None:
    """
    It strikes in the first command or the second: what was sent is removed, once, and the next sweep can begin.

    With kombu before 5.7 each message has a command of its own.
    """
    outbox = rig.outbox(at_once=False, max_attempts=1, failure_policy="dead_letter", claim_ttl=600, sweep_after=0.001)
    published: list[Entry] = []

    def interrupt(publish: Publish, entry: Entry) -> None:
        if len(published) == collected:
            raise SoftTimeLimitExceeded
        published.append(entry)
        publish()

    def leave_and_interrupt() -> None:
        published.clear()
        for identity in range(3):
            outbox.insert_one({"_id": identity}, tasks=[rig.add.s(identity, step) for step in range(2)])
        with publishing(outbox, interrupt), pytest.raises(SoftTimeLimitExceeded):
            sweep_all([outbox.runtime])

    leave_and_interrupt()
    sent = rig.sent()
    left = 6 - len(sent)
    assert left > 0
    assert (outbox.status().pending, outbox.status().failing, outbox.runtime.dead_letters.count()) == (left, 0, 0)
    assert outbox.sweep(older_than=0).dispatched == left
    sent += rig.sent()
    assert [[step for each, step in sent if each == identity] for identity in range(3)] == [[0, 1]] * 3

    rig.orders.delete_many({})
    leave_and_interrupt()
    rig.orders.delete_many({})  # else a document that its owner deletes later is logged as deleted while it was held
    with caplog.at_level(logging.WARNING, "mongo_celery.outbox"):
        assert outbox.sweep(older_than=0).dispatched == outbox.runtime.relay.deliver(1).dispatched == 0
    assert [getattr(each, "event", None) for each in caplog.records] == []


def test_a_time_limit_that_strikes_while_a_payload_is_read_is_no_entrys_fault(rig: Rig) -> None:
    """What kombu meets, it makes an error of decoding."""

    def interrupted(_data: object) -> None:
        raise SoftTimeLimitExceeded

    register("interrupted", str, interrupted, "application/x-interrupted", "utf-8")
    rig.app.conf.accept_content = ["json", "application/x-interrupted"]
    try:
        outbox = rig.outbox(at_once=False, max_attempts=1)
        outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 1).set(serializer="interrupted")])
        with pytest.raises(SoftTimeLimitExceeded):
            outbox.sweep(older_than=0)
    finally:
        unregister("interrupted")

    assert (outbox.status().pending, outbox.status().failing) == (1, 0)


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_process_without_a_free_connection_is_no_entrys_fault(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, *, is_closed: bool
) -> None:
    """P14: other threads have all connections, or one of them has just closed them."""
    monkeypatch.setattr(module, "_PRODUCERS_MAX", 1)
    monkeypatch.setattr(module, "_BROKER_SECONDS", 1)
    outbox = rig.outbox(at_once=False)
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])
    outbox.insert_one({"_id": 2}, tasks=[rig.add.s(1, 2), rig.add.s(1, 3)])
    pool = outbox.runtime.publisher._producers.get()
    if is_closed:
        pool.force_close_all()
        outbox.runtime.relay.deliver_all([1, 2])
        outbox.runtime.publisher.close()
    else:
        with pool.acquire(block=True):
            outbox.runtime.relay.deliver_all([1, 2])
    assert [entry["attempts"] for identity in (1, 2) for entry in rig.pending(identity)["events"]] == [0] * 3
    due_again(rig.orders)
    assert outbox.sweep(older_than=0).dispatched == 3


def test_what_was_published_is_removed_after_so_many_entries(rig: Rig) -> None:
    outbox = rig.outbox(at_once=False)
    for identity in range(8):
        outbox.insert_one({"_id": identity}, tasks=[rig.add.s(identity, step) for step in range(50)])
    published, unremoved = list[str](), list[int]()

    def count(publish: Publish, entry: Entry) -> None:
        publish()
        published.append(entry.id)
        if len(published) % 50 == 0:
            unremoved.append(len(published) - 400 + outbox.status().pending)

    with publishing(outbox, count):
        assert outbox.sweep(older_than=0).dispatched == 400
    assert max(unremoved) <= 200, "a slow machine removes them sooner"


def test_entries_that_somebody_has_damaged_are_set_aside_one_by_one(rig: Rig) -> None:
    outbox = rig.outbox(at_once=False, failure_policy="dead_letter")
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, number) for number in range(60)])
    damaged = [{"x": 1}, {"x": 2}, "text", {"id": Regex("^"), "kind": "task", "attempts": 0}]
    first = {"$push": {"pendingEvents.events": {"$each": damaged, "$position": 0}}, "$inc": {"pendingEvents.count": 4}}
    rig.orders.update_one({"_id": 1}, first)
    done = outbox.sweep(older_than=0)
    assert (done.dispatched, done.dead, outbox.runtime.dead_letters.count()) == (60, 4, 4)
    assert rig.sent() == [[1, number] for number in range(60)]

    outbox.insert_one({"_id": 2}, tasks=[rig.add.s(2, 2)])
    change, array_filters = build_count(Regex("^"))
    rig.orders.update_one({"_id": 2}, change, array_filters=array_filters)
    assert rig.pending(2)["events"][0]["attempts"] == 0, "to a query, a regular expression is no value"


def test_what_is_added_during_a_delivery_is_published_only_after_a_majority_write(
    rig: Rig, make_client: MakeClient
) -> None:
    """A fail-over could take it back, and its tasks would have run without it."""
    seen, published = CommandRecorder(), ("", {"published": 1})
    writer = rig.outbox(at_once=False)
    writer.insert_one({"_id": 1}, tasks=[rig.add.s(1, 0)])
    collection = make_client(event_listeners=[seen])[rig.database.name]["orders"]
    relay = rig.outbox(collection, name="relay", at_once=False)
    relay.runtime.signer.read()
    seen.sent.clear()

    def publish_and_add(publish: Publish, _entry: Entry) -> None:
        publish()
        seen.sent.append(published)
        if seen.sent.count(published) == 1:
            writer.update_one({"_id": 1}, {"$set": {"a": 1}}, tasks=[rig.add.s(1, 1)])

    with publishing(relay, publish_and_add):
        assert relay.runtime.relay.deliver(1).dispatched == 2

    assert rig.sent() == [[1, 0], [1, 1]]
    concerns: dict[str, Callable[[Any], Any]] = {
        "update": lambda command: command["writeConcern"]["w"],
        "find": lambda command: f"read {command['readConcern']['level']}",
        "published": lambda _: "published",
    }
    noted = [(next(iter(command)), command) for _, command in seen.sent]
    sent = [concerns[name](each) for name, each in noted if name in concerns]
    places = [place for place, each in enumerate(sent) if each == "published"]
    assert [sent[place - 2 : place] for place in places] == [["majority", "read majority"]] * 2


def test_no_stored_value_makes_a_claim_or_a_status_fail(rig: Rig) -> None:
    """Each of them would stop every other document, since all are asked by one command."""
    outbox = rig.outbox(at_once=False)
    outbox.insert_one({"_id": "good"}, tasks=[rig.add.s(1, 1)])
    field = rig.pending("good")
    longest, shortest = Int64(2**63 - 1), Int64(-(2**63))
    untils: list[Any] = [longest, float("nan"), {}, [1], "long", Timestamp(1, 1), MaxKey(), Decimal128("1")]
    claims: list[Any] = [None, 3, [], [{}], {"owner": [], "more": 1}, [field["claim"]]]
    attempts: list[Any] = [longest, {}]
    strange: list[Document] = [
        *({**field, "claim": {**field["claim"], "until": until}} for until in untils),
        *({**field, "claim": {**field["claim"], "until": DatetimeMS(until)}} for until in (2**62, -(2**62))),
        *({**field, "claim": claim} for claim in claims),
        *({**field, "count": count} for count in (float("inf"), longest, 0.5, Decimal128("Infinity"))),
        *({**field, "events": [{**field["events"][0], "attempts": times, "app": 7, "at": 3}]} for times in attempts),
        *({**field, "events": [{**field["events"][0], "at": at}]} for at in (shortest, longest, DatetimeMS(-(2**63)))),
    ]
    rig.orders.insert_many([{"pendingEvents": each} for each in [*strange, [field], [[field]]]])

    assert outbox.status().documents > 20
    wait_for(lambda: outbox.sweep(older_than=0) and "pendingEvents" not in (rig.orders.find_one("good") or {}))
    assert outbox.status().documents > 0, "some are held for ever, or are nobody's"
    rig.drain()


def test_an_entry_that_lies_in_many_documents_is_removed_only_where_it_was_published(rig: Rig) -> None:
    """One turn publishes it in one document, and what stands before it in another: it must not go from there, too."""
    outbox = rig.outbox(at_once=False)
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(0, 0), *(rig.add.s(2, step) for step in range(50))])
    outbox.insert_one({"_id": 2}, tasks=[rig.add.s(1, step) for step in range(50)])
    shared = rig.pending(1)["events"][0]
    more = {"$push": {"pendingEvents.events": shared}, "$inc": {"pendingEvents.count": 1}}
    rig.orders.update_one({"_id": 2}, more)

    assert outbox.sweep(older_than=0).dispatched == 102
    assert [number for number, _ in rig.sent()].count(0) == 2


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
