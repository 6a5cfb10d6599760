"""`celery -A app changes rewind | replay | history`: where handlers stand, and what they do again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from mongo_celery.cli.apps import json_option, one_of, one_sentence_errors, say

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

BRIDGE = click.option("--bridge", metavar="NAME", help="The bridge, where the app has several.")
JSON = json_option("bridge")
YES = click.option("--yes", is_flag=True, help="Do not ask.")
DRY_RUN = click.option("--dry-run", is_flag=True, help="Say what would be done, and change nothing.")
REASON = click.option("--reason", metavar="TEXT", help="Why, for those who read `changes history`.")
KEY = click.option("--key", metavar="JSON|TEXT", help="A document's _id; with partition_by, what that gives.")
SOURCE = click.option("--source", metavar="DB.COLLECTION", help="That of the key, where the handler has several.")


def one_bridge(ctx: click.Context, name: str | None) -> Wiring:
    """The bridge that a command acts on."""
    from mongo_celery.bridge.wiring import BRIDGES

    return one_of(ctx, BRIDGES, name, "--bridge")


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
    from mongo_celery.cli.health import line_of
    from mongo_celery.cli.positions_view import plan_lines, rewound_lines

    wiring = one_bridge(ctx, bridge)
    with one_sentence_errors():
        plan = plan_rewind(wiring, handler, parse_place(to), key=key, source=source)
    for line in plan_lines(plan):
        say(line, err=not dry_run or as_json)
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
    for text in rewound_lines(plan, moved, line_of(ctx, wiring)):
        say(text)


@click.command()
@click.argument("handler", required=False)
@BRIDGE
@JSON
@click.pass_context
def history(ctx: click.Context, handler: str | None, bridge: str | None, as_json: bool) -> None:
    """
    Show who has moved positions, when and why.

    Rewinds, replays, take-overs, and handlers that were forgotten; the last 50 of the bridge, the latest last.
    """
    from mongo_celery.bridge.operations.rewinding import read_history
    from mongo_celery.cli.positions_view import history_lines

    wiring = one_bridge(ctx, bridge)
    with one_sentence_errors():
        found = read_history(wiring, handler)
    if as_json:
        click.echo(json.dumps({"bridge": wiring.name, "interventions": found}))
        return
    for line in history_lines(wiring.name, found):
        say(line)
