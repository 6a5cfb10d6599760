"""Relays on one document: claims that lapse, relays that sleep, entries that cannot be published."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bson import DatetimeMS, Decimal128, Int64, MaxKey, ObjectId, Regex, Timestamp
from celery.exceptions import SoftTimeLimitExceeded
from kombu.serialization import register, unregister
from pymongo import monitoring
from pymongo.database import Database

from mongo_celery import Event, Outbox
from mongo_celery.outbox import relay as module
from mongo_celery.outbox.delivery import Delivery
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.pending import NOBODY
from mongo_celery.outbox.sweep import sweep_all
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import wait_for
from tests.fixtures.redis import MakeRedis
from tests.integration.outbox_rig import Rig, damage, due_again, hold, opened, pause_of, pending, ripen

Document = dict[str, Any]


@pytest.fixture
def rig(database: Database[Document], redis_url: str) -> Iterator[Rig]:
    with opened(database, redis_url) as made:
        yield made
    database.client["mongo_celery"]["outbox_dead_letters"].delete_many({"outbox": {"$regex": f"^{database.name}"}})


def test_a_document_of_a_crashed_relay_is_free_again_by_the_servers_clock(
    rig: Rig, database: Database[Document]
) -> None:
    """Held until its time is over; a time beyond all claims is not a relay's, and holds nothing."""
    outbox = rig.outbox(at_once=False)
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])

    hold(database["orders"], 1, 600)
    assert outbox.backing.relay.deliver(1).dispatched == 0
    hold(database["orders"], 1, -1)
    assert outbox.backing.relay.deliver(1).dispatched == 1
    outbox.update_one({"_id": 1}, {"$set": {"a": 1}}, tasks=[rig.add.s(2, 2)])
    hold(database["orders"], 1, 3 * 3600)
    assert outbox.backing.relay.deliver(1).dispatched == 1
    assert rig.sent() == [[1, 1], [2, 2]]


def test_an_entry_of_a_writer_whose_clock_is_ahead_is_swept_like_any_other(
    rig: Rig, database: Database[Document]
) -> None:
    outbox = rig.outbox(at_once=False)
    for identity, ahead in ((1, 0), (2, 3600), (3, -3600)):
        outbox.insert_one({"_id": identity}, tasks=[rig.add.s(identity, 0)])
        at = datetime.now(UTC) + timedelta(seconds=ahead)
        database["orders"].update_one({"_id": identity}, {"$set": {"pendingEvents.events.0.at": at}})

    assert outbox.sweep(older_than=60).dispatched == 2
    assert sorted(rig.sent()) == [[2, 0], [3, 0]]
    assert outbox.sweep(older_than=0).dispatched == 1


