"""A collection of the state: the documents of one bridge, by the beginning of their `_id`."""

from __future__ import annotations

from typing import Any

from pymongo.collection import Collection

from mongo_celery.mongo.table import Table, call_timeout

_HASHES = 1 << 64


class StateCollection:
    """
    The documents of one bridge in a collection of the state. Thread-safe.

    Args:
        collection: a collection with majority writes and majority reads.
        bridge: name of the bridge.
        ttl: seconds of the right that calls must not outlive.
    """

    def __init__(self, collection: Collection[dict[str, Any]], bridge: str, ttl: float) -> None:
        self._table = Table(collection, call_timeout(ttl))
        self._bridge = bridge
        self._ttl = ttl


def ids_under(prefix: str) -> dict[str, str]:
    """Match the `_id`s of a bridge or partition that begin with this and a slash. A zero follows the slash in order."""
    return {"$gt": f"{prefix}/", "$lt": range_end(prefix)}


def range_end(prefix: str) -> str:
    """Return the first text after all `_id`s that begin with this and a slash."""
    return f"{prefix}0"


def to_signed(hash_: int) -> int:
    """Return a hash from 0 to 2^64 - 1 in MongoDB's form."""
    return hash_ - _HASHES if hash_ >= _HASHES // 2 else hash_


def to_unsigned(hash_: int) -> int:
    """Return the hash from 0 to 2^64 - 1 for MongoDB's form."""
    return hash_ % _HASHES
