"""A delivery: a relay's documents, and the totals of its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bson import ObjectId

from mongo_celery.outbox.entries import StoredEntry, entry_id
from mongo_celery.outbox.failures import FailureKind, FailureVerdict


@dataclass(slots=True)
class Counters:
    """
    Counts of one outbox in one process since it started. Racing threads may lose a count.

    Attributes:
        dispatched: entries published.
        failures: failed publishes, including broker outages.
        unsigned: entries that became dead letters because the outbox had not signed them.
    """

    dispatched: int = 0
    failures: int = 0
    unsigned: int = 0


@dataclass(frozen=True, slots=True)
class Delivery:
    """
    The outcome of an attempt on one or several documents.

    Attributes:
        dispatched: number of published and removed entries.
        dead: number of new dead letters.
        left: number of entries that are still pending, as far as known, and cannot be delivered now.
        broker_down: True if it ended because the broker did not answer.
        error: reason why it ended early, in words. None if it did not.
        more: `_id`s of documents with further deliverable entries.
        is_late: True if MongoDB did not answer in time for one document, but did for others.
        is_refused: True if MongoDB refused one document, but not others.
    """

    dispatched: int = 0
    dead: int = 0
    left: int = 0
    broker_down: bool = False
    error: str | None = None
    more: Sequence[Any] = ()
    is_late: bool = False
    is_refused: bool = False

    def plain(self) -> dict[str, Any]:
        """Return the totals for people and scripts."""
        return {name: getattr(self, name) for name in ("dispatched", "dead", "left", "broker_down", "error")}

    def and_(self, other: Delivery) -> Delivery:
        """Return the sum of both. `more` comes only from the other one."""
        return Delivery(
            self.dispatched + other.dispatched,
            self.dead + other.dead,
            self.left + other.left,
            self.broker_down or other.broker_down,
            other.error or self.error,
            other.more,
            self.is_late or other.is_late,
            self.is_refused or other.is_refused,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class HeldDocument:
    """
    A document held by a relay, with its publishing progress.

    Attributes:
        id: `_id` of the document.
        count: number of entries, from a majority read.
        entries: the first entries.
        owner: the claim's owner.
        claimed_at: monotonic time before the claim was sent.
        names: ids of published or moved entries, from the head. None for entries without an id.
        dispatched: number of published entries.
        dead: number of new dead letters.
        verdict: the verdict on the next entry, if it could not be published.
        error: reason why publishing ended early, in words.
        is_stopped: True if this relay publishes no more of it, and releases it.
        is_expired: True if it stopped because half of the claim's time was over. Then it is claimed again.
    """

    id: object
    count: int
    entries: Sequence[StoredEntry]
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
    def next(self) -> StoredEntry:
        """The entry to publish next."""
        return self.entries[len(self.names)]

    @property
    def is_done(self) -> bool:
        """Return True if all read entries are published or moved to the dead letters."""
        return len(self.names) == len(self.entries)

    @property
    def left(self) -> int:
        """The number of entries after those, as far as known."""
        return max(self.count, len(self.entries)) - len(self.names)

    @property
    def is_whole(self) -> bool:
        """Return True if all entries were read and none is left, so that the document can be emptied."""
        return bool(self.names) and not self.left and not self.is_stopped and None not in self.names

    @property
    def is_outage(self) -> bool:
        """Return True if the delivery ended because the broker did not answer."""
        return self.verdict is not None and self.verdict.is_outage

    @property
    def is_refused(self) -> bool:
        """Return True if the broker accepted no entry of the document, so that it may refuse all others."""
        return self.verdict is not None and self.verdict.kind is FailureKind.WAIT_FOR_BROKER

    @property
    def failed(self) -> object:
        """The id of the entry whose attempts increase. None if none does."""
        return entry_id(self.next) if self.verdict is not None and self.verdict.counts else None

    def stop(
        self, verdict: FailureVerdict | None = None, error: str | None = None, *, is_expired: bool = False
    ) -> None:
        """Publish no more of it."""
        self.is_stopped, self.verdict, self.error, self.is_expired = True, verdict, error, is_expired

    @property
    def delivery(self) -> Delivery:
        """Return the result as a delivery of one document."""
        is_left = self.is_stopped and not self.is_expired
        return Delivery(self.dispatched, self.dead, self.left if is_left else 0, self.is_outage, self.error)
