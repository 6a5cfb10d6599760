"""Text of others is harmless where it is shown and logged: no escapes, no forged lines, no turned direction."""

from __future__ import annotations

import ast
import logging
import re
import unicodedata
from pathlib import Path

import pytest

import mongo_celery
from mongo_celery.visible import LOGGERS, Lines, guard_logs, visible, visible_lines

ROOT = Path(mongo_celery.__file__).parent
HOSTILE = (
    "E: \x1b]52;c;Y3VybA==\x07 \x1b]8;;http://evil/\x1b\\here\x1b]8;;\x1b\\ \x1b[2J \u202etxt \x9b2J \u200b\U000e0041"
    "\r\n[2026-01-01 00:00:00,000: INFO/MainProcess] leading bridge shop\u2028\ud800"
)
HARMFUL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\U000e0041]")


def test_visible_text_is_one_line_without_controls() -> None:
    """Every control, format and line character of Unicode is shown as its number; other text stays."""
    turning = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    harmful = [
        char
        for char in map(chr, range(0x110000))
        if unicodedata.category(char) in {"Cc", "Zl", "Zp", "Cs"} or unicodedata.bidirectional(char) in turning
    ]
    assert all(visible(char) == f"\\u{ord(char):04x}" for char in harmful)
    assert not HARMFUL.search(visible(HOSTILE))
    assert visible("Zoë, 日本語, سلام 👍🏽 \\ ok") == "Zoë, 日本語, سلام 👍🏽 \\ ok"
    assert visible_lines("a\r\nb\rc\nd", "  ") == "a\n  b\\u000dc\n  d"


def test_every_logger_of_the_package_is_guarded() -> None:
    """A logger with a new name has to be added to the list."""
    used = {
        call.args[0].value
        for path in ROOT.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "logging.getLogger" and call.args
        and isinstance(call.args[0], ast.Constant) and str(call.args[0].value).startswith("mongo_celery.")
    }  # fmt: skip
    assert used == set(LOGGERS)
    guard_logs()
    assert {len(logging.getLogger(name).filters) for name in LOGGERS} == {1}


@pytest.mark.parametrize("name", LOGGERS)
def test_a_record_is_one_line(caplog: pytest.LogCaptureFixture, name: str) -> None:
    """Errors, ids and other objects cannot begin a line; a traceback keeps its lines, and each is indented."""
    logger = logging.getLogger(name)
    with caplog.at_level("INFO", name):
        logger.error("failed: %s %r %s %d %.1f", HOSTILE, {"_id": HOSTILE}, ValueError(HOSTILE), 3, 0.25)
        logger.error("failed: %(error)s", {"error": HOSTILE})
        logger.error("failed: %s", Lines(f"Traceback:\n{HOSTILE}"))
    *flat, many = [record.getMessage() for record in caplog.records]
    assert all("\n" not in text and not HARMFUL.search(text) for text in flat)
    assert flat[0].endswith(" 3 0.2")
    assert not HARMFUL.search(many)
    assert all(line.startswith("  ") for line in many.split("\n")[1:])


def test_commands_print_lines_by_say() -> None:
    """`click.echo` prints what a document holds as it is; JSON in ASCII cannot hold anything that acts."""
    raw = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in sorted((ROOT / "cli").glob("*.py"))
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in {"click.echo", "print"}
        and not ast.unparse(call.args[0]).startswith(("json.dumps(", "visible("))
    ]  # fmt: skip
    assert raw == []
