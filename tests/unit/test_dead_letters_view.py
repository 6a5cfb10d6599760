"""How dead letters look on a terminal, and what their command takes."""

from __future__ import annotations

from datetime import UTC, datetime
from io import StringIO

import pytest
from click.testing import CliRunner
from rich.console import Console

from mongo_celery.bridge.operations.dead_letter_commands import short_ids
from mongo_celery.bridge.operations.keys import keys_of
from mongo_celery.cli.dead_letters import dead_letters
from mongo_celery.cli.outbox_view import dead_letter_view, dead_letters_view
from mongo_celery.outbox.dead_letters import DeadLetter


@pytest.mark.parametrize("attempts", [3, "x", None, float("nan"), [1], -1])
def test_dead_letters_of_an_outbox_are_shown_with_their_whole_ids(attempts: object) -> None:
    """An id that is cut cannot be typed. Somebody else may have written the entry."""
    number, at = "d1ee1459-1808-4f0c-a83c-de168c913f04", datetime(2026, 11, 23, tzinfo=UTC)
    letter = DeadLetter(id=number, document=7, at=at, entry={"attempts": attempts}, error="x" * 200, traceback="")
    for view in (dead_letters_view("orders", [letter], 2), dead_letter_view("orders", letter, payload=False)):
        text = StringIO()
        Console(file=text, width=60).print(view, crop=False)
        assert number in text.getvalue()


@pytest.mark.parametrize(
    "arguments",
    [
        *(["replay"], ["discard", "--yes"], ["replay", "summarise", "--all"]),
        *(["list", "--since", "yesterday"], ["list", "--limit", "0"]),
    ],
)
def test_a_command_that_cannot_be_meant_is_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(dead_letters, arguments).exit_code == 2


@pytest.mark.parametrize("beginnings", [("1", "2"), ("0" * 30 + "1", "0" * 30 + "2"), ("0" * 31, "0" * 30 + "1")])
def test_a_short_id_stands_for_one_dead_letter(beginnings: tuple[str, str]) -> None:
    """The ids of one transaction begin alike."""
    ids = [f"82{beginning:0<31}04" for beginning in beginnings]
    for short, whole in zip(short_ids(ids), ids, strict=True):
        assert [each for each in ids if each.startswith(short)] == [whole]


@pytest.mark.parametrize("text", ["5", "{", "é\udcff", '{"$oid": 5}'])
def test_a_key_that_is_no_json_is_text(text: str) -> None:
    assert text in keys_of(text)
