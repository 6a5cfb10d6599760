"""Handlers that are stopped alone: one whose layout is by a rule that is gone, one whose `match` the server refuses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
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
    return event["documentKey"]["_id"]


def moved(_change: Change) -> None:
    """Handle nothing."""


def other(_change: Change) -> None:
    """Handle nothing."""


def third(_change: Change) -> None:
    """Handle nothing."""


def lead(bridge: Bridge, until: Callable[[BridgeSnapshot], object]) -> BridgeSnapshot:
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


# -- a `match` that the server refuses -------------------------------------------------------------


REFUSED = {"$gt": 3}
CORRECT = {"$gt": ["$fullDocument.total", 3]}


def first(change: Change) -> None:
    """Do nothing."""


def second(change: Change) -> None:
    """Do nothing."""


class Shop:
    """A bridge with two handlers, whose runs nobody takes."""

    def __init__(self, database: Database[Document], state: str, mongo_url: str, redis_url: str) -> None:
        self.orders = database["orders"]
        self._made = mongo_url, redis_url, state

    def bridge(self, *matches: Mapping[str, Any] | None) -> Bridge:
        mongo_url, redis_url, state = self._made
        app = Celery("refusals", broker=redis_url, set_as_current=False)
        bridge = Bridge(app, mongo_url, name="shop", database=state, start_from="now", autodiscover=False)
        for handler, match in zip((first, second), matches, strict=True):
            bridge.on_change(self.orders.full_name, match=match)(handler)
        return bridge

    @contextmanager
    def led(self, *matches: Mapping[str, Any] | None) -> Iterator[Bridge]:
        bridge = self.bridge(*matches)
        with closing(bridge.client), listening(bridge):
            wait_for(lambda: (bridge.wiring.store.leases.read() or {}).get("report") is not None)
            yield bridge


@pytest.fixture
def shop(database: Database[Document], state_database: str, mongo_url: str, redis_url: str) -> Shop:
    database.create_collection("orders")
    return Shop(database, state_database, mongo_url, redis_url)


def _sent(bridge: Bridge) -> int:
    """How many runs are under way, one of each handler at most."""
    return int(read_snapshot(bridge.wiring).in_flight or 0)


def _refused(bridge: Bridge) -> dict[str, str]:
    found = read_snapshot(bridge.wiring).handlers
    return {each.name: str(each.error) for each in found if each.state == "match_refused"}


def test_a_refused_match_stops_its_own_handler_and_is_named(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """P9, P12: it ended the listener of all. P1: what came meanwhile comes once it is corrected."""
    with shop.led(None, REFUSED) as bridge:
        shop.orders.insert_one({"_id": 1, "total": 5})
        wait_for(lambda: _sent(bridge) == 1, 15)
        status = read_snapshot(bridge.wiring)
        (reason,) = [each for each in status.findings if each.code == "match_refused"]
        assert reason.severity == "failing"
        assert "second" in reason.sentence
        assert {each.name: each.state for each in status.handlers}["second"] == "match_refused"
        (record,) = [each for each in caplog.records if getattr(each, "event", None) == "match_refused"]
        assert record.__dict__["handler"] == "second"
    with shop.led(None, CORRECT) as bridge:
        wait_for(lambda: _sent(bridge) == 2, 15)
        assert not _refused(bridge)


def test_where_every_match_is_refused_the_listener_says_so_and_stays(shop: Shop) -> None:
    with shop.led(REFUSED, {"$nothing": []}) as bridge:
        assert sorted(_refused(bridge)) == ["first", "second"]
        shop.orders.insert_one({"_id": 1, "total": 5})
    with shop.led(None, CORRECT) as bridge:
        wait_for(lambda: _sent(bridge) == 2, 15)


def test_a_test_with_the_runner_fails_by_it(shop: Shop) -> None:
    with pytest.raises(StreamRefusedError, match="second"), BridgeRunner(shop.bridge(None, REFUSED)):
        """Nothing comes."""
