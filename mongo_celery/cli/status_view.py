"""A snapshot of a bridge on a terminal: verdict, figures, handlers, then each problem with its command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mongo_celery.bridge.operations.bridge_snapshot import LEVELS, BridgeSnapshot, HandlerStatus, PartitionStatus
from mongo_celery.cli.findings_view import headline, problems
from mongo_celery.findings import NEAR, SERIOUS
from mongo_celery.quantities import duration, moment, number, size
from mongo_celery.visible import visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_COLORS: Mapping[str | None, str] = {"ok": "green", "warn": "yellow", "bad": "red"}
_CALM = ("flowing", "not_led", "new")
_ROWS = 20
"""Largest number of handlers to show, unless all are requested."""
_GROUPS = 5
_NAME, _BETWEEN = 24, 2
"""Characters of a handler's name on one line, and between two columns."""
_DROPPABLE = ("dead letters", "stored", "changes/s", "lag")
"""Columns that a narrow terminal omits, in this order."""


def status_view(snapshots: Sequence[BridgeSnapshot], *, everything: bool, folded: bool = False) -> RenderableType:
    """
    Show snapshots, one after the other.

    Args:
        everything: True to show all handlers, and all partitions.
        folded: as in `findings_view`.
    """
    return Group(*(part for each in snapshots for part in _parts(each, everything=everything, folded=folded)))


def _parts(seen: BridgeSnapshot, *, everything: bool, folded: bool) -> Iterator[RenderableType]:
    yield headline(seen.bridge, seen.findings)
    if seen.is_readable:
        yield from _figures(seen)
        yield from _handlers(seen.handlers, everything=everything)
        if everything:
            yield _line("Partitions:")
            yield from (_partition(handler, each) for handler in seen.handlers for each in handler.partitions)
        yield from _dead_letters(seen)
    yield from problems(seen.findings, folded=folded)
    if seen.note is not None:
        yield _line(seen.note, "dim")


def _line(text: str, style: str = "", indent: int = 2) -> RenderableType:
    return Padding(Text(visible(text), style), (0, 0, 0, indent), expand=False)


def _figures(seen: BridgeSnapshot) -> Iterator[RenderableType]:
    leader = seen.leader
    if leader is not None:
        served = number(len(leader.handlers), "handler", "handlers")
        text = f"leader: {leader.host}, pid {leader.pid}, for {ago(leader.since, seen.at)}, with {served}"
        yield _line(f"{text} of app {leader.app or '?'}")
    if seen.standbys:
        yield _line(f"standby: {', '.join(f'{each.host}, pid {each.pid}' for each in seen.standbys)}")
    if seen.workers is not None:
        slots = "" if seen.workers.slots is None else f", with {number(seen.workers.slots, 'slot', 'slots')}"
        yield _line(f"workers: {seen.workers.serving} of {seen.workers.answered} serve this bridge{slots}")
    facts = [
        f"lag {duration(seen.lag_seconds)}",
        *([] if seen.per_second is None else [f"{seen.per_second:.1f} changes/s"]),
        f"{_count(seen.in_flight)} in flight",
        f"{_count(seen.buffered)} buffered",
        number(seen.dead_letters, "dead letter", "dead letters"),
        f"oplog {duration(seen.oplog_seconds)}",
    ]
    yield _line(", ".join(facts))
    backlog = seen.backlog
    if backlog is not None and (
        backlog.count != 0 or (backlog.share or 0) >= NEAR
    ):  # else removed, and not yet measured
        count = "? changes" if backlog.count is None else number(backlog.count, "change", "changes")
        taken = "size unknown without a listener"
        if backlog.share is not None:
            taken = f"{size(backlog.bytes)} of {size(backlog.limit)} ({backlog.share:.0%})"
        share = backlog.share or 0
        yield _line(f"stored: {count}, {taken}", "red" if share >= SERIOUS else "yellow" if share >= NEAR else "")
    for each in seen.current_snapshots:
        yield _line(f"snapshot: {progress_line(asdict(each))}", _color(each.state))
    for handler in seen.handlers:
        for gap in handler.gaps:
            yield _line(f"{handler.name} did not receive the changes before {moment(gap.until)} ({gap.policy})", "red")
        if (new := handler.repartitioning) is not None:
            text = f"{handler.name} changes to {number(new.partitions, 'partition', 'partitions')} for"
            yield _line(f"{text} {ago(new.since, seen.at)}: {new.waits}", "yellow")


