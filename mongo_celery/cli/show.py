"""`celery -A app changes show`, `where` and `queues`: a blocked change, the changes of a document, and the queues."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from mongo_celery.cli.apps import BRIDGE, JSON, bridges_of, line_of, one_bridge, one_sentence_errors, say
from mongo_celery.quantities import duration, moment, number, size

if TYPE_CHECKING:
    from mongo_celery.bridge.operations.heads import Head
    from mongo_celery.bridge.operations.whereabouts import Whereabouts
    from mongo_celery.bridge.wiring import Wiring
    from mongo_celery.command_line import CommandLine

_SHOWN = 3


@click.command()
@click.argument("handler")
@click.argument("partition", type=click.IntRange(min=0))
@click.option(
    "--bytes",
    "most",
    type=click.IntRange(min=0),
    default=4096,
    show_default=True,
    metavar="N",
    help="Maximum characters of the change to show; 0 for all of it. With --json it is whole.",
)
@BRIDGE
@JSON
@click.pass_context
def show(ctx: click.Context, handler: str, partition: int, most: int, bridge: str | None, as_json: bool) -> None:
    """
    Show the change that blocks a partition.

    The one that halted it, or the first one that is stored: with its error, its attempts, and its bytes as extended
    JSON. These are a document's contents: mind who sees them.
    """
    from mongo_celery.bridge.operations.heads import read_head

    chosen = one_bridge(ctx, bridge)
    with one_sentence_errors():
        found = read_head(chosen, handler, partition)
    if as_json:
        click.echo(json.dumps({"bridge": chosen.name, **asdict(found)}))
        return
    for line in head_lines(found, most or None):
        say(line)


def head_lines(head: Head, most: int | None) -> Iterator[str]:
    """
    Return the lines that show a change.

    Args:
        most: characters of its event; None for all of them.
    """
    change = head.key or "its change is not known here"
    yield f"{head.subscription}/{head.index} is {head.state} at change {head.committed + 1}: {change}"
    if head.token is not None:
        yield f"  resume token: {head.token}"
    if head.error or head.state == "halted":
        yield f"  error: {head.error or 'unknown'}"
    counts = [
        number(count, *words)
        for count, words in ((head.retries, ("retry", "retries")), (head.crashes, ("crash", "crashes")))
        if count
    ]
    if head.due_seconds:
        counts.append(f"due in {duration(head.due_seconds)}")
    if counts:
        yield f"  {', '.join(counts)}"
    since = f" since {moment(head.since)}" if head.since else ""
    if head.bytes is None:
        yield f"  its bytes are not stored{since and f'; it waits{since}'}"
        return
    yield f"  stored{since}, {size(head.bytes)}:"
    if head.event is None:
        yield "  these cannot be read as a document; --json has them in base64"
        return
    text = json.dumps(head.event, indent=2, ensure_ascii=False)
    yield from text[:most].split("\n")
    if most is not None and len(text) > most:
        yield f"... and {len(text) - most} characters more"


@click.command()
@click.argument("handler")
@click.option(
    "--key", required=True, metavar="K", help="The document's _id, as text or JSON; with partition_by its key."
)
@click.option("--source", metavar="DB.COLLECTION", help="The document's collection, where the handler has several.")
@BRIDGE
@JSON
@click.pass_context
def where(ctx: click.Context, handler: str, key: str, source: str | None, bridge: str | None, as_json: bool) -> None:
    """
    Show whether a document has reached a handler.

    Its partition, up to when that is handled, and what of the document is running, blocked, stored, parked or a dead
    letter.
    """
    from mongo_celery.bridge.operations.bridge_snapshot import to_plain
    from mongo_celery.bridge.operations.whereabouts import find_whereabouts

    chosen = one_bridge(ctx, bridge)
    with one_sentence_errors():
        found = find_whereabouts(chosen, handler, key, source)
    if as_json:
        click.echo(json.dumps({"bridge": chosen.name, **to_plain(found)}))
        return
    for line in _where_lines(found, line_of(ctx, chosen)):
        say(line)


def _where_lines(found: Whereabouts, line: CommandLine) -> Iterator[str]:
    partition, name = found.partition, f"{found.handler}/{found.partition.index}"
    state = partition.state.replace("_", " ")
    yield f"{found.key} of {found.handler} is in partition {partition.index}, which is {state}."
    waits = found.blocked or found.running or found.stored != 0 or found.parked or found.dead_letters
    until = moment(found.handled_until)
    but = ", but for these:" if waits else "."
    if found.handled_until is None:
        yield f"No change of {name} is handled yet{but}"
    else:
        yield f"All its changes are handled that were written before {until}{but}"
    if found.running and partition.claim is not None:
        numbers = f"{partition.claim.first} to {partition.claim.last}"
        yield f"  running: changes {numbers} of {name}, perhaps one of this key ({partition.claim.process})"
    if found.blocked:
        due = f", due in {duration(partition.due_seconds)}" if partition.due_seconds else ""
        yield f"  {state}: {partition.key}{due}: {partition.error or 'no error is recorded'}"
        yield f"    {line.changes('show', found.handler, str(partition.index))}"
    elif partition.is_blocked:
        at = f" at {partition.key}" if partition.key else ""
        yield f"  {name} is {state}{at}: later changes wait"
    if found.stored != 0:
        count = "more changes are stored than were looked through"
        yield f"  stored: {count if found.stored is None else number(found.stored, 'change', 'changes')}"
    if found.parked:
        yield "  parked: its later changes become dead letters until you replay or discard these"
    for each in found.dead_letters[:_SHOWN]:
        yield f"  dead letter: {line.changes('dead-letters', 'show', found.handler, '--id', each)}"
    if more := found.dead_letters[_SHOWN:]:
        yield f"  and {number(len(more), 'more dead letter', 'more dead letters')}"


@click.command()
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

    \b
    celery -A shop worker -Q "$(celery -A shop changes queues)"

    A worker without -Q consumes these queues and the default queue; so do workers that get --with-default. Without it
    the app's default queue is left out, because -Q is for workers that keep changes and other tasks apart.

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
    """Refuse a group without handlers: with nothing after its -Q a worker would consume everything."""
    known = {group for each in bridges for group in each.groups}
    for group in groups:
        if group not in known:
            named = ", ".join(sorted(filter(None, known)))
            asked = "no handler is without a group" if group is None else f"no handler is in group {group!r}"
            raise click.ClickException(f"{asked}: {f'the groups are {named}' if named else 'none has one'}.")


def _queues_of(wiring: Wiring, groups: Collection[str | None]) -> list[str]:
    """Return the bridge's queues of these groups; of all where none is named."""
    if not groups:
        return wiring.queue_names
    return [queue for group in wiring.groups if group in groups for queue in wiring.options.queue_names(group)]
