"""
Why a bridge is not healthy: reasons, each with its severity, what it costs, and the command that cures it.

*Failing* is what stands still until somebody acts, or is about to be lost: wake somebody. *Degraded* is what goes on
by itself, was asked for, or can be looked at in the morning. The verdict's thresholds are here, but for the shares of
the oplog's window and of `spill_bytes`, which the listener's log has in common with it. The page's colors have others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mongo_celery.quantities import number

Severity = Literal["failing", "degraded"]

UNLED_SECONDS = 30
"""A deploy, or a take-over after a crash, takes no longer: from then on a bridge that nobody leads is failing."""

UNREAD_SECONDS = 30
"""An election takes no longer: from then on a stream that is not read is failing."""

LAG_SECONDS = 300
"""From then on a handler is called late."""

RUNNING_LONG_SECONDS = 60
"""A call that no time limit ends, and that takes longer, may never return: it is told."""

LAYOUT_SECONDS = 300
"""A new partitioning waits for what is blocked, or runs: after so long somebody has to look."""

PARKED_SECONDS = 3600
"""Retries of a few minutes are everyday; one that holds a partition for longer is told."""

DEAD_LETTERS = 1
"""Each is a change that nobody handles; from so many on they are told."""

CODES = (
    "state_unreadable",
    "no_listener",
    "handlers",
    "history_lost",
    "stopped",
    "history_at_risk",
    "identity",
    "spill_missing",
    "spill_refused",
    "spill_bound",
    "broker",
    "broker_down",
    "no_worker",
    "consumers",
    "unclaimed",
    "worker_tasks",
    "reading_waits",
    "match_refused",
    "halted",
    "broker_rejects",
    "not_stored",
    "snapshot_failed",
    "never_started",
    "waiting",
    "running_long",
    "lag",
    "fed_back",
    "locked",
    "layout_waits",
    "definitions",
    "layout",
    "parked",
    "paused",
    "dead_letters",
    "spill_unserved",
    "foreign_bridge",
    "dropped_messages",
    "unregistered",
)
"""Of all reasons, the worst first among those of one severity: what touches all handlers, then one, then a change."""

NAMED = 3
"""Handlers, or partitions, that are named; more are counted."""

_TEXT_MAX = 200


@dataclass(frozen=True, slots=True)
class Reason:
    """
    One thing that is not as it should be.

    Attributes:
        code: stable, for scripts; one of `CODES`.
        severity: `failing` or `degraded`.
        sentence: what it is, and what it costs.
        command: what cures it, as it is to be typed; None where no command does, and the sentence says what does.
    """

    code: str
    severity: Severity
    sentence: str
    command: str | None = None

    def __post_init__(self) -> None:
        assert self.code in CODES, self.code

    @property
    def rank(self) -> tuple[bool, int]:
        """The smaller, the worse."""
        return self.severity != "failing", CODES.index(self.code)

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def failing(code: str, sentence: str, command: str | None = None) -> Reason:
    """It stands still until somebody acts, or is about to be lost."""
    return Reason(code, "failing", sentence, command)


def degraded(code: str, sentence: str, command: str | None = None) -> Reason:
    """It goes on by itself, was asked for, or can wait until the morning."""
    return Reason(code, "degraded", sentence, command)


def where(subscription: Mapping[str, Any], indexes: Sequence[int]) -> str:
    """`Partition 3 of orders`, or several of it, as the beginning of a sentence."""
    name = subscription["name"]
    if len(indexes) == 1:
        return f"Partition {indexes[0]} of {name}"
    if len(indexes) == subscription.get("partitions"):
        return f"All {len(indexes)} partitions of {name}"
    return f"Partitions {listed([str(index) for index in indexes])} of {name}"


def listed(names: Sequence[str], most: int = NAMED) -> str:
    """Some names, and how many more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def cut(text: object) -> str:
    """What somebody else has said, on one line and not without end; without the full stop that ours has."""
    line = " ".join(str(text).split())
    return (f"{line[:_TEXT_MAX]}..." if len(line) > _TEXT_MAX else line).removesuffix(".")


def summed(found: Sequence[Reason], rest: str, command: str | None) -> Iterator[Reason]:
    """
    Reasons of one code, one a handler: the first ones, and one for all others.

    Args:
        rest: what is said of the others, behind how many handlers they are.
        command: that cures the others, all at once.
    """
    yield from found[:NAMED]
    others = found[NAMED:]
    if others:
        worst = min(others, key=lambda reason: reason.rank)
        text = f"{number(len(others), 'more handler', 'more handlers')} {rest}"
        yield Reason(worst.code, worst.severity, text, command)
