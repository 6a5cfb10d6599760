"""A handler's delay in the process of a test: what a runner delivers, and what a listener stores meanwhile."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery import Bridge, Change, Changes
from mongo_celery.testing import BridgeRunner

Document = dict[str, Any]


@pytest.fixture
def orders(database: Database[Document]) -> Any:
    return database["orders"]


def make_bridge(url: str, spill_after: float = 600.0) -> Bridge:
    app = Celery("shop", broker="redis://localhost:1/0", set_as_current=False)
    return Bridge(app, url, name="shop", autodiscover=False, partitions=1, run_size=50, spill_after=spill_after)


@pytest.fixture
def bridge(mongo_url: str) -> Bridge:
    return make_bridge(mongo_url)


def read_n(change: Change) -> Any:
    updated = (change.update_description or {}).get("updatedFields", {})
    return updated.get("n", (change.full_document or {}).get("n"))


def test_a_runner_delivers_what_is_delayed_when_nothing_else_is_left(bridge: Bridge, orders: Any) -> None:
    """A test does not wait: in order, with the last state of a burst once; also what handlers write meanwhile."""
    seen: list[tuple[str, Any]] = []

    @bridge.on_change(orders.full_name, delay=timedelta(hours=3), max_running=1)
    def every(change: Change) -> None:
        seen.append(("every", read_n(change)))
        if read_n(change) == 2:
            orders.insert_one({"_id": 2, "n": 9})

    @bridge.on_change(orders.full_name, delay=3600, coalesce=True)
    def last(change: Change) -> None:
        seen.append(("last", read_n(change)))

    @bridge.on_changes(orders.full_name, delay=3600, coalesce=True)
    def lists(changes: Changes) -> None:
        seen.append(("lists", [read_n(each) for each in changes]))

    with BridgeRunner(bridge) as runner:
        orders.insert_one({"_id": 1, "n": 0})
        for n in (1, 2):
            orders.update_one({"_id": 1}, {"$set": {"n": n}})
        runner.deliver()
    of = {name: [each for which, each in seen if which == name] for name in ("every", "last", "lists")}
    assert of == {"every": [0, 1, 2, 9], "last": [2, 9], "lists": [[2], [9]]}


def test_rows_of_a_snapshot_and_replays_are_not_delayed(bridge: Bridge, orders: Any) -> None:
    """A row has no time of a change. A dead letter has waited before."""
    seen: list[Any] = []

    @bridge.on_change(orders.full_name, delay=3600, failure_policy="dead_letter")
    def note(change: Change) -> None:
        seen.append((change.operation_type, change.replayed))
        if not change.replayed and change.operation_type == "insert":
            raise ValueError("no")

    with BridgeRunner(bridge) as runner:
        term = runner._terms[0]
        vars(term)["end_delays"] = lambda: False
        orders.insert_one({"_id": 1})
        runner.deliver()
        assert seen == [], "it waits"
        while not (status := bridge.operations.read_status().handlers[0]).delayed:
            term.turn()
        del vars(term)["end_delays"]
        runner.deliver(raises=False)
        vars(term)["end_delays"] = lambda: False
        bridge.operations.replay_dead_letters("note").run()
        runner.snapshot("note")
        while len(seen) < 3:  # a listener looks for requests once a second
            runner.deliver()
    assert (status.state, status.delayed, status.delay_seconds) == ("flowing", 1, 3600)
    assert status.delayed_until is not None
    assert sorted(seen) == [("insert", False), ("insert", True), ("snapshot", False)]


def test_what_waits_is_stored_and_its_watermark_goes_on(
    mongo_url: str, orders: Any, mongo_client: MongoClient[Document]
) -> None:
    """P13: a delay that is longer than `spill_after` costs no oplog, and a coalescing handler sees both parts."""
    bridge, seen = make_bridge(mongo_url, spill_after=0.05), list[Any]()

    @bridge.on_change(orders.full_name, delay=3600, coalesce=True)
    def note(change: Change) -> None:
        seen.append(read_n(change))

    with BridgeRunner(bridge) as runner:
        orders.insert_one({"_id": 1, "n": 0})
        state = mongo_client[bridge.options.database]
        term = runner._terms[0]
        while not state["partitions"].find_one({"stored.reason": "delayed"}):
            term.turn()
        orders.update_one({"_id": 1}, {"$set": {"n": 1}})
        while state["backlog"].count_documents({}) < 2:
            term.turn()
        assert not seen
        runner.deliver()
        assert state["dead_letters"].count_documents({}) == 0
    assert seen == [1]
