"""
The keys by which messages are signed: kept apart from the lease, read by workers, exchanged without a stall.

Each bridge has one document in the collection `bridge_keys`, so that nobody needs to read keys to read the state, and
no writer of an outbox, which may store keys of entries in `keys`, can exchange one::

    {_id: "shop", key: KEY, next: {key, from, overlap} or null, previous: [{key, until}, ...]}

A new key is announced first. Workers read the keys again every few seconds while messages come, so that all of them
know it by the time at which it comes into force. The leader exchanges the keys in one write once that time has come.
What was signed with the old one is accepted for a bounded time. All times are the server's.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from bson import ObjectId
from pymongo.database import Database
from pymongo.errors import DuplicateKeyError

from mongo_celery.mongo.expressions import after, literal, millis
from mongo_celery.mongo.keys import new_key
from mongo_celery.mongo.table import Table, call_timeout

COLLECTION = "bridge_keys"

KEY_SECONDS = 5.0
"""Maximum age of a worker's reading of the keys."""

ANNOUNCED_SECONDS = 3 * KEY_SECONDS
"""From the announcement of a key to its use."""

_PREVIOUS = {"$ifNull": ["$previous", []]}
_DUE = {"$and": [{"$gt": ["$next", None]}, {"$lte": ["$next.from", "$$NOW"]}]}
_OLD = {"key": "$key", "until": {"$add": ["$$NOW", "$next.overlap"]}}
_EXCHANGE: dict[str, Any] = {
    "$set": {
        "key": {"$cond": [_DUE, "$next.key", "$key"]},
        "next": {"$cond": [_DUE, None, {"$ifNull": ["$next", None]}]},
        "previous": {
            "$filter": {
                "input": {"$concatArrays": [_PREVIOUS, {"$cond": [_DUE, [_OLD], []]}]},
                "as": "each",
                "cond": {"$gt": ["$$each.until", "$$NOW"]},
            },
        },
    },
}
"""Puts an announced key in force when its time has come, and forgets old ones. It may be repeated, by anybody."""


def installation_id() -> dict[str, Any]:
    """The id of this installation: made once, by whoever first asks."""
    return {"$ifNull": ["$installation", literal(str(ObjectId()))]}


@dataclass(frozen=True, slots=True)
class Sealing:
    """The key with which a listener signs."""

    key: bytes = field(repr=False)
    installation: str


@dataclass(frozen=True, slots=True)
class KeyRing:
    """
    A worker's knowledge of a bridge's keys and lease.

    Attributes:
        keys: whose signatures are accepted, the one in force first.
        identity: of the term that leads. None where no listener is running.
    """

    keys: tuple[bytes, ...] = field(repr=False)
    installation: str
    identity: Mapping[str, Any] | None


class SigningKeys:
    """The keys of one bridge."""

    def __init__(self, database: Database[dict[str, Any]], bridge: str, ttl: float) -> None:
        self._table = Table(database[COLLECTION], call_timeout(ttl))
        self._leases = Table(database["leases"], call_timeout(ttl))
        self._bridge = bridge
        self._this = {"_id": bridge}

    def sealing(self, lease: Mapping[str, Any]) -> Sealing:
        """Return what the leader signs with now. Make the first key, and put an announced one in force if it is due."""
        found = self._table.find_one(self._this) or self._make_first_key()
        if found.get("next") or found.get("previous"):
            found = self._table.find_and_update(self._this, [_EXCHANGE]) or found
        return Sealing(bytes(found["key"]), str(lease["installation"]))

    def _make_first_key(self) -> dict[str, Any]:
        first: dict[str, Any] = {"$setOnInsert": {"key": new_key(), "next": None, "previous": []}}
        with suppress(DuplicateKeyError):  # another process was first
            self._table.update(self._this, first, upsert=True)
        found = self._table.find_one(self._this)
        assert found is not None, "it was just stored"
        return found

    def read(self) -> KeyRing | None:
        """The keys that are accepted now, or None before the first start of a listener."""
        still = {"$filter": {"input": _PREVIOUS, "as": "each", "cond": {"$gt": ["$$each.until", "$$NOW"]}}}
        found = self._table.aggregate([{"$match": self._this}, {"$set": {"previous": still}}])
        lease = self._leases.find_one({"_id": self._bridge}, {"installation": 1, "identity": 1, "listenerId": 1})
        if not found or lease is None:
            return None
        others = [*filter(None, [found[0].get("next")]), *found[0]["previous"]]
        keys = (bytes(found[0]["key"]), *(bytes(each["key"]) for each in others))
        identity = lease.get("identity") if lease.get("listenerId") else None
        return KeyRing(keys, str(lease.get("installation") or ""), identity)

    def announce(self, overlap: float) -> datetime | None:
        """
        Announce a new key.

        Args:
            overlap: for how many seconds the present one is accepted after the exchange.

        Returns:
            When it comes into force, if a listener leads then. None when there is no key yet, or one is announced
            already.
        """
        key = {"key": new_key(), "overlap": millis(overlap)}
        change = {"next": {"$mergeObjects": [literal(key), {"from": after(ANNOUNCED_SECONDS)}]}}
        found = self._table.find_and_update({**self._this, "next": None}, [{"$set": change}])
        return None if found is None else found["next"]["from"]
