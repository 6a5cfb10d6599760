"""`mongo-celery demo`."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from mongo_celery.demo.run import DemoOptions, Result, run_demo
from mongo_celery.demo.servers import given_urls
from mongo_celery.demo.setting import VARIABLE
from mongo_celery.demo.view import verdict_table, view_for
from mongo_celery.embedded.ending import ended_by_signals

DEFAULT_ORDERS = 120


@click.command("demo")
@click.option(
    "--orders",
    type=click.IntRange(1, 100_000),
    default=DEFAULT_ORDERS,
    show_default=True,
    metavar="N",
    help="How many orders; each is written five times.",
)
@click.option("--no-faults", is_flag=True, help="Kill and freeze nothing.")
@click.option("--keep", is_flag=True, help="Leave the data and the logs, and say where.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--mongo-url", metavar="URL", help="A replica set of yours instead of an embedded one.")
@click.option("--redis-url", metavar="URL", help="A Redis of yours instead of an embedded one.")
@click.pass_context
def command(
    ctx: click.Context,
    orders: int,
    no_faults: bool,
    keep: bool,
    as_json: bool,
    mongo_url: str | None,
    redis_url: str | None,
) -> None:
    """
    The whole thing on this machine, while processes are killed, with a verdict.

    Starts MongoDB, Redis, two listeners, a worker and a writer; says how many changes a second flow; then kills the
    leading listener and a process of the worker's pool, and freezes a handler; at last reads everything back and
    compares it with what was written.

    The exit status is 0 if nothing was lost or out of order.
    """
    options = DemoOptions(orders=orders, faults=not no_faults, keep=keep, urls=given_urls(mongo_url, redis_url))
    console = Console(soft_wrap=True)
    with ended_by_signals() as ending:
        with view_for(console, silent=as_json) as view:
            result = run_demo(options, view)
        if as_json:
            click.echo(json.dumps(_object(result)))
        else:
            _print(console, result)
        if result.unfinished:
            click.secho(f"Error: the demo did not finish: {result.unfinished}", fg="red", err=True)
        ctx.exit(0 if result.good else 1)
    ctx.exit(ending.status)


def _object(result: Result) -> dict[str, object]:
    verdict = result.verdict
    return {
        **result.figures(),
        "unexpected": len(verdict.unexpected),
        "finished": result.unfinished is None,
        "findings": [*verdict.lost, *verdict.out_of_order, *verdict.unexpected],
        "events": list(result.progress.events),
        "kept": str(result.kept) if result.kept else None,
    }


def _print(console: Console, result: Result) -> None:
    console.print()
    console.print(verdict_table(result.verdict, result.figures()))
    console.print()
    console.print(_sentence(result))
    if result.kept is not None:
        _print_kept(console, result, result.kept)


def _sentence(result: Result) -> Text:
    if result.good:
        again = result.verdict.duplicates
        repeats = f"; {again} handled again after a fault" if again else ""
        return Text(f"PASSED: nothing lost, nothing out of order{repeats}.", "bold green")
    if result.verdict.good:
        return Text("FAILED: the demo did not finish.", "bold red")
    return Text("FAILED: see the findings above.", "bold red")


def _print_kept(console: Console, result: Result, kept: Path) -> None:
    setting = result.setting
    state = setting.bridge_options["database"]
    lines = [
        f"\nLogs and the writer's record: {kept}",
        f"Databases: {setting.database} (orders, customers, summaries, journal), {state} (the bridge's state)",
    ]
    if (kept / "mongodb").exists():
        lines.append(f"To look at them, start the servers again:\n  mongo-celery services --directory {kept}")
    variable = f"{VARIABLE}={shlex.quote(setting.to_json())}"
    status = f"{shlex.quote(sys.executable)} -m celery -A mongo_celery.demo.app changes status"
    lines.append(f"The bridge's status, while the servers run:\n  {variable} \\\n  {status}")
    console.print("\n".join(lines), markup=False, highlight=False)
