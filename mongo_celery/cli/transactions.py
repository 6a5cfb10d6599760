"""`celery -A app transactions`: look at two-phase transactions, finish, cancel, take back or remove them."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click
from celery.bin.base import handle_preload_options

from mongo_celery.cli.apps import FiniteRange, console_of, json_option, one_of, one_sentence_errors, say
from mongo_celery.quantities import duration, moment
from mongo_celery.visible import visible

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mongo_celery.twophase import TwoPhaseCommit
    from mongo_celery.twophase.purge import Purge

_LIMIT = 50
_RECOVER_LIMIT = 1000
_STATES = ("initial", "pending", "applied", "done", "canceling", "canceled")

NAME = click.option("--name", metavar="NAME", help="The TwoPhaseCommit, where the app has several.")
JSON = json_option("transaction")
AGE = click.option(
    "--older-than", type=FiniteRange(min=0), metavar="SECONDS", help="Since the last step, by the server's clock."
)


@click.group()
@click.pass_context
@handle_preload_options
def transactions(ctx: click.Context, **_: Any) -> None:
    """Show, finish and take back two-phase transactions."""
    del ctx


@transactions.command("list")
@click.option("--state", "states", type=click.Choice(_STATES), multiple=True, help="Only these; may be repeated.")
@AGE
@click.option("--limit", type=click.IntRange(min=1), default=_LIMIT, show_default=True, help="Transactions at most.")
@NAME
@JSON
@click.pass_context
def list_transactions(
    ctx: click.Context, states: tuple[str, ...], older_than: float | None, limit: int, name: str | None, as_json: bool
) -> None:
    """
    List transactions, the one with the oldest step first. Without --state: all that are not final.

    Those that are done or canceled come last, in the order of their ids.
    """
    wanted = list(states) or ["initial", "pending", "applied", "canceling"]
    chosen = _chosen(ctx, name)
    with one_sentence_errors(lambda: chosen.log.concern):
        found = chosen.found(wanted, older_than, limit=limit)
        now = chosen.log.server_time() if not as_json else None
    _list(ctx, found, f"No transaction is {' or '.join(wanted)}.", now=now, as_json=as_json)


def _list(
    ctx: click.Context, found: Sequence[Mapping[str, Any]], nothing: str, *, now: datetime | None, as_json: bool
) -> None:
    """Print transactions as lines, or what to say where there are none; ages are those at `now`."""
    if as_json:
        for document in found:
            say(_json(document))
        return
    from rich.padding import Padding
    from rich.text import Text

    console = console_of(ctx)
    for document in found:  # no markup: what is stored is anybody's
        id_, state, application, modified, what = _row(document, now)
        console.print(Text(f"{id_}  {state}  {modified}  {application}"), soft_wrap=True)  # an id is there to be copied
        console.print(Padding(Text(what), (0, 0, 0, 2), expand=False))
    if not found:
        console.print(nothing)


@transactions.command()
@click.argument("id", metavar="ID")
@NAME
@click.pass_context
def show(ctx: click.Context, id: str, name: str | None) -> None:  # noqa: A002
    """Show one transaction as it is stored, in Extended JSON."""
    chosen = _chosen(ctx, name)
    with one_sentence_errors(lambda: chosen.log.concern):
        document = _find(chosen, id)
    for line in _json(document, indent=2).split("\n"):
        say(line)


@transactions.command()
@click.option(
    "--older-than",
    type=FiniteRange(min=0),
    metavar="SECONDS",
    help="Since the last step, by the server's clock; by default as the TwoPhaseCommit says, else half an hour.",
)
@click.option("--all", "any_application", is_flag=True, help="Also those of other applications.")
@click.option("--limit", type=click.IntRange(min=1), default=_RECOVER_LIMIT, show_default=True, help="At most so many.")
@click.option("--dry-run", is_flag=True, help="List what would be taken over, and change nothing.")
@NAME
@JSON
@click.pass_context
def recover(
    ctx: click.Context,
    older_than: float | None,
    any_application: bool,
    limit: int,
    dry_run: bool,
    name: str | None,
    as_json: bool,
) -> None:
    """
    Finish what was left pending, applied or canceling.

    As the recovery that beat starts; any number may run at once. Ends with status 1 if one could not be finished.
    """
    chosen = _chosen(ctx, name)
    with one_sentence_errors(lambda: chosen.log.concern):
        if dry_run:
            found = chosen.abandoned(older_than, all=any_application, limit=limit)
            now = chosen.log.server_time() if not as_json else None
            _list(ctx, found, "Nothing to recover.", now=now, as_json=as_json)
            return
        report = chosen.recover(older_than, all=any_application, limit=limit)
    for each in report:
        if as_json:
            say(_json({"id": each.id, "before": each.before, "after": each.after, "error": each.error}))
        else:
            became = f"stays {each.after}" if each.before == each.after else f"{each.before}, now {each.after}"
            say(f"{_text(each.id)}: {became}{f': {each.error}' if each.error else ''}")
    if not report and not as_json:
        say("Nothing to recover.")
    ctx.exit(1 if any(each.error for each in report) else 0)


@transactions.command()
@click.argument("id", metavar="ID")
@click.option("--all", "any_application", is_flag=True, help="Also one of another application.")
@click.option("--reason", default="canceled on the command line", show_default=True, help="Kept with the transaction.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@NAME
@JSON
@click.pass_context
def cancel(
    ctx: click.Context,
    id: str,  # noqa: A002
    any_application: bool,
    reason: str,
    yes: bool,
    name: str | None,
    as_json: bool,
) -> None:
    """Roll a transaction back that is not applied yet."""
    chosen, document = _shown(ctx, name, id)
    _confirm(document, "Roll this transaction back?", yes=yes)
    with one_sentence_errors(lambda: chosen.log.concern):
        after = chosen.cancel(document["_id"], reason, all=any_application)
    _tell({"id": after.id, "state": str(after.state), "reason": after.reason}, as_json=as_json)


@transactions.command("run")
@click.argument("id", metavar="ID")
@click.option("--yes", is_flag=True, help="Do not ask.")
@NAME
@JSON
@click.pass_context
def run_transaction(ctx: click.Context, id: str, yes: bool, name: str | None, as_json: bool) -> None:  # noqa: A002
    """
    Advance a transaction to its end, here.

    One that was only stored, or left; what is done stays as it is. Ends with status 1 if it is rolled back.
    """
    chosen, document = _shown(ctx, name, id)
    _confirm(document, "Run this transaction?", yes=yes)
    with one_sentence_errors(lambda: chosen.log.concern):
        after = chosen.run(document["_id"])
    _tell({"id": after.id, "state": str(after.state)}, as_json=as_json)


@transactions.command()
@click.argument("id", metavar="ID")
@click.option("--yes", is_flag=True, help="Do not ask.")
@NAME
@JSON
@click.pass_context
def compensate(ctx: click.Context, id: str, yes: bool, name: str | None, as_json: bool) -> None:  # noqa: A002
    """
    Take a transaction back that is done.

    The opposite transaction is stored and run. If the command is interrupted, call it again. Ends with status 1 if the
    opposite is rolled back, as where what was paid is spent.
    """
    chosen, document = _shown(ctx, name, id)
    _confirm(document, "Take this transaction back?", yes=yes)
    with one_sentence_errors(lambda: chosen.log.concern):
        after = chosen.read(chosen.compensate(document["_id"]))
    _tell({"id": after.id, "state": str(after.state), "compensates": document["_id"]}, as_json=as_json)


@transactions.command()
@click.option(
    "--older-than",
    type=FiniteRange(min=0),
    required=True,
    metavar="SECONDS",
    help="Since the last step, by the server's clock; not less than the deadline.",
)
@click.option("--all", "any_application", is_flag=True, help="Also those of other applications.")
@click.option("--dry-run", is_flag=True, help="Say how many would be removed, and remove none.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@NAME
@json_option("TwoPhaseCommit")
@click.pass_context
def purge(
    ctx: click.Context,
    older_than: float,
    any_application: bool,
    dry_run: bool,
    yes: bool,
    name: str | None,
    as_json: bool,
) -> None:
    """
    Remove transactions that have ended or never begun.

    Nobody can show, run or take them back then, and their ids may be used again. A compensation stays as long as what
    it takes back. All that is in progress or queued stays.
    """
    from mongo_celery.twophase.final import FinalTransactions

    chosen = _chosen(ctx, name)
    with one_sentence_errors(lambda: FinalTransactions.concern_of(chosen.log)):
        found = chosen.purge(older_than, all=any_application, dry_run=True) if dry_run or not yes else None
        if found is not None and not dry_run and found.done + found.canceled + found.initial:
            say(_purged(found, "Would remove"), err=True)
            click.confirm("Remove them for good?", abort=True, err=True)
        if not dry_run:
            found = chosen.purge(older_than, all=any_application)
    assert found is not None
    if as_json:
        click.echo(json.dumps({**asdict(found), "dry_run": dry_run}))
    else:
        say(_purged(found, "Would remove" if dry_run else "Removed"))


def _purged(found: Purge, verb: str) -> str:
    from mongo_celery.quantities import number

    what = f"{number(found.done, 'transaction', 'transactions')} done, {found.canceled} canceled"
    what += f", {found.initial} never begun" if found.initial else ""
    kept = number(found.kept, "compensation stays", "compensations stay")
    return f"{verb} {what}.{f' {kept}, since what is taken back is there.' if found.kept else ''}"


def _shown(ctx: click.Context, name: str | None, text: str) -> tuple[TwoPhaseCommit, Mapping[str, Any]]:
    chosen = _chosen(ctx, name)
    with one_sentence_errors(lambda: chosen.log.concern):
        return chosen, _find(chosen, text)


def _confirm(document: Mapping[str, Any], question: str, *, yes: bool) -> None:
    if not yes:
        say(_json(document), err=True)
        click.confirm(question, abort=True, err=True)


def _tell(outcome: Mapping[str, Any], *, as_json: bool) -> None:
    say(_json(outcome) if as_json else f"{_text(outcome['id'])}: {outcome['state']}")


def _chosen(ctx: click.Context, name: str | None) -> TwoPhaseCommit:
    from mongo_celery.twophase.twophase import TWO_PHASE_COMMITS

    return one_of(ctx, TWO_PHASE_COMMITS, name)


def _find(chosen: TwoPhaseCommit, text: str) -> Mapping[str, Any]:
    """The transaction whose id somebody has typed: as Extended JSON, as an ObjectId, or as plain text."""
    from mongo_celery.command_line import CommandLine
    from mongo_celery.errors import ConfigurationError
    from mongo_celery.twophase.values import plain_id, readings

    for reading in (*readings(text), text):
        try:
            identity = plain_id("id", reading, chosen.transactions.codec_options)
        except ConfigurationError:
            continue  # no document can have it
        found = chosen.stored(identity)
        if found is not None:
            return found
    line = CommandLine.of(chosen.app).celery("transactions", "list")
    raise click.ClickException(f"there is no transaction {text}; `{line}` shows ids as they can be typed.")


def _row(document: Mapping[str, Any], now: datetime | None) -> tuple[str, str, str, str, str]:
    given = document.get("changes", document.get("participants"))
    if given is not None or "participants" in document:
        what = ", ".join(map(_participant, given)) if isinstance(given, list) else _json(given)
    else:
        sides = (_text(document.get("source")), _text(document.get("destination")))
        what = f"{_text(document.get('value'))} from {sides[0]} to {sides[1]}"
    if document.get("reason"):
        what = f"{what}: {document['reason']}"
    if document.get("stoppedBy"):
        what = f"{what}; stopped: {document['stoppedBy']}"
    modified = document.get("lastModified")
    if document.get("state") == "initial" and "queuedAt" not in document:
        age = (now - modified).total_seconds() if now is not None and isinstance(modified, datetime) else None
        what = f"{what}; nobody has begun it for {duration(age)}"
    when = moment(modified.isoformat()) if isinstance(modified, datetime) else "-"
    application = document.get("application")
    of = f"of {application}" if application else "of no application"
    return visible(_text(document["_id"])), visible(document.get("state")), visible(of), when, visible(what)


def _participant(stored: object) -> str:
    if not isinstance(stored, dict):
        return _json(stored)
    cluster = stored.get("cluster")
    where = "" if cluster is None else f"{cluster}:"
    return f"{where}{stored.get('collection')} {_text(stored.get('id'))}"


def _text(value: object) -> str:
    """An id as it can be typed; a text that would be read as something else is quoted."""
    from bson import ObjectId

    from mongo_celery.twophase.values import readings

    if isinstance(value, ObjectId) or (isinstance(value, str) and not readings(value)):
        return str(value)
    return _json(value)


def _json(value: object, indent: int | None = None) -> str:
    from bson import json_util
    from bson.binary import UuidRepresentation

    options = json_util.RELAXED_JSON_OPTIONS.with_options(uuid_representation=UuidRepresentation.STANDARD)
    text = json_util.dumps(value, json_options=options)
    return json.dumps(json.loads(text), indent=indent, ensure_ascii=False)
