"""A delivery: the documents that a relay holds, and the sums of what was done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bson import ObjectId

from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.failures import FailureKind, FailureVerdict, entry_id_of


@dataclass(slots=True)
class Counters:
    """
    Counts of one process since it started; racing threads may lose a count.

    Attributes:
        dispatched: entries published.
        failures: publishes that failed, broker outages included.
        dead: entries set aside as dead letters.
        unsigned: those of them that the outbox had not signed.
    """

    dispatched: int = 0
    failures: int = 0
    dead: int = 0
    unsigned: int = 0


@dataclass(frozen=True, slots=True)
class Delivery:
    """
    What an attempt on one document, or on some, came to.

    Attributes:
        dispatched: how many entries were published and removed.
        dead: how many were set aside as dead letters.
        left: how many are still pending, as far as this relay knows.
        broker_down: whether it ended because the broker did not answer.
        error: why it ended early, in words; None when it did not.
        refused: `_id`s of documents that this process cannot deliver now.
        has_more: whether documents have more entries that this process may deliver now.
        is_late: whether MongoDB did not answer in time for a document, while it did for others.
    """

    dispatched: int = 0
    dead: int = 0
    left: int = 0
    broker_down: bool = False
    error: str | None = None
    refused: Sequence[Any] = ()
    has_more: bool = False
    is_late: bool = False

    def plain(self) -> dict[str, Any]:
        """Return the sums, for people and scripts."""
        return {name: getattr(self, name) for name in ("dispatched", "dead", "left", "broker_down", "error")}

    def and_(self, other: Delivery) -> Delivery:
        """The sum of both."""
        return Delivery(
            self.dispatched + other.dispatched,
            self.dead + other.dead,
            self.left + other.left,
            self.broker_down or other.broker_down,
            other.error or self.error,
            (*self.refused, *other.refused),
            self.has_more or other.has_more,
            self.is_late or other.is_late,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class HeldDocument:
    """
    A document that a relay holds, and how far its entries are published.

    Attributes:
        id: its `_id`.
        stored: what is pending in it, read by a majority, with the first entries alone.
        entries: these, from the head.
        owner: of the claim.
        claimed_at: the monotonic clock before the claim was sent.
        names: ids of the entries that were published or set aside, from the head; None for those that have none.
        dispatched: how many were published.
        dead: how many were set aside.
        verdict: on the next entry, if it could not be published.
        error: why publishing ended early, in words.
        is_stopped: whether this relay publishes no more of it, and lets it go.
        is_expired: whether it was stopped since half of the claim's time was over; then it is claimed anew.
    """

    id: object
    stored: Mapping[str, Any]
    entries: Sequence[Entry | Mapping[str, Any]]
    owner: ObjectId
    claimed_at: float
    names: list[Any] = field(default_factory=list)
    dispatched: int = 0
    dead: int = 0
    verdict: FailureVerdict | None = None
    error: str | None = None
    is_stopped: bool = False
    is_expired: bool = False

    @property
    def next(self) -> Entry | Mapping[str, Any]:
        """The entry that is to be published next."""
        return self.entries[len(self.names)]

    @property
    def is_done(self) -> bool:
        """Return True if all entries that were read are published or set aside."""
        return len(self.names) == len(self.entries)

    @property
    def left(self) -> int:
        """How many entries are behind those, as far as is known."""
        count = self.stored.get("count")
        return max(count if isinstance(count, int) else 0, len(self.entries)) - len(self.names)

    @property
    def is_whole(self) -> bool:
        """Return True if nothing is left of what was read, so that the document can be emptied."""
        return bool(self.names) and not self.left and not self.is_stopped and None not in self.names

    @property
    def is_outage(self) -> bool:
        """Return True if it ended since the broker did not answer."""
        return self.verdict is not None and self.verdict.is_outage

    @property
    def is_refused(self) -> bool:
        """Return True if the broker took nothing of it, or answers and refuses it, as it may refuse all others."""
        return self.verdict is not None and self.verdict.kind is FailureKind.WAIT_FOR_BROKER

    @property
    def failed(self) -> object:
        """The id of the entry whose attempts grow; None for none."""
        return entry_id_of(self.next) if self.verdict is not None and self.verdict.counts else None

    def stop(
        self, verdict: FailureVerdict | None = None, error: str | None = None, *, is_expired: bool = False
    ) -> None:
        """Publish no more of it."""
        self.is_stopped, self.verdict, self.error, self.is_expired = True, verdict, error, is_expired

    @property
    def delivery(self) -> Delivery:
        """As a sum of one."""
        is_left = self.is_stopped and not self.is_expired
        refused = [self.id] if is_left and not self.is_outage else []
        return Delivery(self.dispatched, self.dead, self.left if is_left else 0, self.is_outage, self.error, refused)
