"""
Delivering what is pending in documents: claim them, publish in order, remove by name.

Any number of relays may work at once: the dispatcher in the writer's process, a bridge's handler, the sweep. A claim
keeps them from publishing the same entries side by side; it is not what order rests on. Order rests on this: a relay
publishes from the head of what it has read, and an entry is removed only by a relay that has published it. So
whatever stood before an entry has been published before it, also by a relay that was paused and woke up late; such a
relay costs duplicates, never an entry that overtakes its predecessor for the first time.

What is published was acknowledged to its writer by a majority, or was read by a majority after a claim that a majority
has: nothing of a write that a fail-over takes back is ever published, with whatever concern it was written. Removals
do not wait for a majority: a fail-over that takes them back costs duplicates.

Removals go in bulk, and so they are late: at most by `SETTLE_SECONDS`, or by `SETTLE_DOCUMENTS`. What a document has
got meanwhile is found by that, and delivered in a turn of its own: one that somebody writes to all the time keeps
nobody else waiting.

No command waits long. A document that somebody's transaction has written to is closed to others until that ends, which
may take a minute; so what was not answered in time, or was refused, is done again document by document, and only the
document that it is about has to wait.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pymongo
from bson import ObjectId
from celery.exceptions import SoftTimeLimitExceeded
from pymongo import UpdateOne, WriteConcern
from pymongo.collection import Collection
from pymongo.errors import OperationFailure, PyMongoError
from pymongo.read_concern import ReadConcern

from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.verdicts import is_transient
from mongo_celery.outbox.claims import PendingClaims, age_of
from mongo_celery.outbox.dead_letters import OutboxDeadLetters
from mongo_celery.outbox.entries import Entry, entries_of
from mongo_celery.outbox.failures import FailureKind, FailurePolicy, FailureVerdict, entry_id_of
from mongo_celery.outbox.publisher import Publisher, UnknownTaskError

logger = logging.getLogger("mongo_celery.outbox")

SETTLE_SECONDS = 0.1
"""How long an entry that was published may still be pending: a crash repeats at most what was published meanwhile."""

SETTLE_DOCUMENTS = 100
"""How many documents may have entries that were published and are still pending."""

_ENTRIES = 50
"""Entries of one document before the next has its turn."""

_TURNS_MAX = 20
"""After so many turns a delivery leaves the rest of a document, to which somebody may write all the time, to others."""

COMMAND_SECONDS = 1.0
"""How long one command may take; somebody's transaction may keep a document closed for a minute."""

_SINGLE_SECONDS = 2.5
"""How long a majority may take for one document; what a command for many does not wait for, goes on slowly so."""

_OVERDUE_MAX = 3
"""So many documents in a row that are not answered in time are not looked at singly any further."""

_OUTAGES_MAX = 3
"""So many documents in a row for which the broker did not answer end a delivery."""


_Thing = TypeVar("_Thing")
Failure = tuple[Any, PyMongoError]
"""A document's `_id`, and why MongoDB did not do what was asked for it."""


