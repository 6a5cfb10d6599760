"""All commands, by walking their tree: help that fits a terminal, and `--json` of a shape that a page has."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from celery import Celery
from celery.bin.celery import celery as celery_command
from click.testing import CliRunner

from mongo_celery.bridge.operations.acts import PartResult
from mongo_celery.bridge.operations.commands import PartitionResult
from mongo_celery.bridge.operations.lookups import BlockedChange, Whereabouts
from mongo_celery.bridge.operations.snapshot_commands import SnapshotResult
from mongo_celery.cli.acting import acting_on
from mongo_celery.cli.outbox_view import plain_health
from mongo_celery.cli.tools import main
from mongo_celery.findings import Finding
from mongo_celery.outbox.dead_letters import DeadLetter
from mongo_celery.outbox.delivery import Delivery
from mongo_celery.outbox.health import OutboxHealth
from mongo_celery.outbox.runtime import OutboxStatus
from mongo_celery.plan import Plan, PlanResult

PAGE = Path(__file__).parents[2] / "docs/operations/json.md"
WIDTH = 80
CONTENT = WIDTH - 2  # what Click fills of a terminal of that width


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


def test_no_line_of_help_is_wider_than_a_terminal() -> None:
    lines = [(path, line) for path, each in ALL.items() for line in each.command.get_help(each).splitlines()]
    assert [each for each in lines if len(each[1]) > WIDTH] == []
    assert [each for each in lines if each[1].endswith("...") and not each[1].startswith("Usage:")] == []


def test_every_command_has_an_example_that_it_accepts() -> None:
    options = SimpleNamespace(app=Celery(set_as_current=False))
    for path, context in ALL.items():
        _, found, words = str(context.command.epilog).partition(path)
        assert found == path
        context.command.make_context(context.info_name, shlex.split(words), obj=options)


def test_no_number_of_a_command_is_nan() -> None:
    """No bound refuses it: `snapshot --rate nan` would end the listener of all handlers."""
    options = [
        (option, context)
        for context in ALL.values()
        for option in context.command.params
        if isinstance(option.type, click.FloatRange) or option.type is click.FLOAT
    ]
    assert options
    for option, context in options:
        for value in ("nan", "inf"):
            with pytest.raises(click.BadParameter):
                option.type.convert(value, option, context)


@pytest.mark.parametrize("command", ["pause", "resume", "retry", "skip", "show"])
def test_what_is_no_partition_is_answered_with_the_command_that_lists_them(command: str) -> None:
    for typed in ("abc", "-1", "1.5"):
        done = CliRunner().invoke(ALL[f"changes {command}"].command, ["--", "summarise", typed])
        assert done.exit_code == 2
        assert "celery -A APP changes status --all" in " ".join(done.output.split())


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_command_of_which_something_is_refused_ends_with_status_1(words: list[str]) -> None:
    """In part or as a whole. A plan with nothing to do is no failure."""
    results = [PlanResult(lines=["cleaned 1"], refused=["2 is locked."]), PlanResult(lines=["cleaned"]), None]
    ends = []
    for result in results:

        @click.command()
        @acting_on("name", click.option("--name"), lambda _, name: name)
        def command(_name: str | None, result: PlanResult | None = result) -> Plan:
            act = None if result is None else lambda: result
            return Plan(command="clean", lines=["would clean"], act=act, fields={})

        ends.append(CliRunner().invoke(command, words).exit_code)
    assert ends == [1, 0, 0]


def rows(text: str) -> dict[str, str]:
    """The tables of the page: what stands in the first column, and the rest of the row."""
    return dict(re.findall(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE))


def names(cell: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", cell)))


def test_the_page_has_every_command() -> None:
    """Each that prints has `--json`, but for processes, which log."""
    with_json = {path for path in LEAVES if any("--json" in each.opts for each in ALL[path].command.params)}
    cells = [cell for cell in rows(PAGE.read_text()) if cell.startswith("`")]
    listed = {name.strip("`") for cell in cells for name in cell.split(", ")}
    parts = {"halted` of `skip", "changes show --key"}
    assert listed - parts == with_json == set(LEAVES) - {"listener"}


def test_the_page_has_the_keys_of_the_code() -> None:
    """Of what is the same wherever it is printed."""
    found = {place: names(cell) for place, cell in rows(PAGE.read_text()).items()}
    part = {each.name for each in fields(PartResult)}
    kinds: dict[str, tuple[type, set[str]]] = {
        "a finding": (Finding, set()),
        "a part of a command": (PartResult, set()),
        "a partition of a command": (PartitionResult, part),
        "a snapshot of a command": (SnapshotResult, part),
        "a dead letter of an outbox": (DeadLetter, set()),
    }
    for place, (kind, known) in kinds.items():
        assert found[place] | known == {each.name for each in fields(kind)}, place
    for place, shown in (("`changes show --key`", Whereabouts), ("`changes show`", BlockedChange)):
        assert found[place] == {"bridge", *(each.name for each in fields(shown))}
    counts: Any = dict.fromkeys(("documents", "pending", "failing", "dead_letters", "dispatched", "failures"), 0)
    status = OutboxStatus(outbox="shop.orders", oldest_seconds=None, **counts)
    assert found["`outbox status`"] == set(plain_health(OutboxHealth("orders", [], status)))
    assert found["`outbox sweep`"] == {"outboxes", "outbox", *Delivery().plain()}
    assert found["`outbox dead-letters replay`"] == {"dead_letters", "outbox", "error", "id", "result", "entry"}
