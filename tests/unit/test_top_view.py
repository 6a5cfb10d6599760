"""How `top` looks, and `status --watch` on a terminal that is narrower than a command."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from mongo_celery.bridge.operations.overview import ATTENTION_MAX, overview
from mongo_celery.bridge.operations.rates import Rates
from mongo_celery.bridge.operations.status import shape
from mongo_celery.bridge.operations.verdict import judge
from mongo_celery.cli.status_view import status_view
from mongo_celery.cli.top_view import Glance, top_view
from mongo_celery.command_line import CommandLine
from tests.unit.test_status import NOON, facts, image, lease

Document = dict[str, Any]

LONG = "a_name_that_is_longer_than_any_narrow_terminal_could_ever_be"
SNAPSHOT = {
    "handler": LONG,
    "source": "shop.orders",
    "state": "running",
    "done": 41,
    "estimated": 100,
    "rate": 5.0,
    "sentence": None,
}
ERROR = "ValueError: \x1b[2Jcleared \u202eturned " + "and long " * 30


def halted(index: int) -> Any:
    head = {"resumeToken": {"_data": "82CC"}, "key": "shop.orders insert 1"}
    return image(index, state="halted", error=ERROR, head=head, retries=2, retry={})


def test_a_snapshot_that_waits_says_why() -> None:
    """Below the others, in one line."""
    status = status_of()
    status["snapshots"] = [{**SNAPSHOT, "handler": "bill", "remaining_seconds": None, "sentence": "waits: \x1b[2J"}]
    assert "bill shop.orders: waits: \\u001b[2J" in lines_of(top_view([glance(status)]), 80)


def status_of(**changes: Any) -> Document:
    status = shape(facts(**changes))
    status["snapshots"] = [{**SNAPSHOT, "remaining_seconds": 110}]
    return status


def lines_of(view: RenderableType, width: int) -> list[str]:
    text = StringIO()
    Console(file=text, width=width, force_terminal=False).print(view)
    return text.getvalue().splitlines()


def glance(status: Document, name: str = "shop") -> Glance:
    rates = Rates()
    shown = overview(status)
    for at, done in ((0.0, 0), (5.0, 10)):
        for each in shown["handlers"]:
            each["committed"] += done
        rates.remember({"handlers": [dict(each) for each in shown["handlers"]]}, at)
    return Glance(judge(status, line=CommandLine(name)), shown, rates)


def test_a_healthy_bridge_is_a_few_lines() -> None:
    calm = status_of(lease=lease())
    lines = lines_of(top_view([glance(calm)]), 80)
    assert lines[0].startswith("shop is healthy")
    assert "led by one, pid 42" in lines[1]
    (row,) = [line for line in lines if line.startswith("summarise ")]
    assert row.split() == ["summarise", "flowing", "2.0", "0", "s", "··", "0"]
    assert any("41 of 100" in line and "110 s" in line for line in lines)


@pytest.mark.parametrize("width", [50, 80, 120])
def test_nothing_wraps_into_a_ribbon(width: int) -> None:
    """Tables keep a line for each row whatever is in it; sentences and commands are folded at the edge."""
    bad = status_of(images=[halted(0), image(1)], registered=("summarise", LONG))
    lines = lines_of(top_view([glance(bad)]), width)
    assert all(cell_len(line) <= width for line in lines)
    assert len(lines) < 60
    assert len([line for line in lines if line.startswith("summ") and "halted" in line and "2 retries" in line]) == 1
    text = "\n".join(lines)
    assert "celery -A shop changes retry summarise" in text
    assert "H·" in text
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_a_bridge_that_cannot_be_read_keeps_what_was_seen() -> None:
    from mongo_celery.bridge.operations.verdict import unreadable

    seen = glance(status_of())
    lines = lines_of(top_view([Glance(unreadable("shop", "MongoDB gave no answer."), seen.shown, seen.rates)]), 80)
    assert lines[0].startswith("shop is failing")
    assert any("MongoDB gave no answer." in line for line in lines)
    assert any(line.startswith("summarise ") for line in lines)
    assert len(lines_of(top_view([Glance(unreadable("shop", "no."), None, Rates())]), 80)) == 2


@pytest.mark.parametrize("folded", [True, False])
def test_a_command_is_broken_only_where_the_view_is_drawn_over_itself(folded: bool) -> None:
    """Elsewhere it stands on a line of its own, so that it can be copied."""
    bad = status_of(images=[halted(0), image(1)])
    command = "    celery -A a_long_name_of_an_app changes retry summarise 0"
    found = [(bad, judge(bad, line=CommandLine("a_long_name_of_an_app")))]
    text = StringIO()
    console = Console(file=text, width=40)
    console.print(status_view(found, everything=False, folded=folded), crop=False)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    assert (command in lines) is not folded
    assert (max(map(cell_len, lines)) <= 40) is folded


def test_an_overview_fits_on_a_screen_whatever_stands() -> None:
    many = status_of(images=[halted(index) for index in range(ATTENTION_MAX + 7)])
    shown = overview(many, [{"id": str(number)} for number in range(99)])
    assert (len(shown["attention"]), shown["attention_more"]) == (ATTENTION_MAX, 7)
    assert len(shown["letters"]) == 10
    assert shown["handlers"][0]["cells"] == "h" * (ATTENTION_MAX + 7)


def test_rates_are_of_the_last_seconds_and_never_below_0() -> None:
    def handlers(**committed: int) -> Document:
        return {"handlers": [{"name": name, "committed": count} for name, count in committed.items()]}

    rates = Rates()
    assert (rates.of("a"), rates.total) == (None, None)
    rates.remember(handlers(a=0), 0.0)
    assert rates.total is None
    rates.remember(handlers(a=100, b=0), 10.0)
    rates.remember(handlers(a=110, b=20), 20.0)
    assert [rates.of("a"), rates.of("b"), rates.total] == [1.0, 2.0, 3.0]
    rates.remember(handlers(a=5, b=20), 22.0)  # a new layout counts anew
    assert rates.total is None
    rates.remember(handlers(a=9, b=20), 24.0)
    assert [rates.of("a"), rates.of("b")] == [2.0, 0.0]


def test_nothing_is_said_to_flow_where_nobody_leads() -> None:
    """P16: what is stored of a partition does not know that."""
    gone = status_of(lease=lease(live=False, listenerId=None, renewedAt=NOON, report=None))
    text = "\n".join(lines_of(top_view([glance(gone)]), 80))
    assert "nobody leads" in text
    assert "not led" in text
    assert "flowing" not in text
