"""`celery -A app changes`: the commands that change the state of a bridge, and their history."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from mongo_celery.cli.acting import HANDLER, PARTITION, acting
from mongo_celery.cli.apps import BRIDGE, JSON, SOURCE, FiniteRange, one_bridge, one_sentence_errors, say

if TYPE_CHECKING:
    from mongo_celery.bridge.operations.operations import Operations
    from mongo_celery.plan import Plan

ANY_HANDLER = click.argument("handler", required=False)
SOURCES = click.option(
    "--source", "sources", multiple=True, metavar="DB.COLLECTION", help="Only this collection; may be repeated."
)
LIMIT = click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Show at most N.")


# -- partitions ------------------------------------------------------------------------------------


@click.command()
@ANY_HANDLER
@PARTITION
@acting
def pause(operations: Operations, **given: Any) -> Plan:
    """
    Start no new changes.

    Running changes may finish, and nothing is lost: during a longer pause later changes are stored. Without HANDLER it
    pauses the whole bridge.
    """
    return operations.pause(**given)


@click.command()
@ANY_HANDLER
@PARTITION
@acting
def resume(operations: Operations, **given: Any) -> Plan:
    """Continue paused partitions. Without HANDLER, continue the whole bridge."""
    return operations.resume(**given)


@click.command()
@ANY_HANDLER
@PARTITION
@acting
def retry(operations: Operations, **given: Any) -> Plan:
    """
    Run halted and retrying changes immediately.

    Their attempts start again at zero. Without HANDLER it retries all halted and retrying partitions of this app's
    handlers.
    """
    return operations.retry(**given)


@click.command()
@HANDLER
@PARTITION
@click.option("--discard", is_flag=True, help="Keep nothing of the changes.")
@acting
def skip(operations: Operations, **given: Any) -> Plan:
    """
    Move halted changes to the dead letters.

    Their partitions continue. `dead-letters` lists, replays and discards the changes. Without PARTITION it skips all
    halted partitions of HANDLER.
    """
    return operations.skip(**given)


# -- handlers --------------------------------------------------------------------------------------


@click.command()
@HANDLER
@click.option("--to", metavar="oldest|now|TIME|TOKEN", required=True, help="The place: see above.")
@click.option("--key", metavar="JSON|TEXT", help="A document's _id; with partition_by, what that gives.")
@SOURCE
@acting
def reset(operations: Operations, **given: Any) -> Plan:
    """
    Move a handler to another position in the stream.

    Everything after the position is handled again, in order. `oldest` is the beginning of the oplog. TIME is ISO 8601
    (UTC without an offset) and begins with the changes of that second. TOKEN is a resume token and means its time:
    its change and later ones. `now` moves forward: changes in between are not handled. Partitions that are before the
    position do not move.

    With --key it moves only the partition of that key, with all its other keys.

    Stop all listeners first. Workers may run. Everything that handlers wrote, also through fenced(), is written again.

    If the oplog no longer reaches the position of HANDLER, `oldest` and `now` give up the lost changes. Stored changes
    still run, and listeners may run meanwhile.
    """
    return operations.reset(**given)


@click.command()
@HANDLER
@click.option("--dead-letters", is_flag=True, help="Remove its dead letters, too.")
@click.option(
    "--stamps",
    multiple=True,
    metavar="DB.COLLECTION",
    help="Also remove its stamps from the documents of this collection. May be repeated.",
)
@acting
def remove(operations: Operations, **given: Any) -> Plan:
    """
    Remove the stored state of a deleted handler.

    Its positions and stored changes are removed, and these changes will never be handled. If a handler with this name
    returns, it is new. Listeners may run if their code does not have it. If the command is interrupted, repeat it.
    """
    return operations.remove(**given)


# -- snapshots -------------------------------------------------------------------------------------


@click.group()
def snapshot() -> None:
    """Give a handler the existing documents, between its changes."""


@snapshot.command()
@ANY_HANDLER
@SOURCES
@click.option("--match", metavar="JSON", help="Only documents whose event fulfils this expression, as `match=` does.")
@click.option("--rate", type=FiniteRange(min=0.01), metavar="N", help="Documents a second at most.")
@acting
def start(operations: Operations, **given: Any) -> Plan:
    """
    Start a snapshot of each collection of a handler.

    Each document comes once, as operation type `snapshot`, exactly at its place: after the changes that it includes,
    before later ones. A restart continues the snapshot. You may omit HANDLER if only one is possible.

    The collections are those that the handler watches, or those of --source. The handler's `match` applies, and --match
    narrows it further. `operations` and `fields` do not apply.
    """
    return operations.start_snapshot(**given)


@snapshot.command()
@HANDLER
@SOURCES
@acting
def stop(operations: Operations, **given: Any) -> Plan:
    """Stop the snapshots of a handler at their current place. `status` shows them."""
    return operations.stop_snapshot(**given)


@snapshot.command("resume")
@HANDLER
@SOURCES
@acting
def resume_snapshot(operations: Operations, **given: Any) -> Plan:
    """Continue stopped or failed snapshots. Without --source it asks if one of them was stopped."""
    return operations.resume_snapshot(**given)


# -- the bridge ------------------------------------------------------------------------------------


@click.command("rotate-key")
@click.option(
    "--overlap",
    type=FiniteRange(min=0),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long the old key is accepted afterwards; 0 if others may know it.",
)
@acting
def rotate_key(operations: Operations, **given: Any) -> Plan:
    """
    Replace the key that signs messages.

    Nothing stalls: workers know the new key before it is used, and accept the old one during the overlap. Messages that
    wait longer are dispatched again.
    """
    return operations.rotate_key(**given)


@click.command()
@ANY_HANDLER
@LIMIT
@BRIDGE
@JSON
@click.pass_context
def history(ctx: click.Context, handler: str | None, limit: int, bridge: str | None, as_json: bool) -> None:
    """
    Show who changed a bridge, when, how and why.

    There is one audit record for each command that changed something, for HANDLER or for all, the latest last.
    """
    from mongo_celery.bridge.operations.acts import effect_text, read_history
    from mongo_celery.quantities import moment

    wiring = one_bridge(ctx, bridge)
    with one_sentence_errors():
        found = read_history(wiring, handler, limit)
    if as_json:
        click.echo(json.dumps({"bridge": wiring.name, "audit_records": found}))
        return
    for each in found:
        say(f"{moment(each['at'])}  {each['command']}  {each['by']}")
        for text in filter(None, (effect_text(each["effect"] or {}), each["reason"])):
            say(f"  {text}")
    if not found:
        say(f"{wiring.name}: no command has changed anything")


COMMANDS = (pause, resume, retry, skip, reset, remove, snapshot, rotate_key, history)
