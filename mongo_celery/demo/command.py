"""`mongo-celery demo`."""

from __future__ import annotations

import json
from contextlib import ExitStack

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mongo_celery.demo.run import WORKER_PROCESSES, Result, Servers, embedded_servers, run_demo
from mongo_celery.embedded.processes import end_by_signals
from mongo_celery.errors import ConfigurationError

_FINDINGS_MAX = 10


@click.command("demo", epilog="Example: mongo-celery demo --orders 1000")
@click.option("--orders", type=click.IntRange(2, 100_000), default=240, show_default=True, help="Number of orders.")
@click.option("--no-faults", is_flag=True, help="Kill nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print only one JSON object.")
@click.option("--mongo-url", metavar="URL", help="Use this replica set instead of an embedded one.")
@click.option("--redis-url", metavar="URL", help="Use this Redis instead of an embedded one.")
@click.pass_context
def command(
    ctx: click.Context, orders: int, no_faults: bool, as_json: bool, mongo_url: str | None, redis_url: str | None
) -> None:
    """
    Run an end-to-end demo with kills and a verdict.

    It starts MongoDB, Redis, two listeners and a worker, and writes orders. It kills the leading listener and a worker
    process. Then it counts the changes that took effect. The exit status is 0 if nothing was lost or out of order.
    """
    console = Console(soft_wrap=True, quiet=as_json)
    with end_by_signals():
        with ExitStack() as stack:
            status = stack.enter_context(console.status("starting servers"))
            servers = _given_servers(mongo_url, redis_url) or stack.enter_context(embedded_servers())

            def announce(event: str) -> None:
                console.print(f"* {event}", style="yellow", highlight=False, markup=False)
                console.file.flush()

            result = run_demo(orders, faults=not no_faults, servers=servers, show=status.update, announce=announce)
        if as_json:
            click.echo(json.dumps(_result_as_json(result)))
        else:
            _print(result, console)
        if result.unfinished:
            click.secho(f"Error: the demo did not finish: {result.unfinished}", fg="red", err=True)
        ctx.exit(0 if result.passed else 1)


def _given_servers(mongo_url: str | None, redis_url: str | None) -> Servers | None:
    if mongo_url is None and redis_url is None:
        return None
    if mongo_url is None or redis_url is None:
        raise ConfigurationError(
            "One of --mongo-url and --redis-url is missing. Give both, or neither for embedded servers."
        )
    if not redis_url.startswith(("redis://", "rediss://")):
        raise ConfigurationError("--redis-url must begin with redis:// or rediss://, such as redis://127.0.0.1:6379/0.")
    return Servers(mongo_url, redis_url)


def _result_as_json(result: Result) -> dict[str, object]:
    """Return the result as JSON."""
    return {
        "changes_per_second": result.changes_per_second,
        "written": result.written,
        "handled": result.handled,
        "lost": len(result.lost),
        "out_of_order": len(result.out_of_order),
        "duplicates": result.duplicates,
        "takeover_seconds": result.takeover_seconds,
        "seconds": round(result.seconds, 1),
        "finished": result.unfinished is None,
        "findings": [*result.lost, *result.out_of_order],
        "events": result.events,
    }


def _print(result: Result, console: Console) -> None:
    """Print the table and the verdict."""
    table = Table(show_header=False, box=None, pad_edge=False)
    rate = "-" if result.changes_per_second is None else f"{result.changes_per_second:.0f}"
    worker = f"by a deliberately small worker ({WORKER_PROCESSES} processes)"
    table.add_row("without faults", f"{rate} changes/s, {worker}")
    for name in ("written", "handled", "lost", "out_of_order", "duplicates"):
        value = getattr(result, name)
        count = value if isinstance(value, int) else len(value)
        bad = count and not isinstance(value, int)
        table.add_row(name.replace("_", " "), Text(str(count), style="bold red" if bad else "bold"))
    if result.takeover_seconds is not None:
        table.add_row("take-over", f"{result.takeover_seconds:.1f} s")
    table.add_row("in all", f"{result.seconds:.0f} s")
    for finding in [*result.lost, *result.out_of_order][:_FINDINGS_MAX]:
        table.add_row("!", Text(finding, style="red"))
    console.print("", table, "", sep="\n")
    if result.passed:
        console.print("PASSED: nothing was lost or out of order.", style="bold green")
    elif result.unfinished:
        console.print("FAILED: the demo did not finish.", style="bold red")
    else:
        console.print("FAILED: changes were lost or out of order. See the findings above.", style="bold red")
