"""The command line of the benchmarks."""

from __future__ import annotations

import json
import logging
import time

import click
from rich.console import Console

from mongo_celery.bench.stage import Stage
from mongo_celery.errors import MongoCeleryError
from tests.benchmarks.backlog_suite import run_backlog, run_handlers
from tests.benchmarks.latency_suite import run_latency
from tests.benchmarks.outbox_suite import run_outbox
from tests.benchmarks.readings import Suite, Tables, as_json, show
from tests.benchmarks.sizes import FULL, QUICK
from tests.benchmarks.transaction_suite import run_transactions

SUITES: dict[str, Suite] = {
    "outbox": run_outbox,
    "transactions": run_transactions,
    "backlog": run_backlog,
    "handlers": run_handlers,
    "latency": run_latency,
}


@click.command()
@click.argument("suites", nargs=-1, type=click.Choice(list(SUITES)))
@click.option("--quick", is_flag=True, help="One small round: a minute or so instead of many.")
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--size", "given", multiple=True, metavar="NAME=NUMBER", help="A size of `sizes.py`; repeatable.")
@click.option("--mongo-url", envvar="MONGO_CELERY_BENCH_MONGO_URL", help="A replica set; embedded if left out.")
@click.option("--redis-url", envvar="MONGO_CELERY_BENCH_REDIS_URL", help="The broker; embedded if left out.")
def benchmarks(
    suites: tuple[str, ...],
    quick: bool,
    wants_json: bool,
    given: tuple[str, ...],
    mongo_url: str | None,
    redis_url: str | None,
) -> None:
    """
    Measure the named suites on this machine, or all of them.

    \b
    outbox        a write with its task, beside a plain write and delay(); sweeps
    transactions  two-phase commits, transactions and locks, beside plain updates
    backlog       a listener's memory, and the CPU time of a change or snapshot row, by the length of the backlog
    handlers      the CPU time of a change for each of 1, 10 and 60 handlers on one stream
    latency       from a write to the start of its handler, and the take-over after SIGTERM and SIGKILL

    Absolute figures depend on the machine and on its other load. Compare the ratios. Given servers are left as they
    were found.
    """  # noqa: D301 - \b is click's, and no part of the text
    sizes = (QUICK if quick else FULL).changed(given)
    logging.getLogger("mongo_celery").addHandler(logging.NullHandler())
    progress = Console(stderr=True, quiet=wants_json)
    began = time.monotonic()
    results: dict[str, Tables] = {}
    try:
        with progress.status("starting servers") as status, Stage(mongo_url, redis_url) as stage:
            for name in suites or SUITES:
                results[name] = SUITES[name](stage, sizes, status.update)
    except MongoCeleryError as error:
        raise click.ClickException(str(error)) from error
    seconds = time.monotonic() - began
    if wants_json:
        click.echo(json.dumps(as_json(results, seconds), indent=2))
    else:
        show(results, seconds, Console())
