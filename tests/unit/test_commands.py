"""All commands, by walking their tree: help that fits a terminal, and `--json` of a shape that a page has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from celery.bin.celery import celery as celery_command

import mongo_celery
from mongo_celery.bridge.operations.commands import CommandResult
from mongo_celery.bridge.operations.heads import Head
from mongo_celery.bridge.operations.whereabouts import Whereabouts
from mongo_celery.cli.outbox_view import plain_health
from mongo_celery.cli.tools import main
from mongo_celery.findings import Finding
from mongo_celery.outbox.backing import OutboxStatus
from mongo_celery.outbox.delivery import Delivery
from mongo_celery.outbox.health import Health
from mongo_celery.outbox.replay import DeadLetter, Replay

PAGE = Path(__file__).parents[2] / "docs/operations/json.md"
WIDTH = 80
CONTENT = WIDTH - 2  # what Click fills of a terminal of that width
WITHOUT_JSON = {
    "listener": "a process: it logs",
    "transactions show": "prints Extended JSON as it is",
}
WITHOUT_KEYS = {
    "transactions list": "as it is stored",
    "mongo-celery demo": "figures",
    "mongo-celery bench": "figures",
}


def tree(command: click.Command, path: str, parent: click.Context | None) -> Iterator[tuple[str, click.Context]]:
    """A command and all below it, by what is typed."""
    context = click.Context(command, info_name=path.rpartition(" ")[2], parent=parent, terminal_width=CONTENT)
    yield path, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from tree(found, f"{path} {name}", context)


ALL = {
    path: context
    for name in ("changes", "outbox", "transactions", "listener")
    for path, context in tree(celery_command.commands[name], name, click.Context(celery_command, info_name="celery"))
} | dict(tree(main, "mongo-celery", None))
LEAVES = sorted(path for path, context in ALL.items() if not isinstance(context.command, click.Group))


@pytest.mark.parametrize("path", sorted(ALL))
def test_no_line_of_help_is_wider_than_a_terminal(path: str) -> None:
    """And no summary of a command is cut off."""
    context = ALL[path]
    lines = context.command.get_help(context).splitlines()
    assert [line for line in lines if len(line) > WIDTH] == []
    assert [line for line in lines if line.endswith("...") and not line.startswith("Usage:")] == []


@pytest.mark.parametrize("path", LEAVES)
def test_every_command_that_prints_has_json(path: str) -> None:
    """Or a reason why not, which the page tells, too."""
    has = any("--json" in parameter.opts for parameter in ALL[path].command.params)
    assert has is (path not in WITHOUT_JSON)


def test_no_number_of_a_command_is_nan() -> None:
    """No bound refuses it: `snapshot --rate nan` would end the listener of all handlers."""
    options = [
        (option, context)
        for context in ALL.values()
        for option in context.command.params
        if isinstance(option.type, click.FloatRange) or option.type is click.FLOAT
    ]
    assert len(options) > 5
    for option, context in options:
        for value in ("nan", "inf"):
            with pytest.raises(click.BadParameter):
                option.type.convert(value, option, context)


def rows(text: str) -> dict[str, str]:
    """The tables of the page: what stands in the first column, and the rest of the row."""
    return dict(re.findall(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE))


def names(cell: str) -> set[str]:
    """The keys that a row names; what is in brackets explains one."""
    return set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", cell)))


def test_the_page_has_every_command() -> None:
    """In the order of nobody's memory: those with `--json`, and no others."""
    listed = {cell.strip("`") for cell in rows(PAGE.read_text().partition("## Status")[0]) if cell.startswith("`")}
    parts = {"halted` of `skip"}
    assert listed - parts == set(LEAVES) - WITHOUT_JSON.keys()


def keys_of(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


def health() -> dict[str, Any]:
    names = ("documents", "pending", "failing", "dead_letters", "dispatched", "failures")
    counts: dict[str, Any] = dict.fromkeys(names, 0)
    status = OutboxStatus(outbox="shop.orders", oldest_seconds=None, **counts)
    about = {
        "sweep_after": 10.0,
        "scheduled": True,
        "swept_seconds": 1.0,
        "patience": 60.0,
        "indexed": True,
        "broker_error": None,
    }
    return plain_health(Health(name="orders", status=status, **about))  # type: ignore[arg-type]


def test_the_page_has_the_keys_of_the_code() -> None:
    """Of what is the same wherever it is printed."""
    found = rows(PAGE.read_text())
    assert names(found["a finding"]) == keys_of(Finding)
    assert names(found["a partition of a command"]) == keys_of(CommandResult)
    assert names(found["a dead letter of an outbox"]) == keys_of(DeadLetter)
    assert names(found["`changes where`"]) == {"bridge", *keys_of(Whereabouts)}
    assert names(found["`changes show`"]) == {"bridge", *keys_of(Head)}
    assert names(found["`outbox sweep`"]) == {"outboxes", "outbox", *Delivery().plain()}
    assert names(found["`outbox dead-letters replay`"]) == {"letters", "outbox", "error", *keys_of(Replay)}
    assert names(found["`outbox status`"]) == set(health())


def test_a_message_prints_a_command_whole() -> None:
    """From `celery -A` on, by `CommandLine`; but for modules whose texts only describe a command."""
    short = re.compile(r"`(?:celery(?! -A)|changes|dead-letters|outbox|transactions|listener|manage\.py) [a-z]")
    package, describing, found = (
        Path(mongo_celery.__file__).parent,
        {"grants.py", "history.py", "listener.py", "renewal.py"},
        [],
    )
    for path in sorted(package.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text()))) if path.name not in describing else []
        docs = {id(each.value) for each in nodes if isinstance(each, ast.Expr)}
        helps = (each.value for each in nodes if isinstance(each, ast.keyword) and each.arg == "help")
        docs |= {id(part) for each in helps for part in ast.walk(each)}
        texts = (each for each in nodes if isinstance(each, ast.Constant) and id(each) not in docs)
        found += [f"{path.name}:{each.lineno}" for each in texts if short.search(str(each.value))]
    assert found == []
