"""The shape of the package: functions are short, a name has one meaning, and every file is packed.

The floors and the modules without clocks are contracts of import-linter, in `pyproject.toml`; docstrings are ruff's.
"""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import mongo_celery

ROOT = Path(mongo_celery.__file__).parent
FUNCTION_LINES_MAX = 60
TREES = {
    path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("/__init__"): ast.parse(path.read_text("utf-8"))
    for path in sorted(ROOT.rglob("*.py"))
}


def test_no_function_is_long() -> None:
    """The loop, the commands and the constructors included; docstrings do not count."""
    found = []
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                if body and (node.end_lineno or 0) - body[0].lineno >= FUNCTION_LINES_MAX:
                    found.append(f"{module}.{node.name}")
    assert found == []


def test_every_file_that_is_no_module_is_packed() -> None:
    """A page fails that asks for a static file which the wheel lacks; a slow test builds the wheel itself."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["mongo_celery"]
    packed = {found for pattern in patterns for found in ROOT.glob(pattern)}
    others = {each for each in ROOT.rglob("*") if each.is_file() and each.suffix not in {".py", ".pyc"}}
    assert others == packed
