"""`celery -A app changes dead-letters` and `changes set-aside`: what was set aside, and what is to become of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from mongo_celery.cli.apps import BRIDGE, DRY_RUN, JSON, REASON, YES, one_bridge, one_sentence_errors, say

if TYPE_CHECKING:
    from mongo_celery.bridge.operations.letter_commands import Found, LetterResult
    from mongo_celery.bridge.state.dead_letters import Letter
    from mongo_celery.bridge.wiring import Wiring

_LISTED, _CHANGED = 50, 1000
_SMALL_EVENT = 1000


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
        click.option("--id", "ids", multiple=True, metavar="ID", help="This one: the beginning of its id will do."),
        click.option("--key", metavar="JSON|TEXT", help="Those of this document: its _id, as JSON or as text."),
        click.option("--since", callback=_moment, metavar="TIME", help="Set aside at this time or later (ISO, UTC)."),
        click.option("--until", callback=_moment, metavar="TIME", help="Set aside before this time."),
        click.option(
            "--limit", type=click.IntRange(min=1), default=limit, show_default=True, help="So many of them at most."
        ),
        BRIDGE,
        JSON,
        click.pass_context,
    )

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


@click.group("dead-letters")
def dead_letters() -> None:
    """Show, replay and discard changes that were set aside."""


@dead_letters.command("list")
@_selecting(_LISTED)
def list_dead_letters(ctx: click.Context, /, *, as_json: bool, **given: Any) -> None:
    """
    List dead letters: by handler, then in the order of the stream.

    Those of one HANDLER, or of all.
    """
    from mongo_celery.bridge.operations.letter_commands import plain

    wiring, found = _found(ctx, **given)
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
def show(ctx: click.Context, /, *, as_json: bool, **given: Any) -> None:
    """
    Show dead letters with traceback and change.

    The change is a document's contents: mind who sees it.
    """
    from mongo_celery.bridge.operations.letter_commands import change_of, plain

    wiring, found = _found(ctx, **given)
    letters = []
    for each in found.letters:
        with one_sentence_errors():
            change = change_of(wiring, each)
        said = plain(each, found.key_of(each))
        letters.append(({**said, "traceback": each.traceback}, change))
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


@dead_letters.command()
@click.option("--all", "everything", is_flag=True, help="All of the bridge.")
@click.option(
    "--over-newer",
    is_flag=True,
    help="Let them write over what newer changes have written through fenced(); without it that is refused.",
)
@REASON
@YES
@DRY_RUN
@_selecting(_CHANGED)
def replay(
    ctx: click.Context,
    /,
    *,
    everything: bool,
    over_newer: bool,
    reason: str | None,
    yes: bool,
    dry_run: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """
    Run the handler again for dead letters.

    The listener dispatches them, those of one key in their order, between the changes of their partition. A letter
    goes when its handler has succeeded; else it stays, with the new error. Cure what they failed of first.

    Of a parked key all that wait are replayed, from the first one on, whichever is named; then the key is released.

    Ends with status 1 if any of them cannot be replayed.
    """
    from mongo_celery.bridge.operations import letter_commands as commands

    wiring, found = _chosen(ctx, everything, **given)
    with one_sentence_errors():
        ahead = commands.replay(wiring, found.letters, over_newer=over_newer, dry_run=True)
    results = ahead
    if not dry_run and any(each.result == "requested" for each in ahead):
        fit = {each.id for each in ahead if each.result == "requested"}
        _ask([each for each in found.letters if each.id in fit], "Run the handler again?", yes=yes)
        with one_sentence_errors():
            results = commands.replay(wiring, found.letters, over_newer=over_newer, dry_run=False, reason=reason)
    words = "would be replayed" if dry_run else "are to be replayed"
    _show(wiring, found, results, "requested", words, dry_run=dry_run, as_json=as_json)
    if not as_json and not dry_run and not found.leads and any(each.result == "requested" for each in results):
        say("No listener leads: they are replayed as soon as one does.")
    ctx.exit(1 if any(each.result == "refused" for each in results) else 0)


@dead_letters.command()
@click.option("--all", "everything", is_flag=True, help="All of the bridge.")
@REASON
@YES
@DRY_RUN
@_selecting(_CHANGED)
def discard(
    ctx: click.Context,
    /,
    *,
    everything: bool,
    reason: str | None,
    yes: bool,
    dry_run: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """
    Throw dead letters away.

    Their changes will never be handled. One whose replay has not begun is not replayed either; one that is being
    replayed is left alone, and the command ends with status 1.

    Where the first of a parked key goes, those behind it that are not thrown away too are replayed.
    """
    from mongo_celery.bridge.operations import letter_commands as commands

    wiring, found = _chosen(ctx, everything, **given)
    results: list[LetterResult] = []
    if found.letters:
        with one_sentence_errors():
            results = commands.discard(wiring, found.letters, dry_run=True)
        if not dry_run:
            follow = sum(each.follow for each in results)
            more = f" {_followers(follow)} {'is' if follow == 1 else 'are'} replayed then." if follow else ""
            question = "Throw it away?" if len(found.letters) == 1 else "Throw them away?"
            _ask(found.letters, f"{question}{more}", yes=yes)
            with one_sentence_errors():
                results = commands.discard(wiring, found.letters, dry_run=False, reason=reason)
    words = "would be discarded" if dry_run else "were discarded"
    _show(wiring, found, results, "discarded", words, dry_run=dry_run, as_json=as_json)
    ctx.exit(1 if any(each.result == "refused" for each in results) else 0)


# -- set-aside -------------------------------------------------------------------------------------


@click.command("set-aside")
@click.argument("handler")
@click.option("--partition", type=click.IntRange(min=0), metavar="N", help="One partition only.")
@REASON
@YES
@DRY_RUN
@BRIDGE
@JSON
@click.pass_context
def set_aside(
    ctx: click.Context,
    handler: str,
    partition: int | None,
    reason: str | None,
    yes: bool,
    dry_run: bool,
    bridge: str | None,
    as_json: bool,
) -> None:
    """
    Move halted changes to the dead letters.

    Their partitions go on. Nothing is thrown away: `dead-letters` shows, replays and discards them. Without
    --partition this is done in all halted partitions of HANDLER.
    """
    from dataclasses import asdict

    from mongo_celery.bridge.operations import commands, heads
    from mongo_celery.bridge.operations.acts import audited
    from mongo_celery.cli.show import head_lines
    from mongo_celery.errors import CommandRefusedError
    from mongo_celery.quantities import number

    wiring = one_bridge(ctx, bridge)
    with one_sentence_errors():
        found = heads.read_all_halted(wiring, handler, partition)
    for head in found:
        for line in head_lines(head, _SMALL_EVENT):
            say(line, err=True)
    if found and not dry_run and not yes:
        click.confirm("Move to the dead letters, and go on?", abort=True, err=True)
    done, refused = [], []
    act = audited(wiring, "set-aside", handler, partition=partition, reason=reason, dry_run=dry_run)
    with one_sentence_errors(), act:
        for head in [] if dry_run else found:
            try:
                done.append(commands.set_aside(wiring, handler, head.index, token=head.token))
            except CommandRefusedError as error:
                refused.append({"subscription": handler, "index": head.index, "reason": str(error)})
    if as_json:
        halted = [{"subscription": handler, "index": head.index, "key": head.key} for head in found]
        answer = {"bridge": wiring.name, "set_aside": len(done), "dry_run": dry_run, "halted": halted}
        click.echo(json.dumps({**answer, "partitions": [asdict(each) for each in done], "refused": refused}))
    else:
        for each in refused:
            say(each["reason"])
        if dry_run or not found:
            say(f"{handler}: {number(len(found), 'halted partition', 'halted partitions')}, nothing was changed")
        elif done:
            say(f"{handler}: set aside {', '.join(str(each.index) for each in done)}")
    ctx.exit(1 if refused else 0)


# -- inside ----------------------------------------------------------------------------------------


def _found(
    ctx: click.Context,
    *,
    handler: str | None,
    ids: Sequence[str],
    key: str | None,
    since: datetime | None,
    until: datetime | None,
    limit: int,
    bridge: str | None,
) -> tuple[Wiring, Found]:
    from mongo_celery.bridge.operations import letter_commands as commands
    from mongo_celery.bridge.operations.keys import keys_of
    from mongo_celery.bridge.state.dead_letters import Selection

    wiring = one_bridge(ctx, bridge)
    with one_sentence_errors():
        keys = keys_of(key) if key is not None else []
        selection = Selection(subscription=handler, ids=ids, keys=keys, since=since, until=until)
        return wiring, commands.find(wiring, selection, max(limit, len(ids)))


def _chosen(ctx: click.Context, everything: bool, **given: Any) -> tuple[Wiring, Found]:
    """What a command is to change: nothing is changed by a command that names nothing."""
    named = any(given[name] for name in ("handler", "ids", "key", "since", "until"))
    if named and everything:
        raise click.UsageError("--all is every dead letter of the bridge: leave it out, or whatever else chooses.")
    if not named and not everything:
        raise click.UsageError(
            "choose dead letters by HANDLER, --id, --key, --since or --until, or all of them with --all."
        )
    return _found(ctx, **given)


def _ask(letters: Sequence[Letter], question: str, *, yes: bool) -> None:
    from mongo_celery.cli.dead_letters_view import short_ids
    from mongo_celery.quantities import number

    ids = short_ids([each.id for each in letters])
    for id_, each in zip(ids, letters, strict=True):  # to standard error: it may be their only trace
        say(f"{id_}  {each.subscription}  {each.key}", err=True)
    if not yes:
        count = number(len(letters), "dead letter", "dead letters")
        click.confirm(f"{count}. {question}", abort=True, err=True)


def _show(
    wiring: Wiring,
    found: Found,
    results: Sequence[LetterResult],
    result: str,
    words: str,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    done = [each for each in results if each.result == result]
    if as_json:
        from dataclasses import asdict

        letters = [asdict(each) for each in results]
        answer = {"bridge": wiring.name, "count": found.count, result: len(done), "dry_run": dry_run}
        click.echo(json.dumps({**answer, "leads": found.leads, "letters": letters}))
        return
    for each in results:
        if each.reason:
            say(each.reason)
    more = sum(each.id not in {letter.id for letter in found.letters} for each in done)  # firsts of parked keys
    say(f"{wiring.name}: {len(done)} of {found.count + more} dead letters {words}")
    follow = sum(each.follow for each in results if each.result == result)
    if follow:
        say(f"{_followers(follow)} {'follows' if follow == 1 else 'follow'}, in order")
    if found.count > len(found.letters):
        say(f"{found.count - len(found.letters)} more were not looked at: repeat the command, or raise --limit")


def _followers(count: int) -> str:
    from mongo_celery.quantities import number

    return f"{number(count, 'dead letter', 'dead letters')} behind {'it' if count == 1 else 'them'}"
