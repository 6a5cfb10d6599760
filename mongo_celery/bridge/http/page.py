"""
The status page: page.html with snapshots of bridges. It is complete without its script.

In page.html, `{name.field:filter}` is an escaped value. `<for x in y>` repeats, and `<if y>` omits. Style and script
are copied unchanged.
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

from mongo_celery.bridge.operations.bridge_snapshot import (
    LEVELS,
    BridgeSnapshot,
    DeadLetterGroup,
    HandlerStatus,
    PartitionStatus,
)
from mongo_celery.quantities import duration, number, size
from mongo_celery.visible import visible

_FILE = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
_STYLE, _SCRIPT = (
    b64encode(sha256(_FILE.partition(f"<{kind}>")[2].partition(f"</{kind}>")[0].encode()).digest()).decode()
    for kind in ("style", "script")
)
POLICY = (
    f"default-src 'none'; style-src 'sha256-{_STYLE}'; script-src 'sha256-{_SCRIPT}'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""A browser accepts only the style and the script of page.html."""

_TAG = re.compile(r"(</?(?:for|if|style|script)\b[^<>]*>)")
_ROWS_MAX = 20


def render_page(snapshots: Sequence[BridgeSnapshot], host: str, pid: int) -> str:
    """Return the page as HTML, from the bridges' snapshots and this process's host and id."""
    worst = max(snapshots, key=lambda each: each.exit_code).verdict
    names = ", ".join(each.bridge for each in snapshots)
    now = f"{datetime.now(UTC):%H:%M:%S}"
    process = {"host": host, "pid": pid, "now": now}
    return "".join(_render(_NODES, {**process, "snapshots": snapshots, "worst": worst, "names": names}))


class Markup(str):
    """HTML that must not be escaped again."""

    __slots__ = ()


class _Values(Formatter):
    def read(self, path: str, values: Mapping[str, Any]) -> Any:
        name, _, wanted = path.partition(":")
        found = self.get_field(name, (), values)[0]
        return _FILTERS[wanted](found) if wanted else found

    def format_field(self, value: Any, format_spec: str) -> str:
        found = _FILTERS[format_spec](value) if format_spec else value
        return found if isinstance(found, Markup) else escape(visible("" if found is None else found))


def _parse(parts: Iterator[str]) -> list[Any]:
    """Return texts, loops and conditions with their inner nodes, up to the end of one."""
    nodes: list[Any] = []
    for text in parts:
        nodes.append(text)
        tag = next(parts, "</for>")
        kind, _, what = tag.strip("<>").partition(" ")
        if kind in {"/for", "/if"}:
            break
        nodes.append((kind, what, _parse(parts)) if what else Markup(tag + next(parts) + next(parts)))
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


def _age(moment: datetime | None) -> str:
    return duration(None if moment is None else max((datetime.now(UTC) - moment).total_seconds(), 0))


def _amount(count: float | None) -> str:
    return "-" if count is None else f"{count:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def _rate(rate: float | None) -> str:
    return _amount(rate if rate is None else round(rate, 1 if rate < 10 else None))  # noqa: PLR2004


def _find_level(*codes: str) -> Callable[[BridgeSnapshot], str]:
    """Return a filter for the level of the worst finding with these codes."""
    return lambda shown: next((LEVELS[each.severity] for each in shown.findings if each.code in codes), "")


def _oplog_left(shown: BridgeSnapshot) -> str | None:
    left = [each.oplog_left_seconds or 0 for each in shown.handlers if each.oplog_share is not None]
    return duration(min(left)) if left else None


def _kind(partition: PartitionStatus) -> str:
    return "running ok" if partition.is_running and not partition.is_blocked else LEVELS.get(partition.state, "")


def _notes(handler: HandlerStatus) -> str:
    """Describe a handler's partitions in words."""
    states = Counter(each.state for each in handler.partitions if each.state not in {"flowing", "not_led"})
    notes = [f"{count} {state}" for state, count in states.items()]
    notes += [f"{_amount(handler.stored)} stored"] if handler.stored != 0 else []
    notes += [f"new partitions wait: {handler.repartitioning.waits}"] if handler.repartitioning else []
    return ", ".join(notes) or number(len(handler.partitions), "partition", "partitions")


def _list_blocked(shown: BridgeSnapshot) -> list[tuple[str, PartitionStatus]]:
    """Return the partitions that the page lists: retrying, waiting or crashed ones, and several halted ones."""
    found: list[tuple[str, PartitionStatus]] = []
    for handler in shown.handlers:
        states = {"retrying", "waiting"} | ({"halted"} if len(handler.list_partitions("halted")) > 1 else set())
        found += [(handler.name, each) for each in handler.partitions if each.state in states or each.crashes]
    return found[:_ROWS_MAX]


def _newest(groups: Sequence[DeadLetterGroup]) -> list[DeadLetterGroup]:
    return sorted(groups, key=lambda each: str(each.newest_at), reverse=True)[:_ROWS_MAX]


_FILTERS: Mapping[str, Callable[[Any], Any]] = {
    "page": lambda code: f"docs/operations/runbook.md#{code}",
    "color": lambda verdict: {"ok": "17784a", "warn": "d99a1c", "bad": "c9303a"}[LEVELS[verdict]],
    "late": _find_level("halted", "lag", "no_listener", "reading_waits", "no_worker", "consumers", "broker_down"),
    "room": _find_level("backlog_bound", "backlog_refused", "backlog_missing"),
    "dead": _find_level("dead_letters"),
    "history": _find_level("history_lost", "history_at_risk"),
    "duration": duration,
    "size": size,
    "level": lambda state: LEVELS.get(state, ""),
    "words": lambda code: code.replace("_", " "),
    "age": _age,
    "amount": _amount,
    "rate": _rate,
    "kind": _kind,
    "notes": _notes,
    "oplog_left": _oplog_left,
    "blocked": _list_blocked,
    "newest": _newest,
}
