"""A command of `celery -A` as one of Django's: the same click command, arguments, output and exit status."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, ClassVar

import click
from django.core.management.base import BaseCommand, CommandError, CommandParser

from mongo_celery.contrib.django.project import celery_app, place_of, project_settings
from mongo_celery.errors import ConfigurationError, MongoCeleryError
from mongo_celery.mongo.redaction import without_credentials
from mongo_celery.visible import visible

_DJANGOS = ("--settings", "--pythonpath")
_ENVIRONMENT = "CELERY"
"""Prefix of the environment variables that Celery's own command line looks at."""


class CeleryCommand(BaseCommand):  # type: ignore[misc] # has no types
    """
    One command of Celery's command line, on the project's app.

    Attributes:
        word: its name there, and here.
    """

    word: ClassVar[str]
    requires_system_checks: ClassVar[list[str]] = []
    """Whoever looks at a bridge that is ill wants to see the bridge, and `--json` alone on standard output."""

    def run_from_argv(self, argv: Sequence[str]) -> None:
        """What is typed behind `manage.py WORD` is the click command's, but for what Django has heeded already."""
        program = Path(argv[0]).name
        own, rest = _without_djangos(argv[2:])
        sys.exit(self._main(rest, "python -m django" if program == "__main__.py" else program, own))

    def print_help(self, prog_name: str, subcommand: str) -> None:
        """For `manage.py help WORD`."""
        del subcommand
        self._main(["--help"], Path(prog_name).name, [])

    def create_parser(self, prog_name: str, subcommand: str, **options: Any) -> CommandParser:
        """For `call_command(WORD, ...)`: all words are the click command's, those that begin with a dash too."""
        parser: CommandParser = super().create_parser(prog_name, subcommand, **options)
        parse = parser.parse_args

        def take(args: Sequence[str] | None = None, namespace: Any = None) -> Any:
            found = parse([], namespace)
            found.arguments = list(args or ())
            return found

        parser.parse_args = take
        return parser

    def handle(self, *_: Any, arguments: Sequence[str], no_color: bool = False, **__: Any) -> None:
        """
        For `call_command(WORD, ...)`.

        Raises:
            CommandError: the command has failed; its sentence, and its exit status as `returncode`.
        """
        with _written_to(self):
            status = self._status(list(arguments), ["--no-color"] if no_color else [])
        if status:
            raise CommandError(f"{self.word} ended with status {status}.", returncode=status)

    def _status(self, arguments: Sequence[str], own: Sequence[str]) -> int:
        try:
            return self._call(arguments, self.word, own, standalone=False)
        except click.ClickException as error:
            raise CommandError(error.format_message(), returncode=error.exit_code) from error
        except click.Abort as error:
            raise CommandError("aborted.") from error
        except MongoCeleryError as error:
            raise CommandError(visible(without_credentials(str(error)))) from error

    def _main(self, arguments: Sequence[str], program: str, own: Sequence[str]) -> int:
        """The exit status; errors are shown as Celery shows them."""
        try:
            return self._call(arguments, program, own, standalone=True)
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else 1
        except MongoCeleryError as error:
            click.echo(f"Error: {visible(without_credentials(str(error)))}", err=True)
            return 1

    def _call(self, arguments: Sequence[str], program: str, own: Sequence[str], *, standalone: bool) -> int:
        from celery.bin.celery import celery

        try:
            celery_app()  # what is wrong with it is one sentence here, and a traceback there
        except ConfigurationError as error:
            place = place_of(error)
            raise ConfigurationError(f"{place}: {error}" if place else str(error)) from error
        words = ["-A", project_settings().app, *own, self.word, *arguments]
        status = celery.main(args=words, prog_name=program, standalone_mode=standalone, auto_envvar_prefix=_ENVIRONMENT)
        return int(status or 0)


def command(word: str) -> type[CeleryCommand]:
    """The class that Django looks for in a module of `management/commands`."""
    return type("Command", (CeleryCommand,), {"word": word, "help": f"celery -A ... {word}", "__module__": __name__})


def _without_djangos(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options of Celery's own command line, which stand before the command, and what is the command's."""
    own, rest, remaining = [], [], iter(arguments)
    for each in remaining:
        if each in _DJANGOS:
            next(remaining, None)
        elif each == "--no-color":
            own.append(each)
        elif not each.startswith(tuple(f"{name}=" for name in _DJANGOS)):
            rest.append(each)
    return own, rest


@contextmanager
def _written_to(command: BaseCommand) -> Iterator[None]:
    """Have what is printed go where `call_command(..., stdout=, stderr=)` says."""
    # Django's wrappers end each piece of text with a newline; a terminal's is what they wrap.
    with redirect_stdout(command.stdout._out), redirect_stderr(command.stderr._out):  # noqa: SLF001
        yield
