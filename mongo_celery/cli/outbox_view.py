"""Views of outboxes and their dead letters, on a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from mongo_celery.cli.findings_view import headline, problems
from mongo_celery.findings import verdict_of
from mongo_celery.quantities import duration, number
from mongo_celery.visible import visible, visible_lines

if TYPE_CHECKING:
    from mongo_celery.outbox.dead_letters import DeadLetter
    from mongo_celery.outbox.health import OutboxHealth
    from mongo_celery.outbox.runtime import OutboxStatus

_CHARACTERS = 200
_COUNTS = ("documents", "pending", "failing", "stuck", "other_brokers", "dead_letters", "unsigned")


def health_view(found: Iterable[OutboxHealth]) -> RenderableType:
    """Show each outbox with its counts, and its problems with their commands."""
    return Group(*(part for health in found for part in _show_health(health)))


def _show_health(health: OutboxHealth) -> Iterator[RenderableType]:
    yield headline(health.name, health.findings)
    if health.status is not None:
        yield Padding(_show_counts(health.status), (0, 0, 0, 2), expand=False)
    yield from problems(health.findings)


def _show_counts(status: OutboxStatus) -> Text:
    text = Text("nothing pending")
    if status.pending:
        entries, documents = (
            number(status.pending, "entry", "entries"),
            number(status.documents, "document", "documents"),
        )
        text = Text(f"{entries} pending in {documents}, the oldest for {duration(status.oldest_seconds)}")
    return text.append(f", {number(status.dead_letters, 'dead letter', 'dead letters')}")


def plain_health(health: OutboxHealth) -> dict[str, Any]:
    """Return the health as JSON, without the counts of this process, which has just started."""
    status = health.status
    counts = {} if status is None else {name: getattr(status, name) for name in _COUNTS}
    if status is not None:
        counts |= {
            "collection": status.outbox,
            "oldest_seconds": None if status.oldest_seconds is None else round(status.oldest_seconds, 3),
        }
    findings = {"verdict": verdict_of(health.findings), "findings": [asdict(each) for each in health.findings]}
    return {"outbox": health.name, **findings, **counts}


def dead_letters_view(outbox: str, found: Sequence[DeadLetter], count: int) -> RenderableType:
    """Show some lines for each dead letter, with its whole id, and the number of hidden ones."""
    lines: list[RenderableType] = [Text.assemble((outbox, "bold"), f": {number(count, 'dead letter', 'dead letters')}")]
    for each in found:
        lines.append(Text(f"{visible(each.id)}  {_show_time(each)}"))
        lines.append(_below(f"{each.entry.get('name', '?')} of document {each.document!r}"))
        lines.append(_below(each.error))
    if count > len(found):
        lines.append(Text(f"and {count - len(found)} more. To see them, use --limit"))
    return Group(*lines)


def dead_letter_view(outbox: str, found: DeadLetter, *, payload: bool) -> RenderableType:
    """Show one dead letter with all details."""
    from mongo_celery.outbox.entries import read_attempts

    entry = found.entry
    facts = {
        "id": found.id,
        "outbox": outbox,
        "document": repr(found.document),
        "kind": entry.get("kind", "?"),
        "name": entry.get("name", "?"),
        "arguments": entry.get("argsrepr", ""),
        "written": entry.get("at", "?"),
        "dead since": _show_time(found),
        "failed before": number(read_attempts(entry), "time", "times"),
        "error": found.error,
        **({"payload": entry.get("payload")} if payload else {}),
    }
    width = max(map(len, facts)) + 2
    lines: list[RenderableType] = [
        Text.assemble((f"{name}:".ljust(width), "dim"), visible(value)) for name, value in facts.items()
    ]
    return Group(*lines, Text(visible_lines(found.traceback.rstrip(), "  ")))


def _show_time(found: DeadLetter) -> str:
    return "-" if found.at is None else f"{found.at:%Y-%m-%d %H:%M:%S} UTC"


def _below(text: str) -> RenderableType:
    """Return the first line, shortened. A narrow terminal wraps it."""
    line = text.splitlines()[0] if text else ""
    shown = visible(line if len(line) <= _CHARACTERS else line[: _CHARACTERS - 3] + "...")
    return Padding(Text(shown), (0, 0, 0, 2), expand=False)
