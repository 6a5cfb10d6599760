"""`celery -A app changes rename | forget`: whose positions they are."""

from __future__ import annotations

import json

import click

from mongo_celery.cli.apps import one_sentence_errors, say
from mongo_celery.cli.positions import BRIDGE, DRY_RUN, JSON, REASON, YES, one_bridge


@click.command()
@click.argument("old")
@click.argument("new")
@REASON
@YES
@DRY_RUN
@BRIDGE
@JSON
@click.pass_context
def rename(
    ctx: click.Context,
    old: str,
    new: str,
    reason: str | None,
    yes: bool,
    dry_run: bool,
    bridge: str | None,
    as_json: bool,
) -> None:
    """
    Give what is stored of a handler to its new name.

    For a handler that was renamed in the code: positions, layout, stored changes, dead letters and replays of OLD go
    over to NEW, which this app has. Stop all listeners before; workers of the old code, too. If it is interrupted,
    repeat it.
    """
    from mongo_celery.bridge.operations import renaming
    from mongo_celery.cli.health import line_of
    from mongo_celery.cli.positions_view import name_lines

    wiring = one_bridge(ctx, bridge)
    with one_sentence_errors():
        plan = renaming.plan_rename(wiring, old, new, line_of(ctx, wiring))
    for line in name_lines(plan):
        say(line, err=not dry_run or as_json)
    if not dry_run:
        if plan.leader is None and not yes:
            click.confirm(f"Let it be {new} from now on?", abort=True, err=True)
        with one_sentence_errors():
            renaming.rename(wiring, plan, reason)
    if as_json:
        click.echo(json.dumps({"bridge": wiring.name, "dry_run": dry_run, **plan.plain()}))
    elif not dry_run:
        say(f"{old} is {new} now; start a listener to go on")


@click.command()
@click.argument("handler")
@click.option("--dead-letters", "letters", is_flag=True, help="Its dead letters, too.")
@REASON
@YES
@DRY_RUN
@BRIDGE
@JSON
@click.pass_context
def forget(
    ctx: click.Context,
    handler: str,
    letters: bool,
    reason: str | None,
    yes: bool,
    dry_run: bool,
    bridge: str | None,
    as_json: bool,
) -> None:
    """
    Remove what is stored of a handler that is gone for good.

    Its positions, and its stored changes: they will never be handled. A handler that comes back under this name is
    new. Listeners may stay, if they run code without it. If it is interrupted, repeat it.
    """
    from mongo_celery.bridge.operations import renaming
    from mongo_celery.cli.positions_view import name_lines

    wiring = one_bridge(ctx, bridge)
    with one_sentence_errors():
        plan = renaming.plan_forget(wiring, handler, letters=letters)
    for line in name_lines(plan):
        say(line, err=not dry_run or as_json)
    if not dry_run:
        if not yes:
            click.confirm("Remove all of it?", abort=True, err=True)
        with one_sentence_errors():
            renaming.forget(wiring, plan, letters=letters, reason=reason)
    if as_json:
        click.echo(json.dumps({"bridge": wiring.name, "dry_run": dry_run, **plan.plain()}))
    elif not dry_run:
        say(f"{handler}: forgotten")
