"""The public surface, and what importing it costs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import mongo_celery

NAMES = [
    *(
        "STORED_ID",
        "AsyncFencedCollection",
        "Bridge",
        "Change",
        "Changes",
        "Event",
        "Fence",
        "FencedCollection",
        "Outbox",
        "OutboxCollection",
    ),
    *("Participant", "TwoPhaseCommit", "once", "select_for_update", "select_many_for_update", "transactional"),
]


def test_the_public_names_are_exactly_these() -> None:
    """A name more is a promise more. Each can be imported, says what it is, and is seen by tools."""
    assert mongo_celery.__all__ == NAMES
    for name in NAMES:
        value = getattr(mongo_celery, name)
        assert getattr(value, "__name__", repr(value)) == name
        assert inspect.getdoc(value)
        assert name in dir(mongo_celery)
    assert not hasattr(mongo_celery, "Listener")


COMMANDS = [f"mongo_celery.cli.{each.stem}" for each in Path(mongo_celery.__file__).parent.glob("cli/[!_]*.py")]


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        (["mongo_celery", "mongo_celery.errors", *COMMANDS], ("pymongo", "bson")),
        (["mongo_celery.cli.changes", "mongo_celery.cli.listener"], ("rich",)),
        (["mongo_celery.bridge.bridge", "mongo_celery.outbox.outbox"], ("opentelemetry",)),
        (["mongo_celery.testing.plugin"], ("pymongo", "bson", "celery", "kombu")),
    ],
    ids=["commands", "changes", "bridge", "plugin"],
)
def test_an_import_loads_no_more_than_it_needs(modules: list[str], unwanted: tuple[str, ...]) -> None:
    """`celery` loads its plug-ins at every start, and pytest every plug-in of the environment."""
    code = f"import importlib, sys; [importlib.import_module(module) for module in {modules!r}]; "
    code += f"print([name for name in {unwanted!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
