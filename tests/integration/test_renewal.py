"""What a term keeps in its lease: its renewal, which ends if there is no progress, and its report."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest
from celery import Celery
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery import Bridge, Change
from mongo_celery.bridge.listener import renewal as module
from mongo_celery.bridge.listener.watermarks import Watermarks
from tests.fixtures.process import wait_for
from tests.rig.listener import listening
from tests.rig.term import Document, begin_term

Failpoint = Callable[..., AbstractContextManager[None]]

TTL = 1.0


RETURNS = threading.Event()


def never_return(_event: Mapping[str, Any]) -> str:
    """A partition_by that hangs until the test is over."""
    RETURNS.wait()
    return "key"


def fail(*_given: object) -> Mapping[str, Any]:
    raise KeyError("subscription")


@pytest.mark.parametrize(
    "report", [fail, lambda: {"key": "\ud800"}, lambda: {"key": object()}], ids=["raises", "no text", "no BSON"]
)
def test_a_report_that_cannot_be_used_ends_no_term(
    mongo_client: MongoClient[Document],
    state_database: str,
    report: Callable[[], Mapping[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = begin_term(mongo_client, state_database, 1)
    watermarks = Watermarks(rig.store, rig.renewal, "the fingerprint", report)
    for number in range(1, 4):
        watermarks.flush([], 10.0 * number, 10.0 * number)
        assert (rig.store.leases.read() or {})["report"] == {}
    assert [getattr(each, "event", "") for each in caplog.records] == ["report_failed"]


@pytest.mark.parametrize("reason", ["a partition_by that hangs", "partitions cannot be read"])
def test_a_leader_that_makes_no_progress_gives_the_lease_up(
    mongo_url: str,
    mongo_client: MongoClient[Document],
    state_database: str,
    database: Database[Document],
    reason: str,
    failpoint: Failpoint,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another one may lead, and the record names the function that does not return."""
    RETURNS.clear()
    monkeypatch.setattr(module, "_LEAST_PATIENCE_SECONDS", 0.0)

    def stalled(function: str = "") -> bool:
        said = [each.getMessage() for each in caplog.records if getattr(each, "event", "") == "listener_stalled"]
        return any(function in each for each in said)

    def handle(change: Change) -> None:
        """Handle it."""

    bridge = Bridge(Celery("shop", broker="memory://"), mongo_url, name="shop", database=state_database, lease_ttl=TTL)
    options: Any = {"partition_by": never_return} if reason.startswith("a partition_by") else {}
    bridge.on_change(f"{database.name}.orders", **options)(handle)
    leases = mongo_client[state_database]["leases"]
    with caplog.at_level(logging.INFO), listening(bridge):
        try:
            wait_for(lambda: leases.find_one({"report.caughtUp": True}))
            version = leases.find_one()["term"]  # type: ignore[index]
            if reason.startswith("a partition_by"):
                database.orders.insert_one({})
                wait_for(lambda: stalled("never_return"))
                wait_for(lambda: not leases.find_one({"$expr": {"$gt": ["$expiresAt", "$$NOW"]}}))
            else:
                refused = {"failCommands": ["find"], "errorCode": 6, "namespace": f"{state_database}.partitions"}
                with failpoint(**refused):
                    caplog.clear()
                    wait_for(stalled)
                    wait_for(lambda: leases.find_one({"listenerId": None}))
                wait_for(lambda: leases.find_one()["term"] > version)  # type: ignore[index]
        finally:
            RETURNS.set()
