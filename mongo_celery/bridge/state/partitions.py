"""
The partitions, for the listener and the operator.

A take-over raises every `term` to the new one in one bulk update, and commits handled runs in the same update. It
leaves live claims and their fencing tokens unchanged: their executions may finish, because they prove themselves by
fencing token and owner. So neither a deploy nor a crash of the listener repeats running handlers. If an open
transaction has written a partition (of a client that died before its commit), the partition keeps its term. Messages of
the older term may still claim there, but no others. It is won when it is free.

`committed` and `resumeToken` are always read from one image of the document. A number from one reading and a token from
another could skip a change.

An operator's command compares `committed` and `fencingToken` with the values that it read, raises the token and clears
the claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, NamedTuple

import bson
from bson.codec_options import CodecOptions
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from pymongo import InsertOne
from pymongo.client_session import ClientSession
from pymongo.collection import Collection

from mongo_celery.bridge.existing import extract_term
from mongo_celery.bridge.state.claims import COMMIT, collect_parked_hashes, position_fields
from mongo_celery.bridge.state.dead_letters import PARKED_BEHIND, REPLAYS_MAX, store
from mongo_celery.bridge.state.state_collection import StateCollection, ids_under, to_unsigned
from mongo_celery.bridge.state.subscriptions import Layout
from mongo_celery.mongo.expressions import REMOVED, literal, next_number, remaining
from mongo_celery.mongo.locked import (
    run_transaction,
    update_around_locks,
    update_one_around_lock,
    update_one_or_raise_lock,
    update_unlocked,
)
from mongo_celery.mongo.table import JOURNALED

_COMPARED = 64  # largest number of earlier states to compare with: the cost grows with their square
_FLOWING_SHARE = 2  # one in this many partitions must flow
_WINNING_SECONDS = 0.25  # the leading thread has other work
_TRACES = ("resumeToken", "claim", "handled", "retry", "oneByOneUntil", "halted")
"""Fields that an unused partition lacks."""

_PROJECTION: dict[str, Any] = {
    **dict.fromkeys(("handler", "partition", "partitioningTerm", "term", "committed", "fencingToken", "state"), 1),
    **dict.fromkeys(("stored", "lastRun"), 1),
    **dict.fromkeys(_TRACES[:-1], 1),
    **dict.fromkeys(("halted.at", "halted.key", "halted.resumeToken"), 1),  # its traceback is for people
    "live": {"$gt": ["$claim.until", "$$NOW"]},
    "due": remaining("retry.notBefore"),
    "readAt": "$$NOW",
    "parkedCount": {"$cond": [{"$isArray": "$parkedKeys"}, {"$size": "$parkedKeys"}, 0]},
}

_SWEPT: dict[str, Any] = {
    **_PROJECTION,
    "readAt": {"$cond": [{"$gt": ["$lastRun.at", {"$subtract": ["$$NOW", 10_000]}]}, "$$NOW", REMOVED]},
}
"""Stays the same byte for byte while nothing happens in a partition. The time is only needed after a run."""


_UNTRIED = {
    **dict.fromkeys(("claim", "retry", "halted"), REMOVED),
    "fencingToken": next_number("fencingToken"),
}
"""Changes of a command that end the current run and forget its attempts. A running execution is then refused."""

_RAW: CodecOptions[RawBSONDocument] = CodecOptions(document_class=RawBSONDocument)

_COUNTED: Mapping[str, Any] = {"claim": None, "retry.count": 0, "retry.crashes": 0}
"""Fields that show, above these values, that a partition's first change was tried."""


