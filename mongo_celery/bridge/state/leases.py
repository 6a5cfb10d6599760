"""
The lease: a time-limited right to be the listener of a bridge.

The server decides. Acquire, renew and release are three operations::

    free --acquire(term + 1)--> held by (listenerId, term) --renew--> held
     ^                                   |                |
     +------------- release -------------+                +-- expiresAt passes: free again

1. An acquisition succeeds only if the lease is free or expired by the server's clock. It always raises the term. There
   is no "refresh if it is mine": a late renewal could take a lease back.
2. Renew and release match only `{listenerId, term}`.
3. Release removes `listenerId` and `expiresAt` and keeps the document, so the term never starts again at 0.
4. The holder trusts its lease until *start of the last successful renewal* + ttl - margin, by its own monotonic clock.
   A slow round trip cannot extend it.

| failure | what happens |
|---|---|
| the answer of an acquisition is lost | that term expires after its ttl |
| the answer of a renewal is lost | the trusted time does not move; the next renewal decides |
| the document is deleted | the renewal matches nothing: step down; the next acquisition counts from cluster time |
| a primary's clock was far ahead | held until then, unless an operator ends it: `docs/operations/restore.md` |

Field names are those of the source, a pessimistic listener lock in MongoDB by Alec Henninger. The term and the server's
clock fix the known faults of its descendants.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from bson import ObjectId, Timestamp
from bson.int64 import Int64
from pymongo.collection import Collection
from pymongo.errors import DuplicateKeyError

from mongo_celery.bridge.state.schema import SCHEMA, check_schema, migrate
from mongo_celery.bridge.state.signing import installation_id
from mongo_celery.bridge.state.state_collection import StateCollection
from mongo_celery.mongo.expressions import REMOVED, SHIFT, after, literal, millis, next_number
from mongo_celery.mongo.oplog import last_operation_time
from mongo_celery.mongo.table import Table, call_timeout

_STANDBY_SECONDS = 15.0
_TRUST = 0.9
"""Share of the ttl for which the holder trusts its lease. The rest is a margin for clock drift."""


@dataclass(frozen=True, slots=True)
class Term:
    """
    The time from one acquisition to its end.

    Attributes:
        listener_id: unique to this term.
        number: the term's number, stored as `term`.
        trusted_until: monotonic time at which this process stops trusting the lease.
        document: the lease when acquired.
        clock_ahead: seconds from this process's monotonic clock to the server's clock, as of the last renewal. It is
            never too large, and too small only by the way of the answer.
    """

    listener_id: str
    number: int
    trusted_until: float
    document: Mapping[str, Any]
    clock_ahead: float


class Leases(StateCollection):
    """The lease of one bridge."""

    def __init__(self, collection: Collection[dict[str, Any]], bridge: str, ttl: float) -> None:
        super().__init__(collection, bridge, ttl)
        self._drops = Table(collection.database[DROPS], call_timeout(ttl))

    def ensure(self) -> None:
        """
        Create the document if it is missing, and migrate an older state.

        MongoDB refuses `$expr` in an upsert, so this is a separate step.

        Its term begins at the operation time. Each earlier term and fencing token needed a write, and so at least one
        increment of that time. So none is used twice, even within a second of a drop.
        """
        document: dict[str, Any] = {
            "schemaVersion": SCHEMA,
            "term": self._operation_number(),
            "ttl": millis(self._ttl),
            "state": "idle",
        }
        with suppress(DuplicateKeyError):  # another listener was first
            self._table.update({"_id": self._bridge}, {"$setOnInsert": document}, upsert=True)
        migrate(self._table.collection.database, self._bridge)

    def _operation_number(self) -> Int64:
        with self._table.limit():
            time_ = last_operation_time(self._table.collection.database.client)
        return Int64(time_.time * SHIFT + time_.inc) if time_ is not None else Int64(0)

    def acquire(
        self,
        identity: Mapping[str, Any],
        known: Mapping[str, Any] | None = None,
    ) -> Term | None:
        """
        Take the lease if it is free or expired. Its identity must be missing, the given one, or the known one.

        Args:
            identity: the identity of the new term. The lease keeps it even after the term.
            known: the identity that the caller has read and compared.

        Returns:
            The new term, or None while another listener holds the lease.
        """
        listener_id = str(ObjectId())
        free = {"$lte": ["$expiresAt", "$$NOW"]}
        compared = {
            "_id": self._bridge,
            "schemaVersion": SCHEMA,
            "identity": {"$in": [None, dict(identity), known]},
            "$expr": free,
        }
        stages = [*_acquisition(listener_id, self._ttl), {"$set": {"identity": literal(dict(identity))}}]
        started = time.monotonic()
        document = self._table.find_and_update(compared, stages)
        if document is None:
            return None
        return Term(listener_id, document["term"], started + self._ttl * _TRUST, document, _clock_ahead(document))

    def renew(self, term: Term) -> Term | None:
        """
        Extend the lease of this term.

        Returns:
            The term with its new trusted time, or None if it has ended: then nothing more may be dispatched.
        """
        started = time.monotonic()
        change = {"expiresAt": after(self._ttl), "renewedAt": "$$NOW"}
        document = self._table.find_and_update(self._mine(term), [{"$set": change}])
        if document is None:
            return None
        return Term(term.listener_id, term.number, started + self._ttl * _TRUST, document, _clock_ahead(document))

    def release(self, term: Term, state: str = "idle", error: str | None = None) -> bool:
        """Release the lease. Return False if this term no longer held it. The document keeps term and identity."""
        change = {
            "listenerId": REMOVED,
            "expiresAt": REMOVED,
            "state": state,
            "error": literal(error) if error else REMOVED,
        }
        return self._table.update(self._mine(term), [{"$set": change}])

    def raise_version(self, term: Term, above: int) -> Term | None:
        """Raise the number of this term above a larger one in the state. Return None if the term has ended."""
        document = self._table.find_and_update(
            self._mine(term),
            [{"$set": {"term": {"$max": [next_number("term"), Int64(above + 1)]}}}],
        )
        if document is None:
            return None
        return Term(term.listener_id, document["term"], term.trusted_until, document, term.clock_ahead)

    def pin_start(self, term: Term, start: Timestamp) -> Timestamp | None:
        """
        Record the bridge's start before anything is read.

        Returns:
            The first recorded time, or None if the term has ended.
        """
        guard = self._mine(term)
        with self._table.limit():
            self._table.update({**guard, "startAtOperationTime": None}, {"$set": {"startAtOperationTime": start}})
            document = self._table.find_one(guard, {"startAtOperationTime": 1})
        return None if document is None else document["startAtOperationTime"]

    def record_report(self, term: Term, report: Mapping[str, Any]) -> bool:
        """Store the listener's report for `status`. Return False if the term has ended."""
        change = {"$set": {"report": dict(report)}, "$currentDate": {"reportedAt": True}}
        return self._table.update(self._mine(term), change)

    def note_standby(self) -> None:
        """Record that this process waits for the lease. The record is valid for 15 s, only for `status`."""
        host, pid = socket.gethostname(), os.getpid()
        me = {"host": literal(host), "pid": literal(pid), "at": "$$NOW"}
        change = {"standbys": {"$concatArrays": [_others(host, pid), [me]]}}
        self._table.update({"_id": self._bridge}, [{"$set": change}])

    def read(self) -> dict[str, Any] | None:
        """
        Return the lease document, or None before the first start.

        It includes the server's verdicts: `live` (the lease is held now), `reportAge` and `renewedAge` (milliseconds
        since the listener's last report and renewal), and messages that workers have dropped (see `Drops`). `standbys`
        are those of the last 15 s.
        """
        verdicts = {
            "live": {"$gt": ["$expiresAt", "$$NOW"]},
            "reportAge": {"$subtract": ["$$NOW", "$reportedAt"]},
            "renewedAge": {"$subtract": ["$$NOW", "$renewedAt"]},
            "standbys": _others("$host", "$pid"),
        }
        found = self._table.aggregate([{"$match": {"_id": self._bridge}}, {"$set": verdicts}])
        if found:
            check_schema(found[0])
        return {**(self._drops.find_one({"_id": self._bridge}) or {}), **found[0]} if found else None

    def _mine(self, term: Term) -> dict[str, Any]:
        return {"_id": self._bridge, "listenerId": term.listener_id, "term": term.number}


