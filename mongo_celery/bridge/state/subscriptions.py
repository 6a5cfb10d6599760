"""
A subscription's own position: its start, its low watermark and the fingerprint of the stream it came from.

Every write of a listener is guarded by `term`, which a take-over sets to that of its lease: a listener whose term has
ended can move nothing here. A watermark only grows.

A subscription whose place the oplog no longer holds carries `lost`: `since`, `at` (its place), `oldest` (the oldest
entry that was seen then, or null) and `error`. It counts only while the subscription stands at `at`: a new position
settles it.

`partitioning` says how its changes are spread: its `term`, how many `partitions`, and by which `key`. The partitions in
force are those of that term. It is there from the first take-over on, and changed in one write. Its term is the one
that put it in force, so it is above all that were ever used, also where a state database was dropped: targets compare
it (see `fenced/fence.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bson import Timestamp
from bson.int64 import Int64
from pymongo import UpdateOne

from mongo_celery.bridge.state.state_collection import StateCollection, ids_under
from mongo_celery.mongo.expressions import literal
from mongo_celery.mongo.oplog import time_of_token
from mongo_celery.mongo.table import Update

_GAPS_KEPT = 20

OWED = "owed"
"""Value of `snapshot` in a handler that begins with a snapshot, until that snapshot is requested."""


@dataclass(frozen=True, slots=True)
class Layout:
    """
    The partitioning of a handler.

    Attributes:
        term: the one that put it in force. A later one is larger.
        partitions: how many there are.
        key: hash and name of the partition rule.
    """

    term: int
    partitions: int
    key: str

    def is_equivalent(self, other: Layout) -> bool:
        """Return True if both spread changes alike, whatever their terms."""
        return self.partitions == other.partitions and self.key == other.key

    def document(self) -> dict[str, Any]:
        """As it is stored."""
        return {"term": Int64(self.term), "partitions": self.partitions, "key": self.key}


@dataclass(frozen=True, slots=True)
class Advance:
    """A watermark to be stored: its handler, the term that stores it, its token and cluster time."""

    name: str
    term: int
    token: Mapping[str, Any]
    cluster_time: Timestamp | None


class Subscriptions(StateCollection):
    """The subscriptions of one bridge."""

    def take_over(self, layouts: Mapping[str, Layout], term: int) -> dict[str, dict[str, Any]]:
        """
        Raise the term of each handler to this one, creating what is missing.

        Two calls, however many they are. Somebody else who creates one at the same time may leave it with its term.

        Args:
            layouts: by name, for those that have none yet.

        Returns:
            The documents by name. One whose term is not `term` was not won.
        """
        writes = [
            UpdateOne({"_id": self._id(name)}, self._winning(name, term, layout), upsert=True)
            for name, layout in layouts.items()
        ]
        self._table.write_all(writes)
        return self._read(list(layouts))

    def affirm(self, names: Sequence[str], term: int) -> dict[str, dict[str, Any]]:
        """Read some subscriptions after a write with this term, which a deposed server cannot acknowledge."""
        change = {"$max": {"term": Int64(term)}}
        self._table.write_all([UpdateOne({"_id": self._id(name)}, change) for name in names])
        return self._read(names)

    def _read(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        found = self._table.find({"_id": {"$in": [self._id(name) for name in names]}})
        return {parse_name(document): document for document in found}

    def activate_layout(self, name: str, layout: Layout, term: int) -> bool:
        """
        Put a layout in force in one write. False when the term is over.

        The position may have moved since the old partitions went, but only over history that was lost.
        """
        change = {"$set": {"partitioning": layout.document()}}
        return self._table.update({"_id": self._id(name), "term": term}, change)

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
        Record where a new subscription begins: at a time, or behind a resume token.

        Args:
            position: `resumeToken` and `clusterTime` of that token. None for a time.
            with_snapshot: whether it is given what exists then, which is owed from this write on. When that was stays
                known, whatever becomes of the start.
        """
        change: dict[str, Any] = {"startAtOperationTime": start}
        if with_snapshot:
            change |= {"snapshot": OWED, "snapshotFrom": start}
        if position is not None:
            change |= watermark_fields(position["resumeToken"], position["clusterTime"])
        guard = {"_id": self._id(name), "term": term, "startAtOperationTime": None}
        return self._table.update(guard, {"$set": change})

    def note_snapshot(self, name: str, term: int) -> bool:
        """The snapshots with which it begins are asked for. False when the term is over."""
        return self._table.update({"_id": self._id(name), "term": term}, {"$set": {"snapshot": "asked for"}})

    def move_start(self, name: str, term: int, start: Timestamp, policy: str) -> bool:
        """
        Begin again at a later time, after history was lost (see `build_start_move`).

        Returns:
            False when the term is over, or the subscription stands behind this time already.
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
        Record that the place of a subscription can no longer be read, and that nobody has decided.

        Returns:
            False when the term is over.
        """
        lost = {"at": place, "error": error} | ({"oldest": oldest} if oldest is not None else {})
        change = {"lost": {"$mergeObjects": [{"since": "$$NOW"}, literal(lost)]}}
        return self._table.update({"_id": self._id(name), "term": term}, [{"$set": change}])

    def clear_lost(self, name: str, term: int) -> bool:
        """The place can be read after all. False when the term is over."""
        return self._table.update({"_id": self._id(name), "term": term}, {"$unset": {"lost": ""}})

    def advance_all(self, advances: Iterable[Advance], fingerprint: str) -> None:
        """
        Store watermarks in one call, together with the fingerprint of the stream that their tokens are from.

        One is refused where the term is over, or the stored token is not smaller. Which of
        them were is not said.

        Raises:
            PyMongoError: some may have been stored. Storing them again is harmless.
        """
        self._table.write_all([UpdateOne(*self._advance(each, fingerprint)) for each in advances])

    def _advance(self, to: Advance, fingerprint: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Guard and change of storing a watermark."""
        guard = {
            "_id": self._id(to.name),
            "term": to.term,
            "$or": [{"resumeToken": None}, {"resumeToken._data": {"$lt": to.token["_data"]}}],
        }
        return guard, {"$set": {**watermark_fields(to.token, to.cluster_time), "fingerprint": fingerprint}}

    def read_all(self) -> list[dict[str, Any]]:
        """All subscriptions of the bridge, also those that no handler serves any more."""
        return self._table.find({"_id": ids_under(self._bridge)})

    def _id(self, name: str) -> str:
        return f"{self._bridge}/{name}"

    def _winning(self, name: str, term: int, layout: Layout) -> Update:
        """Return the update of a take-over: my term, and what is missing."""
        missing = {"bridge": self._bridge, "handler": name, "partitioning": layout.document()}
        return [
            {"$replaceWith": {"$mergeObjects": [literal(missing), "$$ROOT"]}},
            {"$set": {"term": {"$max": ["$term", Int64(term)]}}},
        ]


def watermark_fields(token: Mapping[str, Any], cluster_time: Timestamp | None) -> dict[str, Any]:
    """Return the fields of a watermark: its token, the cluster time of that, and the same for people."""
    at = {} if cluster_time is None else {"clusterTime": cluster_time, "positionAt": cluster_time.as_datetime()}
    return {"resumeToken": dict(token), **at}


def build_start_move(start: Timestamp, policy: str) -> list[dict[str, Any]]:
    """
    The update that moves a subscription over history that was lost, to a later time.

    The token is dropped, since the server no longer accepts it. What partitions have committed stays. A start that was
    pinned later still is kept. What is given up is noted among `gaps`.
    """
    return [
        {"$set": {"gaps": _with_gap(start, policy)}},
        {"$set": {"startAtOperationTime": {"$max": ["$startAtOperationTime", start]}}},
        {"$set": {"clusterTime": "$startAtOperationTime", "positionAt": {"$toDate": "$startAtOperationTime"}}},
        {"$unset": ["lost", "resumeToken", "fingerprint"]},
    ]


def _with_gap(start: Timestamp, policy: str) -> dict[str, Any]:
    """The noted gaps, the last 20 of them, and one more: from where it stands to where it goes on."""
    place = {"$ifNull": ["$clusterTime", "$startAtOperationTime"]}
    gap = {"from": place, "until": start, "policy": literal(policy), "at": "$$NOW"}
    return {"$slice": [{"$concatArrays": [{"$ifNull": ["$gaps", []]}, [gap]]}, -_GAPS_KEPT]}


def parse_position(document: Mapping[str, Any]) -> Timestamp | None:
    """Return the cluster time up to which a stored subscription is done: the later of start and watermark, or None."""
    token = document.get("resumeToken")
    reached = document.get("clusterTime") or (time_of_token(token, None) if token else None)
    return max((time for time in (reached, document.get("startAtOperationTime")) if time is not None), default=None)


def parse_lost_history(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the lost history of a stored handler. None if it has lost none, or its position has moved since."""
    lost, start = document.get("lost"), document.get("startAtOperationTime")
    if not lost or start is None:
        return None
    return lost if lost.get("at") == max(start, document.get("clusterTime") or start) else None


def is_out_of_reach(document: Mapping[str, Any], token: Mapping[str, Any]) -> bool:
    """Return True if a change of this handler can no longer be read: its history was lost, or given up."""
    start, time_ = document.get("startAtOperationTime"), time_of_token(token, None)
    if start is None or time_ is None:
        return False
    return bool(time_ < max(start, (parse_lost_history(document) or {}).get("oldest") or start))


def parse_layout(document: Mapping[str, Any]) -> Layout:
    """Return how the changes of a stored subscription are spread."""
    found = document["partitioning"]
    return Layout(int(found["term"]), found["partitions"], found["key"])


def layouts_in_force(documents: Iterable[Mapping[str, Any]]) -> dict[str, Layout]:
    """Return the layouts of stored subscriptions by name."""
    return {parse_name(document): parse_layout(document) for document in documents}


def parse_name(document: Mapping[str, Any]) -> str:
    """Return the name of a stored handler."""
    return str(document["handler"])
