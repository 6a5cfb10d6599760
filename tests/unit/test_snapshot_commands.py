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
from mongo_celery.bridge.operations.snapshot_progress import (
    Surroundings,
    named,
    progress_of,
    short_names,
    snapshots_shown,
)
from mongo_celery.bridge.state.snapshots import Snapshot
from mongo_celery.cli.snapshot_view import progress_line
from mongo_celery.command_line import CommandLine
from mongo_celery.errors import ConfigurationError
from tests.fixtures.samples import image

T = Timestamp(0x6B04C073, 0x49)
LED = Surroundings(is_led=True, registered={"copy"}, served={"copy"})
NOON = dt.datetime(2030, 1, 1, 12, tzinfo=dt.UTC)


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


def test_progress_says_what_is_left() -> None:
    """At the rate of the way so far; what has ended leaves nothing."""
    since, moved = NOON, NOON + dt.timedelta(seconds=10)
    running = Snapshot(
        id="shop/copy/a", subscription="copy", source="a.b", done=500, estimated=2000, since=since, moved_at=moved
    )
    found = progress_of(running, LED)
    assert (found["per_second"], found["remaining_seconds"], found["reason"]) == (50.0, 30, None)
    assert progress_line(found) == "a.b for copy: running, 500 of 2000 read (25%), 50/s, 30 s left"
    report = {"snapshots": [{"id": running.id, "attempts": 3, "error": "NetworkTimeout: no"}]}
    waiting = progress_of(running, replace(LED, report=report))
    assert waiting["reason"] == "tried 3 times in a row: NetworkTimeout: no"
    new = progress_of(Snapshot(id="shop/copy/b", subscription="copy", source="a.b"), LED)
    assert (new["per_second"], new["remaining_seconds"], progress_line(new)) == (
        None,
        None,
        "a.b for copy: running, 0 read",
    )


def standing(*states: str) -> Surroundings:
    """Partitions of its handler in these states."""
    return replace(LED, images=[image(subscription="copy", index=at, state=each) for at, each in enumerate(states)])


@pytest.mark.parametrize(
    ("around", "sentence"),
    [
        (standing("paused", "paused"), "waits: its handler is paused (`celery -A APP changes resume copy`)"),
        (
            replace(standing("paused"), line=CommandLine("shop", "eu")),
            "waits: its handler is paused (`celery -A shop changes resume copy --bridge eu`)",
        ),
        (standing("halted", "paused", "flowing"), "waits: 2 of 3 partitions of its handler stand (1 halted, 1 paused)"),
        (standing("halted", "flowing"), None),
        (
            replace(LED, lost={"copy"}),
            (
                "waits: its handler has lost its history: decide (`celery -A APP changes reset copy --to oldest` or "
                "`celery -A APP changes reset copy --to now`)"
            ),
        ),
        (replace(LED, served={"bill"}), "waits: the listener that leads does not have its handler"),
        (replace(LED, served=None), None),
        (replace(LED, served=None, registered={"bill"}), "waits: its handler is not in this app"),
        (replace(LED, served=None, is_led=False), "waits: nobody leads"),
    ],
)
def test_one_that_runs_and_does_not_move_says_why(around: Surroundings, sentence: str | None) -> None:
    """Then nobody knows how long the rest takes; what has ended waits for nobody."""
    moved = NOON + dt.timedelta(seconds=10)
    running = Snapshot(
        id="shop/copy/a", subscription="copy", source="a.b", done=500, estimated=2000, since=NOON, moved_at=moved
    )
    found = progress_of(running, around)
    assert (found["reason"], found["remaining_seconds"]) == (sentence, 30 if sentence is None else None)
    assert progress_line(found).endswith(f": {sentence}" if sentence else " left")
    assert progress_of(replace(running, state="done"), around)["reason"] is None
    assert progress_of(replace(running, state="failed", sentence="no"), around)["reason"] == "no"


def test_a_snapshot_has_as_much_of_a_name_as_tells_it_from_the_others() -> None:
    """Handlers that begin together have the same ends; whatever is shown is accepted, and more of it, too."""
    ids = ["shop/copy/pin-a", "shop/bill/pin-a", "shop/copy/3f2a"]
    names = short_names(ids)
    assert names == {ids[0]: "copy/pin-a", ids[1]: "bill/pin-a", ids[2]: "3f2a"}
    assert all([each for each in ids if named(each, names[one])] == [one] for one in ids)
    assert [each for each in ids if named(each, "pin-a")] == ids[:2]
    assert [each for each in ids if named(each, "copy/3f2a") or named(each, ids[1])] == ids[1:]
    assert not any(named(each, name) for each in ids for name in ("", "copy", "a", "shop/copy", "shop"))


def test_what_has_ended_is_shown_for_an_hour() -> None:
    """What has failed stays until somebody acts."""
    now = Timestamp(NOON + dt.timedelta(hours=2), 1)
    old: dict[str, Any] = {
        "id": "shop/copy/a",
        "subscription": "copy",
        "source": "a.b",
        "since": NOON,
        "moved_at": NOON,
    }
    states = ["running", "done", "source gone", "stopped", "failed"]
    shown = snapshots_shown([Snapshot(**{**old, "state": state}) for state in states], now, LED)
    assert [each.state for each in shown] == ["running", "source gone", "failed"]


def test_a_handler_that_asks_for_no_documents_begins_with_none() -> None:
    """And says so where it is asked for by itself; the operation is none of the stream's."""
    with pytest.raises(ConfigurationError, match="asks for none of insert"):
        handler(operations={"drop"}, start_from="snapshot")
    with pytest.raises(ConfigurationError, match="none of the stream's"):
        handler(operations={"insert", "snapshot"})
    assert handler(operations={"update"}, start_from="snapshot").filter.takes_documents
    assert handler().filter.takes_every_change
    assert not handler(fields={"a"}).filter.takes_every_change
