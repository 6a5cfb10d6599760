"""`mongo-celery`: the commands that need no app."""

from __future__ import annotations

import importlib
from typing import Any

import click

from mongo_celery.cli.apps import one_sentence_errors

_COMMANDS = {
    "bench": ("mongo_celery.bench.command:bench", "Measure this machine: changes per second and processor time."),
    "demo": ("mongo_celery.demo.command:command", "Run an end-to-end demo with injected faults."),
    "services": ("mongo_celery.cli.services:services", "Start a MongoDB replica set and Redis for development."),
}
"""Module of each command, and its line in the help."""


class LazyGroup(click.Group):
    """A group that imports a command at its use, and prints its errors as one sentence."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the names."""
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a command."""
        if cmd_name not in _COMMANDS:
            return None
        target, summary = _COMMANDS[cmd_name]
        module, _, name = target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        command.short_help = summary
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. If users can fix its error, print one sentence and end with status 1."""
        with one_sentence_errors():
            return super().invoke(ctx)


@click.group(cls=LazyGroup, epilog="Example: mongo-celery demo")
@click.version_option(package_name="mongo-celery", message="%(package)s %(version)s")
def main() -> None:
    """
    Measure, demonstrate and develop with mongo_celery. These commands need no app.

    For an app, see `celery -A shop listener --help` and `celery -A shop changes --help`.
    """
