"""
Dead letters: changes that were set aside with their error, for a person to look at.

A dead letter is written together with the position that passes over its change (see `claims.set_aside`);
it is never lost and never there twice, since its `_id` is made of bridge, subscription and token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pymongo.collection import Collection

from mongo_celery.mongo.table import Table, call_timeout


class DeadLetters:
    """The dead letters of one bridge."""

    def __init__(self, collection: Collection[dict[str, Any]], bridge: str, ttl: float) -> None:
        self._table = Table(collection, call_timeout(ttl))
        self._bridge = bridge

    def count(self) -> dict[str, int]:
        """How many there are, by subscription."""
        stages: list[dict[str, Any]] = [
            {"$match": {"_id": {"$gte": f"{self._bridge}/", "$lt": f"{self._bridge}0"}}},
            {"$group": {"_id": "$subscription", "count": {"$sum": 1}}},
        ]
        return {row["_id"]: row["count"] for row in self._table.aggregate(stages)}


def dead_letter(
    *,
    bridge: str,
    subscription: str,
    partition: int,
    token: Mapping[str, Any],
    key: str,
    change: Mapping[str, Any],
    error: str,
    traceback: str,
    attempts: int,
) -> dict[str, Any]:
    """The document of a dead letter; `at`, the server's time, is added when it is written."""
    return {
        "_id": f"{bridge}/{subscription}/{token['_data']}",
        "bridge": bridge,
        "subscription": subscription,
        "partition": partition,
        "resumeToken": dict(token),
        "key": key,
        "change": change,
        "error": error,
        "traceback": traceback,
        "attempts": attempts,
    }