@dataclass(frozen=True, slots=True)
class Image:
    """
    One majority read of a partition's document, with the server's verdicts on its times.

    Attributes:
        id: `_id` of the document.
        partitioning: term of its partitioning.
        data: comparable part of the committed token. Empty before the first commit.
        live: True if there is a claim that has not lapsed.
        due_in: seconds until a parked change may run. 0 or less if it may run now.
        stored: the mark of stored changes that are not all committed: `to` (the last one), `since`, `reason`. None if
            none are stored.
        retry: the counts of the first change, as stored. None if they belong to another change.
        waiting: start (`since`), `cause` and `count` of the first change's waits for infrastructure. None after any
            other outcome.
        ran: the last committed run: its `last` change, the times when it was `claimed` and committed (`at`), and the
            milliseconds that its handler `took`. None before the first.
        read_at: time of the read, by the server's clock.
        head: for a halted partition, the time `at` which it halted, and its change by `key` and `resumeToken`.
            None for all others.
        parked_keys: number of parked keys. Their changes become dead letters until a person releases them.
    """

    subscription: str
    index: int
    term: int
    committed: int
    token: Mapping[str, Any] | None
    data: str
    fencing_token: int
    state: str
    claim: Mapping[str, Any] | None
    live: bool
    handled: Mapping[str, Any] | None
    due_in: float
    retries: int
    crashes: int
    error: str | None
    one_by_one_until: int
    head: Mapping[str, Any] | None
    waiting: Mapping[str, Any] | None = None
    stored: Mapping[str, Any] | None = None
    retry: Mapping[str, Any] | None = None
    ran: Mapping[str, Any] | None = None
    read_at: datetime | None = field(default=None, compare=False)
    parked_keys: int = 0
    id: str = ""
    partitioning: int = 0

    @property
    def parked(self) -> bool:
        """Return True if a change waits for its retry time."""
        return self.due_in > 0


Swept = Mapping[bytes, Mapping[bytes, Image]]
"""The images of a sweep: by the bytes of their documents, and these by the bytes of the server's answers."""


class Seen(NamedTuple):
    """
    Last observed state of a partition with a run in flight. If it is unchanged, a poll can skip the partition.

    Attributes:
        fencing_token: raised by every claim, and by every command that moves a position.
        claimed: True if there was a claim, and nothing was handled. Otherwise no worker had claimed the run in flight.
    """

    fencing_token: int
    claimed: bool


