"""Signals: what is sent where, once, and receivers that fail or block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from celery import Celery
from celery.utils.dispatch import Signal
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery import Bridge, Change, signals
from mongo_celery.signals import change_dead_lettered, change_halted, handler_blocked, history_lost, leader_changed
from mongo_celery.testing import BridgeRunner
from tests.fixtures.process import wait_for
from tests.integration.test_lost_history import ROLLED, make_on
from tests.rig.listener import listening

Document = dict[str, Any]


class Received:
    def __init__(self) -> None:
        self.all: list[Document] = []

    def __call__(self, signal: Signal, **arguments: Any) -> None:
        del signal
        self.all.append(arguments)

    def wait(self, count: int) -> list[Document]:
        wait_for(lambda: len(self.all) >= count, message=lambda: f"{count} signals, and there are {self.all}")
        return self.all


@contextmanager
def receiving(signal: Signal, receiver: Any = None) -> Iterator[Received]:
    received = Received() if receiver is None else receiver
    signal.connect(received, weak=False)
    try:
        yield received
    finally:
        signal.disconnect(received)


@pytest.fixture
def shop(database: Database[Document]) -> Bridge:
    app = Celery("shop", broker="memory://", set_as_current=False)
    bridge = Bridge(app, "mongodb://localhost:1/?replicaSet=nowhere", name="shop", autodiscover=False)
    for policy in ("halt", "dead_letter", "skip", "discard", "park_key"):

        def fail(change: Change) -> None:
            raise ValueError(change.document_key["_id"])

        fail.__name__ = f"fail_{policy}"
        bridge.on_change(f"{database.name}.{policy}", name=policy, failure_policy=policy)(fail)
    return bridge


@pytest.fixture
def run(mongo_url: str, shop: Bridge) -> Iterator[BridgeRunner]:
    with BridgeRunner(shop, url=mongo_url) as runner:
        yield runner


def deliver(runner: BridgeRunner) -> None:
    with suppress(ValueError):
        runner.deliver()


def test_a_halt_is_signalled_once_and_a_receiver_that_fails_is_logged(
    database: Database[Document], run: BridgeRunner, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("no network")

    def leave(**_: Any) -> None:
        raise SystemExit

    with receiving(change_halted, fail), receiving(change_halted) as received, receiving(change_halted, leave):
        database["halt"].insert_one({"_id": "a"})
        deliver(run)
        (found,) = received.wait(1)
        assert (found["sender"], found["handler"], found["error"]) == ("shop", "halt", "ValueError: a")
        assert found["command"] == f"celery -A shop changes retry halt {found['partition']}"
        deliver(run)
        database["dead_letter"].insert_one({"_id": "b"})
        with receiving(change_dead_lettered) as later:
            deliver(run)
            later.wait(1)
        assert len(received.all) == 1
    wait_for(lambda: "signal_receiver_failed" in [vars(each).get("event") for each in caplog.records])


def test_every_dead_letter_is_signalled_with_its_reason(
    database: Database[Document], run: BridgeRunner, shop: Bridge
) -> None:
    with receiving(change_dead_lettered) as received:
        for policy in ("discard", "skip", "dead_letter", "park_key"):
            database[policy].insert_one({"_id": 1})
            deliver(run)
        database["park_key"].update_one({"_id": 1}, {"$set": {"n": 2}})
        deliver(run)
        found = received.wait(4)
        assert [each["reason"] for each in found] == ["skipped", "failed", "parked", "parked_behind"]
        (letter,) = (each for each in found if each["handler"] == "dead_letter")
        shop.operations.replay_dead_letters("dead_letter").run()

        def is_replayed() -> bool:
            deliver(run)  # the listener reads requests every second
            return len(received.all) == 5

        wait_for(is_replayed)
        again = received.all[4]
        assert again == {**letter, "reason": "replay_failed"}
        assert letter["command"] == f"celery -A shop changes dead-letters list --id {letter['dead_letter']}"
        database["halt"].insert_one({"_id": 1})
        deliver(run)
        shop.operations.skip("halt", None).run()
        database["skip"].insert_one({"_id": 2})
        deliver(run)
        assert [each["handler"] for each in received.wait(6)[5:]] == ["skip"]


def test_a_receiver_that_blocks_delays_no_change(
    database: Database[Document], run: BridgeRunner, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "WAITING_MAX", 2)
    entered, gate = threading.Event(), threading.Event()

    def block(**_: Any) -> None:
        entered.set()
        gate.wait()

    try:
        with receiving(change_dead_lettered, block), receiving(change_dead_lettered) as received:
            database["skip"].insert_one({"_id": 0})
            deliver(run)
            wait_for(entered.is_set)
            database["skip"].insert_many([{"_id": number} for number in range(1, 5)])
            deliver(run)
            assert len(run.calls) == 5
            dropped = [each for each in caplog.records if vars(each).get("event") == "signal_dropped"]
            assert len(dropped) == 2
            assert received.all == []
            gate.set()
            received.wait(3)
    finally:
        gate.set()


def test_signals_behind_a_receiver_that_never_ends_are_logged_at_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none of them is sent afterwards, if the process continues."""
    monkeypatch.setattr(signals, "_ENDING_SECONDS", 0.0)
    queue, entered, gate, received = signals.SignalQueue(), threading.Event(), threading.Event(), list[object]()

    def block(number: int, **_: Any) -> None:
        received.append(number)
        entered.set()
        gate.wait()

    with receiving(change_halted, block):
        for number in (1, 2, 3):
            queue.add(change_halted, "shop", {"number": number})
        wait_for(entered.is_set)
        queue.close()
        dropped = [each for each in caplog.records if vars(each).get("event") == "signal_dropped"]
        gate.set()
        wait_for(lambda: not any(each.name == "mongo_celery-signals" for each in threading.enumerate()))
    assert len(dropped) == 2
    assert received == [1]


