"""How outboxes and their dead letters look, on a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mongo_celery.quantities import duration

if TYPE_CHECKING:
    from mongo_celery.outbox.health import Health
    from mongo_celery.outbox.replay import DeadLetter

_ERROR_CHARACTERS = 100


def health_view(found: Sequence[Health]) -> RenderableType:
    """A line for each outbox."""
    table = _table("outbox", "documents", "pending", "oldest", "failing", "dead letters", "broker")
    for health in found:
        status = health.status
        table.add_row(
            Text(health.name, style="bold"),
            str(status.documents),
            str(status.pending),
            Text(duration(status.oldest_seconds), style="red" if health.late else ""),
            Text(str(status.failing), style="yellow" if status.failing else ""),
            Text(str(status.dead_letters), style="red" if status.dead_letters else ""),
            Text("answers", style="green") if health.broker_error is None else Text("does not answer", style="red"),
        )
    return table


def advice_view(found: Iterable[Health]) -> Sequence[Text]:
    """What to do: each sentence once, after the outboxes that it is about."""
    about: dict[str, list[str]] = {}
    for health in found:
        for sentence in health.advice():
            about.setdefault(sentence, []).append(health.name)
    return [Text.assemble((", ".join(names), "bold"), ": ", sentence) for sentence, names in about.items()]


def plain_health(health: Health) -> dict[str, Any]:
    """As JSON: what this process has counted itself is left out, since it has just begun."""
    status = health.status
    return {
        "outbox": health.name,
        "collection": status.outbox,
        "documents": status.documents,
        "pending": status.pending,
        "oldest_seconds": None if status.oldest_seconds is None else round(status.oldest_seconds, 3),
        "failing": status.failing,
        "dead_letters": status.dead_letters,
        "sweep_after": health.sweep_after,
        "late": health.late,
        "scheduled": health.scheduled,
        "indexed": health.indexed,
        "broker": {"answers": health.broker_error is None, "error": health.broker_error},
        "advice": health.advice(),
    }


def dead_letters_view(outbox: str, found: Sequence[DeadLetter], count: int) -> RenderableType:
    """A table of dead letters, and how many are not in it."""
    title = Text.assemble((outbox, "bold"), f": {count} dead {'letter' if count == 1 else 'letters'}")
    if not found:
        return title
    table = _table("id", "since", "name", "document", "error")
    for each in found:
        table.add_row(
            Text(each.id),
            Text(_moment(each)),
            Text(str(each.entry.get("name", "?"))),
            Text(repr(each.document)),
            Text(_cut(each.error)),
        )
    rest = [Text(f"  and {count - len(found)} more: --limit")] if count > len(found) else []
    return Group(title, Padding(table, (0, 0, 0, 2), expand=False), *rest)


def dead_letter_view(outbox: str, found: DeadLetter, *, payload: bool) -> RenderableType:
    """One dead letter with everything that is known."""
    entry = found.entry
    facts = {
        "id": found.id,
        "outbox": outbox,
        "document": repr(found.document),
        "kind": entry.get("kind", "?"),
        "name": entry.get("name", "?"),
        "arguments": entry.get("argsrepr", ""),
        "written": entry.get("at", "?"),
        "set aside": _moment(found),
        "failed before": f"{entry.get('attempts', 0)} times",
        "error": found.error,
        **({"payload": entry.get("payload")} if payload else {}),
    }
    width = max(map(len, facts)) + 2
    lines = [Text.assemble((f"{name}:".ljust(width), "dim"), str(value)) for name, value in facts.items()]
    return Group(*lines, Text(found.traceback.rstrip()))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, no_wrap=column != "error", overflow="fold")
    return table


def _moment(found: DeadLetter) -> str:
    return "-" if found.at is None else f"{found.at:%Y-%m-%d %H:%M:%S} UTC"


def _cut(text: str) -> str:
    line = text.splitlines()[0] if text else ""
    return line if len(line) <= _ERROR_CHARACTERS else line[: _ERROR_CHARACTERS - 3] + "..."
