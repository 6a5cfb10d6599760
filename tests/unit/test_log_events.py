"""Log records: every one at info and above has an event, which `docs/logs.md` lists (`test_docs.py`)."""

from __future__ import annotations

import ast
import functools
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
    """Every event with its level and its logger."""
    found = set()
    for path in (ROOT / "mongo_celery").rglob("*.py"):
        tree = ast.parse(path.read_text())
        for call in log_calls(tree):
            event = event_of(call)
            if event is not None:
                found.add((event, LEVELS[_method_of(call)], _logger_of(tree)))
    return found


def log_calls(tree: ast.Module, methods: Collection[str] = LEVELS) -> Iterator[ast.Call]:
    """Calls of the module's `logger`, by default at info and above."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "logger"
            and node.func.attr in methods
        ):
            yield node


def _method_of(call: ast.Call) -> str:
    assert isinstance(call.func, ast.Attribute)
    return call.func.attr


def event_of(call: ast.Call) -> str | None:
    for keyword in call.keywords:
        if keyword.arg == "extra" and isinstance(keyword.value, ast.Dict):
            for key, value in zip(keyword.value.keys, keyword.value.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "event" and isinstance(value, ast.Constant):
                    return str(value.value)
    return None


def _logger_of(tree: ast.Module) -> str:
    """The name in the module's `logger = logging.getLogger("...")`."""
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "logger"
            and isinstance(node.value, ast.Call)
        ):
            (name,) = node.value.args
            assert isinstance(name, ast.Constant)
            return str(name.value)
    raise AssertionError("a module that logs has a logger of its own")
