"""
What came to a bridge from elsewhere: how many messages its workers have dropped, by reason, and who else leads a bridge
of its name on the broker. It has a collection of its own, so that workers need not write to the lease.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pymongo.collection import Collection

from mongo_celery.mongo.table import Table, call_timeout

COLLECTION = "drops"

FORGED = "forged"
FOREIGN = "foreign"
MISDIRECTED = "misdirected"
TAMPERED = "tampered"


class Drops:
    """The counters of one bridge; they only grow."""

    def __init__(self, collection: Collection[dict[str, Any]], bridge: str, ttl: float) -> None:
        self._table = Table(collection, call_timeout(ttl))
        self._bridge = bridge

    def count(self, dropped: Mapping[str, int], sender: str | None = None) -> None:
        """
        Add to the counters.

        Args:
            dropped: numbers of messages by reason.
            sender: who sent the last foreign one, as it says itself.
        """
        change: dict[str, Any] = {
            "$inc": {f"dropped.{reason}": number for reason, number in dropped.items()},
            "$currentDate": {f"droppedAt.{reason}": True for reason in dropped},
        }
        if sender is not None:
            change["$set"] = {"foreignSender": sender}
        self._table.update({"_id": self._bridge}, change, upsert=True)

    def name_foreign_leader(self, who: str) -> None:
        """Record that another installation leads a bridge of this name on the same broker."""
        change = {"$set": {"foreignLeader.who": who}, "$currentDate": {"foreignLeader.at": True}}
        self._table.update({"_id": self._bridge}, change, upsert=True)
