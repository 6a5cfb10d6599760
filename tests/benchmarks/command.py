"""The command line of the benchmarks."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import click
from rich.console import Console

from mongo_celery.bench.stage import Stage
from mongo_celery.errors import MongoCeleryError
from tests.benchmarks.backlog_suite import run_backlog
from tests.benchmarks.handlers_suite import run_handlers
from tests.benchmarks.latency_suite import run_latency
from tests.benchmarks.outbox_suite import run_outbox
from tests.benchmarks.parts_suite import run_parts
from tests.benchmarks.report import SuiteResults, as_json, show
from tests.benchmarks.sizes import FULL, QUICK, Sizes
from tests.benchmarks.snapshot_suite import run_snapshot
from tests.benchmarks.spill_suite import run_spill
from tests.benchmarks.stream_suite import run_stream
from tests.benchmarks.transaction_suite import run_transactions

SUITES: dict[str, Callable[[Stage, Sizes, Callable[[str], None]], Any]] = {
    "outbox": run_outbox,
    "transactions": run_transactions,
    "stream": run_stream,
    "spill": run_spill,
    "snapshot": run_snapshot,
    "parts": run_parts,
    "backlog": run_backlog,
    "handlers": run_handlers,
    "latency": run_latency,
}
"""By name, which is also that of what it gives in the results."""

_COUNT = click.IntRange(min=1)
_ANY = click.IntRange(min=0)


@click.command()
@click.argument("suites", nargs=-1, type=click.Choice(list(SUITES)))
@click.option("--quick", is_flag=True, help="One small round: a minute or so instead of many.")
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--rounds", type=_COUNT, help="How often each figure is measured; the median counts.")
@click.option("--documents", type=_ANY, help="Of the collection in which the sweep looks for 100; 0 leaves it out.")
@click.option("--existing", type=click.IntRange(min=1000), help="Documents of a snapshot, and live inserts beside it.")
@click.option("--snapshots", type=_COUNT, help="How many snapshots are measured; the median counts.")
@click.option("--owed", type=_COUNT, multiple=True, help="Length of a backlog; repeatable.")
@click.option("--mongo-url", envvar="MONGO_CELERY_BENCH_MONGO_URL", help="A replica set; embedded if left out.")
@click.option("--redis-url", envvar="MONGO_CELERY_BENCH_REDIS_URL", help="The broker; embedded if left out.")
@click.option("--writes", type=_COUNT, hidden=True)
@click.option("--entries", type=_COUNT, hidden=True)
@click.option("--transfers", type=_COUNT, hidden=True)
@click.option("--processes", type=_COUNT, hidden=True)
@click.option("--kills", type=_COUNT, hidden=True)
@click.option("--scanned", type=_COUNT, hidden=True)
@click.option("--beside", type=_COUNT, hidden=True)
@click.option("--standing", type=_COUNT, hidden=True)
@click.option("--backlog", type=_COUNT, hidden=True)
@click.option("--stored", type=_COUNT, hidden=True)
@click.option("--spilled", type=_COUNT, hidden=True)
@click.option("--live", type=_COUNT, hidden=True)
@click.option("--parts", type=click.IntRange(min=400), hidden=True)
@click.option("--reached", type=_COUNT, hidden=True)
@click.option("--lease-ttl", type=click.FloatRange(min=1), hidden=True)
@click.option("--lock-lifetime", type=_ANY, hidden=True)
def benchmarks(
    suites: tuple[str, ...], quick: bool, wants_json: bool, mongo_url: str | None, redis_url: str | None, **given: Any
) -> None:
    """
    Measure the named suites on this machine, or all of them.

    \b
    outbox        writes beside plain ones, entries per second, the sweep, recovery
    transactions  two-phase commits and locked documents, and their recovery
    stream        oplog entries that the bridge's stream passes, by the number of its sources
    spill         other partitions beside one that stands, what storing its changes costs, and going on with them
    snapshot      documents that exist, beside as many live inserts, and what live changes wait meanwhile
    parts         CPU time of what a listener and a worker do with a change, part by part
    backlog       a listener's memory, and the CPU time of a change, behind backlogs of several lengths
    handlers      the CPU time of a change for each of 1, 10 and 60 handlers on one stream
    latency       from a write to the start of its handler, and the take-over after SIGTERM and SIGKILL

    Absolute figures depend on the machine and on what else it does; compare the ratios. Given servers
    are left as they were found.
    """  # noqa: D301 - \b is click's, and no part of the text
    chosen = {name: value for name, value in given.items() if value not in {None, ()}}
    sizes = replace(QUICK if quick else FULL, **chosen)
    logging.getLogger("mongo_celery").addHandler(logging.NullHandler())  # what is recovered is meant to be
    progress = Console(stderr=True, quiet=wants_json)
    try:
        with progress.status("starting servers") as status, Stage(mongo_url, redis_url) as stage:
            results = run_suites(stage, suites or list(SUITES), sizes, status.update)
    except MongoCeleryError as error:
        raise click.ClickException(str(error)) from error
    if wants_json:
        click.echo(json.dumps(as_json(results, sizes), indent=2))
    else:
        show(results, Console())


def run_suites(stage: Stage, chosen: Sequence[str], sizes: Sizes, announce: Callable[[str], None]) -> SuiteResults:
    """Run suites one after the other; `announce` gets a line about what is being measured now."""
    began, results = time.monotonic(), SuiteResults()
    for name, run in SUITES.items():
        if name in chosen:
            setattr(results, name, run(stage, sizes, announce))
    results.seconds = time.monotonic() - began
    return results
