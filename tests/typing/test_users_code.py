"""
Users' code that uses the public names passes the strict modes of mypy and pyright; handlers keep their types.

What is wrong in it on purpose says so by a `type: ignore`, which both checkers would report if it were of no use.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import mongo_celery
from mongo_celery import errors

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
USERS = sorted(HERE.glob("users_*.py"))

STRICT = {
    "ignore": [str(ROOT / "mongo_celery")],
    "extraPaths": [str(ROOT)],
    "typeCheckingMode": "strict",
    "reportUnnecessaryTypeIgnoreComment": "error",
}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )


def test_users_code_passes_pyright(tmp_path: Path) -> None:
    """In its strict mode; and a check that takes everything would prove nothing: a copy without comments is refused."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text((HERE / "users_handlers.py").read_text().replace("# type: ignore", "# so"))
    project = tmp_path / "pyrightconfig.json"
    project.write_text(json.dumps({**STRICT, "include": [str(HERE), str(wrong)]}))

    done = run("basedpyright", "--project", str(project), "--pythonpath", sys.executable, "--outputjson")

    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] >= len(USERS) + 1
    reports = [(Path(each["file"]).name, each["message"]) for each in found["generalDiagnostics"]]
    assert [each for each in reports if each[0] != wrong.name] == []
    refused = "\n".join(message for _, message in reports)
    assert all(each in refused for each in ("No overloads", '"delay"', '"max_retires"', "\"Literal['no change']\""))


@pytest.mark.slow  # the check of the whole project by mypy, in .ci/run, has these files, too
def test_users_code_passes_mypy(tmp_path: Path) -> None:
    """In its strict mode, by the project's configuration."""
    done = run("mypy", "--cache-dir", str(tmp_path / "cache"), *map(str, USERS))
    assert done.returncode == 0, done.stdout + done.stderr


def test_users_code_uses_every_public_name() -> None:
    """A name that nobody uses here could be Unknown to a checker."""
    used = {
        alias.name
        for path in USERS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module in ("mongo_celery", "mongo_celery.errors")
        for alias in node.names
    }
    kinds = {name for name in vars(errors) if name.endswith("Error")}
    assert {*mongo_celery.__all__, *kinds} - used == set()
