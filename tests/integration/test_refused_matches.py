"""A `match` that the server refuses stops its own handler: the others go on, and nothing of it is lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import pytest
from celery import Celery
from pymongo.database import Database

from mongo_celery import Bridge, Change
from mongo_celery.bridge.operations.snapshot_reader import read_snapshot
from mongo_celery.errors import StreamRefusedError
from mongo_celery.testing import BridgeRunner
from tests.fixtures.process import wait_for
from tests.rig.listener import listening

Document = dict[str, Any]
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
        """As a deploy makes it anew."""
        mongo_url, redis_url, state = self._made
        app = Celery("refusals", broker=redis_url, set_as_current=False)
        bridge = Bridge(app, mongo_url, name="shop", database=state, start_from="now", autodiscover=False)
        for handler, match in zip((first, second), matches, strict=True):
            bridge.on_change(self.orders.full_name, match=match)(handler)
        return bridge

    @contextmanager
    def led(self, *matches: Mapping[str, Any] | None) -> Iterator[Bridge]:
        """Led by a listener of this process, once it leads."""
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
    """It has nothing to read, and no reason to be started again and again; its end is as quick as ever."""
    with shop.led(REFUSED, {"$nothing": []}) as bridge:
        assert sorted(_refused(bridge)) == ["first", "second"]
        shop.orders.insert_one({"_id": 1, "total": 5})
    with shop.led(None, CORRECT) as bridge:
        wait_for(lambda: _sent(bridge) == 2, 15)


def test_a_test_with_the_runner_fails_by_it(shop: Shop) -> None:
    """P9: before anything is delivered."""
    with pytest.raises(StreamRefusedError, match="second"), BridgeRunner(shop.bridge(None, REFUSED)):
        """Nothing comes."""
