"""What an outbox counts, and what it can say about what is pending."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """
    Counts of one process since it started; racing threads may lose a count.

    Attributes:
        dispatched: entries published and removed.
        failures: publishes that failed, broker outages included.
        dead: entries set aside as dead letters.
    """

    dispatched: int = 0
    failures: int = 0
    dead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxStatus:
    """
    One outbox at one moment.

    Attributes:
        outbox: namespace of the collection.
        documents: how many have something pending.
        pending: how many entries wait.
        oldest_seconds: age of the oldest by the server's clock; None when nothing waits.
        failing: how many documents hold an entry that has failed through its own fault.
        dead_letters: how many were set aside.
        dispatched: by this process since it started.
        failures: of this process since it started.
    """

    outbox: str
    documents: int
    pending: int
    oldest_seconds: float | None
    failing: int
    dead_letters: int
    dispatched: int
    failures: int
