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
from mongo_celery.bridge.operations.bridge_snapshot import (
    BacklogStatus,
    BridgeSnapshot,
    LeaderStatus,
    PartitionStatus,
    StoredChanges,
)
from mongo_celery.bridge.operations.snapshot_reader import shape
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.state.partitions import Image, visible_state
from mongo_celery.bridge.state.snapshots import Snapshot
from mongo_celery.mongo.oplog import Oplog

Document = dict[str, Any]

NOON = datetime(2030, 1, 1, 12)  # noqa: DTZ001 - naive, as the driver gives them
UTC_NOON = NOON.replace(tzinfo=UTC)
SECOND = int(NOON.replace(tzinfo=UTC).timestamp())
VERSION = Int64(7 << 20)
IDLE_REPORT = {"inFlight": 0, "buffered": 0, "caughtUp": True, "brokerDown": False}


def serving(*handlers: str, database: str = "shop", **changes: Any) -> Document:
    """The part of a lease that names the handlers of its listener."""
    known = {name: {"task": f"shop.changes.{name}", "databases": [database], "digest": "1"} for name in handlers}
    return {"identity": {"app": "shop", "broker": None, "handlers": known, **changes}}


SERVED = serving("summarise", "bill")


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
    """A subscription of the term that leads, ten seconds behind `facts`' now."""
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
    """A partition that flows and has nothing to do."""
    flowing = Image(
        subscription="summarise",
        index=index,
        term=VERSION,
        committed=Int64(5),
        token={"_data": "82BB"},
        data="82BB",
        fencing_token=Int64(9),
        state="flowing",
        claim=None,
        live=False,
        handled=None,
        due_in=0.0,
        retries=0,
        crashes=0,
        error=None,
        one_by_one_until=0,
        head=None,
    )
    return replace(flowing, **changes)


def facts(**changes: Any) -> Facts:
    """A bridge whose listener has caught up."""
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
    """No document at all, and a document that only waits for its first acquisition."""
    unled = lease(live=False, listenerId=None, acquiredAt=None, renewedAt=None, report=None)
    first = {"_id": "shop", "term": VERSION, "live": False}  # a listener is about to lead
    assert shape(facts(lease=first, subscriptions=[], images=[])).state == "never_started"
    for nothing in (None, {**unled, "term": Int64(0)}):
        status = shape(facts(lease=nothing, subscriptions=[], images=[]))
        assert status.state == "never_started"
        assert status.leader is None
        assert status.term == 0
        assert status.lag_seconds is None
        assert [each.state for each in status.handlers] == ["new"]


def test_a_snapshot_says_what_keeps_it() -> None:
    """Its handler does, or that nobody leads."""
    running = Snapshot(id="shop/summarise/a", subscription="summarise", source="shop.orders")
    paused = [image(0, state="paused"), image(1, state="paused")]
    for changes, words in (
        ({}, None),
        ({"images": paused}, "2 paused"),
        ({"lease": lease(live=False)}, "no listener is running"),
        ({"lease": lease(**serving("bill"))}, "does not have its handler"),
        ({"registered": (), "lease": lease(live=False)}, "is not in this app"),
        ({"subscriptions": [subscription(lost={"since": NOON, "at": Timestamp(SECOND, 1)})]}, "has lost its history"),
    ):
        (shown,) = shape(facts(snapshots=[running], **changes)).snapshots
        assert words in str(shown.reason) if words else shown.reason is None


def test_a_partition_has_the_queue_of_its_handlers_group() -> None:
    """Where this process has the handler; P16."""
    grouped = shape(facts(registered={"summarise": Registered(group="slow")}))
    assert [each.queue for each in grouped.handlers[0].partitions] == ["shop.slow.0", "shop.slow.1"]


@pytest.mark.parametrize(
    ("stored", "state"),
    [("idle", "no_listener"), ("leading", "no_listener"), ("failed", "failed"), ("history_lost", "history_lost")],
)
def test_a_lease_that_nobody_holds_shows_how_the_last_term_ended(stored: str, state: str) -> None:
    """A listener that was killed leaves `leading` behind: that is idle, too."""
    status = shape(facts(lease=lease(live=False, state=stored, error="why"), now=Timestamp(SECOND, 1)))
    assert (status.state, status.error, status.leader) == (state, "why", None)
    assert status.unled_seconds == 7, "by the server's clock, since the time of an idle cluster stands still"


def test_a_live_listener_is_shown_and_an_old_error_is_not() -> None:
    """What ended an earlier term is past."""
    status = shape(facts(lease=lease(error="old", **SERVED, dropped={"forged": Int64(2)})))
    assert status.dropped == {"forged": 2}
    assert status.state == "leading"
    assert status.error is None
    assert status.leader == LeaderStatus(
        host="one", pid=42, since=UTC_NOON, app="shop", handlers=("bill", "summarise"), changed=()
    )


