"""`mongo-celery bench`."""

from __future__ import annotations

import json
import logging
from dataclasses import fields, replace
from typing import Any, TypeVar

import click
from rich.console import Console

from mongo_celery.bench.plan import CHOICES, FULL, FULL_SIZES, QUICK, QUICK_SIZES, Plan, Sizes
from mongo_celery.bench.stage import Stage
from mongo_celery.bench.suites import SUITES, as_json, run_suites, show
from mongo_celery.errors import MongoCeleryError

Chosen = TypeVar("Chosen", Plan, Sizes)

_COUNT = click.IntRange(min=1)
_MANY = click.IntRange(min=4)


@click.command()
@click.option(
    "--suite",
    type=click.Choice([*SUITES, "all"]),
    default="bridge",
    show_default=True,
    help="What is measured.",
)
@click.option("--quick", is_flag=True, help="One small round: a minute or so instead of many.")
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--rounds", type=_COUNT, help="How often each figure is measured; the median counts.")
@click.option("--only", multiple=True, type=click.Choice(CHOICES), metavar="MODE", help="Of the bridge; repeatable.")
@click.option(
    "--documents",
    type=click.IntRange(min=0),
    help="Of the collection in which the outbox's sweep looks for 100; 0 leaves it out.",
)
@click.option("--backlog", type=_MANY, help="Changes before the listener whose memory is measured.")
@click.option("--lease-ttl", type=click.FloatRange(min=1), help="Seconds, of the bridge whose listener is ended.")
@click.option("--mongo-url", envvar="MONGO_CELERY_BENCH_MONGO_URL", help="A replica set; embedded if left out.")
@click.option("--redis-url", envvar="MONGO_CELERY_BENCH_REDIS_URL", help="The broker; embedded if left out.")
@click.option("--changes", type=_COUNT, hidden=True)
@click.option("--warm-up", type=_COUNT, hidden=True)
@click.option("--samples", type=_COUNT, hidden=True)
@click.option("--takeovers", type=_COUNT, hidden=True)
@click.option("--writes", type=_COUNT, hidden=True)
@click.option("--entries", type=_MANY, hidden=True)
@click.option("--transfers", type=_COUNT, hidden=True)
@click.option("--actors", type=_COUNT, hidden=True)
@click.option("--kills", type=_COUNT, hidden=True)
@click.option("--lock-lifetime", type=click.IntRange(min=0), hidden=True)
def bench(
    suite: str, quick: bool, wants_json: bool, mongo_url: str | None, redis_url: str | None, **given: Any
) -> None:
    """
    Measure this machine.

    \b
    bridge        changes per second beside plain Celery, latency, memory, take-over
    outbox        writes beside plain ones, entries per second, the sweep, recovery
    transactions  two-phase commits and locked documents, and their recovery

    Absolute figures depend on the machine and on what else it does; compare the ratios. Given servers
    are left as they were found.
    """  # noqa: D301 - \b is click's, and no part of the text
    if given["only"] and suite not in {"bridge", "all"}:
        raise click.UsageError("--only chooses modes of the suite bridge.")
    plan, sizes = _sized(QUICK if quick else FULL, given), _sized(QUICK_SIZES if quick else FULL_SIZES, given)
    chosen = SUITES if suite == "all" else (suite,)
    logging.getLogger("mongo_celery").addHandler(logging.NullHandler())  # what is recovered is meant to be
    progress = Console(stderr=True, quiet=wants_json)
    try:
        with progress.status("starting servers") as status, Stage(mongo_url, redis_url) as stage:
            results = run_suites(stage, chosen, plan, sizes, status.update)
    except MongoCeleryError as error:
        raise click.ClickException(str(error)) from error
    if wants_json:
        click.echo(json.dumps(as_json(results, plan, sizes), indent=2))
    else:
        show(results, Console())


def _sized(sizes: Chosen, given: dict[str, Any]) -> Chosen:
    """Sizes with what was given on the command line; each option belongs to those that have a field of its name."""
    names = {field.name for field in fields(sizes)}
    return replace(sizes, **{name: value for name, value in given.items() if name in names and value not in {None, ()}})
