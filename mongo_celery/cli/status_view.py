"""
How a status looks on a terminal: a summary line, handlers, the partitions that need attention, and the verdict.

The verdict is last, so that its commands stand above the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mongo_celery.bridge.operations.overview import CALM, needs_attention
from mongo_celery.cli.snapshot_view import progress_line, progress_style
from mongo_celery.cli.verdict_view import verdict_view
from mongo_celery.findings import NEAR, SERIOUS
from mongo_celery.quantities import duration, moment, number, size
from mongo_celery.visible import visible_in

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from mongo_celery.bridge.operations.verdict import BridgeVerdict

_COLORS = {
    "leading": "green",
    "flowing": "green",
    "not_led": "yellow",
    "retrying": "yellow",
    "waiting": "yellow",
    "paused": "yellow",
    "idle": "yellow",
    "new": "cyan",
    "halted": "red",
    "failed": "red",
    "history_lost": "red",
    "match_refused": "red",
    "stopped": "red",
    "unknown": "red",
}
_SPILLED_SHOWN = 10
_ROWS = 20
"""Handlers, and partitions, that are shown unless all are asked for."""
_INDENT = (0, 0, 0, 2)
_NAME, _BETWEEN = 24, 2
"""Characters of a handler's name that stand on one line, and those between two columns."""


def status_view(
    found: Iterable[tuple[Mapping[str, Any], BridgeVerdict]], *, everything: bool, folded: bool = False
) -> RenderableType:
    """
    All statuses, one below the other.

    Args:
        found: as `read_status` gives them, or `bridge`, `state` and `error` alone; each with the verdict.
        everything: show all handlers and partitions.
        folded: as of `verdict_view`.
    """
    shown = [(visible_in(status), verdict) for status, verdict in found]
    return Group(*(part for each in shown for part in _parts(*each, everything=everything, folded=folded)))


def _parts(
    status: Mapping[str, Any], verdict: BridgeVerdict, *, everything: bool, folded: bool
) -> Iterable[RenderableType]:
    yield _summary(status)
    if "subscriptions" in status:
        yield from _facts(status, everything=everything)
    yield verdict_view(verdict, folded=folded)


def _facts(status: Mapping[str, Any], *, everything: bool) -> Iterable[RenderableType]:
    if status["error"]:
        yield _line(str(status["error"]), "red")
    yield _line(_listener(status["listener"]))
    if status["unread_seconds"]:
        yield _line(f"nothing read for {duration(status['unread_seconds'])}", "red")
    if status["reading_waits"]:
        yield _line(f"reading waits: {status['reading_waits']}", "yellow")
    yield from (_gap(each["name"], gap) for each in status["subscriptions"] for gap in each["gaps"])
    yield from (_rejection("the broker rejects", each) for each in status["rejected_by_broker"])
    yield from (
        _line(
            f"MongoDB does not store changes of {each['partition']} since {moment(each['since'])}: {each['error']}",
            "red",
        )
        for each in status["not_stored"]
    )
    yield from _stored(status)
    yield from (_line(f"snapshot {progress_line(each)}", progress_style(each)) for each in status["snapshots"])
    yield from _handlers(status["subscriptions"], everything=everything)
    yield from _inline([each["name"] for each in status["subscriptions"] if each["commit"] == "inline"])
    yield from (_new_layout(each) for each in status["subscriptions"] if each["new_layout"])
    yield from _partitions(status["partitions"], everything=everything)


def _line(text: str, style: str = "", indent: int = 2) -> RenderableType:
    """What does not fit goes on below its beginning."""
    return Padding(Text(text, style), (0, 0, 0, indent), expand=False)


def _summary(status: Mapping[str, Any]) -> Text:
    text = Text.assemble((status["bridge"], "bold"), ": ", _state(status["state"]))
    if "subscriptions" not in status:
        return text
    facts = [
        f"lag {duration(status['lag_seconds'])}",
        f"{_count(status['outstanding'])} outstanding",
        f"{_count(status['buffered'])} buffered",
        number(status["dead_letters"], "dead letter", "dead letters"),
        f"oplog {duration(status['oplog_window_seconds'])}",
    ]
    if status["broker_down"]:
        facts.insert(0, "the broker does not answer, or takes nothing")
    return text.append(", " + ", ".join(facts))


