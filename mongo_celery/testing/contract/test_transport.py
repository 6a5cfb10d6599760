"""The contract of a broker for a bridge: deliver in time. A real worker with a listener runs on it."""

from __future__ import annotations

import importlib
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection
from pymongo import MongoClient

from mongo_celery.testing import BridgeWorkers

APP = "mongo_celery.testing.contract.app"
ORDERS = 20
NUMBERS = 5
LARGE_BYTES = 3_000_000
PURGES = 5
SECONDS_MAX = 120.0
_PAUSE_SECONDS = 0.1


class Bench:
    """A worker on the broker, and the collections of its bridge."""

    def __init__(self, data: Any, workers: BridgeWorkers, bridge: Any, broker_url: str) -> None:
        self.orders, self.notes = data["orders"], data["notes"]
        self.workers, self.bridge, self.broker_url = workers, bridge, broker_url

    def write(self, order: object, n: int, **fields: object) -> None:
        """Write one change. It replaces the document by the number, so the change contains all of it."""
        self.orders.replace_one({"_id": order}, {"n": n, **fields}, upsert=True)

    def noted(self) -> dict[object, list[int]]:
        """Return the numbers of each order in the sequence of its handler's calls."""
        return {each["_id"]: each["ns"] for each in self.notes.find()}


@pytest.fixture
def bench(
    mongo_celery_mongodb_url: str,
    mongo_celery_broker_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Bench]:
    """Give a worker on the broker. Afterwards remove its data from MongoDB."""
    database = f"mongo_celery_contract_{secrets.token_hex(4)}"
    given = {"MONGO_CELERY_CONTRACT_DATABASE": database, "MONGO_CELERY_CONTRACT_MONGODB": mongo_celery_mongodb_url}
    for name, value in {**given, "CELERY_BROKER_URL": mongo_celery_broker_url}.items():
        monkeypatch.setenv(name, value)
    bridge = importlib.reload(importlib.import_module(APP)).bridge
    url, broker_url = mongo_celery_mongodb_url, mongo_celery_broker_url
    with MongoClient[dict[str, Any]](url) as client, BridgeWorkers([bridge], url, broker_url, tmp_path) as workers:
        # In threads, so that listener and worker share a broker in memory.
        workers.start(APP, "-P", "threads", "-c", "4", environment=given)
        yield Bench(client[database], workers, bridge, broker_url)
        for name in (database, f"{database}_state"):
            client.drop_database(name)


def test_each_change_runs_in_order_per_document(bench: Bench) -> None:
    """P1, P2, P6: without faults each runs once, and also after a retry."""
    for n in range(1, NUMBERS + 1):
        for order in range(ORDERS):
            bench.write(order, n, again=n == 2 and order % 5 == 0)
    bench.workers.drain(SECONDS_MAX)
    assert bench.noted() == {order: list(range(1, NUMBERS + 1)) for order in range(ORDERS)}


def test_large_changes_reach_their_handler(bench: Bench) -> None:
    """P12: for a change that is too large, the message has a reference. It delays no other change."""
    bench.write("large", 1, text="x" * LARGE_BYTES)
    bench.write("large", 2)
    bench.write("small", 1)
    bench.workers.drain(SECONDS_MAX)
    assert bench.noted() == {"large": [1, 2], "small": [1]}


def test_lost_messages_are_sent_again(bench: Bench) -> None:
    """P8: purging the queues while changes are in flight only delays them."""
    if bench.broker_url.startswith("memory:"):
        pytest.skip("a broker in memory cannot be reached from outside of its process")
    queues = bench.bridge.wiring.options.queue_names()
    with Connection(bench.broker_url) as connection:
        for n in range(1, PURGES + 1):
            for order in range(ORDERS):
                bench.write(order, n)
            for queue in queues:
                connection.SimpleQueue(queue).clear()
            time.sleep(_PAUSE_SECONDS)
    bench.workers.drain(SECONDS_MAX)
    noted = bench.noted()
    assert {order: sorted(set(ns)) for order, ns in noted.items()} == {
        order: list(range(1, PURGES + 1)) for order in range(ORDERS)
    }
    assert all(ns == sorted(ns) for ns in noted.values())