def test_relays_at_the_same_time_send_each_entry_once_and_in_order(rig: Rig, database: Database[Document]) -> None:
    """Four relays, each with an outbox of its own, on documents with ten entries."""
    first = rig.outbox(at_once=False)
    for identity in range(5):
        first.insert_one({"_id": identity}, tasks=[rig.add.s(identity, step) for step in range(10)])
    others = [Outbox(rig.app, database["orders"], name=str(each), sweep_every=None) for each in range(4)]
    threads = [threading.Thread(target=lambda each=each: each.sweep(older_than=0)) for each in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for other in others:
        other.publisher.close()

    sent = rig.sent()
    assert len(sent) == 50
    for identity in range(5):
        assert [step for each, step in sent if each == identity] == list(range(10))


def test_a_relay_that_sleeps_past_its_claim_repeats_but_never_overtakes(rig: Rig, database: Database[Document]) -> None:
    """Paused before its first publish; another delivers all and more; it wakes up, and its entry comes late, again."""
    writer = rig.outbox(at_once=False)
    writer.insert_one({"_id": 1}, tasks=[rig.add.s(1, step) for step in range(3)])
    sleeper = Outbox(rig.app, database["orders"], name="sleeper", sweep_every=None, claim_ttl=3.0)
    asleep, wake = threading.Event(), threading.Event()
    publish = sleeper.publisher.publish

    def slow(entry: Entry, *_document_id: object) -> None:
        asleep.set()
        assert wake.wait(60)
        publish(entry)

    sleeper.publisher.publish = slow  # type: ignore[method-assign]
    thread = threading.Thread(target=sleeper.backing.relay.deliver, args=(1,))
    thread.start()
    assert asleep.wait(60)
    wait_for(lambda: writer.backing.relay.deliver(1).dispatched == 3)
    writer.update_one({"_id": 1}, {"$set": {"a": 1}}, tasks=[rig.add.s(1, 3)])
    wait_for(lambda: writer.backing.relay.deliver(1).dispatched == 1)
    wake.set()
    thread.join()
    sleeper.publisher.close()

    steps = [step for _, step in rig.sent()]
    assert steps == [0, 1, 2, 3, 0]
    assert pending(database, 1)["count"] == 0


def test_a_poison_entry_holds_back_its_own_document_and_becomes_a_dead_letter_in_the_end(
    rig: Rig, database: Database[Document]
) -> None:
    """Counted, held back, set aside with its error where that is the policy; its successors follow."""
    outbox = rig.outbox(at_once=False, failure_policy="dead_letter")
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, step) for step in range(3)])
    outbox.insert_one({"_id": 2}, tasks=[rig.add.s(2, 0)])
    damage(outbox, {"_id": 1}, 1, payload="{")

    outbox.sweep(older_than=0)
    assert sorted(rig.sent()) == [[1, 0], [2, 0]]
    waiting = pending(database, 1)
    assert (waiting["count"], waiting["events"][0]["attempts"]) == (2, 1)
    assert (outbox.status().failing, outbox.status().stuck) == (1, 0)
    assert outbox.backing.relay.deliver(1) == Delivery(), "it is held back"
    ripen(database["orders"], 1)
    due_again(database["orders"])

    delivery = outbox.backing.relay.deliver(1)

    assert (delivery.dead, delivery.dispatched) == (1, 1)
    assert rig.sent() == [[1, 2]]
    (dead_letter,) = outbox.dead_letters.find()
    assert dead_letter["document"] == 1
    assert outbox.status().dead_letters == 1
    assert "pendingEvents" not in (database["orders"].find_one({"_id": 1}) or {})


@pytest.mark.parametrize("retention", [None, 3600])
def test_dead_letters_are_found_by_an_index_and_expire_if_the_outbox_says_so(
    rig: Rig, database: Database[Document], retention: float | None
) -> None:
    """By default one stays until it is replayed or discarded."""
    outbox = rig.outbox(at_once=False, dead_letter_retention=retention, database=database.name)
    for number in range(3):
        outbox.dead_letters.add(number, {"id": f"e{number}"}, ValueError("no"))
    letters = database["outbox_dead_letters"]
    (first, *_), found = outbox.dead_letters.find(), letters.find({}, {"_id": 0, "at": 1, "expiresAt": 1})
    ages = {each["expiresAt"] - each["at"] if "expiresAt" in each else None for each in found}
    assert (first["document"], ages) == (0, {None if retention is None else timedelta(seconds=retention)})
    assert letters.index_information()["expired"]["expireAfterSeconds"] == 0
    look = letters.find({"outbox": outbox.collection.full_name}).sort([("at", 1), ("_id", 1)]).limit(1).explain()
    assert look["executionStats"]["totalDocsExamined"] == 1


