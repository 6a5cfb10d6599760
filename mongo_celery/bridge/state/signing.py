"""
The keys that sign messages. They are stored apart from the lease, and replaced without a pause.

Each bridge has one document in the collection `bridge_keys`. So a reader of the state needs no right on keys, and a
writer of an outbox, which may store keys of entries in `keys`, cannot replace one::

    {_id: "shop", key: KEY, next: {key, from, overlap} or null, previous: [{key, until}, ...]}

A new key is announced first. Workers read the keys again every few seconds while messages arrive, so all of them know
it before it is used. When its time has come, the leader replaces the keys in one write. Messages with an old signature
are accepted for a bounded time, which ends for all older keys with the overlap of the new one. All times are the
server's.
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
"""Largest age of a worker's copy of the keys."""

ANNOUNCED_SECONDS = 3 * KEY_SECONDS
"""Seconds from the announcement of a key to its use."""

_PREVIOUS = {"$ifNull": ["$previous", []]}
_DUE = {"$and": [{"$gt": ["$next", None]}, {"$lte": ["$next.from", "$$NOW"]}]}
_END = {"$add": ["$$NOW", "$next.overlap"]}
_OLDER = {
    "$map": {
        "input": _PREVIOUS,
        "as": "each",
        "in": {"$mergeObjects": ["$$each", {"until": {"$min": ["$$each.until", _END]}}]},
    }
}
_REPLACED = {"$concatArrays": [_OLDER, [{"key": "$key", "until": _END}]]}
_EXCHANGE: dict[str, Any] = {
    "$set": {
        "key": {"$cond": [_DUE, "$next.key", "$key"]},
        "next": {"$cond": [_DUE, None, {"$ifNull": ["$next", None]}]},
        "previous": {
            "$filter": {
                "input": {"$cond": [_DUE, _REPLACED, _PREVIOUS]},
                "as": "each",
                "cond": {"$gt": ["$$each.until", "$$NOW"]},
            },
        },
    },
}
"""Puts an announced key in force when its time has come, and forgets old ones. Any process may repeat it."""


def installation_id() -> dict[str, Any]:
    """Return the id of this installation, made at first use."""
    return {"$ifNull": ["$installation", literal(str(ObjectId()))]}


@dataclass(frozen=True, slots=True)
class Sealing:
    """The key that a listener signs with."""

    key: bytes = field(repr=False)
    installation: str


@dataclass(frozen=True, slots=True)
class KeyRing:
    """
    A worker's copy of a bridge's keys and lease facts.

    Attributes:
        keys: the accepted keys, the one in force first.
        identity: the identity of the leading term. None if no listener is running.
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
        """Return the leader's current signing key. Make the first key, or put a due announced one in force."""
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
        """Return the accepted keys, or None before the first start of a listener."""
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
            overlap: seconds for which the current key and older ones are accepted after the replacement, at most.

        Returns:
            The time when it takes effect, if a listener leads then. Otherwise the next leader exchanges the keys.
            None if there is no key yet, or one is already announced.
        """
        key = {"key": new_key(), "overlap": millis(overlap)}
        change = {"next": {"$mergeObjects": [literal(key), {"from": after(ANNOUNCED_SECONDS)}]}}
        found = self._table.find_and_update({**self._this, "next": None}, [{"$set": change}])
        return None if found is None else found["next"]["from"]
