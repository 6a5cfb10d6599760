"""`celery -A app changes`: the commands that change the state of a bridge, and their history."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from mongo_celery.cli.acting import HANDLER, PARTITION, acting
from mongo_celery.cli.apps import BRIDGE, JSON, FiniteRange, one_bridge, one_sentence_errors, say

if TYPE_CHECKING:
    from mongo_celery.bridge.operations.operations import Operations
    from mongo_celery.plan import Plan

ANY_HANDLER = click.argument("handler", required=False)
LIMIT = click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Show at most N.")


# -- partitions ------------------------------------------------------------------------------------


@click.command()
@ANY_HANDLER
@PARTITION
@acting
def pause(operations: Operations, **given: Any) -> Plan:
    """
    Start no new changes.

    Changes that run may finish, and nothing is lost: what a longer pause holds back is stored. Without HANDLER it
    pauses the whole bridge.
    """
    return operations.pause(**given)


@click.command()
@ANY_HANDLER
@PARTITION
@acting
def resume(operations: Operations, **given: Any) -> Plan:
    """Let paused partitions continue. Without HANDLER the whole bridge."""
    return operations.resume(**given)


@click.command()
@ANY_HANDLER
@PARTITION
@acting
def retry(operations: Operations, **given: Any) -> Plan:
    """
    Run halted and retrying changes immediately.

    Their attempts are counted anew. Without HANDLER all halted and retrying partitions of the bridge whose handler this
    app has: nothing would run the others.
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

    Their partitions continue. `dead-letters` shows, replays and discards them. Without PARTITION all halted partitions
    of HANDLER.
    """
    return operations.skip(**given)


# -- handlers --------------------------------------------------------------------------------------


@click.command()
@HANDLER
@click.option("--to", metavar="oldest|now|TIME|TOKEN", required=True, help="The place: see above.")
@click.option("--key", metavar="JSON|TEXT", help="A document's _id; with partition_by, what that gives.")
@click.option("--source", metavar="DB.COLLECTION", help="That of the key, if the handler has several.")
@acting
def reset(operations: Operations, **given: Any) -> Plan:
    """
    Move a handler to another place in the stream.

    Everything after the place is handled again, in order. `oldest` is where the oplog begins. TIME is ISO 8601 (UTC
    without an offset): changes of that second and later. TOKEN is a resume token of this bridge's stream: changes after
    its change. `now` goes forward: what lies between is not handled. Partitions before the place stay.

    With --key it moves only the partition of that key: other keys of that partition come along.

    Stop all listeners first; workers may stay. What handlers wrote, also through fenced(), is written again.

    If the oplog no longer reaches the position of HANDLER, `oldest` and `now` give up what was lost. Stored changes run
    all the same, and listeners may stay.
    """
    return operations.reset(**given)


@click.command()
@HANDLER
@click.option("--dead-letters", is_flag=True, help="Remove its dead letters, too.")
@click.option(
    "--stamps",
    multiple=True,
    metavar="DB.COLLECTION",
    help="Remove its stamps in the documents of this collection, too; may be repeated.",
)
@acting
def remove(operations: Operations, **given: Any) -> Plan:
    """
    Remove what is stored of a handler that is gone.

    Its positions and its stored changes go: these will never be handled. A handler that comes back under this name is
    new. Listeners may stay, if they run code without it. If it is interrupted, repeat it.
    """
    return operations.remove(**given)


# -- snapshots -------------------------------------------------------------------------------------


@click.group()
def snapshot() -> None:
    """Give a handler the existing documents, between its changes."""


@snapshot.command()
@ANY_HANDLER
@click.option(
    "--source", "sources", multiple=True, metavar="DB.COLLECTION", help="Only this collection; may be repeated."
)
@click.option("--match", metavar="JSON", help="Only documents whose event fulfils this expression, as `match=` does.")
@click.option("--rate", type=FiniteRange(min=0.01), metavar="N", help="Documents a second at most.")
@acting
def start(operations: Operations, **given: Any) -> Plan:
    """
    Start a snapshot of each collection of a handler.

    Each document comes once, as operation type `snapshot`, exactly at its place: after the changes that it has, before
    those that follow. A restart continues it. HANDLER may be left out if only one can be meant.

    The collections are those that the handler watches, or those of --source. The handler's own `match` counts, --match
    narrows it further; `operations` and `fields` do not.
    """
    return operations.start_snapshot(**given)


@snapshot.command("list")
@ANY_HANDLER
@BRIDGE
@JSON
@click.pass_context
def list_snapshots(ctx: click.Context, handler: str | None, bridge: str | None, as_json: bool) -> None:
    """Show snapshots and their progress."""
    from mongo_celery.bridge.operations.snapshot_commands import list_snapshots as read_snapshots
    from mongo_celery.bridge.operations.snapshot_progress import short_names
    from mongo_celery.cli.snapshot_view import progress_line

    wiring = one_bridge(ctx, bridge)
    with one_sentence_errors():
        found = read_snapshots(wiring)
    names = short_names(each["id"] for each in found)
    found = [each for each in found if handler in (None, each["handler"])]
    if as_json:
        click.echo(json.dumps({"bridge": wiring.name, "snapshots": found}))
        return
    for each in found:
        say(f"{names[each['id']]}  {progress_line(each)}")
    if not found:
        say("There are no snapshots.")


@snapshot.command()
@click.argument("snapshot", metavar="ID")
@acting
def stop(operations: Operations, **given: Any) -> Plan:
    """Stop a snapshot where it is."""
    return operations.stop_snapshot(**given)


@snapshot.command("resume")
@click.argument("snapshot", metavar="ID")
@acting
def resume_snapshot(operations: Operations, **given: Any) -> Plan:
    """Continue a snapshot that was stopped or has failed."""
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
    Rotate the key by which messages are signed.

    Nothing stalls: workers know the new key before it is used, and accept the old one for the overlap. What waits
    longer is dispatched again.
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
    Show who has changed a bridge, when, how and why.

    One audit record for each command that has changed something; of one HANDLER, or of all; the latest last.
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
