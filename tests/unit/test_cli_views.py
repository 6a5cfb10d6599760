"""How snapshots and findings look on a terminal, and that their modules cost nothing until a command runs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from io import StringIO

import click
import pytest
from celery import Celery
from rich.console import Console, RenderableType

from mongo_celery import Bridge
from mongo_celery.bridge.operations.bridge_facts import Registered
from mongo_celery.bridge.operations.bridge_snapshot import (
    BridgeSnapshot,
    DeadLetterGroup,
    PartitionStatus,
    Standby,
    unreadable,
)
from mongo_celery.bridge.operations.judgement import judge
from mongo_celery.bridge.operations.lookups import BlockedChange
from mongo_celery.bridge.operations.snapshot_reader import shape
from mongo_celery.cli.apps import line_of
from mongo_celery.cli.findings_view import findings_view
from mongo_celery.cli.show import describe_blocked_change
from mongo_celery.cli.status_view import status_view
from mongo_celery.command_line import CommandLine
from mongo_celery.findings import degraded, failing, ok
from mongo_celery.quantities import duration, size
from tests.unit.test_status import (
    GIB,
    IDLE_REPORT,
    MARK,
    NOON,
    SERVED,
    UTC_NOON,
    facts,
    image,
    lease,
    serving,
    subscription,
)


def shown(view: RenderableType, width: int = 160) -> str:
    text = StringIO()
    Console(file=text, width=width).print(view, crop=False)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def view_of(*snapshots: BridgeSnapshot, everything: bool = False) -> str:
    return shown(status_view([judge(each, CommandLine("shop")) for each in snapshots], everything=everything))


def halted() -> BridgeSnapshot:
    head = {"resumeToken": {"_data": "82CC"}, "key": "shop.orders insert 1", "at": NOON}
    return shape(
        facts(images=[image(0), image(1, state="halted", retries=1, error="ValueError: bad [order]", head=head)])
    )


def test_a_status_begins_with_the_verdict_and_names_who_leads() -> None:
    """One line says whether anything is wrong."""
    calm = shape(facts(lease=lease(**SERVED, standbys=[{"host": "two", "pid": 7}])))
    assert calm.standbys == (Standby(host="two", pid=7),)
    lines = view_of(replace(calm, per_second=1.25)).splitlines()
    assert lines[:4] == [
        "shop: healthy",
        "  leader: one, pid 42, for 10 s, with 2 handlers of app shop",
        "  standby: two, pid 7",
        "  lag 0 s, 1.2 changes/s, 0 in flight, 0 buffered, 0 dead letters, oplog 60 min",
    ]
    assert lines[-1].endswith("celery -A shop changes status --ask")


def test_each_problem_is_shown_once_with_its_command() -> None:
    """On a line of its own that can be copied; markup in an error is just text; in 80 columns, too."""
    text = view_of(halted())
    assert text.startswith("shop: FAILING (1 problem)\n")
    assert text.count("ValueError: bad [order]") == text.count("shop.orders insert 1") == 1
    assert "\n    celery -A shop changes retry summarise 1\n" in text
    assert "summarise  halted (1 of 2)" in text
    narrow = shown(status_view([judge(halted(), CommandLine("shop"))], everything=False), 80)
    assert max(map(len, narrow.splitlines())) <= 80


def test_all_shows_every_partition() -> None:
    """With its queue, its number, and what runs there."""
    claim = {"owner": "vm:42:ab", "first": 6, "last": 6, "until": None}
    seen = shape(
        facts(images=[image(0, claim=claim), image(1, stored=MARK, due_in=90.0)], stored={("summarise", 1): 4})
    )
    text = view_of(seen, everything=True)
    assert "summarise/0 flowing: on shop.0, committed 5, 6-6 no longer running" in text
    assert "summarise/1 retrying: on shop.1, committed 5, due in 90 s, 4 stored (halted)" in text
    assert "summarise/0" not in view_of(seen)


def test_who_commits_inline_is_named() -> None:
    """For people only where it is not the default."""
    stored = [subscription(), subscription("bill"), subscription("gone")]
    seen = shape(
        facts(registered={"summarise": Registered(), "bill": Registered(commit="inline")}, subscriptions=stored)
    )
    assert {each.name: each.commit for each in seen.handlers} == {"summarise": "chain", "bill": "inline", "gone": None}
    assert "  commit inline: bill\n" in view_of(seen)
    assert "commit inline" not in view_of(shape(facts()))


def test_dead_letters_with_the_same_error_are_one_line() -> None:
    """With the age of the newest; of very many the largest groups."""
    group = DeadLetterGroup(handler="summarise", error="ValueError: no", count=7, newest_at=UTC_NOON, newest_id="82AA")
    text = view_of(replace(shape(facts(dead_letters={"summarise": 7})), dead_letter_groups=(group,) * 7))
    assert "  7 dead letters of summarise, the newest 10 s ago: ValueError: no\n" in text
    assert "    and 2 more errors\n" in text


def test_very_many_handlers_are_counted() -> None:
    """Nobody reads a line for each of 3 200 partitions; `--all` shows them."""
    names = [f"handler_{number:03}" for number in range(200)]
    images = [replace(image(index, state="halted"), subscription=name) for name in names for index in range(16)]
    many = shape(
        facts(
            lease=lease(**serving(*names)),
            registered=tuple(names),
            subscriptions=[subscription(name) for name in names],
            images=images,
        )
    )
    lines = view_of(many).splitlines()
    assert len(lines) < 60
    assert "    and 180 more handlers. To see them, use --all" in lines
    assert len(view_of(many, everything=True).splitlines()) > 3400


def test_new_partitions_are_shown_with_what_they_wait_for() -> None:
    """P16: of which handler, since when; the partitions in force stay those of before."""
    waits = "partition 3 is paused. Run: celery -A shop changes resume summarise"
    moving = {"subscription": "summarise", "partitions": 7, "since": NOON, "waits": waits}
    stored = subscription(partitioning={"term": 5, "partitions": 2, "key": "blake2b-64:_id"})
    report = {**IDLE_REPORT, "repartitioning": [moving]}
    seen = shape(facts(lease=lease(report=report), subscriptions=[stored]))
    (handler,) = seen.handlers
    assert (len(handler.partitions), handler.repartitioning is not None) == (2, True)
    assert f"summarise changes to 7 partitions for 10 s: {waits}" in view_of(seen)


def test_a_bridge_that_could_not_be_read_shows_the_error_alone_and_hides_no_other() -> None:
    """`--watch` continues while MongoDB is away."""
    away = unreadable("shop", "no answer")
    text = shown(status_view([away, judge(shape(facts()))], everything=False))
    assert text.splitlines()[:3] == [
        "shop: FAILING (1 problem)",
        "  failing state_unreadable: no answer",
        "shop: healthy",
    ]


@pytest.mark.parametrize(("share", "color"), [(0.5, None), (0.75, "\x1b[33m"), (0.9, "\x1b[31m"), (1.0, "\x1b[31m")])
def test_a_bound_that_is_near_is_loud(*, share: float, color: str | None) -> None:
    """P12, P16: in a colour; what could not be counted is not made up."""
    text = StringIO()
    report = lease(report={"storedBytes": int(share * 8 * GIB)})
    view = status_view([shape(facts(images=[image(0, stored=MARK)], lease=report))], everything=False)
    Console(file=text, width=160, force_terminal=True, color_system="standard").print(view)
    (line,) = (each for each in text.getvalue().splitlines() if "stored:" in each)
    assert line.startswith(f"  {color or ''}stored: ? changes, ")
    assert "stored: " not in view_of(shape(facts()))
    assert "size unknown without a listener" in view_of(shape(facts(images=[image(0, stored=MARK)])))


def test_commands_are_told_as_the_person_types_them() -> None:
    """With what was given to `-A`; and with the bridge, where the app has several."""
    app = Celery("told")
    root = click.Context(click.Command("celery"))
    root.params = {"app": "shop.celery"}
    context = click.Context(click.Command("status"), parent=root)
    one = Bridge(app, "mongodb://nowhere", name="one").wiring
    assert line_of(context, one).changes("resume") == "celery -A shop.celery changes resume"
    Bridge(app, "mongodb://nowhere", name="two")
    assert (
        line_of(context, one).changes("resume", "orders") == "celery -A shop.celery changes resume orders --bridge one"
    )
    root.params = {"app": app}
    assert line_of(context, one).celery("listener") == "celery -A APP listener"


def test_a_long_command_is_neither_broken_nor_cut() -> None:
    """It is copied from there: whatever the width."""
    command = CommandLine("shop.of.the.north").on("retry", "notify_customers_of_every_change", [3])
    assert f"\n    {command}\n" in shown(findings_view("shop", [failing("halted", "Blocked.", command)]), 40)


HALTED = PartitionStatus(partition=3, queue="shop.3", state="halted", committed=6, token="82BB", fencing_token=9)
BLOCKED = BlockedChange(
    handler="summarise",
    status=HALTED,
    key="shop.orders insert 7",
    token="82CC",
    error="ValueError: no",
    attempts=4,
    traceback="Traceback:\n  line 1\nValueError: no\n",
    since=datetime(2030, 1, 1, 10, tzinfo=UTC),
    bytes=2048,
    event={"operationType": "insert", "fullDocument": {"_id": 7}},
    raw=None,
)


def test_the_change_at_which_a_partition_stands_is_told_with_its_bytes() -> None:
    """All that an operator needs to decide; as much of the event as was asked for."""
    lines = list(describe_blocked_change(BLOCKED, None))
    assert lines[:8] == [
        "summarise/3 is halted at change 7: shop.orders insert 7",
        "  resume token: 82CC",
        "  error: ValueError: no",
        "  since 2030-01-01 10:00:00 UTC, 4 attempts",
        "    Traceback:",
        "      line 1",
        "    ValueError: no",
        "  stored, 2.0 KiB:",
    ]
    event = "\n".join(lines[8:])
    assert json.loads(event) == BLOCKED.event
    *cut, more = list(describe_blocked_change(BLOCKED, 10))[8:]
    assert "\n".join(cut) == event[:10]
    assert more == f"... and {len(event) - 10} more characters. To see them, use --bytes 0"


def test_bytes_that_are_not_stored_or_cannot_be_read_are_said_so() -> None:
    """P16: what is not there is not made up."""
    retrying = replace(HALTED, state="retrying", due_seconds=7200.0)
    gone = replace(BLOCKED, status=retrying, key=None, token=None, bytes=None, event=None)
    lines = list(describe_blocked_change(gone, None))
    assert lines[0] == "summarise/3 is retrying at change 7: the change is not known here"
    assert "due in 2 h" in lines[2]
    assert "bytes of the change are not stored" in lines[-1]
    assert "base64" in list(describe_blocked_change(replace(BLOCKED, event=None, raw="AA=="), None))[-1]


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


def test_a_check_begins_with_the_problems() -> None:
    """The worst first, then what is well."""
    found = [ok("topology", "fine"), degraded("paused", "Paused.", "celery -A x y"), failing("broker", "no [answer]")]
    text = shown(findings_view("shop", found))
    assert text.startswith("shop: FAILING (2 problems)\n")
    assert text.index("no [answer]") < text.index("Paused.") < text.index("\n    celery -A x y\n") < text.index("fine")
    assert shown(findings_view("shop", found[:1])).startswith("shop: healthy\n")


@pytest.mark.parametrize("module", ["mongo_celery.cli.changes", "mongo_celery.cli.listener"])
def test_a_plug_in_imports_no_pymongo_and_no_rich(module: str) -> None:
    """`celery` loads all plug-ins at every start."""
    code = f"import sys, {module}; print([name for name in ('pymongo', 'bson', 'rich') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
