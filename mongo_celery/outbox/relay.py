"""
Delivering what is pending in documents: claim them, publish in order, remove by name.

Any number of relays may work at once: the dispatcher in the writer's process, a bridge's handler, the sweep. A claim
keeps them from publishing the same entries side by side; it is not what order rests on. Order rests on this: a relay
publishes from the head of what it has read, and an entry is removed only by a relay that has published it. So
whatever stood before an entry has been published before it, also by a relay that was paused and woke up late; such a
relay costs duplicates, never an entry that overtakes its predecessor for the first time.

`publishing` has what goes to the broker, `removals` what follows, `commands` how long MongoDB is waited for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from bson import ObjectId
from pymongo.collection import Collection
from pymongo.errors import PyMongoError

from mongo_celery.mongo.redaction import short
from mongo_celery.outbox.claims import PendingClaims
from mongo_celery.outbox.commands import (
    Failure,
    bounded,
    bounded_singly,
    each_of,
    is_about_some,
    singly,
    tell_undeliverable,
)
from mongo_celery.outbox.dead_letters import OutboxDeadLetters
from mongo_celery.outbox.delivery import Counters, Delivery, HeldDocument, PublishedPart, Remainder
from mongo_celery.outbox.failures import FailurePolicy
from mongo_celery.outbox.groups import ENTRIES_MAX, groups_of
from mongo_celery.outbox.publisher import Publisher
from mongo_celery.outbox.publishing import PendingPublisher
from mongo_celery.outbox.removals import SETTLE_DOCUMENTS, SETTLE_SECONDS, Removals
from mongo_celery.outbox.signing import EntrySigner

logger = logging.getLogger("mongo_celery.outbox")

TURNS_MAX = 20
"""After so many turns a delivery leaves the rest of a document, to which somebody may write all the time, to others."""

_OUTAGES_MAX = 3
"""So many documents in a row for which the broker did not answer, or that it has refused, end a delivery."""


class _Published:
    """What a turn has published and not yet removed, and what its removals have left."""

    def __init__(self, removals: Removals) -> None:
        self._removals = removals
        self.parts: list[PublishedPart] = []
        self._began = time.monotonic()
        self.left = Remainder()

    def add(self, part: PublishedPart) -> None:
        self.parts.append(part)
        if part.ran_out:  # it is free then, to be claimed anew
            self.left = self.left.and_(Remainder([part.held.document_id]))

    def make_room(self, documents: int = 1) -> None:
        """Remove what is there, if it is time or with so many documents more there would be too many."""
        if len(self.parts) + documents > SETTLE_DOCUMENTS or time.monotonic() - self._began > SETTLE_SECONDS:
            self.settle()

    def settle(self) -> None:
        self.left = self.left.and_(self._removals.settle(self.parts))
        self.parts, self._began = [], time.monotonic()


class Relay:
    """
    Delivers the entries of one collection.

    Args:
        collection: opened with majority writes and reads.
        publisher: to the broker.
        dead_letters: gives the store for what cannot be published.
        signer: verifies entries.
        claims: conditions and updates on the collection's field.
        claim_ttl: seconds for which a document belongs to one relay; after a crash it is free again.
        policy: what becomes of an entry that fails through its own fault.
        counters: of this process.
    """

    def __init__(
        self,
        collection: Collection[dict[str, Any]],
        publisher: Publisher,
        dead_letters: Callable[[], OutboxDeadLetters],
        *,
        signer: EntrySigner,
        claims: PendingClaims,
        claim_ttl: float,
        policy: FailurePolicy,
        counters: Counters,
    ) -> None:
        self._collection = collection
        self._publisher = publisher
        self._dead_letters = dead_letters
        self._claims = claims
        self._field = claims.field
        self._claim_ttl = claim_ttl
        self._counters = counters
        self._late: list[PublishedPart] = []
        self._lock = threading.Lock()
        self.removals = Removals(collection, claims, claim_ttl)
        self.pending = PendingPublisher(
            collection,
            claims.field,
            publisher,
            dead_letters,
            signer=signer,
            removals=self.removals,
            claim_ttl=claim_ttl,
            policy=policy,
            counters=counters,
        )

    # -- whole deliveries --------------------------------------------------------------------------

    def deliver(self, document_id: object, *, older_than: float | None = None, judge: bool = True) -> Delivery:
        """As `deliver_all`, of one document."""
        return self.deliver_all([document_id], older_than=older_than, judge=judge)

    def deliver_all(
        self,
        document_ids: Sequence[object],
        *,
        older_than: float | None = None,
        judge: bool = True,
        turns: int = TURNS_MAX,
    ) -> Delivery:
        """
        Claim documents and deliver what is pending in them, in turns.

        Args:
            document_ids: their `_id`s.
            older_than: only those whose oldest entry has waited so many seconds.
            judge: whether an entry that cannot be published counts an attempt; a writer, which need not know
                all tasks, leaves that to a process that does, and leaves a broker alone that does not answer once.
            turns: how often a document is claimed that has more entries than are published in a turn.

        Returns:
            What was done; nothing of a document that another relay holds, that is held back, in which nothing is
            pending, or whose next entry belongs to another app.

        Raises:
            SoftTimeLimitExceeded: of the task that delivers; every claim was let go.
            PyMongoError: MongoDB did not answer; claims lapse by themselves.
        """
        total, looks, late = self._catch_up(), Remainder(document_ids), list[PublishedPart]()
        for turn in range(turns):
            done, looks = self._turn(looks, older_than=None if turn else older_than, judge=judge)
            total = total.and_(done)
            late += [part for part, _ in looks.failed]
            if total.broker_down or not looks.document_ids:
                break
        if looks.owners:
            self.removals.release(looks.document_ids, looks.owners)
        if not total.broker_down:
            total = total.and_(Delivery(left=len(looks.document_ids), has_more=bool(looks.document_ids)))
        self._late += late
        return total.and_(self._catch_up()) if late else total

    def _catch_up(self) -> Delivery:
        """
        Remove what was published, and could not be removed when that was tried.

        Who keeps a document closed to that keeps it closed to claims, too: in this process nothing is sent twice.
        """
        with self._lock:
            late, self._late = self._late, []
        total = Delivery()
        if not late:
            return total
        try:
            remainder = self.removals.settle(late)
            self.removals.release(remainder.document_ids, remainder.owners)
        except PyMongoError:
            self._late += late
            raise
        for part, error in remainder.failed:
            total = total.and_(self._missed(part.held.document_id, error))
            self._late += [part] if error.timeout else []
        return total

    def _missed(self, document_id: object, error: PyMongoError) -> Delivery:
        """MongoDB did not do for a document what it did for others."""
        tell_undeliverable(self._collection.full_name, document_id, error)
        refused = [] if error.timeout else [document_id]
        return Delivery(left=1, error=short(error), refused=refused, is_late=error.timeout)

    def _turn(self, looks: Remainder, *, older_than: float | None, judge: bool) -> tuple[Delivery, Remainder]:
        """Claim some documents and publish the first entries of each; what was done, and where something is left."""
        total, published = Delivery(), _Published(self.removals)
        owner, missed = ObjectId(), list[Failure]()
        outages, outages_max = 0, _OUTAGES_MAX if judge else 1
        refusals, is_down = 0, False
        try:
            claimed = self.claim(
                looks.document_ids, older_than=older_than, held=looks.owners, owner=owner, missed=missed
            )
            for group in groups_of(claimed):
                published.make_room(len(group))
                for part in self.pending.publish_together(group, judge=judge, step=published.make_room):
                    published.add(part)
                    total = total.and_(part.delivery)
                    outages = outages + 1 if part.is_outage else 0
                    refusals = refusals + 1 if part.is_refused else 0
                    is_down = is_down or outages >= outages_max or refusals >= _OUTAGES_MAX
                if is_down:
                    break
            published.settle()
        except BaseException:  # MongoDB, a time limit, or the end of the process
            with suppress(PyMongoError), bounded():  # all of it: claims lapse, and what was published is removed later
                published.settle()
                self.removals.release(looks.document_ids, [owner, *looks.owners])
            self._late += [*published.parts, *(part for part, _ in published.left.failed)]
            raise
        left = published.left
        if is_down:
            self.removals.release(looks.document_ids, [owner, *looks.owners])
            left, total = Remainder(failed=left.failed), total.and_(Delivery(broker_down=True))
        for document_id, error in missed:
            total = total.and_(self._missed(document_id, error))
        return total, left

    def is_held(self, document_id: object) -> bool:
        """Whether something is pending in a document and a relay holds it."""
        return self._collection.find_one({"_id": document_id, **self._claims.held()}, {"_id": 1}) is not None

    # -- their steps -------------------------------------------------------------------------------

    def claim(
        self,
        document_ids: Sequence[object],
        *,
        older_than: float | None = None,
        held: Sequence[ObjectId] = (),
        owner: ObjectId | None = None,
        missed: list[Failure] | None = None,
    ) -> Iterator[HeldDocument]:
        """
        Claim those of some documents that may be claimed, by one write of a majority, and read them by a majority.

        Args:
            document_ids: their `_id`s.
            older_than: as of `deliver_all`.
            held: owners of claims that this process has on some of them.
            owner: of the new claims, if the caller is to let them go himself.
            missed: gets those that MongoDB did not claim or repair, while it did so for others.

        Raises:
            PyMongoError: MongoDB did not answer; or, without `missed`, it has refused one of them.
        """
        if not document_ids:
            return
        owner, missed_here = owner or ObjectId(), list[Failure]()
        claimed_at = time.monotonic()
        claimed = self._claimed(document_ids, older_than, held, owner, missed_here)
        if missed is None and missed_here:
            raise missed_here[0][1]
        mine = {"_id": {"$in": claimed}, f"{self._field.claim}.owner": owner}
        shown = {self._field.count: 1, self._field.claim: 1, self._field.events: {"$slice": ENTRIES_MAX}}
        for document in each_of(self._collection.find(mine, shown)) if claimed else ():
            found = document[self._field.name]
            events = found.get("events")
            if isinstance(events, list) and events:
                yield HeldDocument(
                    document_id=document["_id"], events=events, owner=owner, claimed_at=claimed_at, field=found
                )
                continue
            try:
                self._repair(document["_id"], events, owner)
            except PyMongoError as error:
                if missed is None or not is_about_some(error):
                    raise
                missed_here.append((document["_id"], error))
        if missed is not None:
            missed += missed_here

    def _claimed(
        self,
        document_ids: Sequence[Any],
        older_than: float | None,
        held: Sequence[ObjectId],
        owner: ObjectId,
        missed: list[Failure],
    ) -> Sequence[Any]:
        """Claim documents; of which the claims may be read."""
        update = self._claims.claimed(owner, self._claim_ttl)
        claimable = self._claims.claimable(older_than, (*held, owner))  # what has no answer may have been done

        def claim_one(document_id: Any) -> bool:
            with bounded_singly():
                result = self._collection.update_one({"_id": {"$eq": document_id}, **claimable}, update)
            return result.matched_count > 0

        if len(document_ids) > 1:
            try:
                with bounded():
                    these = {"_id": {"$in": list(document_ids)}}
                    many = self._collection.update_many({**these, **claimable}, update).matched_count
            except PyMongoError as error:
                if not is_about_some(error):
                    raise
                self._ask_mongodb()
            else:
                return document_ids if many else ()
        claimed = list[Any]()
        missed += singly(document_ids, lambda each: claimed.append(each) if claim_one(each) else None)
        if not claimed and any(error.timeout for _, error in missed):
            self._ask_mongodb()
        return claimed

    def _ask_mongodb(self) -> None:
        """Raise a PyMongoError if MongoDB answers nothing: else each document would be waited for."""
        with bounded():
            self._collection.database.command("ping")

    def _repair(self, document_id: object, events: object, owner: ObjectId) -> None:
        """Somebody else has written to the field: what is no list of entries is set aside, and the field goes."""
        error = ValueError(f"{self._field.name} says that entries wait, and there are none")
        if events is not None and events != []:
            with bounded_singly():
                self._dead_letters().add(document_id, {"events": events}, error)
        logger.error(
            "document %r: %s says that entries wait, and there are none; put right",
            document_id,
            self._field.name,
            extra={"event": "count_repaired"},
        )
        with bounded():
            self.removals.quick.update_one(*self._claims.discarded(document_id, owner))
