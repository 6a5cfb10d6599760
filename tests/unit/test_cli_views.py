"""How status and check look, and that their modules cost nothing until a command runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from io import StringIO
from typing import Any

import click
import pytest
from bson import Timestamp
from celery import Celery
from rich.console import Console, RenderableType

from mongo_celery import Bridge
from mongo_celery.bridge.operations.heads import Head
from mongo_celery.bridge.operations.overview import needs_attention
from mongo_celery.bridge.operations.reasons import failing as failing_reason
from mongo_celery.bridge.operations.status import shape
from mongo_celery.bridge.operations.verdict import BridgeVerdict, judge, unreadable
from mongo_celery.bridge.state.subscriptions import Layout
from mongo_celery.cli.check_view import check_view
from mongo_celery.cli.head_view import head_lines
from mongo_celery.cli.health import line_of
from mongo_celery.cli.status_view import status_view
from mongo_celery.cli.verdict_view import verdict_view
from mongo_celery.command_line import CommandLine
from mongo_celery.findings import degraded, failing, ok
from mongo_celery.mongo.oplog import Oplog
from mongo_celery.quantities import duration, size
from tests.unit.test_status import (
    GIB,
    IDLE_REPORT,
    LOST,
    MARK,
    NOON,
    SECOND,
    SERVED,
    facts,
    image,
    lease,
    serving,
    subscription,
)


def shown(view: RenderableType) -> str:
    text = StringIO()
    Console(file=text, width=160).print(view)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def view_of(status: Mapping[str, Any], *, everything: bool) -> RenderableType:
    return status_view([(status, judge(status))], everything=everything)


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
    first = shown(view_of(shape(facts()), everything=False)).splitlines()[0]
    assert first == "shop: leading, lag 0 s, 0 outstanding, 0 buffered, 0 dead letters, oplog 60 min"
    assert shown(view_of(shape(facts()), everything=False)).splitlines()[-2] == "shop is healthy"


def test_only_partitions_that_need_attention_are_shown() -> None:
    """Sixteen that flow say nothing; markup in an error is just text."""
    text = shown(view_of(halted(), everything=False))
    assert "stands at shop.orders insert 1; 1 retry; ValueError: bad [order]" in text
    assert "    summarise 1 halted: " in text
    assert "summarise 0" not in text
    assert "    summarise 0 flowing on shop.0, committed 5" in shown(view_of(halted(), everything=True))


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


def test_who_commits_inline_is_named() -> None:
    """In `--json` of each handler that is in the app; for people only where it is not the default."""
    stored = [subscription(), subscription("bill"), subscription("gone")]
    names = ("summarise", "bill")
    status = shape(facts(registered=names, subscriptions=stored, commits={"summarise": "chain", "bill": "inline"}))
    assert {each["name"]: each["commit"] for each in status["subscriptions"]} == {
        "summarise": "chain",
        "bill": "inline",
        "gone": None,
    }
    assert "  commit inline: bill\n" in shown(view_of(status, everything=False))
    assert "commit inline" not in shown(view_of(shape(facts(commits={"summarise": "chain"})), everything=False))


def test_the_listener_is_shown_with_its_app_and_the_number_of_its_handlers() -> None:
    """As the lease keeps them."""
    says = shown(view_of(shape(facts(lease=lease(**SERVED))), everything=False))
    assert "serving 2 handlers of app shop" in says


def test_the_last_lines_are_what_to_do() -> None:
    """Each reason with its command, on a line of its own that can be copied; in a terminal of 80 columns, too."""
    text = StringIO()
    status = halted()
    Console(file=text, width=80).print(
        status_view([(status, judge(status, (), CommandLine("shop")))], everything=False)
    )
    lines = text.getvalue().splitlines()
    assert lines[-1] == "    celery -A shop changes retry summarise 1"
    assert "shop is failing, for 1 reason:" in lines
    assert max(map(len, lines)) <= 80


def test_commands_are_told_as_the_person_types_them() -> None:
    """With what was given to `-A`; and with the bridge, where the app has several."""
    app = Celery("told")
    root = click.Context(click.Command("celery"))
    root.params = {"app": "shop.celery"}
    context = click.Context(click.Command("health"), parent=root)
    one = Bridge(app, "mongodb://nowhere", name="one").wiring
    assert line_of(context, one).changes("resume") == "celery -A shop.celery changes resume"
    Bridge(app, "mongodb://nowhere", name="two")
    assert (
        line_of(context, one).changes("resume", "orders") == "celery -A shop.celery changes resume orders --bridge one"
    )
    root.params = {"app": app}
    assert line_of(context, one).celery("listener") == "celery -A APP listener"
    root.info_name = "flask --app 'shop:create_app()' celery"
    assert line_of(context, one).changes("retry") == f"{root.info_name} changes retry --bridge one"


def test_a_long_command_is_neither_broken_nor_cut() -> None:
    """It is copied from there: whatever the width."""
    name = "notify_customers_of_every_change"
    reason = failing_reason("halted", "stands.", CommandLine("shop.of.the.north").on("retry", name, [3]))
    found = failing(reason.code, reason.sentence, reason.command)
    for view in (verdict_view(BridgeVerdict("shop", (reason,))), check_view("shop", [found])):
        text = StringIO()
        Console(file=text, width=40).print(view, crop=False)
        assert f"\n    {reason.command}\n" in text.getvalue()


def test_a_paused_handler_is_one_line_and_very_many_partitions_are_counted() -> None:
    """Nobody reads a line for each of 3 200 partitions; `--all` shows them."""
    paused = shape(facts(images=[image(index, state="paused") for index in (0, 1, 2, 7)]))
    text = shown(view_of(paused, everything=False))
    assert "    summarise 0-2, 7 paused\n" in text
    names = [f"handler_{number:03}" for number in range(200)]
    images = [replace(image(index, state="halted"), subscription=name) for name in names for index in range(16)]
    many = facts(
        lease=lease(**serving(*names)),
        registered=tuple(names),
        subscriptions=[subscription(name) for name in names],
        images=images,
    )
    lines = shown(view_of(shape(many), everything=False)).splitlines()
    assert len(lines) < 80
    assert "    and 180 more handlers; --all shows them" in lines
    assert "    and 3180 more partitions; --all shows them" in lines
    assert lines[-1] == "    celery -A APP changes retry"
    assert len(shown(view_of(shape(many), everything=True)).splitlines()) > 3400


def test_lost_history_is_told_with_the_command_that_decides() -> None:
    """And before it is lost, how near that is."""
    lost = shown(view_of(shape(facts(subscriptions=[subscription(lost=LOST)])), everything=False))
    assert "summarise has lost its history" in lost
    assert "changes reset summarise --to oldest" in lost
    late = facts(oplog=Oplog(Timestamp(SECOND - 6, 1), Timestamp(SECOND + 10, 1)), oplog_rolls=True)
    assert "62% of the oplog's window lie behind summarise" in shown(view_of(shape(late), everything=False))


def test_a_new_layout_is_told_with_what_it_waits_for() -> None:
    """P16: of which subscription, since when; the partitions in force stay those of before."""
    waits = "partition 3 is paused. Run: celery -A shop changes resume summarise 3"
    moving = {"subscription": "summarise", "partitions": 7, "since": NOON, "waits": waits}
    report = {**IDLE_REPORT, "moving": [moving]}
    stored = subscription(partitioning={"term": 5, "partitions": 2, "key": "blake2b-64:_id"})
    layouts = {"summarise": Layout(5, 2, "blake2b-64:_id")}
    status = shape(facts(lease=lease(report=report), subscriptions=[stored], layouts=layouts))
    (row,) = status["subscriptions"]
    assert (row["partitioning_term"], row["partitions"], row["new_layout"]["partitions"]) == (5, 2, 7)
    assert f"summarise changes to 7 partitions since {row['new_layout']['since'][:10]}" in shown(
        view_of(status, everything=False)
    )
    assert waits in shown(view_of(status, everything=False))


def test_failure_and_absence_are_told_in_words() -> None:
    """The error of the last term, and what to do when nobody leads."""
    text = shown(view_of(shape(facts(lease=lease(live=False, state="failed", error="no right"))), everything=False))
    assert "shop: failed" in text
    assert "no right" in text
    assert "no listener" in text


def test_a_status_that_could_not_be_read_shows_the_error_alone() -> None:
    """`--watch` goes on while MongoDB is away."""
    away = {"bridge": "shop", "state": "unknown", "error": "no answer"}
    text = shown(status_view([(away, unreadable("shop", "no answer"))], everything=False))
    assert text.splitlines() == [
        "shop: unknown",
        "shop is failing, for 1 reason:",
        "  state_unreadable: no answer",
    ]


def stored_view(share: float | None, count: int = 1, state: str = "flowing", **report: Any) -> str:
    """A status with something stored of some partitions, as it is printed."""
    reported = {} if share is None else {"spilledBytes": int(share * 8 * GIB), **report}
    images = [image(index, spilled=MARK, state=state) for index in range(count)]
    stored = {("summarise", index): index + 1 for index in range(count)}
    return shown(view_of(shape(facts(images=images, stored=stored, lease=lease(report=reported))), everything=False))


def test_what_is_stored_is_one_line_a_partition_the_largest_first() -> None:
    """P16: ten of them, and how many more; sizes and ages as people say them."""
    lines = stored_view(0.01, 12).splitlines()
    first = lines.index("  stored: 78 changes, 82 MiB of 8.0 GiB (1%)")
    assert lines[first + 1] == "    summarise 11: 12 changes, for 2 h: halted then, flowing now"
    assert lines[first + 10] == "    summarise 2: 3 changes, for 2 h: halted then, flowing now"
    assert lines[first + 11] == "    and 2 more partitions"
    assert "stored:" not in shown(view_of(shape(facts()), everything=True))
    assert "no more is stored: spill_bytes allows" in stored_view(0.1, spillWaits="spill_bytes allows no more")
    assert "what should be stored of it is not there" in stored_view(0.1, spillMissing=["summarise/0"])
    assert "for 2 h: halted\n" in stored_view(0.1, state="halted")


@pytest.mark.parametrize(("share", "color"), [(0.5, None), (0.75, "\x1b[33m"), (0.9, "\x1b[31m"), (1.0, "\x1b[31m")])
def test_a_bound_that_is_near_is_loud(*, share: float, color: str | None) -> None:
    """P12, P16: in a colour, and what happens at the bound."""
    text = StringIO()
    report = lease(report={"spilledBytes": int(share * 8 * GIB)})
    view = view_of(shape(facts(images=[image(0, spilled=MARK)], lease=report)), everything=False)
    Console(file=text, width=160, force_terminal=True, color_system="standard").print(view)
    (line,) = (each for each in text.getvalue().splitlines() if "stored:" in each)
    assert line.startswith(f"  {color or 'stored'}")
    assert ("the bound is reached" in line) is (share == 1.0)


def test_what_could_not_be_counted_is_said() -> None:
    """P16: no figure is made up."""
    text = shown(view_of(shape(facts(images=[image(0, spilled=MARK)])), everything=False))
    assert "stored: ? changes; no listener says how many bytes" in text
    assert "summarise 0: ? changes, for 2 h: halted then, flowing now" in text


STANDS = Head(
    "summarise",
    3,
    "halted",
    "shop.orders insert 7",
    "82CC",
    6,
    "ValueError: no",
    retries=2,
    crashes=1,
    since="2030-01-01T10:00:00+00:00",
    bytes=2048,
    event={"operationType": "insert", "fullDocument": {"_id": 7}},
)


def test_the_change_at_which_a_partition_stands_is_told_with_its_bytes() -> None:
    """All that an operator needs to decide; as much of the event as was asked for."""
    lines = list(head_lines(STANDS, None))
    assert lines[:5] == [
        "summarise, partition 3, halted at change 7: shop.orders insert 7",
        "  resume token: 82CC",
        "  halted by: ValueError: no",
        "  2 retries, 1 crash",
        "  stored since 2030-01-01 10:00:00 UTC, 2.0 KiB:",
    ]
    event = "\n".join(lines[5:])
    assert json.loads(event) == STANDS.event
    *cut, more = list(head_lines(STANDS, 10))[5:]
    assert "\n".join(cut) == event[:10]
    assert more == f"... and {len(event) - 10} characters more"


def test_bytes_that_are_not_stored_or_cannot_be_read_are_said_so() -> None:
    """P16: what is not there is not made up."""
    gone = replace(STANDS, state="parked", key=None, token=None, due_seconds=7200.0, bytes=None, event=None)
    lines = list(head_lines(gone, None))
    assert lines[0] == "summarise, partition 3, parked at change 7: its change is not known here"
    assert "due in 2 h" in lines[2]
    assert "its bytes are not stored; it waits since" in lines[-1]
    assert "base64" in list(head_lines(replace(STANDS, event=None, raw="AA=="), None))[-1]


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (12 << 20, "12 MiB"), (8 << 30, "8.0 GiB")],
)
def test_sizes_read_as_people_say_them(count: float | None, text: str) -> None:
    """In units of 1024, as the options are."""
    assert size(count) == text


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
        check_view(
            "shop",
            [ok("topology", "fine"), failing("broker", "no [answer]"), degraded("paused", "stands", "celery -A x y")],
        )
    )
    assert "no [answer]" in text
    assert text.index("fine") < text.index("stands") < text.index("\n    celery -A x y\n") < text.index("no [ans")
    assert text.rstrip().endswith("1 error, 1 warning.")
    assert "All is well." in shown(check_view("shop", [ok("topology", "fine")]))


@pytest.mark.parametrize("module", ["mongo_celery.cli.changes", "mongo_celery.cli.listener"])
def test_a_plug_in_imports_no_pymongo_and_no_rich(module: str) -> None:
    """`celery` loads all plug-ins at every start."""
    code = f"import sys, {module}; print([name for name in ('pymongo', 'bson', 'rich') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
