"""`celery -A app changes status` and `check`: the state of bridges, their problems, and commands to fix them."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

import click

from mongo_celery.cli.apps import (
    BRIDGE,
    JSON,
    FiniteRange,
    bridges_of,
    console_of,
    line_of,
    one_sentence_errors,
    sentence_for,
)

if TYPE_CHECKING:
    from mongo_celery.bridge.operations.bridge_snapshot import BridgeSnapshot
    from mongo_celery.bridge.wiring import Wiring
    from mongo_celery.findings import Finding

T = TypeVar("T")

_WATCH_SECONDS = 2.0


class UnreadableError(click.ClickException):
    """A bridge that cannot be read: one sentence, and the exit status for failing."""

    exit_code = 2


class failing_errors:  # noqa: N801 - a context manager that reads as a phrase
    """
    For a command whose exit status is a verdict, end with 2 after any error, because 1 means "degraded".

    An unexpected error, such as an ImportError of a task module, keeps its traceback.
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


@click.command(epilog="Example: celery -A shop changes status --watch")
@BRIDGE
@JSON
@click.option("--all", "everything", is_flag=True, help="Show all handlers and partitions.")
@click.option("--ask", is_flag=True, help="Also query the broker and the workers, which takes some seconds.")
@click.option(
    "--watch",
    is_flag=False,
    flag_value=_WATCH_SECONDS,
    default=None,
    type=FiniteRange(min=0.1),
    metavar="[SECONDS]",
    help="Repeat until Ctrl-C. Default: every 2 seconds.",
)
@click.pass_context
def status(
    ctx: click.Context, bridge: str | None, as_json: bool, everything: bool, ask: bool, watch: float | None
) -> None:
    """
    Show health, problems and fixes.

    The lag is the age of the oldest unhandled change, including blocked ones.

    \b
    Exit status:
      0  healthy
      1  degraded: it ends automatically, was requested, or can wait
      2  failing: blocked until a person acts, about to be lost, or not readable
    With --watch the exit status is 0.
    """  # noqa: D301 - \b is click's, and no part of the text
    with failing_errors():
        bridges = _list_configured(ctx, bridge)
        if watch is not None:
            _watch(ctx, bridges, as_json, everything, ask, watch)
            return
        from mongo_celery.bridge.operations.snapshot_reader import LOOK_SECONDS

        found = [_read_or_report(ctx, each, ask=ask, counting=LOOK_SECONDS) for each in bridges]
        _show(ctx, found, as_json, everything)
        ctx.exit(max((each.exit_code for each in found), default=0))


def _list_configured(ctx: click.Context, name: str | None) -> list[Wiring]:
    """Return the bridges. A wrong option ends the command: it is a mistake of the code, and no finding of a state."""
    bridges = bridges_of(ctx, name)
    with one_sentence_errors():
        for each in bridges:
            assert each.options
    return bridges


def _read_or_report(ctx: click.Context, wiring: Wiring, *, ask: bool, counting: float) -> BridgeSnapshot:
    from mongo_celery.bridge.operations.bridge_snapshot import unreadable
    from mongo_celery.bridge.operations.snapshot_reader import read_snapshot

    found, sentence = _try(lambda: read_snapshot(wiring, line_of(ctx, wiring), ask=ask, counting=counting))
    return unreadable(wiring.name, sentence) if found is None else found


def _try(read: Callable[[], T]) -> tuple[T | None, str]:
    """Return the value that was read, or None and the sentence for an error that users can fix."""
    try:
        return read(), ""
    except Exception as error:
        sentence = sentence_for(error)
        if sentence is None:
            raise
        return None, sentence


def _show(ctx: click.Context, found: Sequence[BridgeSnapshot], as_json: bool, everything: bool) -> None:
    if as_json:
        for each in found:
            click.echo(json.dumps(each.plain()))
        return
    from mongo_celery.cli.status_view import status_view

    console_of(ctx).print(status_view(found, everything=everything), crop=False)  # do not cut commands


def _watch(
    ctx: click.Context, bridges: Sequence[Wiring], as_json: bool, everything: bool, ask: bool, seconds: float
) -> None:
    """Repeat until interrupted. If MongoDB does not answer, show that and try again."""
    from threading import Event

    from rich.live import Live

    from mongo_celery.bridge.operations.snapshot_reader import GLANCE_SECONDS
    from mongo_celery.cli.status_view import status_view

    console = console_of(ctx)
    pause = Event()
    with ExitStack() as stack:
        live = None
        if console.is_terminal and not as_json:
            live = stack.enter_context(Live(console=console, auto_refresh=False, screen=False))
        try:
            while True:
                found = [_read_or_report(ctx, each, ask=ask, counting=GLANCE_SECONDS) for each in bridges]
                if live is not None:
                    live.update(status_view(found, everything=everything, folded=True), refresh=True)
                else:
                    _show(ctx, found, as_json, everything)
                pause.wait(seconds)
        except KeyboardInterrupt:
            return


@click.command(epilog="Example: celery -A shop changes check")
@BRIDGE
@JSON
@click.pass_context
def check(ctx: click.Context, bridge: str | None, as_json: bool) -> None:
    """
    Check configuration, servers, workers and current state.

    It takes some seconds and changes nothing. Problems come first. The exit status is that of `status`.
    """
    from mongo_celery.bridge.operations.preflight import check as preflight
    from mongo_celery.findings import failing, worst_severity

    severities = []
    with failing_errors():
        for each in _list_configured(ctx, bridge):
            found, sentence = _try(lambda each=each: preflight(each, line_of(ctx, each)))  # type: ignore[misc]
            findings = [failing("state_unreadable", sentence)] if found is None else found
            severities.append(worst_severity(findings))
            _show_findings(ctx, each.name, findings, as_json)
        ctx.exit(max((("ok", "degraded", "failing").index(each) for each in severities), default=0))


def _show_findings(ctx: click.Context, name: str, findings: Sequence[Finding], as_json: bool) -> None:
    if as_json:
        from mongo_celery.bridge.operations.bridge_snapshot import BridgeSnapshot

        verdict = BridgeSnapshot(bridge=name, findings=tuple(findings)).verdict
        click.echo(json.dumps({"bridge": name, "verdict": verdict, "findings": [asdict(each) for each in findings]}))
        return
    from mongo_celery.cli.findings_view import findings_view

    console_of(ctx).print(findings_view(name, findings), crop=False)
