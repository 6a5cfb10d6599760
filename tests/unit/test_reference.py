"""The reference leaves nothing out: its pages are generated from the code, and name all that is public."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest

import mongo_celery
from mongo_celery import errors, locking, testing
from mongo_celery.bridge.options import OPTION_NAMES
from mongo_celery.cli import changes, tools
from mongo_celery.contrib import mongoengine
from mongo_celery.outbox.options import OutboxOptions, SharedOptions

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/reference"
ERRORS = {name for name in vars(errors) if name.endswith("Error")}


@cache
def page(name: str) -> str:
    """A page as the site has it, with what is generated."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/site/reference.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text: str = module.generated((PAGES / f"{name}.md").read_text())
    return text


def headings(name: str) -> set[str]:
    return set(re.findall(r"^#+ (.*)$", page(name), re.MULTILINE))


def rows(name: str) -> dict[str, list[str]]:
    """Rows of the page's tables by what their first cell names."""
    found = re.findall(r"^\| `([\w-]+)` \|(.*)\|$", page(name), re.MULTILINE)
    return {first: [cell.strip() for cell in re.split(r"(?<!\\)\|", others)] for first, others in found}


def paths(command: click.Command, path: str) -> Iterator[str]:
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from paths(found, f"{path} {name}")


def test_all_public_names_are_in_the_reference() -> None:
    """Of the package and of its parts that users import; errors on a page of their own."""
    names = {*mongo_celery.__all__, *locking.__all__, *testing.__all__}

    assert names <= headings("api")
    assert headings("errors") == {"Errors", *ERRORS}


def test_what_docstrings_show_is_code_that_calls_what_they_are_about() -> None:
    """The reference shows it; what it does, the pages run."""
    blocks = [
        (name, textwrap.dedent(block))
        for module in (mongo_celery, locking, testing, mongoengine)
        for name in getattr(module, "__all__", ["OutboxMixin"])
        for block in re.findall(r"::\n\n((?:(?: {4}.*)?\n)+)", f"{inspect.getdoc(getattr(module, name))}\n")
    ]

    assert {"OutboxCollection", "transactional", "OutboxMixin", "select_for_update"} <= {name for name, _ in blocks}
    for name, code in blocks:
        compile(code, name, "exec")
        assert name in code


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_an_error_says_what_it_is(name: str) -> None:
    """Its docstring, which is its message, and what it is a kind of."""
    kind = getattr(errors, name)

    assert str(kind()).split(". ", maxsplit=1)[0] in " ".join(page("errors").split())
    assert kind is errors.MongoCeleryError or f"[{kind.__mro__[1].__name__}]" in page("errors")


def test_all_options_are_in_the_reference_with_their_defaults() -> None:
    """Those of a bridge have a setting each; those of an outbox what their docstring says."""
    found = rows("settings")

    assert {"url", *OPTION_NAMES, *SharedOptions.__annotations__} <= set(found)
    assert found["claim_ttl"][-2:] == ["`10.0`", "seconds for which a document, or a key, belongs to one relay."]
    assert found["partitions"][0] == "`mongo_celery_partitions`"
    assert found["spill_after"][1] == "`CELERY_MONGO_CELERY_SPILL_AFTER`"
    shared = {field.name: field.default for field in dataclasses.fields(OutboxOptions)}
    assert all(found[name] == [f"`{shared[name]!r}`", found[name][1]] for name in SharedOptions.__annotations__)
    assert all(found[name][1] for name in SharedOptions.__annotations__)


def test_all_commands_are_in_the_reference() -> None:
    """With their options; as the entry points give them to Celery, and those that need no app."""
    expected = {*paths(changes.changes, "celery -A app changes"), *paths(tools.main, "mongo-celery")}
    for name in ("listener", "outbox", "transactions"):
        command = getattr(importlib.import_module(f"mongo_celery.cli.{name}"), name)
        expected.update(paths(command, f"celery -A app {name}"))

    assert headings("commands") == {"Commands", *expected}
    assert "`--on-history-lost [halt\\|oldest\\|now]`" in page("commands")
