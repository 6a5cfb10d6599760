"""How snapshots and findings look on a terminal, and that their modules cost nothing until a command runs."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import click
import pytest
from celery import Celery
from rich.console import Console, RenderableType

from mongo_celery import Bridge
from mongo_celery.bridge.operations.bridge_snapshot import (
    BridgeSnapshot,
    unreadable,
)
from mongo_celery.bridge.operations.judgement import judge
from mongo_celery.bridge.operations.snapshot_reader import shape
from mongo_celery.cli.apps import line_of
from mongo_celery.cli.findings_view import findings_view
from mongo_celery.cli.status_view import status_view
from mongo_celery.command_line import CommandLine
from mongo_celery.findings import failing, ok
from tests.unit.test_status import (
    GIB,
    MARK,
    NOON,
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


def test_a_status_begins_with_the_verdict_and_is_bounded() -> None:
    """One line says whether anything is wrong. `--all` shows 3 200 partitions, which nobody reads otherwise."""
    assert view_of(shape(facts())).startswith("shop: healthy\n")
    away = shown(status_view([unreadable("shop", "no answer"), judge(shape(facts()))], everything=False))
    assert [line for line in away.splitlines() if line.startswith("shop: ")][1] == "shop: healthy"
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
    assert len(view_of(many).splitlines()) < 60
    assert len(view_of(many, everything=True).splitlines()) > 3400


def test_each_problem_is_shown_once_with_its_command() -> None:
    """On a line of its own that can be copied, whatever the width. Markup in an error is just text."""
    text = view_of(halted())
    assert text.count("ValueError: bad [order]") == text.count("shop.orders insert 1") == 1
    assert "\n    celery -A shop changes retry summarise 1\n" in text
    narrow = shown(status_view([judge(halted(), CommandLine("shop"))], everything=False), 80)
    assert max(map(len, narrow.splitlines())) <= 80
    command = CommandLine("shop.of.the.north").on("retry", "notify_customers_of_every_change", [3])
    found = [ok("topology", "fine"), failing("halted", "no [answer]", command)]
    checked = shown(findings_view("shop", found), 40)
    assert checked.index("no [answer]") < checked.index(f"\n    {command}\n") < checked.index("fine")


@pytest.mark.parametrize(("share", "color"), [(0.5, None), (0.75, "\x1b[33m"), (0.9, "\x1b[31m")])
def test_a_bound_that_is_near_is_loud(*, share: float, color: str | None) -> None:
    text = StringIO()
    report = lease(report={"storedBytes": int(share * 8 * GIB)})
    view = status_view([shape(facts(images=[image(0, stored=MARK)], lease=report))], everything=False)
    Console(file=text, width=160, force_terminal=True, color_system="standard").print(view)
    (line,) = (each for each in text.getvalue().splitlines() if "stored:" in each)
    assert line.startswith(f"  {color or ''}stored: ")


def test_commands_are_told_as_the_person_types_them() -> None:
    app = Celery("told")
    root = click.Context(click.Command("celery"))
    root.params = {"app": "shop.celery"}
    context = click.Context(click.Command("status"), parent=root)
    one = Bridge(app, "mongodb://nowhere", name="one").wiring
    assert line_of(context, one).changes("resume") == "celery -A shop.celery changes resume"
    Bridge(app, "mongodb://nowhere", name="two")
    assert line_of(context, one).changes("resume", "a") == "celery -A shop.celery changes resume a --bridge one"
