"""The snapshot of a bridge, shaped from hand-made documents: no server is needed."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bson import Timestamp
from bson.int64 import Int64

from mongo_celery.bridge.operations.bridge_facts import Facts, Registered
from mongo_celery.bridge.operations.bridge_snapshot import BridgeSnapshot, LeaderStatus
from mongo_celery.bridge.operations.snapshot_reader import shape
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.state.partitions import Image
from mongo_celery.mongo.oplog import Oplog
from tests.fixtures import samples

Document = dict[str, Any]

NOON = datetime(2030, 1, 1, 12)  # noqa: DTZ001 - naive, as the driver gives them
UTC_NOON = NOON.replace(tzinfo=UTC)
SECOND = int(NOON.replace(tzinfo=UTC).timestamp())
VERSION = Int64(7 << 20)
IDLE_REPORT = {"inFlight": 0, "buffered": 0, "caughtUp": True, "brokerDown": False}


def serving(*handlers: str, database: str = "shop", **changes: Any) -> Document:
    known = {name: {"task": f"shop.changes.{name}", "databases": [database], "digest": "1"} for name in handlers}
    return {"identity": {"app": "shop", "broker": None, "handlers": known, **changes}}


SERVED = serving("summarise", "bill")
WAITING = {"since": NOON, "cause": "AutoReconnect: away", "count": Int64(3)}


def lease(**changes: Any) -> Document:
    """A lease that is held and has been renewed once, read ten seconds after noon."""
    renewed = changes.get("renewedAt", NOON + timedelta(seconds=3))
    age = None if renewed is None else (NOON + timedelta(seconds=10) - renewed) // timedelta(milliseconds=1)
    return {
        "_id": "shop",
        "listenerId": "5f0c",
        "term": VERSION,
        "live": True,
        "state": "leading",
        "host": "one",
        "pid": 42,
        "acquiredAt": NOON,
        "renewedAt": renewed,
        "renewedAge": age,
        "expiresAt": NOON + timedelta(seconds=13),
        "resumeToken": {"_data": "82AA"},
        "clusterTime": Timestamp(SECOND, 1),
        "report": IDLE_REPORT,
        **serving("summarise"),
        **changes,
    }


def subscription(name: str = "summarise", **changes: Any) -> Document:
    return {
        "_id": f"shop/{name}",
        "handler": name,
        "term": VERSION,
        "resumeToken": {"_data": "82BB"},
        "clusterTime": Timestamp(SECOND, 1),
        "startAtOperationTime": Timestamp(SECOND - 50, 1),
        **changes,
    }


def image(index: int = 0, **changes: Any) -> Image:
    seen = {"token": {"_data": "82BB"}, "data": "82BB", "committed": Int64(5), "fencing_token": Int64(9)}
    return samples.image(**{"index": index, "term": VERSION, **seen, **changes})


def facts(**changes: Any) -> Facts:
    calm = Facts(
        options=BridgeOptions(name="shop", partitions=2),
        registered={"summarise": Registered()},
        lease=lease(),
        subscriptions=[subscription()],
        images=[image(0), image(1)],
        dead_letters={},
        now=Timestamp(SECOND + 10, 1),
        oplog=Oplog(Timestamp(SECOND - 3590, 1), Timestamp(SECOND + 10, 1)),
    )
    if not isinstance(changes.get("registered", {}), dict):
        changes["registered"] = {name: Registered() for name in changes["registered"]}
    return replace(calm, **changes)


def test_a_bridge_that_nobody_has_started_says_so() -> None:
    first = {"_id": "shop", "term": VERSION, "live": False}  # a listener is about to lead
    for nothing in (None, first, lease(live=False, listenerId=None, acquiredAt=None, renewedAt=None, report=None)):
        status = shape(facts(lease=nothing, subscriptions=[], images=[]))
        assert (status.state, status.leader, status.lag_seconds) == ("never_started", None, None)
        assert [each.state for each in status.handlers] == ["new"]


def test_a_live_listener_is_shown_and_an_old_error_is_not() -> None:
    """What ended an earlier term is past. One that was killed before its first report keeps no identity."""
    status = shape(facts(lease=lease(error="old", **SERVED, dropped={"forged": Int64(2)})))
    assert (status.dropped, status.state, status.error) == ({"forged": 2}, "leading", None)
    assert status.leader == LeaderStatus(
        host="one", pid=42, since=UTC_NOON, app="shop", handlers=("bill", "summarise"), changed=()
    )
    stored = {name: value for name, value in lease(report={}).items() if name != "identity"}
    status = shape(facts(lease=stored))
    assert (status.leader and status.leader.app, status.difference) == (None, None)


@pytest.mark.parametrize(
    ("images", "state", "led"),
    [
        ([image(0), image(1)], "flowing", "flowing"),
        ([image(0), image(1, due_in=5.0)], "retrying", "flowing"),
        ([image(0), image(1, state="paused")], "paused", "flowing"),
        ([image(0, state="paused"), image(1, state="halted")], "halted", "paused"),
        ([image(0, waiting=WAITING, due_in=2.5), image(1)], "waiting", "waiting"),
        ([image(0, waiting=WAITING, live=True), image(1)], "flowing", "flowing"),
    ],
)
def test_a_handler_is_in_the_state_of_its_worst_partition(images: list[Image], state: str, led: str) -> None:
    found = shape(facts(images=images))
    assert (found.handlers[0].state, found.handlers[0].partitions[0].state) == (state, led)
    assert found.caught_up is (state == "flowing"), "whatever the report says, which is some seconds old"
    assert not shape(facts(images=[image(0, stored=STORED), *images[1:]])).caught_up
    for unled in (lease(live=False), lease(**serving("bill"))):
        (handler,) = shape(facts(images=images, lease=unled)).handlers
        assert handler.state == ("not_led" if state == "flowing" else state)
        assert handler.partitions[0].state == ("not_led" if led == "flowing" else led)


@pytest.mark.parametrize(
    ("stored", "state"),
    [("idle", "no_listener"), ("leading", "no_listener"), ("failed", "failed"), ("history_lost", "history_lost")],
)
def test_a_lease_that_nobody_holds_shows_how_the_last_term_ended(stored: str, state: str) -> None:
    """A listener that was killed leaves `leading` behind: that is idle, too. Its handlers go on."""
    claim = {"owner": "x", "first": Int64(6), "last": Int64(6), "until": NOON, "ttl": Int64(10_000)}
    running = [image(0, claim=claim, live=True), image(1)]
    status = shape(facts(lease=lease(live=False, state=stored, error="why"), now=Timestamp(SECOND, 1), images=running))
    assert (status.state, status.error, status.leader) == (state, "why", None)
    assert status.unled_seconds == 7, "by the server's clock, since the time of an idle cluster stands still"
    assert (status.in_flight, status.buffered) == (1, 0)


FRESH = {"subscriptions": [subscription(resumeToken=None, clusterTime=None)]}
OLDER_TERM = {"subscriptions": [subscription(term=Int64(1))]}


@pytest.mark.parametrize(
    ("report", "changes", "lag"),
    [
        (IDLE_REPORT, {}, 0),  # a watermark is stored lazily where nothing happens; that is no lag
        ({**IDLE_REPORT, "buffered": 1}, {}, 10),
        ({**IDLE_REPORT, "inFlight": 1}, {}, 10),
        ({**IDLE_REPORT, "caughtUp": False}, {}, 10),
        (None, {}, 10),  # a new listener has not reported yet
        (IDLE_REPORT, OLDER_TERM, 10),  # a handler that the leading listener was not started with
        ({}, FRESH, 60),  # before the first watermark it counts from the start
    ],
)
def test_the_lag_counts_from_the_watermark_while_anything_is_left(
    report: Document | None, changes: Document, lag: int
) -> None:
    status = shape(facts(lease=lease(report=report), **changes))
    assert status.lag_seconds == lag
    assert status.buffered == (None if not report else report["buffered"])
    assert status.in_flight == (report or {}).get("inFlight", 0)


STORED = {"since": NOON, "reason": "halted", "to": "82EE"}


def token_of(age: int) -> Document:
    """A resume token of a change of so many seconds before the moment at which `facts` are read."""
    return {"_data": f"82{SECOND + 10 - age:08X}00000001"}


@pytest.mark.parametrize("led", [True, False])
@pytest.mark.parametrize(
    ("change", "oldest"),
    [
        ({"images": [image(0, state="halted", head={"resumeToken": token_of(780), "key": "a"})]}, {}),
        ({"images": [image(0, state="paused", stored=STORED)]}, {("summarise", 0): 780}),
        ({"images": [image(0, due_in=60.0, retries=1, stored=STORED)]}, {("summarise", 0): 780}),
        ({"images": [image(0, stored=STORED)]}, {("summarise", 0): 780}),
        ({"images": [image(0, stored={**STORED, "since": NOON - timedelta(seconds=770)})]}, {}),
    ],
    ids=["halted", "paused", "retrying", "flowing", "not looked up"],
)
def test_the_lag_is_the_age_of_the_oldest_change_that_nobody_has_handled(
    change: Document, oldest: Document, led: bool
) -> None:
    """P16: what is stored moves the watermark, and waits all the same; the room in the oplog is the watermark's."""
    found = {place: (token_of(age)["_data"], "a") for place, age in oldest.items()}
    changed = facts(**change, first=found) if led else facts(**change, first=found, lease=lease(live=False))
    status = shape(changed)
    (handler,), (partition,) = status.handlers, status.handlers[0].partitions
    assert [each.lag_seconds for each in (status, handler)] == [780, 780]
    assert partition.oldest_seconds == 780
    assert handler.oplog_left_seconds == (3600 if led else 3590)


