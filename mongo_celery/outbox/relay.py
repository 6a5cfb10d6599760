"""
Delivering what is pending in documents: claim them, publish in order, remove by id.

Any number of relays may work at once: the dispatcher in the writer's process, a bridge's handler, the sweep. A claim
keeps them from publishing the same entries side by side; it is not what order rests on. Order rests on this: a relay
publishes from the head of what it has read, and an entry is removed only by a relay that has published it. So
whatever stood before an entry has been published before it, also by a relay that was paused and woke up late; such a
relay costs duplicates, never an entry that overtakes its predecessor for the first time.

What is published was read by a majority, after a claim that a majority has: nothing of a write that a fail-over takes
back is ever published, with whatever concern it was written.

Where the broker takes several messages by one command, documents are published together. A command has one entry of a
document, and the entry behind it goes when the broker has that: of one command a broker may refuse a message and take
those behind it. What does not go so goes one by one.

`removals` has what follows, `commands` how long MongoDB is waited for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from bson import ObjectId
from celery.exceptions import SoftTimeLimitExceeded
from pymongo.collection import Collection
from pymongo.errors import PyMongoError

from mongo_celery.mongo.redaction import short
from mongo_celery.outbox.claims import PendingClaims, ServerClock, age_of
from mongo_celery.outbox.commands import (
    Failure,
    is_about_some,
    iterate_bounded,
    limit_command,
    limit_single_command,
    singly,
    tell_undeliverable,
)
from mongo_celery.outbox.dead_letters import OutboxDeadLetters
from mongo_celery.outbox.delivery import Counters, Delivery, HeldDocument
from mongo_celery.outbox.entries import Entry, read_entries
from mongo_celery.outbox.failures import FailureKind, FailurePolicy, FailureVerdict, attempts_of, entry_id_of
from mongo_celery.outbox.publisher import BatchAbandonedError, BrokerUnavailableError, Publisher, UnknownTaskError
from mongo_celery.outbox.removals import SETTLE_DOCUMENTS, SETTLE_SECONDS, Remainder, Removals
from mongo_celery.outbox.signing import EntrySigner, UnsignedEntryError

logger = logging.getLogger("mongo_celery.outbox")

TURNS_MAX = 20
"""After so many turns a delivery leaves the rest of a document, to which somebody may write all the time, to others."""

ENTRIES_MAX = 50
"""Entries of one document before the next has its turn."""

_MESSAGES_MAX = 100
_BYTES_MAX = 2**20
"""So much at most is published together, of whole documents."""

_OUTAGES_MAX = 3
"""So many documents in a row for which the broker did not answer, or that it has refused, end a delivery."""


@dataclass(slots=True)
class _Turn:
    """
    What one turn of a delivery holds, and has come to.

    Attributes:
        owner: of its claims.
        judge: whether failures are counted.
        begun: documents that are being published.
        published: those that are not removed yet.
        left: what its removals have left.
        total: the sum.
        settled_at: the monotonic clock when something was removed.
        outages: documents in a row for which the broker did not answer.
        refusals: documents in a row of which the broker took nothing.
    """

    owner: ObjectId
    judge: bool
    begun: list[HeldDocument] = field(default_factory=list)
    published: list[HeldDocument] = field(default_factory=list)
    left: Remainder = field(default_factory=Remainder)
    total: Delivery = field(default_factory=Delivery)
    settled_at: float = field(default_factory=time.monotonic)
    outages: int = 0
    refusals: int = 0

    @property
    def is_down(self) -> bool:
        """Return True if nothing more is to be published: the broker takes nothing."""
        return self.outages >= (_OUTAGES_MAX if self.judge else 1) or self.refusals >= _OUTAGES_MAX

    def end(self, held: HeldDocument) -> None:
        """Note a document of which nothing more is published in this turn."""
        self.begun.remove(held)
        self.published.append(held)
        self.total = self.total.and_(held.delivery)
        self.outages = self.outages + 1 if held.is_outage else 0
        self.refusals = self.refusals + 1 if held.is_refused else 0


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
        is_own: whether an emptied document is deleted.
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
        is_own: bool,
        policy: FailurePolicy,
        counters: Counters,
    ) -> None:
        self._collection = collection
        self._publisher = publisher
        self._dead_letters = dead_letters
        self._signer = signer
        self._claims = claims
        self._field = claims.field
        self._claim_ttl = claim_ttl
        self._policy = policy
        self._counters = counters
        self._clock = ServerClock(collection)
        self._late: list[HeldDocument] = []
        self._lock = threading.Lock()
        self.removals = Removals(collection, claims, self._clock, is_own=is_own)

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
        total, left, late = self._catch_up(), Remainder(list(document_ids)), list[HeldDocument]()
        for number in range(turns):
            turn = self._take_turn(left, older_than=None if number else older_than, judge=judge)
            total, left = total.and_(turn.total), turn.left
            late += [held for held, _ in left.failed]
            if total.broker_down or not left.document_ids:
                break
        if left.owners:
            self.removals.release(left.document_ids, left.owners)
        if not total.broker_down:
            total = total.and_(Delivery(left=len(left.document_ids), has_more=bool(left.document_ids)))
        self._keep_late(late)
        return total.and_(self._catch_up()) if late else total

    def _catch_up(self) -> Delivery:
        """
        Remove what was published, and could not be removed when that was tried.

        Who keeps a document closed to that keeps it closed to claims, too: in this process nothing is sent twice.
        """
        with self._lock:
            late, self._late = self._late, []
        total, left = Delivery(), Remainder()
        if not late:
            return total
        try:
            self.removals.settle(late, left)
            self.removals.release(left.document_ids, left.owners)
        except PyMongoError:
            self._keep_late(late)
            raise
        for held, error in left.failed:
            total = total.and_(self._report_missed(held.id, error))
        self._keep_late([held for held, error in left.failed if error.timeout])
        return total

    def _keep_late(self, held: Sequence[HeldDocument]) -> None:
        """Remove these with the next delivery; the threads of a process share a relay."""
        with self._lock:
            self._late = [*self._late, *held]

    def _report_missed(self, document_id: object, error: PyMongoError) -> Delivery:
        """MongoDB did not do for a document what it did for others."""
        tell_undeliverable(self._collection.full_name, document_id, error)
        refused = [] if error.timeout else [document_id]
        return Delivery(left=1, error=short(error), refused=refused, is_late=error.timeout)

    def _take_turn(self, before: Remainder, *, older_than: float | None, judge: bool) -> _Turn:
        """Claim some documents, and publish and remove the first entries of each."""
        turn, missed = _Turn(ObjectId(), judge), list[Failure]()
        try:
            claimed = self.claim(
                before.document_ids, older_than=older_than, held=before.owners, owner=turn.owner, missed=missed
            )
            for group in _group_documents(claimed):
                self._publish_all(group, turn)
                if turn.is_down:
                    break
            self._settle(turn)
        except BaseException as error:  # MongoDB, a time limit, or the end of the process
            if isinstance(error, PyMongoError):
                self._clock.forget()
            for held in turn.begun:
                held.stop()
            turn.published += [held for held in turn.begun if held.names]
            # Within the time of one command: claims lapse, and what was published is removed later.
            with suppress(PyMongoError), limit_command():
                self._settle(turn)
                self.removals.release(before.document_ids, [turn.owner, *before.owners])
            self._keep_late([*turn.published, *(held for held, _ in turn.left.failed)])
            raise
        if turn.is_down:
            self.removals.release(before.document_ids, [turn.owner, *before.owners])
            turn.left, turn.total = Remainder(failed=turn.left.failed), turn.total.and_(Delivery(broker_down=True))
        for document_id, failure in missed:
            turn.total = turn.total.and_(self._report_missed(document_id, failure))
        return turn

    def _settle(self, turn: _Turn) -> None:
        if turn.published:
            self.removals.settle(turn.published, turn.left)
        turn.published, turn.settled_at = [], time.monotonic()

    def _settle_some(self, turn: _Turn) -> None:
        """Remove what was published, if it is time or there is much of it."""
        is_time = time.monotonic() - turn.settled_at > SETTLE_SECONDS
        if is_time or len(turn.published) + len(turn.begun) > SETTLE_DOCUMENTS:
            self._settle(turn)

    def is_held(self, document_id: object) -> bool:
        """Return True if something is pending in a document and a relay holds it."""
        return self._collection.find_one({"_id": document_id, **self._claims.held()}, {"_id": 1}) is not None

    # -- claim -------------------------------------------------------------------------------------

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
        claimed = self._claim_some(document_ids, older_than, held, owner, missed_here)
        if missed is None and missed_here:
            raise missed_here[0][1]
        mine = {"_id": {"$in": claimed}, f"{self._field.claim}.owner": owner}
        shown = {self._field.count: 1, self._field.claim: 1, self._field.events: {"$slice": ENTRIES_MAX}}
        for document in iterate_bounded(self._collection.find(mine, shown)) if claimed else ():
            found = document[self._field.name]
            events = found.get("events")
            if isinstance(events, list) and events:
                entries = self._verify_entries(events)
                yield HeldDocument(
                    id=document["_id"], stored=found, entries=entries, owner=owner, claimed_at=claimed_at
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

    def _claim_some(
        self,
        document_ids: Sequence[Any],
        older_than: float | None,
        held: Sequence[ObjectId],
        owner: ObjectId,
        missed: list[Failure],
    ) -> Sequence[Any]:
        """Claim documents; of which the claims may be read."""
        claimable = self._claims.claimable(older_than, (*held, owner))  # what has no answer may have been done

        def claim_one(document_id: Any) -> bool:
            with limit_single_command():
                update = self._claims.build_claim(owner, self._clock.after(self._claim_ttl))
                result = self._collection.update_one({"_id": {"$eq": document_id}, **claimable}, update)
            return result.matched_count > 0

        if len(document_ids) > 1:
            try:
                with limit_command():
                    these = {"_id": {"$in": list(document_ids)}}
                    update = self._claims.build_claim(owner, self._clock.after(self._claim_ttl))
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
        with limit_command():
            self._collection.database.command("ping")

    def _repair(self, document_id: object, events: object, owner: ObjectId) -> None:
        """Somebody else has written to the field: what is no list of entries is set aside, and the field goes."""
        error = ValueError(f"{self._field.name} says that entries wait, and there are none")
        if events is not None and events != []:
            with limit_single_command():
                self._dead_letters().add(document_id, {"events": events}, error)
        logger.error(
            "document %r: %s says that entries wait, and there are none; put right",
            document_id,
            self._field.name,
            extra={"event": "count_repaired"},
        )
        with limit_command():
            self.removals.quick.update_one(*self._claims.build_discard(document_id, owner))

    def _verify_entries(self, stored: Sequence[Mapping[str, Any]]) -> Sequence[Entry | Mapping[str, Any]]:
        """
        Return stored entries; one that the outbox has not signed stays a mapping, and is not published.

        An entry of an app that this process does not deliver for stays that app's, which may have another key.
        """
        return read_entries(stored, lambda each: not self._publisher.delivers_for(each) or self._signer.is_signed(each))

    # -- publish -----------------------------------------------------------------------------------

    def _publish_all(self, group: Sequence[HeldDocument], turn: _Turn) -> None:
        """Publish documents: together, and what is left of them one by one."""
        turn.begun = list(group)
        self._settle_some(turn)
        outage = None
        if sum(len(held.entries) for held in group) > 1:
            outage = self._publish_together(turn)
        for held in [each for each in turn.begun if each.is_done]:
            turn.end(held)
        for held in list(turn.begun):
            if outage is not None:
                held.stop(outage.verdict, outage.error)
            else:
                self._settle_some(turn)
                self._publish_rest(held, turn.judge)
                outage = held if held.is_outage else None
            turn.end(held)

    def _publish_together(self, turn: _Turn) -> HeldDocument | None:
        """Publish what goes together; a document that is not done, if the broker does not answer."""
        going = list(turn.begun)
        try:
            with suppress(BatchAbandonedError), self._publisher.together() as send:
                while going:
                    self._settle_some(turn)
                    going = [each for each in going if self._collect(each)]
                    send()
                    self._counters.dispatched += len(going)
                    for each in going:
                        each.names.append(entry_id_of(each.next))
                        each.dispatched += 1
                    going = [each for each in going if not each.is_done]
        except BrokerUnavailableError as error:
            held = next(each for each in turn.begun if not each.is_done)
            held.stop(self._judge(held, held.next, error, judge=turn.judge), _text_of(error))
            return held
        return None

    def _collect(self, held: HeldDocument) -> bool:
        """Collect the next entry of a document; False if there is something the matter with it."""
        if attempts_of(held.next) or self._is_old(held):
            return False
        try:
            self._publish(held.next, held.id)
        except (BatchAbandonedError, BrokerUnavailableError, SoftTimeLimitExceeded):
            raise
        except Exception:  # noqa: BLE001 - whatever it is, it is met again when the entry goes by itself
            return False
        return True

    def _is_old(self, held: HeldDocument) -> bool:
        """Return True if a claim may be another's soon."""
        return time.monotonic() - held.claimed_at > self._claim_ttl / 2

    def _publish_rest(self, held: HeldDocument, judge: bool) -> None:
        """Publish the entries of a document one by one, up to one that cannot be."""
        knows = bool(self._publisher.app.finalized)  # type: ignore[attr-defined] # else it has not heard of its tasks yet
        while not held.is_done:
            if self._is_old(held):
                held.stop(is_expired=True)
                return
            entry = held.next
            try:
                self._publish(entry, held.id)
            except SoftTimeLimitExceeded:
                raise
            except Exception as error:  # noqa: BLE001 - whatever a serializer, a canvas or a broker raises
                judges = judge and (knows or not isinstance(error, UnknownTaskError))
                verdict = self._judge(held, entry, error, judge=judges)
                if verdict is None or verdict.kind is not FailureKind.DEAD_LETTER:
                    held.stop(verdict, _text_of(error))
                    return
                self._set_aside(held, entry, error)
            else:
                held.dispatched += 1
                self._counters.dispatched += 1
            held.names.append(entry_id_of(entry))

    def _publish(self, entry: Entry | Mapping[str, Any], document_id: object) -> None:
        """As `Publisher.publish`; an entry without a right signature is refused."""
        if not isinstance(entry, Entry):
            raise UnsignedEntryError(
                f"The outbox has not signed this entry: somebody else writes to {self._field.name}, its key was lost, "
                "or its writer has another option database. Its name and arguments may be false: the payload says "
                "what it would run."
            )
        self._publisher.publish(entry, document_id)

    def _set_aside(self, held: HeldDocument, entry: Entry | Mapping[str, Any], error: Exception) -> None:
        """Store a dead letter before its entry is removed. Entries without an id are removed together."""
        aside = [entry]
        if entry_id_of(entry) is None:
            aside = [] if None in held.names else self._nameless(held.id)
        for each in aside:
            self._dead_letters().add(held.id, each, error)
        held.dead += len(aside)
        self._counters.dead += len(aside)

    def _nameless(self, document_id: object) -> list[Entry | Mapping[str, Any]]:
        """Return all entries of a document that have no id."""
        with limit_command():
            document = self._collection.find_one({"_id": document_id}, {self._field.events: 1}) or {}
        stored = document.get(self._field.name)
        events = stored.get("events") if isinstance(stored, Mapping) else None
        return [each for each in self._verify_entries(events or []) if entry_id_of(each) is None]

    def _judge(
        self, held: HeldDocument, entry: Entry | Mapping[str, Any], error: Exception, *, judge: bool
    ) -> FailureVerdict | None:
        """Return what becomes of an entry; None where this process leaves that to another."""
        at = entry.at if isinstance(entry, Entry) else None
        verdict = self._policy.verdict(entry, error, age_of(held.stored, self._claim_ttl, at))
        if isinstance(error, UnsignedEntryError):  # any process can tell
            self._counters.unsigned += 1
        elif verdict.kind is not FailureKind.WAIT_FOR_BROKER and not judge:
            return None
        elif verdict.kind not in (FailureKind.OTHER_APP, FailureKind.WAIT_FOR_TASK):  # nobody's failures
            self._counters.failures += 1
        self._policy.tell(verdict, entry, held.id, error)
        return verdict


def _group_documents(documents: Iterable[HeldDocument]) -> Iterator[list[HeldDocument]]:
    """Documents as they come, in groups that are bounded in messages and bytes."""
    group, messages, size = list[HeldDocument](), 0, 0
    for held in documents:
        its_size = sum(_size_of(entry) for entry in held.entries)
        if group and (messages + len(held.entries) > _MESSAGES_MAX or size + its_size > _BYTES_MAX):
            yield group
            group, messages, size = [], 0, 0
        group.append(held)
        messages, size = messages + len(held.entries), size + its_size
    if group:
        yield group


def _size_of(entry: Entry | Mapping[str, Any]) -> int:
    payload: Any = entry.payload if isinstance(entry, Entry) else ""
    if isinstance(payload, str):
        return len(payload) if payload.isascii() else len(payload.encode(errors="surrogatepass"))
    return len(payload) if isinstance(payload, bytes) else 0  # other apps' entries are not verified here


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {short(error)}"
