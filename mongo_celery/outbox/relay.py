"""
Delivering pending entries: claim documents, publish in order, remove by id.

Any number of relays may work concurrently: the dispatcher in the writer's process, a bridge's handler, the sweep. A
claim keeps them from publishing the same entries concurrently. Order does not depend on it. A relay publishes from the
head of its read entries, and only the relay that published an entry removes it. So everything before an entry was
published before it, even by a relay that paused and woke up late. Such a relay causes duplicates, but no entry
overtakes its predecessor for the first time.

A relay publishes entries from a majority read, after a claim that a majority has. So it never publishes a write that a
fail-over could take back.

If the broker accepts several messages in one command, documents are published together. A command has one entry per
document, and the next entry follows when the broker has the first one: a broker may refuse one message of a command and
accept later ones. The rest goes one by one.

`removals` has the second half, and `commands` the time limits of MongoDB.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from bson import ObjectId
from celery.exceptions import SoftTimeLimitExceeded
from pymongo.collection import Collection
from pymongo.errors import PyMongoError

from mongo_celery.mongo.redaction import short
from mongo_celery.outbox.claims import ServerClock, build_discard, claimable, match_held
from mongo_celery.outbox.commands import (
    Failure,
    do_each,
    is_about_some,
    iterate_bounded,
    limit_command,
    limit_single_command,
    log_undeliverable,
)
from mongo_celery.outbox.dead_letters import OutboxDeadLetters
from mongo_celery.outbox.delivery import Counters, Delivery, HeldDocument
from mongo_celery.outbox.entries import Entry, StoredEntry, entry_id, read_attempts, read_entries
from mongo_celery.outbox.failures import FailureKind, FailurePolicy, FailureVerdict
from mongo_celery.outbox.options import OutboxOptions
from mongo_celery.outbox.origin import EntryOrigin
from mongo_celery.outbox.pending import CLAIM, COUNT, EVENTS, FIELD
from mongo_celery.outbox.publisher import BatchAbandonedError, BrokerUnavailableError, Publisher
from mongo_celery.outbox.removals import Remainder, Removals
from mongo_celery.outbox.signing import EntrySigner, UnsignedEntryError

logger = logging.getLogger("mongo_celery.outbox")

_TURNS_MAX = 20
"""After this many turns a delivery leaves the rest of a document, which may be written continuously, to others."""

ENTRIES_MAX = 50
"""Largest number of entries of one document before the next one's turn."""

_GROUP_BYTES_MAX = 2**20
"""Documents up to this many bytes of entries are published and removed together."""

_GROUP_ENTRIES_MAX = 200
"""Documents up to this many entries are published and removed together, and a crash repeats at most these."""

_REFUSALS_MAX = 3
"""After this many documents in a row of which the broker accepts nothing, a delivery ends."""


@dataclass(slots=True)
class _Turn:
    """
    One turn of a delivery.

    Attributes:
        owner: the owner of the turn's claims.
        group: documents in publishing and removal.
        left: the rest of its removals.
        missed: documents that MongoDB did not claim or repair, although it did others.
        total: the total result.
        refusals: number of documents in a row of which the broker accepted nothing.
        is_down: True if the broker accepts nothing, so that publishing ends.
    """

    owner: ObjectId = field(default_factory=ObjectId)
    group: Sequence[HeldDocument] = ()
    left: Remainder = field(default_factory=Remainder)
    missed: list[Failure] = field(default_factory=list)
    total: Delivery = field(default_factory=Delivery)
    refusals: int = 0
    is_down: bool = False

    def note(self, held: HeldDocument) -> None:
        """Record that a document is finished in this turn."""
        self.total = self.total.and_(held.delivery)
        self.refusals = self.refusals + 1 if held.is_refused else 0
        self.is_down = self.is_down or held.is_outage or self.refusals >= _REFUSALS_MAX


