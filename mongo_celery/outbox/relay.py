"""
Delivering what is pending in one document: claim it, publish in order, remove by name.

Any number of relays may work at once: the writer itself (the fast path), a bridge's handler, the sweep. The
claim keeps them from publishing the same entries side by side; it is not what order rests on. Order rests on
this: a relay publishes from the head of what it has read, and an entry is removed only by a relay that has
published it. So whatever stood before an entry has been published before it, also by a relay that was paused
and woke up late; such a relay costs duplicates, never an entry that overtakes its predecessor for the first
time.

The claim is a majority write. So all that it returns is written by a majority too, and nothing of a write
that a fail-over takes back is ever published. Removals may be lost in a fail-over: that is a duplicate. But what
a removal shows as added meanwhile is published only after another majority write.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bson import ObjectId
from pymongo import ReturnDocument, WriteConcern
from pymongo.collection import Collection

from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.outbox import pending
from mongo_celery.outbox.dead_letters import OutboxDeadLetters
from mongo_celery.outbox.entries import FIELD, Entry, entries_of
from mongo_celery.outbox.publisher import BrokerUnavailableError, Publisher
from mongo_celery.quantities import number

logger = logging.getLogger("mongo_celery.outbox")

_BATCH = 50
"""How many entries are published before they are removed; a crash repeats at most so many."""

_BROKER_PAUSE_SECONDS = 1.0
_REFUSED_PAUSE_SECONDS = 30.0
_PAUSES = Pauses(first=1.0, longest=300.0)


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


@dataclass(frozen=True, slots=True)
class Delivery:
    """
    What one attempt on one document came to.

    Attributes:
        dispatched: how many entries were published and removed.
        dead: how many were set aside as dead letters.
        left: how many are still pending, as far as this relay knows.
        broker_down: whether it ended because the broker did not answer.
        error: why it ended early, in words; None when it did not.
    """

    dispatched: int = 0
    dead: int = 0
    left: int = 0
    broker_down: bool = False
    error: str | None = None


class Relay:
    """
    Delivers the entries of one collection.

    Args:
        collection: opened with majority writes and reads.
        publisher: to the broker.
        dead_letters: gives the store for what cannot be published.
        claim_ttl: seconds for which a document belongs to one relay; after a crash it is free again.
        max_attempts: how often an entry may fail through its own fault before it is set aside.
        counters: of this process.
    """

    def __init__(
        self,
        collection: Collection[dict[str, Any]],
        publisher: Publisher,
        dead_letters: Callable[[], OutboxDeadLetters],
        *,
        claim_ttl: float,
        max_attempts: int,
        counters: Counters,
    ) -> None:
        self._collection = collection
        self._quick = collection.with_options(write_concern=WriteConcern(1))
        self._publisher = publisher
        self._dead_letters = dead_letters
        self._claim_ttl = claim_ttl
        self._max_attempts = max_attempts
        self._counters = counters

    def deliver(self, document_id: object, *, older_than: float | None = None, judge: bool = True) -> Delivery:
        """
        Claim a document and deliver what is pending in it.

        Args:
            document_id: its `_id`.
            older_than: only if its oldest entry has waited so many seconds.
            judge: whether an entry that cannot be published counts an attempt; a writer, which need not know
                all tasks, leaves that to a process that does.

        Returns:
            What was done; nothing if another relay holds the document, it is held back, or nothing is pending.

        Raises:
            PyMongoError: MongoDB did not answer; the claim lapses by itself.
        """
        owner = ObjectId()
        conditions = [pending.FREE, pending.DUE]
        if older_than is not None:
            conditions.append(pending.older_than(older_than))
        claimed_at = time.monotonic()
        document = self._collection.find_one_and_update(
            {"_id": document_id, **pending.WITH_ENTRIES, "$expr": {"$and": conditions}},
            pending.claim_update(owner, self._claim_ttl),
            projection={FIELD: 1},
            return_document=ReturnDocument.AFTER,
        )
        if document is None:
            return Delivery()
        events = document[FIELD].get("events")
        if not isinstance(events, list) or not events:
            logger.error(
                "document %r: %s says that entries wait, and there are none; put right",
                document_id,
                FIELD,
                extra={"event": "count_repaired"},
            )
            self._removed(document_id, [], owner)
            return Delivery()
        return self.deliver_claimed(document_id, events, owner, claimed_at, judge=judge)

    def is_held(self, document_id: object) -> bool:
        """Whether something is pending in a document and a relay holds it."""
        held = {"_id": document_id, **pending.WITH_ENTRIES, "$expr": {"$not": [pending.FREE]}}
        return self._collection.find_one(held, {"_id": 1}) is not None

    def deliver_claimed(
        self,
        document_id: object,
        events: Sequence[Mapping[str, Any]],
        owner: ObjectId,
        claimed_at: float,
        *,
        judge: bool = True,
    ) -> Delivery:
        """Deliver the entries of a document that was claimed at a moment of the monotonic clock."""
        dispatched = dead = 0
        while events:
            published: list[str] = []
            everything = entries_of(events)
            batch = everything[:_BATCH]
            try:
                for entry in batch:
                    if time.monotonic() - claimed_at > self._claim_ttl / 2:
                        break  # it may be another's soon; what is left is for whoever claims next
                    if not isinstance(entry, Entry):
                        raise ValueError("the entry cannot be read: somebody else has written to pendingEvents")  # noqa: TRY004
                    self._publisher.publish(entry)
                    published.append(entry.id)
            except Exception as error:  # noqa: BLE001 - whatever a serializer, a canvas or a broker raises
                if published:
                    dispatched += len(published)
                    self._counters.dispatched += len(published)
                    self._removed(document_id, published, owner)
                failed = batch[len(published)]
                if not self._set_aside(document_id, failed, error, owner, judge=judge):
                    left = len(events) - len(published)
                    down = isinstance(error, BrokerUnavailableError) and not error.answers
                    return Delivery(dispatched, dead, left, down, f"{type(error).__name__}: {short(error)}")
                nameless = [entry for entry in everything if _id_of(entry) is None] if _id_of(failed) is None else []
                for entry in nameless:  # they can only be removed together
                    self._dead_letters().add(document_id, entry, error)
                dead += max(1, len(nameless))
                published = [_id_of(failed)]
                claimed_at, events = self._removed(document_id, published, owner)
                continue
            if not published:
                self._release(document_id, owner)
                return Delivery(dispatched, dead, len(events), error="the claim's time was used up")
            dispatched += len(published)
            self._counters.dispatched += len(published)
            claimed_at, events = self._removed(document_id, published, owner)
        return Delivery(dispatched, dead)

    def _removed(self, document_id: object, ids: Sequence[str], owner: ObjectId) -> tuple[float, Sequence[Any]]:
        """Remove entries; what is left, if the claim is still mine, and since when."""
        now = time.monotonic()
        document = self._quick.find_one_and_update(
            {"_id": document_id, FIELD: {"$exists": True}},  # else it was replaced behind the outbox's back
            pending.removal(ids, owner, self._claim_ttl),
            projection={FIELD: 1},
            return_document=ReturnDocument.AFTER,
        )
        if document is None:
            logger.warning(
                "document %r was deleted or replaced while its entries were delivered",
                document_id,
                extra={"event": "document_replaced"},
            )
            return now, []
        field = document[FIELD]
        if not field["events"] or field["claim"]["owner"] != owner:
            return now, []
        return self._confirmed(document_id, owner)

    def _confirmed(self, document_id: object, owner: ObjectId) -> tuple[float, Sequence[Any]]:
        """What was added meanwhile, once a majority has it: the removal was not a majority write."""
        now = time.monotonic()
        document = self._collection.find_one_and_update(
            {"_id": document_id, f"{FIELD}.claim.owner": owner},
            pending.claim_update(owner, self._claim_ttl),
            projection={FIELD: 1},
            return_document=ReturnDocument.AFTER,
        )
        return now, [] if document is None else document[FIELD]["events"]

    def _set_aside(
        self, document_id: object, entry: Entry | Mapping[str, Any], error: Exception, owner: ObjectId, *, judge: bool
    ) -> bool:
        """Judge a failure; True if the entry is a dead letter now, else the document is let go for a while."""
        self._counters.failures += 1
        if isinstance(error, BrokerUnavailableError):
            logger.warning(
                "outbox: the broker took no message (%s); entries wait in MongoDB",
                short(error),
                extra={"event": "broker_refused"},
            )
            self._release(document_id, owner, _REFUSED_PAUSE_SECONDS if error.answers else _BROKER_PAUSE_SECONDS)
            return False
        if not judge:
            self._release(document_id, owner)
            return False
        attempts = 1 + entry.attempts if isinstance(entry, Entry) else self._max_attempts
        if attempts < self._max_attempts:
            logger.warning(
                "outbox: entry %s of document %r failed (attempt %d of %d): %s",
                _id_of(entry), document_id, attempts, self._max_attempts, short(error),
                extra={"event": "entry_failed"},
            )  # fmt: skip
            self._release(document_id, owner, _PAUSES.nth(attempts), _id_of(entry))
            return False
        logger.error(
            "outbox: entry %s of document %r is a dead letter after %s: %s",
            _id_of(entry), document_id, number(attempts, "attempt", "attempts"), short(error),
            extra={"event": "entry_dead"},
        )  # fmt: skip
        # Before it is removed: a crash repeats it, and loses nothing.
        self._dead_letters().add(document_id, entry, error)
        self._counters.dead += 1
        return True

    def _release(self, document_id: object, owner: ObjectId, pause: float = 0.0, failed: str | None = None) -> None:
        there = {"_id": document_id, f"{FIELD}.events": {"$type": "array"}}  # else replaced behind the outbox's back
        self._quick.update_one(there, pending.release(owner, pause, failed))


def _id_of(entry: Entry | Mapping[str, Any]) -> Any:
    return entry.id if isinstance(entry, Entry) else entry.get("id")
