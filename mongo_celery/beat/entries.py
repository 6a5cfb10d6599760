"""
The entries of a beat's schedule, with their last runs: one document each, beside the lease of the beat.

Each document has the term of the last leader. A leader first raises the term of all entries, then reads them. Each of
its writes requires its own term. So an earlier leader that resumes changes nothing, and notices it.

A run is stored before its message is sent, with the id of its task, and removed afterwards::

    (none) --claim--> run: {taskId} --message sent, settle--> (none)

A leader that finds a stored run sends it with the same id.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from pymongo import DeleteMany, UpdateMany, UpdateOne

from mongo_celery.bridge.state.state_collection import StateCollection, ids_under
from mongo_celery.mongo.expressions import after

COLLECTION = "beat"
_KEPT_SECONDS = 86_400.0
"""Time for which an entry that left the schedule keeps its last run, so that a rolling deploy loses none."""


class Entries(StateCollection):
    """The stored entries of one beat."""

    def take_over(self, term: int, schedule: Mapping[str, tuple[str, datetime]]) -> dict[str, dict[str, Any]]:
        """
        Raise the term of all entries, and add new ones.

        Args:
            term: the number of the caller's term.
            schedule: by name of the entry, its task, and the last run of an entry that is not stored.

        Returns:
            The stored entries of the schedule, by name. Some are missing if the term has ended.
        """
        every, names = ids_under(self._bridge), {self._id(name): name for name in schedule}
        self._table.write_all([UpdateMany({"_id": every, "term": {"$lt": term}}, {"$set": {"term": term}})])
        others = {"_id": {**every, "$nin": [*names]}, "term": term}
        is_old = {"removedAt": {"$ne": None}, "$expr": {"$lt": ["$removedAt", after(-_KEPT_SECONDS)]}}
        self._table.write_all(
            [
                UpdateMany({**others, "removedAt": None}, {"$currentDate": {"removedAt": True}}),
                DeleteMany({**others, **is_old}),
                *(self._upsert(term, name, task, last) for name, (task, last) in schedule.items()),
            ]
        )
        found = self._table.find({"_id": {"$in": [*names]}, "term": term})
        return {names[each["_id"]]: each for each in found}

    def claim(self, term: int, name: str, last_run_at: datetime, count: int, task_id: str) -> bool:
        """Store a run of an entry before it is sent. Return False if the term has ended: then it must not be sent."""
        change = {"lastRunAt": last_run_at, "totalRunCount": count, "run": {"taskId": task_id}}
        return self._table.update({"_id": self._id(name), "term": term}, {"$set": change})

    def settle(self, term: int, name: str, task_id: str) -> None:
        """Remove a stored run, whose message was sent."""
        self._table.update({"_id": self._id(name), "term": term, "run.taskId": task_id}, {"$unset": {"run": 1}})

    def _id(self, name: str) -> str:
        return f"{self._bridge}/{name}"

    def _upsert(self, term: int, name: str, task: str, last_run_at: datetime) -> UpdateOne:
        first = {"beat": self._bridge, "entry": name, "lastRunAt": last_run_at, "totalRunCount": 0}
        change = {"$setOnInsert": first, "$set": {"task": task}, "$unset": {"removedAt": 1}}
        return UpdateOne({"_id": self._id(name), "term": term}, change, upsert=True)
