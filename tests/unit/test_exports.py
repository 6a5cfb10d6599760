"""The public surface, and what importing it costs."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import mongo_celery

NAMES_MAX = 17
COMMANDS = sorted(path.stem for path in (Path(mongo_celery.__file__).parent / "cli").glob("*.py"))

NAMES = {
    "Bridge",
    "Change",
    "Changes",
    "Event",
    "Fence",
    "FencedCollection",
    "Outbox",
    "OutboxCollection",
    "Participant",
    "STORED_ID",
    "TwoPhaseCommit",
    "once",
    "select_for_update",
    "select_many_for_update",
    "shared_change",
    "shared_changes",
    "transactional",
}


def python(code: str) -> str:
    """What another interpreter prints."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_public_names_are_exactly_these() -> None:
    """A name more is a promise more."""
    assert set(mongo_celery.__all__) == NAMES


def test_the_public_names_are_sorted_and_few() -> None:
    """At most 17 names, each once, in an order in which one can be found."""
    constants_first = sorted(set(mongo_celery.__all__), key=lambda name: (not name.isupper(), name))
    assert mongo_celery.__all__ == constants_first
    assert len(mongo_celery.__all__) <= NAMES_MAX


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_public_name_can_be_imported_and_is_listed(name: str) -> None:
    """Names that are imported on first use exist, and tools see them."""
    value = getattr(mongo_celery, name)
    assert getattr(value, "__name__", repr(value)) == name
    assert inspect.getdoc(value)
    assert name in dir(mongo_celery)


def test_type_checkers_see_the_same_names() -> None:
    """The lazy names are imported under TYPE_CHECKING too, or users' code would not check."""
    tree = ast.parse(inspect.getsource(mongo_celery))
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mongo_celery.")
        for alias in node.names
    }
    assert imported == NAMES


def test_an_unknown_name_is_an_attribute_error() -> None:
    """So that hasattr and `from mongo_celery import x` behave as ever."""
    assert not hasattr(mongo_celery, "Listener")


def test_the_version_is_that_of_the_installed_package() -> None:
    """One place holds it."""
    assert mongo_celery.__version__.count(".") == 2


def test_importing_the_package_and_the_commands_loads_no_driver() -> None:
    """The `celery` command loads its plug-ins at every start and must not pay for PyMongo."""
    modules = ["mongo_celery", *(f"mongo_celery.cli.{name}" for name in COMMANDS if name != "__init__")]
    code = "\n".join(
        [
            "import importlib, sys",
            f"for module in {modules!r}:",
            "    importlib.import_module(module)",
            "print(sorted({name.partition('.')[0] for name in sys.modules} & {'pymongo', 'bson'}))",
        ]
    )
    assert python(code) == "[]"


def test_a_public_name_is_loaded_when_it_is_asked_for() -> None:
    """Laziness loses nothing: errors come without the driver, the bridge with it."""
    code = "import mongo_celery, sys; from mongo_celery import errors; print('pymongo' in sys.modules); "
    code += "mongo_celery.Bridge; print('pymongo' in sys.modules)"
    assert python(code).split() == ["False", "True"]
