"""The dispatcher of a process: callers never wait for the broker, and what they hand over is delivered all the same."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery import Outbox, OutboxCollection
from mongo_celery.mongo import indexes, table
from mongo_celery.outbox import dispatcher as module
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.pending import NOBODY
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.forking import holds_after_a_fork
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import wait_for
from tests.fixtures.proxy import Proxy
from tests.fixtures.redis import MakeRedis
from tests.rig.commands import CommandRecorder
from tests.rig.outbox import (
    Document,
    Publish,
    Rig,
    due_again,
    end,
    held_up,
    leave_strange_ids,
    opened,
    pending,
    publishing,
    run_together,
    settled,
)

PROGRAM = Path(__file__).with_name("outbox_exits.py")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a relay give up a command after a second, as in production."""
    monkeypatch.setattr("mongo_celery.outbox.commands.COMMAND_SECONDS", 1.0)


def test_no_caller_waits_for_a_frozen_broker_and_one_thread_alone_asks_whether_it_is_back(
    database: Database[Document], make_redis: MakeRedis
) -> None:
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


def test_a_broker_that_refuses_everything_is_asked_by_one_and_not_by_every_write(
    database: Database[Document], make_redis: MakeRedis
) -> None:
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
        wait_for(lambda: outbox.runtime.dispatcher._thread._probes, message="one asks whether the broker is back")
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
    mongo_url: str, rig: Rig, redis_client: Any
) -> None:
    name = rig.database.name
    outbox = Outbox(
        rig.app, lambda: MongoClient(mongo_url)[name]["orders"], name="forked", sweep_every=None, claim_ttl=600
    )

    def child() -> bool:
        assert outbox.runtime.dispatcher.state.queued == 0
        outbox.insert_one({"_id": "child"}, tasks=[rig.add.s(0, 0)])
        wait_for(lambda: outbox.runtime.latest.find_one({"_id": "child"}) == {"_id": "child"})
        return True

    with held_up(outbox) as (_asked, begun):
        outbox.insert_one({"_id": "parent"}, tasks=[rig.add.s(1, 0)])
        assert begun.wait(120)
        outbox.insert_one({"_id": "queued"}, tasks=[rig.add.s(2, 0)])
        with outbox.runtime.dispatcher._thread.changed:
            assert holds_after_a_fork(child)
        assert (outbox.status().dispatcher.queued, outbox.status().pending) == (1, 2)
    wait_for(lambda: settled(outbox))
    assert redis_client.llen("celery") == 3
    outbox.runtime.close()
    outbox.collection.database.client.close()


ENDS = [
    *((way, "deliver") for way in ("atexit", "multiprocessing", "billiard", "worker")),
    *(("atexit", what) for what in ("hint", "hang")),
]


@pytest.mark.parametrize(("way", "what"), ENDS)
def test_a_process_that_ends_delivers_what_it_has_queued(
    way: str, what: str, mongo_url: str, redis_url: str, redis_client: Any, database: Database[Document]
) -> None:
    """
    By whatever way Python or Celery ends one, also if a script writes by the driver and only says so.

    While the broker is silent it ends in time, though a message is under way: what it has not begun is free.
    """
    arguments = [sys.executable, str(PROGRAM), way, what, mongo_url, redis_url, database.name]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    if what == "hang":
        assert NOBODY in [pending(database, number)["claim"]["owner"] for number in range(3)]
    else:
        assert redis_client.llen("celery") == 3
        assert list(database["orders"].find({}, {"_id": 1, "pendingEvents": 1})) == [{"_id": each} for each in range(3)]


