"""`celery -A app changes dead-letters`: show, replay and discard changes that failed for good."""

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


def _moment(_ctx: click.Context, _option: click.Parameter, value: str | None) -> datetime | None:
    """ISO 8601; without an offset it is UTC."""
    if value is None:
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is no time: give ISO 8601, such as 2026-11-23T06:30 (UTC) or 2026-11-23T06:30+01:00."
        ) from None
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


def _selecting(limit: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options by which dead letters are chosen."""
    options = (
        click.argument("handler", required=False),
        click.option("--id", "ids", multiple=True, metavar="ID", help="This one: the beginning of its id is enough."),
        click.option("--key", metavar="JSON|TEXT", help="Those of this document: its _id, as JSON or as text."),
        click.option("--since", callback=_moment, metavar="TIME", help="Since this time (ISO 8601, UTC)."),
        click.option("--until", callback=_moment, metavar="TIME", help="Before this time."),
        click.option("--limit", type=click.IntRange(min=1), default=limit, show_default=True, help="N at most."),
    )

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


@click.group("dead-letters")
def dead_letters() -> None:
    """Show, replay and discard changes that failed for good."""


@dead_letters.command("list")
@_selecting(_LISTED)
@BRIDGE
@JSON
@click.pass_context
def list_dead_letters(ctx: click.Context, /, *, bridge: str | None, as_json: bool, **given: Any) -> None:
    """
    List dead letters: by handler, then in the order of the stream.

    Those of one HANDLER, or of all.
    """
    from mongo_celery.bridge.operations.letter_commands import plain
    from mongo_celery.bridge.operations.operations import Operations

    wiring = one_bridge(ctx, bridge)
    with one_sentence_errors():
        found = Operations(wiring).find_dead_letters(**given)
    letters = [plain(each, found.key_of(each)) for each in found.letters]
    if as_json:
        answer = {"bridge": wiring.name, "count": found.count, "leads": found.leads, "letters": letters}
        click.echo(json.dumps(answer))
        return
    from mongo_celery.cli.dead_letters_view import list_lines

    for line in list_lines(wiring.name, found, letters):
        say(line)


@dead_letters.command()
@_selecting(1)
@BRIDGE
@JSON
@click.pass_context
def show(ctx: click.Context, /, *, bridge: str | None, as_json: bool, **given: Any) -> None:
    """
    Show dead letters with traceback and change.

    The change is a document's contents: mind who sees it.
    """
    from mongo_celery.bridge.operations.letter_commands import change_of, plain
    from mongo_celery.bridge.operations.operations import Operations

    wiring = one_bridge(ctx, bridge)
    with one_sentence_errors():
        found = Operations(wiring).find_dead_letters(**given)
        letters = [
            ({**plain(each, found.key_of(each)), "traceback": each.traceback}, change_of(wiring, each))
            for each in found.letters
        ]
    if as_json:
        whole = [letter | change for letter, change in letters]
        click.echo(json.dumps({"bridge": wiring.name, "count": found.count, "leads": found.leads, "letters": whole}))
        return
    from mongo_celery.cli.dead_letters_view import show_lines

    for letter, change in letters:
        for line in show_lines(letter, change, leads=found.leads):
            say(line)
    if found.count > len(letters):
        say(f"and {found.count - len(letters)} more: --limit")


def _checking_choice(command: Callable[..., None]) -> Callable[..., None]:
    """Refuse a command that names nothing, before the app is looked for."""

    @functools.wraps(command)
    def checked(*, everything: bool, **given: Any) -> None:
        is_chosen = any(given[name] for name in ("handler", "ids", "key", "since", "until"))
        if is_chosen and everything:
            raise click.UsageError("--all is every dead letter of the bridge: leave it out, or whatever else chooses.")
        if not is_chosen and not everything:
            raise click.UsageError(
                "choose dead letters by HANDLER, --id, --key, --since or --until, or all of them with --all."
            )
        command(**given)

    return checked


ALL = click.option("--all", "everything", is_flag=True, help="All of the bridge.")


@dead_letters.command()
@ALL
@click.option(
    "--over-newer",
    is_flag=True,
    help="Let them overwrite what newer changes have written through fenced(); without it that is refused.",
)
@_selecting(_CHANGED)
@_checking_choice
@acting
def replay(operations: Operations, **given: Any) -> Plan:
    """
    Run the handler again for dead letters.

    The listener dispatches them, those of one key in their order, between the changes of their partition. A dead letter
    goes when its handler has succeeded; else it stays, with the new error. Fix the cause first.

    Of a parked key all that wait are replayed, from the first one on, whichever is named; then the key is released.

    Ends with status 1 if any of them cannot be replayed.
    """
    return operations.replay_dead_letters(**given)


@dead_letters.command()
@ALL
@_selecting(_CHANGED)
@_checking_choice
@acting
def discard(operations: Operations, **given: Any) -> Plan:
    """
    Throw dead letters away.

    Their changes will never be handled. One whose replay has not begun is not replayed either; one that is being
    replayed stays, and the command ends with status 1.

    If the first of a parked key goes, those after it that stay are replayed.
    """
    return operations.discard_dead_letters(**given)
