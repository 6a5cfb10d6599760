"""The public surface, and what importing it costs."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import mongo_celery

COMMANDS = sorted(path.stem for path in (Path(mongo_celery.__file__).parent / "cli").glob("[!_]*.py"))
NAMES = [
    *("STORED_ID", "Bridge", "Change", "Changes", "Event", "Fence", "FencedCollection", "Outbox", "OutboxCollection"),
    *("Participant", "TwoPhaseCommit", "once", "select_for_update", "select_many_for_update", "transactional"),
]


def python(code: str) -> str:
    """What another interpreter prints."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_public_names_are_exactly_these() -> None:
    """A name more is a promise more. Each can be imported, says what it is, and is seen by tools."""
    assert mongo_celery.__all__ == NAMES
    for name in NAMES:
        value = getattr(mongo_celery, name)
        assert getattr(value, "__name__", repr(value)) == name
        assert inspect.getdoc(value)
        assert name in dir(mongo_celery)
    assert not hasattr(mongo_celery, "Listener")


def test_type_checkers_see_the_same_names() -> None:
    """The lazy names are imported under TYPE_CHECKING too, or users' code would not check."""
    tree = ast.parse(inspect.getsource(mongo_celery))
    (typing_only,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = (node for node in ast.walk(typing_only) if isinstance(node, ast.ImportFrom))
    ours = (node for node in imports if (node.module or "").startswith("mongo_celery."))
    assert sorted(alias.name for node in ours for alias in node.names) == sorted(NAMES)


def test_importing_the_package_and_the_commands_loads_no_driver() -> None:
    """The `celery` command loads its plug-ins at every start and must not pay for PyMongo. The bridge comes with it."""
    modules = ["mongo_celery", "mongo_celery.errors", *(f"mongo_celery.cli.{name}" for name in COMMANDS)]
    code = f"import importlib, sys; [importlib.import_module(module) for module in {modules!r}]; "
    code += "before = {'pymongo', 'bson'} & {*sys.modules}; sys.modules['mongo_celery'].Bridge; "
    code += "print(sorted(before), 'pymongo' in sys.modules)"
    assert python(code) == "[] True"
