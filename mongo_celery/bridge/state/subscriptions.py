"""
A subscription's own position: its start, its low watermark and the fingerprint of its stream.

`term` guards every write of a listener. A take-over sets it to its lease's term, so a listener whose term has ended can
change nothing here. A watermark only grows.

If the oplog no longer holds a subscription's place, it has `lost`: `since`, `at` (its place), `oldest` (the oldest
entry at the time, or null) and `error`. It is valid only while the subscription is at `at`: a new position settles it.

`partitioning` describes the distribution of its changes: its `term`, the number of `partitions`, and the `key`. The
partitions in force are those of that term. It exists from the first take-over, and changes in one write. Its term is
the one that put it in force. So it is above all earlier ones, even after a state database was dropped: targets compare
it (see `fenced/fence.py`).

`tokens` is the token bucket of a handler with a `rate`: the tokens `left` at a time `at`, by the server's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bson import Timestamp
from bson.int64 import Int64
from pymongo import UpdateOne

from mongo_celery.bridge.state.state_collection import StateCollection, ids_under
from mongo_celery.mongo.expressions import REMOVED, literal
from mongo_celery.mongo.oplog import time_of_token
from mongo_celery.mongo.table import Update

_GAPS_KEPT = 20

OWED = "owed"
"""Value of `snapshot` for a handler that begins with a snapshot, until that snapshot is requested."""


@dataclass(frozen=True, slots=True)
class Layout:
    """
    The partitioning of a handler.

    Attributes:
        term: the term that put it in force. A later term is larger.
        partitions: number of partitions.
        key: hash and name of the partition rule.
    """

    term: int
    partitions: int
    key: str

    def is_equivalent(self, other: Layout) -> bool:
        """Return True if both partitionings distribute changes in the same way, whatever their terms."""
        return self.partitions == other.partitions and self.key == other.key

    def document(self) -> dict[str, Any]:
        """Return the stored form."""
        return {"term": Int64(self.term), "partitions": self.partitions, "key": self.key}


@dataclass(frozen=True, slots=True)
class Advance:
    """A watermark to store: handler, term, token and cluster time."""

    name: str
    term: int
    token: Mapping[str, Any]
    cluster_time: Timestamp | None


class Subscriptions(StateCollection):
    """The subscriptions of one bridge."""

    def take_over(self, layouts: Mapping[str, Layout], term: int) -> dict[str, dict[str, Any]]:
        """
        Raise the term of each handler to this one, and create missing ones.

        It needs two calls for any number. If another process creates one at the same time, that one may keep the
        other's term.

        Args:
            layouts: the partitionings by name, for subscriptions without one.

        Returns:
            The documents by name. One with another term than `term` was not won.
        """
        writes = [
            UpdateOne({"_id": self._id(name)}, self._winning(name, term, layout), upsert=True)
            for name, layout in layouts.items()
        ]
        self._table.write_all(writes)
        return self._read(list(layouts))

    def affirm(self, names: Sequence[str], term: int) -> dict[str, dict[str, Any]]:
        """Read some subscriptions after a write with this term. A deposed server cannot acknowledge this write."""
        change = {"$max": {"term": Int64(term)}}
        self._table.write_all([UpdateOne({"_id": self._id(name)}, change) for name in names])
        return self._read(names)

    def _read(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        found = self._table.find({"_id": {"$in": [self._id(name) for name in names]}})
        return {parse_name(document): document for document in found}

    def pin(
        self,
        name: str,
        term: int,
        start: Timestamp,
        position: Mapping[str, Any] | None,
        *,
        with_snapshot: bool = False,
    ) -> bool:
        """
        Record where a new subscription begins: at a time, or after a resume token.

        Args:
            position: `resumeToken` and its `clusterTime`. None for a time.
            with_snapshot: True if it gets the existing documents, which must be requested from this write on. The time
                stays stored, even if the start changes.
        """
        change: dict[str, Any] = {"startAtOperationTime": start}
        if with_snapshot:
            change |= {"snapshot": OWED, "snapshotFrom": start}
        if position is not None:
            change |= watermark_fields(position["resumeToken"], position["clusterTime"])
        guard = {"_id": self._id(name), "term": term, "startAtOperationTime": None}
        return self._table.update(guard, {"$set": change})

    def note_snapshot(self, name: str, term: int) -> bool:
        """Record that the initial snapshots of a subscription were requested. Return False if the term has ended."""
        return self._table.update({"_id": self._id(name), "term": term}, {"$set": {"snapshot": "asked for"}})

    def move_start(self, name: str, term: int, start: Timestamp, policy: str) -> bool:
        """
        Move the start to a later time after an oplog gap (see `build_start_move`).

        Returns:
            False if the term is over, or the subscription is already after this time.
        """
        return self._table.update(
            {
                "_id": self._id(name),
                "term": term,
                "$or": [{"clusterTime": None}, {"clusterTime": {"$lte": start}}],
            },
            build_start_move(start, policy),
        )

    def mark_lost(self, name: str, term: int, place: Timestamp, oldest: Timestamp | None, error: str) -> bool:
        """
        Record that a subscription has an oplog gap, about which no one has decided yet.

        Returns:
            False if the term is over.
        """
        lost = {"at": place, "error": error} | ({"oldest": oldest} if oldest is not None else {})
        change = {"lost": {"$mergeObjects": [{"since": "$$NOW"}, literal(lost)]}}
        return self._table.update({"_id": self._id(name), "term": term}, [{"$set": change}])

    def clear_lost(self, name: str, term: int) -> bool:
        """Remove the record of an oplog gap that does not exist after all. Return False if the term has ended."""
        return self._table.update({"_id": self._id(name), "term": term}, {"$unset": {"lost": ""}})

    def take_tokens(self, name: str, term: int, wanted: int, per_second: float, burst: float) -> tuple[int, float]:
        """
        Take tokens from a handler's bucket, which fills with time up to `burst`. A missing bucket is full.

        A bucket of a clock that was ahead keeps its tokens, and fills from now on.

        A term that has ended gets none. If the answer is lost, the taken tokens are too.

        Returns:
            The number of taken tokens, at most `wanted`, and those that are left.
        """
        before = {"$min": ["$tokens.at", "$$NOW"]}  # without a bucket, now
        grown = {"$multiply": [{"$subtract": ["$$NOW", before]}, per_second / 1000]}
        filled = {"$min": [{"$add": [{"$ifNull": ["$tokens.left", burst]}, grown]}, burst]}
        taken = {"$min": [wanted, {"$floor": "$tokens.left"}]}
        document = self._table.find_and_update_unretried(
            {"_id": self._id(name), "term": term},
            [
                {"$set": {"tokens": {"left": filled, "at": "$$NOW"}}},
                {"$set": {"tokens.taken": taken}},
                {"$set": {"tokens.left": {"$subtract": ["$tokens.left", "$tokens.taken"]}}},
            ],
            {"tokens": 1},
        )
        if document is None:
            return 0, 0.0
        return int(document["tokens"]["taken"]), float(document["tokens"]["left"])

    def advance_all(self, advances: Iterable[Advance], fingerprint: str) -> None:
        """
        Store watermarks in one call, with the fingerprint of the stream of their tokens.

        A watermark is refused if the term is over, or the stored token is not smaller. The call does not report which
        ones were refused.

        Raises:
            PyMongoError: some may have been stored. Storing them again is harmless.
        """
        self._table.write_all([UpdateOne(*self._advance(each, fingerprint)) for each in advances])

    def _advance(self, to: Advance, fingerprint: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return guard and change for storing a watermark."""
        guard = {
            "_id": self._id(to.name),
            "term": to.term,
            "$or": [{"resumeToken": None}, {"resumeToken._data": {"$lt": to.token["_data"]}}],
        }
        return guard, {"$set": {**watermark_fields(to.token, to.cluster_time), "fingerprint": fingerprint}}

    def read_all(self) -> list[dict[str, Any]]:
        """Return all subscriptions of the bridge, including those without a handler."""
        return self._table.find({"_id": ids_under(self._bridge)})

    def _id(self, name: str) -> str:
        return f"{self._bridge}/{name}"

    def _winning(self, name: str, term: int, layout: Layout) -> Update:
        """Return the update of a take-over: the new term, and missing fields."""
        missing = {"bridge": self._bridge, "handler": name, "partitioning": layout.document()}
        return [
            {"$replaceWith": {"$mergeObjects": [literal(missing), "$$ROOT"]}},
            {"$set": {"term": {"$max": ["$term", Int64(term)]}}},
        ]