def _listener(listener: Mapping[str, Any] | None) -> str:
    if listener is None:
        return "no listener"
    who = f"listener on {listener['host']}, pid {listener['pid']}, since {moment(listener['since'])}"
    return f"{who}, serving {number(len(listener['handlers']), 'handler', 'handlers')} of app {listener['app'] or '?'}"


def _gap(handler: str, gap: Mapping[str, Any]) -> RenderableType:
    return _line(f"history of {handler} was given up before {moment(gap['until'])} ({gap['policy']})", "red")


def _new_layout(subscription: Mapping[str, Any]) -> RenderableType:
    layout = subscription["new_layout"]
    partitions = number(layout["partitions"], "partition", "partitions")
    since = moment(layout["since"])
    return _line(f"{subscription['name']} changes to {partitions} since {since}: {layout['waits']}", "yellow")


def _rejection(what: str, rejected: Mapping[str, Any]) -> RenderableType:
    where = f"{rejected['partition']} waits since {moment(rejected['since'])}"
    return _line(f"{what} {rejected['key']}, {size(rejected['bytes'])}: {where}: {rejected['error']}", "red")


def _stored(status: Mapping[str, Any]) -> Iterable[RenderableType]:
    """What is stored beside the bound, and of which partitions."""
    spill = status["spill"]
    spilled = [each for each in status["partitions"] if each["spilled"]]
    if not spilled and not spill["bytes"] and not spill["waits"]:
        return
    yield _beside_the_bound(spill)
    if spill["waits"]:
        yield _line(f"no more is stored: {spill['waits']}", "red", 4)
    largest_first = sorted(spilled, key=lambda each: each["spilled"]["count"] or 0, reverse=True)
    for each in largest_first[:_SPILLED_SHOWN]:
        stored = each["spilled"]
        amount = f"{_changes(stored['count'])}, for {duration(stored['age_seconds'])}"
        text = f"{each['subscription']} {each['index']}: {amount}"
        yield _line(f"{text}: {_why_stored(each)}", indent=4)
    if len(spilled) > _SPILLED_SHOWN:
        more = number(len(spilled) - _SPILLED_SHOWN, "more partition", "more partitions")
        yield _line(f"and {more}", indent=4)


def _why_stored(partition: Mapping[str, Any]) -> str:
    """The reason is that of its beginning; what stood then may flow again, and work off what is stored."""
    reason, state = str(partition["spilled"]["reason"]), partition["state"]
    stood = reason in _COLORS and reason not in {state, *CALM}
    return f"{reason} then, {state} now" if stood else reason


def _beside_the_bound(spill: Mapping[str, Any]) -> RenderableType:
    if spill["share"] is None:
        return _line(f"stored: {_changes(spill['count'])}; no listener says how many bytes", "yellow")
    taken = f"{size(spill['bytes'])} of {size(spill['limit'])} ({spill['share']:.0%})"
    text = f"stored: {_changes(spill['count'])}, {taken}"
    if spill["share"] >= 1:
        text += "; the bound is reached, and what stands holds back all others once buffers are full"
    return _line(text, "red" if spill["share"] >= SERIOUS else "yellow" if spill["share"] >= NEAR else "")


def _handlers(subscriptions: Sequence[Mapping[str, Any]], *, everything: bool) -> Iterable[RenderableType]:
    """A row each; of very many those first that do not flow, then those that lag most."""
    shown = subscriptions
    if not everything and len(subscriptions) > _ROWS:
        worst_first = sorted(subscriptions, key=lambda each: (each["state"] in CALM, -(each["lag_seconds"] or 0)))
        shown = worst_first[:_ROWS]
    if shown:
        yield Padding(_HandlerTable(shown), _INDENT, expand=False)
    yield from _more(len(subscriptions) - len(shown), "handler", "handlers")


def _inline(names: Sequence[str]) -> Iterable[RenderableType]:
    """Those that commit by themselves; what commits by a task of its own, as is the default, needs no word."""
    if names:
        hidden = len(names) - _ROWS
        more = f" and {number(hidden, 'more handler', 'more handlers')}" if hidden > 0 else ""
        yield _line(f"commit inline: {', '.join(names[:_ROWS])}{more}")


