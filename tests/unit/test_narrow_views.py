"""What commands print on a narrow terminal: no ribbon of letters, nothing cut that somebody has to copy."""

from __future__ import annotations

from datetime import UTC, datetime
from io import StringIO
from types import SimpleNamespace

import click
import pytest
from rich.console import Console, RenderableType

from mongo_celery.bridge.operations.judgement import judge
from mongo_celery.bridge.operations.snapshot_reader import shape
from mongo_celery.cli.apps import console_of
from mongo_celery.cli.findings_view import findings_view
from mongo_celery.cli.outbox_view import dead_letter_view, dead_letters_view, health_view
from mongo_celery.cli.status_view import status_view
from mongo_celery.findings import failing, ok
from mongo_celery.outbox.dead_letters import DeadLetter
from mongo_celery.outbox.health import OutboxHealth
from mongo_celery.outbox.runtime import OutboxStatus
from tests.unit.test_status import facts, lease, serving, subscription

LONG = "send_the_confirmation_to_the_customer_of_the_order"
ENTRY = "d1ee1459-1808-4f0c-a83c-de168c913f04"


def shown(view: RenderableType, width: int) -> list[str]:
    text = StringIO()
    Console(file=text, width=width).print(view, crop=False)
    return [line.rstrip() for line in text.getvalue().splitlines()]


@pytest.mark.parametrize(("width", "columns"), [(120, 6), (80, 6), (60, 5), (40, 3)])
def test_a_long_name_goes_on_in_a_second_line_and_columns_give_way(width: int, columns: int) -> None:
    """It is never squeezed into some letters a line; what is left out is in `--json`."""
    led = lease(**serving(LONG))
    status = shape(facts(lease=led, registered=(LONG,), subscriptions=[subscription(LONG)], images=[]))
    lines = shown(status_view([judge(status)], everything=False), width)
    header = next(number for number, line in enumerate(lines) if line.lstrip().startswith("handler  "))
    assert len([word for word in lines[header].split("  ") if word]) == columns
    assert sum(line.strip() in LONG or line.split()[0] in LONG for line in lines[header + 1 :] if line.strip()) <= 3
    assert max(map(len, lines)) <= width


def test_what_is_piped_neither_wraps_nor_ends_in_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever searches it finds a sentence as it is, and a table has no blanks behind its last column."""
    findings = [ok("short", "A."), ok("long", "word " * 100 + "end."), failing("wrong", "sentence " * 100 + "end.")]
    context = click.Context(click.Command("check"), obj=SimpleNamespace(no_color=False))
    console_of(context).print(findings_view("shop", findings), crop=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["shop:", "failing", "ok", "ok"]
    assert [line for line in lines if line.endswith(" ")] == []


@pytest.mark.parametrize("width", [80, 60])
def test_an_outbox_is_told_in_words_and_its_dead_letters_with_their_whole_ids(width: int) -> None:
    """An id that is cut cannot be typed."""
    letter = DeadLetter(
        id=ENTRY, document=7, at=datetime(2026, 11, 23, tzinfo=UTC), entry={}, error="x" * 200, traceback=""
    )
    letters = shown(dead_letters_view("orders", [letter], 2), width)
    assert letters[0] == "orders: 2 dead letters"
    assert letters[1].startswith(f"{ENTRY}  2026-11-23 00:00:00")
    status = OutboxStatus(
        outbox="shop.orders", oldest_seconds=12.0,
        documents=1, pending=1, failing=1, dead_letters=1, dispatched=0, failures=0,
    )  # fmt: skip
    health = OutboxHealth("orders", [failing("late", "Nobody sweeps it.", "celery sweep")], status)
    assert " ".join(" ".join(shown(health_view([health]), width)).split()) == (
        "orders: FAILING (1 problem) 1 entry pending in 1 document, the oldest for 12 s, 1 dead letter "
        "failing late: Nobody sweeps it. celery sweep"
    )


@pytest.mark.parametrize(
    ("attempts", "times"),
    [(3, "3 times"), ("x", "0 times"), (None, "0 times"), (float("nan"), "0 times"), ([1], "0 times"), (-1, "0 times")],
)
def test_a_dead_letter_is_shown_whatever_its_count_of_attempts_is(attempts: object, times: str) -> None:
    """Somebody else may have written its entry."""
    letter = DeadLetter(id="one", document=1, at=None, entry={"attempts": attempts}, error="", traceback="")
    (line,) = [line for line in shown(dead_letter_view("orders", letter, payload=False), 80) if "failed before" in line]
    assert line.endswith(f" {times}")
