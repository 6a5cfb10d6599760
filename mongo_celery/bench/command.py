"""`mongo-celery bench`."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from mongo_celery.bench.capacity import CAPACITY_MODES, DEFAULT_MODES, WORKER_COUNTS, Capacity, measure_capacity
from mongo_celery.bench.capacity_view import capacity_as_json, show_capacity
from mongo_celery.bench.errors import BenchError
from mongo_celery.bench.handler_work import HandlerWork
from mongo_celery.bench.plot import Plot
from mongo_celery.bench.report import as_json
from mongo_celery.bench.run import Results, run
from mongo_celery.bench.sizes import CHOICES, FULL, QUICK, BenchSizes
from mongo_celery.bench.stage import Stage
from mongo_celery.bench.tables import show
from mongo_celery.bench.workload import Workload, content_of
from mongo_celery.cli.apps import FiniteRange
from mongo_celery.errors import MongoCeleryError

_COUNT = click.IntRange(min=1)
_HANDLER_SECONDS_MAX = 30
_TIME = FiniteRange(0, _HANDLER_SECONDS_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnOptions:
    """What a user says of changes and handlers; None where nothing was said."""

    payload: str | None
    handler_seconds: float | None
    handler_cpu_seconds: float | None
    workers: Sequence[int]

    @property
    def given(self) -> bool:
        """Whether anything was said."""
        return bool(self.workers) or (self.payload, self.handler_seconds, self.handler_cpu_seconds) != (None,) * 3

    def refuse(self, beside: Mapping[str, Any]) -> None:
        """
        Say that options of the modes are not for this.

        Raises:
            BenchError: one of them was given.
        """
        for name, value in beside.items():
            if self.given and name != "only" and value is not None:
                option = f"--{name.replace('_', '-')}"
                raise BenchError(f"{option} is for the modes, not for what a machine carries; leave it out.")

    def workload(self) -> Workload:
        """
        What was said, checked.

        Raises:
            BenchError: it does not go together, or is no payload.
        """
        cpu = self.handler_cpu_seconds or 0.0
        seconds = cpu if self.handler_seconds is None else self.handler_seconds
        if cpu > seconds:
            raise BenchError(
                f"--handler-cpu-seconds {cpu:g} is a part of --handler-seconds {seconds:g} and cannot be more."
            )
        return Workload(content=content_of(self.payload), work=HandlerWork(seconds, cpu))


@click.command()
@click.option("--quick", is_flag=True, help="One small round within a minute: rough. With --payload: short.")
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw a picture too: the extra 'plot'.")
@click.option("--rounds", type=_COUNT, help="How often each figure is measured; the median counts.")
@click.option("--only", multiple=True, type=click.Choice(CHOICES), metavar="MODE", help="Measure this; repeatable.")
@click.option("--payload", metavar="BYTES|FILE", help="What will be carried of documents like yours: see above.")
@click.option("--handler-seconds", type=_TIME, metavar="X", help="The same, with handlers that take so long.")
@click.option("--handler-cpu-seconds", type=_TIME, metavar="X", help="How much of that they compute, not wait.")
@click.option("--workers", type=_COUNT, multiple=True, metavar="N", help="By default 1, 4 and 16; repeatable.")
@click.option("--backlog", type=click.IntRange(min=4), help="Changes before the listener whose memory is measured.")
@click.option("--lease-ttl", type=FiniteRange(min=1), help="Seconds, of the bridge whose listener is ended.")
@click.option("--mongo-url", envvar="MONGO_CELERY_BENCH_MONGO_URL", help="A replica set; embedded if left out.")
@click.option("--redis-url", envvar="MONGO_CELERY_BENCH_REDIS_URL", help="The broker; embedded if left out.")
@click.option("--changes", type=_COUNT, hidden=True)
@click.option("--warm-up", type=_COUNT, hidden=True)
@click.option("--samples", type=_COUNT, hidden=True)
@click.option("--takeovers", type=_COUNT, hidden=True)
@click.option("--load-seconds", type=FiniteRange(min=0), hidden=True)
def bench(
    quick: bool,
    wants_json: bool,
    plot: Path | None,
    mongo_url: str | None,
    redis_url: str | None,
    payload: str | None,
    handler_seconds: float | None,
    handler_cpu_seconds: float | None,
    workers: Sequence[int],
    **given: Any,
) -> None:
    """
    Measure the bridge on this machine: changes per second beside plain Celery, processor time, latency, memory,
    take-over.

    With --payload, a number of bytes or a file with one document in JSON, or --handler-seconds it says instead what
    this machine will carry of changes and handlers like yours with 1, 4 and 16 workers, and where the limit lies.

    Absolute figures depend on the machine and on what else it does; compare the ratios. Given servers
    are left as they were found.
    """
    began = time.monotonic()
    own = _OwnOptions(
        payload=payload, handler_seconds=handler_seconds, handler_cpu_seconds=handler_cpu_seconds, workers=workers
    )
    sizes = _sizes(QUICK if quick else FULL, given)
    logging.getLogger("mongo_celery").addHandler(logging.NullHandler())  # what is recovered is meant to be
    console = Console(stderr=True, quiet=wants_json)
    try:
        own.refuse(given)
        act, drawing = _act(own, sizes, plot, began)
        with console.status("starting servers") as status, Stage(mongo_url, redis_url) as stage:
            found = act(stage, status.update)
        if drawing is not None and isinstance(found, Results):
            drawing.draw(found)
    except MongoCeleryError as error:
        raise click.ClickException(str(error)) from error
    _print(found, sizes, wants_json=wants_json)
    if drawing is not None and not wants_json:
        click.echo(f"The picture is in {plot}.")


_Act = Callable[[Stage, Callable[[str], None]], Results | Capacity]


def _sizes(sizes: BenchSizes, given: dict[str, Any]) -> BenchSizes:
    """With what was asked for; who names parts wants all of them, however long it takes."""
    chosen = {name: value for name, value in given.items() if value not in {None, ()}}
    if "only" in chosen:
        chosen["seconds_max"] = None
    return replace(sizes, **chosen)


def _act(own: _OwnOptions, sizes: BenchSizes, plot: Path | None, began: float) -> tuple[_Act, Plot | None]:
    """
    What is to be done with the servers, and where the picture goes: checked before anything starts.

    Raises:
        BenchError: something cannot be done.
    """
    if not own.given:
        drawing = None if plot is None else Plot(plot)
        return lambda stage, announce: run(stage, sizes, announce, began), drawing
    if plot is not None:
        raise BenchError("--plot draws the modes, not what a machine carries; leave out --payload and the like.")
    others = [name for name in sizes.only if name not in CAPACITY_MODES]
    if others:
        raise BenchError(f"--only {others[0]} carries no changes of yours; choose from {', '.join(CAPACITY_MODES)}.")
    workload, modes = own.workload(), sizes.only or DEFAULT_MODES
    counts = own.workers or WORKER_COUNTS

    def carry(stage: Stage, announce: Callable[[str], None]) -> Capacity:
        capacity = measure_capacity(stage, workload, modes, counts, sizes.window_seconds, announce)
        capacity.rough = sizes.rough
        return capacity

    return carry, None


def _print(found: Results | Capacity, sizes: BenchSizes, *, wants_json: bool) -> None:
    if isinstance(found, Capacity):
        if wants_json:
            click.echo(json.dumps(capacity_as_json(found)))
        else:
            show_capacity(found, Console())
    elif wants_json:
        click.echo(json.dumps(as_json(found, sizes)))
    else:
        show(found, Console())