class _HandlerTable:
    """A row for each handler; where a terminal is too narrow for a name, columns go, and not the name."""

    def __init__(self, subscriptions: Sequence[Mapping[str, Any]]) -> None:
        self._columns = {
            "subscription": [Text(each["name"]) for each in subscriptions],
            "state": [_state(each["state"]) for each in subscriptions],
            "lag": [Text(duration(each["lag_seconds"])) for each in subscriptions],
            "watermark": [Text(moment(each["watermark_at"])) for each in subscriptions],
            "dead letters": [Text(str(each["dead_letters"])) for each in subscriptions],
        }

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        """Rich's protocol."""
        columns = dict(self._columns)
        for droppable in ("watermark", "dead letters", "lag"):
            if _width(columns) > options.max_width:
                del columns[droppable]
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in columns:
            table.add_column(column, no_wrap=column != "subscription", overflow="fold")
        for row in zip(*columns.values(), strict=True):
            table.add_row(*row)
        yield table


def _width(columns: Mapping[str, Sequence[Text]]) -> int:
    """What a table needs at least; a long name may go on in a second line."""
    widest = {name: max(len(name), *map(len, cells)) for name, cells in columns.items()}
    widest["subscription"] = min(widest["subscription"], _NAME)
    return sum(widest.values()) + _BETWEEN * (len(widest) - 1)


def _partitions(partitions: Sequence[Mapping[str, Any]], *, everything: bool) -> Iterable[RenderableType]:
    """A line each; those of a handler that are paused share one."""
    if everything:
        yield _line("Partitions:")
        for each in partitions:
            place = f" on {each['queue']}, committed {each['committed']}"
            yield _partition(str(each["index"]), each, place)
        return
    concerned = [each for each in partitions if needs_attention(each)]
    lines: dict[tuple[str, int | None], list[Mapping[str, Any]]] = {}
    for each in concerned:
        alone = None if each["state"] == "paused" else each["index"]
        lines.setdefault((each["subscription"], alone), []).append(each)
    if lines:
        yield _line("Partitions that need attention:")
    for same in list(lines.values())[:_ROWS]:
        yield _partition(_ranges([each["index"] for each in same]), same[0])
    hidden = list(lines.values())[_ROWS:]
    yield from _more(sum(map(len, hidden)), "partition", "partitions")


def _partition(indexes: str, partition: Mapping[str, Any], place: str = "") -> RenderableType:
    text = Text.assemble(f"{partition['subscription']} {indexes} ", _state(partition["state"]), place)
    details = "; ".join(_details(partition))
    return Padding(text.append(f": {details}" if details else ""), (0, 0, 0, 4), expand=False)


def _ranges(indexes: Sequence[int]) -> str:
    """Numbers in order, neighbours as `0-3`."""
    spans: list[list[int]] = []
    for index in indexes:
        if spans and index == spans[-1][1] + 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _more(count: int, one: str, many: str) -> Iterable[RenderableType]:
    if count:
        yield _line(f"and {number(count, f'more {one}', f'more {many}')}; --all shows them", indent=4)


def _details(partition: Mapping[str, Any]) -> Iterable[str]:
    head, retry, claim = partition["head"], partition["retry"], partition["claim"]
    if head:
        yield f"stands at {head['key']}"
    if partition["halted_at"]:
        yield f"halted at {moment(partition['halted_at'])}"
    if claim:
        yield _claimed(claim)
    waiting = partition.get("waiting")
    if waiting:
        yield f"waits since {moment(waiting['since'])}: {waiting['cause']}"
    if retry:
        if retry["count"]:
            yield number(retry["count"], "retry", "retries")
        if retry["crashes"]:
            yield number(retry["crashes"], "crash", "crashes")
        if retry["due_seconds"]:
            yield f"due in {duration(retry['due_seconds'])}"
        if retry["error"]:
            yield str(retry["error"])


def _claimed(claim: Mapping[str, Any]) -> str:
    first, last = claim["first"], claim["last"]
    which = f"change {first} is" if first == last else f"changes {first} to {last} are"
    now = "running" if claim["live"] else "no longer running, and due again"
    return f"{which} {now} ({claim['process']})"


def _state(state: str) -> Text:
    return Text(state.replace("_", " "), style=_COLORS.get(state, ""))


def _changes(count: int | None) -> str:
    return "? changes" if count is None else number(count, "change", "changes")


def _count(number: int | None) -> str:
    return "?" if number is None else str(number)
