"""What status, `show` and `show --key` read of a real replica set, without any other process."""

from __future__ import annotations

import base64
import json
import os
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import bson
import pytest
from bson.binary import Binary
from bson.datetime_ms import DatetimeMS
from pymongo import MongoClient

from mongo_celery.bridge.change import FLAGS
from mongo_celery.bridge.operations.keys import find_key
from mongo_celery.bridge.operations.lookups import Whereabouts, read_blocked_change
from mongo_celery.bridge.operations.snapshot_reader import read_snapshot
from mongo_celery.bridge.state.backlog import StoredChange
from mongo_celery.bridge.state.dead_letters import FAILED, Place, dead_letter, iterate_forms
from mongo_celery.bridge.state.subscriptions import layouts_in_force
from mongo_celery.bridge.window import Refusal
from mongo_celery.errors import CommandRefusedError
from tests.integration.conftest import MakeBridge
from tests.rig.led import IDLE, NAME, LedBridge, stored_change, token

SOME_ID = '{"$oid": "6b0c1ef5aaaaaaaaaaaaaaaa"}'


def test_the_status_of_a_bridge_that_was_never_started_leaves_nothing_behind(
    make_bridge: MakeBridge, mongo_client: MongoClient[dict[str, Any]], state_database: str
) -> None:
    status = make_bridge().operations.read_status()
    assert (status.state, status.handlers[0].partitions) == ("never_started", ())
    assert (status.oplog_seconds or 0) >= 0
    assert state_database not in mongo_client.list_database_names()


def test_the_status_follows_lease_and_partitions(led: LedBridge) -> None:
    claim = led.run()
    shown: Any = led.partition()
    status: Any = led.operations.read_status()
    assert (status.state, status.term, status.leader.pid, status.in_flight) == ("leading", led.version, os.getpid(), 1)
    assert (shown.claim.live, shown.claim.owner, shown.fencing_token) == (True, claim.owner, claim.fencing_token)
    assert led.store.claims.park(claim, delay=3600, not_before=None, error="ConnectionError: later")
    shown = led.partition()
    assert (shown.state, 0 < shown.due_seconds <= 3600, shown.queue) == ("retrying", True, "shop.0")
    led.halt(index=1)
    assert led.operations.read_status().handlers[0].state == "halted"
    assert led.partition(1).key_token == token(1)["_data"]
    led.store.leases.release(led.term, "history_lost", "too late")
    status = led.operations.read_status()
    assert (status.state, status.error, status.leader) == ("history_lost", "too late", None)


def test_the_status_counts_what_is_stored_where_no_listener_says(storing: LedBridge) -> None:
    """P16: of the marked partitions; and how many bytes there are, as the listener says."""
    status: Any = storing.operations.read_status()
    (handler,), backlog = status.handlers, status.backlog
    shown = handler.partitions[0].stored
    assert (backlog.count, backlog.bytes, handler.stored) == (3, None, 3)
    assert (shown.count, shown.reason, shown.to, shown.missing) == (3, "halted", token(3)["_data"], False)
    assert shown.since
    age = int(status.at.timestamp()) - 1  # of the first one, by the time in its token
    assert status.lag_seconds == handler.lag_seconds == handler.partitions[0].oldest_seconds == age
    assert "backlog_missing" not in {each.code for each in status.findings}
    storing.report(storedBytes=900, storedLimit=1000)
    status = storing.operations.read_status()
    assert (status.backlog.count, status.backlog.bytes, status.backlog.share) == (3, 900, 0.9)
    status = read_snapshot(storing.bridge.wiring, counting=1e-6)
    assert status.backlog.count is None, "counting that takes too long is not known"


def test_a_status_finds_what_is_said_to_be_stored_and_is_not(storing: LedBridge) -> None:
    """P13: a state database of which only a part was restored; loud, and never taken for empty."""
    storing.state["backlog"].delete_many({})
    (missing,) = [each for each in storing.operations.read_status().findings if each.code == "backlog_missing"]
    assert (missing.severity, "summarise/0" in missing.sentence) == ("failing", True)


def test_the_change_at_which_a_partition_is_blocked_is_shown(storing: LedBridge) -> None:
    """P13: halted, or the first one that is stored; and where its bytes are not stored, that is all that is missing."""
    wiring = storing.bridge.wiring
    storing.park()
    first: Any = read_blocked_change(wiring, "summarise", 0)
    assert (first.status.state, first.token, first.key[-1]) == ("retrying", token(1)["_data"], "1")
    assert (first.error, first.status.retries, first.status.committed) == ("ConnectionError: later", 1, 0)
    assert (first.event["fullDocument"], first.raw) == ({"_id": 1, "note": "n" * 500}, None)
    assert first.since
    storing.halt(index=1)
    halted = read_blocked_change(wiring, "summarise", 1)
    assert (halted.token, halted.error) == (token(1)["_data"], "ValueError: no")
    assert (halted.bytes, halted.event) == (None, None)
    with pytest.raises(CommandRefusedError):
        read_blocked_change(wiring, "summarise", 2)
    storing.park(2)
    unknown = read_blocked_change(wiring, "summarise", 2)
    assert (unknown.status.state, unknown.key, unknown.token, unknown.bytes) == ("retrying", None, None, None)


