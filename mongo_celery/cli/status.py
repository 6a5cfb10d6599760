"""`celery -A app changes status`: how a bridge stands, and the verdict on it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from mongo_celery.cli.apps import BRIDGE, FiniteRange, console_of, json_option
from mongo_celery.cli.health import UnreadableError, bridges_of, line_of, told, unreadable_errors, worst

if TYPE_CHECKING:
    from rich.console import Console

    from mongo_celery.bridge.operations.verdict import BridgeVerdict
    from mongo_celery.bridge.wiring import Wiring

_WATCH_SECONDS = 2.0


@click.command()
@BRIDGE
@json_option("bridge")
@click.option("--all", "everything", is_flag=True, help="Show all handlers and partitions, not only some.")
@click.option(
    "--watch",
    is_flag=False,
    flag_value=_WATCH_SECONDS,
    default=None,
    type=FiniteRange(min=0.1),
    metavar="[SECONDS]",
    help="Repeat until Ctrl-C, by default every 2 seconds.",
)
@click.pass_context
def status(ctx: click.Context, bridge: str | None, as_json: bool, everything: bool, watch: float | None) -> None:
    """
    Show the leader, the lag, what is blocked, and what to do.

    The lag is the time from the position up to which all is done to MongoDB's latest operation. Numbers
    of changes under way come from the listener's last report, a few seconds old.

    Ends as `health` does, with status 0 where all is healthy, 1 where something is degraded, and 2 where something is
    failing, or MongoDB does not answer; but broker and workers are not asked. With --watch it ends with status 0.
    """
    with unreadable_errors():
        bridges = bridges_of(ctx, bridge)
        if watch is not None:
            _watch(ctx, bridges, as_json, everything, watch)
            return
        found = [_read_or_error(ctx, each) for each in bridges]
        if len(found) == 1 and found[0][0]["state"] == "unknown":
            raise UnreadableError(found[0][0]["error"])
        _show(console_of(ctx), found, as_json, everything)
        ctx.exit(worst(verdict for _, verdict in found))


Told = tuple[dict[str, Any], "BridgeVerdict"]


def _read(ctx: click.Context, wiring: Wiring) -> Told:
    from mongo_celery.bridge.operations.amounts import LOOK_SECONDS
    from mongo_celery.bridge.operations.status import read_status
    from mongo_celery.bridge.operations.verdict import judge

    found = read_status(wiring, LOOK_SECONDS)
    return found, judge(found, line=line_of(ctx, wiring))


def _show(console: Console, found: Sequence[Told], as_json: bool, everything: bool) -> None:
    if as_json:
        for each, verdict in found:
            click.echo(json.dumps({**each, **verdict.plain()}))
        return
    from mongo_celery.cli.status_view import status_view

    console.print(status_view(found, everything=everything), crop=False)  # a command must not be cut


def _watch(ctx: click.Context, bridges: Sequence[Wiring], as_json: bool, everything: bool, seconds: float) -> None:
    """Repeat until interrupted; a MongoDB that does not answer is shown, and asked again."""
    from threading import Event

    from rich.live import Live

    from mongo_celery.cli.status_view import status_view

    console = console_of(ctx)
    pause = Event()
    with ExitStack() as stack:
        live = None
        if console.is_terminal and not as_json:
            live = stack.enter_context(Live(console=console, auto_refresh=False, screen=False))
        try:
            while True:
                found = [_read_or_error(ctx, each) for each in bridges]
                if live is not None:
                    live.update(status_view(found, everything=everything, folded=True), refresh=True)
                else:
                    _show(console, found, as_json, everything)
                pause.wait(seconds)
        except KeyboardInterrupt:
            return


def _read_or_error(ctx: click.Context, wiring: Wiring) -> Told:
    from mongo_celery.bridge.operations.verdict import unreadable

    read, sentence = told(lambda: _read(ctx, wiring))
    if read is not None:
        return read
    return {"bridge": wiring.name, "state": "unknown", "error": sentence}, unreadable(wiring.name, sentence)
