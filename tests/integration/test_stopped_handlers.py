"""A handler whose layout is by a rule that no handler has any more is not led, and nothing is looked up by its name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
from celery import Celery
from pymongo.database import Database

from mongo_celery import Bridge, Change, LayoutError
from mongo_celery.bridge.operations.status import read_status
from mongo_celery.bridge.operations.verdict import judge
from mongo_celery.testing.term import SteppedTerm
from tests.fixtures.process import wait_for

Document = dict[str, Any]


def region(event: Mapping[str, Any]) -> Any:
    """The rule of before."""
    return event["documentKey"]["_id"]


def lead(bridge: Bridge, until: Any = None) -> Document:
    """Lead a term until something holds; the status then."""
    term = SteppedTerm(bridge.wiring)

    def turned() -> Document | None:
        term.turn()
        status = read_status(bridge.wiring)
        return status if status["listener"] is None or until is None or until(term, status) else None

    with term.led():
        return wait_for(turned)


def test_a_handler_whose_rule_is_not_registered_is_stopped_alone(
    database: Database[Document], mongo_url: str, state_database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """P9, P12, P16: it says so in log and verdict; the others are led, and lead it again once its rule is there."""
    caplog.set_level(logging.ERROR, "mongo_celery.listener")

    def bridge(**rules: Any) -> Bridge:
        made = Bridge(
            Celery("shop", broker="memory://"), mongo_url, name="shop", database=state_database, autodiscover=False
        )
        for name, rule in rules.items():

            def handle(_change: Change) -> None:
                """Handle nothing."""

            handle.__name__ = handle.__qualname__ = name
            made.on_change(f"{database.name}.items", name=name, partition_by=rule)(handle)
        return made

    lead(bridge(moved=region, other=None))
    partitions = database.client[state_database]["partitions"]
    partitions.update_many({"_id": {"$regex": "^shop/moved/"}}, {"$set": {"state": "paused"}})  # so it is not idle
    database["items"].insert_one({"_id": 1})

    status = lead(
        bridge(moved=None, other=None),
        lambda term, status: term.leader.subscriptions["other"].window.count and status["subscriptions"][0]["stopped"],
    )
    moved, other = status["subscriptions"]
    assert (moved["state"], other["state"], other["stopped"]) == ("stopped", "flowing", None)
    (reason,) = [each for each in judge(status).reasons if each.code == "stopped"]
    assert (reason.severity, f"{__name__}:region" in reason.sentence) == ("failing", True)
    told = [vars(record)["subscription"] for record in caplog.records if vars(record)["event"] == "handler_stopped"]
    assert told == ["moved"]
    with pytest.raises(LayoutError, match="region"):
        lead(bridge(moved=None))

    status = lead(
        bridge(moved=None, other=None, third=region),
        lambda term, _: term.leader.subscriptions["moved"].window.count,
    )
    assert [each["stopped"] for each in status["subscriptions"]] == [None, None, None]