@dataclass(slots=True)
class Counters:
    """
    Counts of one process since it started; racing threads may lose a count.

    Attributes:
        dispatched: entries published.
        failures: publishes that failed, broker outages included.
        dead: entries set aside as dead letters.
    """

    dispatched: int = 0
    failures: int = 0
    dead: int = 0


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
    """

    dispatched: int = 0
    dead: int = 0
    left: int = 0
    broker_down: bool = False
    error: str | None = None

    def and_(self, other: Delivery) -> Delivery:
        """The sum of both."""
        return Delivery(
            self.dispatched + other.dispatched,
            self.dead + other.dead,
            self.left + other.left,
            self.broker_down or other.broker_down,
            other.error or self.error,
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
    def delivery(self) -> Delivery:
        """As a sum of one."""
        left = self.left if self.lets_go and not self.ran_out else 0
        return Delivery(self.dispatched, self.dead, left, self.is_outage, self.error)


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


class Relay:
    """
    Delivers the entries of one collection.

    Args:
        collection: opened with majority writes and reads.
        publisher: to the broker.
        dead_letters: gives the store for what cannot be published.
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
        claims: PendingClaims,
        claim_ttl: float,
        policy: FailurePolicy,
        counters: Counters,
    ) -> None:
        self._collection = collection
        self._quick = collection.with_options(write_concern=WriteConcern(1), read_concern=ReadConcern("local"))
        self._publisher = publisher
        self._dead_letters = dead_letters
        self._claims = claims
        self._field = claims.field
        self._claim_ttl = claim_ttl
        self._policy = policy
        self._counters = counters

    # -- whole deliveries --------------------------------------------------------------------------

    def deliver(self, document_id: object, *, older_than: float | None = None, judge: bool = True) -> Delivery:
        """As `deliver_all`, of one document."""
        return self.deliver_all([document_id], older_than=older_than, judge=judge)

    def deliver_all(
        self, document_ids: Sequence[object], *, older_than: float | None = None, judge: bool = True
    ) -> Delivery:
        """
        Claim documents and deliver what is pending in them, in turns.

        Args:
            document_ids: their `_id`s.
            older_than: only those whose oldest entry has waited so many seconds.
            judge: whether an entry that cannot be published counts an attempt; a writer, which need not know
                all tasks, leaves that to a process that does.

        Returns:
            What was done; nothing of a document that another relay holds, that is held back, in which nothing is
            pending, or whose next entry belongs to another app.

        Raises:
            SoftTimeLimitExceeded: of the task that delivers; every claim was let go.
            PyMongoError: MongoDB did not answer; claims lapse by themselves.
        """
        total, looks, late = Delivery(), Remainder(document_ids), list[PublishedPart]()
        for turn in range(_TURNS_MAX):
            done, looks = self._turn(looks, older_than=None if turn else older_than, judge=judge)
            total = total.and_(done)
            late += [part for part, _ in looks.failed]
            if total.broker_down or not looks.document_ids:
                break
        if looks.owners:
            self.release(looks.document_ids, looks.owners)
        if not total.broker_down:
            total = total.and_(Delivery(left=len(looks.document_ids)))
        for part, error in self.settle(late).failed:  # once more, after all others
            total = total.and_(Delivery(left=1, error=short(error)))
            tell_undeliverable(self._collection.full_name, part.held.document_id, error)
        return total

    def _turn(self, looks: Remainder, *, older_than: float | None, judge: bool) -> tuple[Delivery, Remainder]:
        """Claim some documents and publish the first entries of each; what was done, and where something is left."""
        total, left, unsettled = Delivery(), Remainder(), list[PublishedPart]()
        owner, outages, began, missed = ObjectId(), 0, time.monotonic(), list[Failure]()
        try:
            for held in self.claim(
                looks.document_ids, older_than=older_than, held=looks.owners, owner=owner, missed=missed
            ):
                part = self.publish(held, judge=judge)
                unsettled.append(part)
                if part.ran_out:  # it is free then, to be claimed anew
                    left = left.and_(Remainder([held.document_id]))
                total = total.and_(part.delivery)
                outages = outages + 1 if part.is_outage else 0
                if outages >= _OUTAGES_MAX:
                    break
                if len(unsettled) >= SETTLE_DOCUMENTS or time.monotonic() - began > SETTLE_SECONDS:
                    left, unsettled, began = left.and_(self.settle(unsettled)), [], time.monotonic()
            left = left.and_(self.settle(unsettled))
        except BaseException:  # a time limit, or the end of the process
            with suppress(PyMongoError):
                self.settle(unsettled)
                self.release(looks.document_ids, [owner, *looks.owners])
            raise
        if outages >= _OUTAGES_MAX:
            self.release(looks.document_ids, [owner, *looks.owners])
            left = Remainder(failed=left.failed)
        for document_id, error in missed:
            total = total.and_(Delivery(left=1, error=short(error)))
            tell_undeliverable(self._collection.full_name, document_id, error)
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
        shown = {self._field.count: 1, self._field.claim: 1, self._field.events: {"$slice": _ENTRIES}}
        for document in _each(self._collection.find(mine, shown)) if claimed else ():
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
                if missed is None or not _is_about_some(error):
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
            with pymongo.timeout(max(COMMAND_SECONDS, _SINGLE_SECONDS)):
                result = self._collection.update_one({"_id": {"$eq": document_id}, **claimable}, update)
            return result.matched_count > 0

        if len(document_ids) > 1:
            try:
                with pymongo.timeout(COMMAND_SECONDS):
                    these = {"_id": {"$in": list(document_ids)}}
                    many = self._collection.update_many({**these, **claimable}, update).matched_count
            except PyMongoError as error:
                if not _is_about_some(error):
                    raise
            else:
                return document_ids if many else ()
        claimed = list[Any]()
        missed += _singly(document_ids, lambda each: claimed.append(each) if claim_one(each) else None)
        return claimed

    def publish(self, held: HeldDocument, *, judge: bool) -> PublishedPart:
        """
        Publish the first entries of a document, in order, up to one that cannot be.

        Raises:
            SoftTimeLimitExceeded: what was published before is removed, and the document let go.
        """
        names: list[Any] = []
        dispatched = dead = 0
        knows = bool(self._publisher.app.finalized)  # type: ignore[attr-defined] # else it has not heard of its tasks yet
        everything = entries_of(held.events)
        for entry in everything[:_ENTRIES]:
            if time.monotonic() - held.claimed_at > self._claim_ttl / 2:  # it may be another's soon
                return PublishedPart(
                    held=held, names=names, dispatched=dispatched, dead=dead, lets_go=True, ran_out=True
                )
            try:
                self._publish(entry, held.document_id)
            except SoftTimeLimitExceeded:
                with suppress(PyMongoError):
                    self.settle([PublishedPart(held=held, names=names, dispatched=dispatched, lets_go=True)])
                raise
            except Exception as error:  # noqa: BLE001 - whatever a serializer, a canvas or a broker raises
                judges = judge and (knows or not isinstance(error, UnknownTaskError))
                verdict = self._judged(held, entry, error, judge=judges)
                if verdict is None or verdict.kind is not FailureKind.DEAD_LETTER:
                    return PublishedPart(
                        held=held, names=names, dispatched=dispatched, dead=dead, verdict=verdict, lets_go=True,
                        error=f"{type(error).__name__}: {short(error)}",
                        failed=entry_id_of(entry) if verdict is not None and verdict.counts else None,
                    )  # fmt: skip
                aside = [entry]
                if entry_id_of(entry) is None:  # they are removed together
                    aside = [] if None in names else self._nameless(held.document_id)
                for each in aside:
                    self._dead_letters().add(held.document_id, each, error)  # before it is removed: it may be repeated
                dead += len(aside)
                self._counters.dead += len(aside)
                names.append(entry_id_of(entry))
                continue
            names.append(entry_id_of(entry))
            dispatched += 1
            self._counters.dispatched += 1
        return PublishedPart(held=held, names=names, dispatched=dispatched, dead=dead)

    def _nameless(self, document_id: object) -> list[Entry | Mapping[str, Any]]:
        """All entries of a document that have no id."""
        document = self._collection.find_one({"_id": document_id}, {self._field.events: 1}) or {}
        stored = document.get(self._field.name)
        events = stored.get("events") if isinstance(stored, Mapping) else None
        return [each for each in entries_of(events or []) if entry_id_of(each) is None]

    def _publish(self, entry: Entry | Mapping[str, Any], document_id: object) -> None:
        if not isinstance(entry, Entry):
            raise ValueError(f"the entry cannot be read: somebody else has written to {self._field.name}")  # noqa: TRY004
        self._publisher.publish(entry, document_id)

    def _judged(
        self, held: HeldDocument, entry: Entry | Mapping[str, Any], error: Exception, *, judge: bool
    ) -> FailureVerdict | None:
        """What becomes of an entry; None where this process leaves that to another."""
        at = entry.at if isinstance(entry, Entry) else entry.get("at")
        verdict = self._policy.verdict(entry, error, age_of(held.field, at))
        if verdict.kind is not FailureKind.WAIT_FOR_BROKER and not judge:
            return None
        if verdict.kind not in (FailureKind.OTHER_APP, FailureKind.WAIT_FOR_TASK):  # nobody's failures
            self._counters.failures += 1
        self._policy.tell(verdict, entry, held.document_id, error)
        return verdict

    def settle(self, parts: Sequence[PublishedPart]) -> Remainder:
        """
        Remove what was published, and let go what cannot go on.

        Returns:
            Documents in which something is left that this process still holds, and what could not be removed.

        Raises:
            PyMongoError: MongoDB did not answer; anything of it may have been done, and all may be done again.
        """
        if not parts:
            return Remainder()
        try:
            return self._settle(parts)
        except PyMongoError as error:
            if not _is_about_some(error):
                raise
            if len(parts) == 1:
                return Remainder(failed=[(parts[0], error)])
        total = Remainder()

        def settle_one(part: PublishedPart) -> None:
            nonlocal total
            total = total.and_(self._settle([part]))

        return Remainder(failed=_singly(parts, settle_one)).and_(total)

    def _settle(self, parts: Sequence[PublishedPart]) -> Remainder:
        whole = [part for part in parts if part.is_whole]
        others = [part for part in parts if part.names and not part.is_whole]
        if whole:
            updates = [UpdateOne(*self._claims.emptied(part.held.document_id, part.names)) for part in whole]
            with pymongo.timeout(COMMAND_SECONDS):
                emptied = self._quick.bulk_write(updates, ordered=False).matched_count
            if emptied < len(whole):
                others += whole
        remainder = self._remove(others) if others else Remainder()
        for part in parts:
            if part.lets_go:
                pause = part.verdict.pause if part.verdict is not None else 0.0
                self.release([part.held.document_id], [part.held.owner], pause, part.failed)
        return remainder

    def _remove(self, parts: Sequence[PublishedPart]) -> Remainder:
        ids = [part.held.document_id for part in parts]
        removals = [
            UpdateOne(*self._claims.removed(part.held.document_id, part.names, part.held.owner, self._claim_ttl))
            for part in parts  # each for itself: entries of one name may lie in many documents
        ]
        with pymongo.timeout(COMMAND_SECONDS):
            self._quick.bulk_write(removals, ordered=False)
            found = list(self._quick.find({"_id": {"$in": ids}}, {f"{self._field.claim}.owner": 1}))
        for gone in [] if len(found) == len(ids) else [each for each in ids if not _is_among(each, found)]:
            logger.warning(
                "document %r was deleted while its entries were delivered", gone, extra={"event": "document_deleted"}
            )
        going_on = [part.held.owner for part in parts if not part.lets_go]
        left = [document["_id"] for document in found if self._owner_in(document) in going_on]
        return Remainder(left, going_on if left else ())

    def _owner_in(self, document: Mapping[str, Any]) -> Any:
        stored = document.get(self._field.name)
        claim = stored.get("claim") if isinstance(stored, Mapping) else None
        return claim.get("owner") if isinstance(claim, Mapping) else None

    def release(
        self,
        document_ids: Sequence[object],
        owners: Sequence[ObjectId],
        pause: float = 0.0,
        failed: object = None,
    ) -> None:
        """
        Let claims go that are still these owners', and hold their documents back for a while.

        A claim that cannot be let go lapses.

        Raises:
            PyMongoError: MongoDB did not answer.
        """

        def let_go(these: Sequence[object]) -> None:
            with pymongo.timeout(COMMAND_SECONDS):
                self._quick.update_many(*self._claims.released(these, owners, pause, failed))

        if not document_ids or not owners:
            return
        try:
            let_go(document_ids)
        except PyMongoError as error:
            if not _is_about_some(error):
                raise
            if len(document_ids) > 1:
                _singly(document_ids, lambda each: let_go([each]))

    def _repair(self, document_id: object, events: object, owner: ObjectId) -> None:
        """Somebody else has written to the field: what is no list of entries is set aside, and the field goes."""
        error = ValueError(f"{self._field.name} says that entries wait, and there are none")
        if events is not None and events != []:
            with pymongo.timeout(max(COMMAND_SECONDS, _SINGLE_SECONDS)):
                self._dead_letters().add(document_id, {"events": events}, error)
        logger.error(
            "document %r: %s says that entries wait, and there are none; put right",
            document_id,
            self._field.name,
            extra={"event": "count_repaired"},
        )
        with pymongo.timeout(COMMAND_SECONDS):
            self._quick.update_one(*self._claims.discarded(document_id, owner))


