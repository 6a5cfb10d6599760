"""`celery -A app outbox`: show outboxes, deliver pending entries, and handle dead letters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
from celery.bin.base import handle_preload_options

from mongo_celery.cli.acting import acting_on
from mongo_celery.cli.apps import FiniteRange, all_of, console_of, json_option, one_sentence_errors

if TYPE_CHECKING:
    from mongo_celery.outbox.plans import Letters
    from mongo_celery.outbox.registry import BaseOutbox
    from mongo_celery.plan import Plan

_LIMIT = 50

NAME = click.option("--name", metavar="NAME", help="The outbox. Default: all outboxes of the app.")
JSON = json_option("outbox or dead letter")
IDS = click.argument("ids", metavar="[ID]...", nargs=-1)


def _outboxes(ctx: click.Context, name: str | None) -> list[BaseOutbox]:
    from mongo_celery.outbox.registry import OUTBOXES

    return all_of(ctx, OUTBOXES, name)


@click.group(epilog="Example: celery -A shop outbox status")
@click.pass_context
@handle_preload_options
def outbox(ctx: click.Context, **_: Any) -> None:
    """Show and control the outboxes of an app."""
    del ctx


# -- status ----------------------------------------------------------------------------------------


@outbox.command(epilog="Example: celery -A shop outbox status --check")
@click.option("--check", is_flag=True, help="Also check rights, collection, validator and workers, for some seconds.")
@NAME
@JSON
@click.pass_context
def status(ctx: click.Context, name: str | None, *, check: bool, as_json: bool) -> None:
    """
    Show pending entries, problems and fixes.

    \b
    Exit status:
      0  healthy
      1  degraded: it ends automatically, or can wait
      2  failing: blocked until a person acts, or not readable

    The command changes nothing, also with --check.
    """  # noqa: D301 - \b is click's, and no part of the text
    from mongo_celery.cli.findings_view import findings_view
    from mongo_celery.cli.outbox_view import health_view, plain_health
    from mongo_celery.findings import EXIT_CODES, verdict_of
    from mongo_celery.outbox.health import read_health

    chosen = _outboxes(ctx, name)
    with one_sentence_errors():
        found = read_health(ctx.obj.app, chosen, thorough=check)
    for health in found if as_json else ():
        click.echo(json.dumps(plain_health(health)))
    if not as_json:
        views = [findings_view(each.name, each.findings) for each in found] if check else [health_view(found)]
        for view in views:
            console_of(ctx).print(view, crop=False)
    ctx.exit(max(EXIT_CODES[verdict_of(health.findings)] for health in found))


# -- sweep -----------------------------------------------------------------------------------------


@outbox.command(epilog="Example: celery -A shop outbox sweep --older-than 0")
@click.option(
    "--older-than",
    type=FiniteRange(min=0),
    metavar="SECONDS",
    help="Deliver from documents whose oldest entry has waited this long. 0 for all. Default: the outbox's setting.",
)
@acting_on("name", NAME, _outboxes)
def sweep(outboxes: list[BaseOutbox], **given: Any) -> Plan:
    """
    Deliver pending entries now.

    The sweep that beat starts does the same, and both may run at the same time. If MongoDB does not answer for one
    outbox, the others are still swept. The command ends with status 1 if an entry could not be delivered.
    """
    from mongo_celery.outbox.plans import plan_sweep

    return plan_sweep(outboxes, **given)


# -- dead letters ----------------------------------------------------------------------------------


@outbox.group("dead-letters", epilog="Example: celery -A shop outbox dead-letters list")
def dead_letters() -> None:
    """List, replay and discard entries that failed permanently."""


@dead_letters.command("list", epilog="Example: celery -A shop outbox dead-letters list --limit 10")
@IDS
@click.option("--payload", is_flag=True, help="Also show the arguments, which may contain secrets.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=_LIMIT, show_default=True, help="Show at most N of each outbox."
)
@NAME
@JSON
@click.pass_context
def list_dead_letters(
    ctx: click.Context, ids: Sequence[str], limit: int, name: str | None, *, payload: bool, as_json: bool
) -> None:
    """
    List dead letters, the oldest first.

    With an ID it shows that dead letter in full, with its traceback.
    """
    from mongo_celery.cli.outbox_view import dead_letter_view, dead_letters_view
    from mongo_celery.outbox.plans import find_letters, reach_first

    chosen = _outboxes(ctx, name)
    if ids:
        with one_sentence_errors():
            letters = find_letters(chosen, ids)
        for outbox, letter in letters:
            if as_json:
                click.echo(json.dumps({"outbox": outbox.name, **letter.plain(payload=payload)}))
            else:
                console_of(ctx).print(dead_letter_view(outbox.name, letter, payload=payload), soft_wrap=True)
        return
    for each in chosen:
        with one_sentence_errors(), reach_first(each):
            found, count = each.runtime.dead_letters.find(limit), each.runtime.dead_letters.count()
        if as_json:
            plain = [letter.plain(payload=False) for letter in found]
            click.echo(json.dumps({"outbox": each.name, "count": count, "dead_letters": plain}))
        else:
            console_of(ctx).print(dead_letters_view(each.name, found, count))


ALL = click.option("--all", "everything", is_flag=True, help="All dead letters of the chosen outboxes.")


def _choose(outboxes: list[BaseOutbox], ids: Sequence[str], *, everything: bool) -> Letters:
    from mongo_celery.outbox.plans import find_letters

    if bool(ids) == everything:
        raise click.UsageError("No dead letters are chosen. Give their ids, or --all for all of them.")
    return find_letters(outboxes, ids)


@dead_letters.command(epilog="Example: celery -A shop outbox dead-letters replay --all")
@IDS
@ALL
@click.option("--without-document", is_flag=True, help="Publish even if the document no longer exists.")
@click.option("--sign", is_flag=True, help="Accept entries that the outbox has not signed. Check them first.")
@acting_on("name", NAME, _outboxes)
def replay(outboxes: list[BaseOutbox], ids: Sequence[str], *, everything: bool, sign: bool, **given: Any) -> Plan:
    """
    Put dead letters back into their documents. Fix the cause first.

    Each becomes the last entry of its document, with no attempts counted. The next sweep delivers it. If the document
    no longer exists, or the outbox has not signed the entry, the dead letter stays and the command ends with status 1.
    """
    from mongo_celery.outbox.plans import plan_replay

    if everything and sign:
        raise click.UsageError(
            "--sign vouches for dead letters that you have checked, so --all is not allowed. Give their ids."
        )
    return plan_replay(_choose(outboxes, ids, everything=everything), sign=sign, **given)


@dead_letters.command(epilog="Example: celery -A shop outbox dead-letters discard --all --dry-run")
@IDS
@ALL
@acting_on("name", NAME, _outboxes)
def discard(outboxes: list[BaseOutbox], ids: Sequence[str], *, everything: bool) -> Plan:
    """Discard dead letters. Their tasks and events are never published."""
    from mongo_celery.outbox.plans import plan_discard

    return plan_discard(_choose(outboxes, ids, everything=everything))
