"""How a status looks on a terminal: a summary line, subscriptions, and the partitions that need attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_COLORS = {
    "leading": "green",
    "flowing": "green",
    "parked": "yellow",
    "waiting": "yellow",
    "paused": "yellow",
    "idle": "yellow",
    "new": "cyan",
    "halted": "red",
    "failed": "red",
    "history_lost": "red",
    "unknown": "red",
}
_NOTABLE_SHARE = 0.5
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


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
    yield from (_rejection(each) for each in status["rejected_by_broker"])
    if status["subscriptions"]:
        yield Padding(_subscriptions(status["subscriptions"]), (0, 0, 0, 2), expand=False)
        yield from (line for each in status["subscriptions"] for line in _history(each))
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
    who = f"listener on {listener['host']}, pid {listener['pid']}, since {_moment(listener['since'])}"
    if listener["handlers"] is None:
        return f"{who}, which does not say whose handlers it serves"
    return f"{who}, serving {_number(len(listener['handlers']), 'handler', 'handlers')} of app {listener['app'] or '?'}"


def _gap(gap: Mapping[str, Any]) -> Text:
    names = "".join(f" of {name}" for name in gap["subscriptions"])
    return Text(f"  history{names} was given up before {_moment(gap['until'])} ({gap['policy']})", style="red")


def _history(subscription: Mapping[str, Any]) -> Iterable[Text]:
    """What is lost, or about to be."""
    name, lost, share = subscription["name"], subscription["lost"], subscription["oplog_share"]
    if lost and lost["decided"]:
        yield Text(
            f"  {name} has lost its history; it goes on ({lost['decided']}) once a listener leads", style="yellow"
        )
    elif lost:
        yield Text(
            f"  {name} has lost its history before {_moment(lost['oldest'])} and stands still: decide with "
            f"`celery -A ... changes go-on {name} --from oldest` or `--from now`",
            style="red",
        )
    elif share is not None and share >= _NOTABLE_SHARE and subscription["state"] != "unregistered":
        yield Text(f"  {share:.0%} of the oplog's window lie behind {name}; at 100% its history is lost", style="red")


def _rejection(rejected: Mapping[str, Any]) -> Text:
    where = f"{rejected['partition']} waits since {_moment(rejected['since'])}"
    return Text(
        f"  the broker rejects {rejected['key']}, {rejected['bytes']} bytes: {where}: {rejected['error']}", "red"
    )


def _subscriptions(subscriptions: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("subscription", "state", "lag", "watermark", "dead letters")
    for each in subscriptions:
        table.add_row(
            Text(each["name"]),
            _state(each["state"]),
            duration(each["lag_seconds"]),
            _moment(each["watermark_at"]),
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
        yield f"waits for infrastructure since {_moment(waiting['since'])}: {waiting['cause']}"
    if retry:
        if retry["count"]:
            yield _number(retry["count"], "retry", "retries")
        if retry["crashes"]:
            yield _number(retry["crashes"], "crash", "crashes")
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


def _number(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _moment(iso: str | None) -> str:
    return "-" if iso is None else iso[:19].replace("T", " ") + " UTC"


def duration(seconds: float | None) -> str:
    """Seconds as people say them; a dash where nobody knows."""
    if seconds is None:
        return "-"
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"
