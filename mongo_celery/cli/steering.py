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
    "--source", "sources", multiple=True, metavar="DB.COLLECTION", help="Only this collection. May be repeated."
)
LIMIT = click.option(
    "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Show at most N records."
)


# -- partitions ------------------------------------------------------------------------------------


@click.command(epilog='Example: celery -A shop changes pause orders --reason "migration"')
@ANY_HANDLER
@PARTITION
@acting
def pause(operations: Operations, **given: Any) -> Plan:
    """
    Start no new changes.

    Running changes may finish, and nothing is lost: the listener stores later changes until you resume. Without
    HANDLER it pauses the whole bridge.
    """
    return operations.pause(**given)


@click.command(epilog="Example: celery -A shop changes resume orders")
@ANY_HANDLER
@PARTITION
@acting
def resume(operations: Operations, **given: Any) -> Plan:
    """Continue paused partitions. Without HANDLER it continues the whole bridge."""
    return operations.resume(**given)


@click.command(epilog="Example: celery -A shop changes retry orders 3")
@ANY_HANDLER
@PARTITION
@acting
def retry(operations: Operations, **given: Any) -> Plan:
    """
    Run halted and retrying changes immediately.

    Their attempts start again at zero. Without HANDLER it retries the halted and retrying partitions of all handlers of
    this app.
    """
    return operations.retry(**given)


@click.command(epilog="Example: celery -A shop changes skip orders 3")
@HANDLER
@PARTITION
@click.option("--discard", is_flag=True, help="Delete the changes instead of keeping them as dead letters.")
@acting
def skip(operations: Operations, **given: Any) -> Plan:
    """
    Move halted changes to the dead letters.

    Their partitions continue with the next changes. `dead-letters` lists, replays and discards the skipped ones.
    Without PARTITION it skips the halted change of every halted partition of HANDLER.
    """
    return operations.skip(**given)


# -- handlers --------------------------------------------------------------------------------------


@click.command(epilog="Example: celery -A shop changes reset orders --to 2026-11-23T06:30")
@HANDLER
@click.option("--to", metavar="oldest|now|TIME|TOKEN", required=True, help="The new position, as described above.")
@click.option("--key", metavar="JSON|TEXT", help="The document's _id, or its key if the handler uses partition_by.")
@SOURCE
@acting
def reset(operations: Operations, **given: Any) -> Plan:
    """
    Move a handler to another position in the stream.

    Every change after the position is handled again, in order:

    \b
      oldest  the beginning of the oplog
      TIME    the changes since that second, in ISO 8601 (UTC without offset)
      TOKEN   the change of that resume token, and later ones
      now     the end. Changes in between are never handled

    Partitions that are before the position do not move. With --key it moves only the partition of that key, with all
    other keys of the partition.

    Stop all listeners first. Workers may run. The handlers write all their results again, also through fenced().

    If the oplog no longer reaches the position of HANDLER, use `oldest` or `now` to give up the lost changes. Stored
    changes still run. In this case you need not stop the listeners.
    """  # noqa: D301 - \b is click's, and no part of the text
    return operations.reset(**given)


@click.command(epilog="Example: celery -A shop changes remove old_orders --dead-letters")
@HANDLER
@click.option("--dead-letters", is_flag=True, help="Also remove its dead letters.")
@click.option(
    "--stamps",
    multiple=True,
    metavar="DB.COLLECTION",
    help="Also remove the fencing stamps of the handler from the documents of this collection. May be repeated.",
)
@acting
def remove(operations: Operations, **given: Any) -> Plan:
    """
    Remove the stored state of a deleted handler.

    It removes positions and stored changes. These changes are never handled. A later handler with this name starts as a
    new one. Listeners may run if their code no longer has the handler. If the command is interrupted, repeat it.
    """
    return operations.remove(**given)


# -- snapshots -------------------------------------------------------------------------------------


@click.group(epilog="Example: celery -A shop changes snapshot start orders")
def snapshot() -> None:
    """Deliver existing documents to a handler."""


@snapshot.command(epilog="Example: celery -A shop changes snapshot start orders --rate 500")
@ANY_HANDLER
@SOURCES
@click.option(
    "--match", metavar="JSON", help="Only documents whose event matches this expression. See `match=` of handlers."
)
@click.option("--rate", type=FiniteRange(min=0.01), metavar="N", help="Read at most N documents a second.")
@acting
def start(operations: Operations, **given: Any) -> Plan:
    """
    Start a snapshot of each collection of a handler.

    The handler gets each document once, with operation type `snapshot`: after the changes that the document includes,
    and before later ones. After a restart the snapshot continues. You may omit HANDLER if only one is possible.

    The snapshot reads the collections that the handler watches, or those of --source. The handler's `match` applies,
    and --match narrows it further. `operations` and `fields` of the handler do not apply.
    """
    return operations.start_snapshot(**given)


@snapshot.command(epilog="Example: celery -A shop changes snapshot stop orders")
@HANDLER
@SOURCES
@acting
def stop(operations: Operations, **given: Any) -> Plan:
    """Stop the snapshots of a handler. `snapshot resume` continues them at the same place."""
    return operations.stop_snapshot(**given)


@snapshot.command("resume", epilog="Example: celery -A shop changes snapshot resume orders")
@HANDLER
@SOURCES
@acting
def resume_snapshot(operations: Operations, **given: Any) -> Plan:
    """
    Continue stopped or failed snapshots.

    Without --source it continues all of them, and asks first if one was stopped.
    """
    return operations.resume_snapshot(**given)


# -- the bridge ------------------------------------------------------------------------------------


@click.command("rotate-key", epilog="Example: celery -A shop changes rotate-key --overlap 600")
@click.option(
    "--overlap",
    type=FiniteRange(min=0),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="How long workers accept older keys afterwards. Use 0 if others may know one.",
)
@acting
def rotate_key(operations: Operations, **given: Any) -> Plan:
    """
    Replace the key that signs messages.

    Handlers need not stop. Workers know the new key before listeners use it, and accept older keys during the overlap.
    A message that waits longer is dispatched again. Without a running listener, the key is used after the next start.
    """
    return operations.rotate_key(**given)


@click.command(epilog="Example: celery -A shop changes history orders --limit 10")
@ANY_HANDLER
@LIMIT
@BRIDGE
@JSON
@click.pass_context
def history(ctx: click.Context, handler: str | None, limit: int, bridge: str | None, as_json: bool) -> None:
    """
    Show who changed a bridge, when, how and why.

    It prints one audit record for each command that changed something, the latest last. Without HANDLER it prints the
    records of all handlers.
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
        say(f"{wiring.name} has no audit records: no command has changed it.")


COMMANDS = (pause, resume, retry, skip, reset, remove, snapshot, rotate_key, history)
