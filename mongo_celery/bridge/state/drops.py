"""
Counters of the messages that the workers of a bridge have dropped, by reason. They have a collection of their own, so
that workers need not write to the lease.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pymongo.collection import Collection

from mongo_celery.mongo.table import Table, call_timeout

COLLECTION = "drops"

FORGED = "forged"
FOREIGN = "foreign"
MALFORMED = "malformed"
MISDIRECTED = "misdirected"
TAMPERED = "tampered"


class Drops:
    """The counters of one bridge. They only grow."""

    def __init__(self, collection: Collection[dict[str, Any]], bridge: str, ttl: float) -> None:
        self._table = Table(collection, call_timeout(ttl))
        self._bridge = bridge

    def count(self, dropped: Mapping[str, int], sender: str | None = None) -> None:
        """
        Add to the counters.

        Args:
            dropped: numbers of messages by reason.
            sender: `pid@host` of the last foreign one, as it says itself.
        """
        change: dict[str, Any] = {
            "$inc": {f"dropped.{reason}": number for reason, number in dropped.items()},
            "$currentDate": {f"droppedAt.{reason}": True for reason in dropped},
        }
        if sender is not None:
            change["$set"] = {"foreignSender": sender}
        self._table.update({"_id": self._bridge}, change, upsert=True)