def test_a_bridge_with_a_blocked_partition_has_not_caught_up() -> None:
    """P16: whatever the report says, which is some seconds old."""
    assert shape(facts()).caught_up
    for change in ({"state": "halted"}, {"due_in": 5.0}, {"stored": STORED}):
        assert not shape(facts(images=[image(0, **change), image(1)])).caught_up


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
    """Zero only for a listener that says that all is done."""
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


def test_nothing_flows_where_nobody_leads() -> None:
    """P16: one state for all views; what is blocked stays what it is. A leader leads only the handlers that it has."""
    states = [image(0), image(1, state="paused")]
    gone = shape(facts(lease=lease(live=False), images=states))
    assert [each.state for each in gone.handlers[0].partitions] == ["not_led", "paused"]
    for led in (lease(live=False), lease(**serving("bill"))):
        assert shape(facts(lease=led)).handlers[0].state == "not_led"
        assert shape(facts(lease=led, images=[])).handlers[0].state == "not_led"
    assert [each.state for each in shape(facts(images=states)).handlers[0].partitions] == ["flowing", "paused"]


def test_without_a_listener_claims_count_as_outstanding() -> None:
    """Handlers go on when their listener has ended."""
    claim = {"owner": "x", "first": Int64(6), "last": Int64(6), "until": NOON, "ttl": Int64(10_000)}
    running = image(0, claim=claim, live=True)
    status = shape(facts(lease=lease(live=False), images=[running, image(1)]))
    assert status.in_flight == 1
    assert status.buffered == 0
    assert status.lag_seconds == 10


def test_a_lease_that_keeps_no_identity_is_shown() -> None:
    """A listener that was killed before its first report: nothing is known of its app, and nothing differs."""
    stored = {name: value for name, value in lease(report={}).items() if name != "identity"}
    status = shape(facts(lease=stored))
    assert (status.leader and status.leader.app, status.difference) == (None, None)


def test_the_lag_of_the_bridge_is_the_largest_of_its_registered_subscriptions() -> None:
    """One that no handler serves is shown, but it will not move, so it is no lag."""
    late = subscription("audit", clusterTime=Timestamp(SECOND - 20, 1))
    moved = {"clusterTime": Timestamp(SECOND - 9000, 1), "startAtOperationTime": Timestamp(1, 1)}
    gone = subscription("retired", term=Int64(1), **moved)
    status = shape(
        facts(
            registered=("audit", "fresh", "summarise"),
            subscriptions=[subscription(), late, gone],
            lease=lease(report={**IDLE_REPORT, "buffered": 3}, **serving("audit", "summarise")),
        ),
    )
    assert {each.name: (each.state, each.lag_seconds) for each in status.handlers} == {
        "audit": ("flowing", 30),
        "fresh": ("new", None),
        "retired": ("unregistered", 9010),
        "summarise": ("flowing", 10),
    }
    assert status.lag_seconds == 30


@pytest.mark.parametrize(
    ("images", "state"),
    [
        ([image(0), image(1)], "flowing"),
        ([image(0), image(1, due_in=5.0)], "retrying"),
        ([image(0, state="paused"), image(1, due_in=5.0)], "paused"),
        ([image(0, state="paused"), image(1, state="halted")], "halted"),
    ],
)
def test_a_subscription_is_in_the_state_of_its_worst_partition(images: list[Image], state: str) -> None:
    """Halted needs a person, paused has one, parked goes on by itself."""
    assert shape(facts(images=images)).handlers[0].state == state


def test_a_partition_tells_all_that_an_operator_needs() -> None:
    """Claim, retry and head in plain values, tokens as their comparable part."""
    halted = image(
        1,
        state="halted",
        retries=2,
        crashes=1,
        error="ValueError: no",
        head={"resumeToken": {"_data": "82CC"}, "key": "shop.orders insert 1"},
    )
    letters = {"summarise": 2, "retired": 1}
    status = shape(facts(images=[halted, image(0)], dead_letters=letters))
    assert [each.partition for each in status.handlers[0].partitions] == [0, 1]
    assert status.dead_letters == 3
    assert status.handlers[0].dead_letters == 2
    shown = status.handlers[0].partitions[1]
    assert shown == PartitionStatus(
        partition=1,
        queue="shop.1",
        state="halted",
        committed=5,
        token="82BB",
        fencing_token=9,
        key="shop.orders insert 1",
        key_token="82CC",
        error="ValueError: no",
        retries=2,
        crashes=1,
    )


def test_a_status_is_plain_json() -> None:
    """With everything in it that the state can hold."""
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


