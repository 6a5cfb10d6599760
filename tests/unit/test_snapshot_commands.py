"""What of `changes snapshot start` needs no server: conditions, progress, tokens, and its lines."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from typing import Any

import pytest
from bson import Timestamp
from celery import Celery
from pymongo.errors import AutoReconnect

from mongo_celery import Bridge
from mongo_celery.bridge.existing import is_existing, make_token, place_after_time, place_at_time
from mongo_celery.bridge.handlers import Handler
from mongo_celery.bridge.listener.chunks import LEAST_ROWS, ROWS, ChunkFailedError
from mongo_celery.bridge.listener.snapshot_thread import ATTEMPTS_MAX, Attempts
from mongo_celery.bridge.operations.bridge_snapshot import to_plain
from mongo_celery.bridge.operations.snapshot_reader import shape
from mongo_celery.bridge.state.snapshots import Snapshot
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


def progress(snapshot: Snapshot, **changes: Any) -> dict[str, Any]:
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


def blocked(*states: str) -> dict[str, Any]:
    return {"images": [image(at, state=each) for at, each in enumerate(states)]}


LOST = {"since": NOON, "at": Timestamp(int(NOON.replace(tzinfo=dt.UTC).timestamp()), 1)}


@pytest.mark.parametrize(
    ("around", "words"),
    [
        (blocked("paused", "paused"), "2 paused"),
        (blocked("halted", "paused", "flowing"), "1 halted, 1 paused"),
        (blocked("halted", "flowing"), None),
        ({"subscriptions": [subscription(lost=LOST)]}, "history"),
        ({"lease": lease(**serving("bill"))}, "handler"),
        ({"lease": lease(live=False), "registered": ("bill",)}, "app"),
        ({"lease": lease(live=False)}, "listener"),
        ({"lease": lease(report={"snapshots": [{"id": RUNNING.id, "attempts": 3, "error": "no"}]})}, "3"),
    ],
)
def test_one_that_runs_and_does_not_move_says_why(around: dict[str, Any], words: str | None) -> None:
    found = progress(RUNNING, **around)
    assert found["per_second"] == 50.0
    assert (words or "") in (found["reason"] or "")
    assert (found["reason"] is None) is (words is None)
    if words is None:
        assert found["remaining_seconds"] == 30
        new = progress(replace(RUNNING, done=0, estimated=None, moved_at=None), **around)
        assert (new["per_second"], new["remaining_seconds"]) == (None, None)
    assert progress(replace(RUNNING, state="done"), **around)["reason"] is None
    assert progress(replace(RUNNING, state="failed", sentence="no"), **around)["reason"] == "no"


def test_a_handler_that_asks_for_no_documents_begins_with_none() -> None:
    for given in ({"operations": {"drop"}, "start_from": "snapshot"}, {"operations": {"insert", "snapshot"}}):
        with pytest.raises(ConfigurationError):
            handler(**given)
    assert handler(operations={"update"}, start_from="snapshot").filter.takes_documents
    assert handler().filter.takes_every_change
    assert not handler(fields={"a"}).filter.takes_every_change


def test_only_what_servers_answer_ends_a_snapshot() -> None:
    """An outage may last as long as it likes."""
    attempts, ended = Attempts(), list[bool]()
    reasons: list[Exception] = [AutoReconnect("no answer") for _ in range(3 * ATTEMPTS_MAX)]
    for why in reasons + [ChunkFailedError("blocked")] * ATTEMPTS_MAX:
        attempts.note_failure(why, "why")
        ended.append(attempts.errors >= ATTEMPTS_MAX)
    assert ended == [False] * (4 * ATTEMPTS_MAX - 1) + [True]


@pytest.mark.parametrize("seconds", [0.1, 0.6, 5.0])
def test_chunks_that_an_outage_has_made_small_grow_again_however_slow_the_workers_are(seconds: float) -> None:
    """P17: else a fault that has ended leaves chunks of one document."""
    attempts = Attempts()
    while attempts.rows > 1:
        attempts.note_failure(AutoReconnect("no answer"), "no answer")
    for _ in range(ROWS):
        attempts.adapt(seconds)
    assert attempts.rows >= LEAST_ROWS
