"""The status of outboxes, and their Prometheus metrics."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from celery import Celery
from prometheus_client import CollectorRegistry
from pymongo.database import Database

from mongo_celery import Outbox
from mongo_celery.outbox.pending import FIELD
from mongo_celery.outbox.pending_documents import PendingDocuments
from mongo_celery.outbox.prometheus import OutboxCollector
from mongo_celery.outbox.runtime import OutboxStatus
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import wait_for
from tests.fixtures.tasks import register_tasks

Document = dict[str, Any]

NOWHERE = "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=300"
QUIET: Document = {"documents": 0, "pending": 0, "oldest_seconds": None, "failing": 0, "dead_letters": 0}


def quiet_app() -> Celery:
    return Celery("metrics", broker="memory://")


def field(count: int, seconds: float, **entry: Any) -> Document:
    at = datetime.now(UTC) - timedelta(seconds=seconds)
    events = [{"id": f"e{number}", "at": at, "attempts": 0, **entry} for number in range(count)]
    return {FIELD: {"count": count, "events": events}}


def test_a_status_counts_documents_entries_ages_and_failures(database: Database[Document]) -> None:
    """By the server's clock, which a writer's may be ahead of. A damaged entry hides none."""
    orders = database["orders"]
    outbox = Outbox(quiet_app(), orders, sweep_every=None, database=f"{database.name}_none")
    assert outbox.status() == OutboxStatus(outbox=orders.full_name, dispatched=0, failures=0, **QUIET)
    orders.insert_one(field(2, -60))
    assert outbox.status().oldest_seconds == 0
    orders.insert_many([{FIELD: {"count": 1, "events": events}} for events in ([{"at": "noon"}], "none")])
    orders.insert_many([field(1, 100, attempts=2), field(0, 0), {"plain": True}])
    found = outbox.status()
    assert (found.documents, found.pending, found.failing) == (4, 5, 1)
    assert found.oldest_seconds is not None
    assert 100 <= found.oldest_seconds < 130


def samples(app: Celery, seconds: float = 30.0) -> dict[tuple[str, str], float]:
    registry = CollectorRegistry(auto_describe=True)
    registry.register(OutboxCollector(app, answer_seconds=seconds))
    return {
        (sample.name.removeprefix("mongo_celery_outbox_"), sample.labels["outbox"]): sample.value
        for metric in registry.collect()
        for sample in metric.samples
    }


def test_a_scrape_finds_gauges_and_counters_for_each_outbox(database: Database[Document]) -> None:
    app = quiet_app()
    register_tasks(app, "note")
    dead_letters = f"{database.name}_none"
    orders = Outbox(app, database["orders"], name="orders", sweep_every=None, database=dead_letters)
    Outbox(app, database["parcels"], name="parcels", sweep_every=None, database=dead_letters)
    orders.insert_one({"_id": 1}, tasks=[app.signature("note"), app.signature("note")])
    wait_for(lambda: not orders.status().pending)
    database["orders"].insert_one(field(3, 40, attempts=1))

    found = samples(app)

    assert found["up", "orders"] == found["up", "parcels"] == 1
    assert [found[name, "orders"] for name in ("documents", "pending", "failing_documents")] == [1, 3, 1]
    assert found["oldest_age_seconds", "orders"] >= 40
    assert (found["dispatched_total", "orders"], found["failures_total", "orders"]) == (2, 0)
    assert [found[name, "parcels"] for name in ("pending", "oldest_age_seconds", "dead_letters")] == [0, 0, 0]
    orders.runtime.close()


def test_a_server_that_does_not_answer_gives_no_stale_numbers(
    database: Database[Document], make_client: MakeClient
) -> None:
    """
    Its gauges are missing, the counters of this process are not.

    P12: nor is another outbox, though the app lacks a setting for a third.
    """
    app = quiet_app()

    def broken() -> Any:
        raise KeyError("MONGO_URL")

    Outbox(app, broken, name="bad", sweep_every=None)
    away = make_client(NOWHERE)
    dead_letters = f"{database.name}_none"
    there = Outbox(app, database["orders"], name="orders", sweep_every=None, database=dead_letters)
    Outbox(app, database["parcels"], name="parcels", sweep_every=None, database=dead_letters)
    database["orders"].insert_one(field(3, 40))
    assert samples(app)["pending", "orders"] == 3
    pending = PendingDocuments(away["shop"]["orders"], there.runtime.origin)
    there.runtime.__dict__.update(collection=away["shop"]["orders"], pending=pending)

    found = samples(app, 2.0)

    of_orders = {name for name, outbox in found if outbox == "orders"}
    counted = {"dispatched_total", "failures_total", "unsigned_total", "passed_over_total"}
    of_the_process = {*counted, "queued_documents", "broker_down"}
    assert of_orders == {"up", *of_the_process}
    assert [found["up", name] for name in ("orders", "bad", "parcels")] == [0, 0, 1]
    assert found["pending", "parcels"] == 0