def test_what_a_full_queue_does_not_take_is_found_by_the_index(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_MAX", 2)
    monkeypatch.setattr(module, "_POLL", 2)
    outbox = rig.outbox(at_once=True, claim_ttl=600)
    with held_up(outbox) as (_asked, begun):
        outbox.insert_one({"_id": 0}, tasks=[rig.add.s(0, 0)])
        assert begun.wait(120)
        for number in range(1, 8):
            outbox.insert_one({"_id": number}, tasks=[rig.add.s(number, 0)])
        assert outbox.status().dispatcher.passed_over == 5
    wait_for(lambda: settled(outbox))
    assert sorted(rig.sent()) == [[number, 0] for number in range(8)]


def test_a_thread_that_has_nothing_to_do_ends_and_a_write_at_that_moment_starts_another(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P17: a thread that has decided to end is alive for a while, and takes no turn any more."""
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.05)
    outbox, numbers, wait = rig.outbox(at_once=True), iter(range(1, 4)), module.AppDispatcher._wait_for_turn

    def wait_and_write(self: module.AppDispatcher) -> Any:
        found = wait(self)
        number = next(numbers, None) if found is None and self is outbox.runtime.dispatcher._thread else None
        if number is not None:
            outbox.insert_one({"_id": number}, tasks=[rig.add.s(number, 0)])
        return found

    monkeypatch.setattr(module.AppDispatcher, "_wait_for_turn", wait_and_write)
    outbox.insert_one({"_id": 0}, tasks=[rig.add.s(0, 0)])
    wait_for(lambda: rig.orders.count_documents({}) == 4 and settled(outbox))
    assert rig.sent() == [[number, 0] for number in range(4)]


@pytest.mark.parametrize("error", [OSError, SystemExit])
def test_one_thread_serves_all_outboxes_in_turns_whatever_one_of_them_raises(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """P12, P17: the thread outlives it, and no outbox waits for the end of another."""

    def fail(_document_ids: object) -> None:
        raise error

    broken, one, two = (rig.outbox(name, at_once=True) for name in ("broken", "one", "two"))
    monkeypatch.setattr(broken.runtime, "deliver_queued", fail)
    with held_up(one) as (_asked, begun):
        one.insert_one({"_id": "first"}, tasks=[rig.add.s(0, 0)])
        assert begun.wait(120)
        broken.insert_one({"_id": 0}, tasks=[rig.add.s(3, 0)])
        for number in range(2 * module.TURN):
            one.insert_one({"_id": number}, tasks=[rig.add.s(1, number)])
            two.insert_one({"_id": number}, tasks=[rig.add.s(2, number)])
    wait_for(lambda: settled(one) and settled(two))
    assert {outbox for outbox, _ in rig.sent()[: 2 * module.TURN]} == {0, 1, 2}
    assert "dispatcher_failed" in {getattr(each, "event", "") for each in caplog.records}
    monkeypatch.undo()
    wait_for(lambda: settled(broken))
    assert rig.sent() == [[3, 0]]


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_document_that_nobody_can_read_holds_up_no_other(
    rig: Rig, caplog: pytest.LogCaptureFixture, *, is_alone: bool
) -> None:
    """P12: the thread delivers the others one by one, and does not pause."""
    leave_strange_ids(rig)
    outbox = rig.outbox(at_once=True)
    if not is_alone:
        outbox.runtime.dispatcher.hint(*range(5))
    outbox.runtime.dispatcher.hint()
    wait_for(lambda: outbox.status().pending == 1)
    outbox.insert_one({"_id": "later"}, tasks=[rig.add.s(1, 3)])
    wait_for(lambda: outbox.status().pending == 1)
    assert sorted(rig.sent()) == [[1, 1], [1, 3]]
    assert {each.__dict__["event"] for each in caplog.records} == {"document_undeliverable"}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", [Outbox, OutboxCollection])
def test_a_mongodb_that_does_not_answer_holds_up_the_other_outboxes_within_a_bound(
    rig: Rig, proxy: Proxy, make_client: MakeClient, kind: Any
) -> None:
    """P12: they share the thread; neither a look nor documents that are named keep it for long."""
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
    end(silent)


@contextmanager
def closed(database: Database[Document], identity: Any) -> Iterator[None]:
    with database.client.start_session() as session, session.start_transaction():
        database["orders"].update_one({"_id": identity}, {"$inc": {"n": 1}}, session=session)
        yield


def delivered(database: Database[Document], *identities: Any) -> bool:
    field = {"_id": {"$in": list(identities)}, "pendingEvents": {"$exists": True}}
    return not database["orders"].count_documents(field)


@pytest.mark.usefixtures("impatient")
def test_an_open_transaction_keeps_its_own_document_waiting_and_no_other(rig: Rig) -> None:
    elsewhere, outbox = rig.outbox(name="elsewhere", at_once=False), rig.outbox(at_once=True, claim_ttl=600)
    outbox.sweep()  # which makes the index: that would wait for the transaction, or end it
    elsewhere.insert_one({"_id": "look"}, tasks=[rig.add.s(7, 0)])
    elsewhere.insert_one({"_id": "free"}, tasks=[rig.add.s(8, 0)])
    with held_up(outbox) as (_asked, begun):
        outbox.insert_one({"_id": 0}, tasks=[rig.add.s(0, 0)])
        assert begun.wait(120)
        opened_first = closed(rig.database, 0)
        opened_first.__enter__()
    with closed(rig.database, "look"):
        for number in range(1, 4):
            outbox.insert_one({"_id": number}, tasks=[rig.add.s(number, 0)])
        wait_for(lambda: delivered(rig.database, 1, 2, 3))
        outbox.dispatch("look", "free")
        wait_for(lambda: delivered(rig.database, "free"))
        assert rig.pending(0)["count"] == rig.pending("look")["count"] == 1
    opened_first.__exit__(None, None, None)
    wait_for(lambda: settled(outbox))
    assert sorted(rig.sent()) == [[0, 0], [1, 0], [2, 0], [3, 0], [7, 0], [8, 0]]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the wait for the index shorter than what is waited for."""
    monkeypatch.setattr(indexes, "WAIT_SECONDS", 0.3)
    monkeypatch.setattr(indexes, "AGAIN_SECONDS", 1.0)


@pytest.mark.usefixtures("short")
def test_no_write_waits_for_the_end_of_a_transaction_that_keeps_the_index_away(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = rig.outbox(at_once=True)
    rig.orders.insert_one({"_id": "open"})

    def is_made() -> bool | None:
        outbox.sweep()
        return outbox.runtime.pending.indexes.exist()

    def is_delayed() -> bool:
        outbox.dispatch()
        return "index_delayed" in {getattr(each, "event", "") for each in caplog.records}

    with closed(rig.database, "open"):
        for number in range(3):
            outbox.insert_one({"_id": number}, tasks=[rig.add.s(number, 0)])
            wait_for(lambda: not rig.orders.count_documents({"pendingEvents": {"$exists": True}}))
        wait_for(is_delayed)
        assert not outbox.runtime.pending.indexes.exist()
    assert sorted(rig.sent()) == [[number, 0] for number in range(3)]
    wait_for(is_made)


@pytest.mark.parametrize("sweeps", [True, False], ids=["a sweep", "a write"])
def test_a_sweep_waits_for_the_index_as_long_as_it_takes_to_read_the_collection(
    rig: Rig, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch, *, sweeps: bool
) -> None:
    """P17: else a large collection would never have it. Writers do not wait so long."""
    monkeypatch.setattr(table, "_DOCUMENTS_A_SECOND", 0.1)
    rig.orders.insert_many([{"_id": number} for number in range(3)])
    heard = CommandRecorder()
    outbox = rig.outbox(make_client(event_listeners=[heard])[rig.database.name]["orders"], at_once=not sweeps)
    if sweeps:
        outbox.sweep()
    else:
        outbox.insert_one({"_id": 3}, tasks=[rig.add.s(1, 0)])
        wait_for(lambda: settled(outbox))
    bounds = [each["maxTimeMS"] for each in heard.named("createIndexes") if each["createIndexes"] == "orders"]
    assert any(bound > 1000 * indexes.WAIT_SECONDS for bound in bounds) is sweeps


@pytest.mark.usefixtures("impatient", "short")
def test_a_look_that_would_read_a_whole_collection_is_given_up_and_forgets_nothing(
    rig: Rig, failpoint: Failpoint, make_client: MakeClient
) -> None:
    """Without the index; what writes hand over goes out meanwhile, and the next look comes after a pause."""
    heard = CommandRecorder()
    client = make_client(appName="looking", event_listeners=[heard])
    outbox = rig.outbox(client[rig.database.name]["orders"], name="looking", at_once=True)
    rig.outbox(name="writer", at_once=False).insert_one({"_id": 1}, tasks=[rig.add.s(1, 0)])
    with failpoint(mode={"times": 1}, failCommands=["find"], errorCode=50, appName="looking"):  # as after maxTimeMS
        outbox.dispatch()
        wait_for(heard.failures.is_set)
    outbox.insert_one({"_id": 2}, tasks=[rig.add.s(2, 0)])
    wait_for(lambda: not outbox.status().pending)
    assert sorted(rig.sent()) == [[1, 0], [2, 0]]
    bounds = [command.get("maxTimeMS", 0) for _, command in heard.of("find") if "$or" in command["filter"]]
    assert bounds
    assert all(0 < bound <= 1000 for bound in bounds)
