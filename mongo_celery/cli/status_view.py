"""How a status looks on a terminal: a summary line, subscriptions, and the partitions that need attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mongo_celery.bridge.operations.findings import NEAR, SERIOUS
from mongo_celery.cli.quantities import duration, moment, number, size

_COLORS = {
    "leading": "green",
    "flowing": "green",
    "parked": "yellow",
    "waiting": "yellow",
    "moving": "yellow",
    "paused": "yellow",
    "idle": "yellow",
    "new": "cyan",
    "halted": "red",
    "failed": "red",
    "history_lost": "red",
    "unknown": "red",
}
_NOTABLE_SHARE = 0.5
_SPILLED_SHOWN = 10


def status_view(statuses: Iterable[Mapping[str, Any]], *, everything: bool) -> RenderableType:
    """
    All statuses, one below the other.

    Args:
        statuses: as `read_status` gives them, or `bridge`, `state` and `error` alone.
        everything: show all partitions.
    """
    return Group(*(part for status in statuses for part in _parts(status, everything=everything)))


def _parts(status: Mapping[str, Any], *, everything: bool) -> Iterable[RenderableType]:
    yield _summary(status)
    if status.get("error"):
        yield Text(f"  {status['error']}", style="red")
    if "subscriptions" not in status:
        return
    yield Text(f"  {_listener(status['listener'])}")
    if status["unread_seconds"]:
        yield Text(f"  nothing read for {duration(status['unread_seconds'])}", style="red")
    if status["reading_waits"]:
        yield Text(f"  reading waits: {status['reading_waits']}", style="yellow")
    yield from (_gap(gap) for gap in status["gaps"])
    yield from (_rejection("the broker rejects", each) for each in status["rejected_by_broker"])
    yield from (_rejection("MongoDB does not store", each) for each in status["not_stored"])
    yield from _stored(status)
    if status["subscriptions"]:
        yield Padding(_subscriptions(status["subscriptions"]), (0, 0, 0, 2), expand=False)
        yield from (line for each in status["subscriptions"] for line in _history(each))
        yield from (_new_layout(each) for each in status["subscriptions"] if each["new_layout"])
    shown = [each for each in status["partitions"] if everything or needs_attention(each)]
    if shown:
        yield Text("  Partitions:" if everything else "  Partitions that need attention:")
        yield Padding(_partitions(shown), (0, 0, 0, 2), expand=False)


def needs_attention(partition: Mapping[str, Any]) -> bool:
    """Whether a partition stands still, or its change has killed a worker or lost its claim."""
    retry, claim = partition["retry"] or {}, partition["claim"] or {"live": True}
    return partition["state"] != "flowing" or bool(retry.get("crashes")) or not claim["live"]


def _summary(status: Mapping[str, Any]) -> Text:
    text = Text.assemble((status["bridge"], "bold"), ": ", _state(status["state"]))
    if "subscriptions" not in status:
        return text
    facts = [
        f"lag {duration(status['lag_seconds'])}",
        f"{_count(status['outstanding'])} outstanding",
        f"{_count(status['buffered'])} buffered",
        f"{status['dead_letters']} dead letters",
        f"oplog {duration(status['oplog_window_seconds'])}",
    ]
    if status["broker_down"]:
        facts.insert(0, "the broker does not answer, or takes nothing")
    return text.append(", " + ", ".join(facts))


def _listener(listener: Mapping[str, Any] | None) -> str:
    if listener is None:
        return "no listener: start one with `celery -A ... listener`"
    who = f"listener on {listener['host']}, pid {listener['pid']}, since {moment(listener['since'])}"
    if listener["handlers"] is None:
        return f"{who}, which does not say whose handlers it serves"
    return f"{who}, serving {number(len(listener['handlers']), 'handler', 'handlers')} of app {listener['app'] or '?'}"


def _gap(gap: Mapping[str, Any]) -> Text:
    names = "".join(f" of {name}" for name in gap["subscriptions"])
    return Text(f"  history{names} was given up before {moment(gap['until'])} ({gap['policy']})", style="red")


def _new_layout(subscription: Mapping[str, Any]) -> Text:
    layout = subscription["new_layout"]
    partitions = number(layout["partitions"], "partition", "partitions")
    since = moment(layout["since"])
    return Text(f"  {subscription['name']} changes to {partitions} since {since}: {layout['waits']}", style="yellow")


def _history(subscription: Mapping[str, Any]) -> Iterable[Text]:
    """What is lost, or about to be."""
    name, lost, share = subscription["name"], subscription["lost"], subscription["oplog_share"]
    if lost and lost["decided"]:
        yield Text(
            f"  {name} has lost its history; it goes on ({lost['decided']}) once a listener leads", style="yellow"
        )
    elif lost:
        yield Text(
            f"  {name} has lost its history before {moment(lost['oldest'])} and stands still: decide with "
            f"`celery -A ... changes go-on {name} --from oldest` or `--from now`",
            style="red",
        )
    elif share is not None and share >= _NOTABLE_SHARE and subscription["state"] != "unregistered":
        yield Text(
            f"  {share:.0%} of the oplog's window lie behind {name}; at 100% what it has not read is lost", style="red"
        )


def _rejection(what: str, rejected: Mapping[str, Any]) -> Text:
    where = f"{rejected['partition']} waits since {moment(rejected['since'])}"
    return Text(f"  {what} {rejected['key']}, {rejected['bytes']} bytes: {where}: {rejected['error']}", "red")


def _stored(status: Mapping[str, Any]) -> Iterable[Text]:
    """What is stored beside the bound, and of which partitions."""
    spill = status["spill"]
    spilled = [each for each in status["partitions"] if each["spilled"]]
    if not spilled and not spill["bytes"] and not spill["waits"]:
        return
    yield _beside_the_bound(spill)
    if spill["waits"]:
        yield Text(f"    no more is stored: {spill['waits']}", "red")
    largest_first = sorted(spilled, key=lambda each: each["spilled"]["bytes"] or 0, reverse=True)
    for each in largest_first[:_SPILLED_SHOWN]:
        stored = each["spilled"]
        amount = f"{_count(stored['count'])} changes, {size(stored['bytes'])}"
        text = f"    {each['subscription']} {each['index']}: {amount}, for {duration(stored['age_seconds'])}"
        yield Text(f"{text}: {stored['reason']}")
        if stored["missing"]:
            yield Text(
                "      what should be stored of it is missing; `celery -A ... changes check` says what to do", "red"
            )
    if len(spilled) > _SPILLED_SHOWN:
        yield Text(f"    and {len(spilled) - _SPILLED_SHOWN} more partitions")


def _beside_the_bound(spill: Mapping[str, Any]) -> Text:
    if spill["share"] is None:
        uncounted = number(spill["uncounted"], "partition", "partitions")
        return Text(f"  stored: {uncounted} could not be counted in time, and no listener says how much", "yellow")
    text = (
        f"  stored: {spill['count']} changes, {size(spill['bytes'])} of {size(spill['limit'])} ({spill['share']:.0%})"
    )
    if spill["lasts_seconds"] is not None:
        text += f", {size(spill['bytes_per_second'])}/s more: room for {duration(spill['lasts_seconds'])}"
    if spill["share"] >= 1:
        text += "; the bound is reached, and what stands holds back all others once buffers are full"
    return Text(text, "red" if spill["share"] >= SERIOUS else "yellow" if spill["share"] >= NEAR else "")


def _subscriptions(subscriptions: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("subscription", "state", "lag", "watermark", "dead letters")
    for each in subscriptions:
        table.add_row(
            Text(each["name"]),
            _state(each["state"]),
            duration(each["lag_seconds"]),
            moment(each["watermark_at"]),
            str(each["dead_letters"]),
        )
    return table


def _partitions(partitions: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("subscription", "partition", "queue", "state", "committed", "details")
    for each in partitions:
        table.add_row(
            Text(each["subscription"]),
            str(each["index"]),
            Text(each["queue"]),
            _state(each["state"]),
            str(each["committed"]),
            Text("; ".join(_details(each))),
        )
    return table


def _details(partition: Mapping[str, Any]) -> Iterable[str]:
    head, retry, claim = partition["head"], partition["retry"], partition["claim"]
    if head:
        yield f"stands at {head['key']}"
    if claim:
        now = "running" if claim["live"] else "no longer running, and due again"
        yield f"changes {claim['first']} to {claim['last']} are {now}"
    waiting = partition.get("waiting")
    if waiting:
        yield f"waits for infrastructure since {moment(waiting['since'])}: {waiting['cause']}"
    if retry:
        if retry["count"]:
            yield number(retry["count"], "retry", "retries")
        if retry["crashes"]:
            yield number(retry["crashes"], "crash", "crashes")
        if retry["due_seconds"]:
            yield f"due in {duration(retry['due_seconds'])}"
        if retry["error"]:
            yield str(retry["error"])


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, no_wrap=column != "details", overflow="fold")
    return table


def _state(state: str) -> Text:
    return Text(state, style=_COLORS.get(state, ""))


def _count(number: int | None) -> str:
    return "?" if number is None else str(number)
