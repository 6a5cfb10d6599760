"""How status and check look, and that their modules cost nothing until a command runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from io import StringIO
from typing import Any

import pytest
from bson import Timestamp
from rich.console import Console, RenderableType

from mongo_celery.bridge.operations.findings import error, ok, warning
from mongo_celery.bridge.operations.status import shape
from mongo_celery.cli.check_view import check_view
from mongo_celery.cli.status_view import duration, needs_attention, status_view
from mongo_celery.mongo.oplog import Oplog
from tests.unit.test_status import LOST, SECOND, SERVED, facts, image, lease, subscription


def shown(view: RenderableType) -> str:
    text = StringIO()
    Console(file=text, width=160).print(view)
    return text.getvalue()


def halted() -> Mapping[str, Any]:
    stands = image(
        1,
        state="halted",
        retries=1,
        error="ValueError: bad [order]",
        head={"resumeToken": {"_data": "82CC"}, "key": "shop.orders insert 1"},
    )
    return shape(facts(images=[image(0), stands]))


def test_a_status_begins_with_a_summary() -> None:
    """One line says whether anything is wrong."""
    first = shown(status_view([shape(facts())], everything=False)).splitlines()[0]
    assert first == "shop: leading, lag 0 s, 0 outstanding, 0 buffered, 0 dead letters, oplog 60 min"


def test_only_partitions_that_need_attention_are_shown() -> None:
    """Sixteen that flow say nothing; markup in an error is just text."""
    text = shown(status_view([halted()], everything=False))
    assert "stands at shop.orders insert 1; 1 retry; ValueError: bad [order]" in text
    assert "shop.1" in text
    assert "shop.0" not in text
    assert "shop.0" in shown(status_view([halted()], everything=True))


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, False),
        ({"state": "paused"}, True),
        ({"due_in": 4.0}, True),
        ({"crashes": 1}, True),
        ({"retries": 1}, False),
        ({"claim": {"owner": "x", "first": 6, "last": 6, "until": None}, "live": True}, False),
        ({"claim": {"owner": "x", "first": 6, "last": 6, "until": None}, "live": False}, True),
    ],
)
def test_what_needs_attention(change: dict[str, Any], wanted: bool) -> None:
    """What stands still, has crashed, or has lost its claim."""
    partition = shape(facts(images=[image(0, **change)]))["partitions"][0]
    assert needs_attention(partition) is wanted


def test_a_listener_that_does_not_say_whose_handlers_it_serves_is_not_said_to_serve_none() -> None:
    """One of an earlier version."""
    silent = shown(status_view([shape(facts())], everything=False))
    assert "which does not say whose handlers it serves" in silent
    says = shown(status_view([shape(facts(lease=lease(**SERVED)))], everything=False))
    assert "serving 2 handlers of app shop" in says


def test_lost_history_is_told_with_the_command_that_decides() -> None:
    """And once somebody has, that it is decided; and before it is lost, how near that is."""
    lost = shown(status_view([shape(facts(subscriptions=[subscription(lost=LOST)]))], everything=False))
    assert "summarise has lost its history" in lost
    assert "changes go-on summarise --from oldest" in lost
    decided = {**LOST, "goOn": {"policy": "oldest"}}
    text = shown(status_view([shape(facts(subscriptions=[subscription(lost=decided)]))], everything=False))
    assert "it goes on (oldest)" in text
    late = facts(oplog=Oplog(Timestamp(SECOND - 6, 1), Timestamp(SECOND + 10, 1)), oplog_rolls=True)
    assert "62% of the oplog's window lie behind summarise" in shown(status_view([shape(late)], everything=False))


def test_failure_and_absence_are_told_in_words() -> None:
    """The error of the last term, and what to do when nobody leads."""
    text = shown(
        status_view([shape(facts(lease=lease(live=False, state="failed", error="no right")))], everything=False)
    )
    assert "shop: failed" in text
    assert "no right" in text
    assert "no listener" in text


def test_a_status_that_could_not_be_read_shows_the_error_alone() -> None:
    """`--watch` goes on while MongoDB is away."""
    text = shown(status_view([{"bridge": "shop", "state": "unknown", "error": "no answer"}], everything=False))
    assert text.split("\n")[:2] == ["shop: unknown", "  no answer"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0, "0 s"), (119.4, "119 s"), (120, "2 min"), (7200, "2 h"), (172_800, "2 d")],
)
def test_durations_read_as_people_say_them(seconds: float | None, text: str) -> None:
    """Two units of the next size are enough to use it."""
    assert duration(seconds) == text


def test_a_check_ends_with_a_verdict() -> None:
    """Levels, names, sentences, and how many are wrong."""
    text = shown(
        check_view("shop", [ok("topology", "fine"), warning("prefetch", "hm"), error("broker", "no [answer]")])
    )
    assert "no [answer]" in text
    assert text.rstrip().endswith("1 error, 1 warning.")
    assert "All is well." in shown(check_view("shop", [ok("topology", "fine")]))


@pytest.mark.parametrize("module", ["mongo_celery.cli.changes", "mongo_celery.cli.listener"])
def test_a_plug_in_imports_no_pymongo_and_no_rich(module: str) -> None:
    """`celery` loads all plug-ins at every start."""
    code = f"import sys, {module}; print([name for name in ('pymongo', 'bson', 'rich') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
