"""How outboxes and their dead letters look, on a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from mongo_celery.mongo.redaction import short
from mongo_celery.quantities import duration, number
from mongo_celery.visible import visible, visible_lines

if TYPE_CHECKING:
    from mongo_celery.outbox.health import Health
    from mongo_celery.outbox.replay import DeadLetter

_CHARACTERS = 200


def health_view(found: Iterable[Health]) -> RenderableType:
    """Some words on each outbox, on lines of its own: a table of so many figures fits no terminal."""
    return Group(*map(_health, found))


def _health(health: Health) -> RenderableType:
    status = health.status
    text = Text.assemble((health.name, "bold"), ": ")
    if status.pending:
        entries = number(status.pending, "entry", "entries")
        text.append(f"{entries} pending in {number(status.documents, 'document', 'documents')}, the oldest for ")
        text.append(duration(status.oldest_seconds), style="red" if health.late else "")
    else:
        text.append("nothing pending")
    if status.failing:
        failing = number(status.failing, "document has an entry", "documents have entries")
        text.append(f", {failing} that failed", style="yellow")
    if status.stuck:
        text.append(f", {number(status.stuck, 'of them is', 'of them are')} stuck", style="red")
    letters = number(status.dead_letters, "dead letter", "dead letters")
    text.append(", ").append(letters, style="red" if status.dead_letters else "")
    answers = health.broker_error is None
    return text.append(", the broker ").append(
        "answers" if answers else "does not answer", style="green" if answers else "red"
    )


def advice_view(found: Iterable[Health]) -> Sequence[Text]:
    """What to do: each sentence once, after the outboxes that it is about."""
    about: dict[str, list[str]] = {}
    for health in found:
        for sentence in health.advice():
            about.setdefault(sentence, []).append(health.name)
    return [Text.assemble((", ".join(names), "bold"), ": ", visible(sentence)) for sentence, names in about.items()]


def unread_view(unread: Mapping[str, Exception]) -> Sequence[Text]:
    """Say which outboxes could not be read, and why."""
    return [Text.assemble((name, "bold"), ": ", (short(error), "red")) for name, error in unread.items()]


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
        "stuck": status.stuck,
        "other_apps": status.other_apps,
        "dead_letters": status.dead_letters,
        "unsigned": status.unsigned,
        "sweep_after": health.sweep_after,
        "late": health.late,
        "scheduled": health.scheduled,
        "swept_seconds": None if health.swept_seconds is None else round(health.swept_seconds, 3),
        "indexed": health.indexed,
        "broker": {"answers": health.broker_error is None, "error": health.broker_error},
        "advice": health.advice(),
    }


def dead_letters_view(outbox: str, found: Sequence[DeadLetter], count: int) -> RenderableType:
    """Some lines for each dead letter, with its whole id, and how many are not shown."""
    lines: list[RenderableType] = [Text.assemble((outbox, "bold"), f": {number(count, 'dead letter', 'dead letters')}")]
    for each in found:
        lines.append(Text(f"{visible(each.id)}  {_moment(each)}"))
        lines.append(_below(f"{each.entry.get('name', '?')} of document {each.document!r}"))
        lines.append(_below(each.error))
    if count > len(found):
        lines.append(Text(f"and {count - len(found)} more: --limit"))
    return Group(*lines)


def dead_letter_view(outbox: str, found: DeadLetter, *, payload: bool) -> RenderableType:
    """One dead letter with everything that is known."""
    from mongo_celery.outbox.failures import attempts_of

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
        "failed before": number(attempts_of(entry), "time", "times"),
        "error": found.error,
        **({"payload": entry.get("payload")} if payload else {}),
    }
    width = max(map(len, facts)) + 2
    lines: list[RenderableType] = [
        Text.assemble((f"{name}:".ljust(width), "dim"), visible(value)) for name, value in facts.items()
    ]
    return Group(*lines, Text(visible_lines(found.traceback.rstrip(), "  ")))


def _moment(found: DeadLetter) -> str:
    return "-" if found.at is None else f"{found.at:%Y-%m-%d %H:%M:%S} UTC"


def _below(text: str) -> RenderableType:
    """Its first line, some characters of it; on more lines of a narrow terminal."""
    line = text.splitlines()[0] if text else ""
    shown = visible(line if len(line) <= _CHARACTERS else line[: _CHARACTERS - 3] + "...")
    return Padding(Text(shown), (0, 0, 0, 2), expand=False)
