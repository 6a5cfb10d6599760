"""Findings: single facts about a bridge or an outbox, each with the sentence and the command that help."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "degraded", "failing"]

SEVERITIES: tuple[Severity, ...] = ("ok", "degraded", "failing")

NEAR, SERIOUS = 0.75, 0.9
"""Shares of a bound from which on it is degraded, and failing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """
    One fact that was judged.

    Attributes:
        code: stable, for scripts.
        severity: `failing` where something is blocked until somebody acts, cannot work, or is about to be lost.
            `degraded` where it ends automatically, was asked for, or can wait until the morning. Else `ok`.
        sentence: the fact, its effect, and the action.
        command: the fix, as you type it. None where no command fixes it.
    """

    code: str
    severity: Severity
    sentence: str
    command: str | None = None


def ok(code: str, sentence: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(code, "ok", sentence)


def degraded(code: str, sentence: str, command: str | None = None) -> Finding:
    """Return a finding that can wait until the morning."""
    return Finding(code, "degraded", sentence, command)


def failing(code: str, sentence: str, command: str | None = None) -> Finding:
    """Return a finding that needs somebody now."""
    return Finding(code, "failing", sentence, command)


def worst_severity(findings: Iterable[Finding]) -> Severity:
    """Return the worst severity; `ok` where there is nothing."""
    return max((each.severity for each in findings), key=SEVERITIES.index, default="ok")