class Partitions(StateCollection):
    """All partitions of one bridge."""

    def __init__(self, collection: Collection[dict[str, Any]], bridge: str, ttl: float) -> None:
        super().__init__(collection, bridge, ttl)
        self._types = collection.codec_options

    def partition_id(self, subscription: str, partitioning: int, index: int) -> str:
        """Return the `_id` of a partition's document."""
        return f"{self._bridge}/{subscription}/{partitioning}/{index}"

    def prepare(
        self, positions: Mapping[str, Mapping[str, Any] | None], layouts: Mapping[str, Layout], term: int
    ) -> None:
        """
        Create the missing partitions of some handlers in their partitionings, each at the handler's token.

        Their fencing tokens count from the lease's term, which is above all earlier ones. Their own term is the same.
        So it names their owner, and a later term recognises partitions of an older one. The number of calls does not
        depend on the number of handlers.
        """
        if not positions:
            return
        scope = self._scope({name: layouts[name].term for name in positions})
        present = {found["_id"] for found in self._table.find(scope, {"_id": 1})}
        wanted = [
            each
            for name, token in positions.items()
            for each in self._build_documents(name, layouts[name], token, term, term)
        ]
        self._table.write_all([InsertOne(each) for each in wanted if each["_id"] not in present])

    def _build_documents(
        self, name: str, layout: Layout, token: Mapping[str, Any] | None, term: int, fencing_token: int
    ) -> list[dict[str, Any]]:
        return [
            {
                "_id": self.partition_id(name, layout.term, index),
                "bridge": self._bridge,
                "handler": name,
                "partitioningTerm": Int64(layout.term),
                "partition": index,
                "state": "flowing",
                "term": Int64(term),
                "fencingToken": Int64(fencing_token),
                "committed": Int64(0),
                **(position_fields(token) if token else {}),
            }
            for index in range(layout.partitions)
        ]

    def take_over(self, partitionings: Mapping[str, int], term: int) -> list[Image]:
        """
        Take over partitions from all older terms, and commit handled runs.

        The number of calls does not depend on the number of partitions, unless open transactions lock some.

        Args:
            partitionings: the current partitioning of each subscription.

        Returns: The images of the partitions afterwards. A partition with a larger term than `term` belongs to a later
            listener. A partition with a smaller term is locked: see `win`.
        """
        if not partitionings:
            return []
        scope = self._scope(partitionings)
        update_around_locks(self._table, scope, _older(term), _winning(term))
        return self._images(scope)

    def win(self, ids: Iterable[str], term: int) -> list[Image]:
        """
        Take over partitions that were locked and are now free, in bounded time, without waiting for locks.

        Returns:
            The images of these partitions afterwards, like `take_over`.
        """
        locked = list(ids)
        update_unlocked(self._table, locked, _older(term), _winning(term), seconds=_WINNING_SECONDS)
        return self.look(locked)

    def look(self, ids: Iterable[str], session: ClientSession | None = None) -> list[Image]:
        """Return some partitions by `_id`. In a causally consistent session, later reads are not older."""
        return self._images({"_id": {"$in": list(ids)}}, session)

    def list_changed(self, seen: Mapping[str, Seen | None], session: ClientSession | None = None) -> list[Image]:
        """
        Return some partitions by `_id`, except those that have not changed since they were last read. None means never
        read.

        Heartbeats, lapses and pauses do not count as changes here.
        """
        pairs = list(seen.items())
        parts = [_unlike(dict(pairs[at : at + _COMPARED])) for at in range(0, len(pairs), _COMPARED)]
        return self._images(parts[0] if len(parts) == 1 else {"$or": parts}, session) if parts else []

    def flush(self) -> None:
        """
        Make the primary journal all writes so far, with a write that matches nothing.

        On a set of one member, only then do majority reads show a write with w:1. Other sets replicate it anyway.
        """
        self._table.update_unretried({"_id": ""}, {"$set": {"term": Int64(0)}}, JOURNALED)

    def of(self, partitionings: Mapping[str, int], session: ClientSession | None = None) -> list[Image]:
        """Return all partitions of some subscriptions, by name, in these partitionings."""
        return self._images(self._scope(partitionings), session) if partitionings else []

    def sweep(self, partitionings: Mapping[str, int], session: ClientSession, known: Swept) -> Swept:
        """
        Read the same as `of`, repeatedly. Unchanged partitions keep their image.

        An answer with the same bytes as before is not decoded, so idle partitions cost little.

        Args:
            known: the last result.
        """
        before: dict[bytes, Image] = {}
        for images in known.values():
            before.update(images)
        found: dict[bytes, Mapping[bytes, Image]] = {}
        for batch in self._table.find_raw(self._scope(partitionings), _SWEPT, session) if partitionings else []:
            found[batch] = known[batch] if batch in known else self._decode(batch, before)
        return found

    def _decode(self, batch: bytes, known: Mapping[bytes, Image]) -> dict[bytes, Image]:
        """Return the images of the documents in an answer, by their bytes."""
        found: dict[bytes, Image] = {}
        for document in bson.decode_all(batch, _RAW):
            raw = bytes(document.raw)
            image = known.get(raw)
            found[raw] = build_image(bson.decode(raw, self._types)) if image is None else image
        return found

    def read_traceback(self, partition_id: str) -> str:
        """Return the traceback of a halted partition's error, or an empty string if none is stored."""
        found = self._table.find_one({"_id": partition_id}, {"halted.traceback": 1}) or {}
        return str((found.get("halted") or {}).get("traceback", ""))

    def are_touched(self, subscription: str) -> bool:
        """Return True if anything was ever claimed, decided or stored in a handler's partitions, including old ones."""
        marks: list[dict[str, Any]] = [{name: {"$ne": None}} for name in _TRACES]
        traces = [{"committed": {"$gt": 0}}, {"state": {"$ne": "flowing"}}, *marks]
        found = self._table.find_one({"_id": ids_under(f"{self._bridge}/{subscription}"), "$or": traces}, {"_id": 1})
        return found is not None

    def mark_stored(
        self, partition_id: str, term: int, to: str, reason: str, session: ClientSession | None = None
    ) -> bool:
        """
        Record that changes are stored up to a place. The place only grows. Repeating it is harmless.

        Args:
            to: comparable part of the last stored change's token.
            reason: why they are stored, for people. The first mark's reason is kept until the mark is cleared.

        Returns:
            False if the term is over.

        Raises:
            PyMongoError: also if an open transaction has locked the partition.
        """
        since = {"since": "$$NOW", "reason": literal(reason)}
        farthest = {"$max": ["$stored.to", literal(to)]}  # a lost answer may belong to a write that takes effect late
        change = {"stored": {"$mergeObjects": [since, "$stored", {"to": farthest}]}}
        return update_one_around_lock(self._table, {"_id": partition_id, "term": term}, [{"$set": change}], session)

    def clear_stored(self, ids: Iterable[str], term: int) -> None:
        """
        Clear the marks whose changes are all committed, as the server compares them. Bounded.

        It does not wait for locked partitions. The images show which marks are cleared.
        """
        done = {"$gte": ["$resumeToken._data", "$stored.to"]}
        condition = {"term": term, "stored": {"$ne": None}, "$expr": done}
        change = {"$unset": {"stored": ""}}
        update_unlocked(self._table, list(ids), condition, change, seconds=_WINNING_SECONDS)

    def replace(
        self, name: str, old: Layout, new: Layout, token: Mapping[str, Any] | None, term: int
    ) -> Literal["done", "busy", "over"]:
        """
        Replace the partitions of a handler by those of another partitioning, if no work is left.

        One transaction: either the old ones exist or the new ones. The new fencing tokens count from the largest old
        one. Partitions that an older term has left are also removed. Repeating it is harmless.

        Args:
            token: the resume token of the watermark, where the new ones begin. None if nothing was ever stored.

        Returns:
            `busy` if an old one has work left, is blocked, is beyond the watermark, or belongs to another term. `over`
            if the term has ended.
        """
        scope = self._scope({name: old.term})
        drained = {**scope, "term": term, **_match_drained(token["_data"] if token else "")}
        left = {"_id": ids_under(f"{self._bridge}/{name}"), "term": {"$lte": term}}
        collection = self._table.collection
        handler, change = {"_id": f"{self._bridge}/{name}", "term": term}, {"partitioning": new.document()}

        def switch(session: ClientSession) -> Literal["done", "busy", "over"]:
            found = collection.database["handlers"].find_one_and_update(handler, {"$set": change}, session=session)
            if found is not None and found["partitioning"]["term"] == new.term:
                return "done"
            if found is None or collection.count_documents(drained, session=session) != old.partitions:
                session.abort_transaction()
                return "over" if found is None else "busy"
            given = collection.find_one(scope, {"fencingToken": 1}, sort=[("fencingToken", -1)], session=session)
            first = max(term, int(given["fencingToken"]) if given else 0)
            collection.delete_many(left, session=session)
            collection.insert_many(self._build_documents(name, new, token, term, first), session=session)
            return "done"

        with self._table.session() as session:
            return session.with_transaction(switch)

    def collect_parked_hashes(self, subscription: str, partitioning: int) -> frozenset[int]:
        """Return the hashes of a partitioning's parked keys, from 0 to 2^64 - 1."""
        scope = {**self._scope({subscription: partitioning}), "parkedKeys": {"$ne": None}}
        found = self._table.find(scope, {"parkedKeys.hash": 1})
        return frozenset().union(*map(collect_parked_hashes, found))

    def largest_term(self) -> int:
        """Return the largest term of the bridge's partitions, in any partitioning. 0 if there is none."""
        found = self._table.find_one({"_id": ids_under(self._bridge)}, {"term": 1}, sort=[("term", -1)])
        return int(found["term"]) if found else 0

    def pause(self, image: Image) -> bool:
        """Prevent new claims. Running executions may finish."""
        return self._command(image, {"state": "paused"}, "flowing")

    def resume(self, image: Image) -> bool:
        """Let a paused partition continue."""
        return self._command(image, {"state": "flowing"}, "paused")

    def retry(self, image: Image) -> bool:
        """Run the first change of a halted or parked partition again immediately, with its counts at zero."""
        passed_over = (image.retry or {}).get("passedOver")  # it keeps the names of the changes that it replaces
        retry = REMOVED if passed_over is None else literal({"passedOver": passed_over})
        change = {**_UNTRIED, "state": "flowing", "retry": retry}
        return self._command(image, change, image.state)

    def forget_attempts(self, subscription: str, partitioning: int) -> None:
        """Forget the counts of abandoned changes, in all partitions of a handler."""
        with self._table.limit():
            self._table.collection.update_many(*build_attempt_reset(f"{self._bridge}/{subscription}/{partitioning}"))

    def mark_head(self, image: Image) -> bool:
        """
        Extend the mark to the change at which a partition halted. The change must be stored.

        No term guards it, as with all operator commands. A mark promises nothing about changes before it, and its last
        change is not committed while the guard matches.
        """
        assert image.head is not None, "only a halted partition knows its head"
        guard = self._guard(image, "halted")
        to = {"$max": ["$stored.to", literal(image.head["resumeToken"]["_data"])]}
        since = {"since": "$$NOW", "reason": "halted"}
        return update_one_or_raise_lock(
            self._table, guard, [{"$set": {"stored": {"$mergeObjects": [since, "$stored", {"to": to}]}}}]
        )

    def discard(self, image: Image) -> bool:
        """Skip the change at which a partition halted, without storing it."""
        return self._command(image, _build_skip(image), "halted")

    def set_aside(self, image: Image, dead_letter: Mapping[str, Any], letters: Collection[dict[str, Any]]) -> bool:
        """
        Skip the change at which a partition halted and store its dead letter, both or neither.

        Its replays use the fencing tokens after the one that was read. A change of a parked key waits after the key's
        other changes.

        Args:
            letters: the collection of dead letters.
        """
        guard, change = self._guard(image, "halted"), _build_skip(image)
        change["fencingToken"] = {"$max": [Int64(image.fencing_token + REPLAYS_MAX), next_number("fencingToken")]}

        def both(session: ClientSession) -> bool:
            keys = {"parkedKeys.hash": 1}
            passed = self._table.collection.find_one_and_update(guard, [{"$set": change}], keys, session=session)
            if passed is None:
                session.abort_transaction()
                return False
            waits = {"parked": dead_letter["hash"], "cause": PARKED_BEHIND}
            is_parked = to_unsigned(dead_letter["hash"]) in collect_parked_hashes(passed)
            store(letters, {**dead_letter, **waits} if is_parked else dead_letter, session)
            return True

        with self._table.session() as session:
            return run_transaction(session, both)

    def _guard(self, image: Image, state: str) -> dict[str, Any]:
        return {
            "_id": image.id,
            "committed": image.committed,
            "fencingToken": image.fencing_token,
            "state": state,
            "handled": None,
        }

    def _command(self, image: Image, change: Mapping[str, Any], state: str) -> bool:
        guard = self._guard(image, state)
        if "fencingToken" not in change:  # pausing does not affect a running execution, whatever its token
            del guard["fencingToken"], guard["committed"], guard["handled"]
        return update_one_or_raise_lock(self._table, guard, [{"$set": dict(change)}])

    def _scope(self, partitionings: Mapping[str, int]) -> dict[str, Any]:
        return {
            "$or": [{"_id": ids_under(f"{self._bridge}/{name}/{number}")} for name, number in partitionings.items()],
        }

    def _images(self, query: Mapping[str, Any], session: ClientSession | None = None) -> list[Image]:
        return [build_image(document) for document in self._table.find(query, _PROJECTION, session=session)]


