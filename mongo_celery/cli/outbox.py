"""`celery -A app outbox`: look at outboxes, deliver what was left behind, decide on dead letters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from celery.bin.base import handle_preload_options

from mongo_celery.cli.acting import acting_on
from mongo_celery.cli.apps import FiniteRange, all_of, console_of, json_option, one_sentence_errors

if TYPE_CHECKING:
    from mongo_celery.outbox.plans import Letters
    from mongo_celery.outbox.registry import AnyOutbox
    from mongo_celery.plan import Plan

_LIMIT = 50
_DOCUMENTS = 1000

NAME = click.option("--name", metavar="NAME", help="The outbox, where the app has several.")
JSON = json_option("outbox or dead letter")
IDS = click.argument("ids", metavar="[ID]...", nargs=-1)


def _outboxes(ctx: click.Context, name: str | None) -> list[AnyOutbox]:
    from mongo_celery.outbox.registry import OUTBOXES

    return all_of(ctx, OUTBOXES, name)


@click.group()
@click.pass_context
@handle_preload_options
def outbox(ctx: click.Context, **_: Any) -> None:
    """Show and steer the outboxes of an app."""
    del ctx


# -- status ----------------------------------------------------------------------------------------


@outbox.command()
@NAME
@JSON
@click.pass_context
def status(ctx: click.Context, name: str | None, as_json: bool) -> None:
    """
    Show what is pending, for how long, and the broker.

    Ends with status 0 however long things have waited and however many dead letters there are, as long as
    MongoDB answers: what is pending is a state, and no failure of this command. Scripts look at --json.
    With several outboxes, one that cannot be read is named with the reason, and the status is 1.
    """
    from mongo_celery.outbox.health import read_health

    chosen = _outboxes(ctx, name)
    with one_sentence_errors():
        found, unread = read_health(ctx.obj.app, chosen)
    from mongo_celery.cli.outbox_view import advice_view, health_view, plain_health, unread_view
    from mongo_celery.mongo.redaction import short

    if as_json:
        for health in found:
            click.echo(json.dumps(plain_health(health)))
        for each, error in unread.items():
            click.echo(json.dumps({"outbox": each, "error": short(error)}))
    else:
        console = console_of(ctx)
        console.print(health_view(found))
        for sentence in (*unread_view(unread), *advice_view(found)):
            console.print(sentence)
    if unread:
        ctx.exit(1)


# -- check -----------------------------------------------------------------------------------------


@outbox.command()
@NAME
@JSON
@click.pass_context
def check(ctx: click.Context, name: str | None, as_json: bool) -> None:
    """
    Look at everything that an outbox needs, and at how it is.

    MongoDB, rights, index, validator, shard key, models, what is pending and for whom, whether beat and a
    worker sweep it, broker and workers. Takes some seconds, changes nothing, and ends with status 1 if
    anything is an error.
    """
    from mongo_celery.outbox.check import check as preflight
    from mongo_celery.outbox.check import look_around

    chosen = _outboxes(ctx, name)
    facts = look_around(ctx.obj.app)
    failed = False
    for each in chosen:
        with one_sentence_errors():
            findings = preflight(each, facts)
        wrong = any(finding.severity == "failing" for finding in findings)
        failed = failed or wrong
        if as_json:
            found = [asdict(finding) for finding in findings]
            click.echo(json.dumps({"outbox": each.name, "ok": not wrong, "findings": found}))
        else:
            from mongo_celery.cli.findings_view import findings_view

            console_of(ctx).print(findings_view(each.name, findings), crop=False)
    ctx.exit(1 if failed else 0)


# -- sweep -----------------------------------------------------------------------------------------


@outbox.command()
@click.option(
    "--older-than",
    type=FiniteRange(min=0),
    metavar="SECONDS",
    help="How long the oldest entry of a document has waited; by default what the outbox says, 0 for everything.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=_DOCUMENTS,
    show_default=True,
    help="Documents of each outbox at most; turns in which nothing is delivered are not counted.",
)
@acting_on("name", NAME, _outboxes)
def sweep(outboxes: list[AnyOutbox], **given: Any) -> Plan:
    """
    Deliver now what was left behind.

    As the sweep that beat starts; both may run at once. Outboxes have their turns one after the other, and
    one that MongoDB does not answer for keeps no other waiting. Ends with status 1 if something could not be
    delivered.
    """
    from mongo_celery.outbox.plans import plan_sweep

    return plan_sweep(outboxes, **given)


# -- dead letters ----------------------------------------------------------------------------------


@outbox.group("dead-letters")
def dead_letters() -> None:
    """Show, replay and discard entries that were never published."""


@dead_letters.command("list")
@click.option("--limit", type=click.IntRange(min=1), default=_LIMIT, show_default=True, help="Of each outbox.")
@NAME
@JSON
@click.pass_context
def list_dead_letters(ctx: click.Context, limit: int, name: str | None, as_json: bool) -> None:
    """List dead letters, the oldest first."""
    from mongo_celery.outbox import replay as commands
    from mongo_celery.outbox.plans import reached

    for each in _outboxes(ctx, name):
        with one_sentence_errors(), reached(each):
            found, count = commands.dead_letters(each, limit), each.dead_letters.count()
        if as_json:
            plain = [dead_letter.plain(payload=False) for dead_letter in found]
            click.echo(json.dumps({"outbox": each.name, "count": count, "letters": plain}))
        else:
            from mongo_celery.cli.outbox_view import dead_letters_view

            console_of(ctx).print(dead_letters_view(each.name, found, count))


@dead_letters.command()
@click.argument("id", metavar="ID")
@click.option("--payload", is_flag=True, help="Show the arguments too; they may hold what is secret.")
@NAME
@JSON
@click.pass_context
def show(ctx: click.Context, id: str, payload: bool, name: str | None, as_json: bool) -> None:  # noqa: A002
    """Show one dead letter with its traceback."""
    from mongo_celery.outbox.plans import find_letters

    with one_sentence_errors():
        ((chosen, found),) = find_letters(_outboxes(ctx, name), [id])
    if as_json:
        click.echo(json.dumps({"outbox": chosen.name, **found.plain(payload=payload)}))
        return
    from mongo_celery.cli.outbox_view import dead_letter_view

    console_of(ctx).print(dead_letter_view(chosen.name, found, payload=payload), soft_wrap=True)


ALL = click.option("--all", "everything", is_flag=True, help="All dead letters of the chosen outboxes.")


def _choose(outboxes: list[AnyOutbox], ids: Sequence[str], *, everything: bool) -> Letters:
    from mongo_celery.outbox.plans import find_letters

    if bool(ids) == everything:
        raise click.UsageError("name dead letters by their ids, or all of them with --all.")
    return find_letters(outboxes, ids)


@dead_letters.command()
@IDS
@ALL
@click.option("--without-document", is_flag=True, help="If the document is gone, publish all the same.")
@click.option("--sign", is_flag=True, help="Vouch for entries that the outbox has not signed: they run what they say.")
@acting_on("name", NAME, _outboxes)
def replay(outboxes: list[AnyOutbox], ids: Sequence[str], *, everything: bool, sign: bool, **given: Any) -> Plan:
    """
    Put dead letters back into their documents.

    They come last there, with no attempts counted, and are delivered by the next sweep. Fix the cause first. If a
    document is gone its dead letter stays, and the command ends with status 1. So does one that the outbox has not
    signed, unless --sign vouches for it, which takes ids.
    """
    from mongo_celery.outbox.plans import plan_replay

    if everything and sign:
        raise click.UsageError("--sign vouches for dead letters that you have looked at: name them by their ids.")
    return plan_replay(_choose(outboxes, ids, everything=everything), sign=sign, **given)


@dead_letters.command()
@IDS
@ALL
@acting_on("name", NAME, _outboxes)
def discard(outboxes: list[AnyOutbox], ids: Sequence[str], *, everything: bool) -> Plan:
    """Throw dead letters away. Their tasks and events will never be published."""
    from mongo_celery.outbox.plans import plan_discard

    return plan_discard(_choose(outboxes, ids, everything=everything))
