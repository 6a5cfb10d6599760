"""
The name of a subscription: everything of one goes over to another name, or goes.

A name is the beginning of every `_id`, so nothing can be renamed in place. What may be large is copied first, under the
new name, where nobody reads it; then one transaction puts it in force, by the subscription's document alone; then what
has the old name is removed::

    old in force --begin--> closed to all before --copy--> copied --put_in_force--> new in force --remove--> done
         ^                          |                        |
         +---- a listener began: its version is another one, and nothing is put in force

1. `begin` is a term of its own: executions of before are refused, and nothing changes under the old name any more,
   unless a listener begins. That raises the lease's version, which `put_in_force` compares.
2. A copy that was left half-made is removed before the next one: what is copied might have changed since.
3. Targets know a handler by the name in their stamps. The partitions keep the first one (`fencedAs`), and pass it on to
   later layouts: so a late execution from before the new name is refused, and an older dead letter writes over nothing.

| killed | what is there | repeated |
|---|---|---|
| before `put_in_force` | the old name, as it was; a listener of before may go on | begins anew |
| behind it | the new name; leftovers of the old one, which nobody reads | removes them |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pymongo
from bson.int64 import Int64
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.database import Database

from mongo_celery.bridge.state.partitions import closed_stages
from mongo_celery.bridge.state.positions import Positions, noted
from mongo_celery.bridge.state.stored import ids_under
from mongo_celery.mongo.expressions import literal

_SECONDS = 30.0
_AT_ONCE = 100
_NAMED = ("dead_letters", "replays", "snapshots")
"""Collections whose `_id`s have the subscription's name, and no generation."""

