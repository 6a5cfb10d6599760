"""An outbox whose collection a bridge watches: the listener's stream brings the deliveries, nothing polls."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from bson import ObjectId
from celery import Celery
from pymongo import MongoClient

from mongo_celery import Bridge, Outbox
from mongo_celery.errors import ConfigurationError
from mongo_celery.outbox.entries import make_task_entries
from mongo_celery.outbox.pending import new_field
from tests.fixtures.mongo import empty
from tests.fixtures.process import Processes, wait_for
from tests.rig.project import QUIET

Document = dict[str, Any]

PROJECT = "tests.acceptance.watched_outbox_project"
NOTE = f"{PROJECT}.note"


class Watched:
    """The project's processes on databases of their own, and an outbox like the project's to write with."""

    def __init__(self, name: str, client: MongoClient[Document], broker: str) -> None:
        self.data = client[f"{name}_data"]
        self.app = Celery("watched", broker=broker)
        options: Document = {"database": f"{name}_state", "at_once": False, "sweep_every": None}
        self.outbox = Outbox(self.app, self.data["orders"], **options)

    def task(self, order: int, step: int) -> Any:
        """The project's task by its name: a writer need not import it."""
        return self.app.signature(NOTE, args=(order, step))

    def notes(self, order: int) -> list[int]:
        """Which steps of an order have run, in the order in which they ran."""
        return [note["step"] for note in self.data["notes"].find({"order": order}).sort("_id", 1)]

    def seen(self, kind: str, order: int) -> list[list[str]]:
        """The fields in the changes of an order that a handler got, in the order of the stream."""
        return [each["names"] for each in self.data[kind].find({"order": order}).sort("_id", 1)]

    def pending(self, order: int) -> int:
        document = self.data["orders"].find_one({"_id": order})
        assert document is not None
        return int(document.get("pendingEvents", {}).get("count", 0))


@pytest.fixture
def watched(
    processes: Processes, mongo_client: MongoClient[Document], mongo_url: str, redis_url: str
) -> Iterator[Watched]:
    """Give the project with a listener and a worker of one process, so that order can be seen."""
    name = f"watched_{uuid4().hex[:8]}"
    environment = {"WATCHED_NAME": name, "WATCHED_MONGO": mongo_url, "WATCHED_BROKER": redis_url}
    listener = processes.celery(PROJECT, "listener", "-l", "INFO", name="listener", environment=environment)
    worker = processes.celery(
        PROJECT, "worker", *QUIET, "-c", "1", "-l", "INFO", name="worker", environment=environment
    )
    worker.wait_for_output("ready")
    listener.wait_for_output("listening|leading|lease")
    made = Watched(name, mongo_client, redis_url)
    yield made
    made.outbox.runtime.publisher.close()
    for database in (f"{name}_data", f"{name}_state"):
        empty(mongo_client, database)


def test_the_listener_delivers_what_the_writer_leaves_pending_in_order_per_document(watched: Watched) -> None:
    """The writer publishes nothing and no beat runs: every entry comes through the change stream."""
    for order in range(5):
        watched.outbox.insert_one({"_id": order}, tasks=[watched.task(order, 0), watched.task(order, 1)])
    for order in range(5):
        watched.outbox.update_one({"_id": order}, {"$set": {"paid": True}}, tasks=[watched.task(order, 2)])

    for order in range(5):
        wait_for(lambda order=order: watched.notes(order)[2:] == [2])  # type: ignore[misc]
        assert watched.notes(order) == [0, 1, 2]
        wait_for(lambda order=order: watched.pending(order) == 0)  # type: ignore[misc]

    # Handlers beside it get what was written to the orders; one that asks gets the removals too, and claims.
    watched.data["orders"].update_many({}, {"$set": {"shipped": True}})
    for order in range(5):
        for kind in ("seen", "seen_all"):
            wait_for(lambda order=order, kind=kind: watched.seen(kind, order)[-1:] == [["shipped"]])  # type: ignore[misc]
        seen = watched.seen("seen", order)
        assert [[name for name in names if "." not in name] for names in seen] == [[], ["paid"], ["shipped"]]
        assert len(watched.seen("seen_all", order)) > len(seen)


def test_the_listener_waits_for_the_claim_of_a_writer_that_has_died(watched: Watched) -> None:
    """Killed after its write, it holds the document longer than three of Celery's retries; no beat comes back to it."""
    (made,) = make_task_entries(watched.app, watched.task(7, 1), datetime.now(UTC))
    entry = watched.outbox.runtime.signer.sign(made)
    until = datetime.now(UTC) + timedelta(seconds=7)
    field = {**new_field([entry]), "claim": {"owner": ObjectId(), "until": until}}

    watched.data["orders"].insert_one({"_id": 7, "pendingEvents": field})

    wait_for(lambda: watched.notes(7) == [1])
    wait_for(lambda: watched.pending(7) == 0)


def test_an_outbox_needs_the_bridges_app_and_a_collection() -> None:
    """Said when it is made, not when the first order is lost; without an app, before an order is written."""
    with pytest.raises(ConfigurationError, match="no app"):
        Bridge(url="mongodb://localhost/", autodiscover=False).outbox("shop.orders").insert_one({})
    bridge = Bridge(Celery("unbound", broker="memory://"), "mongodb://localhost/", autodiscover=False)
    with pytest.raises(ConfigurationError, match="collection"):
        bridge.outbox(42)
    bridge.outbox("shop.orders")
    with pytest.raises(ConfigurationError, match="already has an outbox"):
        bridge.outbox("shop.orders")
