"""The dispatcher of a process: callers never wait for the broker, and what they hand over is delivered all the same."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery import Outbox, OutboxCollection
from mongo_celery.embedded import MongoReplicaSet
from mongo_celery.outbox import dispatcher as module
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.pending import NOBODY
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.forking import holds_after_a_fork
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import wait_for
from tests.fixtures.proxy import Proxy
from tests.fixtures.redis import MakeRedis
from tests.rig.outbox import (
    Publish,
    Rig,
    damage,
    due_again,
    held_up,
    opened,
    pending,
    publishing,
    run_together,
    settled,
)

Document = dict[str, Any]

PROGRAM = Path(__file__).with_name("outbox_exits.py")


def _note(name: str) -> str:
    return name


def test_no_caller_waits_for_a_frozen_broker_and_one_thread_alone_asks_whether_it_is_back(
    database: Database[Document], make_redis: MakeRedis
) -> None:
    """Four threads write on; one command was tried in vain; afterwards everything is sent, in the order of each."""
    broker = make_redis()
    with opened(database, broker.url, broker_transport_options={"socket_timeout": 1.0}) as rig:
        outbox, asked = rig.outbox(at_once=True), list[Entry]()
        outbox.insert_one({"_id": "first"}, tasks=[rig.add.s(0, 0)])
        wait_for(lambda: settled(outbox))

        def count(publish: Publish, entry: Entry) -> None:
            asked.append(entry)
            publish()

        def write(number: int) -> None:
            for step in range(25):
                push = {"$set": {"step": step}}
                outbox.update_one({"_id": number}, push, upsert=True, tasks=[rig.add.s(number, step)])

        broker.pause()
        try:
            with publishing(outbox, count):
                run_together(*(partial(write, number) for number in range(1, 5)))
                wait_for(lambda: outbox.status().dispatcher.broker_down)
                outbox.insert_one({"_id": "later"}, tasks=[rig.add.s(5, 0)])
                assert 1 <= len(asked) <= 4
            assert outbox.status().pending == 101
        finally:
            broker.resume()
        wait_for(lambda: settled(outbox))
        sent = rig.sent()
        first = {number: list(dict.fromkeys(step for each, step in sent if each == number)) for number in range(6)}
        assert first == {0: [0], **{number: list(range(25)) for number in range(1, 5)}, 5: [0]}
        assert outbox.status().dispatcher.passed_over > 0


def test_a_hot_document_is_delivered_in_order_and_keeps_no_other_waiting(rig: Rig) -> None:
    """Eight writers on one document, and a ninth whose documents have their turns between; nothing remains."""
    outbox = rig.outbox(at_once=True)

    def write(number: int) -> None:
        for step in range(20):
            change = {"$inc": {"n": 1}}
            outbox.update_one({"_id": "hot"}, change, upsert=True, tasks=[rig.add.s(number, step)])

    def write_others() -> None:
        for step in range(20):
            outbox.insert_one({"_id": step}, tasks=[rig.add.s(9, step)])

    run_together(write_others, *(partial(write, number) for number in range(8)))
    wait_for(lambda: settled(outbox))

    sent = rig.sent()
    assert len(sent) == 180
    for number in range(8):
        assert [step for each, step in sent if each == number] == list(range(20))
    assert sorted(step for each, step in sent if each == 9) == list(range(20))
    assert rig.orders.find_one({"_id": "hot"}) == {"_id": "hot", "n": 160}
    assert rig.orders.count_documents({"pendingEvents": {"$exists": True}}) == 0


def test_what_a_full_queue_does_not_take_is_found_by_the_index(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_MAX", 2)
    outbox = rig.outbox(at_once=True, claim_ttl=600)
    with held_up(outbox) as (_asked, begun):
        outbox.insert_one({"_id": 0}, tasks=[rig.add.s(0, 0)])
        assert begun.wait(120)
        for number in range(1, 8):
            outbox.insert_one({"_id": number}, tasks=[rig.add.s(number, 0)])
        assert outbox.status().dispatcher.passed_over == 5
    wait_for(lambda: settled(outbox))
    assert sorted(rig.sent()) == [[number, 0] for number in range(8)]


def test_a_removal_that_mongodb_does_not_answer_is_made_again(
    rig: Rig,
    failpoint: Failpoint,
    make_client: MakeClient,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What was published is remembered until it is removed, and is sent once."""
    client = make_client(appName="dispatcher", retryWrites=False)
    outbox = rig.outbox(client[rig.database.name]["orders"], name="cut", at_once=True)
    outbox.insert_one({"_id": 0}, tasks=[rig.add.s(0, 0)])
    wait_for(lambda: settled(outbox))
    rig.drain()
    with failpoint(mode={"skip": 1}, failCommands=["update"], closeConnection=True, appName="dispatcher"):  # a claim
        outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 0)])
        wait_for(lambda: "left_to_sweep" in [getattr(each, "event", "") for each in caplog.records])
        assert rig.sent() == [[1, 0]]
        assert outbox.status().pending == 1
    wait_for(lambda: settled(outbox))
    assert rig.sent() == []
    outbox.runtime.close()


