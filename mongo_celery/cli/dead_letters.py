"""`celery -A app changes dead-letters`: list, replay and discard changes that failed permanently."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from mongo_celery.cli.acting import acting
from mongo_celery.cli.apps import BRIDGE, JSON, one_bridge, one_sentence_errors, say

if TYPE_CHECKING:
    from mongo_celery.bridge.operations.operations import Operations
    from mongo_celery.plan import Plan

_LISTED, _CHANGED = 50, 1000


def _parse_time(_ctx: click.Context, _option: click.Parameter, value: str | None) -> datetime | None:
    """Parse an ISO 8601 time. Without an offset it is UTC."""
    if value is None:
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is not a time. Give ISO 8601, such as 2026-11-23T06:30 (UTC) or 2026-11-23T06:30+01:00."
        ) from None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


def _selecting(limit: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the options that select dead letters."""
    options = (
        click.argument("handler", required=False),
        click.option(
            "--id",
            "ids",
            multiple=True,
            metavar="ID",
            help="The dead letter with this id. The beginning of the id is enough.",
        ),
        click.option(
            "--key", metavar="JSON|TEXT", help="The dead letters of the document with this _id, as JSON or text."
        ),
        click.option(
            "--since", callback=_parse_time, metavar="TIME", help="Only dead letters since this time (ISO 8601, UTC)."
        ),
        click.option("--until", callback=_parse_time, metavar="TIME", help="Before this time."),
        click.option("--limit", type=click.IntRange(min=1), default=limit, show_default=True, help="At most N."),
    )

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


@click.group("dead-letters", epilog="Example: celery -A shop changes dead-letters list")
def dead_letters() -> None:
    """List, replay and discard changes that failed permanently."""


@dead_letters.command("list", epilog="Example: celery -A shop changes dead-letters list orders --limit 10")
@_selecting(_LISTED)
@click.option("--full", is_flag=True, help="Show all details, with traceback and change, as --id does.")
@BRIDGE
@JSON
@click.pass_context
def list_dead_letters(ctx: click.Context, /, *, bridge: str | None, as_json: bool, full: bool, **given: Any) -> None:
    """
    List dead letters by handler and stream order.

    Without HANDLER it lists those of all handlers. With --id it shows one in full, including the document of the
    change. Make sure that only authorized people see it.
    """
    from mongo_celery.bridge.operations.dead_letter_commands import change_of, find, plain

    wiring, full = one_bridge(ctx, bridge), full or bool(given["ids"])
    with one_sentence_errors():
        found = find(wiring, **given)
        letters = [plain(each, found.key_of(each)) for each in found.letters]
        if full:
            for each, letter in zip(found.letters, letters, strict=True):
                letter.update(traceback=each.traceback, **change_of(wiring, each, with_types=as_json))
    if as_json:
        answer = {"bridge": wiring.name, "count": found.count, "leads": found.leads, "dead_letters": letters}
        click.echo(json.dumps(answer))
        return
    from mongo_celery.cli.dead_letters_view import list_lines, show_lines

    lines = (line for letter in letters for line in show_lines(letter, letter, leads=found.leads))
    for line in lines if full else list_lines(wiring.name, found, letters):
        say(line)
    if full and found.count > len(letters):
        say(f"and {found.count - len(letters)} more. To see them, use --limit")


def _checking_choice(command: Callable[..., None]) -> Callable[..., None]:
    """Refuse a command without a selection, before looking for the app."""

    @functools.wraps(command)
    def checked(*, everything: bool, **given: Any) -> None:
        is_chosen = any(given[name] for name in ("handler", "ids", "key", "since", "until"))
        if is_chosen and everything:
            raise click.UsageError(
                "--all selects every dead letter of the bridge. Leave out --all, or leave out HANDLER and the other "
                "options that select."
            )
        if not is_chosen and not everything:
            raise click.UsageError(
                "No dead letters are chosen. Use HANDLER, --id, --key, --since or --until, or --all for all of them."
            )
        command(**given)

    return checked


ALL = click.option(
    "--all", "everything", is_flag=True, help="All dead letters of the bridge. Needed if nothing else selects some."
)


@dead_letters.command(epilog="Example: celery -A shop changes dead-letters replay orders --since 2026-11-23")
@ALL
@click.option(
    "--over-newer",
    is_flag=True,
    help="Let the replay overwrite newer changes that were written through fenced(). Otherwise such a write is "
    "refused.",
)
@_selecting(_CHANGED)
@_checking_choice
@acting
def replay(operations: Operations, **given: Any) -> Plan:
    """
    Run the handler again for dead letters. Fix the cause first.

    The listener dispatches them between the changes of their partition, and keeps the order within a key. If the
    handler succeeds, the dead letter is removed. If it fails, the dead letter stays with the new error, and
    `dead-letters list` shows it.

    If the key is parked, all its waiting dead letters are replayed, the first one first. Then the key is released.

    The command ends with status 1 if a dead letter cannot be replayed.
    """
    return operations.replay_dead_letters(**given)


@dead_letters.command(epilog="Example: celery -A shop changes dead-letters discard orders --key 42")
@ALL
@_selecting(_CHANGED)
@_checking_choice
@acting
def discard(operations: Operations, **given: Any) -> Plan:
    """
    Discard dead letters.

    Their changes are never handled, and a requested replay is cancelled. If the replay is already running, the dead
    letter stays and the command ends with status 1.

    If you discard the first dead letter of a parked key, the others of this key are replayed.
    """
    return operations.discard_dead_letters(**given)
