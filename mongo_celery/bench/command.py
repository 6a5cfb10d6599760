"""`mongo-celery bench`."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from mongo_celery.bench.run import MODES, Figure, measure_rounds
from mongo_celery.bench.setting import RAW_CHAIN
from mongo_celery.bench.stage import Stage
from mongo_celery.errors import MongoCeleryError

_PROCESSES = ("mongod", "worker_parent", "worker_children", "listener", "redis", "publisher")


@click.command(epilog="Example: mongo-celery bench --rounds 1")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Number of measurements of each mode."
)
@click.option("--only", multiple=True, type=click.Choice(list(MODES)), help="Measure only this mode. May be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print only one JSON object.")
@click.option("--changes", type=click.IntRange(min=2), default=500, hidden=True)
def bench(rounds: int, only: Sequence[str], as_json: bool, changes: int) -> None:
    """
    Measure the bridge on this machine: changes per second and CPU time, beside plain Celery.

    It starts MongoDB and Redis, and measures each mode in each round. With all modes and five rounds it takes about ten
    minutes. Absolute figures depend on the machine and its load, so compare the ratios.
    """
    began = time.monotonic()
    console = Console(stderr=True, quiet=as_json)
    try:
        with console.status("starting servers") as status, Stage() as stage:
            figures = measure_rounds(stage, only or list(MODES), rounds, changes, status.update)
    except MongoCeleryError as error:
        raise click.ClickException(str(error)) from error
    seconds = round(time.monotonic() - began, 1)
    if as_json:
        modes = {name: _plain(figure, figures.get(RAW_CHAIN)) for name, figure in figures.items()}
        click.echo(json.dumps({"seconds": seconds, "machine": describe_machine(), "rounds": rounds, "modes": modes}))
    else:
        _show(figures, Console())
        click.echo(f"{seconds:.0f} s in all")


def describe_machine() -> dict[str, Any]:
    """Return the facts that figures depend on: cores and versions."""
    packages = {name: version(name) for name in ("celery", "kombu", "pymongo", "redis")}
    return {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version(), **packages}


def _plain(figure: Figure, reference: Figure | None) -> dict[str, Any]:
    """Return a figure as JSON."""
    ratio, cpu_ratio = figure.ratios(reference)
    return {
        "changes": figure.changes,
        "changes_per_second": round(figure.rate, 2),
        f"ratio_to_{RAW_CHAIN}": ratio and round(ratio, 4),
        f"cpu_ratio_to_{RAW_CHAIN}": cpu_ratio and round(cpu_ratio, 4),
        "rounds": [round(rate, 2) for rate in figure.rates],
        "cpu_us": round(sum(figure.cpu_us.values()), 1),
        "cpu_us_per_change": {name: round(used, 1) for name, used in figure.cpu_us.items()},
    }


def _show(figures: Mapping[str, Figure], console: Console) -> None:
    """Print two tables of at most 80 columns."""
    rates = _table("Changes per second, and processor time of all processes per change")
    for column in ("changes/s", "lowest", "highest", f"x {RAW_CHAIN}", "CPU us", "x by CPU"):
        rates.add_column(column, justify="right", no_wrap=True)
    processes = [name for name in _PROCESSES if any(name in figure.cpu_us for figure in figures.values())]
    costs = _table("Processor time per change by process, in us")
    for name in processes:
        costs.add_column(name.replace("worker_children", "its pool").removesuffix("_parent"), justify="right")
    for name, figure in figures.items():
        ratio, cpu_ratio = (_digits(value, 2) for value in figure.ratios(figures.get(RAW_CHAIN)))
        cells = map(_digits, (figure.rate, min(figure.rates), max(figure.rates)))
        rates.add_row(name, *cells, ratio, _digits(sum(figure.cpu_us.values())), cpu_ratio)
        costs.add_row(name, *(_digits(figure.cpu_us.get(each)) for each in processes))
    console.print(rates, "", costs, "", sep="\n", highlight=False)


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    table.add_column("mode", no_wrap=True)
    return table


def _digits(value: float | None, behind_the_point: int = 0) -> str:
    return "-" if value is None else f"{value:,.{behind_the_point}f}"
