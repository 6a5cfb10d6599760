"""
The page: page.html, filled in with snapshots of bridges. It is complete without its script.

In page.html `{name.field:filter}` is a value, escaped. `<for x in y>` repeats, `<if y>` leaves out. Style and script stay
as they are.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from html import escape
from importlib.resources import files
from string import Formatter
from typing import Any

from mongo_celery.bridge.operations.bridge_snapshot import BridgeSnapshot, HandlerView, PartitionView
from mongo_celery.quantities import duration, number, size
from mongo_celery.visible import visible

_FILE = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
_STYLE, _SCRIPT = (
    b64encode(sha256(re.split(f"</?{kind}>", _FILE)[1].encode()).digest()).decode() for kind in ("style", "script")
)
POLICY = (
    f"default-src 'none'; style-src 'sha256-{_STYLE}'; script-src 'sha256-{_SCRIPT}'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""A browser obeys only the style and the script of page.html."""

_TAG = re.compile(r"(<(?:for|if) [^>]+>|</(?:for|if)>|<style>.*?</style>|<script>.*?</script>)", re.DOTALL)
_ROWS_MAX, _CELLS_MAX = 20, 256
_LEVELS = {
    **dict.fromkeys(("healthy", "flowing", "running", "done"), "ok"),
    **dict.fromkeys(("degraded", "paused", "waiting", "retrying", "not_led"), "warn"),
    **dict.fromkeys(("failing", "halted", "history_lost", "match_refused", "stopped", "failed"), "bad"),
}


def render_page(snapshots: Sequence[BridgeSnapshot], **values: object) -> str:
    """
    Return the page as HTML.

    Args:
        snapshots: of the bridges.
        values: `host` and `pid` of this process, and `others`: name and state of outboxes and transactions.
    """
    worst = max(snapshots, key=lambda each: each.exit_code).verdict
    names = ", ".join(each.bridge for each in snapshots)
    now = f"{datetime.now(UTC):%H:%M:%S}"
    return "".join(_render(_NODES, {**values, "snapshots": snapshots, "worst": worst, "names": names, "now": now}))


class Markup(str):
    """HTML, which is not escaped again."""

    __slots__ = ()


class _Values(Formatter):
    def read(self, path: str, values: Mapping[str, Any]) -> Any:
        name, _, wanted = path.partition(":")
        return self.convert(self.get_field(name, (), values)[0], wanted)

    def convert(self, value: Any, wanted: str) -> Any:
        return _FILTERS[wanted](value) if wanted else value

    def format_field(self, value: Any, format_spec: str) -> str:
        found = self.convert(value, format_spec)
        return found if isinstance(found, Markup) else escape(visible("" if found is None else found))


def _parse(parts: Iterator[str]) -> list[Any]:
    """Return texts, and loops and conditions with the nodes inside, until the end of one."""
    nodes: list[Any] = []
    for text in parts:
        nodes.append(text)
        tag = next(parts, "</")
        if tag.startswith("</"):
            break
        kind, _, what = tag[1:-1].partition(" ")
        nodes.append((kind, what, _parse(parts)) if kind in {"for", "if"} else Markup(tag))
    return nodes


def _render(nodes: Sequence[Any], values: Mapping[str, Any]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, str):
            yield node if isinstance(node, Markup) else _VALUES.vformat(node, (), values)
        elif node[0] == "for":
            name, _, path = node[1].partition(" in ")
            for each in _VALUES.read(path, values):
                yield from _render(node[2], {**values, name: each})
        elif _VALUES.read(node[1], values):
            yield from _render(node[2], values)


_VALUES = _Values()
_NODES = _parse(iter(_TAG.split(_FILE)))


def _prose(sentence: str) -> Markup:
    """Return a sentence. What is between its backticks is code."""
    parts = enumerate(escape(visible(sentence)).split("`"))
    return Markup("".join(f"<code>{part}</code>" if at % 2 else part for at, part in parts))


def _ago(moment: datetime | None) -> str:
    return "" if moment is None else f"{duration(max((datetime.now(UTC) - moment).total_seconds(), 0))} ago"


def _amount(count: int | None) -> str:
    return "-" if count is None else f"{count:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def _rate(rate: float | None) -> str:
    return f"{rate:.1f}" if rate is not None and rate < 10 else _amount(rate and round(rate))  # noqa: PLR2004


