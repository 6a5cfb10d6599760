"""
The name of a subscription: everything of one goes over to another name, or goes.

A name is the beginning of every `_id`, so nothing can be renamed in place. What may be large, stored changes and dead
letters, is copied first, under the new name and the old generation, where nobody runs it; then one transaction moves
what is small, partitions, replays and snapshots, and puts the name in force by the subscription's document; then what
has the old name is removed::

    old in force --begin--> closed to all before --copy--> copied --put_in_force--> new in force --remove--> done
         ^                          |                        |
         +---- a listener began: its version is another one, and nothing is put in force

1. `begin` is a term of its own: executions of before are refused, and nothing changes under the old name any more,
   unless a listener begins. That raises the lease's version, which `put_in_force` compares.
2. `begin` also notes in the lease who gets which name (`renaming`), for as long as that version stands: commands on
   what has either name are refused meanwhile. What they wrote to a letter that is copied would be lost, or undone.
3. A copied letter says of which attempt it is (`copiedBy`), and so does the subscription in the end. So what an attempt
   has left that was killed is told apart from letters that the new name has of its own: the former are removed before
   the next attempt, for what is copied might have changed since; the latter refuse it.
4. Targets know a handler by the name in their stamps. The partitions keep the first one (`fencedAs`), and pass it on to
   later layouts: so a late execution from before the new name is refused, and an older dead letter writes over nothing.
5. What is removed when nobody has the name any more is bound by the version at which that was so: a handler that comes
   back meanwhile, in a later term, keeps what it has begun.

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
from bson.codec_options import CodecOptions
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.database import Database

from mongo_celery.bridge.state.partitions import closed_stages
from mongo_celery.bridge.state.positions import Positions, noted
from mongo_celery.bridge.state.snapshots import DONE
from mongo_celery.bridge.state.stored import ids_under
from mongo_celery.mongo.expressions import literal

_SECONDS = 30.0
_AT_ONCE = 100
_RAW: CodecOptions[Any] = CodecOptions(document_class=RawBSONDocument)
_SMALL = ("partitions", "replays", "snapshots")
"""Collections of which a subscription has so little that it goes in one transaction."""

BEGINNING = "start_from='snapshot'"
"""Who has asked for a snapshot with which a subscription begins."""

RENAMING = "renaming"
"""Field of the lease: which subscription gets which name (`from`, `to`), at the `version` that the lease had then."""

COPIED_BY = "copiedBy"
"""Field of a dead letter, and of a subscription: the version of the attempt that gave it its name."""

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
    snapshots: int

    @property
    def any(self) -> bool:
        """Whether there is anything."""
        return bool(self.partitions or self.stored or self.letters or self.replays or self.snapshots)


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
                for each in ("partitions", "spill", "dead_letters", "replays", "snapshots")
            ]
        return Holdings(*counts)

    def own(self, name: str) -> Holdings:
        """
        What somebody has asked for or set aside under a name, or would lose with it.

        Not what an attempt to give the name to another subscription has left, nor snapshots that are done, or with
        which a subscription of the name begins by itself.
        """
        ids = self._ids(name)
        with pymongo.timeout(_SECONDS):
            mine = self._database["subscriptions"].find_one({"_id": f"{self._bridge}/{name}"}, {COPIED_BY: 1}) or {}
            letters = {"_id": ids, COPIED_BY: {"$in": [None, mine.get(COPIED_BY)]}}
            return Holdings(
                partitions=0,
                stored=0,
                letters=self._database["dead_letters"].count_documents(letters),
                replays=self._database["replays"].count_documents({"_id": ids}),
                snapshots=self._database["snapshots"].count_documents(self._asked_for(name)),
            )

    def _asked_for(self, name: str) -> dict[str, Any]:
        """Snapshots that a person has asked for, and that have something left to give."""
        return {"_id": self._ids(name), "state": {"$ne": DONE}, "by": {"$ne": BEGINNING}}

    # -- another name ------------------------------------------------------------------------------

    def begin(self, name: str, to: str, version: int) -> int | Literal["led", "running"]:
        """
        Close a subscription to all that was before, while nobody leads, and to commands.

        Args:
            to: its name to be.
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
            note = {RENAMING: {"from": name, "to": to, "version": Int64(taken)}}
            self._database["leases"].update_one({"_id": self._bridge}, {"$set": note}, session=session)
            return taken

        return self._positions.together(close)

    def copy(self, old: str, new: str, generation: int, version: int) -> Iterator[int]:
        """
        Copy what may be large to the new name, a little at a time; how much each time.

        Args:
            generation: of the layout in force: no other stored changes are.
            version: that of `begin`.
        """
        yield from self._remove("spill", f"{new}/{generation}")
        yield from self._remove("dead_letters", new, where={COPIED_BY: {"$ne": None}})
        yield from self._copy("spill", f"{old}/{generation}", f"{new}/{generation}", {})
        yield from self._copy("dead_letters", old, new, {"subscription": literal(new), COPIED_BY: Int64(version)})

    def _copy(self, name: str, old: str, new: str, fields: Mapping[str, Any]) -> Iterator[int]:
        collection, ids = self._database[name], self._ids(old)
        while True:
            with pymongo.timeout(_SECONDS):
                found = _first(collection, ids)
                if not found:
                    return
                some = {"_id": {**ids, "$lte": found[-1]}}
                merge = {"into": collection.name, "on": "_id", "whenMatched": "replace"}
                collection.aggregate([{"$match": some}, self._renamed(old, new, fields), {"$merge": merge}])
            ids["$gt"] = found[-1]
            yield len(found)

    def _renamed(self, old: str, new: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The stage that gives documents their new `_id`s."""
        rest = {"$substrBytes": ["$_id", len(f"{self._bridge}/{old}".encode()), -1]}
        return {"$set": {"_id": {"$concat": [literal(f"{self._bridge}/{new}"), rest]}, **fields}}

    def put_in_force(
        self, old: str, new: str, version: int, intervention: Mapping[str, Any]
    ) -> Literal["done", "led", "asked"]:
        """
        Let the subscription have its new name, with all that was copied.

        Args:
            version: that of `begin`.
            intervention: what is noted of it.

        Returns:
            `led` where a listener has begun since, `asked` where something was asked for under the new name: nothing is
            changed.
        """

        def put(session: ClientSession) -> Literal["done", "led", "asked"]:
            leases, subscriptions = self._database["leases"], self._database["subscriptions"]
            guard = {"_id": self._bridge, "version": version, "$expr": {"$lte": ["$expiresAt", "$$NOW"]}}
            change = {
                f"tasks.{new}": {"$ifNull": [f"$tasks.{new}", f"$tasks.{old}"]},
                "interventions": noted(intervention),
            }
            gone = {"$unset": [f"tasks.{old}", RENAMING]}
            lease = leases.update_one(guard, [{"$set": change}, gone], session=session)
            document = subscriptions.find_one({"_id": f"{self._bridge}/{old}"}, session=session)
            if not lease.matched_count or document is None:
                session.abort_transaction()
                return "led"
            for collection, query in (("replays", {"_id": self._ids(new)}), ("snapshots", self._asked_for(new))):
                if self._database[collection].find_one(query, {"_id": 1}, session=session) is not None:
                    session.abort_transaction()
                    return "asked"
            for name in _SMALL:
                self._move(name, old, new, session)
            renamed = {**document, "_id": f"{self._bridge}/{new}", RENAMED: old, COPIED_BY: Int64(version)}
            subscriptions.replace_one({"_id": renamed["_id"]}, renamed, upsert=True, session=session)
            subscriptions.delete_one({"_id": document["_id"]}, session=session)
            return "done"

        return self._positions.together(put)

    def _move(self, name: str, old: str, new: str, session: ClientSession) -> None:
        """Give all of a small collection to the new name, byte for byte; what that had goes, but for what is done."""
        collection = self._database[name].with_options(codec_options=_RAW)
        own = {"_id": self._ids(new)} | ({"state": {"$ne": DONE}} if name == "snapshots" else {})
        collection.delete_many(own, session=session)
        fields = {"subscription": literal(new)} if name == "replays" else {}
        stages = [{"$match": {"_id": self._ids(old)}}, self._renamed(old, new, fields)]
        found = list(collection.aggregate(stages, session=session))
        if found:
            collection.insert_many(found, session=session)
        collection.delete_many({"_id": self._ids(old)}, session=session)

    # -- no name any more --------------------------------------------------------------------------

    def forget(self, name: str, intervention: Mapping[str, Any]) -> int | None:
        """
        Remove a subscription and its partitions; what is left (`remove`) is in force for nobody then.

        Returns:
            The lease's version: all that has a smaller one is over. None where the listener that leads serves it:
            nothing is changed.
        """

        def remove(session: ClientSession) -> int | None:
            is_free = {"$lte": ["$expiresAt", "$$NOW"]}
            is_not_served = {"$eq": [{"$type": f"$identity.handlers.{name}"}, "missing"]}
            guard = {"_id": self._bridge, "$expr": {"$or": [is_free, is_not_served]}}
            note: list[dict[str, Any]] = [
                {"$set": {"interventions": noted(intervention)}},
                {"$unset": f"identity.handlers.{name}"},
            ]
            lease = self._database["leases"].find_one_and_update(guard, note, {"version": 1}, session=session)
            if lease is None:
                session.abort_transaction()
                return None
            mine = {"_id": f"{self._bridge}/{name}"}
            self._database["subscriptions"].delete_one(mine, session=session)
            for each in _SMALL:
                self._database[each].delete_many({"_id": self._ids(name)}, session=session)
            return int(lease["version"])

        return self._positions.together(remove)

    def remove(self, name: str, version: int, *, letters: bool) -> Iterator[int]:
        """
        Remove what is left under a name that no subscription has, a little at a time; how much each time.

        Args:
            version: of the lease when it was given up. What a later term has stored or set aside is left alone:
                somebody has begun anew with the name.
            letters: whether the dead letters go, too.
        """
        yield from self._remove("spill", name, version)
        if letters:
            # Replays of changes from before a layout have generation 0, and say elsewhere which layout that was.
            layout = {"$ifNull": ["$layout", {"$ifNull": ["$generation", 0]}]}
            yield from self._remove("dead_letters", name, where={"$expr": {"$lte": [layout, Int64(version)]}})

    def _remove(
        self, collection: str, name: str, version: int | None = None, where: Mapping[str, Any] | None = None
    ) -> Iterator[int]:
        target, ids = self._database[collection], self._ids(name)
        while True:
            with pymongo.timeout(_SECONDS):
                found = _first(target, ids)
                if not found:
                    return
                over = [each for each in found if version is None or _generation(each) <= version]
                deleted = target.delete_many({"_id": {"$in": over}, **(where or {})}).deleted_count
            ids["$gt"] = found[-1]
            yield deleted

    def _ids(self, name: str) -> dict[str, str]:
        return ids_under(f"{self._bridge}/{name}")


def _first(collection: Collection[dict[str, Any]], ids: Mapping[str, str]) -> list[str]:
    """The first `_id`s of a range."""
    found = collection.find({"_id": ids}, {"_id": 1}).sort("_id", 1).limit(_AT_ONCE)
    return [each["_id"] for each in found]


def _generation(document_id: str) -> int:
    """That in the `_id` of a stored change; 0 in what is none."""
    _, _, generation, *_ = [*document_id.split("/"), "", ""]
    return int(generation) if generation.isdecimal() else 0