RENAMED = "renamedFrom"
"""Field of a subscription: the name that it had before, and of which something may be left."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """
    What is stored under a name.

    Attributes:
        stored: documents of stored changes.
        letters: dead letters.
    """

    partitions: int
    stored: int
    letters: int
    replays: int

    @property
    def any(self) -> bool:
        """Whether there is anything."""
        return bool(self.partitions or self.stored or self.letters or self.replays)


class Names:
    """
    The names of one bridge's subscriptions.

    Args:
        database: the state database, with majority writes and majority reads.
        bridge: its name.
        positions: its moves.
    """

    def __init__(self, database: Database[dict[str, Any]], bridge: str, positions: Positions) -> None:
        self._database = database
        self._bridge = bridge
        self._positions = positions

    def holdings(self, name: str) -> Holdings:
        """What is stored under a name, in force or not."""
        with pymongo.timeout(_SECONDS):
            counts = [
                self._database[each].count_documents({"_id": self._ids(name)})
                for each in ("partitions", "spill", "dead_letters", "replays")
            ]
        return Holdings(*counts)

    # -- another name ------------------------------------------------------------------------------

    def begin(self, name: str, version: int) -> int | Literal["led", "running"]:
        """
        Close a subscription to all that was before, while nobody leads.

        Args:
            version: of the lease, as it was seen.

        Returns:
            The version of this term, or why it is none: somebody leads, or has led since; or a handler runs.
        """

        def close(session: ClientSession) -> int | Literal["led", "running"]:
            taken = self._positions.take_version(session, None, seen=version)
            if taken is None:
                session.abort_transaction()
                return "led"
            scope = {"_id": self._ids(name)}
            running = {**scope, "claim": {"$ne": None}, "$expr": {"$gt": ["$claim.until", "$$NOW"]}}
            partitions = self._database["partitions"]
            if partitions.find_one(running, {"_id": 1}, session=session) is not None:
                session.abort_transaction()
                return "running"
            partitions.update_many(scope, closed_stages(taken, fenced_as=name), session=session)
            mine = {"_id": f"{self._bridge}/{name}"}
            self._database["subscriptions"].update_one(mine, {"$set": {"epoch": Int64(taken)}}, session=session)
            return taken

        return self._positions.together(close)

    def copy(self, old: str, new: str, generation: int) -> Iterator[int]:
        """
        Copy everything to the new name, a little at a time; how much each time.

        Args:
            generation: of the layout in force: nothing else of partitions and stored changes is.
        """
        for each in ("partitions", "spill", *_NAMED):
            yield from self._remove(each, new)
        for each in ("partitions", "spill"):
            yield from self._copy(self._database[each], f"{old}/{generation}", f"{new}/{generation}", {})
        for each in _NAMED:
            fields = {} if each == "snapshots" else {"subscription": literal(new)}
            yield from self._copy(self._database[each], old, new, fields)

    def _copy(
        self, collection: Collection[dict[str, Any]], old: str, new: str, fields: Mapping[str, Any]
    ) -> Iterator[int]:
        before, ids = f"{self._bridge}/{old}", self._ids(old)
        rest = {"$substrBytes": ["$_id", len(before), -1]}
        renamed = {"_id": {"$concat": [literal(f"{self._bridge}/{new}"), rest]}, **fields}
        while True:
            with pymongo.timeout(_SECONDS):
                found = [
                    each["_id"] for each in collection.find({"_id": ids}, {"_id": 1}).sort("_id", 1).limit(_AT_ONCE)
                ]
                if not found:
                    return
                some = {"_id": {**ids, "$lte": found[-1]}}
                merge = {"into": collection.name, "on": "_id", "whenMatched": "replace"}
                collection.aggregate([{"$match": some}, {"$set": renamed}, {"$merge": merge}])
            ids["$gt"] = found[-1]
            yield len(found)

    def put_in_force(self, old: str, new: str, version: int, intervention: Mapping[str, Any]) -> bool:
        """
        Let the subscription have its new name, with all that was copied.

        Args:
            version: that of `begin`.
            intervention: what is noted of it.

        Returns:
            False where a listener has begun since: nothing is changed.
        """

        def put(session: ClientSession) -> bool:
            leases, subscriptions = self._database["leases"], self._database["subscriptions"]
            guard = {"_id": self._bridge, "version": version, "$expr": {"$lte": ["$expiresAt", "$$NOW"]}}
            change = {
                f"tasks.{new}": {"$ifNull": [f"$tasks.{new}", f"$tasks.{old}"]},
                "interventions": noted(intervention),
            }
            lease = leases.update_one(guard, [{"$set": change}, {"$unset": f"tasks.{old}"}], session=session)
            document = subscriptions.find_one({"_id": f"{self._bridge}/{old}"}, session=session)
            if not lease.matched_count or document is None:
                session.abort_transaction()
                return False
            renamed = {**document, "_id": f"{self._bridge}/{new}", RENAMED: old}
            subscriptions.replace_one({"_id": renamed["_id"]}, renamed, upsert=True, session=session)
            subscriptions.delete_one({"_id": document["_id"]}, session=session)
            return True

        return self._positions.together(put)

    # -- no name any more --------------------------------------------------------------------------

    def forget(self, name: str, intervention: Mapping[str, Any]) -> int | None:
        """
        Remove a subscription and its partitions; what is left (`remove`) is in force for nobody then.

        Returns:
            The lease's version: all that has a smaller one is over. None where the listener that leads serves it, or
            does not say whom it serves: nothing is changed.
        """

        def remove(session: ClientSession) -> int | None:
            is_free = {"$lte": ["$expiresAt", "$$NOW"]}
            says = {"$eq": [{"$ifNull": ["$servedBy", ""]}, "$listenerId"]}
            is_not_served = {"$eq": [{"$type": f"$definitions.{name}"}, "missing"]}
            guard = {"_id": self._bridge, "$expr": {"$or": [is_free, {"$and": [says, is_not_served]}]}}
            note = [{"$set": {"interventions": noted(intervention)}}]
            lease = self._database["leases"].find_one_and_update(guard, note, {"version": 1}, session=session)
            if lease is None:
                session.abort_transaction()
                return None
            mine = {"_id": f"{self._bridge}/{name}"}
            self._database["subscriptions"].delete_one(mine, session=session)
            for each in ("partitions", "replays"):
                self._database[each].delete_many({"_id": self._ids(name)}, session=session)
            return int(lease["version"])

        return self._positions.together(remove)

    def remove(self, name: str, version: int, *, letters: bool) -> Iterator[int]:
        """
        Remove what is stored under a name that no subscription has, a little at a time; how much each time.

        Args:
            version: layouts of a later term are left alone: somebody has begun anew with the name.
            letters: whether the dead letters go, too.
        """
        yield from self._remove("partitions", name, version)
        yield from self._remove("spill", name, version)
        for each in _NAMED:
            if letters or each != "dead_letters":
                yield from self._remove(each, name)

    def _remove(self, collection: str, name: str, version: int | None = None) -> Iterator[int]:
        target, ids = self._database[collection], self._ids(name)
        while True:
            with pymongo.timeout(_SECONDS):
                found = _first(target, ids)
                if not found:
                    return
                over = [each for each in found if version is None or _generation(each) <= version]
                target.delete_many({"_id": {"$in": over}})
            ids["$gt"] = found[-1]
            yield len(over)

    def _ids(self, name: str) -> dict[str, str]:
        return ids_under(f"{self._bridge}/{name}")


def _first(collection: Collection[dict[str, Any]], ids: Mapping[str, str]) -> list[str]:
    """The first `_id`s of a range."""
    found = collection.find({"_id": ids}, {"_id": 1}).sort("_id", 1).limit(_AT_ONCE)
    return [each["_id"] for each in found]


def _generation(document_id: str) -> int:
    """That in the `_id` of a partition or a stored change; 0 in what is neither."""
    _, _, generation, *_ = [*document_id.split("/"), "", ""]
    return int(generation) if generation.isdecimal() else 0
