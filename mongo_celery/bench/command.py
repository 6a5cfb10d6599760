"""`mongo-celery bench`."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import click
from rich.console import Console

from mongo_celery.bench.report import as_json, show
from mongo_celery.bench.run import run
from mongo_celery.bench.sizes import CHOICES, FULL, QUICK
from mongo_celery.bench.stage import Stage
from mongo_celery.errors import MongoCeleryError

_COUNT = click.IntRange(min=1)


@click.command()
@click.option("--quick", is_flag=True, help="One small round: a minute or so instead of many.")
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--rounds", type=_COUNT, help="How often each figure is measured; the median counts.")
@click.option("--only", multiple=True, type=click.Choice(CHOICES), metavar="MODE", help="Measure this; repeatable.")
@click.option("--backlog", type=click.IntRange(min=4), help="Changes before the listener whose memory is measured.")
@click.option("--lease-ttl", type=click.FloatRange(min=1), help="Seconds, of the bridge whose listener is ended.")
@click.option("--mongo-url", envvar="MONGO_CELERY_BENCH_MONGO_URL", help="A replica set; embedded if left out.")
@click.option("--redis-url", envvar="MONGO_CELERY_BENCH_REDIS_URL", help="The broker; embedded if left out.")
@click.option("--changes", type=_COUNT, hidden=True)
@click.option("--warm-up", type=_COUNT, hidden=True)
@click.option("--samples", type=_COUNT, hidden=True)
@click.option("--takeovers", type=_COUNT, hidden=True)
def bench(quick: bool, wants_json: bool, mongo_url: str | None, redis_url: str | None, **given: Any) -> None:
    """
    Measure the bridge on this machine: changes per second beside plain Celery, latency, memory, take-over.

    Absolute figures depend on the machine and on what else it does; compare the ratios. Given servers
    are left as they were found.
    """
    chosen = {name: value for name, value in given.items() if value not in {None, ()}}
    sizes = replace(QUICK if quick else FULL, **chosen)
    logging.getLogger("mongo_celery").addHandler(logging.NullHandler())  # what is recovered is meant to be
    progress = Console(stderr=True, quiet=wants_json)
    try:
        with progress.status("starting servers") as status, Stage(mongo_url, redis_url) as stage:
            results = run(stage, sizes, status.update)
    except MongoCeleryError as error:
        raise click.ClickException(str(error)) from error
    if wants_json:
        click.echo(json.dumps(as_json(results, sizes), indent=2))
    else:
        show(results, Console())
