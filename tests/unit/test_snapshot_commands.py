"""What of `changes snapshot start` needs no server: conditions, progress, tokens, and its lines."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from typing import Any

import bson
import pytest
from bson import Timestamp
from celery import Celery

from mongo_celery import Bridge
from mongo_celery.bridge.existing import (
    dead_letter_name,
    event_bytes,
    is_existing,
    make_token,
    place_after_time,
    place_at_time,
)
from mongo_celery.bridge.handlers import Handler
from mongo_celery.bridge.operations.bridge_snapshot import to_plain
from mongo_celery.bridge.operations.snapshot_reader import shape
from mongo_celery.bridge.state.snapshots import Snapshot
from mongo_celery.cli.status_view import progress_line
from mongo_celery.errors import ConfigurationError
from tests.unit.test_status import NOON, facts, image, lease, serving, subscription

T = Timestamp(0x6B04C073, 0x49)


def handle(_change: Any) -> None:
    """A handler."""


def handler(**given: Any) -> Handler:
    bridge = Bridge(Celery("shop", set_as_current=False), "mongodb://nowhere", name="shop", autodiscover=False)
    bridge.on_change("shop.orders", **given)(handle)
    return bridge.handlers[0]


def test_a_token_lies_behind_all_events_of_its_time_and_before_all_later_ones() -> None:
    """Whatever the server puts behind the time of a token."""
    token = make_token(T, 7, 1)
    for kind in ("2904", "2B022C0100296E5A1004", "2B04", "FF" * 40):
        assert place_at_time(T) + kind < token < place_at_time(Timestamp(T.time, T.inc + 1)) + kind
        assert place_at_time(T) + kind < place_after_time(T) < token
    assert token < make_token(T, 7, 2) < make_token(T, 8, 1)
    assert is_existing(token)
    assert not is_existing(place_at_time(T) + "2B04")


def test_the_letter_of_an_existing_document_is_named_by_its_key_and_stands_first() -> None:
    """Read again it has another token; a change has its own as its name."""
    shaped = bson.encode({"ns": {"db": "a", "coll": "b"}, "documentKey": {"_id": 1}})
    first, again = make_token(T, 7, 1), make_token(Timestamp(T.time + 9, 1), 9, 5)
    assert (
        dead_letter_name(first, event_bytes(shaped, first))
        == dead_letter_name(again, event_bytes(shaped, again))
        < first
    )
    assert dead_letter_name(first, b"broken") == first
    assert dead_letter_name("82AA", event_bytes(shaped, first)) == "82AA"


def progress(snapshot: Snapshot, **changes: Any) -> dict[str, Any]:
    """The progress of a snapshot as the bridge's snapshot has it."""
    (found,) = shape(facts(snapshots=[snapshot], **changes)).snapshots
    plain: dict[str, Any] = to_plain(found)
    return plain


RUNNING = Snapshot(
    id="shop/summarise/a",
    subscription="summarise",
    source="a.b",
    done=500,
    estimated=2000,
    since=NOON,
    moved_at=NOON + dt.timedelta(seconds=10),
)


def test_progress_says_what_is_left() -> None:
    """At the rate of the way so far; what has ended leaves nothing."""
    found = progress(RUNNING)
    assert (found["per_second"], found["remaining_seconds"], found["reason"]) == (50.0, 30, None)
    assert progress_line(found) == "a.b for summarise: running, 500 of 2000 read (25%), 50/s, 30 s left"
    report = {"snapshots": [{"id": RUNNING.id, "attempts": 3, "error": "NetworkTimeout: no"}]}
    waiting = progress(RUNNING, lease=lease(report=report))
    assert waiting["reason"] == "tried 3 times: NetworkTimeout: no"
    new = progress(replace(RUNNING, done=0, estimated=None, moved_at=None))
    assert (new["per_second"], new["remaining_seconds"]) == (None, None)
    assert progress_line(new) == "a.b for summarise: running, 0 read"


def blocked(*states: str) -> dict[str, Any]:
    """Partitions of its handler in these states."""
    return {"images": [image(at, state=each) for at, each in enumerate(states)]}


LOST = {"since": NOON, "at": Timestamp(int(NOON.replace(tzinfo=dt.UTC).timestamp()), 1)}


@pytest.mark.parametrize(
    ("around", "words"),
    [
        (blocked("paused", "paused"), "2 paused"),
        (blocked("halted", "paused", "flowing"), "1 halted, 1 paused"),
        (blocked("halted", "flowing"), None),
        ({"subscriptions": [subscription(lost=LOST)]}, "has lost its history"),
        ({"lease": lease(**serving("bill"))}, "does not have its handler"),
        ({"lease": lease(live=False), "registered": ("bill",)}, "is not in this app"),
        ({"lease": lease(live=False)}, "no listener"),
    ],
)
def test_one_that_runs_and_does_not_move_says_why(around: dict[str, Any], words: str | None) -> None:
    """Then nobody knows how long the rest takes; what has ended waits for nobody."""
    found = progress(RUNNING, **around)
    assert (found["reason"] is None, found["remaining_seconds"]) == (words is None, 30 if words is None else None)
    assert (words or "") in (found["reason"] or "")
    assert progress(replace(RUNNING, state="done"), **around)["reason"] is None
    assert progress(replace(RUNNING, state="failed", sentence="no"), **around)["reason"] == "no"


def test_what_has_ended_is_current_for_an_hour() -> None:
    """What has failed stays until somebody acts. Those that are kept are all in the snapshot."""
    before = NOON - dt.timedelta(hours=2)
    old = [
        replace(RUNNING, id=state, source=f"shop.{source}", state=state, since=before, moved_at=before)
        for source, state in enumerate(("running", "done", "source gone", "stopped", "failed"))
    ]
    seen = shape(facts(snapshots=old))
    assert len(seen.snapshots) == len(old)
    assert [each.state for each in seen.current_snapshots] == ["running", "source gone", "failed"]
    replaced = shape(facts(snapshots=[old[-1], replace(old[1], source=old[-1].source)]))
    assert replaced.current_snapshots == []


def test_a_handler_that_asks_for_no_documents_begins_with_none() -> None:
    """And says so where it is asked for by itself; the operation is cannot be requested."""
    with pytest.raises(ConfigurationError, match="lack insert"):
        handler(operations={"drop"}, start_from="snapshot")
    with pytest.raises(ConfigurationError, match="cannot be requested"):
        handler(operations={"insert", "snapshot"})
    assert handler(operations={"update"}, start_from="snapshot").filter.takes_documents
    assert handler().filter.takes_every_change
    assert not handler(fields={"a"}).filter.takes_every_change
