"""`celery -A app outbox`: look at outboxes, deliver what was left behind, decide on dead letters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from celery.bin.base import handle_preload_options

from mongo_celery.cli.apps import FiniteRange, all_of, console_of, json_option, one_sentence_errors, say, sentence_for

if TYPE_CHECKING:
    from pymongo.errors import PyMongoError

    from mongo_celery.outbox.delivery import Delivery
    from mongo_celery.outbox.registry import AnyOutbox
    from mongo_celery.outbox.replay import DeadLetter

_LIMIT = 50
_DOCUMENTS = 1000

NAME = click.option("--name", metavar="NAME", help="The outbox, where the app has several.")
JSON = json_option("outbox or dead letter")
IDS = click.argument("ids", metavar="ID...", nargs=-1)


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
    from mongo_celery.outbox.check.examination import check as preflight
    from mongo_celery.outbox.check.examination import look_around

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
            from mongo_celery.cli.check_view import check_view

            console_of(ctx).print(check_view(each.name, findings), crop=False)
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
    help="Documents of each outbox at most; those that stand are not counted.",
)
@NAME
@JSON
@click.pass_context
def sweep(ctx: click.Context, older_than: float | None, limit: int, name: str | None, as_json: bool) -> None:
    """
    Deliver now what was left behind.

    As the sweep that beat starts; both may run at once. Outboxes have their turns one after the other, and
    one that MongoDB does not answer for keeps no other waiting. Ends with status 1 if something could not be
    delivered.
    """
    from mongo_celery.mongo.redaction import without_credentials
    from mongo_celery.quantities import number

    swept, sentences = _sweep_in_turns(_outboxes(ctx, name), older_than, limit)
    for each, delivery in swept:
        if as_json:
            click.echo(json.dumps({"outbox": each.name, **delivery.plain()}))
        else:
            error = "" if delivery.error is None else f", {delivery.left} left: {without_credentials(delivery.error)}"
            dead = number(delivery.dead, "became a dead letter", "became dead letters")
            say(f"{each.name}: {delivery.dispatched} dispatched, {dead}{error}")
    for sentence in sentences:
        say(f"Error: {sentence}", err=True)
    ctx.exit(1 if sentences or any(delivery.error is not None for _, delivery in swept) else 0)


def _sweep_in_turns(
    outboxes: Sequence[AnyOutbox], older_than: float | None, limit: int
) -> tuple[list[tuple[AnyOutbox, Delivery]], list[str]]:
    """What was delivered, and a sentence for each outbox that MongoDB does not answer for, or refuses."""
    from pymongo.errors import PyMongoError

    from mongo_celery.errors import MongoCeleryError
    from mongo_celery.outbox.health import concern_of, reach
    from mongo_celery.outbox.sweep import OutboxSweep, take_turns

    sweeps: dict[OutboxSweep, AnyOutbox] = {}
    sentences: dict[str, None] = {}

    def fails(each: AnyOutbox, error: Exception) -> None:
        sentence = sentence_for(error, partial(concern_of, each))
        if sentence is None:
            raise error
        sentences[sentence] = None  # once, where several have the same to say

    def failed(sweep: OutboxSweep, error: PyMongoError) -> None:
        fails(sweeps.pop(sweep), error)

    for each in outboxes:
        try:
            reach(each)
        except (PyMongoError, MongoCeleryError) as error:
            fails(each, error)
        else:
            sweeps[OutboxSweep(each.sweep_target, each.sweep_after if older_than is None else older_than, limit)] = each
    take_turns(list(sweeps), failed)
    down = next((sweep.total for sweep in sweeps if sweep.total.broker_down), None)
    unserved = None if down is None else replace(down, dispatched=0, dead=0, left=0)
    found = []
    for sweep, each in sweeps.items():
        total = sweep.total
        found.append((each, total if unserved is None or total.broker_down else total.and_(unserved)))
    return found, list(sentences)


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

    for each in _outboxes(ctx, name):
        with _reached(each):
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
    chosen, found = _find(_outboxes(ctx, name), id)
    if as_json:
        click.echo(json.dumps({"outbox": chosen.name, **found.plain(payload=payload)}))
        return
    from mongo_celery.cli.outbox_view import dead_letter_view

    console_of(ctx).print(dead_letter_view(chosen.name, found, payload=payload), soft_wrap=True)


@dead_letters.command()
@IDS
@click.option("--all", "everything", is_flag=True, help="All dead letters of the chosen outboxes.")
@click.option("--without-document", is_flag=True, help="If the document is gone, publish all the same.")
@click.option("--sign", is_flag=True, help="Vouch for entries that the outbox has not signed: they run what they say.")
@NAME
@JSON
@click.pass_context
def replay(ctx: click.Context, /, ids: Sequence[str], everything: bool, **given: Any) -> None:
    """
    Put dead letters back into their documents.

    They come last there, with no attempts counted, and are delivered by the next sweep. Cure what they
    failed of first. Where a document is gone its dead letter stays, and the command ends with status 1.
    So does one that the outbox has not signed, unless --sign vouches for it, which takes ids.
    """
    if bool(ids) == everything:
        raise click.UsageError("name dead letters by their ids, or all of them with --all.")
    if everything and given["sign"]:
        raise click.UsageError("--sign vouches for dead letters that you have looked at: name them by their ids.")
    failed = False
    outboxes = _outboxes(ctx, given["name"])
    pairs = _all_dead_letters(outboxes) if everything else [(_find(outboxes, each)[0], each) for each in ids]
    for chosen, entry_id in pairs:
        failed = not _replay(chosen, entry_id, given) or failed
    if not pairs:
        say("There are no dead letters.", err=True)
    ctx.exit(1 if failed else 0)


def _replay(chosen: AnyOutbox, entry_id: str, given: Mapping[str, Any]) -> bool:
    """Replay one dead letter; a refusal is shown, and does not keep the others."""
    from mongo_celery.errors import CommandRefusedError, OutboxRefusedError
    from mongo_celery.outbox import replay as commands
    from mongo_celery.outbox.health import concern_of

    as_json, how = given["as_json"], {name: given[name] for name in ("without_document", "sign")}
    with one_sentence_errors(partial(concern_of, chosen)):
        try:
            done = commands.replay(chosen, entry_id, **how)
        except (CommandRefusedError, OutboxRefusedError) as error:
            sentence = sentence_for(error)
            if as_json:
                answer = {"outbox": chosen.name, "id": entry_id, "result": "refused", "error": sentence}
                click.echo(json.dumps(answer))
            else:
                say(f"Error: {sentence}", err=True)
            return False
    if as_json:
        click.echo(json.dumps({"outbox": chosen.name, **asdict(done)}))
    elif done.result == "pending":
        say(f"{entry_id}: pending again as {done.entry}; the next sweep delivers it.")
    else:
        say(f"{entry_id}: published without its document.")
    return True


@dead_letters.command()
@click.argument("id", metavar="ID")
@click.option("--yes", is_flag=True, help="Do not ask.")
@NAME
@JSON
@click.pass_context
def discard(ctx: click.Context, id: str, yes: bool, name: str | None, as_json: bool) -> None:  # noqa: A002
    """Throw one dead letter away. Its task or event will never be published."""
    from mongo_celery.outbox import replay as commands
    from mongo_celery.outbox.health import concern_of

    chosen, found = _find(_outboxes(ctx, name), id)
    # It goes to standard error: it may be the only trace of the task.
    say(f"{id}: {found.entry.get('name')} {found.entry.get('argsrepr', '')}", err=True)
    say(f"  of document {found.document!r} in {chosen.name}", err=True)
    say(f"  failed with {found.error}", err=True)
    if not yes:
        click.confirm("Throw this dead letter away?", abort=True, err=True)
    with one_sentence_errors(partial(concern_of, chosen)):
        gone = commands.discard(chosen, id)
    if as_json:
        click.echo(json.dumps({"outbox": chosen.name, "id": id, "discarded": gone}))
    else:
        say(f"{id}: discarded" if gone else f"{id}: somebody else has replayed or discarded it")


# -- inside ----------------------------------------------------------------------------------------


def _outboxes(ctx: click.Context, name: str | None) -> list[AnyOutbox]:
    from mongo_celery.outbox.registry import OUTBOXES

    return all_of(ctx, OUTBOXES, name)


@contextmanager
def _reached(outbox: AnyOutbox) -> Iterator[None]:
    """Inside, the primary has answered once, and errors are one sentence that names what the outbox needs."""
    from mongo_celery.outbox.health import concern_of, reach

    with one_sentence_errors(partial(concern_of, outbox)):
        reach(outbox)
        yield


def _find(outboxes: Sequence[AnyOutbox], id: str) -> tuple[AnyOutbox, DeadLetter]:  # noqa: A002
    """A dead letter and its outbox."""
    from mongo_celery.command_line import CommandLine
    from mongo_celery.outbox.replay import dead_letter

    for each in outboxes:
        with _reached(each):
            found = dead_letter(each, id)
        if found is not None:
            return each, found
    names = ", ".join(each.name for each in outboxes)
    line = CommandLine.of(outboxes[0].app).celery("outbox", "dead-letters", "list")
    raise click.ClickException(f"there is no dead letter {id!r} in {names}; see `{line}`.")


def _all_dead_letters(outboxes: Sequence[AnyOutbox]) -> list[tuple[AnyOutbox, str]]:
    from mongo_celery.outbox import replay as commands

    found = []
    for each in outboxes:
        with _reached(each):
            found += [(each, dead_letter.id) for dead_letter in commands.dead_letters(each, 0)]
    return found
