"""`celery -A app changes health`: the verdict on a bridge, for people and for what looks after processes."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import click

from mongo_celery.cli.apps import BRIDGE, all_of, console_of, json_option, sentence_for

if TYPE_CHECKING:
    from mongo_celery.bridge.operations.verdict import BridgeVerdict
    from mongo_celery.bridge.wiring import Wiring
    from mongo_celery.command_line import CommandLine

T = TypeVar("T")


class UnreadableError(click.ClickException):
    """Nobody can tell how a bridge is: one sentence, and the status of what is failing."""

    exit_code = 2


@click.command()
@BRIDGE
@json_option("bridge")
@click.pass_context
def health(ctx: click.Context, bridge: str | None, as_json: bool) -> None:
    """
    Say whether a bridge is healthy, why not, and what cures it.

    Ends with status 0 where all is healthy; 1 where something is degraded: it goes on by itself, was asked for, or can
    wait; 2 where something is failing: it stands still until somebody acts, or is about to be lost. MongoDB that does
    not answer is failing, too, as whatever keeps this command from telling. Broker and workers are asked, for some
    seconds.
    """
    from mongo_celery.bridge.operations.verdict import unreadable

    verdicts = []
    with unreadable_errors():
        for each in bridges_of(ctx, bridge):
            verdict, sentence = told(lambda each=each: _read(each, line_of(ctx, each)))  # type: ignore[misc]
            verdicts.append(verdict if verdict is not None else unreadable(each.name, sentence))
    if as_json:
        for verdict in verdicts:
            click.echo(json.dumps({"bridge": verdict.bridge, **verdict.plain()}))
    else:
        from mongo_celery.cli.verdict_view import verdict_view

        for verdict in verdicts:
            console_of(ctx).print(verdict_view(verdict), crop=False)
    ctx.exit(worst(verdicts))


def _read(wiring: Wiring, line: CommandLine) -> BridgeVerdict:
    from mongo_celery.bridge.operations.preflight import ask
    from mongo_celery.bridge.operations.verdict import read_verdict

    return read_verdict(wiring, line, ask)


def bridges_of(ctx: click.Context, name: str | None) -> list[Wiring]:
    """The bridge of that name, or all of the app."""
    from mongo_celery.bridge.wiring import BRIDGES

    return all_of(ctx, BRIDGES, name)


class unreadable_errors:  # noqa: N801 - a context manager that reads as a phrase
    """
    Have a command whose status is that of a verdict end with 2 after any error: 1 would be "degraded".

    What nobody foresaw, such as an ImportError of a task module, keeps its traceback.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, click.exceptions.Exit | click.Abort) or not isinstance(error, Exception):
            return
        if isinstance(error, click.ClickException):
            if error.exit_code == 1:
                raise UnreadableError(error.message) from None
            return
        from mongo_celery.mongo.redaction import short

        raise UnreadableError(f"{''.join(traceback.format_exception(error))}{type(error).__name__}: {short(error)}")


def line_of(ctx: click.Context, wiring: Wiring) -> CommandLine:
    """How whoever types this command types others, of the same bridge."""
    from mongo_celery.bridge.wiring import BRIDGES
    from mongo_celery.command_line import CommandLine

    given = ctx.find_root().params.get("app")
    bridge = wiring.name if len(BRIDGES.of(wiring.app)) > 1 else None
    return CommandLine(given, bridge) if isinstance(given, str) else CommandLine(bridge=bridge)


def told(read: Callable[[], T]) -> tuple[T | None, str]:
    """What is read; or None, and the sentence on the error that users can cure."""
    try:
        return read(), ""
    except Exception as error:
        sentence = sentence_for(error)
        if sentence is None:
            raise
        return None, sentence


def worst(verdicts: Iterable[BridgeVerdict]) -> int:
    """The status with which a command ends that has said these verdicts."""
    return max((verdict.exit_code for verdict in verdicts), default=0)
