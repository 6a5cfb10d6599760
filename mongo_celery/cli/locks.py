"""`celery -A app locks`: look at open transactions that keep documents locked, and end some."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click
from celery.bin.base import handle_preload_options

from mongo_celery.cli.acting import acting_on
from mongo_celery.cli.apps import FiniteRange, console_of, json_option, one_sentence_errors, say
from mongo_celery.command_line import ANY_APP
from mongo_celery.visible import visible

if TYPE_CHECKING:
    from pymongo import MongoClient

    from mongo_celery.locking.holders import OpenTransaction
    from mongo_celery.mongo.verdicts import ErrorContext
    from mongo_celery.plan import Plan, PlanResult

    Found = tuple[MongoClient[Any], OpenTransaction]

URL = click.option("--url", metavar="URL", help="The MongoDB, where the app has no Bridge, Outbox or TwoPhaseCommit.")
JSON = json_option("transaction")
_RESULTS = {
    "freed": "ended; what it held is free",
    "gone": "had ended before",
    "alive": "not ended: something was heard of it meanwhile",
    "refused": "not ended: that needs the right killAnySession on the cluster",
}


@click.group()
@click.pass_context
@handle_preload_options
def locks(ctx: click.Context, **_: Any) -> None:
    """Show and end transactions that keep documents locked."""
    del ctx


@locks.command("list")
@click.option("--older-than", type=FiniteRange(min=0), metavar="SECONDS", help="Open for longer.")
@URL
@JSON
@click.pass_context
def list_locks(ctx: click.Context, older_than: float | None, url: str | None, as_json: bool) -> None:
    """
    List open transactions, the most idle first.

    Each may hold documents; MongoDB does not say which, nor whether one has written. With the client's address and
    appName, for how long no operation of it ran in all, and whether no connection of its client is left.
    """
    with one_sentence_errors(_concern):
        clients = _clients(ctx, url)
        found = [each for _, each in _found(clients) if each.open_seconds >= (older_than or 0)]
        _say_what_is_hidden(clients)
    if as_json:
        for each in found:
            click.echo(json.dumps(each.plain()))
        return
    _show(ctx, found)
    if not found:
        say("There is no open transaction.")


@locks.command()
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option("--dead", is_flag=True, help="All whose client is gone, and silent for ten seconds.")
@acting_on("url", URL, lambda ctx, url: (ctx, url))
def free(chosen: tuple[click.Context, str | None], ids: Sequence[str], *, dead: bool) -> Plan:
    """
    End transactions, by their ids in `list`, or those of dead clients.

    What they have written is undone, and what they have locked is free. A holder that lives is told so by its next
    operation, and repeats its body if that is a function of `transactional`; else, or in the middle of an operation, it
    fails with an error. One that has gone on to another transaction meanwhile is left alone.

    Of a dead client are those of which no connection is left, and nothing is heard for ten seconds, in which this
    command waits, and until the moment in which they are ended. Ends with status 1 if one could not be ended.
    """
    from mongo_celery.plan import Plan

    if bool(ids) == dead:
        raise click.UsageError("name transactions by their ids, or those of dead clients with --dead.")
    with one_sentence_errors(_concern):
        clients = _clients(*chosen)
        found = _named(_found(clients), ids) if ids else _dead(clients)
    lines = [line for _, each in found for line in (f"{each.id}  {each.state}  {each.server}", f"  {each}")]
    planned = [{**each.plain(), "result": "would_be_freed"} for _, each in found]
    return Plan(
        command="free",
        lines=lines or ["There is no transaction of a dead client."],
        fields={"transactions": planned},
        question="End these transactions?",
        seen=" ".join(str(each.id) for _, each in found),
        act=(lambda: _end(clients, found, dead=dead)) if found else None,
    )


# -- inside ----------------------------------------------------------------------------------------


def _concern() -> ErrorContext:
    from mongo_celery.mongo.verdicts import ErrorContext

    return ErrorContext("the open transactions", "inprog and killAnySession on the cluster")


def _clients(ctx: click.Context, url: str | None) -> list[MongoClient[Any]]:
    """Those of a URL, or of what the app has; the primary of each has answered once."""
    from mongo_celery.mongo.opening import ping

    found = [_client_of(url)] if url else list({id(each): each for each in _clients_of(ctx)}.values())
    if not found:
        raise click.ClickException(
            "this app has no Bridge, Outbox or TwoPhaseCommit that says where MongoDB is: name it with --url."
        )
    for each in found:
        ping(each)
    return found


def _client_of(url: str) -> MongoClient[Any]:
    from pymongo import MongoClient
    from pymongo.errors import ConfigurationError, InvalidURI

    from mongo_celery.mongo.redaction import short

    try:
        return MongoClient(url)
    except (InvalidURI, ConfigurationError, ValueError) as error:
        raise click.ClickException(f"--url is no URL of a MongoDB: {short(error)}.") from None


def _clients_of(ctx: click.Context) -> Iterator[MongoClient[Any]]:
    from mongo_celery.bridge.wiring import BRIDGES
    from mongo_celery.outbox.outbox import OUTBOXES
    from mongo_celery.twophase.twophase import TWO_PHASE_COMMITS

    if not ctx.find_root().params.get("app"):
        typed = f"celery -A shop locks {ctx.info_name}"
        raise click.ClickException(f"name your Celery app with -A, as in `{typed}`, or MongoDB with --url.")
    app = ctx.obj.app
    app.loader.import_default_modules()
    app.finalize()
    yield from (each.client for each in BRIDGES.of(app))
    yield from (each.backing.collection.database.client for each in OUTBOXES.of(app))
    yield from (each.transactions.database.client for each in TWO_PHASE_COMMITS.of(app))


def _found(clients: Sequence[MongoClient[Any]]) -> list[Found]:
    """All that are open, each once, by the client that may end it."""
    import pymongo

    from mongo_celery.locking.holders import open_transactions
    from mongo_celery.mongo.opening import ANSWER_SECONDS

    found: dict[Any, Found] = {}
    for client in clients:
        with pymongo.timeout(ANSWER_SECONDS):
            opened = open_transactions(client)
        for each in opened:
            if each.own or (each.id, each.user) not in found:
                found[each.id, each.user] = (client, each)
    return sorted(found.values(), key=lambda pair: (-pair[1].silent_seconds, -pair[1].idle_seconds))


def _dead(clients: Sequence[MongoClient[Any]]) -> list[Found]:
    """Those of dead clients: to be seen by two looks, where one has found any that are lost."""
    from mongo_celery.locking.holders import DEAD_SECONDS
    from mongo_celery.quantities import number

    lost = [each for _, each in _found(clients) if each.connected is False]
    if not lost:
        return []
    watched = number(len(lost), "transaction", "transactions")
    say(f"Watching {watched} of clients without a connection for {DEAD_SECONDS:g} s.", err=True)
    threading.Event().wait(DEAD_SECONDS)
    return [(client, each) for client, each in _found(clients) if each.is_dead]


def _named(found: Sequence[Found], ids: Sequence[str]) -> list[Found]:
    chosen = {}
    for typed in ids:
        matching = [pair for pair in found if typed and str(pair[1].id).startswith(typed.lower())]
        if len(matching) != 1:
            ending = "is open" if not matching else "is meant alone: type more of it"
            line = ANY_APP.celery("locks", "list")
            raise click.ClickException(f"no transaction {typed} {ending}; `{line}` shows all.")
        chosen[matching[0][1].id] = matching[0]
    return list(chosen.values())


def _end(clients: Sequence[MongoClient[Any]], chosen: Sequence[Found], *, dead: bool) -> PlanResult:
    """
    End transactions, by how they are now: a person may take minutes to answer.

    One that has ended since it was shown is not there any more, whatever its session does; one that was to be ended
    as a dead client's has to be one still.
    """
    import pymongo

    from mongo_celery.locking.freeing import end
    from mongo_celery.mongo.opening import ANSWER_SECONDS
    from mongo_celery.plan import PlanResult

    now = {(each.id, each.number): each for _, each in _found(clients)}
    results: dict[Any, str] = {}
    for client, each in chosen:
        found = now.get((each.id, each.number))
        if found is None:
            results[each.id] = "gone"
        elif dead and not found.is_dead:
            results[each.id] = "alive"
        else:
            with pymongo.timeout(ANSWER_SECONDS):
                results[each.id] = "refused" if end(client, [each]) else "freed"
    said = {each.id: f"{each.id}: {_RESULTS[results[each.id]]}" for _, each in chosen}
    return PlanResult(
        lines=[line for each, line in said.items() if results[each] != "refused"],
        fields={"transactions": [{**each.plain(), "result": results[each.id]} for _, each in chosen]},
        refused=[line for each, line in said.items() if results[each] == "refused"],
    )


def _say_what_is_hidden(clients: Sequence[MongoClient[Any]]) -> None:
    import pymongo

    from mongo_celery.locking.holders import sees_all
    from mongo_celery.mongo.opening import ANSWER_SECONDS

    with pymongo.timeout(ANSWER_SECONDS):
        seen = all(map(sees_all, clients))
    if not seen:
        say("Those of other MongoDB users are not shown: that needs inprog on the cluster.", err=True)


def _show(ctx: click.Context, found: Sequence[OpenTransaction]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    console = console_of(ctx)
    for each in found:  # no markup: an appName is anybody's
        identity = visible(f"{each.id}  {each.state}  {each.server}")
        console.print(Text(identity), soft_wrap=True)  # an id is there to be copied
        console.print(Padding(Text(visible(each)), (0, 0, 0, 2), expand=False))
