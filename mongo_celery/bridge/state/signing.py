"""
The keys by which messages are signed: kept in the lease document, read by workers, exchanged without a stall.

A new key is announced first. Workers read the keys again every few seconds while messages come, so that all of
them know it by the time at which it comes into force; the renewal of the lease that finds the time come exchanges
the keys in one write. What was signed with the old one is accepted for a bounded time. All times are the server's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from bson import ObjectId
from pymongo.collection import Collection

from mongo_celery.mongo.expressions import after, literal, millis
from mongo_celery.mongo.keys import new_key
from mongo_celery.mongo.table import Table, call_timeout

KEY_SECONDS = 5.0
"""How old a worker's reading of the keys may be."""

ANNOUNCED_SECONDS = 3 * KEY_SECONDS
"""From the announcement of a key to its use."""

_DUE = {"$and": [{"$gt": ["$nextKey", None]}, {"$lte": ["$nextKey.from", "$$NOW"]}]}
_OLD = {"key": "$signingKey", "until": {"$add": ["$$NOW", "$nextKey.overlap"]}}
EXCHANGE: dict[str, Any] = {
    "$set": {
        "signingKey": {"$cond": [_DUE, "$nextKey.key", "$signingKey"]},
        "nextKey": {"$cond": [_DUE, None, {"$ifNull": ["$nextKey", None]}]},
        "previousKeys": {
            "$filter": {
                "input": {"$concatArrays": [{"$ifNull": ["$previousKeys", []]}, {"$cond": [_DUE, [_OLD], []]}]},
                "as": "each",
                "cond": {"$gt": ["$$each.until", "$$NOW"]},
            },
        },
    },
}
"""Part of each acquisition and renewal: puts an announced key in force when its time has come, and forgets old ones."""


def installation_kept() -> dict[str, Any]:
    """The id of this installation: made once, by whoever first asks."""
    return {"$ifNull": ["$installation", literal(str(ObjectId()))]}


@dataclass(frozen=True, slots=True)
class Sealing:
    """What a listener signs with."""

    key: bytes = field(repr=False)
    installation: str


def sealing_of(lease: Mapping[str, Any]) -> Sealing:
    """The key in force, from a reading of the lease."""
    return Sealing(bytes(lease["signingKey"]), str(lease.get("installation") or ""))


@dataclass(frozen=True, slots=True)
class KeyRing:
    """
    What a worker knows of a bridge's lease.

    Attributes:
        keys: whose signatures are accepted, the one in force first.
        identity: of the term that leads; None where no listener is running.
    """

    keys: tuple[bytes, ...] = field(repr=False)
    installation: str
    identity: Mapping[str, Any] | None


class SigningKeys:
    """The keys of one bridge."""

    def __init__(self, collection: Collection[dict[str, Any]], bridge: str, ttl: float) -> None:
        self._table = Table(collection, call_timeout(ttl))
        self._bridge = bridge

    def read(self) -> KeyRing | None:
        """The keys that are accepted now, or None before the first start of a listener."""
        still = {
            "$filter": {
                "input": {"$ifNull": ["$previousKeys", []]},
                "as": "each",
                "cond": {"$gt": ["$$each.until", "$$NOW"]},
            },
        }
        fields = {"signingKey": 1, "nextKey": 1, "installation": 1, "previousKeys": still}
        fields |= {"identity": 1, "listenerId": 1}
        found = self._table.aggregate([{"$match": {"_id": self._bridge}}, {"$project": fields}])
        if not found:
            return None
        lease = found[0]
        others = [*filter(None, [lease.get("nextKey")]), *lease["previousKeys"]]
        keys = (bytes(lease["signingKey"]), *(bytes(each["key"]) for each in others))
        identity = lease.get("identity") if lease.get("listenerId") else None
        return KeyRing(keys, str(lease.get("installation") or ""), identity)

    def announce(self, overlap: float) -> datetime | None:
        """
        Announce a new key.

        Args:
            overlap: for how many seconds the present one is accepted after the exchange.

        Returns:
            When it comes into force, if a listener leads then; None when there is no lease, or a key is announced
            already.
        """
        key = {"key": new_key(), "overlap": millis(overlap)}
        change = {"nextKey": {"$mergeObjects": [literal(key), {"from": after(ANNOUNCED_SECONDS)}]}}
        found = self._table.find_and_update({"_id": self._bridge, "nextKey": None}, [{"$set": change}])
        return None if found is None else found["nextKey"]["from"]