def watermark_fields(token: Mapping[str, Any], cluster_time: Timestamp | None) -> dict[str, Any]:
    """Return the fields of a watermark: its token, and the token's cluster time, also in readable form."""
    at = {} if cluster_time is None else {"clusterTime": cluster_time, "positionAt": cluster_time.as_datetime()}
    return {"resumeToken": dict(token), **at}


def build_start_move(start: Timestamp, policy: str) -> list[dict[str, Any]]:
    """
    Return the update that moves a subscription over an oplog gap to a later time.

    It drops the token, because the server no longer accepts it. The partitions' committed positions stay. A later
    pinned start is kept. `gaps` records the lost part.
    """
    return [
        {"$set": {"gaps": add_gap({"$ifNull": ["$clusterTime", "$startAtOperationTime"]}, start, policy)}},
        {"$set": {"startAtOperationTime": {"$max": ["$startAtOperationTime", start]}}},
        {"$set": {"clusterTime": "$startAtOperationTime", "positionAt": {"$toDate": "$startAtOperationTime"}}},
        {"$unset": ["lost", "resumeToken", "fingerprint"]},
    ]


def add_gap(place: Any, until: Timestamp, policy: str) -> dict[str, Any]:
    """Return the last 20 recorded gaps, including a new one from a place, an expression, to a time."""
    gap = {"from": place, "until": until, "policy": literal(policy), "at": "$$NOW"}
    return {"$slice": [{"$concatArrays": [{"$ifNull": ["$gaps", []]}, [gap]]}, -_GAPS_KEPT]}