def test_an_event_that_is_no_document_is_shown_as_bytes(storing: LedBridge) -> None:
    """P13: what a person has to repair is there, whatever it is; what the bridge has added to an event is not shown."""
    broken = StoredChange(token(4)["_data"], b"no document", token=token(4), refusal=Refusal("it cannot be read"))
    storing.store_changes(broken)
    storing.commit(3)
    head = read_blocked_change(storing.bridge.wiring, "summarise", 0)
    assert (head.error, head.bytes, head.event) == ("it cannot be read", 11, None)
    assert base64.b64decode(head.raw or "") == b"no document"
    odd = {"flags": float("nan"), "at": DatetimeMS(1 << 60), "uuid": Binary(b"u" * 16, 4)}
    storing.store_changes(stored_change(5, fullDocument=odd, **{FLAGS: {"a": True}}))
    storing.commit(4)
    event: Any = read_blocked_change(storing.bridge.wiring, "summarise", 0).event
    assert FLAGS not in event
    assert event["fullDocument"]["flags"] == {"$numberDouble": "NaN"}


def find(led: LedBridge, key: str) -> Whereabouts:
    return led.operations.find_document("summarise", key)


def hash_of(led: LedBridge, key: object) -> int:
    """The hash of a key as it is typed, by the rule that spreads the keys."""
    layout = layouts_in_force(led.store.subscriptions.read_all())["summarise"]
    return find_key(led.bridge.wiring, "summarise", layout, json.dumps(key), None)[1]


def test_a_key_is_found_with_what_holds_its_changes(storing: LedBridge) -> None:
    """P16: what is stored of it, and what blocks its partition; of another key nothing is said to be stored."""
    here, other = (next(str(key) for key in range(1000) if hash_of(storing, key) % 3 == index) for index in (0, 1))
    storing.store_changes(replace(stored_change(4), hash=hash_of(storing, int(here))))
    found = find(storing, here)
    assert (found.status.partition, found.stored, found.blocked, found.lasts) == (0, 1, False, False)
    assert (found.parked, found.dead_letters, found.running) == (False, (), False)
    storing.commit(3)
    claim = storing.run(number=4)
    assert ((found := find(storing, here)).running, found.stored) == (True, 0), "it is shown once"
    assert storing.store.claims.halt(claim, token(4), "shop.orders insert 4", "ValueError: no")
    found = find(storing, here)
    assert (found.status.state, found.blocked, found.stored, found.running) == ("halted", True, 0, False)
    assert ((found := find(storing, other)).status.partition, found.stored) == (1, 0)


def test_a_key_of_a_bridge_that_has_done_everything_is_handled_up_to_now(
    led: LedBridge, make_bridge: MakeBridge
) -> None:
    """P16: by the time of the reading; a listener's report speaks for its own handlers only."""
    led.report(**IDLE)
    found: Any = find(led, SOME_ID)
    assert (led.operations.read_status().lag_seconds, found.lasts, found.status.state) == (0, True, "flowing")
    assert abs((found.handled_until - datetime.now(UTC)).total_seconds()) < 60
    with pytest.raises(CommandRefusedError, match="summarise"):
        led.operations.find_document("summarize", "1")
    with pytest.raises(CommandRefusedError):
        led.operations.find_document("summarise", "1", source="shop.another")
    other = make_bridge(handler="bill").operations
    assert {each.name: each.state for each in other.read_status().handlers} == {
        "bill": "new", "summarise": "unregistered",
    }  # fmt: skip
    assert not other.find_document("summarise", "42", source="shop.orders").lasts


@pytest.mark.parametrize("left", [{"inFlight": 7}, {"buffered": 500}, {}])
def test_what_waits_in_memory_or_runs_is_not_called_handled(led: LedBridge, left: dict[str, int]) -> None:
    """P16: neither by `show --key`, nor by the status; also where the claim is newer than the report."""
    led.report(**{**IDLE, **left})
    if not left:
        led.run()
    status: Any = led.operations.read_status()
    found = find(led, SOME_ID)
    assert (status.caught_up, found.lasts) == (False, False)
    assert (status.in_flight, status.buffered) == (left.get("inFlight", 0), left.get("buffered", 0))
    assert found.handled_until is None or found.handled_until < status.reported_at


def test_a_dead_letter_of_a_key_is_found_by_the_rule_that_spreads_the_keys(led: LedBridge) -> None:
    """P16: with `partition_by` a key is no `_id`, and a text and a number that look alike are two keys."""
    kept = next(iterate_forms(bson.encode({"documentKey": {"_id": "another"}})))()
    told: Any = {"bridge": NAME, "subscription": "summarise", "key": "a change", "error": "no", "traceback": ""}
    for number, key in enumerate([42, "42"]):
        place = Place(1, 0, number, 1, hash_of(led, key))
        letter = dead_letter(**told, token=token(number), kept=kept, attempts=1, place=place, cause=FAILED)
        led.store.dead_letters.collection.insert_one(letter)
    (found,) = find(led, "42").dead_letters
    assert found.startswith(token(0)["_data"])
