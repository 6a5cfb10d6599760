"""`outbox status --check` on real servers: what can be wrong is put wrong, and found; and a writer without a sweep."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from celery import Celery
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery import Outbox, OutboxCollection
from mongo_celery.findings import Finding
from mongo_celery.outbox import health as module
from mongo_celery.outbox.health import read_health
from mongo_celery.outbox.pending import FIELD
from mongo_celery.outbox.registry import BaseOutbox
from mongo_celery.outbox.sweep_records import make_sweep_watch
from tests.fixtures.process import wait_for
from tests.fixtures.rights import UrlOf
from tests.fixtures.tasks import register_tasks

Document = dict[str, Any]


@pytest.fixture(autouse=True)
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INSPECT_SECONDS", 0.01)


@pytest.fixture
def outbox(database: Database[Document], state_database: str, redis_url: str) -> Iterator[Outbox]:
    app = Celery("shop", broker=redis_url)
    register_tasks(app, "mail")
    made = Outbox(app, database["orders"], at_once=False, database=state_database)
    yield made
    made.runtime.publisher.close()


def findings(outbox: BaseOutbox) -> dict[str, Finding]:
    (health,) = read_health(outbox.app, [outbox], thorough=True)
    return {each.code: each for each in health.findings}


def levels(found: dict[str, Finding]) -> dict[str, str]:
    return {
        name: each.severity for name, each in found.items() if each.severity != "ok" and not name.startswith("redis")
    }


def test_what_is_wrong_with_a_collection_is_found_and_nothing_is_created_by_looking(outbox: Outbox) -> None:
    assert levels(findings(outbox)) == {"collection": "degraded", "sweep": "failing"}
    assert outbox.collection.database.list_collection_names() == []
    outbox.collection.insert_one({"_id": 1, FIELD: {"count": 1, "events": "none"}})
    found = findings(outbox)
    assert levels(found)["index"] == "degraded"
    assert "pendingEvents.count" in found["index"].commands[0]

    outbox.sweep()
    found = findings(outbox)
    assert levels(found) == {"dead_letters": "degraded"}, "whatever was there may be somebody's"
    assert {"rights", "collection", "index", "sweep", "late", "broker"} <= found.keys()

    outbox.insert_one({"_id": 2}, tasks=[outbox.app.signature("mail")])
    changes = {f"{FIELD}.events.0.at": datetime(2020, 1, 1, tzinfo=UTC), f"{FIELD}.events.0.attempts": 1}
    outbox.collection.update_one({"_id": 2}, {"$set": changes})
    validator: Document = {"$jsonSchema": {"additionalProperties": False, "properties": {"_id": {}}}}
    outbox.collection.database.command("collMod", outbox.collection.name, validator=validator)
    degraded = dict.fromkeys(("dead_letters", "failing"), "degraded")
    assert levels(findings(outbox)) == {"validator": "failing", **degraded}, "that explains what is late"


def test_a_missing_right_is_named_and_the_rest_is_looked_at(
    database: Database[Document], state_database: str, redis_url: str, guarded_url: UrlOf
) -> None:
    with MongoClient[Document](guarded_url("bridge")) as client:
        orders = client[database.name]["orders"]
        outbox = Outbox(Celery("shop", broker=redis_url), orders, database=state_database)
        found = findings(outbox)
    assert found["rights"].severity == "failing"
    assert orders.full_name in found["rights"].sentence
    assert "state_unreadable" in found


def test_servers_that_are_away_are_findings(state_database: str) -> None:
    app = Celery("shop", broker="redis://:secret@127.0.0.1:1/0")
    with MongoClient[Document]("mongodb://hush:secret@127.0.0.1:1/?serverSelectionTimeoutMS=200") as client:
        found = findings(Outbox(app, client["shop"]["orders"], database=state_database))
    assert levels(found) == {"state_unreadable": "failing", "broker": "failing"}
    assert all("secret" not in each.sentence for each in found.values())


def test_an_outbox_of_transactions_is_looked_at_like_one_of_documents(
    database: Database[Document], state_database: str, redis_url: str
) -> None:
    app = Celery("shop", broker=redis_url)
    outbox = OutboxCollection(app, database["sent"], at_once=False, database=state_database)
    assert levels(findings(outbox)) == {"collection": "degraded", "sweep": "failing"}

    database.create_collection("sent")
    assert levels(findings(outbox)) == {"sweep": "failing"}

    outbox.sweep()
    assert levels(findings(outbox)) == {}


def test_a_writer_whose_entries_nobody_sweeps_says_so_until_somebody_does(
    outbox: Outbox, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its second write on, whoever carries it out, in a thread of its own; one without entries is none."""
    monkeypatch.setattr(outbox.runtime.watch, "_patience", 0.0)
    with caplog.at_level(logging.ERROR):
        outbox.insert_one({"_id": 0})
        outbox.insert_one({"_id": 1}, tasks=[outbox.app.signature("mail")])
        assert not caplog.records
        outbox.with_tasks({"_id": 2}, [outbox.app.signature("mail")])
        wait_for(lambda: caplog.records)

    assert [getattr(each, "event", "") for each in caplog.records] == ["nobody_sweeps"]

    def look_once(*, is_broker_down: bool) -> bool | None:
        watch = make_sweep_watch(lambda: "orders", lambda: outbox.runtime.sweeps, 5.0, lambda: is_broker_down)
        return watch.look()

    assert look_once(is_broker_down=True) is None, "beat can send no sweep then"
    outbox.sweep()
    assert look_once(is_broker_down=False) is True


def test_a_status_of_several_shows_those_that_can_be_read_and_names_the_other(outbox: Outbox) -> None:
    client: MongoClient[Document] = MongoClient("mongodb://127.0.0.1:1", serverSelectionTimeoutMS=100)
    away = Outbox(outbox.app, client["shop"]["orders"], name="away", sweep_every=None)
    unread, health = read_health(outbox.app, [away, outbox])
    assert (unread.name, unread.status, unread.findings[0].code) == ("away", None, "state_unreadable")
    assert health.status is not None
    assert make_sweep_watch(lambda: "away", lambda: away.runtime.sweeps, 5.0, lambda: False).look() is None
    away.runtime.close()
    client.close()
