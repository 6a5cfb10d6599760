"""A handler whose layout is by a rule that no handler has any more is stopped, and nothing is looked up by its name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import bson
import pytest
from bson import Int64
from celery import Celery
from pymongo.database import Database
from pymongo.errors import AutoReconnect
from redis import Redis

from mongo_celery import Bridge, Change
from mongo_celery.bridge.operations.bridge_snapshot import BridgeSnapshot
from mongo_celery.bridge.operations.snapshot_reader import read_snapshot
from mongo_celery.bridge.state.dead_letters import PARKED, Place, dead_letter, keep_change
from mongo_celery.bridge.state.partitions import Partitions
from tests.fixtures.process import wait_for
from tests.rig.listener import listening
from tests.rig.term import around

Document = dict[str, Any]


def region(event: Mapping[str, Any]) -> Any:
    """The rule of before."""
    return event["documentKey"]["_id"]


def moved(_change: Change) -> None:
    """Handle nothing."""


def other(_change: Change) -> None:
    """Handle nothing."""


def third(_change: Change) -> None:
    """Handle nothing."""


def lead(bridge: Bridge, until: Callable[[BridgeSnapshot], object]) -> BridgeSnapshot:
    """Lead until the status fulfils a condition; the status then."""

    def found() -> BridgeSnapshot | None:
        status = read_snapshot(bridge.wiring)
        return status if status.leader and until(status) else None

    with listening(bridge):
        return wait_for(found)


@pytest.fixture
def bridge(database: Database[Document], mongo_url: str, redis_url: str, state_database: str) -> Callable[..., Bridge]:
    """Give a function that makes the bridge anew, from pairs of a handler and its rule, as a deploy does."""

    def make(*handlers: tuple[Callable[[Change], None], Any], **options: Any) -> Bridge:
        app = Celery("rules", broker=redis_url, set_as_current=False)
        made = Bridge(app, mongo_url, name="shop", database=state_database, autodiscover=False, **options)
        for handler, rule in handlers:
            made.on_change(f"{database.name}.items", partition_by=rule)(handler)
        return made

    return make


def test_a_handler_whose_rule_is_not_registered_is_stopped_alone(
    bridge: Callable[..., Bridge], database: Database[Document], state_database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """P9, P12, P16: it says so in log and verdict; the others are led, and so is it once its rule is there."""
    caplog.set_level(logging.ERROR, "mongo_celery.listener")

    lead(
        bridge((moved, region), (other, None)),
        lambda status: all(each.partitions for each in status.handlers),
    )
    partitions = database.client[state_database]["partitions"]
    partitions.update_many({"_id": {"$regex": "^shop/moved/"}}, {"$set": {"state": "paused"}})  # so it is not idle
    database["items"].insert_one({"_id": 1})

    status = lead(bridge((moved, None), (other, None)), lambda status: status.in_flight == 1)
    first, second = status.handlers
    assert (first.name, first.state) == ("moved", "stopped")
    assert second.state != "stopped"
    (reason,) = [each for each in status.findings if each.code == "stopped"]
    assert (reason.severity, f"{__name__}:region" in reason.sentence) == ("failing", True)
    told = [vars(record)["subscription"] for record in caplog.records if vars(record)["event"] == "handler_stopped"]
    assert told == ["moved"]
    alone = lead(bridge((moved, None)), lambda status: status.handlers[0].state == "stopped")
    assert alone.verdict == "failing"

    lead(
        bridge((moved, None), (other, None), (third, region)),
        lambda status: [bool(each.partitions) and each.state != "stopped" for each in status.handlers] == [True] * 3,
    )


def test_a_dead_letter_of_a_stopped_handler_is_replayed(
    bridge: Callable[..., Bridge], database: Database[Document], redis_url: str, state_database: str
) -> None:
    """P17: its parked keys have to be settled before it has other partitions."""
    lead(
        bridge((moved, region), (other, None), partitions=1),
        lambda status: all(each.partitions for each in status.handlers),
    )
    state, hash_ = database.client[state_database], 2
    partition = state["partitions"].find_one({"_id": {"$regex": "^shop/moved/"}}) or {}
    partitioning, fence = int(partition["partitioningTerm"]), int(partition["fencingToken"])
    parked = {"parkedKeys": [{"key": "k", "hash": Int64(hash_)}]}
    state["partitions"].update_one({"_id": partition["_id"]}, {"$set": parked})
    event: Document = {
        "_id": {"_data": "826B0C1EF5000000012B"},
        "operationType": "insert",
        "ns": {"db": database.name, "coll": "items"},
        "documentKey": {"_id": 1},
    }
    letter = dead_letter(
        bridge="shop",
        subscription="moved",
        token=event["_id"],
        key="k",
        kept=keep_change(bson.encode(event)),
        error="as asked",
        traceback="",
        attempts=1,
        place=Place(partitioning, 0, 1, fence, hash_),
        cause=PARKED,
    )
    state["dead_letters"].insert_one(letter)

    stopped = bridge((moved, None), (other, None), partitions=1)
    replays, broker = stopped.wiring.store.replays, Redis.from_url(redis_url)
    name = letter["_id"]
    assert replays.request(name, partitioning=partitioning, partition=0, hash_=hash_, over_newer=False) == "done"
    lead(stopped, lambda status: status.handlers[0].state == "stopped" and broker.llen("shop.0"))


def test_a_switch_without_an_answer_stops_no_other_handler_and_is_tried_again(
    bridge: Callable[..., Bridge], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P12: also before anything is read."""

    def logged() -> list[str]:
        return [vars(record).get("event", "") for record in caplog.records]

    def lose() -> None:
        message = "the answer is lost"
        raise AutoReconnect(message)

    lead(bridge((moved, region), (other, None)), lambda status: all(each.partitions for each in status.handlers))
    caplog.set_level(logging.INFO, "mongo_celery.listener")
    around(monkeypatch, (Partitions, "replace"), lose, behind=True)
    ended = {"layout_changed", "lease_lost"}
    lead(bridge((moved, None), (other, None)), lambda _: not ended.isdisjoint(logged()))
    assert [each for each in logged() if each in {"layout_failed", *ended}] == ["layout_failed", "layout_changed"]