def test_a_broker_that_refuses_everything_is_asked_by_one_and_not_by_every_write(
    database: Database[Document], make_redis: MakeRedis
) -> None:
    """Out of memory: after three refusals the rest waits, free for anybody; nothing is counted."""
    broker = make_redis()
    with opened(database, broker.url) as rig, redis.Redis.from_url(broker.url) as memory:
        outbox = rig.outbox(at_once=True)
        outbox.insert_one({"_id": "first"}, tasks=[rig.add.s(0, 0)])
        wait_for(lambda: settled(outbox))
        rig.drain()
        with held_up(outbox) as (_asked, begun):
            for number in range(6):
                outbox.insert_one({"_id": number}, tasks=[rig.add.s(number, 0)])
            assert begun.wait(120)
            memory.config_set("maxmemory", 1)
        wait_for(lambda: outbox.status().dispatcher.broker_down)
        memory.config_set("maxmemory", 0)
        due_again(database["orders"])
        outbox.dispatch()

        def all_sent() -> bool:
            due_again(database["orders"])
            return outbox.sweep(older_than=0).error is None and settled(outbox)

        wait_for(all_sent)
        assert sorted({number for number, _ in rig.sent()}) == list(range(6))
        assert (outbox.status().failing, outbox.runtime.dead_letters.count()) == (0, 0)


def test_a_child_has_a_dispatcher_of_its_own_and_leaves_its_parents_queue_alone(
    mongo_url: str, redis_url: str, database: Database[Document]
) -> None:
    """Forked in the middle of a message and of a hand-over; both deliver what is their own, and once."""
    app = Celery("forking", broker=redis_url, set_as_current=False)
    add = app.task(name="add", shared=False)(_note)
    outbox = Outbox(
        app, lambda: MongoClient(mongo_url)[database.name]["orders"], name="forked", sweep_every=None, claim_ttl=600
    )

    def child() -> bool:
        mine = outbox.runtime.dispatcher
        assert mine.state.queued == 0
        outbox.insert_one({"_id": "child"}, tasks=[add.s("child")])
        wait_for(lambda: outbox.runtime.latest.find_one({"_id": "child"}) == {"_id": "child"}, 20)
        return True

    with held_up(outbox) as (asked, begun):
        outbox.insert_one({"_id": "parent"}, tasks=[add.s("parent")])
        assert begun.wait(120)
        outbox.insert_one({"_id": "queued"}, tasks=[add.s("queued")])
        with outbox.runtime.dispatcher._thread.changed:
            assert holds_after_a_fork(child)
        assert outbox.status().dispatcher.queued == 1
        assert outbox.status().pending == 2
    wait_for(lambda: settled(outbox))
    assert len(asked) <= 2
    with redis.Redis.from_url(redis_url) as broker:
        assert broker.llen("celery") == 3
    outbox.runtime.close()
    outbox.collection.database.client.close()
    app.close()


ENDS = [*((way, "deliver") for way in ("atexit", "multiprocessing", "billiard", "worker")), ("atexit", "hint")]


@pytest.mark.parametrize(("way", "what"), ENDS)
def test_a_process_that_ends_delivers_what_it_has_queued(
    way: str, what: str, mongo_url: str, redis_url: str, redis_client: Any, database: Database[Document]
) -> None:
    """By whatever way Python or Celery ends one, also if a script writes by the driver and only says so."""
    ended = _ended(way, what, mongo_url, redis_url, database.name)
    assert ended.returncode == 0, ended.stderr
    assert redis_client.llen("celery") == 3
    assert list(database["orders"].find({}, {"_id": 1, "pendingEvents": 1})) == [{"_id": each} for each in range(3)]


def test_a_process_ends_in_time_while_the_broker_is_silent(
    mongo_url: str, redis_url: str, database: Database[Document]
) -> None:
    """Though a message is under way. Its claim lapses, and what it has not begun is free."""
    ended = _ended("atexit", "hang", mongo_url, redis_url, database.name)
    assert ended.returncode == 0, ended.stderr
    owners = [pending(database, number)["claim"]["owner"] for number in range(3)]
    assert owners.count(NOBODY) >= 1


def _ended(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_entries_that_cannot_be_published_keep_nothing_else_in_the_index_waiting(rig: Rig) -> None:
    """More documents than a poll finds, in front of one that can be delivered: they are held back."""
    outbox = rig.outbox(at_once=True)
    elsewhere = rig.outbox(name="elsewhere", at_once=False)
    documents = [elsewhere.with_tasks({"_id": each}, [rig.add.s(0, 0)]) for each in range(module._POLL + 5)]
    rig.orders.insert_many(documents)
    for document in documents:
        damage(elsewhere, {"_id": document["_id"]}, payload="{")
    rig.orders.insert_one(outbox.with_tasks({"_id": "last"}, [rig.add.s(1, 2)]))

    def is_sent() -> bool:
        outbox.dispatch()
        return rig.sent() == [[1, 2]]

    wait_for(is_sent)


@pytest.mark.parametrize("kind", [Outbox, OutboxCollection])
def test_a_mongodb_that_does_not_answer_holds_up_the_other_outboxes_within_a_bound(
    rig: Rig, make_proxy: Callable[[int], Proxy], replica_set: MongoReplicaSet,
    make_client: MakeClient, kind: Any,
) -> None:  # fmt: skip
    """P12: they share the thread; neither a look nor documents that are named keep it for long."""
    proxy = make_proxy(replica_set.members[0].port)
    silent = kind(rig.app, make_client(proxy.mongo_url)[rig.database.name]["silent"], name="silent", sweep_every=None)
    other = rig.outbox("other", at_once=True)
    turns, waiting = silent.runtime.dispatcher, other.runtime.counters
    silent.sweep()  # its indexes are there
    proxy.black_hole()
    for number in range(1, 3):
        turns.hint()
        turns.hint(*range(5))
        other.insert_one({"_id": number}, tasks=[rig.add.s(1, number)])
        wait_for(lambda number=number: waiting.dispatched == number, 25)  # type: ignore[misc]
    proxy.pass_through()
    silent.runtime.close()
