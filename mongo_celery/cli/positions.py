"""`celery -A app changes rewind | history`: where handlers stand, and who has changed what."""

from __future__ import annotations

import json

import click

from mongo_celery.cli.apps import BRIDGE, DRY_RUN, JSON, REASON, YES, one_bridge, one_sentence_errors, say

KEY = click.option("--key", metavar="JSON|TEXT", help="A document's _id; with partition_by, what that gives.")
SOURCE = click.option("--source", metavar="DB.COLLECTION", help="That of the key, where the handler has several.")


@click.command()
@click.argument("handler")
@click.option("--to", "to", metavar="TIME|TOKEN|oldest|now", required=True, help="The place: see above.")
@KEY
@SOURCE
@REASON
@YES
@DRY_RUN
@BRIDGE
@JSON
@click.pass_context
def rewind(
    ctx: click.Context,
    handler: str,
    to: str,
    key: str | None,
    source: str | None,
    reason: str | None,
    yes: bool,
    dry_run: bool,
    bridge: str | None,
    as_json: bool,
) -> None:
    """
    Send a handler back, or forward to now.

    Everything behind the place is handled again, in order. TIME is ISO 8601 (UTC without an offset): changes of that
    second and later. TOKEN is a resume token of this bridge's stream: changes behind its change. `oldest` is where the
    oplog begins. `now` goes forward: what lies between is not handled. Partitions that stand before the place stay.

    With --key only the partition in which the changes of that key lie: those of other keys in it come along.

    Stop all listeners first; workers may stay. What handlers wrote, also through fenced(), is written again.
    """
    from mongo_celery.bridge.operations.places import parse_place
    from mongo_celery.bridge.operations.rewinding import plan_rewind
    from mongo_celery.bridge.operations.rewinding import rewind as rewound
    from mongo_celery.cli.apps import line_of
    from mongo_celery.cli.positions_view import plan_lines, rewound_lines

    wiring = one_bridge(ctx, bridge)
    with one_sentence_errors():
        plan = plan_rewind(wiring, handler, parse_place(to), key=key, source=source)
    line = line_of(ctx, wiring)
    for text in plan_lines(plan, line):
        say(text, err=not dry_run or as_json)
    if dry_run:
        if as_json:
            click.echo(json.dumps({"bridge": wiring.name, "dry_run": True, **plan.plain()}))
        return
    if plan.leader is None and not yes:
        question = "Pass over what lies between?" if plan.forward else "Handle all of that again?"
        click.confirm(question, abort=True, err=True)
    with one_sentence_errors():
        moved = rewound(wiring, plan, asked=to, reason=reason)
    if as_json:
        done = {"moved": list(moved.partitions), "withdrawn": moved.withdrawn}
        click.echo(json.dumps({"bridge": wiring.name, "dry_run": False, **plan.plain(), **done}))
        return
    for text in rewound_lines(plan, moved, line):
        say(text)


@click.command()
@click.argument("handler", required=False)
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Maximum number to show.")
@BRIDGE
@JSON
@click.pass_context
def history(ctx: click.Context, handler: str | None, limit: int, bridge: str | None, as_json: bool) -> None:
    """
    Show who has changed a bridge, when, how and why.

    One audit record for each command that has changed something; of one HANDLER, or of all; the latest last.
    """
    from mongo_celery.bridge.operations.acts import read_history
    from mongo_celery.cli.positions_view import history_lines

    wiring = one_bridge(ctx, bridge)
    with one_sentence_errors():
        found = read_history(wiring, handler, limit)
    if as_json:
        click.echo(json.dumps({"bridge": wiring.name, "audit_records": found}))
        return
    for line in history_lines(wiring.name, found):
        say(line)
