"""`celery -A app transactions`: look at two-phase transactions, finish, cancel, take back or remove them."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

import click
from celery.bin.base import handle_preload_options

from mongo_celery.cli.acting import acting_on
from mongo_celery.cli.apps import FiniteRange, console_of, json_option, one_of, one_sentence_errors, say
from mongo_celery.quantities import duration, moment
from mongo_celery.visible import visible

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mongo_celery.plan import Plan
    from mongo_celery.twophase import TwoPhaseCommit

_LIMIT = 50
_RECOVER_LIMIT = 1000
_STATES = ("initial", "pending", "applied", "done", "canceling", "canceled")

NAME = click.option("--name", metavar="NAME", help="The TwoPhaseCommit, where the app has several.")
JSON = json_option("transaction")


def _chosen(ctx: click.Context, name: str | None) -> TwoPhaseCommit:
    from mongo_celery.twophase.twophase import TWO_PHASE_COMMITS

    return one_of(ctx, TWO_PHASE_COMMITS, name)


ALL = click.option("--all", "any_application", is_flag=True, help="Also those of other applications.")
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
    from mongo_celery.twophase.plans import to_json

    if as_json:
        for document in found:
            say(to_json(document))
        return
    from rich.padding import Padding
    from rich.text import Text

    console = console_of(ctx)
    for document in found:  # no markup: what is stored is anybody's
        id_, state, application, modified, what = _row(document, now)
        console.print(Text(f"{id_}  {state}  {modified}  {application}"), soft_wrap=True)  # an id is there to be copied
        console.print(Padding(Text(what), (0, 0, 0, 2), expand=False))
    if not found:
        console.print(f"No transaction is {' or '.join(wanted)}.")


@transactions.command()
@click.argument("id", metavar="ID")
@NAME
@click.pass_context
def show(ctx: click.Context, id: str, name: str | None) -> None:  # noqa: A002
    """Show one transaction as it is stored, in Extended JSON."""
    from mongo_celery.twophase.plans import find_transaction, to_json

    chosen = _chosen(ctx, name)
    with one_sentence_errors():
        document = find_transaction(chosen, id)
    for line in to_json(document, indent=2).split("\n"):
        say(line)


@transactions.command()
@click.argument("id", metavar="[ID]", required=False)
@click.option(
    "--older-than",
    type=FiniteRange(min=0),
    metavar="SECONDS",
    help="Since the last step, by the server's clock; by default as the TwoPhaseCommit says, else half an hour.",
)
@ALL
@click.option("--limit", type=click.IntRange(min=1), default=_RECOVER_LIMIT, show_default=True, help="At most so many.")
@acting_on("name", NAME, _chosen)
def recover(chosen: TwoPhaseCommit, id: str | None, older_than: float | None, **given: Any) -> Plan:  # noqa: A002
    """
    Finish what was left pending, applied or canceling.

    As the recovery that beat starts; any number may run at once. With ID it advances this one to its end, here, also if
    it was only stored. Ends with status 1 if one could not be finished.
    """
    from mongo_celery.twophase.plans import plan_recover, plan_run

    return plan_recover(chosen, older_than, **given) if id is None else plan_run(chosen, id)


@transactions.command()
@click.argument("id", metavar="ID")
@ALL
@click.option("--reason", default="canceled on the command line", show_default=True, help="Kept with the transaction.")
@acting_on("name", NAME, _chosen)
def cancel(chosen: TwoPhaseCommit, id: str, reason: str, *, any_application: bool) -> Plan:  # noqa: A002
    """Roll a transaction back that is not applied yet."""
    from mongo_celery.twophase.plans import plan_cancel

    return plan_cancel(chosen, id, reason, any_application=any_application)


@transactions.command()
@click.argument("id", metavar="ID")
@acting_on("name", NAME, _chosen)
def compensate(chosen: TwoPhaseCommit, id: str) -> Plan:  # noqa: A002
    """
    Take a transaction back that is done.

    The opposite transaction is stored and run. If the command is interrupted, call it again. Ends with status 1 if the
    opposite is rolled back, as where what was paid is spent.
    """
    from mongo_celery.twophase.plans import plan_compensate

    return plan_compensate(chosen, id)


@transactions.command()
@click.option(
    "--older-than",
    type=FiniteRange(min=0),
    required=True,
    metavar="SECONDS",
    help="Since the last step, by the server's clock; not less than the deadline.",
)
@ALL
@acting_on("name", NAME, _chosen)
def purge(chosen: TwoPhaseCommit, older_than: float, *, any_application: bool) -> Plan:
    """
    Remove transactions that have ended or never begun.

    Nobody can show, run or take them back then, and their ids may be used again. A compensation stays as long as what
    it takes back. All that is in progress or queued stays.
    """
    from mongo_celery.twophase.plans import plan_purge

    return plan_purge(chosen, older_than, any_application=any_application)


def _row(document: Mapping[str, Any], now: datetime | None) -> tuple[str, str, str, str, str]:
    from mongo_celery.twophase.plans import format_id, to_json

    given = document.get("changes", document.get("participants"))
    if given is not None or "participants" in document:
        what = ", ".join(map(_participant, given)) if isinstance(given, list) else to_json(given)
    else:
        sides = (format_id(document.get("source")), format_id(document.get("destination")))
        what = f"{format_id(document.get('value'))} from {sides[0]} to {sides[1]}"
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
    return visible(format_id(document["_id"])), visible(document.get("state")), visible(of), when, visible(what)


def _participant(stored: object) -> str:
    from mongo_celery.twophase.plans import format_id, to_json

    if not isinstance(stored, dict):
        return to_json(stored)
    cluster = stored.get("cluster")
    where = "" if cluster is None else f"{cluster}:"
    return f"{where}{stored.get('collection')} {format_id(stored.get('id'))}"