@dataclass(kw_only=True, eq=False)
class Relay:
    """
    Delivers the entries of one collection.

    Args:
        collection: the collection of the outbox, with plain dicts.
        options: the options of the outbox.
        counters: the counters of the outbox.
        publisher: publishes entries.
        signer: verifies entries.
        origin: refuses entries that this app must not publish.
        dead_letters: stores entries that cannot be published.
        is_own: True if empty documents are deleted.
    """

    collection: Collection[dict[str, Any]]
    options: OutboxOptions
    counters: Counters
    publisher: Publisher
    signer: EntrySigner
    origin: EntryOrigin
    dead_letters: OutboxDeadLetters
    is_own: bool

    def __post_init__(self) -> None:
        self._policy = FailurePolicy(self.options.failure_policy, self.options.max_attempts)
        self._clock = ServerClock(self.collection)
        self._late: list[HeldDocument] = []
        self._lock = threading.Lock()
        self.removals = Removals(self.collection, self._clock, is_own=self.is_own)

    # -- whole deliveries --------------------------------------------------------------------------

    def deliver(self, document_id: object) -> Delivery:
        """Deliver a document's pending entries, in turns."""
        total = self.deliver_all([document_id])
        for _ in range(_TURNS_MAX - 1):
            if not total.more:
                break
            total = total.and_(self.deliver_all([document_id]))
        return total.and_(Delivery(left=len(total.more)))

    def deliver_all(self, document_ids: Sequence[object]) -> Delivery:
        """
        Claim documents, then publish and remove the first entries of each.

        Args:
            document_ids: `_id`s of the documents.

        Returns:
            The total. Documents are skipped if another relay holds them, they are held back, or nothing is pending.
            Those with more entries are released.

        Raises:
            SoftTimeLimitExceeded: from the delivering task. Every claim was released.
            PyMongoError: MongoDB did not answer. Claims lapse.
        """
        total, turn = self._remove_late(), _Turn()
        try:
            for group in _group_documents(self._claim(document_ids, turn)):
                turn.group = group
                self._publish_all(turn)
                self.removals.settle(group, turn.left)
                turn.group = ()
                if turn.is_down:
                    break
        except BaseException as error:  # MongoDB, a time limit, or the end of the process
            if isinstance(error, PyMongoError):
                self._clock.forget()
            for held in turn.group:
                if not (held.is_done or held.is_stopped):
                    held.stop()
            # Within one command's time: claims lapse, and published entries are removed later.
            with suppress(PyMongoError), limit_command():
                self.removals.settle(turn.group, turn.left)
                turn.group = ()
                self.removals.release(document_ids, [turn.owner])
            self._keep_late([*turn.group, *(held for held, _ in turn.left.failed)])
            raise
        self._keep_late([held for held, _ in turn.left.failed])
        more = () if turn.is_down else turn.left.more
        total = total.and_(turn.total)
        for document_id, failure in turn.missed:
            total = total.and_(self._report_missed(document_id, failure))
        self.removals.release(document_ids if turn.is_down else more, [turn.owner])
        if turn.left.failed:  # once more, after the others
            total = total.and_(self._remove_late())
        return total.and_(Delivery(more=more, broker_down=turn.is_down))

    def _remove_late(self) -> Delivery:
        """
        Remove published entries whose earlier removal failed.

        A document that is closed to this is also closed to claims, so this process sends nothing twice.
        """
        with self._lock:
            late, self._late = self._late, []
        total, left = Delivery(), Remainder()
        if not late:
            return total
        try:
            self.removals.settle(late, left)
            self.removals.release(left.more, [each.owner for each in late])
        except PyMongoError:
            self._keep_late(late)
            raise
        self._keep_late([held for held, error in left.failed if error.timeout])
        for held, error in left.failed:
            total = total.and_(self._report_missed(held.id, error))
        return total

    def _keep_late(self, held: Sequence[HeldDocument]) -> None:
        """Remove these entries in the next delivery. The threads of a process share a relay."""
        with self._lock:
            self._late = [*self._late, *held]

    def _report_missed(self, document_id: object, error: PyMongoError) -> Delivery:
        """Report that MongoDB failed for one document but not for others."""
        log_undeliverable(self.collection.full_name, document_id, error)
        return Delivery(left=1, error=short(error), is_late=error.timeout, is_refused=not error.timeout)

    def is_held(self, document_id: object) -> bool:
        """Return True if a document has pending entries and a relay holds it."""
        return self.collection.find_one({"_id": document_id, **match_held()}, {"_id": 1}) is not None

    # -- claim -------------------------------------------------------------------------------------

    def _claim(self, document_ids: Sequence[object], turn: _Turn) -> Iterator[HeldDocument]:
        """
        Claim the available ones of some documents with one majority write, then read them with majority.

        Raises:
            PyMongoError: MongoDB did not answer.
        """
        claimed_at, owner = time.monotonic(), turn.owner
        claimed = self._claim_some(document_ids, owner, turn.missed) if document_ids else ()
        mine = {"_id": {"$in": claimed}, f"{CLAIM}.owner": owner}
        shown = {COUNT: 1, CLAIM: 1, EVENTS: {"$slice": ENTRIES_MAX}}
        for document in iterate_bounded(self.collection.find(mine, shown)) if claimed else ():
            count, events = document[FIELD].get("count"), document[FIELD].get("events")
            if isinstance(events, list) and events:
                yield HeldDocument(
                    id=document["_id"],
                    count=count if isinstance(count, int) else 0,
                    entries=read_entries(events, self.signer.is_signed),
                    owner=owner,
                    claimed_at=claimed_at,
                )
                continue
            try:
                self._repair(document["_id"], events, owner)
            except PyMongoError as error:
                if not is_about_some(error):
                    raise
                turn.missed.append((document["_id"], error))

    def _claim_some(self, document_ids: Sequence[Any], owner: ObjectId, missed: list[Failure]) -> Sequence[Any]:
        """Claim documents, and return those whose claims may be read."""
        free = claimable(held=owner)  # a claim without an answer may have been made

        def build_update() -> dict[str, Any]:
            return {"$set": {CLAIM: {"owner": owner, "until": self._clock.after(self.options.claim_ttl)}}}

        def claim_one(document_id: Any) -> None:
            with limit_single_command():
                where = {"_id": {"$eq": document_id}, **free}
                if self.collection.update_one(where, build_update()).matched_count:
                    claimed.append(document_id)

        if len(document_ids) > 1:
            try:
                with limit_command():
                    these = {"_id": {"$in": list(document_ids)}}
                    many = self.collection.update_many({**these, **free}, build_update()).matched_count
            except PyMongoError as error:
                if not is_about_some(error):
                    raise
                self._ask_mongodb()
            else:
                return document_ids if many else ()
        claimed = list[Any]()
        missed += do_each(document_ids, claim_one)
        if not claimed and any(error.timeout for _, error in missed):
            self._ask_mongodb()
        return claimed

    def _ask_mongodb(self) -> None:
        """Raise a PyMongoError if MongoDB does not answer at all. Otherwise the relay would wait for each document."""
        with limit_command():
            self.collection.database.command("ping")

    def _repair(self, document_id: object, events: object, owner: ObjectId) -> None:
        """
        Make a dead letter of a field that is not a list of entries, and remove it. Another program has
        written it.
        """
        error = ValueError(f"{FIELD} counts pending entries, but holds none")
        if events is not None and events != []:
            with limit_single_command():
                self.dead_letters.add(document_id, {"events": events}, error)
        logger.error(
            "Document %r: %s counted pending entries, but held none. The field was removed. Find the program "
            "that writes to it",
            document_id,
            FIELD,
            extra={"event": "count_repaired"},
        )
        with limit_command():
            self.removals.quick.update_one(*build_discard(document_id, owner))

    # -- publish -----------------------------------------------------------------------------------

    def _publish_all(self, turn: _Turn) -> None:
        """Publish the documents of a group together, then the rest one by one."""
        outage = None
        if sum(len(held.entries) for held in turn.group) > 1:
            outage = self._publish_together(turn.group)
        for held in turn.group:
            if outage is not None and not held.is_done:
                held.stop(outage.verdict, outage.error)
            elif not held.is_done:
                self._publish_rest(held)
                outage = held if held.is_outage else None
            turn.note(held)

    def _publish_together(self, group: Sequence[HeldDocument]) -> HeldDocument | None:
        """Publish together as far as possible. Return an unfinished document if the broker does not answer."""
        going = list(group)
        try:
            with suppress(BatchAbandonedError), self.publisher.together() as send:
                while going:
                    going = [each for each in going if self._collect(each)]
                    send()
                    self.counters.dispatched += len(going)
                    for each in going:
                        each.names.append(entry_id(each.next))
                        each.dispatched += 1
                    going = [each for each in going if not each.is_done]
        except BrokerUnavailableError as error:
            held = next(each for each in group if not each.is_done)
            held.stop(self._judge(held, held.next, error), _describe(error))
            return held
        return None

    def _collect(self, held: HeldDocument) -> bool:
        """Collect a document's next entry. Return False if it must go alone."""
        if read_attempts(held.next) or self._is_old(held):
            return False
        try:
            self._publish(held.next, held.id)
        except (BatchAbandonedError, BrokerUnavailableError, SoftTimeLimitExceeded):
            raise
        except Exception:  # noqa: BLE001 - whatever it is, it is met again when the entry goes by itself
            return False
        return True

    def _is_old(self, held: HeldDocument) -> bool:
        """Return True if another relay may soon take over a claim."""
        return time.monotonic() - held.claimed_at > self.options.claim_ttl / 2

    def _publish_rest(self, held: HeldDocument) -> None:
        """Publish a document's entries one by one, up to the first failure."""
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
                verdict = self._judge(held, entry, error)
                if verdict.kind is not FailureKind.DEAD_LETTER:
                    held.stop(verdict, _describe(error))
                    return
                self._set_aside(held, entry, error)
            else:
                held.dispatched += 1
                self.counters.dispatched += 1
            held.names.append(entry_id(entry))

    def _publish(self, entry: StoredEntry, document_id: object) -> None:
        """Publish like `Publisher.publish`. Refuse an entry without a valid signature, or for another broker."""
        if not isinstance(entry, Entry):
            raise UnsignedEntryError(
                f"The outbox has not signed this entry. Another program writes to {FIELD}, the signing key was "
                "lost, or the writer sets another `database`. Its name and arguments may be false. The "
                "payload shows what it would run."
            )
        self.origin.check(entry)
        self.publisher.publish(entry, document_id, self.options.exchange)

    def _set_aside(self, held: HeldDocument, entry: StoredEntry, error: Exception) -> None:
        """Store a dead letter before removing its entry. Entries without an id are removed together."""
        aside = [entry]
        if entry_id(entry) is None:
            aside = [] if None in held.names else self._read_nameless(held.id)
        for each in aside:
            self.dead_letters.add(held.id, each, error)
        held.dead += len(aside)

    def _read_nameless(self, document_id: object) -> list[StoredEntry]:
        """Return all entries of a document without an id."""
        with limit_command():
            document = self.collection.find_one({"_id": document_id}, {EVENTS: 1}) or {}
        stored = document.get(FIELD)
        events = stored.get("events") if isinstance(stored, Mapping) else None
        return [each for each in read_entries(events or [], self.signer.is_signed) if entry_id(each) is None]

    def _judge(self, held: HeldDocument, entry: StoredEntry, error: Exception) -> FailureVerdict:
        """Return an entry's verdict, count it and log it."""
        verdict = self._policy.judge(entry, error)
        if isinstance(error, UnsignedEntryError):
            self.counters.unsigned += 1
        elif verdict.kind is not FailureKind.OTHER_PROCESS:
            self.counters.failures += 1
        self._policy.log(verdict, entry, held.id, error)
        return verdict


def _group_documents(documents: Iterable[HeldDocument]) -> Iterator[list[HeldDocument]]:
    """Return documents in order, in groups with limited entries and bytes."""
    group, size, count = list[HeldDocument](), 0, 0
    for held in documents:
        its_size = sum(len(entry.payload) for entry in held.entries if isinstance(entry, Entry))
        size, count = size + its_size, count + len(held.entries)
        if group and (size > _GROUP_BYTES_MAX or count > _GROUP_ENTRIES_MAX):
            yield group
            group, size, count = [], its_size, len(held.entries)
        group.append(held)
    if group:
        yield group


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {short(error)}"
