"""The outbox under faults, with real processes: killed anywhere, paused and woken up late, without a broker."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue
from pymongo import MongoClient

from mongo_celery import Event, Outbox, transactional
from mongo_celery.errors import TransactionTimeoutError
from tests.acceptance.outbox_project import IN_BOXES, KINDS, configured
from tests.acceptance.outbox_rig import OPTIONS, Shop, Tap, said
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import Processes, wait_for
from tests.fixtures.redis import MakeRedis

Document = dict[str, Any]

OLD = {"update_one", "find_one_and_update", "transaction"}
POINTS = 30


@pytest.fixture
def shop(processes: Processes, mongo_client: MongoClient[Document], mongo_url: str, redis_url: str) -> Iterator[Shop]:
    with Shop(processes, mongo_client, mongo_url, redis_url) as made:
        yield made


def test_a_writer_that_is_killed_at_any_point_loses_nothing(shop: Shop, mongo_client: MongoClient[Document]) -> None:
    """Every kind of write, killed before and after each of its commands and messages; beat and a worker do the rest."""
    shop.items.insert_many([{"_id": f"old {kind} {at}", "ns": []} for kind in OLD for at in range(1, POINTS)])
    worker = shop.consume()
    writers = shop.program("die-writing", *KINDS, claim_ttl=30.0)  # no writer delivers what an earlier one left
    assert writers.wait() == 0, writers.text
    deaths = said(writers)
    mongo_client.admin.command("killAllSessions", [])  # who died in a transaction holds its documents for a minute
    for kind, at, _point in deaths:  # behind what may be pending there
        for key in (f"{kind} {at}", f"old {kind} {at}") if kind not in IN_BOXES else ():
            shop.add(key, 3)

    shop.settle()

    written = shop.committed()
    assert worker.running
    for kind in KINDS:
        points = [point for died, _at, point in deaths if died == kind]
        before, after = (points.count(f"{when} publish") for when in ("before", "after"))
        # The dispatcher polls beside a transaction, so the number of its commands differs from run to run.
        assert min(before, after) >= (1 if kind in {"transaction", *IN_BOXES} else 2)
        published = points.index("after publish")
        removal, later = ("delete", []) if kind in IN_BOXES else ("update", [3])
        assert {f"before {removal}", f"after {removal}"} & set(points[published:]), "the removal comes after a message"
        ns = [written.get(f"{'old ' if kind in OLD else ''}{kind} {at}", []) for at, _ in enumerate(points, 1)]
        assert ns[0] in ([], later), "killed before the command"
        assert ns[-1] == [1, 2, *later], "killed at the removal"


def test_a_sweeper_that_is_killed_at_any_point_loses_nothing(shop: Shop, redis_url: str) -> None:
    """
    Twelve sweepers die one after another, each at a later point; order is judged by what reached the broker.

    Each leaves a document behind that is claimed, and none needs more than two.
    """
    shop.outbox.runtime.at_once = False
    for number in range(24):
        shop.insert(f"key{number}", 1, 2, 3)
    with Tap(redis_url) as tap:
        sweepers = shop.program("die-sweeping", 12)
        assert sweepers.wait() == 0, sweepers.text
        shop.sweep_all()

        shop.agree(tap)

    points = {point for _, _, point in said(sweepers)}
    commands = ("update", "publish", "findAndModify")
    assert points == {f"{when} {what}" for when in ("before", "after") for what in commands}
    assert tap.duplicates > 0, "who dies between publishing and removing leaves a duplicate"


def test_zombie_relays_cost_duplicates_and_never_change_the_order(shop: Shop, redis_url: str) -> None:
    """Stopped anywhere between claim and removal; claims lapse, others deliver and write; then they wake up."""
    shop.outbox.runtime.at_once = False
    keys = [f"key{number}" for number in range(10)]
    for key in keys:
        shop.insert(key, 1, 2, 3)
    with Tap(redis_url) as tap:
        zombies = shop.program("be-zombies", *keys)
        zombies.wait_for_output("stopped 10 of 10")
        shop.sweep_all()
        for key in keys:
            shop.add(key, 4, 5)
        first = sum(shop.outbox.runtime.relay.deliver(key).dispatched for key in keys[:5])
        wait_for(lambda: tap.first().get(keys[4]) == [1, 2, 3, 4, 5], message="the tap has all that was sent")
        before = tap.duplicates
        zombies.send_group(signal.SIGCONT)
        assert zombies.wait() == 0, zombies.text
        shop.sweep_all()
        shop.agree(tap)

    assert first == 10
    assert len({point for _, _, point in said(zombies)}) == 4
    assert tap.duplicates > before, "one that had passed its last look at the clock has published again"


def test_an_aborted_transaction_sends_nothing_and_an_unknown_commit_sends_what_it_did(
    shop: Shop, mongo_client: MongoClient[Document], failpoint: Failpoint, make_client: MakeClient, redis_url: str
) -> None:
    """Three ends of a commit that the writer cannot tell apart, and an abort."""
    ours = make_client(appName="outbox-faults", retryWrites=False)
    commit: Document = {"failCommands": ["commitTransaction"], "appName": "outbox-faults"}
    not_done: Document = {**commit, "closeConnection": True}
    done: Document = {**commit, "writeConcernError": {"code": 64, "errmsg": "waiting for replication timed out"}}
    outbox = Outbox(configured(redis_url), ours[shop.data.name]["items"], database=shop.state.name, **OPTIONS)
    keys = ["not done", "done", "aborted", "killed"]
    shop.outbox.runtime.pending.indexes.ensure(patiently=True)  # a build that is not done waits for transactions
    for key in keys:
        shop.insert(key, 0)

    def write(session: Any, key: str) -> None:
        push = {"$push": {"ns": 1}}
        outbox.update_one({"_id": key}, push, tasks=[shop.effect(key, 1)], session=session)
        assert tap.first().get(key, []) in ([], [0]), "nothing before the commit"

    def fail(session: Any) -> None:
        write(session, "aborted")
        raise LookupError

    with Tap(redis_url) as tap:
        for data, key in ((not_done, "not done"), (done, "done")):
            with failpoint(**data), pytest.raises(TransactionTimeoutError) as unknown:
                transactional(ours, timeout=2).run(lambda session, key=key: write(session, key))  # type: ignore[misc]
            assert unknown.value.outcome == "unknown"  # type: ignore[attr-defined]
        with pytest.raises(LookupError):
            transactional(ours).run(fail)
        mongo_client.admin.command("killAllSessions", [])
        shop.sweep_all()

        wait_for(lambda: tap.first() == {"not done": [0], "done": [0, 1], "aborted": [0], "killed": [0]})
        assert tap.first() == shop.committed()
        before = tap.duplicates  # a relay that was interrupted between publishing and removing has published again
        with failpoint(mode={"times": 3}, **done):
            transactional(ours).run(lambda session: write(session, "killed"))
        wait_for(lambda: tap.first()["killed"] == [0, 1])
        wait_for(lambda: not shop.pending())
        assert tap.duplicates == before
    outbox.runtime.publisher.close()


@pytest.mark.parametrize("seconds", [2.0, pytest.param(60.0, marks=pytest.mark.slow)])
def test_writes_go_on_without_a_broker_and_everything_arrives_after_its_return(
    processes: Processes, mongo_client: MongoClient[Document], mongo_url: str, make_redis: MakeRedis, seconds: float
) -> None:
    """Redis is killed, and started anew after some time; a worker with beat was there all the time."""
    broker = make_redis()
    with Shop(processes, mongo_client, mongo_url, broker.url) as shop:
        worker = shop.consume()
        for number in range(5):
            shop.insert(f"key{number}", 1)
        shop.settle()  # what the broker had is its own to lose

        broker.kill()
        for number in range(5):
            assert shop.add(f"key{number}", 2)
            shop.insert(f"new{number}", 1, 2)
        wait_for(lambda: (shop.outbox.status().oldest_seconds or 0) > seconds, seconds + 30)
        status = shop.outbox.status()
        assert (status.documents, status.pending, status.failing, status.dead_letters) == (10, 15, 0, 0)
        wait_for(lambda: shop.outbox.status().dispatcher.broker_down, message="one message was tried, and no other")
        assert shop.effects() == {f"key{number}": [1] for number in range(5)}

        broker.restart()
        shop.settle()
        assert worker.running
        assert shop.outbox.status().dead_letters == 0


def test_a_consumer_that_is_not_celery_receives_cloud_events(shop: Shop, redis_url: str) -> None:
    """A kombu queue bound to the topic exchange. The ids are those that were stored with the write."""
    shop.outbox.runtime.at_once = False
    with Connection(redis_url) as connection:
        exchange = Exchange("mongo_celery.events", type="topic", durable=True)
        books = Queue(f"books.{shop.data.name}", exchange, routing_key="order.*")(connection.default_channel)
        books.declare()
        events = [Event("order.placed", {"total": 3}), Event("stock.low"), Event("order.x")]
        shop.outbox.insert_one({"_id": "key", "ns": []}, events=events)
        document = shop.items.find_one({"_id": "key"}) or {}
        ids = [entry["id"] for entry in document["pendingEvents"]["events"]]
        shop.sweep_all()
        messages = [wait_for(lambda: books.get(no_ack=True)) for _ in range(2)]
        received = [json.loads(each.body or "") for each in messages]
        assert books.get(no_ack=True) is None

    assert [(each["type"], each["id"], each["data"]) for each in received] == [
        ("order.placed", ids[0], {"total": 3}),
        ("order.x", ids[2], None),
    ]
    for event in received:
        assert (event["specversion"], event["subject"]) == ("1.0", "key")
        assert event["source"] == f"/{shop.data.name}/items"
        assert datetime.fromisoformat(event["time"]).tzinfo is not None