def cut_gaps(until: Timestamp) -> dict[str, Any]:
    """Return the recorded gaps without everything from a time on. Without any gap, the field is removed."""
    before = {"$filter": {"input": {"$ifNull": ["$gaps", []]}, "cond": {"$lt": ["$$this.from", until]}}}
    cut = {"$mergeObjects": ["$$this", {"until": {"$min": ["$$this.until", until]}}]}
    left = {"$map": {"input": before, "as": "this", "in": cut}}
    return {"$cond": [{"$eq": [before, []]}, REMOVED, left]}


def parse_position(document: Mapping[str, Any]) -> Timestamp | None:
    """Return the cluster time of a stored subscription's progress: the later of start and watermark, or None."""
    token = document.get("resumeToken")
    reached = document.get("clusterTime") or (time_of_token(token, None) if token else None)
    return max((time for time in (reached, document.get("startAtOperationTime")) if time is not None), default=None)


def parse_lost_history(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a stored handler's oplog gap. None if it has none, or its position has moved since."""
    lost, start = document.get("lost"), document.get("startAtOperationTime")
    if not lost or start is None:
        return None
    return lost if lost.get("at") == max(start, document.get("clusterTime") or start) else None


def is_out_of_reach(document: Mapping[str, Any], token: Mapping[str, Any]) -> bool:
    """Return True if a change of this handler cannot be read, because of an oplog gap, or because it was skipped."""
    start, time_ = document.get("startAtOperationTime"), time_of_token(token, None)
    if start is None or time_ is None:
        return False
    return bool(time_ < max(start, (parse_lost_history(document) or {}).get("oldest") or start))


def parse_layout(document: Mapping[str, Any]) -> Layout:
    """Return the partitioning of a stored subscription."""
    found = document["partitioning"]
    return Layout(int(found["term"]), found["partitions"], found["key"])


def layouts_in_force(documents: Iterable[Mapping[str, Any]]) -> dict[str, Layout]:
    """Return the partitionings of stored subscriptions by name."""
    return {parse_name(document): parse_layout(document) for document in documents}


def parse_name(document: Mapping[str, Any]) -> str:
    """Return the name of a stored handler."""
    return str(document["handler"])
