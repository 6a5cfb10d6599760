"""`celery -A app changes forget`."""

from __future__ import annotations

import json

import click

from mongo_celery.cli.apps import BRIDGE, DRY_RUN, JSON, REASON, YES, one_bridge, one_sentence_errors, say


@click.command()
@click.argument("handler")
@click.option("--dead-letters", "letters", is_flag=True, help="Its dead letters, too.")
@click.option(
    "--stamps",
    multiple=True,
    metavar="DATABASE.COLLECTION",
    help="Its stamps in the documents of this collection, too; once for each that it has written fenced.",
)
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
    stamps: tuple[str, ...],
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
    from mongo_celery.bridge.operations import forgetting
    from mongo_celery.cli.positions_view import holding_lines

    wiring = one_bridge(ctx, bridge)
    with one_sentence_errors():
        plan = forgetting.plan_forget(wiring, handler, letters=letters, stamps=stamps)
    for line in holding_lines(plan):
        say(line, err=not dry_run or as_json)
    if not dry_run:
        if not yes:
            click.confirm("Remove all of it?", abort=True, err=True)
        with one_sentence_errors():
            forgetting.forget(wiring, plan, letters=letters, reason=reason, stamps=stamps)
    if as_json:
        click.echo(json.dumps({"bridge": wiring.name, "dry_run": dry_run, **plan.plain()}))
    elif not dry_run:
        say(f"{handler}: forgotten")
