"""Functions are short. The floors and the modules without clocks are import-linter's, and docstrings are ruff's."""

from __future__ import annotations

import ast
from pathlib import Path

import mongo_celery

FUNCTION_LINES_MAX = 60


def test_no_function_is_long() -> None:
    found = []
    for path in Path(mongo_celery.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                if body and (node.end_lineno or 0) - body[0].lineno >= FUNCTION_LINES_MAX:
                    found.append(f"{path}: {node.name}")
    assert found == []
