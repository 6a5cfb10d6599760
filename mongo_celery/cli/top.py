"""`celery -A app changes top`: a bridge on one screen, again and again, until somebody has seen enough."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from mongo_celery.cli.apps import BRIDGE, FiniteRange, console_of
from mongo_celery.cli.health import bridges_of, line_of

if TYPE_CHECKING:
    from mongo_celery.bridge.operations.rates import Rates
    from mongo_celery.bridge.operations.readings import Reading
    from mongo_celery.bridge.operations.verdict import BridgeVerdict
    from mongo_celery.bridge.wiring import Wiring
    from mongo_celery.cli.top_view import Glance

_ENDING_KEYS = b"qQ\x03\x04"
_PATIENCE_SECONDS = 1.0
_TICK_SECONDS = 0.1


@click.command()
@BRIDGE
@click.option(
    "--every",
    type=FiniteRange(min=0.2),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to look.",
)
@click.pass_context
def top(ctx: click.Context, bridge: str | None, every: float) -> None:
    """
    Show a bridge on one screen, and go on until q or Ctrl-C.

    The verdict with its commands, lag and rates, handlers with their partitions, and what needs attention: what does
    not fit below is left out. It is what the listener's page shows with `listener --http`. For a program:
    `status --watch --json`.
    """
    console, bridges = console_of(ctx), bridges_of(ctx, bridge)
    if not console.is_terminal:
        instead = line_of(ctx, bridges[0]).changes("status", "--watch")
        raise click.ClickException(f"top draws on a terminal, and this is none: use `{instead}`.")
    from rich.live import Live

    from mongo_celery.cli.top_view import top_view

    watched = [_Watched(ctx, each) for each in bridges]
    with _keys() as ended, Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as live:
        try:
            while True:
                live.update(top_view([each.look() for each in watched]), refresh=True)
                if ended(every):
                    return
        except KeyboardInterrupt:
            return
        finally:
            for each in watched:
                each.stop()


class _Watched:
    """One bridge, what was read of it last, and its rates; a MongoDB that hangs does not keep the keys from working."""

    def __init__(self, ctx: click.Context, wiring: Wiring) -> None:
        from mongo_celery.bridge.operations.rates import Rates
        from mongo_celery.bridge.operations.readings import Reading

        self._name = wiring.name
        self._rates: Rates = Rates()
        line = line_of(ctx, wiring)

        def read() -> tuple[dict[str, Any], BridgeVerdict]:
            from mongo_celery.bridge.operations.overview import overview
            from mongo_celery.bridge.operations.status import read_status
            from mongo_celery.bridge.operations.verdict import judge

            status = read_status(wiring)
            return overview(status), judge(status, line=line)

        self._reading: Reading[tuple[dict[str, Any], BridgeVerdict]] = Reading("MongoDB", read, keep=_TICK_SECONDS)
        self._last: dict[str, Any] | None = None

    def look(self) -> Glance:
        from mongo_celery.bridge.operations.verdict import unreadable
        from mongo_celery.cli.top_view import Glance

        answer = self._reading.get(time.monotonic() + _PATIENCE_SECONDS)
        if answer.value is None:
            return Glance(unreadable(self._name, answer.error or ""), self._last, self._rates)
        self._last, verdict = answer.value
        self._rates.remember(self._last, time.monotonic())
        return Glance(verdict, self._last, self._rates)

    def stop(self) -> None:
        self._reading.stop()


@contextmanager
def _keys() -> Iterator[Any]:
    """Gives what waits so many seconds for a key that ends; keys need no Enter, and are not shown."""
    if not sys.stdin.isatty():
        yield lambda seconds: bool(select.select([], [], [], seconds)[0])
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def ended(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([descriptor], [], [], left)[0]:
                pressed = os.read(descriptor, 64)
                if not pressed or any(key in _ENDING_KEYS for key in pressed):
                    return True
        return False

    try:
        tty.setcbreak(descriptor)
        yield ended
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
