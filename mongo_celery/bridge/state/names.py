"""
Forget a subscription: everything that is stored of a handler that is gone from the code.

One transaction removes what is in force, the subscription's document and what is small. From then on nobody runs the
rest, and it is removed a little at a time. What is removed so is bound by the term of the lease at that moment: a
handler that comes back meanwhile, in a later term, keeps what it has begun. Killed at any point it is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pymongo
from bson.int64 import Int64
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.database import Database

from mongo_celery.bridge.state.audit import AuditRecords
from mongo_celery.bridge.state.dead_letters import ASKED
from mongo_celery.bridge.state.positions import Positions
from mongo_celery.bridge.state.stored import ids_under

_SECONDS = 30.0
_AT_ONCE = 100
_SMALL = ("partitions", "snapshots")
"""Collections of which a subscription has so little that it goes in one transaction."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """
    Numbers of the documents that are stored under a name.

    Attributes:
        stored: documents of stored changes.
        letters: dead letters.
        replays: how many of these are to be replayed.
    """

    partitions: int
    stored: int
    letters: int
    snapshots: int
    replays: int

    @property
    def any(self) -> bool:
        """Return True if there is any document."""
        return bool(self.partitions or self.stored or self.letters or self.snapshots)


class Names:
    """
    The names of one bridge's subscriptions.

    Args:
        database: the state database, with majority writes and majority reads.
        bridge: its name.
        positions: its moves.
    """

    def __init__(
        self, database: Database[dict[str, Any]], bridge: str, positions: Positions, audit: AuditRecords
    ) -> None:
        self._audit = audit
        self._database = database
        self._bridge = bridge
        self._positions = positions

    def holdings(self, name: str) -> Holdings:
        """Count the documents that are stored under a name, in force or not."""
        with pymongo.timeout(_SECONDS):
            counts = [
                self._database[each].count_documents({"_id": self._ids(name)})
                for each in ("partitions", "backlog", "dead_letters", "snapshots")
            ]
            replays = self._database["dead_letters"].count_documents({**ASKED, "_id": self._ids(name)})
        partitions, stored, letters, snapshots = counts
        return Holdings(partitions, stored, letters, snapshots, replays)

    def forget(self, name: str, record: Mapping[str, Any]) -> int | None:
        """
        Remove a subscription and its partitions. What is left (`remove`) is in force for nobody then.

        Returns:
            The lease's term: all that has a smaller one is over. None where the listener that leads serves it:
            nothing is changed.
        """

        def remove(session: ClientSession) -> int | None:
            is_free = {"$lte": ["$expiresAt", "$$NOW"]}
            is_not_served = {"$eq": [{"$type": f"$identity.handlers.{name}"}, "missing"]}
            guard = {"_id": self._bridge, "$expr": {"$or": [is_free, is_not_served]}}
            gone = [{"$unset": f"identity.handlers.{name}"}]
            lease = self._database["leases"].find_one_and_update(guard, gone, {"term": 1}, session=session)
            if lease is None:
                session.abort_transaction()
                return None
            mine = {"_id": f"{self._bridge}/{name}"}
            subscriptions = self._database["handlers"]
            subscriptions.delete_one(mine, session=session)
            for each in _SMALL:
                self._database[each].delete_many({"_id": self._ids(name)}, session=session)
            asked = {**ASKED, "_id": self._ids(name)}
            self._database["dead_letters"].update_many(asked, {"$unset": {"replay": ""}}, session=session)
            if subscriptions.find_one({"_id": ids_under(self._bridge)}, {"_id": 1}, session=session) is None:
                again = {"$set": {"startAtOperationTime": None}}  # a bridge without positions starts for the first time
                self._database["leases"].update_one({"_id": self._bridge}, again, session=session)
            self._audit.add(record, session)
            return int(lease["term"])

        return self._positions.run_transaction(remove)

    def remove(self, name: str, term: int, *, letters: bool) -> Iterator[int]:
        """
        Remove what is left under a name that no subscription has, a little at a time. How much each time.

        Args:
            term: of the lease when it was given up. What a later term has stored or set aside is left alone:
                somebody has begun anew with the name.
            letters: whether the dead letters go, too.
        """
        for each in ["backlog", "dead_letters"] if letters else ["backlog"]:
            yield from self._remove(self._database[each], self._ids(name), term)

    def _remove(self, target: Collection[dict[str, Any]], ids: dict[str, str], term: int) -> Iterator[int]:
        is_over = {"partitioningTerm": {"$not": {"$gt": Int64(term)}}}
        while True:
            with pymongo.timeout(_SECONDS):
                found = [each["_id"] for each in target.find({"_id": ids}, {"_id": 1}).sort("_id", 1).limit(_AT_ONCE)]
                if not found:
                    return
                deleted = target.delete_many({"_id": {"$in": found}, **is_over}).deleted_count
            ids["$gt"] = found[-1]
            yield deleted

    def _ids(self, name: str) -> dict[str, str]:
        return ids_under(f"{self._bridge}/{name}")
