"""Findings: single facts about a bridge or an outbox, each with a sentence and the commands that fix it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "degraded", "failing"]

Verdict = Literal["healthy", "degraded", "failing"]

SEVERITIES: tuple[Severity, ...] = ("ok", "degraded", "failing")

NEAR, SERIOUS = 0.75, 0.9
"""Shares of a limit at which it is degraded, and failing."""

NAMED = 3
"""Largest number of named handlers, partitions or findings of one kind. Others are counted."""

_TEXT_MAX = 200
_COMMANDS_MAX, _READ_MAX = 1000, 4000
_COMMAND = re.compile(r"`celery [^`]{1,400}`")
"""A command in a text of this package, which must stay whole to be runnable."""


@dataclass(frozen=True, slots=True)
class Finding:
    """
    One fact about a bridge or an outbox, with its severity.

    Attributes:
        code: stable name, for scripts.
        severity: `failing` if you must act, `degraded` if it can wait, otherwise `ok`.
        sentence: fact, effect and action. It may contain foreign text.
        commands: the fix as a complete command, then other useful commands.
    """

    code: str
    severity: Severity
    sentence: str
    commands: tuple[str, ...] = ()


def ok(code: str, sentence: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(code, "ok", sentence)


def degraded(code: str, sentence: str, *commands: str) -> Finding:
    """Return a finding that can wait until the morning."""
    return Finding(code, "degraded", sentence, commands)


def failing(code: str, sentence: str, *commands: str) -> Finding:
    """Return a finding that needs action now."""
    return Finding(code, "failing", sentence, commands)


def worst_severity(findings: Iterable[Finding]) -> Severity:
    """Return the worst severity. `ok` if there are no findings."""
    return max((each.severity for each in findings), key=SEVERITIES.index, default="ok")


def verdict_of(findings: Iterable[Finding]) -> Verdict:
    """Return the worst severity, in the commands' words."""
    worst = worst_severity(findings)
    return "healthy" if worst == "ok" else worst


EXIT_CODES: Mapping[Verdict, int] = {"healthy": 0, "degraded": 1, "failing": 2}
"""Exit status of commands that show a verdict."""


def list_some(names: Sequence[object], most: int = NAMED) -> str:
    """Return some names and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def shorten(text: object) -> str:
    """Return foreign text on one line, truncated after its commands, without its full stop."""
    found = " ".join(str(text)[:_READ_MAX].split())
    most = max([_TEXT_MAX, *(each.end() for each in _COMMAND.finditer(found[:_COMMANDS_MAX]))])
    return (f"{found[:most]}..." if len(found) > most else found).removesuffix(".")