def test_a_change_that_waits_for_infrastructure_is_told_from_a_parked_one() -> None:
    """P16: since when it waits, and for what; while it runs once more, its partition flows."""
    waiting = {"since": NOON, "cause": "AutoReconnect: away", "count": Int64(3)}
    status = shape(facts(images=[image(0, waiting=waiting, due_in=2.5), image(1)]))
    shown = status.handlers[0].partitions[0]
    assert (shown.state, status.handlers[0].state) == ("waiting", "waiting")
    told = shown.since, shown.error, shown.waits, shown.due_seconds
    assert told == (UTC_NOON, "AutoReconnect: away", 3, 2.5)
    assert visible_state(image(0, waiting=waiting, live=True)) == "flowing"
    assert visible_state(image(0, waiting=waiting, state="paused")) == "paused"
    assert visible_state(image(0, due_in=2.5)) == "retrying"


LOST = {"since": NOON, "at": Timestamp(SECOND, 1), "oldest": Timestamp(SECOND + 5, 1), "error": "why"}


def test_a_subscription_that_has_lost_its_history_says_so() -> None:
    """P16: also beside a listener that has read everything that it can; and only as long as it stands there."""
    (shown,) = shape(facts(subscriptions=[subscription(lost=LOST)])).handlers
    assert (shown.state, shown.lag_seconds) == ("history_lost", 10)
    assert shown.lost is not None
    assert (shown.lost.at, shown.lost.oldest) == (UTC_NOON, UTC_NOON + timedelta(seconds=5))
    (elsewhere,) = shape(facts(subscriptions=[subscription(lost={**LOST, "at": Timestamp(1, 1)})])).handlers
    assert (elsewhere.state, elsewhere.lost) == ("flowing", None)


REACHES_BACK = Oplog(Timestamp(SECOND - 30, 1), Timestamp(SECOND + 10, 1))
AHEAD = Oplog(Timestamp(SECOND + 9, 1), Timestamp(SECOND + 13, 1))
BEGUN_SINCE = Oplog(Timestamp(SECOND, 5), Timestamp(SECOND + 100, 1))


@pytest.mark.parametrize(
    ("rolls", "oplog", "share"),
    [
        (True, REACHES_BACK, 0.25),
        (False, REACHES_BACK, None),
        (True, None, None),
        (True, AHEAD, 3.25),
        (True, BEGUN_SINCE, 1.0),
    ],
)
def test_the_share_of_the_oplog_that_lies_behind_a_subscription(
    *, rolls: bool, oplog: Oplog | None, share: float | None
) -> None:
    """P16: as `check` counts it; unknown where the oplog cannot be read, and none where it removes nothing."""
    for report in ({}, IDLE_REPORT):  # a listener that has caught up has no more behind it on a restart than is stored
        stands = shape(facts(lease=lease(report=report), oplog=oplog, oplog_rolls=rolls))
        assert stands.handlers[0].oplog_share == share


MARK = {"since": NOON - timedelta(hours=2), "reason": "halted", "to": "82EE"}
GIB = 1 << 30
STORING = {
    **IDLE_REPORT,
    "storedBytes": 6 * GIB,
    "storingWaits": "spill_bytes allows no more",
    "storedMissing": ["summarise/1"],
}


def test_what_is_stored_is_shown_of_partitions_and_handlers_and_beside_the_bound() -> None:
    """P13, P16: how many changes, since when and why; and what the collection takes."""
    halted, parked = image(1, state="halted", stored=MARK), image(0, due_in=9.0, stored={**MARK, "reason": "parked"})
    stored = {("summarise", 1): 40, ("summarise", 0): 30}
    status = shape(facts(lease=lease(report=STORING), images=[parked, halted], stored=stored))
    halted_one, parked_one = status.handlers[0].partitions[1].stored, status.handlers[0].partitions[0].stored
    assert halted_one == StoredChanges(
        count=40, since=UTC_NOON - timedelta(hours=2), reason="halted", to="82EE", missing=True
    )
    assert parked_one is not None
    assert (parked_one.count, parked_one.missing, status.handlers[0].stored) == (30, False, 70)
    assert status.backlog == BacklogStatus(
        count=70, bytes=6 * GIB, limit=8 * GIB, share=0.75, waits="spill_bytes allows no more"
    )


def test_figures_that_nobody_knows_are_said_to_be_unknown() -> None:
    """P16: a listener may not have reported yet, and counting may take too long."""
    images = [image(0, stored=MARK), image(1, stored=MARK)]
    status = shape(facts(images=images, stored={("summarise", 0): 2}))
    assert status.backlog == BacklogStatus(count=None, bytes=None, limit=8 * GIB, share=None, waits=None)
    assert [each.stored and each.stored.count for each in status.handlers[0].partitions] == [2, None]
