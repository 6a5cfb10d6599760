"""Handlers that are stopped alone: one whose layout is by a rule that is gone, one whose `match` the server refuses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import bson
import pytest
from bson import Int64
from celery import Celery
from pymongo.database import Database
from redis import Redis

from mongo_celery import Bridge, Change
from mongo_celery.bridge.operations.bridge_snapshot import BridgeSnapshot
from mongo_celery.bridge.operations.snapshot_reader import read_snapshot
from mongo_celery.bridge.state.dead_letters import PARKED, Place, dead_letter, keep_change
from mongo_celery.errors import StreamRefusedError
from mongo_celery.testing import BridgeRunner
from tests.fixtures.process import wait_for
from tests.rig.listener import listening

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


BY_REGION = {"partition_by": region}
REFUSED = {"match": {"$gt": 3}}
CORRECT = {"match": {"$gt": ["$fullDocument.total", 3]}}


def lead(bridge: Bridge, until: Callable[[BridgeSnapshot], object]) -> BridgeSnapshot:
    """Lead until the status fulfils a condition; the status then."""

    def found() -> BridgeSnapshot | None:
        status = read_snapshot(bridge.wiring)
        return status if status.leader and until(status) else None

    with closing(bridge.client), listening(bridge):
        return wait_for(found)


@pytest.fixture
def make(database: Database[Document], mongo_url: str, redis_url: str, state_database: str) -> Callable[..., Bridge]:
    """Give a function that makes the bridge anew, from handlers and their options, as a deploy does."""
    database.create_collection("items")

    def made(handlers: Mapping[Callable[[Change], None], Document], **options: Any) -> Bridge:
        app = Celery("rules", broker=redis_url, set_as_current=False)
        given = {"database": state_database, "start_from": "now", "autodiscover": False, **options}
        bridge = Bridge(app, mongo_url, name="shop", **given)
        for handler, of_handler in handlers.items():
            bridge.on_change(f"{database.name}.items", **of_handler)(handler)
        return bridge

    return made


def test_a_handler_whose_rule_is_not_registered_is_stopped_alone(
    make: Callable[..., Bridge], database: Database[Document], state_database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """P9, P12, P16: it says so in log and verdict; the others are led, and so is it once its rule is there."""
    caplog.set_level(logging.ERROR, "mongo_celery.listener")

    lead(make({moved: BY_REGION, other: {}}), lambda status: all(each.partitions for each in status.handlers))
    partitions = database.client[state_database]["partitions"]
    partitions.update_many({"_id": {"$regex": "^shop/moved/"}}, {"$set": {"state": "paused"}})  # so it is not idle
    database["items"].insert_one({"_id": 1})

    status = lead(make({moved: {}, other: {}}), lambda status: status.in_flight == 1)
    first, second = status.handlers
    assert (first.name, first.state) == ("moved", "stopped")
    assert second.state != "stopped"
    (reason,) = [each for each in status.findings if each.code == "stopped"]
    assert (reason.severity, f"{__name__}:region" in reason.sentence) == ("failing", True)
    told = [vars(each) for each in caplog.records if getattr(each, "event", None) == "handler_stopped"]
    assert [each["subscription"] for each in told] == ["moved"]
    alone = lead(make({moved: {}}), lambda status: status.handlers[0].state == "stopped")
    assert alone.verdict == "failing"

    lead(
        make({moved: {}, other: {}, third: BY_REGION}),
        lambda status: [bool(each.partitions) and each.state != "stopped" for each in status.handlers] == [True] * 3,
    )


def test_a_dead_letter_of_a_stopped_handler_is_replayed(
    make: Callable[..., Bridge], database: Database[Document], redis_url: str, state_database: str
) -> None:
    before = make({moved: BY_REGION, other: {}}, partitions=1)
    lead(before, lambda status: all(each.partitions for each in status.handlers))
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

    stopped = make({moved: {}, other: {}}, partitions=1)
    replays, broker = stopped.wiring.store.replays, Redis.from_url(redis_url)
    name = letter["_id"]
    assert replays.request(name, partitioning=partitioning, partition=0, hash_=hash_, over_newer=False) == "done"
    lead(stopped, lambda status: status.handlers[0].state == "stopped" and broker.llen("shop.0"))


# -- a `match` that the server refuses -------------------------------------------------------------


def test_a_refused_match_stops_its_own_handler_and_is_named(
    make: Callable[..., Bridge], database: Database[Document], caplog: pytest.LogCaptureFixture
) -> None:
    """P9, P12: it ended the listener of all. P1: what came meanwhile comes once it is corrected."""
    states = {"moved": "flowing", "other": "match_refused"}
    lead(
        make({moved: {}, other: REFUSED}), lambda status: {each.name: each.state for each in status.handlers} == states
    )
    database["items"].insert_one({"_id": 1, "total": 5})
    status = lead(make({moved: {}, other: REFUSED}), lambda status: status.in_flight == 1)
    (reason,) = [each for each in status.findings if each.code == "match_refused"]
    assert (reason.severity, "other" in reason.sentence) == ("failing", True)
    told = [record for record in caplog.records if getattr(record, "event", None) == "match_refused"]
    assert {vars(record)["handler"] for record in told} == {"other"}
    status = lead(make({moved: {}, other: CORRECT}), lambda status: status.in_flight == 2)
    assert [each.state for each in status.handlers] == ["flowing"] * 2


def test_where_every_match_is_refused_the_listener_says_so_and_stays(
    make: Callable[..., Bridge], database: Database[Document]
) -> None:
    """It has nothing to read, and no reason to be started again and again; its end is as quick as ever."""
    refused = make({moved: REFUSED, other: {"match": {"$nothing": []}}})
    lead(refused, lambda status: {each.state for each in status.handlers} == {"match_refused"})
    database["items"].insert_one({"_id": 1, "total": 5})
    lead(make({moved: {}, other: CORRECT}), lambda status: status.in_flight == 2)


def test_a_test_with_the_runner_fails_by_it(make: Callable[..., Bridge]) -> None:
    """P9: before anything is delivered."""
    with pytest.raises(StreamRefusedError, match="other"), BridgeRunner(make({moved: {}, other: REFUSED})):
        """Nothing comes."""