def test_the_lag_of_the_bridge_is_the_largest_of_its_registered_subscriptions() -> None:
    late = subscription("audit", clusterTime=Timestamp(SECOND - 20, 1))
    moved = {"clusterTime": Timestamp(SECOND - 9000, 1), "startAtOperationTime": Timestamp(1, 1)}
    stored = [subscription(), late, subscription("retired", term=Int64(1), **moved)]
    held = lease(report={**IDLE_REPORT, "buffered": 3}, **serving("audit", "summarise"))
    status = shape(facts(registered=("audit", "fresh", "summarise"), subscriptions=stored, lease=held))
    assert {each.name: (each.state, each.lag_seconds) for each in status.handlers} == {
        "audit": ("flowing", 30),
        "fresh": ("new", None),
        "retired": ("unregistered", 9010),
        "summarise": ("flowing", 10),
    }
    assert status.lag_seconds == 30


def test_a_status_is_plain_json() -> None:
    claim = {"owner": "x", "first": Int64(6), "last": Int64(7), "until": NOON, "ttl": Int64(10_000)}
    full = image(0, claim=claim, live=True, handled={"owner": "x", "last": Int64(7), "resumeToken": {"_data": "82CC"}})
    gap = {"from": Timestamp(SECOND - 9, 1), "until": Timestamp(SECOND, 1), "policy": "oldest", "error": "rolled"}
    status = shape(facts(subscriptions=[subscription(gaps=[gap])], images=[full]))
    plain = status.plain()
    assert json.loads(json.dumps(plain)) == plain
    (handler,) = plain["handlers"]
    assert handler["gaps"][0]["policy"] == "oldest"
    assert handler["partitions"][0]["claim"]["until"] == handler["gaps"][0]["until"] == "2030-01-01T12:00:00+00:00"
    assert set(plain) == {"verdict", *(each.name for each in fields(BridgeSnapshot))}
    assert type(plain["term"]) is int


LOST = {"since": NOON, "at": Timestamp(SECOND, 1), "oldest": Timestamp(SECOND + 5, 1), "error": "why"}


MARK = {"since": NOON - timedelta(hours=2), "reason": "halted", "to": "82EE"}
GIB = 1 << 30
