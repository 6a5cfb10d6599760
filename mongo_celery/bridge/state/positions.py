"""
Positions that a person moves: a subscription is sent back or forward, or over history that it has lost.

A rewind (`move`) is a term of its own: it takes the lease's next term while nobody leads, and writes that term
into what it moves. So no listener of before moves anything back, no message of before is claimed, and an execution of
before is refused by its fencing token. `pass_gap` takes no term, since a listener may lead meanwhile. The audit record
of a move is stored in its transaction.

A rewind is one transaction, so it is killed at no point between. Its rules were found by a search of schedules
(`tests/property/spill_faults.py`, `snapshot_faults.py`), which has each of them as a broken variant:

1. Backwards, a position becomes the smaller of place and own position, of the partitions and of the watermark. What
   lies before the place stays where it is. Two writes instead of one transaction lose changes, in whichever order.
2. What stood behind the place is over in the partitions that go back: halted head, waiting retry, claim, replay. With
   its head left, `skip` would pass over everything between. So it is where nothing was ever committed: the change that
   is halted there is read again.
3. Stored changes stay, and so does a mark that lies ahead: what is read again is stored again, under the new term. A
   mark that was reached goes, since what it stood for may be removed.
4. The number of the last change is kept, so that numbers of changes never repeat.
5. The watermark names no token that opens a stream: it is opened at the place's time, and what is not behind it is left
   out.

`forget` removes everything that is stored of a handler that is gone from the code. One transaction removes what is in
force, the handler's document and what is small. From then on nobody runs the rest, and it is removed a little at a time
(`remove`). What is removed so is bound by the term of the lease at that moment: a handler that comes back meanwhile, in
a later term, keeps what it has begun. Killed at any point it is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pymongo
from bson import Timestamp
from bson.int64 import Int64
from pymongo import ReturnDocument
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.database import Database

from mongo_celery.bridge.state.audit import AuditRecords
from mongo_celery.bridge.state.dead_letters import ASKED, REQUESTED, STARTED, build_later_query
from mongo_celery.bridge.state.partitions import build_attempt_reset, build_move
from mongo_celery.bridge.state.state_collection import ids_under
from mongo_celery.bridge.state.subscriptions import build_start_move, watermark_fields
from mongo_celery.mongo.expressions import REMOVED, literal, next_number
from mongo_celery.mongo.opening import open_session

T = TypeVar("T")

_SECONDS = 15.0
_COUNT_SECONDS = 30.0
_AT_ONCE = 100
_SMALL = ("partitions", "snapshots")
"""Collections of which a handler has so little that it goes in one transaction."""

_GAPS_KEPT = 20


@dataclass(frozen=True, slots=True)
class Move:
    """
    A move of a handler to a place.

    Attributes:
        token: the place. It compares, and opens no stream.
        time: its cluster time.
        forward: whether partitions that stand before the place are sent there. Else those that stand behind it.
        generation: of the layout, as it was seen.
        term: of the lease, as it was seen.
        partition: only this one. None for all.
        since: forward, from when on something is passed over, where that lies before the watermark.
    """

    subscription: str
    token: Mapping[str, Any]
    time: Timestamp
    forward: bool
    generation: int
    term: int
    partition: int | None = None
    since: Timestamp | None = None


@dataclass(frozen=True, slots=True)
class Moved:
    """
    The effect of a move.

    Attributes:
        partitions: indexes of those that were sent somewhere.
        withdrawn: how many replays that were asked for are so no longer.
    """

    partitions: Sequence[int] = field(default=())
    withdrawn: int = 0


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


class Positions:
    """
    The moves of one bridge's positions.

    Args:
        database: the state database, with majority writes and majority reads.
        bridge: its name.
        audit: its audit records.
    """

    def __init__(self, database: Database[dict[str, Any]], bridge: str, audit: AuditRecords) -> None:
        self._audit = audit
        self._database = database
        self._bridge = bridge

    def move(self, to: Move, record: Mapping[str, Any]) -> Moved | None:
        """
        Send a subscription somewhere, all of it or nothing.

        Args:
            record: its audit record, to which the effect in numbers is added.

        Returns:
            None where somebody leads, or has led since it was seen, or the layout is another one: nothing is changed.

        Raises:
            PyMongoError: as of a transaction. Where a partition is locked, it satisfies `is_lock`.
        """
        subscription = f"{self._bridge}/{to.subscription}"

        def write(session: ClientSession) -> Moved | None:
            term = self.take_term(session, seen=to.term)
            guard = {"_id": subscription, "partitioning.term": to.generation}
            stages = _build_handler_move(to, Int64(term or 0))
            if term is None or not self._update("handlers", guard, stages, session):
                session.abort_transaction()
                return None
            moved = self._move_partitions(f"{subscription}/{to.generation}", to, term, session)
            effect = {**record["effect"], "partitions": len(moved.partitions), "withdrawn": moved.withdrawn}
            self._audit.add({**record, "effect": effect}, session)
            return moved

        return self.run_transaction(write)

    def pass_gap(
        self, subscription: str, lost: Mapping[str, Any], start: Timestamp, policy: str, record: Mapping[str, Any]
    ) -> bool:
        """
        Move a subscription over the history that it has lost, all of it or nothing.

        A listener may lead meanwhile: it stores nothing of a subscription that stands still, and reads its position
        again. So this is the one move without a term of its own, which would have the leader drop what it has buffered.

        Args:
            lost: as it was seen.
            start: where it continues.
            record: its audit record.

        Returns:
            False where it does not stand there any more: nothing is changed.
        """
        subscription_id = f"{self._bridge}/{subscription}"

        def write(session: ClientSession) -> bool:
            guard = {"_id": subscription_id, "lost": dict(lost)}
            found = self._database["handlers"].find_one_and_update(
                guard, build_start_move(start, policy), {"partitioning": 1}, session=session
            )
            if found is None:
                session.abort_transaction()
                return False
            prefix = f"{subscription_id}/{int(found['partitioning']['term'])}"
            self._database["partitions"].update_many(*build_attempt_reset(prefix), session=session)
            self._audit.add(record, session)
            return True

        return self.run_transaction(write)

    def _move_partitions(self, prefix: str, to: Move, term: int, session: ClientSession) -> Moved:
        scope = {"_id": ids_under(prefix)}
        chosen = None if to.partition is None else f"{prefix}/{to.partition}"
        data = str(to.token["_data"])
        partitions = self._database["partitions"]
        found = list(partitions.find(scope, {"resumeToken": 1, "handled": 1, "claim.replay": 1}, session=session))
        moving = [each for each in found if chosen in (None, each["_id"]) and _is_moved(each, data, forward=to.forward)]
        partitions.update_many(scope, build_move(term, to.token, forward=to.forward, only=chosen), session=session)
        indexes = sorted(int(each["_id"].rpartition("/")[2]) for each in moving)
        claims = [
            each.get("claim") or {} for each in found if each in moving or not (to.forward or each.get("resumeToken"))
        ]
        interrupted = [claim["replay"] for claim in claims if claim.get("replay")]
        withdrawn = 0 if to.forward or not indexes else self._withdraw(to, indexes, session)
        # What was interrupted has not crashed.
        interrupted_ones = {"_id": {"$in": interrupted}, "replay.state": STARTED}
        again = {"$set": {"replay.state": REQUESTED}, "$unset": {"replay.fencingToken": ""}}
        self._database["dead_letters"].update_many(interrupted_ones, again, session=session)
        return Moved(indexes, withdrawn)

    def _withdraw(self, to: Move, indexes: Sequence[int], session: ClientSession) -> int:
        """
        Forget the replays of what lies behind a place, in partitions that go back. How many they are.

        Those of existing documents, too: they would run before the changes that are in front of them.
        """
        theirs = {"replay.partitioningTerm": to.generation, "replay.partition": {"$in": list(indexes)}}
        late = build_later_query(self._bridge, to.subscription, str(to.token["_data"]))
        over = self._database["dead_letters"].update_many(
            {"$and": [ASKED, theirs, late]}, {"$unset": {"replay": ""}}, session=session
        )
        return over.modified_count

    # -- a handler that is gone from the code ------------------------------------------------------

    def holdings(self, name: str) -> Holdings:
        """Count the documents that are stored under a name, in force or not."""
        with pymongo.timeout(_COUNT_SECONDS):
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
                again = {"$unset": {"startAtOperationTime": ""}}  # a bridge without positions starts for the first time
                self._database["leases"].update_one({"_id": self._bridge}, again, session=session)
            self._audit.add(record, session)
            return int(lease["term"])

        return self.run_transaction(remove)

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
            with pymongo.timeout(_COUNT_SECONDS):
                found = [each["_id"] for each in target.find({"_id": ids}, {"_id": 1}).sort("_id", 1).limit(_AT_ONCE)]
                if not found:
                    return
                deleted = target.delete_many({"_id": {"$in": found}, **is_over}).deleted_count
            ids["$gt"] = found[-1]
            yield deleted

    def _ids(self, name: str) -> dict[str, str]:
        return ids_under(f"{self._bridge}/{name}")

    # -- the lease ---------------------------------------------------------------------------------

    def take_term(self, session: ClientSession, *, seen: int) -> int | None:
        """
        Take the lease's next term, which is above every other, for the transaction of this session.

        Who leads, or begins to lead meanwhile, is in conflict with it.

        Args:
            seen: the term that the lease must have.

        Returns:
            None where somebody leads, or has led since.
        """
        above = self._largest_term(session)
        guard = {"_id": self._bridge, "term": seen, "$expr": {"$lte": ["$expiresAt", "$$NOW"]}}
        change: dict[str, Any] = {
            "term": {"$max": [next_number("term"), Int64(above + 1)]},
            "listenerId": REMOVED,
            "expiresAt": REMOVED,
        }
        found = self._database["leases"].find_one_and_update(
            guard, [{"$set": change}], {"term": 1}, return_document=ReturnDocument.AFTER, session=session
        )
        return None if found is None else int(found["term"])

    def _largest_term(self, session: ClientSession) -> int:
        terms = [0]
        for name in ("partitions", "handlers", "snapshots"):
            found = self._database[name].find_one(
                {"_id": ids_under(self._bridge)}, {"term": 1}, sort=[("term", -1)], session=session
            )
            terms.append(int(found["term"]) if found else 0)
        return max(terms)

    # -- inside ------------------------------------------------------------------------------------

    def _update(self, name: str, guard: Mapping[str, Any], change: Any, session: ClientSession) -> bool:
        return bool(self._database[name].update_one(guard, change, session=session).matched_count)

    def run_transaction(self, body: Callable[[ClientSession], T]) -> T:
        """Run a transaction of the state, repeated for a bounded time."""
        with pymongo.timeout(_SECONDS), open_session(self._database.client) as session:
            return session.with_transaction(body)


def _is_moved(partition: Mapping[str, Any], data: str, *, forward: bool) -> bool:
    """Return True if a move changes the position of a partition. A handled run counts as committed."""
    token = (partition.get("handled") or {}).get("resumeToken") or partition.get("resumeToken")
    own = str(token["_data"]) if token else ""
    return own < data if forward else own > data


def _build_handler_move(to: Move, term: Int64) -> list[dict[str, Any]]:
    """The stages that move a subscription's watermark, and, where it goes back, its pinned start."""
    # Without a token it stands at a time: what is read from there on has that time or a later one.
    own = {"$max": ["$startAtOperationTime", "$clusterTime"]}
    has_token = {"$gt": ["$resumeToken", None]}
    data = literal(to.token["_data"])
    comparison = "$lt" if to.forward else "$gt"
    moves: Any = {
        "$cond": [has_token, {comparison: ["$resumeToken._data", data]}, {comparison: [own, to.time]}],
    }
    if to.forward and to.partition is not None:
        moves = False  # the others have not done what this one passes over
    place: dict[str, Any] = {name: literal(value) for name, value in watermark_fields(to.token, to.time).items()}
    place["fingerprint"] = REMOVED
    if to.forward:
        # The watermark has passed what is stored, and not handled.
        gap = {"from": {"$min": [own, to.since]}, "until": to.time, "policy": "now", "at": "$$NOW"}
        place["gaps"] = {"$slice": [{"$concatArrays": [{"$ifNull": ["$gaps", []]}, [gap]]}, -_GAPS_KEPT]}
    else:
        place["startAtOperationTime"] = {"$min": ["$startAtOperationTime", to.time]}
    change = {name: {"$cond": ["$_moves", value, f"${name}"]} for name, value in place.items()}
    return [{"$set": {"_moves": moves}}, {"$set": {**change, "term": term}}, {"$unset": "_moves"}]
