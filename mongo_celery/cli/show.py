"""`celery -A app changes show` and `queues`: a blocked change, the changes of a document, and the queues."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import click

from mongo_celery.cli.acting import HANDLER, PARTITION
from mongo_celery.cli.apps import BRIDGE, JSON, SOURCE, bridges_of, line_of, one_bridge, one_sentence_errors, say
from mongo_celery.quantities import duration, moment, number, size

if TYPE_CHECKING:
    from mongo_celery.bridge.operations.lookups import BlockedChange, Whereabouts
    from mongo_celery.bridge.wiring import Wiring
    from mongo_celery.command_line import CommandLine

_SHOWN = 3


@click.command(epilog="Example: celery -A shop changes show orders --key 42")
@HANDLER
@PARTITION
@click.option("--key", metavar="K", help="The _id, or the key if the handler uses partition_by, as text or JSON.")
@SOURCE
@click.option(
    "--bytes",
    "most",
    type=click.IntRange(min=0),
    default=4096,
    show_default=True,
    metavar="N",
    help="Characters of the change to show at most, 0 for all. --json always shows all.",
)
@BRIDGE
@JSON
@click.pass_context
def show(
    ctx: click.Context,
    handler: str,
    partition: int | None,
    key: str | None,
    source: str | None,
    most: int,
    bridge: str | None,
    as_json: bool,
) -> None:
    """
    Show the change that blocks a partition, or find a document.

    With PARTITION it shows the change that halted the partition, or the first stored change, with error, attempts and
    bytes as extended JSON. This includes the document, so make sure that only authorized people see it.

    With --key it shows how far that document has been handled: its partition, the position of the partition, and which
    changes of the document are running, blocked, stored, parked or dead letters.
    """
    from mongo_celery.bridge.operations.bridge_snapshot import to_plain
    from mongo_celery.bridge.operations.lookups import find_whereabouts, read_blocked_change

    if (partition is None) == (key is None):
        raise click.UsageError("Give either PARTITION or --key, for example --key 42.")
    chosen = one_bridge(ctx, bridge)
    with one_sentence_errors():
        if partition is not None:
            change = read_blocked_change(chosen, handler, partition, with_types=as_json)
            plain, lines = to_plain(change), describe_blocked_change(change, most or None)
        else:
            where = find_whereabouts(chosen, handler, str(key), source)
            plain, lines = to_plain(where), _where_lines(where, line_of(ctx, chosen))
    if as_json:
        click.echo(json.dumps({"bridge": chosen.name, **plain}))
        return
    for line in lines:
        say(line)


def describe_blocked_change(found: BlockedChange, most: int | None) -> Iterator[str]:
    """
    Return the lines that show a change.

    Args:
        most: largest number of its event's characters. None for all.
    """
    status = found.status
    change = found.key or "the change is not known here"
    state = status.state.replace("_", " ")
    yield f"{found.handler}/{status.partition} is {state} at change {status.committed + 1}: {change}"
    if found.token is not None:
        yield f"  resume token: {found.token}"
    if found.error or status.state == "halted":
        yield f"  error: {found.error or 'unknown'}"
    facts = [f"since {moment(found.since)}"] if found.since else []
    facts += [number(found.attempts, "attempt", "attempts")] if found.attempts else []
    facts += [f"due in {duration(status.due_seconds)}"] if status.due_seconds else []
    if facts:
        yield f"  {', '.join(facts)}"
    yield from (f"    {line}" for line in found.traceback.rstrip().splitlines())
    if found.bytes is None:
        yield "  the bytes of the change are not stored"
        return
    yield f"  stored, {size(found.bytes)}:"
    if found.event is None:
        yield "  the bytes cannot be read as a document. --json shows them in base64"
        return
    text = json.dumps(found.event, indent=2, ensure_ascii=False)
    yield from text[:most].split("\n")
    if most is not None and len(text) > most:
        yield f"... and {len(text) - most} more characters. To see them, use --bytes 0"


def _where_lines(found: Whereabouts, line: CommandLine) -> Iterator[str]:
    status, name = found.status, f"{found.handler}/{found.status.partition}"
    state = status.state.replace("_", " ")
    yield f"{found.key} of {found.handler} is in partition {status.partition}, which is {state}."
    waits = found.blocked or found.running or found.stored != 0 or found.parked or found.dead_letters
    until = moment(found.handled_until)
    if found.handled_until is None:
        yield f"No change of {name} is handled yet{':' if waits else '.'}"
    else:
        yield f"All its changes written before {until} are handled{', except these:' if waits else '.'}"
    if found.running and status.claim is not None:
        numbers = f"{status.claim.first} to {status.claim.last}"
        yield f"  running: changes {numbers} of {name}, perhaps one of this key ({status.claim.process})"
    if found.blocked:
        due = f", due in {duration(status.due_seconds)}" if status.due_seconds else ""
        yield f"  {state}: {status.key}{due}: {status.error or 'no error is recorded'}"
        yield f"    {line.changes('show', found.handler, str(status.partition))}"
    elif status.is_blocked:
        at = f" at {status.key}" if status.key else ""
        yield f"  {name} is {state}{at}, and later changes wait"
    if found.stored != 0:
        count = "unknown, the partition has too many stored changes to search"
        yield f"  stored: {count if found.stored is None else number(found.stored, 'change', 'changes')}"
    if found.parked:
        yield "  parked: later changes of this key become dead letters until you replay or discard these"
    for each in found.dead_letters[:_SHOWN]:
        yield f"  dead letter: {line.changes('dead-letters', 'list', found.handler, '--id', each)}"
    if more := found.dead_letters[_SHOWN:]:
        yield f"  and {number(len(more), 'more dead letter', 'more dead letters')}"


@click.command(epilog="Example: celery -A shop changes queues --group slow")
@BRIDGE
@JSON
@click.option("--group", "groups", multiple=True, metavar="NAME", help="Only queues of this group. May be repeated.")
@click.option("--without-group", is_flag=True, help="Queues of handlers without a group, also together with --group.")
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

    \b
    celery -A shop worker -Q "$(celery -A shop changes queues)"

    A worker without -Q consumes these queues and the default queue. A worker with -Q consumes only the queues that you
    name. To include the default queue, use --with-default.

    Handlers with group="slow" have separate queues, and can have separate workers:

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
    """Refuse a group without handlers: with an empty -Q a worker would consume everything."""
    known = {group for each in bridges for group in each.groups}
    for group in groups:
        if group not in known:
            named = ", ".join(sorted(filter(None, known)))
            asked = "No handler is without a group" if group is None else f"No handler is in group {group!r}"
            raise click.ClickException(f"{asked}. {f'The groups are {named}' if named else 'No handler has a group'}.")


def _queues_of(wiring: Wiring, groups: Collection[str | None]) -> list[str]:
    """Return the bridge's queues of these groups, or of all groups if none is given."""
    if not groups:
        return wiring.queue_names
    return [queue for group in wiring.groups if group in groups for queue in wiring.options.queue_names(group)]
