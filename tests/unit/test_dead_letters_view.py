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


def test_an_id_is_as_short_as_it_can_be_and_a_key_that_is_no_json_is_text() -> None:
    """The ids of one transaction begin alike."""
    alike = ["82" + "0" * 30 + "1", "82" + "0" * 30 + "2"]
    assert short_ids(alike) == alike
    assert short_ids(["82" + "1" * 30, "82" + "2" * 30]) == ["82" + "1" * 16, "82" + "2" * 16]
    for text in ("5", "{", "é\udcff", '{"$oid": 5}'):
        assert text in keys_of(text)