def _handlers(handlers: Sequence[HandlerStatus], *, everything: bool) -> Iterator[RenderableType]:
    """Return a row for each handler. If there are many, put blocked ones first, then those with the largest lag."""
    shown = handlers
    if not everything and len(handlers) > _ROWS:
        shown = sorted(handlers, key=lambda each: (each.state in _CALM, -(each.lag_seconds or 0)))[:_ROWS]
    if shown:
        yield Padding(_HandlerTable(shown), (0, 0, 0, 2), expand=False)
    if len(handlers) > len(shown):
        more = number(len(handlers) - len(shown), "more handler", "more handlers")
        yield _line(f"and {more}. To see them, use --all", indent=4)
    for each in shown:
        if each.delayed:
            waits = number(each.delayed, "partition waits", "partitions wait")
            yield _line(f"{each.name}: {waits} for its delay, until {moment(each.delayed_until)}")
    if inline := [each.name for each in handlers if each.commit == "inline"]:
        more = f" and {len(inline) - _ROWS} more" if len(inline) > _ROWS else ""
        yield _line(f"commit inline: {', '.join(inline[:_ROWS])}{more}")


class _HandlerTable:
    """A row for each handler. On a narrow terminal it omits columns, but never truncates names."""

    def __init__(self, handlers: Sequence[HandlerStatus]) -> None:
        self._columns = {
            "handler": [Text(visible(each.name)) for each in handlers],
            "state": [_show_state(each) for each in handlers],
            "lag": [Text(duration(each.lag_seconds)) for each in handlers],
            "changes/s": [Text("-" if each.per_second is None else f"{each.per_second:.1f}") for each in handlers],
            "stored": [Text(_count(each.stored)) for each in handlers],
            "dead letters": [Text(str(each.dead_letters)) for each in handlers],
        }

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the table for rich."""
        columns = dict(self._columns)
        for droppable in _DROPPABLE:
            if _width(columns) > options.max_width:
                del columns[droppable]
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in columns:
            table.add_column(column, no_wrap=column != "handler", overflow="fold")
        for row in zip(*columns.values(), strict=True):
            table.add_row(*row)
        yield table


def _width(columns: Mapping[str, Sequence[Text]]) -> int:
    widest = {name: max(len(name), *map(len, cells)) for name, cells in columns.items()}
    widest["handler"] = min(widest["handler"], _NAME)
    return sum(widest.values()) + _BETWEEN * (len(widest) - 1)


def _show_state(handler: HandlerStatus) -> Text:
    blocked = sum(each.is_blocked for each in handler.partitions)
    of = f" ({blocked} of {len(handler.partitions)})" if blocked else ""
    waiting = f", {handler.limited} limited" if handler.limited else ""
    return Text(f"{handler.state.replace('_', ' ')}{of}{waiting}", style=_color(handler.state))


def _partition(handler: HandlerStatus, partition: PartitionStatus) -> RenderableType:
    facts = [f"on {partition.queue}", f"committed {partition.committed}"]
    if partition.claim is not None:
        numbers = f"{partition.claim.first}-{partition.claim.last}"
        ran = "running" if partition.claim.live else "no longer running"
        facts.append(f"{numbers} {ran} for {duration(partition.claim.seconds)} ({partition.claim.process})")
    if partition.is_blocked and partition.key:
        facts.append(f"at {partition.key}")
    if partition.error:
        facts.append(partition.error)
    if partition.due_seconds:
        facts.append(f"due in {duration(partition.due_seconds)}")
    if partition.stored is not None:
        facts.append(f"{_count(partition.stored.count)} stored ({partition.stored.reason})")
    state = partition.state.replace("_", " ")
    return _line(f"{handler.name}/{partition.partition} {state}: {', '.join(facts)}", _color(partition.state), 4)


def _dead_letters(seen: BridgeSnapshot) -> Iterator[RenderableType]:
    for group in seen.dead_letter_groups[:_GROUPS]:
        count = number(group.count, "dead letter", "dead letters")
        yield _line(f"{count} of {group.handler}, the newest {ago(group.newest_at, seen.at)} ago: {group.error}")
    more = len(seen.dead_letter_groups) - _GROUPS
    if more > 0:
        yield _line(f"and {number(more, 'more error', 'more errors')}", indent=4)


def ago(since: datetime | None, at: datetime | None) -> str:
    """Return the time between two moments in words. A dash if one is unknown."""
    return duration(None if since is None or at is None else max((at - since).total_seconds(), 0.0))


def _color(state: str) -> str:
    return _COLORS.get(LEVELS.get(state), "")


def _count(count: int | None) -> str:
    return "?" if count is None else str(count)


def progress_line(each: Mapping[str, Any]) -> str:
    """Return `shop.orders for summarise: running, 5000 of 20000 read (25%), 800/s, 19 s left`."""
    amount = f"{each['done']} read"
    if each["estimated"] and each["state"] != "done":
        share = min(each["done"] / each["estimated"], 1.0)
        amount = f"{each['done']} of {each['estimated']} read ({share:.0%})"
    facts = [each["state"], amount]
    if each["state"] == "running" and each["per_second"]:
        facts.append(f"{each['per_second']:.0f}/s")
    if each["remaining_seconds"] is not None:
        facts.append(f"{duration(each['remaining_seconds'])} left")
    said = f": {each['reason']}" if each["reason"] else ""
    return f"{each['source']} for {each['handler']}: {', '.join(facts)}{said}"
