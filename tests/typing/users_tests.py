"""Users' code: tests of their handlers, by `mongo_celery.testing`. It is checked, and never run."""

from __future__ import annotations

from typing import Any, assert_type

from pymongo.collection import Collection

from mongo_celery import Bridge, Change, Outbox, OutboxCollection
from mongo_celery.testing import (
    BridgeRunner,
    BridgeWorkers,
    DeliveredChanges,
    HandlerCall,
    PendingEntry,
    SentTask,
    assert_once,
    assert_pending,
    deleted,
    drain,
    inserted,
    pending_entries,
    replaced,
    undispatched,
    updated,
)

late = Bridge(name="shop")


@late.on_change("shop.orders")
def note(change: Change) -> str:
    return change.operation_type


def test_note(bridge: Bridge, bridge_runner: BridgeRunner) -> None:
    assert_type(note(inserted("shop.orders", {"_id": 1})), str)
    for change in (deleted("shop.orders", 1), replaced("shop.orders", {"_id": 1})):
        assert_type(change, Change)
    assert_type(updated("shop.orders", {"_id": 1}, {"total": 2}), Change)
    delivered = bridge_runner.deliver()
    assert_type(delivered, DeliveredChanges)
    assert_type(delivered.of("note"), tuple[HandlerCall, ...])
    assert_type(bridge_runner.sent(), list[SentTask])
    with BridgeRunner(bridge, url="mongodb://localhost:27017/?replicaSet=rs0") as runner:
        runner.crash()
        runner.crash("called", "note", after=2)
        runner.snapshot("note", sources=["shop.orders"], match={"$gt": ["$fullDocument.total", 5]})
    drain(bridge, timeout=5)


def test_tasks(outbox: Outbox, others: OutboxCollection, marks: Collection[dict[str, Any]]) -> None:
    with undispatched(outbox, others):
        for each in pending_entries(others):
            assert_type(each, PendingEntry)
    assert_pending(outbox, "shop.mail", args=(1,), kwargs={"subject": "hi"}, place=1)
    assert_pending(others, "order.paid", times=0)
    assert_once(marks, "an-id")
    assert_once(lambda: marks, 7, task="shop.parcel", ran=False)


def test_deployment(bridge_workers: BridgeWorkers) -> None:
    bridge_workers.start("shop.celery", "-c", "1", environment={"MONGO_URL": "mongodb://db/"}, timeout=30)
    bridge_workers.drain(timeout=60)
    assert_type(bridge_workers.output, str)
