"""An outbox whose collection a bridge watches: the listener's stream brings the deliveries, nothing polls."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bson import ObjectId
from celery import Celery
from pymongo import MongoClient

from mongo_celery import Outbox
from mongo_celery.outbox.entries import make_task_entries
from mongo_celery.outbox.pending import new_field
from tests.fixtures.process import Processes, wait_for
from tests.rig.project import MakeProject, Project

Document = dict[str, Any]


class Watched(Project):
    """The project's processes, and an outbox like the project's to write with."""

    app = "tests.acceptance.watched_outbox_project"

    def __init__(self, processes: Processes, client: MongoClient[Document], url: str, broker: str) -> None:
        super().__init__(processes, client, url, broker)
        self.writer = Celery("watched", broker=broker)
        options: Document = {"database": self.state.name, "at_once": False, "sweep_every": None}
        self.outbox = Outbox(self.writer, self.data["orders"], **options)

    def task(self, order: int, step: int) -> Any:
        return self.writer.signature(f"{self.app}.note", args=(order, step))

    def notes(self, order: int) -> list[int]:
        return [note["step"] for note in self.data["notes"].find({"order": order}).sort("_id", 1)]

    def seen(self, kind: str, order: int) -> list[list[str]]:
        """The fields in the changes of an order that a handler got, in the order of the stream."""
        return [each["names"] for each in self.data[kind].find({"order": order}).sort("_id", 1)]

    def pending(self, order: int) -> int:
        document = self.data["orders"].find_one({"_id": order})
        assert document is not None
        return int(document.get("pendingEvents", {}).get("count", 0))


@pytest.fixture
def watched(make_project: MakeProject) -> Iterator[Watched]:
    """Give the project with a listener and a worker of one process, so that order can be seen."""
    made: Watched = make_project(Watched)
    made.worker(concurrency=1)
    made.listener()
    yield made
    made.outbox.runtime.publisher.close()


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
    (made,) = make_task_entries(watched.writer, watched.task(7, 1), datetime.now(UTC))
    entry = watched.outbox.runtime.signer.sign(made)
    until = datetime.now(UTC) + timedelta(seconds=7)
    field = {**new_field([entry]), "claim": {"owner": ObjectId(), "until": until}}

    watched.data["orders"].insert_one({"_id": 7, "pendingEvents": field})

    wait_for(lambda: watched.notes(7) == [1])
    wait_for(lambda: watched.pending(7) == 0)
