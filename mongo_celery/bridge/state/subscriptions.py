"""
A subscription's own position: its start, its low watermark and the fingerprint of the stream it came from.

Every write is guarded by `epoch`, which a take-over sets to the version of its lease: a listener whose
term has ended can move nothing here. A watermark only grows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pymongo
from bson import Timestamp
from bson.int64 import Int64
from pymongo.collection import Collection

from mongo_celery.mongo.expressions import literal
from mongo_celery.mongo.table import call_timeout


class Subscriptions:
    """The subscriptions of one bridge."""

    def __init__(self, collection: Collection[dict[str, Any]], bridge: str, ttl: float) -> None:
        self._collection = collection
        self._bridge = bridge
        self._timeout = call_timeout(ttl)

    def take_over(self, names: Sequence[str], version: int) -> dict[str, dict[str, Any]]:
        """
        Raise the epoch of each subscription to this version, creating what is missing.

        Returns:
            The documents by name. One whose epoch is larger than `version` was not won.
        """
        with pymongo.timeout(self._timeout):
            for name in names:
                self._collection.update_one(
                    {"_id": self._id(name)},
                    [
                        {"$replaceWith": {"$mergeObjects": [literal(_DEFAULTS), "$$ROOT"]}},
                        {"$set": {"epoch": {"$max": ["$epoch", Int64(version)]}}},
                    ],
                    upsert=True,
                )
            wanted = {self._id(name): name for name in names}
            return {wanted[doc["_id"]]: doc for doc in self._collection.find({"_id": {"$in": list(wanted)}})}

    def pin(self, name: str, version: int, start: Timestamp, position: Mapping[str, Any] | None) -> bool:
        """
        Record where a new subscription begins: at a time, or where the bridge stands.

        Args:
            position: `resumeToken` and `clusterTime` of the bridge's position, or None on its first start.
        """
        change: dict[str, Any] = {"startAtOperationTime": start}
        if position is not None:
            change |= {"resumeToken": position["resumeToken"], "clusterTime": position["clusterTime"]}
        with pymongo.timeout(self._timeout):
            result = self._collection.update_one(
                {"_id": self._id(name), "epoch": version, "startAtOperationTime": None},
                {"$set": change},
            )
        return result.matched_count == 1

    def move_start(self, name: str, version: int, start: Timestamp) -> bool:
        """
        Begin again at a later time, after history was lost and an operator decided to go on.

        The token is dropped, since the server no longer accepts it; what partitions have committed stays. A start
        that was pinned later still is kept.

        Returns:
            False when the epoch has moved on, or the subscription stands behind this time already.
        """
        with pymongo.timeout(self._timeout):
            result = self._collection.update_one(
                {
                    "_id": self._id(name),
                    "epoch": version,
                    "$or": [{"clusterTime": None}, {"clusterTime": {"$lte": start}}],
                },
                [
                    {"$set": {"startAtOperationTime": {"$max": ["$startAtOperationTime", start]}}},
                    {"$set": {"resumeToken": None, "clusterTime": "$startAtOperationTime", "fingerprint": None}},
                ],
            )
        return result.matched_count == 1

    def advance(
        self,
        name: str,
        version: int,
        token: Mapping[str, Any],
        cluster_time: Timestamp | None,
        fingerprint: str,
    ) -> bool:
        """
        Store a watermark, together with the fingerprint of the stream that its token is from.

        Returns:
            False when the epoch has moved on (the term has ended) or the stored token is not smaller.
        """
        change = {"resumeToken": dict(token), "clusterTime": cluster_time, "fingerprint": fingerprint}
        with pymongo.timeout(self._timeout):
            result = self._collection.update_one(
                {
                    "_id": self._id(name),
                    "epoch": version,
                    "$or": [{"resumeToken": None}, {"resumeToken._data": {"$lt": token["_data"]}}],
                },
                {"$set": change},
            )
        return result.matched_count == 1

    def read_all(self) -> list[dict[str, Any]]:
        """All subscriptions of the bridge, also those that no handler serves any more."""
        with pymongo.timeout(self._timeout):
            return list(self._collection.find({"_id": {"$gte": f"{self._bridge}/", "$lt": f"{self._bridge}0"}}))

    def _id(self, name: str) -> str:
        return f"{self._bridge}/{name}"


_DEFAULTS: dict[str, Any] = {
    "epoch": Int64(0),
    "resumeToken": None,
    "clusterTime": None,
    "fingerprint": None,
    "startAtOperationTime": None,
}