def test_by_default_a_poison_entry_stays_and_is_said_to_be_stuck(
    rig: Rig, database: Database[Document], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing behind it overtakes it; `max_attempts` has no upper limit, the pause has one."""
    outbox = rig.outbox(at_once=False, max_attempts=2001)
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, step) for step in range(2)])
    damage(outbox, {"_id": 1}, payload="{")
    database["orders"].update_one({"_id": 1}, {"$set": {"pendingEvents.events.0.attempts": 2000}})

    with caplog.at_level(logging.ERROR, "mongo_celery.outbox"):
        assert outbox.backing.relay.deliver(1).dispatched == 0

    waiting = pending(database, 1)
    assert waiting["events"][0]["attempts"] == 2001
    assert 120 < pause_of(database["orders"], 1) <= 300
    assert (outbox.status().stuck, outbox.dead_letters.count(), rig.sent()) == (1, 0, [])
    assert [record.__dict__["event"] for record in caplog.records] == ["entry_stuck"]


def _new(a: int, b: int) -> int:
    return a + b


def test_a_task_that_no_process_knows_yet_waits_and_counts_nothing(rig: Rig, database: Database[Document]) -> None:
    """A rolling deploy: the old worker passes it on to the new one, with what stands behind it."""
    old = rig.outbox(at_once=False, max_attempts=1, failure_policy="dead_letter")
    old.insert_one({"_id": 1}, tasks=[rig.app.signature("shop.new", args=(1, 1)), rig.add.s(1, 2)])
    for _ in range(3):
        assert old.backing.relay.deliver(1).dispatched == 0
        assert 0 < pause_of(database["orders"], 1) < 31
        due_again(database["orders"])
    assert (old.status().failing, old.dead_letters.count()) == (0, 0)

    rig.app.task(name="shop.new", shared=False)(_new)
    assert old.backing.relay.deliver(1).dispatched == 2
    assert rig.sent() == [[1, 1], [1, 2]]


def test_another_apps_entry_is_stopped_at_and_never_passed_over(
    rig: Rig, database: Database[Document], caplog: pytest.LogCaptureFixture
) -> None:
    """Its own app delivers it, or one that says so; this one neither counts nor dead-letters it, and says it waits."""
    mine = rig.outbox(at_once=False, max_attempts=1, failure_policy="dead_letter")
    mine.insert_one({"_id": 1}, tasks=[rig.add.s(1, step) for step in range(3)])
    damage(mine, {"_id": 1}, 1, app="web")
    mine.insert_one({"_id": 2}, tasks=[rig.add.s(2, 0)])

    first = mine.backing.relay.deliver(1)
    assert (first.dispatched, first.left) == (1, 2)
    assert "belongs to app 'web'" in str(first.error)
    assert mine.sweep(older_than=0).dispatched == 1
    assert (mine.status().other_apps, mine.status().failing) == (1, 0)
    database["orders"].update_one({"_id": 1}, {"$set": {"pendingEvents.events.0.at": datetime(2020, 1, 1, tzinfo=UTC)}})
    with caplog.at_level(logging.WARNING, "mongo_celery.outbox"):
        sweep_all([mine.sweep_target])
    assert [record.__dict__["event"] for record in caplog.records] == ["other_app"]
    assert rig.sent() == [[1, 0], [2, 0]]

    both = rig.outbox(name="both", at_once=False, delivers=("web",))
    assert both.backing.relay.deliver(1).dispatched == 2
    assert rig.sent() == [[1, 1], [1, 2]]


@pytest.mark.parametrize("collected", [1, 4])
def test_a_time_limit_is_no_entrys_fault_and_lets_every_claim_go(rig: Rig, collected: int) -> None:
    """
    It strikes in the first command or the second: what was sent is removed, and the next sweep can begin at once.

    With kombu before 5.7 each message has a command of its own.
    """
    outbox = rig.outbox(at_once=False, max_attempts=1, failure_policy="dead_letter", claim_ttl=600)
    for identity in range(3):
        outbox.insert_one({"_id": identity}, tasks=[rig.add.s(identity, step) for step in range(2)])
    publish, published = outbox.publisher.publish, list[Entry]()

    def interrupted(entry: Entry, *_document_id: object) -> None:
        if len(published) == collected:
            raise SoftTimeLimitExceeded
        published.append(entry)
        publish(entry)

    outbox.publisher.publish = interrupted  # type: ignore[method-assign]
    with pytest.raises(SoftTimeLimitExceeded):
        sweep_all([replace(outbox.sweep_target, age=0.001)])
    outbox.publisher.publish = publish  # type: ignore[method-assign]

    sent = rig.sent()
    left = 6 - len(sent)
    assert left > 0
    assert (outbox.status().pending, outbox.status().failing, outbox.dead_letters.count()) == (left, 0, 0)
    assert outbox.sweep(older_than=0).dispatched == left
    sent += rig.sent()
    assert [[step for each, step in sent if each == identity] for identity in range(3)] == [[0, 1]] * 3


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


def test_what_is_stuck_is_counted_where_it_is_tried_for_ever(rig: Rig, database: Database[Document]) -> None:
    """What will be set aside is failing, and not stuck."""
    tries, sets_aside = (
        rig.outbox(name=policy, at_once=False, failure_policy=policy, max_attempts=1)
        for policy in ("halt", "dead_letter")
    )
    for identity in range(3):
        tries.insert_one({"_id": identity}, tasks=[rig.add.s(identity, 0)])
    orders = database["orders"]
    orders.update_one({"_id": 1}, {"$set": {"pendingEvents.events.0.attempts": 3}})

    assert (tries.status().failing, tries.status().stuck) == (1, 1)
    assert (sets_aside.status().failing, sets_aside.status().stuck) == (1, 0)


def test_a_document_that_somebody_writes_to_all_the_time_does_not_capture_a_relay(
    rig: Rig, database: Database[Document]
) -> None:
    """It goes to the end after some entries, and is left to the next delivery after some turns."""
    outbox = rig.outbox(at_once=False)
    for identity in range(2):
        outbox.insert_one({"_id": identity}, tasks=[rig.add.s(identity, 0)])
    publish = outbox.publisher.publish

    def publish_and_add(entry: Entry, *_document_id: object) -> None:
        publish(entry)
        if entry.argsrepr.startswith("add(0"):
            outbox.update_one({"_id": 0}, {"$inc": {"n": 1}}, tasks=[rig.add.s(0, 1)])

    outbox.publisher.publish = publish_and_add  # type: ignore[method-assign]
    assert outbox.sweep(older_than=0).dispatched == 21
    outbox.publisher.publish = publish  # type: ignore[method-assign]
    assert pending(database, 0)["claim"]["owner"] == NOBODY, "its claim was let go"
    assert outbox.sweep(older_than=0).dispatched == 1
    sent = rig.sent()
    assert (len(sent), sent.index([1, 0]) < 2) == (22, True)


def test_a_writer_that_does_not_know_a_task_leaves_it_to_a_process_that_does(
    rig: Rig, database: Database[Document]
) -> None:
    """No attempt is counted in the fast path; with foreign_tasks it is sent by its name."""
    unknown = rig.app.signature("shop.unknown", args=(1, 1))
    rig.outbox().insert_one({"_id": 1}, tasks=[unknown])
    assert pending(database, 1)["events"][0]["attempts"] == 0

    rig.outbox(name="foreign", foreign_tasks=True).backing.relay.deliver(1)
    assert rig.sent() == [[1, 1]]


def test_entries_that_somebody_has_damaged_are_set_aside_one_by_one(rig: Rig, database: Database[Document]) -> None:
    outbox = rig.outbox(at_once=False, failure_policy="dead_letter")
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])
    database["orders"].update_one(
        {"_id": 1},
        {
            "$push": {"pendingEvents.events": {"$each": [{"x": 1}, {"x": 2}, "text"], "$position": 0}},
            "$inc": {"pendingEvents.count": 3},
        },
    )
    delivery = outbox.backing.relay.deliver(1)
    assert (delivery.dispatched, delivery.dead) == (1, 3)
    assert outbox.dead_letters.count() == 3
    assert rig.sent() == [[1, 1]]


def test_an_id_that_is_a_pattern_removes_and_counts_no_other_entry(rig: Rig, database: Database[Document]) -> None:
    """Whatever an id can be, somebody has written: to a query, a regular expression is no value."""
    outbox = rig.outbox(at_once=False, failure_policy="dead_letter")
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, number) for number in range(60)])
    damaged = {"$each": [{"id": Regex("^"), "kind": "task", "attempts": 0}], "$position": 0}
    database["orders"].update_one(
        {"_id": 1}, {"$push": {"pendingEvents.events": damaged}, "$inc": {"pendingEvents.count": 1}}
    )
    done = outbox.sweep(older_than=0)
    assert (done.dispatched, done.dead) == (60, 1)
    assert rig.sent() == [[1, number] for number in range(60)]

    outbox.insert_one({"_id": 2}, tasks=[rig.add.s(2, 2)])
    change, array_filters = outbox.backing.claims.build_count(Regex("^"))
    database["orders"].update_one({"_id": 2}, change, array_filters=array_filters)
    assert pending(database, 2)["events"][0]["attempts"] == 0


def test_a_document_that_the_server_cannot_work_with_stops_no_other(rig: Rig, database: Database[Document]) -> None:
    outbox = rig.outbox(at_once=False)
    database["orders"].insert_one({"_id": 1, "pendingEvents": {"count": 1, "events": "none"}})
    outbox.insert_one({"_id": 2}, tasks=[rig.add.s(2, 2)])
    outbox.sweep(older_than=0)
    assert rig.sent() == [[2, 2]]


def test_a_broker_that_is_down_costs_a_write_nothing_but_time_and_counts_no_attempts(
    database: Database[Document], make_redis: MakeRedis, caplog: pytest.LogCaptureFixture
) -> None:
    """Writes succeed, entries wait, the sweep gives up early; when the broker is back everything is sent, in order."""
    broker = make_redis()
    with opened(database, broker.url) as rig, caplog.at_level(logging.WARNING, "mongo_celery.outbox"):
        outbox = rig.outbox()
        outbox.insert_one({"_id": 0}, tasks=[rig.add.s(0, 0)])
        broker.kill()
        for step in range(3):
            outbox.update_one({"_id": 0}, {"$set": {"step": step}}, tasks=[rig.add.s(1, step)])
        assert "took no message" in caplog.text
        assert outbox.sweep(older_than=0).dispatched == 0
        assert [entry["attempts"] for entry in pending(database, 0)["events"]] == [0, 0, 0]
        assert outbox.status().pending == 3

        broker.start()
        wait_for(lambda: outbox.sweep(older_than=0) and pending(database, 0)["count"] == 0)
        assert rig.sent() == [[1, 0], [1, 1], [1, 2]]


def test_a_document_that_is_deleted_behind_its_back_ends_the_delivery_quietly(
    rig: Rig, database: Database[Document]
) -> None:
    outbox = rig.outbox(at_once=False)
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])
    publish = outbox.publisher.publish

    def publish_and_delete(entry: Entry, *_document_id: object) -> None:
        publish(entry)
        database["orders"].delete_one({"_id": 1})

    outbox.publisher.publish = publish_and_delete  # type: ignore[method-assign]
    assert outbox.backing.relay.deliver(1).error is None
    assert rig.sent() == [[1, 1]]


def test_events_reach_whoever_has_bound_a_queue_to_the_exchange(rig: Rig) -> None:
    """CloudEvents as JSON, by the topic's pattern, without Celery."""
    from kombu import Exchange, Queue

    outbox = rig.outbox(exchange="shop.events", source="/shop")
    with rig.app.connection_for_read() as connection:
        queue = Queue("audit", Exchange("shop.events", type="topic"), routing_key="order.*")
        queue(connection.default_channel).declare()
        outbox.insert_one({"_id": 7}, events=[Event("order.placed", {"id": ObjectId("0" * 24)}), Event("stock.low", 1)])
        buffer = connection.SimpleQueue(queue)  # type: ignore[arg-type]
        message = buffer.get(timeout=60)
        message.ack()
        event = message.payload
        assert (event["specversion"], event["type"], event["source"], event["subject"]) == (
            "1.0",
            "order.placed",
            "/shop",
            "7",
        )
        assert event["data"] == {"id": "0" * 24}
        with pytest.raises(buffer.Empty):
            buffer.get(block=False)
        buffer.close()
    assert rig.drain() == []


class Concerns(monitoring.CommandListener):
    """Notes how far each write is acknowledged, and by whom what is read must be held."""

    def __init__(self) -> None:
        self.noted: list[object] = []

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        if event.command_name == "update":
            self.noted.append(event.command["writeConcern"]["w"])
        if event.command_name == "find":
            self.noted.append(f"read {event.command['readConcern']['level']}")

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        """Nothing."""

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        """Nothing."""


def test_what_is_added_during_a_delivery_is_published_only_after_a_majority_write(
    rig: Rig, database: Database[Document], make_client: MakeClient
) -> None:
    """A fail-over could take it back, and its tasks would have run without it."""
    seen = Concerns()
    writer = rig.outbox(at_once=False)
    writer.insert_one({"_id": 1}, tasks=[rig.add.s(1, 0)])
    collection = make_client(event_listeners=[seen])[database.name]["orders"]
    relay = Outbox(rig.app, collection, name="relay", sweep_every=None)
    relay.backing.signer.read()
    seen.noted.clear()
    publish = relay.publisher.publish

    def publish_and_add(entry: Entry, *_document_id: object) -> None:
        publish(entry)
        seen.noted.append("published")
        if seen.noted.count("published") == 1:
            writer.update_one({"_id": 1}, {"$set": {"a": 1}}, tasks=[rig.add.s(1, 1)])

    relay.publisher.publish = publish_and_add  # type: ignore[method-assign]
    assert relay.backing.relay.deliver(1).dispatched == 2
    relay.publisher.close()

    assert rig.sent() == [[1, 0], [1, 1]]
    claimed, more = ["majority", "read majority", "published", 1], [1, "read local"]
    assert seen.noted == [*claimed, *more, *claimed]


def test_no_stored_value_makes_a_claim_or_a_status_fail(rig: Rig, database: Database[Document]) -> None:
    """Each of them would stop every other document, since all are asked by one command."""
    outbox = rig.outbox(at_once=False)
    outbox.insert_one({"_id": "good"}, tasks=[rig.add.s(1, 1)])
    field = pending(database, "good")
    longest = Int64(2**63 - 1)
    untils: list[Any] = [longest, float("nan"), {}, [1], "long", Timestamp(1, 1), MaxKey(), Decimal128("1")]
    attempts: list[Any] = [longest, {}]
    strange: list[Document] = [
        *({**field, "claim": {**field["claim"], "until": until}} for until in untils),
        *({**field, "claim": {**field["claim"], "until": DatetimeMS(until)}} for until in (2**62, -(2**62))),
        *({**field, "claim": claim} for claim in (None, 3, [], [field["claim"]])),
        *({**field, "count": count} for count in (float("inf"), longest, 0.5, Decimal128("Infinity"))),
        *({**field, "events": [{**field["events"][0], "attempts": times, "app": 7, "at": 3}]} for times in attempts),
    ]
    database["orders"].insert_many([{"pendingEvents": each} for each in [*strange, [field], [[field]]]])

    assert outbox.status().documents > 20
    wait_for(lambda: outbox.sweep(older_than=0) and "pendingEvents" not in (database["orders"].find_one("good") or {}))
    assert outbox.status().documents > 0, "some are held for ever, or are nobody's"
    rig.drain()


@pytest.mark.parametrize("stored", [[], [{}], None, 3, {"owner": [], "more": 1}])
def test_whatever_stands_where_a_claim_is_to_stand_gives_way_to_one(
    rig: Rig, database: Database[Document], stored: Any
) -> None:
    """An empty array would take it in silence, and the document would never be delivered."""
    outbox = rig.outbox(at_once=False)
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])
    database["orders"].update_one({"_id": 1}, {"$set": {"pendingEvents.claim": stored}})
    assert outbox.sweep(older_than=0).dispatched == 1
    assert rig.sent() == [[1, 1]]


