"""
Dead letters: changes that were set aside with their error, for a person to look at.

A dead letter is written together with the position that passes over its change (see `claims.set_aside`);
it is never lost and never there twice, since its `_id` is made of bridge, subscription and token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import bson
from bson.binary import Binary
from bson.raw_bson import RawBSONDocument
from pymongo.collection import Collection

from mongo_celery.bridge.change import event_of
from mongo_celery.mongo.table import Table, call_timeout

CHANGE_BYTES = 15 << 20
"""Up to here an event fits into a dead letter whole."""

_NAMING = ("_id", "operationType", "clusterTime", "ns", "documentKey")


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


def kept(change: bytes) -> Mapping[str, Any]:
    """
    What a dead letter holds of an event: all of it, as the server sent it, where that fits.

    Whoever lists dead letters must be able to read each of them: an event that clients could not decode is kept as
    `bytes`, with what names it.
    """
    if len(change) > CHANGE_BYTES:  # it must fit into a document
        return _named(change)
    try:
        bson.decode(change)
        return RawBSONDocument(change)
    except Exception:  # noqa: BLE001 - whatever broken bytes do to a decoder
        return {**_named(change, "documentKey"), "bytes": Binary(change)}


def _named(change: bytes, *without: str) -> Mapping[str, Any]:
    """As `naming`, or nothing where that could not be decoded either."""
    try:
        found = naming(change, *without)
        bson.decode(bson.encode(found))
        return found
    except Exception:  # noqa: BLE001 - as above
        return {}


def naming(change: bytes, *without: str) -> dict[str, Any]:
    """What names a change, of its event."""
    event = event_of(change)
    return {name: event[name] for name in _NAMING if name in event and name not in without}