def _clock_ahead(document: Mapping[str, Any]) -> float:
    renewed_at: datetime = document["renewedAt"]
    return renewed_at.replace(tzinfo=UTC).timestamp() - time.monotonic()


def _others(host: object, pid: object) -> dict[str, Any]:
    """Return the standbys that have reported recently, except the given process."""
    is_recent = {"$gt": ["$$this.at", {"$subtract": ["$$NOW", millis(_STANDBY_SECONDS)]}]}
    is_other = {"$or": [{"$ne": ["$$this.host", host]}, {"$ne": ["$$this.pid", pid]}]}
    return {"$filter": {"input": {"$ifNull": ["$standbys", []]}, "as": "this", "cond": {"$and": [is_recent, is_other]}}}


def _acquisition(listener_id: str, ttl: float) -> Sequence[Mapping[str, Any]]:
    """Return the stages with which a new term takes the lease."""
    return [
        {
            "$set": {
                "term": next_number("term"),
                "listenerId": literal(listener_id),
                "expiresAt": after(ttl),
                "ttl": literal(millis(ttl)),
                "renewedAt": "$$NOW",
                "acquiredAt": "$$NOW",
                "host": literal(socket.gethostname()),
                "pid": literal(os.getpid()),
                "state": "leading",
                "report": REMOVED,
                "error": REMOVED,
                "installation": installation_id(),
            },
        },
    ]


DROPS = "drops"

FORGED = "forged"
FOREIGN = "foreign"
MALFORMED = "malformed"
MISDIRECTED = "misdirected"
TAMPERED = "tampered"


class Drops(StateCollection):
    """A bridge's counters. They only grow."""

    def count(self, dropped: Mapping[str, int], sender: str | None = None) -> None:
        """
        Add to the counters.

        Args:
            dropped: numbers of messages by reason.
            sender: `pid@host` of the last foreign sender, as it claims.
        """
        change: dict[str, Any] = {
            "$inc": {f"dropped.{reason}": number for reason, number in dropped.items()},
            "$currentDate": {f"droppedAt.{reason}": True for reason in dropped},
        }
        if sender is not None:
            change["$set"] = {"foreignSender": sender}
        self._table.update({"_id": self._bridge}, change, upsert=True)
