"""
Delivering parcels: claim the heads of some keys, publish what is behind them in order, remove it with the heads last.

Order rests on the same as in documents: a relay publishes from the head of what it has read by majority, and removes
only what it has published. So whatever stood before a parcel has been published before it, also by a relay that was
paused and woke up late.

What is read is one snapshot: where a parcel can be seen, so can all that were committed before it. A plain majority
read may move on to a later snapshot in the middle, and would find a parcel without its predecessor.

The claim of a key's head stands for the parcels behind it, up to one that somebody else holds or that is held back.
The heads are removed last: as long as one is there, no other relay takes a later parcel for the head. What is no head,
or has nothing behind it, is removed every `SETTLE_SECONDS`, so that a crash repeats little.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pymongo
from bson import ObjectId
from celery.exceptions import SoftTimeLimitExceeded
from pymongo import DeleteMany, UpdateMany, UpdateOne
from pymongo.read_concern import ReadConcern

from mongo_celery.mongo.opening import ANSWER_SECONDS
from mongo_celery.mongo.redaction import short
from mongo_celery.outbox.commands import each_of
from mongo_celery.outbox.dead_letters import OutboxDeadLetters
from mongo_celery.outbox.delivery import Counters, Delivery, HeldDocument
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.failures import FailureKind, FailurePolicy, entry_id_of
from mongo_celery.outbox.parcel_store import ParcelStore
from mongo_celery.outbox.parcels import FIELD_OF_PARCELS, ORDER, head_of
from mongo_celery.outbox.publisher import Publisher
from mongo_celery.outbox.relay import Relay
from mongo_celery.outbox.removals import SETTLE_SECONDS
from mongo_celery.outbox.signing import EntrySigner

logger = logging.getLogger("mongo_celery.outbox")

Document = dict[str, Any]

HEADS_MAX = 100
"""So many keys are claimed at a time."""

PARCELS_MAX = 100
"""So many parcels with a key are read at a time."""

_ROUNDS_MAX = 5
"""So often is read what is behind the heads; a key with more behind it goes on when others have had their turn."""

_FIELD = FIELD_OF_PARCELS
_Request = UpdateOne | UpdateMany | DeleteMany


@dataclass(frozen=True, slots=True)
class _StoppedParcel:
    """
    A parcel in front of which, or in the middle of which, its key was stopped.

    Attributes:
        parcel: as it was read.
        names: of its entries that were published or set aside.
        pause: seconds before the next relay may take it.
        failed: id of the entry whose attempts grow by one; None for none.
    """

    parcel: Document
    names: Sequence[Any]
    pause: float = 0.0
    failed: Any = None


@dataclass(slots=True)
class _Reading:
    """
    What became of the parcels of one reading.

    Attributes:
        owner: of the claims.
        until: moment of the monotonic clock from which on what is left is for whoever claims next.
        judge: whether failures are counted.
        claim: of the claimed heads, as it was read.
        claimed: `_id`s of the heads that are this relay's.
        keys: of those heads.
        overtaken: keys that have an earlier head.
        done: parcels of which everything was published or set aside, in order.
        removed: `_id`s of those that were removed already.
        held: parcels at which a key was stopped.
        stopped: keys (without one, the `_id`) at which nothing more is published in this run.
        dispatched: entries.
        dead: entries set aside.
        left: entries read and not published.
        broker_down: whether the broker did not answer.
        error: the last one, in words.
        refused: `_id`s of parcels that this process cannot publish, and does not judge.
    """

    owner: ObjectId
    until: float
    judge: bool
    claim: Mapping[str, Any] = field(default_factory=dict)
    claimed: list[Any] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    overtaken: set[str] = field(default_factory=set)
    done: list[Document] = field(default_factory=list)
    removed: list[Any] = field(default_factory=list)
    held: list[_StoppedParcel] = field(default_factory=list)
    stopped: list[Any] = field(default_factory=list)
    dispatched: int = 0
    dead: int = 0
    left: int = 0
    broker_down: bool = False
    error: str | None = None
    refused: list[Any] = field(default_factory=list)

    @property
    def unfinished(self) -> set[str]:
        """Keys behind whose heads there may be more to deliver now."""
        return self.keys.difference(self.stopped)

    @property
    def delivery(self) -> Delivery:
        """As a sum of one."""
        return Delivery(self.dispatched, self.dead, self.left, self.broker_down, self.error, self.refused)


class ParcelRelay(Relay):
    """
    Delivers the parcels of one collection.

    Args:
        store: of the parcels.
        publisher: to the broker.
        dead_letters: gives the store for what is set aside.
        signer: verifies entries.
        claim_ttl: seconds for which a key belongs to one relay; after a crash it is free again.
        policy: what becomes of an entry that cannot be published.
        counters: of this process.
    """

    def __init__(
        self,
        store: ParcelStore,
        publisher: Publisher,
        dead_letters: Callable[[], OutboxDeadLetters],
        *,
        signer: EntrySigner,
        claim_ttl: float,
        policy: FailurePolicy,
        counters: Counters,
    ) -> None:
        super().__init__(
            store.collection,
            publisher,
            dead_letters,
            signer=signer,
            claims=store.claims,
            claim_ttl=claim_ttl,
            policy=policy,
            counters=counters,
        )
        self._store = store
        self._snapshot = store.collection.with_options(read_concern=ReadConcern("snapshot"))

    def deliver(self, document_id: object, *, older_than: float | None = None, judge: bool = True) -> Delivery:
        """As `deliver_all`, of one parcel."""
        return self.deliver_all([document_id], older_than=older_than, judge=judge)

    def deliver_all(
        self,
        document_ids: Sequence[object],
        *,
        older_than: float | None = None,
        judge: bool = True,
        turns: int = _ROUNDS_MAX,
    ) -> Delivery:
        """
        Deliver what is in some parcels and behind them, until nothing is left or a key has had its share.

        Args:
            document_ids: `_id`s of parcels that may be the first of their keys; which are, is found out.
            older_than: only those that have waited so many seconds.
            judge: whether an entry that cannot be published counts an attempt; a writer, which need not know all
                tasks, leaves that to a process that does.
            turns: how often is read what is behind the heads.

        Returns:
            What was done; nothing for keys that another relay holds or that are held back.

        Raises:
            PyMongoError: MongoDB did not answer; claims lapse by themselves.
            SoftTimeLimitExceeded: of the task in which this runs; claims were let go.
        """
        total = Delivery()
        for start in range(0, len(document_ids), HEADS_MAX):
            waiting, age = list(document_ids[start : start + HEADS_MAX]), older_than
            for _ in range(turns):
                run = self._deliver(waiting, age, judge=judge)
                total = total.and_(run.delivery)
                if run.broker_down:
                    return total
                waiting, age = [head.id for head in self._store.heads(run.unfinished)], None
                if not waiting:
                    break
            total = total.and_(Delivery(left=len(waiting), has_more=bool(waiting)))
        return total

    def _deliver(self, ids: Sequence[Any], older_than: float | None, *, judge: bool) -> _Reading:
        is_finalized = bool(self._publisher.app.finalized)  # type: ignore[attr-defined]
        until = time.monotonic() + self._claim_ttl / 2
        run = _Reading(ObjectId(), until, judge=judge and is_finalized)
        claimable = self._store.claimable(older_than, _id={"$in": list(ids)})
        claim = self._claims.claimed(run.owner, self._claim_ttl)
        with pymongo.timeout(ANSWER_SECONDS):
            if not self._store.collection.update_many(claimable, claim).modified_count:
                return run
        parcels = self._read(ids, run)
        try:
            self._deliver_parcels(parcels, run)
        finally:
            # Also when a time limit passes through: what was published is removed, and the rest is free.
            self._end(run)
        return run

    def _read(self, ids: Sequence[Any], run: _Reading) -> list[Document]:
        """The parcels behind the heads that were claimed, in their order."""
        shown = {"key": 1, "seq": 1, _FIELD.name: 1, "open": self._claims.free}
        owned = {"_id": {"$in": list(ids)}, f"{_FIELD.claim}.owner": run.owner}
        claimed = list(each_of(self._snapshot.find(owned, shown)))
        run.claimed = [parcel["_id"] for parcel in claimed]
        fields = [parcel[_FIELD.name] for parcel in claimed if isinstance(parcel[_FIELD.name], Mapping)]
        run.claim = fields[0]["claim"] if fields else {}
        run.keys = {key for parcel in claimed if (key := head_of(parcel).key) is not None}
        single = [parcel for parcel in claimed if head_of(parcel).key is None]
        if not run.keys:
            return single
        following = self._snapshot.find({"key": {"$in": list(run.keys)}}, shown).sort(ORDER).limit(PARCELS_MAX)
        return [*single, *_within_reach(each_of(following), run)]

    # -- publish -----------------------------------------------------------------------------------

    def _deliver_parcels(self, parcels: Sequence[Document], run: _Reading) -> None:
        last = {head_of(parcel).key: number for number, parcel in enumerate(parcels)}
        began = time.monotonic()
        for number, parcel in enumerate(parcels):
            self._deliver_parcel(parcel, run)
            if time.monotonic() - began > SETTLE_SECONDS:
                heads = [head_of(each) for each in run.done if each["_id"] in run.claimed]
                kept = [head.id for head in heads if head.key is not None and last[head.key] > number]
                self._settle_done(run, kept)
                began = time.monotonic()

    def _deliver_parcel(self, parcel: Document, run: _Reading) -> None:
        """Publish one parcel, or as much of it as can be."""
        everything = self.pending.entries_of(_events(parcel))
        if not everything:
            self._clear(parcel)
        if run.broker_down or _place(parcel) in run.stopped:
            run.left += len(everything)
            return
        names: list[Any] = []
        try:
            held = self._publish_entries(parcel, everything, names, run)
        except SoftTimeLimitExceeded:
            run.held.append(_StoppedParcel(parcel, names))
            raise
        if held is None:
            run.done.append(parcel)
            return
        run.held.append(held)
        run.stopped.append(_place(parcel))
        run.left += max(0, len(everything) - len(names))

    def _publish_entries(
        self, parcel: Document, everything: Sequence[Entry | Mapping[str, Any]], names: list[Any], run: _Reading
    ) -> _StoppedParcel | None:
        """Publish entries in order, and note their names; where it has stopped, or None at the end."""
        for entry in everything:
            if None in names and entry_id_of(entry) is None:
                continue  # set aside with the first one that has no name
            if time.monotonic() > run.until:
                return _StoppedParcel(parcel, names)
            try:
                self.pending.publish_entry(entry, parcel["_id"])
            except SoftTimeLimitExceeded:
                raise
            except Exception as error:  # noqa: BLE001 - whatever a serializer, a canvas or a broker raises
                held = self._set_aside(parcel, entry, error, names, run)
                if held is not None:
                    return held
            else:
                run.dispatched += 1
                self._counters.dispatched += 1
            names.append(entry_id_of(entry))
        return None

    def _clear(self, parcel: Document) -> None:
        """Set aside a parcel in which no entries are: somebody else has written to it."""
        place = _place(parcel)
        logger.error(
            "document %r: %s says that entries wait, and there are none; put right",
            place,
            _FIELD.name,
            extra={"event": "count_repaired"},
        )
        error = ValueError(f"{_FIELD.name} says that entries wait, and there are none")
        self._dead_letters().add(place, {"value": parcel.get(_FIELD.name)}, error)

    def _set_aside(
        self, parcel: Document, entry: Entry | Mapping[str, Any], error: Exception, names: Sequence[Any], run: _Reading
    ) -> _StoppedParcel | None:
        """Judge a failure; None if the entry is a dead letter now, else how its key is held back."""
        held = HeldDocument(
            document_id=_place(parcel),
            events=_events(parcel),
            owner=run.owner,
            claimed_at=run.until,
            field={"claim": run.claim},
        )
        verdict = self.pending.judged(held, entry, error, judge=run.judge)
        if verdict is None or verdict.kind is not FailureKind.DEAD_LETTER:
            run.error = f"{type(error).__name__}: {short(error)}"
            if verdict is None:
                run.refused.append(parcel["_id"])
                return _StoppedParcel(parcel, names)
            run.broker_down = run.broker_down or verdict.is_outage
            return _StoppedParcel(parcel, names, verdict.pause, entry_id_of(entry) if verdict.counts else None)
        is_nameless = entry_id_of(entry) is None
        alike = [each for each in held.events if _is_nameless(each)] if is_nameless else [entry]
        for each in alike:  # before they are removed: a crash repeats it, and loses nothing
            self._dead_letters().add(held.document_id, each, error)
        run.dead += len(alike)
        self._counters.dead += len(alike)
        return None

    # -- settle ------------------------------------------------------------------------------------

    def _settle_done(self, run: _Reading, kept: Sequence[Any]) -> None:
        """Remove what was published, but for some heads."""
        if removals := _removals(run, kept):
            with pymongo.timeout(ANSWER_SECONDS):
                self.removals.quick.bulk_write(removals, ordered=True)
            run.removed += [each["_id"] for each in run.done if each["_id"] not in kept]
            run.done = [each for each in run.done if each["_id"] in kept]

    def _end(self, run: _Reading) -> None:
        """Remove what was published, and let go what was not, in one command: the heads last."""
        requests: list[_Request] = []
        for held in run.held:
            requests += self._let_go(held, run.owner)
        reached = [*run.removed, *(each["_id"] for each in run.done), *(held.parcel["_id"] for held in run.held)]
        if unreached := [each for each in run.claimed if each not in reached]:
            requests.append(UpdateMany(*self._claims.released(unreached, [run.owner])))
        requests += _removals(run)
        if requests:
            with pymongo.timeout(ANSWER_SECONDS):
                self.removals.quick.bulk_write(requests, ordered=True)

    def _let_go(self, held: _StoppedParcel, owner: ObjectId) -> list[_Request]:
        id, field = held.parcel["_id"], held.parcel[_FIELD.name]  # noqa: A001
        claim = field.get("claim")
        # It was open when it was read, whoever's name stands in it: the claim of its key's head stood for it.
        owners = [owner, *([claim["owner"]] if isinstance(claim, Mapping) and "owner" in claim else ())]
        requests: list[_Request] = []
        if held.names:
            requests.append(UpdateOne(*self._claims.removed(id, held.names, owner, self._claim_ttl)))
        requests.append(UpdateMany(*self._claims.released([id], owners, held.pause, held.failed)))
        return requests


def _within_reach(parcels: Iterable[Document], run: _Reading) -> list[Document]:
    """Those for which the claim of their key's head stands: up to one that somebody holds or that is held back."""
    found: list[Document] = []
    begun: set[str] = set()
    for parcel in parcels:
        key = parcel["key"]
        if key in run.stopped or key in run.overtaken:
            continue
        if parcel["_id"] in run.claimed or (key in begun and parcel["open"]):
            begun.add(key)
            found.append(parcel)
        elif key in begun:
            run.stopped.append(key)
        else:
            run.overtaken.add(key)
    return found


def _removals(run: _Reading, kept: Sequence[Any] = ()) -> list[_Request]:
    """Of what was published, the heads last."""
    done = [each["_id"] for each in run.done if each["_id"] not in kept]
    heads_last = [each for each in done if each not in run.claimed], [each for each in done if each in run.claimed]
    return [DeleteMany({"_id": {"$in": ids}}) for ids in heads_last if ids]


def _place(parcel: Mapping[str, Any]) -> Any:
    """What a parcel is in order with: its key, or itself alone."""
    head = head_of(parcel)
    return head.id if head.key is None else head.key


def _events(parcel: Mapping[str, Any]) -> list[Any]:
    field = parcel.get(_FIELD.name)
    events = field.get("events") if isinstance(field, Mapping) else None
    return events if isinstance(events, list) else []


def _is_nameless(entry: Any) -> bool:
    return not isinstance(entry, Mapping) or entry.get("id") is None
