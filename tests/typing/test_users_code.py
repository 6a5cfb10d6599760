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

import mongo_celery

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
USERS = sorted(HERE.glob("users_*.py"))

STRICT = {
    "ignore": [str(ROOT / "mongo_celery")],
    "extraPaths": [str(ROOT)],
    "typeCheckingMode": "strict",
    "reportUnnecessaryTypeIgnoreComment": "error",
}


def test_users_code_passes_pyright(tmp_path: Path) -> None:
    """In its strict mode; and a check that takes everything would prove nothing: a copy without comments is refused."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text((HERE / "users_handlers.py").read_text().replace("# type: ignore", "# so"))
    project = tmp_path / "pyrightconfig.json"
    project.write_text(json.dumps({**STRICT, "include": [str(HERE), str(wrong)]}))

    command = [sys.executable, "-m", "basedpyright", "--project", str(project), "--outputjson"]
    command += ["--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] >= len(USERS) + 1
    reports = [(Path(each["file"]).name, each["message"]) for each in found["generalDiagnostics"]]
    assert [each for each in reports if each[0] != wrong.name] == []
    refused = "\n".join(message for _, message in reports)
    assert all(each in refused for each in ("No overloads", '"delay"', '"max_retires"', "\"Literal['no change']\""))


def test_users_code_uses_every_public_name() -> None:
    """A name that nobody uses here could be Unknown to a checker."""
    used = {
        alias.name
        for path in USERS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "mongo_celery"
        for alias in node.names
    }
    assert {*mongo_celery.__all__} - used == set()