def test_an_index_may_have_another_name(rig: Rig, database: Database[Document]) -> None:
    partial: Document = {"partialFilterExpression": {"pendingEvents.count": {"$gt": 0}}}
    keys = [("pendingEvents.count", 1), ("pendingEvents.claim.until", 1)]
    database["orders"].create_index(keys, name="pending-events", **partial)
    rig.outbox().insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])
    assert sorted(database["orders"].index_information()) == ["_id_", "pending-events"]
    assert rig.sent() == [[1, 1]]


def test_an_entry_that_lies_in_many_documents_is_removed_only_where_it_was_published(
    rig: Rig, database: Database[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One turn publishes it in one document, and what stands before it in another: it must not go from there, too."""
    monkeypatch.setattr(module, "SETTLE_SECONDS", 600)  # both are removed from by one command
    outbox = rig.outbox(at_once=False)
    outbox.insert_one({"_id": 1}, tasks=[rig.add.s(0, 0), *(rig.add.s(2, step) for step in range(50))])
    outbox.insert_one({"_id": 2}, tasks=[rig.add.s(1, step) for step in range(50)])
    shared = pending(database, 1)["events"][0]
    more = {"$push": {"pendingEvents.events": shared}, "$inc": {"pendingEvents.count": 1}}
    database["orders"].update_one({"_id": 2}, more)

    assert outbox.sweep(older_than=0).dispatched == 102
    assert [number for number, _ in rig.sent()].count(0) == 2
