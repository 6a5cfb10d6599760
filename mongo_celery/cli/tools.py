"""`mongo-celery`: what needs no app of the user's. Nothing is imported until a command runs."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import click

from mongo_celery.cli.apps import one_sentence_errors, say


@dataclass(frozen=True, slots=True)
class _Lazy:
    """Where a command is, and its line in the help."""

    target: str
    summary: str


_COMMANDS = {
    "bench": _Lazy("mongo_celery.bench.command:bench", "Measure this machine: changes per second, and latency."),
    "demo": _Lazy("mongo_celery.demo.command:command", "The whole thing on this machine, with faults and a verdict."),
    "services": _Lazy("mongo_celery.cli.services:services", "Start a MongoDB replica set and Redis to develop with."),
}


class LazyGroup(click.Group):
    """A group that knows its commands by name only; each is imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """The names."""
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a command."""
        lazy = _COMMANDS.get(cmd_name)
        if lazy is None:
            return None
        module, _, name = lazy.target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name].summary) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; an error that users can cure is one sentence, and status 1."""
        with one_sentence_errors():
            return super().invoke(ctx)


def _print_version(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import version

        say(f"mongo-celery {version('mongo-celery')}")
        ctx.exit()


@click.group(cls=LazyGroup)
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Say which.")
def main() -> None:
    """
    MongoDB change streams as ordered, fenced Celery tasks: tools that need no app.

    With an app: `celery -A app listener`, `celery -A app changes --help`.
    """