def tell_undeliverable(outbox: str, document_id: object, error: BaseException) -> None:
    """Log that a document cannot be delivered, while others can."""
    logger.error(
        "outbox %s: document %r cannot be delivered: %s",
        outbox,
        document_id,
        short(error),
        extra={"event": "document_undeliverable"},
    )


def _is_about_some(error: PyMongoError) -> bool:
    """Whether a command for many documents may have failed for a few of them, so that the others can be done."""
    return error.timeout or (isinstance(error, OperationFailure) and not is_transient(error))


def _singly(things: Sequence[_Thing], call: Callable[[_Thing], object]) -> list[tuple[_Thing, PyMongoError]]:
    """
    Do for each thing what could not be done for all together.

    Returns:
        Those for which it failed, or was not tried since too many before it were overdue.

    Raises:
        PyMongoError: MongoDB does not answer at all.
    """
    failed = list[tuple[_Thing, PyMongoError]]()
    overdue = 0
    for place, thing in enumerate(things):
        try:
            call(thing)
        except PyMongoError as error:
            if not _is_about_some(error):
                raise
            failed.append((thing, error))
            overdue = overdue + 1 if error.timeout else 0
            if overdue == _OVERDUE_MAX:
                if len(failed) == place + 1:
                    raise
                return [*((each, error) for each in things[place + 1 :]), *failed]  # those first, the next time
        else:
            overdue = 0
    return failed


def _each(documents: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """What a cursor gives, each answer within the time of a command."""
    rest = iter(documents)
    while True:
        with pymongo.timeout(COMMAND_SECONDS):
            document = next(rest, None)
        if document is None:
            return
        yield document


def _is_among(document_id: object, documents: Sequence[Mapping[str, Any]]) -> bool:
    return any(document["_id"] == document_id for document in documents)
