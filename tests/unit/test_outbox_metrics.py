"""The status of outboxes, and their Prometheus metrics."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery
from prometheus_client import CollectorRegistry
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery import Outbox
from mongo_celery.broker.server_check import check_broker
from mongo_celery.outbox.pending import FIELD
from mongo_celery.outbox.pending_documents import PendingDocuments
from mongo_celery.outbox.prometheus import OutboxCollector
from mongo_celery.outbox.replay import next_id
from mongo_celery.outbox.runtime import OutboxStatus
from tests.fixtures.mongo import MakeClient
from tests.fixtures.process import wait_for

Document = dict[str, Any]

NOWHERE = "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=300"
QUIET = OutboxStatus(
    outbox="shop.orders",
    documents=0,
    pending=0,
    oldest_seconds=None,
    failing=0,
    dead_letters=0,
    dispatched=0,
    failures=0,
)


def quiet_app() -> Celery:
    return Celery("metrics", broker="memory://")


def field(count: int, seconds: float, **entry: Any) -> Document:
    """A document's entries, the oldest written so long ago."""
    at = datetime.now(UTC) - timedelta(seconds=seconds)
    events = [{"id": f"e{number}", "at": at, "attempts": 0, **entry} for number in range(count)]
    return {FIELD: {"count": count, "events": events}}


# -- status ----------------------------------------------------------------------------------------


def test_a_status_counts_documents_entries_ages_and_failures(database: Database[Document]) -> None:
    """By the server's clock; a document without entries counts nothing."""
    orders = database["orders"]
    outbox = Outbox(quiet_app(), orders, sweep_every=None, database=f"{database.name}_none")
    assert outbox.status() == replace(QUIET, outbox=orders.full_name)

    orders.insert_many([field(2, 30), field(1, 100, attempts=2), field(0, 0), {"plain": True}])

    found = outbox.status()
    assert (found.documents, found.pending, found.failing) == (2, 3, 1)
    assert found.oldest_seconds is not None
    assert 100 <= found.oldest_seconds < 130


def test_an_age_is_never_negative_and_a_damaged_entry_hides_none(database: Database[Document]) -> None:
    """A writer's clock may be ahead, and others may write to the field: status says what can be said."""
    orders = database["orders"]
    outbox = Outbox(quiet_app(), orders, sweep_every=None, database=f"{database.name}_none")
    orders.insert_one(field(1, -60))
    assert outbox.status().oldest_seconds == 0

    orders.insert_many([{FIELD: {"count": 1, "events": [{"at": "noon"}]}}, {FIELD: {"count": 1, "events": "none"}}])
    orders.insert_one(field(1, 50))

    found = outbox.status()
    assert (found.documents, found.pending) == (4, 4)
    assert found.oldest_seconds is not None
    assert found.oldest_seconds >= 50


@pytest.mark.parametrize(
    "url", ["redis://:secret@127.0.0.1:1/0", "nonsense://:secret@127.0.0.1/", "amqp://a:secret@:x"]
)
def test_a_broker_that_cannot_be_asked_is_told_without_its_password(url: str) -> None:
    """Away, of an unknown kind, or no URL at all."""
    (answer,) = check_broker(Celery("away", broker=url))
    assert answer.severity == "failing"
    assert "secret" not in answer.sentence
    assert check_broker(quiet_app())[0].severity == "ok"


def test_the_id_of_a_replayed_entry_counts_on() -> None:
    """The same dead letter always gets the same, however often it is asked for."""
    assert next_id("a-b") == next_id("a-b") == "a-b~1"
    assert next_id("a-b~1") == "a-b~2"
    assert next_id("a~b") == "a~b~1"


# -- prometheus ------------------------------------------------------------------------------------


def samples(app: Celery) -> dict[tuple[str, str], float]:
    """What a scrape finds, by metric and outbox."""
    registry = CollectorRegistry(auto_describe=True)
    registry.register(OutboxCollector(app, answer_seconds=2.0))
    return {
        (sample.name.removeprefix("mongo_celery_outbox_"), sample.labels["outbox"]): sample.value
        for metric in registry.collect()
        for sample in metric.samples
    }


def test_a_scrape_finds_gauges_and_counters_for_each_outbox(database: Database[Document]) -> None:
    """Gauges of the collection, counters of this process."""
    app = quiet_app()

    @app.task(shared=False)
    def note(number: int) -> None:
        """Any task."""

    dead_letters = f"{database.name}_none"
    orders = Outbox(app, database["orders"], name="orders", sweep_every=None, database=dead_letters)
    Outbox(app, database["parcels"], name="parcels", sweep_every=None, database=dead_letters)
    orders.insert_one({"_id": 1}, tasks=[note.s(1), note.s(2)])
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

    found = samples(app)

    of_orders = {name for name, outbox in found if outbox == "orders"}
    counted = {"dispatched_total", "failures_total", "unsigned_total", "passed_over_total"}
    of_the_process = {*counted, "queued_documents", "broker_down"}
    assert of_orders == {"up", *of_the_process}
    assert [found["up", name] for name in ("orders", "bad", "parcels")] == [0, 0, 1]
    assert found["pending", "parcels"] == 0


def test_registering_connects_to_nothing() -> None:
    """Registries ask what a collector will offer; the collection is opened by the first scrape."""
    app, opened = quiet_app(), []

    def collection() -> Any:
        opened.append(1)
        return MongoClient(NOWHERE)["shop"]["orders"]

    Outbox(app, collection, name="orders", sweep_every=None)
    CollectorRegistry(auto_describe=True).register(OutboxCollector(app))
    assert opened == []


def test_importing_the_outbox_does_not_need_prometheus() -> None:
    """It is an extra, and who lacks it is told its name."""
    code = (
        "import sys; sys.modules['prometheus_client'] = None; import mongo_celery.outbox.health\n"
        "try: import mongo_celery.outbox.prometheus\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "mongo-celery[metrics]" in done.stdout
