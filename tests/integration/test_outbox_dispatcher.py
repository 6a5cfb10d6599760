"""The dispatcher of a process: callers never wait for the broker, and what they hand over is delivered all the same."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery import Outbox, OutboxCollection
from mongo_celery.embedded import MongoReplicaSet
from mongo_celery.outbox import backing
from mongo_celery.outbox import dispatcher as module
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.pending import NOBODY
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.forking import holds_after_a_fork
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import wait_for
from tests.fixtures.proxy import Proxy
from tests.fixtures.redis import MakeRedis
from tests.integration.outbox_rig import Rig, due_again, opened, pending

Document = dict[str, Any]

PROGRAM = Path(__file__).with_name("outbox_exits.py")


@pytest.fixture
def rig(database: Database[Document], redis_url: str) -> Iterator[Rig]:
    with opened(database, redis_url) as made:
        yield made


@contextmanager
def held_up(outbox: Outbox | OutboxCollection) -> Iterator[tuple[list[Entry], threading.Event]]:
    """No message goes out before the block ends: the entries that were tried, and what is set by the first of them."""
    publish, here = outbox.publisher.publish, os.getpid()
    asked, begun, go_on = list[Entry](), threading.Event(), threading.Event()

    def hold(entry: Entry, *document_id: object) -> None:
        if os.getpid() == here:
            asked.append(entry)
            begun.set()
            assert go_on.wait(120)
        publish(entry, *document_id)

    outbox.publisher.publish = hold  # type: ignore[method-assign]
    try:
        yield asked, begun
    finally:
        go_on.set()
        outbox.publisher.publish = publish  # type: ignore[method-assign]


def _note(name: str) -> str:
    return name


def settled(outbox: Outbox) -> bool:
    """Whether nothing is pending in the collection, nor waits in the process."""
    status = outbox.status()
    return not status.pending and not status.dispatcher.queued


def test_no_caller_waits_for_a_frozen_broker_and_one_thread_alone_asks_whether_it_is_back(
    database: Database[Document], make_redis: MakeRedis
) -> None:
    """Four threads write on; one command was tried in vain; afterwards everything is sent, in the order of each."""
    broker = make_redis()
    with opened(database, broker.url, broker_transport_options={"socket_timeout": 1.0}) as rig:
        outbox, asked = rig.outbox(at_once=True), list[Entry]()
        outbox.insert_one({"_id": "first"}, tasks=[rig.add.s(0, 0)])
        wait_for(lambda: settled(outbox))
        publish = outbox.publisher.publish

        def counted(entry: Entry, *document_id: object) -> None:
            asked.append(entry)
            publish(entry, *document_id)

        def write(number: int) -> None:
            for step in range(25):
                push = {"$set": {"step": step}}
                outbox.update_one({"_id": number}, push, upsert=True, tasks=[rig.add.s(number, step)])

        outbox.publisher.publish = counted  # type: ignore[method-assign]
        broker.pause()
        try:
            threads = [threading.Thread(target=write, args=(number,)) for number in range(1, 5)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            wait_for(lambda: outbox.status().dispatcher.broker_down)
            outbox.insert_one({"_id": "later"}, tasks=[rig.add.s(5, 0)])
            assert 1 <= len(asked) <= len(threads)
            assert outbox.status().pending == 101
        finally:
            broker.resume()
        wait_for(lambda: settled(outbox))
        sent = rig.sent()
        first = {number: list(dict.fromkeys(step for each, step in sent if each == number)) for number in range(6)}
        assert first == {0: [0], **{number: list(range(25)) for number in range(1, 5)}, 5: [0]}
        assert outbox.status().dispatcher.passed_over > 0


def test_a_hot_document_is_delivered_in_order_and_keeps_no_other_waiting(
    rig: Rig, database: Database[Document]
) -> None:
    """Eight writers on one document, and a ninth whose documents have their turns between; nothing remains."""
    outbox = rig.outbox(at_once=True)

    def write(number: int) -> None:
        for step in range(20):
            change = {"$inc": {"n": 1}}
            outbox.update_one({"_id": "hot"}, change, upsert=True, tasks=[rig.add.s(number, step)])

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for step in range(20):
        outbox.insert_one({"_id": step}, tasks=[rig.add.s(9, step)])
    for thread in threads:
        thread.join()
    wait_for(lambda: settled(outbox))

    sent = rig.sent()
    assert len(sent) == 180
    for number in range(8):
        assert [step for each, step in sent if each == number] == list(range(20))
    assert sorted(step for each, step in sent if each == 9) == list(range(20))
    assert database["orders"].find_one({"_id": "hot"}) == {"_id": "hot", "n": 160}
    assert database["orders"].count_documents({"pendingEvents": {"$exists": True}}) == 0


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


def test_a_hint_and_a_look_find_what_somebody_else_has_written(rig: Rig) -> None:
    """By `_id`, by the index now, and by the flag that a prepared write leaves; none of them needs the sweep."""
    elsewhere, outbox = rig.outbox(name="elsewhere", at_once=False), rig.outbox(at_once=True)
    for number in range(3):
        elsewhere.insert_one({"_id": number}, tasks=[rig.add.s(number, 0)])

    outbox.dispatch(1, 1, "nobody's")
    wait_for(lambda: outbox.status().pending == 2)
    outbox.dispatch()
    wait_for(lambda: settled(outbox))
    outbox.backing.dispatcher.expect()
    elsewhere.insert_one({"_id": 3}, tasks=[rig.add.s(3, 0)])
    wait_for(lambda: settled(outbox))

    assert rig.sent()[0] == [1, 0]


def test_a_removal_that_mongodb_does_not_answer_is_made_again(
    rig: Rig,
    database: Database[Document],
    failpoint: Failpoint,
    make_client: MakeClient,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What was published is remembered until it is removed, and is sent once."""
    client = make_client(appName="dispatcher", retryWrites=False)
    outbox = Outbox(rig.app, client[database.name]["orders"], name="cut", sweep_every=None)
    outbox.insert_one({"_id": 0}, tasks=[rig.add.s(0, 0)])
    wait_for(lambda: settled(outbox))
    rig.drain()
    with failpoint(mode={"skip": 1}, failCommands=["update"], closeConnection=True, appName="dispatcher"):  # a claim
        outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 0)])
        wait_for(lambda: "left to the sweep" in caplog.text)
        assert rig.sent() == [[1, 0]]
        assert outbox.status().pending == 1
    wait_for(lambda: settled(outbox))
    assert rig.sent() == []
    outbox.backing.close()


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
        assert (outbox.status().failing, outbox.dead_letters.count()) == (0, 0)