def _find_level(*codes: str) -> Callable[[BridgeSnapshot], str]:
    """Return a filter: the level of the worst finding of these codes."""
    return lambda shown: next((_LEVELS[each.severity] for each in shown.findings if each.code in codes), "")


def _processes(shown: BridgeSnapshot) -> str:
    leader, workers = shown.leader, shown.workers
    parts = [f"Leader on {leader.host}, process {leader.pid}, since {_ago(leader.since)}"] if leader else []
    parts += [f"No listener for {duration(shown.unled_seconds)}"] if shown.unled_seconds is not None else []
    parts += [f"Standby on {each.host}, process {each.pid}" for each in shown.standbys]
    parts += [number(workers.serving, "worker answers", "workers answer")] if workers else []
    return " · ".join(parts)


def _reading(shown: BridgeSnapshot) -> str:
    if shown.unread_seconds:
        return f"nothing was read for {duration(shown.unread_seconds)}"
    return "everything is handled" if shown.caught_up else "since the change was written"


def _oplog_left(shown: BridgeSnapshot) -> str | None:
    left = [each.oplog_left_seconds or 0 for each in shown.handlers if each.oplog_share is not None]
    return duration(min(left)) if left else None


def _cells(handler: HandlerView) -> list[tuple[str, str]]:
    """Return title and class of partitions."""
    shown = handler.partitions[:_CELLS_MAX]
    states = [(each.index, "running" if each.is_running and not each.is_blocked else each.state) for each in shown]
    return [(f"{index} {state}", f"{state} {_LEVELS[state]}") for index, state in states]


def _notes(handler: HandlerView) -> str:
    """Return the partitions of a handler in words."""
    states = Counter(each.state for each in handler.partitions if each.state not in {"flowing", "not_led"})
    notes = [f"{count} {state}" for state, count in states.items()]
    notes += [f"{_amount(handler.stored)} stored"] if handler.stored != 0 else []
    notes += [f"new partitions wait for {handler.repartitioning.waits}"] if handler.repartitioning else []
    return handler.error or ", ".join(notes) or number(len(handler.partitions), "partition", "partitions")


def _waiting(shown: BridgeSnapshot) -> list[tuple[str, PartitionView]]:
    """Return the partitions that no finding names: those that retry or wait, and all of several that are halted."""
    found: list[tuple[str, PartitionView]] = []
    for handler in shown.handlers:
        states = {"retrying", "waiting"} | ({"halted"} if len(handler.list_in("halted")) > 1 else set())
        found += [(handler.name, each) for each in handler.partitions if each.state in states or each.crashes]
    return found[:_ROWS_MAX]


def _attempts(partition: PartitionView) -> str:
    parts = [f"since {_ago(partition.since)}"] if partition.since else []
    parts += [number(partition.retries, "retry", "retries")] if partition.retries else []
    parts += [number(partition.crashes, "crash", "crashes")] if partition.crashes else []
    parts += [f"again in {duration(partition.due_seconds)}"] if partition.due_seconds else []
    return ", ".join(parts)


_FILTERS: Mapping[str, Callable[[Any], Any]] = {
    "level": lambda state: _LEVELS.get(state, ""),
    "color": lambda verdict: {"ok": "17784a", "warn": "d99a1c", "bad": "c9303a"}[_LEVELS[verdict]],
    "late": _find_level("halted", "lag", "no_listener", "reading_waits", "no_worker", "consumers", "broker_down"),
    "room": _find_level("backlog_bound", "backlog_refused", "backlog_missing"),
    "history": _find_level("history_lost", "history_at_risk"),
    "dead": _find_level("dead_letters"),
    "words": lambda code: code.replace("_", " "),
    "newest": lambda groups: sorted(groups, key=lambda each: str(each.newest_at), reverse=True)[:_ROWS_MAX],
    "prose": _prose,
    "duration": duration,
    "size": size,
    "amount": _amount,
    "rate": _rate,
    "ago": _ago,
    "processes": _processes,
    "reading": _reading,
    "oplog_left": _oplog_left,
    "waiting": _waiting,
    "cells": _cells,
    "notes": _notes,
    "attempts": _attempts,
}
