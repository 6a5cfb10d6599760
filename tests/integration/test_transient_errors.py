"""A transient error of MongoDB in the middle of a term ends no term (P17), and nothing takes what is over for alive."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery import Bridge, Change
from mongo_celery.bridge.state.partitions import Partitions
from mongo_celery.bridge.state.subscriptions import Subscriptions
from mongo_celery.mongo.oplog import operation_time
from mongo_celery.testing.term import SteppedTerm, has_read_until
from tests.fixtures.failpoint import Failpoint
from tests.fixtures.process import wait_for
from tests.rig.term import around

Document = dict[str, Any]
APP = "transient"
HISTORY_LOST = {"failCommands": ["getMore"], "errorCode": 286, "appName": APP, "mode": {"times": 1}}

Make = Callable[..., SteppedTerm]


@pytest.fixture
def make(database: Database[Document], mongo_url: str, state_database: str) -> Make:
    def made(**options: Any) -> SteppedTerm:
        app = Celery("shop", broker="memory://", set_as_current=False)
        url = f"{mongo_url}&appName={APP}"
        bridge = Bridge(app, url, name="shop", database=state_database, autodiscover=False, **options)

        @bridge.on_change(f"{database.name}.orders", name="note")
        def note(_change: Change) -> None:
            """Handle nothing."""

        return SteppedTerm(bridge.wiring)

    return made


def turn_until(term: SteppedTerm, condition: Callable[[], object]) -> None:
    def turned() -> object:
        term.leader.turn()
        return condition()

    wait_for(turned, message=lambda: str(term.leader.report()))


def failing_once(client: MongoClient[Document], write: str = "update") -> Callable[[], None]:
    """Return what lets the next write of a kind fail in a term."""

    def arm() -> None:
        data = {"failCommands": [write], "errorCode": 50, "appName": APP}
        client.admin.command("configureFailPoint", "failCommand", mode={"times": 1}, data=data)

    return arm


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [vars(record).get("event", "") for record in caplog.records]


def test_lost_history_is_settled_after_an_error(
    make: Make,
    database: Database[Document],
    mongo_client: MongoClient[Document],
    failpoint: Failpoint,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """P17: the same term reads on, from where somebody has decided."""
    term = make(on_history_lost="oldest")
    with term.led():
        led = term.leader.subscriptions["note"]
        turn_until(term, lambda: has_read_until(term.leader, operation_time(mongo_client)))
        around(monkeypatch, (Subscriptions, "move_start"), failing_once(mongo_client))
        with failpoint(**HISTORY_LOST):
            turn_until(term, lambda: "history_unsettled" in events(caplog))
            database["orders"].insert_one({"_id": 1})
            turn_until(term, lambda: led.window.count == 1)
        assert not led.lost


def test_a_new_layout_is_prepared_after_an_error(
    make: Make,
    database: Database[Document],
    mongo_client: MongoClient[Document],
    failpoint: Failpoint,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """P17: reading where the stream is to be opened again ends no term."""
    caplog.set_level(logging.WARNING)
    before = make(partitions=1)
    with before.led():
        turn_until(before, lambda: has_read_until(before.leader, operation_time(mongo_client)))
    term = make(partitions=2)
    with failpoint(failCommands=["ping"], appName=APP), term.led():
        around(monkeypatch, (Partitions, "replace"), failing_once(mongo_client, "insert"))
        turn_until(term, lambda: "layout_failed" in events(caplog))
        database["orders"].insert_one({"_id": 1})
        turn_until(term, lambda: term.leader.subscriptions["note"].window.count == 1)
        assert term.leader.subscriptions["note"].plan.layout.partitions == 2


def test_a_reader_that_was_stopped_is_asked_nothing(
    make: Make, database: Database[Document], mongo_client: MongoClient[Document], failpoint: Failpoint
) -> None:
    """P16: where all have lost their history nothing is read, whatever was read before."""
    term = make()
    with term.led():
        led = term.leader.subscriptions["note"]
        database["orders"].insert_one({"_id": 1})
        turn_until(term, lambda: led.window.count == 1)
        place = operation_time(mongo_client)
        turn_until(term, lambda: has_read_until(term.leader, place))
        with failpoint(**HISTORY_LOST):
            turn_until(term, lambda: led.lost)
        assert led.window.count == 1, "it runs, since it was read"
        assert not has_read_until(term.leader, place)
        assert term.leader.report()["unreadSeconds"] == 0
