"""`celery -A app changes`: look at a bridge and act on its partitions."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import click
from celery.bin.base import handle_preload_options

from mongo_celery.cli import steering
from mongo_celery.cli.apps import BRIDGE, JSON, console_of, one_bridge, one_sentence_errors, say
from mongo_celery.cli.dead_letters import dead_letters
from mongo_celery.cli.grants import grants
from mongo_celery.cli.health import bridges_of, health, line_of
from mongo_celery.cli.status import status
from mongo_celery.cli.top import top

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring


@click.group()
@click.pass_context
@handle_preload_options
def changes(ctx: click.Context, **_: Any) -> None:
    """Show and steer the change bridges of an app."""
    del ctx


for _command in (*steering.COMMANDS, dead_letters, grants, health, status, top):
    changes.add_command(_command)


# -- queues ----------------------------------------------------------------------------------------


@changes.command()
@BRIDGE
@JSON
@click.option("--group", "groups", multiple=True, metavar="NAME", help="Only those of this group; may be repeated.")
@click.option("--without-group", is_flag=True, help="Only, or also, those of handlers without a group.")
@click.option("--with-default", is_flag=True, help="Add the app's default queue.")
@click.pass_context
def queues(
    ctx: click.Context,
    bridge: str | None,
    as_json: bool,
    groups: tuple[str, ...],
    without_group: bool,
    with_default: bool,
) -> None:
    """
    Print the queues for workers that serve only changes.

    They stand on one line, separated by commas:

    \b
    celery -A shop worker -Q "$(celery -A shop changes queues)"

    A worker without -Q consumes these queues and the default queue; so do workers that get
    --with-default. Without it the app's default queue is left out, because -Q is for workers that keep
    changes and other tasks apart. Several bridges share the line; --bridge names one.

    Handlers with group="slow" have queues of their own, and so may have workers of their own:

    \b
    celery -A shop worker -Q "$(celery -A shop changes queues --group slow)"
    celery -A shop worker \\
      -Q "$(celery -A shop changes queues --without-group --with-default)"
    """  # noqa: D301 - \b is click's, and no part of the text
    bridges = bridges_of(ctx, bridge)
    default = [str(bridges[0].app.conf.task_default_queue)] if with_default else []
    chosen: set[str | None] = {*groups, None} if without_group else set(groups)
    with one_sentence_errors():
        _check_groups(bridges, chosen)
        names = {each.name: _queues_of(each, chosen) for each in bridges}
    if as_json:
        for name, found in names.items():
            click.echo(json.dumps({"bridge": name, "queues": [*found, *default]}))
    else:
        say(",".join([*(queue for found in names.values() for queue in found), *default]))


def _check_groups(bridges: Sequence[Wiring], groups: Collection[str | None]) -> None:
    """What no handler is in is refused: with nothing behind its -Q a worker would consume everything."""
    known = {group for each in bridges for group in each.groups}
    for group in groups:
        if group not in known:
            named = ", ".join(sorted(filter(None, known)))
            asked = "no handler is without a group" if group is None else f"no handler is in group {group!r}"
            raise click.ClickException(f"{asked}: {f'the groups are {named}' if named else 'none has one'}.")


def _queues_of(wiring: Wiring, groups: Collection[str | None]) -> list[str]:
    """The bridge's queues of these groups; of all where none is named."""
    if not groups:
        return wiring.queue_names
    return [queue for group in wiring.groups if group in groups for queue in wiring.options.queue_names(group)]


# -- head ------------------------------------------------------------------------------------------


@changes.command()
@click.argument("subscription")
@click.argument("partition", type=click.IntRange(min=0))
@click.option(
    "--bytes",
    "most",
    type=click.IntRange(min=0),
    default=4096,
    show_default=True,
    metavar="N",
    help="Show no more of the change than this; 0 for all of it. With --json it is whole.",
)
@BRIDGE
@JSON
@click.pass_context
def head(ctx: click.Context, subscription: str, partition: int, most: int, bridge: str | None, as_json: bool) -> None:
    """
    Show the change at which a partition stands.

    The one that halted it, or the first one that is stored: with its error, its counts, and its bytes as
    extended JSON. These are a document's contents: mind who sees them.
    """
    from mongo_celery.bridge.operations.heads import read_head

    chosen = one_bridge(ctx, bridge)
    with one_sentence_errors():
        found = read_head(chosen, subscription, partition)
    if as_json:
        from dataclasses import asdict

        click.echo(json.dumps({"bridge": chosen.name, **asdict(found)}))
        return
    from mongo_celery.cli.head_view import head_lines

    for line in head_lines(found, most or None):
        say(line)


# -- check -----------------------------------------------------------------------------------------


@changes.command()
@BRIDGE
@JSON
@click.pass_context
def check(ctx: click.Context, bridge: str | None, as_json: bool) -> None:
    """
    Look at everything that a bridge needs, and at how it is.

    MongoDB, rights, oplog, sources, broker, workers and settings, then the reasons of the verdict on what is stored.
    Takes some seconds, changes nothing, and ends with status 1 if anything is wrong: an error, or a reason that is
    failing.
    """
    from mongo_celery.bridge.operations.preflight import check as preflight

    failed = False
    for each in bridges_of(ctx, bridge):
        with one_sentence_errors():
            findings = preflight(each, line_of(ctx, each))
        wrong = any(finding.severity == "failing" for finding in findings)
        failed = failed or wrong
        if as_json:
            from dataclasses import asdict

            found = [asdict(finding) for finding in findings]
            click.echo(json.dumps({"bridge": each.name, "ok": not wrong, "findings": found}))
        else:
            from mongo_celery.cli.check_view import check_view

            console_of(ctx).print(check_view(each.name, findings), crop=False)
    ctx.exit(1 if failed else 0)