def test_a_write_that_waits_does_so_within_a_bound(
    rig: Rig, database: Database[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write is acknowledged, its entry is in the document, and many documents are waited for as long as one."""
    monkeypatch.setattr(backing, "_WAIT_SECONDS_MAX", 0.2)
    outbox = rig.outbox(claim_ttl=600)
    with held_up(outbox) as (asked, _begun):
        bounds, wait_all = list[float](), outbox.backing.dispatcher.wait_all

        def noted(documents: Any, seconds: float) -> bool:
            bounds.append(seconds)
            return wait_all(documents, seconds)

        monkeypatch.setattr(outbox.backing.dispatcher, "wait_all", noted)
        outbox.insert_many([{"_id": 10 + number} for number in range(50)], tasks=[rig.add.s(1, 1)])
        assert bounds == [0.2]
        outbox.insert_one({"_id": 1}, tasks=[rig.add.s(1, 1)])
        assert len(asked) == 1
        assert pending(database, 1)["count"] == 1
    wait_for(lambda: settled(outbox))


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
        mine = outbox.backing.dispatcher
        assert mine.state.queued == 0
        outbox.insert_one({"_id": "child"}, tasks=[add.s("child")])
        assert mine.wait_all(["child"], 20)
        return outbox.backing.latest.find_one({"_id": "child"}) == {"_id": "child"}  # removals wait for no majority

    with held_up(outbox) as (asked, begun):
        outbox.insert_one({"_id": "parent"}, tasks=[add.s("parent")])
        assert begun.wait(120)
        outbox.insert_one({"_id": "queued"}, tasks=[add.s("queued")])
        with outbox.backing.dispatcher._thread.changed:
            assert holds_after_a_fork(child)
        assert outbox.status().dispatcher.queued == 1
        assert outbox.status().pending == 2
    wait_for(lambda: settled(outbox))
    assert len(asked) <= 2
    with redis.Redis.from_url(redis_url) as broker:
        assert broker.llen("celery") == 3
    outbox.backing.close()
    outbox.collection.database.client.close()
    app.close()


@pytest.mark.parametrize("way", ["atexit", "multiprocessing", "billiard", "worker"])
def test_a_process_that_ends_delivers_what_it_has_queued(
    way: str, mongo_url: str, redis_url: str, redis_client: Any, database: Database[Document]
) -> None:
    """By whatever way Python or Celery ends one; no message went out before the end had begun."""
    ended = _ended(way, "deliver", mongo_url, redis_url, database.name)
    assert ended.returncode == 0, ended.stderr
    assert redis_client.llen("celery") == 3
    assert list(database["orders"].find({}, {"_id": 1, "pendingEvents": 1})) == [{"_id": each} for each in range(3)]


def test_a_process_that_ends_looks_for_what_it_was_told_of(
    mongo_url: str, redis_url: str, redis_client: Any, database: Database[Document]
) -> None:
    """A script that writes by the driver, says so, and ends: nobody has to sweep for it."""
    ended = _ended("atexit", "hint", mongo_url, redis_url, database.name)
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


def test_what_this_process_cannot_publish_keeps_nothing_else_in_the_index_waiting(
    rig: Rig, database: Database[Document]
) -> None:
    """More documents than a look finds, in front of one that it can."""
    outbox, unknown = rig.outbox(at_once=True), rig.app.signature("shop.new", args=(1, 1))
    documents: list[Document] = [outbox.with_tasks({"_id": each}, [unknown]) for each in range(module._LOOK + 5)]
    database["orders"].insert_many([*documents, outbox.with_tasks({"_id": "last"}, [rig.add.s(1, 2)])])

    def is_sent() -> bool:
        outbox.dispatch()
        return rig.sent() == [[1, 2]]

    wait_for(is_sent)


@pytest.mark.parametrize("kind", [Outbox, OutboxCollection])
def test_a_mongodb_that_does_not_answer_holds_up_the_other_outboxes_within_a_bound(
    rig: Rig, database: Database[Document], make_proxy: Callable[[int], Proxy], replica_set: MongoReplicaSet,
    make_client: MakeClient, kind: Any,
) -> None:  # fmt: skip
    """P12: they share the thread; neither a look nor documents that are named keep it for long."""
    proxy = make_proxy(replica_set.members[0].port)
    silent = kind(rig.app, make_client(proxy.mongo_url)[database.name]["silent"], name="silent", sweep_every=None)
    other = rig.outbox("other", at_once=True)
    turns, waiting = silent.backing.dispatcher, other.backing.counters
    silent.sweep()  # its indexes are there
    proxy.black_hole()
    for number in range(1, 3):
        turns.hint()
        turns.hint(*range(5))
        other.insert_one({"_id": number}, tasks=[rig.add.s(1, number)])
        wait_for(lambda number=number: waiting.dispatched == number, 25)  # type: ignore[misc]
    proxy.pass_through()
    silent.backing.close()
