"""What a preflight of a bridge or an outbox says: findings, each with the sentence that helps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]

NEAR, SERIOUS = 0.75, 0.9
"""Shares of a bound from which on it is said, and from which on it is an error."""


@dataclass(frozen=True, slots=True)
class Finding:
    """
    One thing that was looked at.

    Attributes:
        level: `error` where the bridge or outbox cannot work or would stand still, `warning` where it works but may
            surprise, else `ok`.
        name: stable, for scripts.
        message: what was found and, unless it is ok, what to do.
        command: that cures it, as it is to be typed; None where the message says what does.
        amount: of what was counted, for a program; None where nothing was.
    """

    level: Level
    name: str
    message: str
    command: str | None = None
    amount: int | None = None


def ok(name: str, message: str, amount: int | None = None) -> Finding:
    """All is well."""
    return Finding("ok", name, message, amount=amount)


def warning(name: str, message: str, command: str | None = None) -> Finding:
    """It works, but may surprise."""
    return Finding("warning", name, message, command)


def error(name: str, message: str, command: str | None = None) -> Finding:
    """It cannot work like this."""
    return Finding("error", name, message, command)
