"""What relays and dispatchers tell each other: a document that is held, what was published of it, what is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bson import ObjectId
from pymongo.errors import PyMongoError

from mongo_celery.outbox.failures import FailureKind, FailureVerdict


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


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldDocument:
    """
    A document that this process holds, with what is pending in it.

    Attributes:
        document_id: its `_id`.
        events: the stored entries from the head, acknowledged or read by a majority; some of them, if there are many.
        owner: of the claim.
        claimed_at: the monotonic clock before the claim was sent.
        field: all of what was read; empty where the writer knows it without reading.
    """

    document_id: object
    events: Any
    owner: ObjectId
    claimed_at: float
    field: Mapping[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many entries the document says that it has; 0 where it says nothing sensible."""
        found = self.field.get("count")
        return int(found) if isinstance(found, int) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPart:
    """
    What was published of one document, to be removed.

    Attributes:
        held: the document.
        names: of the entries that were published or set aside, from the head.
        dispatched: how many were published.
        dead: how many were set aside.
        verdict: on what stands behind them, if it could not be published; the document is let go then.
        error: why it ended early, in words.
        lets_go: whether this relay has nothing more to do with the document.
        failed: name of the entry whose attempts grow.
        ran_out: whether it ended since the claim's time was used up, and the document is to be claimed anew.
    """

    held: HeldDocument
    names: Sequence[Any]
    dispatched: int
    dead: int = 0
    verdict: FailureVerdict | None = None
    error: str | None = None
    lets_go: bool = False
    failed: object = None
    ran_out: bool = False

    @property
    def left(self) -> int:
        """How many entries are behind those, as far as is known."""
        return max(self.held.count, len(self.held.events)) - len(self.names)

    @property
    def is_whole(self) -> bool:
        """Whether the document's field can go with these entries, as far as was read."""
        return bool(self.names) and not self.left and not self.lets_go and None not in self.names

    @property
    def is_outage(self) -> bool:
        """Whether it ended since the broker did not answer."""
        return self.verdict is not None and self.verdict.is_outage

    @property
    def is_refused(self) -> bool:
        """Return True if the broker took nothing of it, or answers and refuses it, as it may refuse all others."""
        return self.verdict is not None and self.verdict.kind is FailureKind.WAIT_FOR_BROKER

    @property
    def delivery(self) -> Delivery:
        """As a sum of one."""
        is_left = self.lets_go and not self.ran_out
        refused = [self.held.document_id] if is_left and not self.is_outage else []
        return Delivery(self.dispatched, self.dead, self.left if is_left else 0, self.is_outage, self.error, refused)


@dataclass(frozen=True, slots=True)
class Remainder:
    """
    What a removal has left.

    Attributes:
        document_ids: documents in which something is left.
        owners: of this process's claims on them.
        failed: what could not be removed, each with the reason.
    """

    document_ids: Sequence[Any] = ()
    owners: Sequence[ObjectId] = ()
    failed: Sequence[tuple[PublishedPart, PyMongoError]] = ()

    def and_(self, other: Remainder) -> Remainder:
        """Both."""
        return Remainder(
            [*self.document_ids, *other.document_ids],
            [*self.owners, *other.owners],
            [*self.failed, *other.failed],
        )
