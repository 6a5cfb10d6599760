"""`celery -A app transactions`: show two-phase transactions, finish, cancel or compensate them."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

import click
from celery.bin.base import handle_preload_options

from mongo_celery.cli.acting import acting_on
from mongo_celery.cli.apps import FiniteRange, console_of, json_option, one_of, one_sentence_errors, say
from mongo_celery.quantities import moment
from mongo_celery.visible import visible

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mongo_celery.plan import Plan
    from mongo_celery.twophase import TwoPhaseCommit

_LIMIT = 50
_RECOVER_LIMIT = 1000
_STATES = ("initial", "pending", "applied", "done", "canceling", "canceled")

NAME = click.option("--name", metavar="NAME", help="The TwoPhaseCommit, if the app has several.")
JSON = json_option("transaction")


def _chosen(ctx: click.Context, name: str | None) -> TwoPhaseCommit:
    from mongo_celery.twophase.twophase import TWO_PHASE_COMMITS

    return one_of(ctx, TWO_PHASE_COMMITS, name)


ALL = click.option("--all", "any_application", is_flag=True, help="Include transactions of other apps.")


@click.group(epilog="Example: celery -A shop transactions list")
@click.pass_context
@handle_preload_options
def transactions(ctx: click.Context, **_: Any) -> None:
    """Show, finish, cancel and compensate two-phase transactions."""
    del ctx


@transactions.command("list", epilog="Example: celery -A shop transactions list --state pending")
@click.argument("id", metavar="[ID]", required=False)
@click.option(
    "--state",
    "states",
    type=click.Choice(_STATES),
    multiple=True,
    help="Only transactions in this state. May be repeated.",
)
@click.option(
    "--limit", type=click.IntRange(min=1), default=_LIMIT, show_default=True, help="Show at most N transactions."
)
@NAME
@JSON
@click.pass_context
def list_transactions(
    ctx: click.Context,
    id: str | None,  # noqa: A002
    states: tuple[str, ...],
    limit: int,
    name: str | None,
    as_json: bool,
) -> None:
    """
    List transactions, the one with the oldest step first.

    Without --state it lists all unfinished ones. With ID it shows the stored transaction in Extended JSON.
    """
    wanted = list(states) or ["initial", "pending", "applied", "canceling"]
    from mongo_celery.twophase.plans import find_transaction, to_json
    from mongo_celery.twophase.twophase import get_engine

    chosen = _chosen(ctx, name)
    with one_sentence_errors(lambda: get_engine(chosen).log.error_context):
        found = chosen.find(wanted, limit=limit) if id is None else [find_transaction(chosen, id)]
    if as_json or id is not None:
        for document in found:
            for line in to_json(document, indent=None if as_json else 2).split("\n"):
                say(line)
        return
    from rich.padding import Padding
    from rich.text import Text

    console = console_of(ctx)
    for document in found:  # no markup: anyone may have stored this text
        id_, state, application, modified, what = _row(document)
        console.print(Text(f"{id_}  {state}  {modified}  {application}"), soft_wrap=True)  # people copy the id
        console.print(Padding(Text(what), (0, 0, 0, 2), expand=False))
    if not found:
        console.print(f"No transaction is {' or '.join(wanted)}.")


@transactions.command(epilog="Example: celery -A shop transactions recover --older-than 60")
@click.argument("id", metavar="[ID]", required=False)
@click.option(
    "--older-than",
    type=FiniteRange(min=0),
    metavar="SECONDS",
    help="Seconds since the last step, by the server's clock. Default: the option of the TwoPhaseCommit, half an hour.",
)
@ALL
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=_RECOVER_LIMIT,
    show_default=True,
    help="Finish at most N transactions.",
)
@acting_on("name", NAME, _chosen)
def recover(chosen: TwoPhaseCommit, id: str | None, older_than: float | None, **given: Any) -> Plan:  # noqa: A002
    """
    Finish transactions that are pending, applied or canceling.

    The recovery that beat starts does the same. With ID it finishes that transaction, even if it was stored and never
    started. The command ends with status 1 if a transaction could not be finished.
    """
    from mongo_celery.twophase.plans import plan_recover, plan_run

    return plan_recover(chosen, older_than, **given) if id is None else plan_run(chosen, id)


@transactions.command(epilog="Example: celery -A shop transactions cancel order-42 --compensate")
@click.argument("id", metavar="ID")
@click.option("--compensate", is_flag=True, help="If the transaction is done, reverse it with a new transaction.")
@ALL
@click.option("--reason", help="The reason, stored with the transaction that is rolled back.")
@acting_on("name", NAME, _chosen)
def cancel(
    chosen: TwoPhaseCommit,
    id: str,  # noqa: A002
    reason: str | None,
    *,
    compensate: bool,
    any_application: bool,
) -> Plan:
    """
    Roll a transaction back, or compensate a finished one.

    Without --compensate it rolls back a transaction that is not applied yet. With --compensate it stores and runs the
    opposite transaction. If the command is interrupted, repeat it. It ends with status 1 if the opposite transaction is
    rolled back, for example because the money is already spent.
    """
    from mongo_celery.twophase.plans import plan_cancel, plan_compensate

    if not compensate:
        return plan_cancel(chosen, id, reason or "canceled on the command line", any_application=any_application)
    if reason or any_application:
        raise click.UsageError("--reason and --all do not work with --compensate. Leave them out.")
    return plan_compensate(chosen, id)


def _row(document: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    from mongo_celery.twophase.plans import format_id, to_json

    given = document.get("participants")
    if "participants" in document:
        what = ", ".join(map(_participant, given)) if isinstance(given, list) else to_json(given)
    else:
        sides = (format_id(document.get("source")), format_id(document.get("destination")))
        what = f"{format_id(document.get('value'))} from {sides[0]} to {sides[1]}"
    if document.get("reason"):
        what = f"{what}: {document['reason']}"
    if document.get("stoppedBy"):
        what = f"{what}. Stopped: {document['stoppedBy']}"
    if document.get("state") == "initial" and "queuedAt" not in document:
        what = f"{what}. Not started yet"
    modified = document.get("lastModified")
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
