"""The common parts of commands: the user's app, its bridges and outboxes, options, console and short errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

import click

from mongo_celery.visible import visible, visible_lines

if TYPE_CHECKING:
    from celery import Celery
    from rich.console import Console

    from mongo_celery.app import Named, Registry
    from mongo_celery.bridge.wiring import Wiring
    from mongo_celery.command_line import CommandLine
    from mongo_celery.mongo.verdicts import ErrorContext

T = TypeVar("T", bound="Named")

_PIPE_WIDTH = 100_000
"""Lines for a pipe, such as to grep, do not wrap."""


class _Unpadded:
    """A file that removes the padding of table cells at the ends of lines."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        """Write whole lines."""
        return self._file.write("\n".join(line.rstrip(" ") for line in text.split("\n")))


class FiniteRange(click.FloatRange):
    """A number within bounds. Refuses infinity, and NaN, which passes every comparison with a bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert a typed value."""
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return found


def say(text: object, *, err: bool = False) -> None:
    """Print one line with foreign control characters made visible. `err` prints to standard error."""
    click.echo(visible(text), err=err)


def json_option(each: str) -> Callable[[Any], Any]:
    """Return the option `--json`. The help names the content of a line."""
    return click.option("--json", "as_json", is_flag=True, help=f"Print one JSON object on one line for each {each}.")


BRIDGE = click.option("--bridge", metavar="NAME", help="The bridge, if the app has several.")
JSON = json_option("bridge")
YES = click.option("--yes", is_flag=True, help="Skip the confirmation prompt.")
DRY_RUN = click.option("--dry-run", is_flag=True, help="Show the plan, and change nothing.")
SOURCE = click.option(
    "--source", metavar="DB.COLLECTION", help="The collection of the key, if the handler has several."
)
REASON = click.option("--reason", metavar="TEXT", help="The reason, for the audit record in `changes history`.")


def bridges_of(ctx: click.Context, name: str | None) -> list[Wiring]:
    """Return the bridge with this name, or all bridges of the app."""
    from mongo_celery.bridge.wiring import BRIDGES

    return all_of(ctx, BRIDGES, name)


def line_of(ctx: click.Context, wiring: Wiring) -> CommandLine:
    """Return the beginning of a command for the same bridge, like the typed one."""
    from mongo_celery.bridge.wiring import BRIDGES
    from mongo_celery.command_line import CommandLine

    given = ctx.find_root().params.get("app")
    bridge = wiring.name if len(BRIDGES.of(wiring.app)) > 1 else None
    return CommandLine(given, bridge) if isinstance(given, str) else CommandLine(bridge=bridge)


def one_bridge(ctx: click.Context, name: str | None) -> Wiring:
    """Return the bridge for a command."""
    from mongo_celery.bridge.wiring import BRIDGES

    return one_of(ctx, BRIDGES, name, "--bridge")


def app_of(ctx: click.Context, registry: Registry[Any]) -> Celery:
    """
    Return the app that `-A` names, with its task modules imported.

    Raises:
        click.ClickException: `-A` is missing, or nothing of this kind belongs to the app.
    """
    app: Celery = ctx.obj.app
    if not ctx.find_root().params.get("app") and not registry.of(app):
        words = ctx.command_path.partition(" ")[2]  # as typed after `celery`, without options
        raise click.ClickException(f"No Celery app is named. Name yours with -A: celery -A shop {words}")
    with one_sentence_errors():
        app.loader.import_default_modules()
        app.finalize()
        registry.select(app, [])
    return app


def all_of(ctx: click.Context, registry: Registry[T], name: str | None) -> list[T]:
    """Return the object with this name, or all objects of the app that `-A` names. Errors as in `app_of`."""
    app = app_of(ctx, registry)
    with one_sentence_errors():
        return registry.select(app, [name] if name else [])


def one_of(ctx: click.Context, registry: Registry[T], name: str | None, option: str = "--name") -> T:
    """Return the object for a command. If the app has several, the command must name one."""
    found = all_of(ctx, registry, name)
    if len(found) > 1:
        names = ", ".join(sorted(each.name for each in found))
        raise click.ClickException(f"This app has several {registry.kind}s. Choose one of {names} with {option}.")
    return found[0]


def console_of(ctx: click.Context, *, err: bool = False) -> Console:
    """Return the console for people. Text other than the answer, such as a question, goes to standard error."""
    from rich.console import Console

    console = Console(no_color=ctx.obj.no_color or None, highlight=False, stderr=err)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
        console.file = cast("TextIO", _Unpadded(cast("TextIO", console.file)))
    return console


class one_sentence_errors:  # noqa: N801 - a context manager that reads as a phrase
    """
    Turn errors that users can fix into one sentence without traceback, and status 1.

    Args:
        concern: returns the error context of MongoDB errors. Called only after the server has answered.
    """

    def __init__(self, concern: Callable[[], ErrorContext] | None = None) -> None:
        self._concern = concern

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        sentence = sentence_for(error, self._concern)
        if sentence is not None:
            raise click.ClickException(visible_lines(sentence, "  ")) from None


def sentence_for(error: BaseException | None, concern: Callable[[], ErrorContext] | None = None) -> str | None:
    """Return the sentence for an error, or None if it must be raised. Arguments as above."""
    if error is None or isinstance(error, click.ClickException):
        return None
    from pymongo.errors import OperationFailure, PyMongoError

    from mongo_celery.errors import MongoCeleryError
    from mongo_celery.mongo.opening import to_user_error
    from mongo_celery.mongo.redaction import short, without_credentials
    from mongo_celery.mongo.verdicts import ErrorContext

    if isinstance(error, PyMongoError):
        # Other errors may come from opening the error context.
        if concern is not None and isinstance(error, OperationFailure):
            known = to_user_error(error, concern())
        else:
            known = to_user_error(error, ErrorContext("the data of this command", "readWrite there"))
        if known is error:
            return f"MongoDB refused the command: {short(error)}. Check the URL and the server."
        error = known
    return without_credentials(str(error)) if isinstance(error, MongoCeleryError) else None
