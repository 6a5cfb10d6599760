"""Log records: every one at info and above has an event, which `docs/logs.md` lists (`test_docs.py`)."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LEVELS = {"info": "info", "warning": "warning", "error": "error", "exception": "error", "critical": "critical"}
Row = tuple[str, str, str]


def test_every_record_at_info_and_above_has_an_event() -> None:
    """A sentence may change; whoever counts or filters records needs a name that stays."""
    without = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in sorted((ROOT / "mongo_celery").rglob("*.py"))
        for call in log_calls(ast.parse(path.read_text(encoding="utf-8")))
        if event_of(call) is None
    ]

    assert without == []


@functools.cache
def events_in_the_code() -> set[Row]:
    found = set()
    for path in (ROOT / "mongo_celery").rglob("*.py"):
        text = path.read_text()
        for call in log_calls(ast.parse(text)):
            (logger,) = re.findall(r'^logger = logging.getLogger\("(.+)"\)', text, re.MULTILINE)
            if event := event_of(call):
                found.add((event, LEVELS[ast.unparse(call.func).removeprefix("logger.")], logger))
    return found


def log_calls(tree: ast.Module, methods: Collection[str] = LEVELS) -> Iterator[ast.Call]:
    """Calls of the module's `logger`, by default at info and above."""
    names = {f"logger.{each}" for each in methods}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
            yield node


def event_of(call: ast.Call) -> str | None:
    extra = next((each.value for each in call.keywords if each.arg == "extra"), None)
    found = re.search(r"'event': '(\w+)'", ast.unparse(extra)) if isinstance(extra, ast.Dict) else None
    return found[1] if found else None
