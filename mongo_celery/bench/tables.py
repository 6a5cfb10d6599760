"""The results for people, in 80 columns."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from mongo_celery.bench.aims import Aim, aims
from mongo_celery.bench.figures import REFERENCE, Figure
from mongo_celery.bench.latency import Latency
from mongo_celery.bench.memory import Memory
from mongo_celery.bench.remarks import load_remarks
from mongo_celery.bench.run import Results
from mongo_celery.bench.takeover import TakeOver

PROCESSES = {
    "mongod": "mongod",
    "worker_parent": "worker",
    "worker_children": "its pool",
    "listener": "listener",
    "redis": "Redis",
    "publisher": "publ.",
    "reader": "reader",
}
"""Names of processes in figures, and the heads of their columns."""

_BY = {"rate": " by rate", "cpu": " by CPU", "latency": ""}


def show(results: Results, console: Console) -> None:
    """Tables and sentences."""
    for part in _parts(results):
        console.print(part, highlight=False)


def _parts(results: Results) -> Iterator[RenderableType]:
    if results.figures:
        yield from (rates_table(results.figures), "", cpu_table(results.figures), "")
    if results.latency:
        yield from (latency_table(results.latency, results.latency_under_load), "")
    if results.memory is not None:
        yield Text(_memory(results.memory))
    if results.take_over is not None:
        yield from map(Text, _take_over(results.take_over))
    yield from (Text(_aim(each), "" if each.met else "yellow") for each in aims(results))
    yield from map(Text, _remarks(results))


def rates_table(figures: Mapping[str, Figure]) -> RenderableType:
    """Changes per second, and what one costs, beside `raw_chain`."""
    table = plain_table()
    for column in ("changes/s", "lowest", "highest", f"x {REFERENCE}", "CPU us", "x by CPU"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, figure in figures.items():
        rates = (f"{rate:,.0f}" for rate in (figure.rate, min(figure.rounds), max(figure.rounds)))
        table.add_row(
            name, *rates, ratio_text(figure.ratio), f"{figure.cpu_total_us:,.0f}", ratio_text(figure.cpu_ratio)
        )
    return titled("Changes per second, and processor time of all processes for one", table)


def cpu_table(figures: Mapping[str, Figure]) -> RenderableType:
    """Processor time for one change by process."""
    present = [name for name in PROCESSES if any(name in figure.cpu_us for figure in figures.values())]
    table = plain_table()
    for process in present:
        table.add_column(PROCESSES[process], justify="right", no_wrap=True)
    for name, figure in figures.items():
        table.add_row(name, *(f"{figure.cpu_us[each]:,.0f}" if each in figure.cpu_us else "" for each in present))
    return titled("Processor time for one change by process, in us", table)


def latency_table(idle: Mapping[str, Latency], loaded: Mapping[str, Latency]) -> RenderableType:
    """From a write to the start of its handler."""
    table = plain_table()
    columns = ["idle p50", "p99"]
    if loaded:
        columns += ["half load p50", "p99", "writes/s"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, latency in idle.items():
        cells = [f"{latency.p50:.1f}", f"{latency.p99:.1f}"]
        if name in loaded:
            each = loaded[name]
            cells += [f"{each.p50:.1f}", f"{each.p99:.1f}", f"{each.per_second:.0f}"]
        table.add_row(name, *cells)
    return titled("From a write to the start of its handler, in ms", table)


def plain_table() -> Table:
    """A table without lines, of modes."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("mode", no_wrap=True)
    return table


def titled(title: str, table: Table) -> RenderableType:
    """A table below its title, which may be wider."""
    return Group(Text(title, "bold"), table)


def ratio_text(value: float | None) -> str:
    """Three digits or so; a dash where there is none."""
    if value is None:
        return "-"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"  # noqa: PLR2004 - two digits are enough


def _memory(memory: Memory) -> str:
    steps = ", ".join(f"{step:.0f}" for step in memory.steps)
    return (
        f"listener's memory: {memory.start:.0f} MB at start; {steps} MB after each quarter of "
        f"{memory.backlog} changes that nobody handles; peak {memory.peak:.0f} MB"
    )


def _take_over(take_over: TakeOver) -> Iterator[str]:
    for signal, seconds in (("SIGTERM", take_over.sigterm), ("SIGKILL", take_over.sigkill)):
        yield (
            f"take-over after {signal} with lease_ttl={take_over.lease_ttl:g}: median "
            f"{statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s"
        )


def _aim(aim: Aim) -> str:
    found = ", ".join(f"{ratio_text(value)}{_BY[how]}" for how, value in aim.values.items())
    return f"{aim.name}: {found} (aim {aim.aim:g}: {'met' if aim.met else 'missed'})"


def _remarks(results: Results) -> Iterator[str]:
    yield from load_remarks(results.others, results.uncounted)
    if results.left_out:
        yield f"Left out, since the time was over: {', '.join(results.left_out)}."
    if results.rough:
        yield "This is rough: one short round. Without --quick the medians of five rounds are told."
    yield f"{results.seconds:.0f} s in all"