def build_attempt_reset(prefix: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """
    Return guard and update that forget attempts at abandoned changes, so that later changes do not inherit them.

    A partition keeps its counts while its first change is stored, running or halted.

    Args:
        prefix: the prefix of the partitions' ids.
    """
    is_free = {"$lte": [{"$ifNull": ["$claim.until", "$$NOW"]}, "$$NOW"]}
    is_given_up = {"$lte": [{"$ifNull": ["$stored.to", ""]}, {"$ifNull": ["$resumeToken._data", ""]}]}
    is_counted = {"$or": [{"$gt": [f"${name}", least]} for name, least in _COUNTED.items()]}
    guard = {
        "_id": ids_under(prefix),
        "state": "flowing",
        "handled": None,
        "$expr": {"$and": [is_free, is_given_up, is_counted]},
    }
    kept = {"$cond": [{"$gt": ["$retry.passedOver", None]}, {"passedOver": "$retry.passedOver"}, REMOVED]}
    return guard, [{"$set": {**_UNTRIED, "retry": kept}}]


def visible_state(image: Image) -> str:
    """Return the displayed state of a partition. A flowing one may wait for MongoDB, the broker or its retry."""
    if image.state != "flowing":
        return image.state
    if image.waiting is not None and not image.live and image.handled is None:
        return "waiting"
    return "retrying" if image.parked else "flowing"


def is_mostly_blocked(images: Sequence[Image]) -> bool:
    """Return True if so few partitions of a handler flow that waiting for all of them would take long."""
    return sum(visible_state(image) == "flowing" for image in images) * _FLOWING_SHARE < len(images)


def build_image(document: Mapping[str, Any]) -> Image:
    """Return an image from a document that was read with the verdicts."""
    token, retry = document.get("resumeToken"), _current_retry(document) if "retry" in document else None
    is_gone = retry is None and "retry" in document
    retries = retry or {}
    return Image(
        subscription=document["handler"],
        index=document["partition"],
        term=document["term"],
        committed=document["committed"],
        token=token,
        data=token["_data"] if token else "",
        fencing_token=document["fencingToken"],
        state=document["state"],
        claim=document.get("claim"),
        live=bool(document["live"]),
        handled=document.get("handled"),
        due_in=0.0 if is_gone else (document["due"] or 0) / 1000,
        retries=retries.get("count", 0),
        crashes=retries.get("crashes", 0),
        error=retries.get("error"),
        one_by_one_until=0 if is_gone else document.get("oneByOneUntil", 0),
        head=document.get("halted"),
        waiting=retries.get("waiting"),
        stored=document.get("stored"),
        retry=retry,
        ran=document.get("lastRun"),
        read_at=document.get("readAt"),
        parked_keys=document.get("parkedCount") or 0,
        id=document["_id"],
        partitioning=int(document["partitioningTerm"]),
    )


def _current_retry(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """
    Return the counts of the first change, if it is still the same.

    An existing document that an older term read returns as another change, unless it is stored. If the partition halted
    at it, the head contains it.
    """
    retry: Mapping[str, Any] | None = document.get("retry")
    data = (retry or {}).get("row")
    term = extract_term(data) if isinstance(data, str) else None
    if term is None or term >= document["term"] or "halted" in document:
        return retry
    marked = (document.get("stored") or {}).get("to", "")
    return retry if marked >= data else None


def _build_skip(image: Image) -> dict[str, Any]:
    """Return the fields that skip the change at which a partition halted."""
    assert image.head is not None, "only a halted partition knows its head"
    return {
        "state": "flowing",
        "committed": Int64(image.committed + 1),
        **{name: literal(value) for name, value in position_fields(image.head["resumeToken"]).items()},
        **_UNTRIED,
    }


def _match_drained(data: str) -> dict[str, Any]:
    """Match flowing partitions with nothing in progress, stored, parked, or done after a place."""
    own = {"$ifNull": ["$resumeToken._data", ""]}
    conditions = [
        {"$lte": ["$claim.until", "$$NOW"]},  # also matches without a claim
        {"$lte": [own, literal(data)]},
        {"$lte": [{"$ifNull": ["$stored.to", ""]}, own]},
    ]
    unparked: dict[str, Any] = {"$in": [None, []]}
    return {"state": "flowing", "handled": None, "parkedKeys": unparked, "$expr": {"$and": conditions}}


def _unlike(seen: Mapping[str, Seen | None]) -> dict[str, Any]:
    """Return a filter for some partitions, except those that have not changed since they were seen."""
    alike: dict[Seen, list[str]] = {}
    for partition_id, each in seen.items():
        if each is not None:
            alike.setdefault(each, []).append(partition_id)
    query: dict[str, Any] = {"_id": {"$in": list(seen)}}
    return {**query, "$nor": [_as_seen(each, ids) for each, ids in alike.items()]} if alike else query


def _as_seen(seen: Seen, ids: list[str]) -> dict[str, Any]:
    same: dict[str, Any] = {"fencingToken": seen.fencing_token, "_id": {"$in": ids}}
    return {**same, "claim": {"$ne": None}, "handled": None} if seen.claimed else same


def _older(term: int) -> dict[str, Any]:
    return {"term": {"$lt": Int64(term)}}


def _winning(term: int) -> list[dict[str, Any]]:
    """Return the update of a take-over: the new term, and the commit of handled runs."""
    handled = {"$gt": ["$handled", None]}
    change: dict[str, Any] = {"term": Int64(term)}
    for name, value in COMMIT.items():
        change[name] = {"$cond": [handled, value, f"${name}"]}
    return [{"$set": change}]


def build_move(term: int, token: Mapping[str, Any], *, forward: bool, only: str | None = None) -> list[dict[str, Any]]:
    """
    Return an operator's update that moves partitions to a place: a take-over, and after the place the way back.

    The current work ends, and running executions are refused. A pause is kept. A mark that was reached is removed,
    because its changes may be removed and no listener stores them again.

    On the way back, current work also ends if nothing was ever committed. A change that is halted, running or retrying
    there is read again, and the present code judges it.

    Args:
        term: the term of the move.
        token: the token of the place.
        forward: True to move partitions before the place, False for those after it.
        only: `_id` of the only partition to move. None for all.
    """
    own, data = {"$ifNull": ["$resumeToken._data", ""]}, literal(token["_data"])
    moves: dict[str, Any] = {"$lt" if forward else "$gt": [own, data]}
    if only is not None:
        moves = {"$and": [{"$eq": ["$_id", literal(only)]}, moves]}
    reached = {"$lte": ["$stored.to", data if forward else own]}  # also matches without a mark
    ends = moves if forward else {"$or": [moves, {"$eq": [own, ""]}]}
    is_again = not forward and only is None  # all changes that they have handled after the place are handled again
    place = {
        **({"rewound": {"$cond": [moves, Int64(term), "$rewound"]}} if is_again else {}),
        **{name: {"$cond": [moves, literal(value), f"${name}"]} for name, value in position_fields(token).items()},
        "stored": {"$cond": [{"$and": [moves, reached]}, REMOVED, "$stored"]},
    }
    over = {**_UNTRIED, "state": {"$cond": [{"$eq": ["$state", "paused"]}, "paused", "flowing"]}}
    over = {name: {"$cond": [ends, value, f"${name}"]} for name, value in over.items()}
    return [*_winning(term), {"$set": {**place, **over}}]
