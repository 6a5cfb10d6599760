"""How dead letters look on a terminal, and what their command takes."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from mongo_celery.bridge.operations.dead_letter_commands import Found, short_ids
from mongo_celery.bridge.operations.keys import keys_of
from mongo_celery.bridge.state.dead_letters import _letter
from mongo_celery.bridge.worker.replay_subject import OUTDATED, OVERTAKES
from mongo_celery.cli.dead_letters import dead_letters
from mongo_celery.cli.dead_letters_view import list_lines, show_lines

Document = dict[str, Any]

LETTER: Document = {
    "id": "82660011223344556677001122",
    "handler": "summarise",
    "partition": 3,
    "key": "shop.orders insert 5",
    "cause": "skipped",
    "at": "2026-11-23T06:30:19+00:00",
    "error": "ValueError: " + "x" * 200 + "\nmore",
    "traceback": "Traceback",
    "attempts": 1,
    "replays": 2,
    "bytes": 120,
    "kept": "event",
    "replay": None,
    "replay_error": None,
    "parked": False,
    "behind": None,
    "waiting": 0,
    "passed": 0,
    "passed_over": [],
}


def test_no_line_of_a_list_is_wider_than_a_terminal() -> None:
    """Whatever error and key are; and what is under way with a letter is said."""
    waiting = {**LETTER, "id": "8266001122334455668800", "replay": "waiting", "replay_error": "ConnectionError: no"}
    behind = {**LETTER, "id": "8266001122335555668900", "parked": True, "behind": LETTER["id"]}
    first = {**LETTER, "id": "8266001122336655669900", "parked": True, "waiting": 2}
    lines = list(list_lines("shop", Found(7, [], leads=True), [LETTER, waiting, behind, first]))
    assert lines[0] == "shop: 7 dead letters"
    assert lines.count("  the last replay failed (2 starts)") == 3, "where none is asked for"
    assert lines[1:3] == ["8266001122334455667  skipped 2026-11-23 06:30:19 UTC", "  summarise: shop.orders insert 5"]
    assert "  a replay waits for its next attempt: ConnectionError: no" in lines
    assert "  waits for 826600112233445566" in lines
    assert "  the key is parked, and 2 later changes wait" in lines
    assert lines[-1] == "and 3 more. To see them, use --limit"
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("reason", [OUTDATED, OVERTAKES])
def test_a_list_shows_the_action_of_a_refused_replay(reason: str) -> None:
    """P9: the end of the text says what to do."""
    refused = {**LETTER, "error": f"StaleFencingTokenError: {reason}"}
    lines = list(list_lines("shop", Found(1, [], leads=True), [refused]))
    assert f"  StaleFencingTokenError: {reason}".split() == " ".join(lines[3:-1]).split()
    assert max(map(len, lines)) <= 80


def test_ids_are_as_long_as_it_takes_to_tell_them_apart() -> None:
    """Those of one transaction begin alike."""
    assert short_ids(["82" + "0" * 30 + "1", "82" + "0" * 30 + "2"]) == ["82" + "0" * 30 + "1", "82" + "0" * 30 + "2"]
    assert short_ids(["82" + "1" * 30, "82" + "2" * 30]) == ["82" + "1" * 16, "82" + "2" * 16]
    assert short_ids([]) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"event": {"operationType": "insert"}, "raw": None}, '"operationType": "insert"'),
        ({"event": None, "raw": "AAAA"}, "--json shows its bytes in base64"),
        ({"event": None, "raw": None}, "too large to be stored"),
    ],
)
def test_a_letter_is_shown_with_what_is_kept_of_it(change: Document, words: str) -> None:
    """Its whole error and traceback, too."""
    text = "\n".join(show_lines({**LETTER, "replay": "requested"}, change, leads=False))
    assert all(each in text for each in (words, LETTER["error"], "Traceback", "2 starts by replays"))
    assert "a replay is requested, and begins when a listener leads" in text


def test_a_letter_names_the_changes_for_which_its_change_stood() -> None:
    """Where its handler coalesces, they would vanish without a trace."""
    plain = {**LETTER, "replays": 0, "passed": 21, "passed_over": ["8201", "8202"]}
    text = "\n".join(show_lines(plain, {"event": None, "raw": None}, leads=True))
    assert "  includes 21 earlier changes of the same document\n    8201\n    8202\n" in text.replace(
        "\n  error", "\n\n  error"
    )
    texts = dict.fromkeys(("key", "cause", "error", "traceback", "kept"), "a text")
    numbers = dict.fromkeys(("attempts", "replays", "partitioningTerm", "partition", "seq", "fencingToken", "hash"), 1)
    stored = {"_id": "shop/summarise/8203", **texts, **numbers, "bytes": None, "resumeToken": {"_data": "8203"}}
    letter = _letter({**stored, "passedOver": {"count": 21, "tokens": ["8201", "8202"]}})
    assert (letter.passed, letter.passed_over) == (21, ["8201", "8202"])
    assert _letter({**stored, "passedOver": 7}).passed == 0


@pytest.mark.parametrize("text", ["5", '"5"', "a b", "{", "[", "é\udcff", "{'a': 1}", '{"$oid": 5}', ""])
def test_a_key_is_always_text_too(text: str) -> None:
    """Bad JSON is no error: it is a key."""
    assert text in keys_of(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["replay"], "Use HANDLER"),
        (["discard", "--yes"], "or --all for all of them"),
        (["replay", "summarise", "--all"], "--all chooses every dead letter"),
        (["list", "--since", "yesterday"], "is not a time. Give ISO 8601"),
        (["list", "--limit", "0"], "--limit"),
    ],
)
def test_a_command_that_cannot_be_meant_is_refused(arguments: list[str], words: str) -> None:
    """Before anything is asked of MongoDB or of the app."""
    done = CliRunner().invoke(dead_letters, arguments)
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())