def test_a_leader_names_the_one_before_it(mongo_url: str, state_database: str, redis_url: str) -> None:
    app = Celery("shop", broker=redis_url, set_as_current=False)
    bridge = Bridge(app, mongo_url, name="shop", database=state_database, autodiscover=False)

    @bridge.on_change("shop.orders")
    def note(change: Change) -> None:
        del change

    with receiving(leader_changed) as received:
        for count in (1, 2):
            with listening(bridge):
                received.wait(count)
    first, second = received.all
    assert (first["previous_pid"], first["previous_host"]) == (None, None)
    assert (second["previous_pid"], second["previous_host"]) == (first["pid"], first["host"])
    assert second["term"] > first["term"]


def test_lost_history_is_signalled_once_whether_a_handler_stops_or_is_moved(
    mongo_client: MongoClient[Document], state_database: str
) -> None:
    with receiving(history_lost) as received:
        stopped = make_on(mongo_client, state_database, record=ROLLED)
        stopped.begin()
        stopped.begin()
        stopped.begin("now")
        found = received.wait(2)
    assert [each["handler"] for each in found] == ["record", "record"]
    assert found[0]["continues_at"] is None
    assert found[1]["continues_at"] == stopped.led["record"].plan.start.as_datetime()


def test_a_blocked_handler_is_signalled(
    database: Database[Document], run: BridgeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mongo_celery.bridge.listener import blocked

    monkeypatch.setattr(blocked, "LAG_SECONDS", 0)
    monkeypatch.setattr(blocked, "_TICK_SECONDS", 0.0)
    with receiving(handler_blocked) as received:
        database["halt"].insert_one({"_id": 1})
        deliver(run)
        (found,) = received.wait(1)
        deliver(run)
        with receiving(change_dead_lettered) as later:
            database["skip"].insert_one({"_id": 1})
            deliver(run)
            later.wait(1)
        assert len(received.all) == 1
    assert (found["handler"], found["state"], found["error"]) == ("halt", "halted", "ValueError: 1")
    assert found["command"] == "celery -A shop changes status"
