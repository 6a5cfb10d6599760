"""`celery -A app listener`: the process that leads a bridge or is its standby."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from celery.bin.base import LOG_LEVEL, CeleryDaemonCommand, CeleryOption, handle_preload_options

if TYPE_CHECKING:
    from celery import Celery

    from mongo_celery.bridge.listener.process import Beside


@dataclass(frozen=True, slots=True)
class _Start:
    """The options of this start."""

    bridges: tuple[str, ...]
    on_history_lost: str | None
    take_over: bool
    reason: str | None


@click.command(cls=CeleryDaemonCommand, epilog="Example: celery -A shop listener --http 8080")
@click.option(
    "--bridge",
    "bridges",
    multiple=True,
    metavar="NAME",
    cls=CeleryOption,
    help_group="Listener Options",
    help="Listen for this bridge only. May be repeated. Default: all bridges of the app.",
)
@click.option(
    "--on-history-lost",
    type=click.Choice(["halt", "oldest", "now"]),
    cls=CeleryOption,
    help_group="Listener Options",
    help="For this start: how to continue when the oplog no longer reaches the stored position.",
)
@click.option(
    "--take-over",
    is_flag=True,
    cls=CeleryOption,
    help_group="Listener Options",
    help="For this start: lead even if the bridge's broker, database or app has changed. Never use it for a second "
    "environment.",
)
@click.option(
    "--reason",
    metavar="TEXT",
    cls=CeleryOption,
    help_group="Listener Options",
    help="The reason, for the audit record of --take-over in `changes history`.",
)
@click.option(
    "-l",
    "--loglevel",
    default="INFO",
    cls=CeleryOption,
    type=LOG_LEVEL,
    help_group="Listener Options",
    help="Logging level.",
)
@click.option(
    "--http",
    "http",
    metavar="[HOST:]PORT",
    cls=CeleryOption,
    help_group="Listener Options",
    help="Serve probes, metrics and a status page at this address. Without HOST only this machine can reach it. "
    "Default: serve nothing.",
)
@click.option("--detach", is_flag=True, cls=CeleryOption, help_group="Listener Options", help="Run in the background.")
@click.pass_context
@handle_preload_options
def listener(
    ctx: click.Context,
    bridges: tuple[str, ...],
    on_history_lost: str | None,
    take_over: bool,
    reason: str | None,
    http: str | None,
    loglevel: int,
    detach: bool,
    logfile: str | None = None,
    pidfile: str | None = None,
    uid: str | None = None,
    gid: str | None = None,
    umask: int | None = None,
    **_: Any,
) -> None:
    """
    Listen to MongoDB and dispatch changes to the workers.

    You may run several listeners. One leads and the others are standbys. On SIGTERM the leader steps down immediately,
    even while long handlers run. The next listener takes over the running handlers.
    """
    from celery.platforms import detached, maybe_drop_privileges

    from mongo_celery.bridge.wiring import BRIDGES
    from mongo_celery.cli.apps import app_of

    app = app_of(ctx, BRIDGES)
    chosen = _Start(bridges, on_history_lost, take_over, reason)
    beside = _serving(http)
    if not detach:
        maybe_drop_privileges(uid=uid, gid=gid)
        ctx.exit(_run(app, chosen, beside, loglevel, logfile, pidfile))
    with detached(logfile, pidfile, uid, gid, umask or 0, ctx.obj.workdir):
        ctx.exit(_run(app, chosen, beside, loglevel, logfile, pidfile))


def _serving(given: str | None) -> Beside | None:
    """Return the HTTP service beside the listeners, if requested."""
    if given is None:
        return None
    from mongo_celery.bridge.http import make_http_service
    from mongo_celery.cli.apps import one_sentence_errors

    with one_sentence_errors():
        return make_http_service(given)


def _run(
    app: Celery,
    start: _Start,
    beside: Beside | None,
    loglevel: int,
    logfile: str | None,
    pidfile: str | None,
) -> int:
    from contextlib import ExitStack

    from celery.platforms import create_pidlock

    from mongo_celery.bridge.listener.process import run_listeners
    from mongo_celery.errors import MongoCeleryError
    from mongo_celery.mongo.redaction import without_credentials
    from mongo_celery.visible import visible

    app.log.setup(loglevel, logfile)
    try:
        with ExitStack() as stack:
            if pidfile:
                stack.callback(create_pidlock(pidfile).release)
            return run_listeners(
                app,
                start.bridges,
                start.on_history_lost,
                take_over=start.take_over,
                reason=start.reason,
                beside=beside,
            )
    except MongoCeleryError as error:
        click.secho(f"Error: {visible(without_credentials(str(error)))}", fg="red", err=True)
        return 1
