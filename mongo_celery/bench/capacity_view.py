"""What a machine carries, for people in 80 columns, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from mongo_celery.bench.capacity import WORKER_PROCESSES, Capacity
from mongo_celery.bench.limits import BROKER, CORES, LISTENER, MONGOD, PARTITIONS
from mongo_celery.bench.remarks import load_remarks
from mongo_celery.bench.report import machine
from mongo_celery.bench.tables import plain_table, titled
from mongo_celery.quantities import size

_PARTS = (PARTITIONS, LISTENER, BROKER, MONGOD, CORES)


def show_capacity(capacity: Capacity, console: Console) -> None:
    """Tables and sentences."""
    for part in _renderables(capacity):
        console.print(part, highlight=False)


def capacity_as_json(capacity: Capacity) -> dict[str, Any]:
    """One object."""
    work = capacity.workload.work
    return {
        "seconds": round(capacity.seconds, 1),
        "machine": machine(),
        "payload_bytes": capacity.workload.document_bytes,
        "handler_seconds": work.seconds,
        "handler_cpu_seconds": work.cpu_seconds,
        "worker_processes": WORKER_PROCESSES,
        "rough": capacity.rough,
        "others_share": None if capacity.others is None else round(capacity.others, 3),
        "cpu_without": list(capacity.uncounted),
        "capacity": {
            name: {
                "workers": [
                    {
                        "workers": each.workers,
                        "changes_per_second": round(each.rate, 2),
                        "measured": each.measured,
                        "limit": each.limit,
                        "apart_changes_per_second": round(each.apart, 2),
                        "apart_limit": each.apart_limit,
                    }
                    for each in found.carried
                ],
                "limits": {part: round(rate, 2) for part, rate in found.limits.items()},
                "cpu_us_per_change": {process: round(used, 1) for process, used in found.cpu_us.items()},
            }
            for name, found in capacity.modes.items()
        },
    }


def _renderables(capacity: Capacity) -> Iterator[RenderableType]:
    work = capacity.workload.work
    took = f"{work.seconds * 1000:g} ms" + (f" ({work.cpu_seconds * 1000:g} of CPU)" if work.cpu_seconds else "")
    yield Text(f"Documents of {size(capacity.workload.document_bytes)}, a handler of {took}", "bold")
    yield from ("", _carried(capacity), "", _limits(capacity), "")
    yield Text(
        f"A worker has {WORKER_PROCESSES} processes. Here: all processes on this machine. Apart: each worker, mongod, "
        "the broker and the listener on a machine like this one. What is computed takes the limits above and as "
        "many workers times one worker's rate, and the lowest of them."
    )
    yield from map(Text, load_remarks(capacity.others, capacity.uncounted))
    if capacity.rough:
        yield Text("This is rough: handlers were counted for a moment only. Leave out --quick for more.")
    yield Text(f"{capacity.seconds:.0f} s in all")


def _carried(capacity: Capacity) -> RenderableType:
    table = plain_table()
    for column, justify in (("workers", "right"), ("here", "right"), ("", "left"), ("limit", "left")):
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("apart", justify="right", no_wrap=True)
    table.add_column("limit", no_wrap=True)
    for name, found in capacity.modes.items():
        for number, each in enumerate(found.carried):
            table.add_row(
                name if number == 0 else "",
                f"{each.workers}",
                _rate(each.rate),
                "measured" if each.measured else "computed",
                _words(each.limit),
                _rate(each.apart),
                _words(each.apart_limit),
            )
    return titled("Changes per second by the number of workers", table)


def _limits(capacity: Capacity) -> RenderableType:
    table = plain_table()
    for part in _PARTS:
        table.add_column(_words(part), justify="right", no_wrap=True)
    for name, found in capacity.modes.items():
        table.add_row(name, *(_rate(found.limits[part]) if part in found.limits else "?" for part in _PARTS))
    return titled("Changes per second at which each part is full, computed", table)


def _words(part: str) -> str:
    return part.replace("_", " ")


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"  # noqa: PLR2004 - two digits are enough
