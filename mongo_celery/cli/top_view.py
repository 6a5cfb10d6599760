"""
How `top` looks: the verdict and its commands first, then figures, handlers, what stands, and snapshots.

It is drawn for the width that there is, 80 columns and less included: what is long is cut where it is one of many (an
error, a name) and folded where it is to be read or typed (a sentence, a command).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mongo_celery.bridge.operations.overview import CELLS
from mongo_celery.cli.verdict_view import COLORS
from mongo_celery.quantities import duration, moment, number, size
from mongo_celery.visible import visible, visible_in

if TYPE_CHECKING:
    from mongo_celery.bridge.operations.rates import Rates
    from mongo_celery.bridge.operations.verdict import BridgeVerdict

_STATES = {
    "flowing": "green",
    "halted": "red",
    "history_lost": "red",
    "match_refused": "red",
    "stopped": "red",
    "new": "cyan",
    "unregistered": "dim",
}
_CELL_MARKS: Mapping[str, tuple[str, str]] = {
    CELLS["flowing"]: ("·", "green"),
    CELLS["running"]: ("▪", "green"),
    CELLS["halted"]: ("H", "bold red"),
    CELLS["paused"]: ("P", "yellow"),
    CELLS["waiting"]: ("W", "yellow"),
    CELLS["retrying"]: ("K", "yellow"),
    CELLS["not_led"]: ("·", "dim"),
}
_FIRST_DIGITS = 10


@dataclass(frozen=True, slots=True)
class Glance:
    """
    One bridge at one moment.

    Attributes:
        shown: its overview; None where none was ever read.
    """

    verdict: BridgeVerdict
    shown: Mapping[str, Any] | None
    rates: Rates


def top_view(glances: Iterable[Glance]) -> RenderableType:
    """All bridges, one below the other."""
    return Group(*(part for glance in glances for part in _parts(glance)))


def _parts(given: Glance) -> Iterator[RenderableType]:
    glance = replace(given, shown=visible_in(given.shown))
    yield _head(glance)
    yield from _reasons(glance.verdict)
    if glance.shown is None:
        return
    yield Text("")
    yield _figures(glance.shown, glance.rates)
    yield Text("")
    yield _handlers(glance.shown, glance.rates)
    if glance.shown["snapshots"]:
        yield Text("")
        yield _snapshots(glance.shown["snapshots"])
    if glance.shown["attention"]:
        yield Text("")
        yield _attention(glance.shown)
    yield Text("")


def _head(glance: Glance) -> RenderableType:
    verdict, shown = glance.verdict, glance.shown
    line = Table.grid(expand=True, padding=0)
    line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    line.add_column(no_wrap=True, justify="right")
    name = Text.assemble((verdict.bridge, "bold"), " is ", (verdict.state, f"bold {COLORS[verdict.state]}"))
    line.add_row(name, Text(moment(shown["at"]) if shown else "q ends", "dim"))
    return Group(line, Text(_leader(shown), "dim", no_wrap=True, overflow="ellipsis")) if shown else line


def _leader(shown: Mapping[str, Any]) -> str:
    listener = shown["listener"]
    if listener is None:
        since = shown["unled_seconds"]
        return "nobody leads" if since is None else f"nobody leads for {duration(since)}"
    return f"led by {listener['host']}, pid {listener['pid']}, since {moment(listener['since'])}; q ends"


def _reasons(verdict: BridgeVerdict) -> Iterator[RenderableType]:
    if verdict.note is not None:
        yield Padding(Text(verdict.note, "dim", overflow="fold"), (0, 0, 0, 2), expand=False)
    for reason in verdict.reasons:
        text = Text.assemble((reason.code, COLORS[reason.severity]), f": {visible(reason.sentence)}")
        yield Padding(text, (0, 0, 0, 2), expand=False)
        if reason.command is not None:
            yield Padding(Text(visible(reason.command), "bold", overflow="fold"), (0, 0, 0, 4), expand=False)


def _figures(shown: Mapping[str, Any], rates: Rates) -> RenderableType:
    share, spill = shown["oplog_share"], shown["spill"]
    figures = [
        ("lag", duration(shown["lag_seconds"])),
        ("handled", f"{_rate(rates.total)}/s"),
        ("out", _count(shown["outstanding"])),
        ("buffered", _count(shown["buffered"])),
        ("stored", f"{_count(spill['count'])} ({size(spill['bytes'])} of {size(spill['limit'])})"),
        ("dead letters", str(shown["dead_letters"])),
        ("oplog", f"{duration(shown['oplog_window_seconds'])}, {1 - share:.0%} left"),
    ]
    line = Columns(
        [Text.assemble((name, "dim"), " ", (value, "bold"), no_wrap=True) for name, value in figures], (0, 3)
    )
    return Group(
        line, *([Text(f"reading waits: {shown['reading_waits']}", "yellow")] if shown["reading_waits"] else [])
    )


def _handlers(shown: Mapping[str, Any], rates: Rates) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    table.add_column("handler", no_wrap=True, overflow="ellipsis", ratio=3, min_width=10)
    table.add_column("state", no_wrap=True)
    table.add_column("per s", no_wrap=True, justify="right")
    table.add_column("lag", no_wrap=True, justify="right")
    table.add_column("partitions", no_wrap=True, overflow="ellipsis", ratio=4, min_width=10)
    table.add_column("dead", no_wrap=True, justify="right")
    for each in shown["handlers"]:
        table.add_row(
            Text(each["name"]),
            Text(each["state"].replace("_", " "), _STATES.get(each["state"], "yellow")),
            _rate(rates.of(each["name"])),
            duration(each["lag_seconds"]),
            _cells(each),
            str(each["dead_letters"]),
        )
    return table


def _cells(handler: Mapping[str, Any]) -> Text:
    """A mark for each partition; what stands first, since the last ones are cut where there is no room."""
    calm = {CELLS["flowing"], CELLS["running"], CELLS["not_led"]}
    text = Text()
    for one in sorted(handler["cells"], key=lambda each: each in calm):
        text.append(*_CELL_MARKS[one])
    return text


def _snapshots(snapshots: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    table.add_column("snapshot", no_wrap=True, overflow="ellipsis", ratio=3)
    table.add_column("", ratio=2, min_width=10)
    table.add_column("done", no_wrap=True, justify="right")
    table.add_column("per s", no_wrap=True, justify="right")
    table.add_column("left", no_wrap=True, justify="right")
    for each in snapshots:
        estimated, done = each.get("estimated"), each.get("done") or 0
        share = min(done / estimated, 1.0) if estimated else 0.0
        table.add_row(
            Text(f"{each.get('handler')} {each.get('source') or ''} {each.get('state') or ''}"),
            ProgressBar(total=1.0, completed=share),
            f"{done} of {_count(estimated)}",
            _rate(each.get("rate")),
            duration(each.get("remaining_seconds")),
        )
    said = [each for each in snapshots if each.get("sentence")]
    lines = [f"{each.get('handler')} {each.get('source') or ''}: {each['sentence']}" for each in said]
    return Group(table, *(Text(line, "yellow", no_wrap=True, overflow="ellipsis") for line in lines))


def _attention(shown: Mapping[str, Any]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    table.add_column("stands", no_wrap=True, overflow="ellipsis", ratio=2, min_width=12)
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True, overflow="ellipsis", ratio=5)
    for each in shown["attention"]:
        where = Text(f"{each['subscription']} {each['index']}")
        table.add_row(where, Text(each["state"], _STATES.get(each["state"], "yellow")), Text(_why(each)))
    if shown["attention_more"]:
        table.add_row(Text(f"and {number(shown['attention_more'], 'more', 'more')}", "dim"))
    return table


def _why(partition: Mapping[str, Any]) -> str:
    retries = [number(partition["retries"], "retry", "retries")] if partition["retries"] else []
    due = [f"due in {duration(partition['due_seconds'])}"] if partition["due_seconds"] else []
    said = [each for each in (partition["key"], partition["error"]) if each]
    return "; ".join([*retries, *due, *said])


def _rate(rate: float | None) -> str:
    if rate is None:
        return "-"
    return f"{rate:.1f}" if rate < _FIRST_DIGITS else f"{rate:.0f}"


def _count(count: int | None) -> str:
    return "?" if count is None else str(count)
