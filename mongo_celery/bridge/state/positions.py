"""
Moves of positions by an operator: back, forward, or over an oplog gap.

A rewind (`move`) has its own term. It takes the lease's next term while no listener leads, and writes that term into
everything that it moves. So no earlier listener can undo it, no earlier message is claimed, and an earlier execution is
refused by its fencing token. `pass_gap` takes no term, because a listener may lead meanwhile. The transaction of a move
includes its audit record.

A rewind is one transaction, so a kill leaves no intermediate state. A search of schedules found the following rules.
For each rule it has a broken variant (`tests/property/spill_model.py`, `snapshot_model.py`):

1. Backwards, partitions and watermark move to the smaller of the place and their own position. Positions before the
   place do not move. With two writes instead of a transaction, either order loses changes.
2. In partitions that go back, work after the place ends: halted head, waiting retry, claim, replay. If the head stayed,
   `skip` would skip everything in between. The same applies if nothing was ever committed: the change that is
   halted there is read again.
3. Stored changes stay, and so does a mark ahead: changes that are read again are stored again, under the new term. A
   mark that was reached is removed, because its changes may be removed.
4. The number of the last change is kept, so that numbers of changes never repeat.
5. The watermark contains no token that opens a stream. The stream opens at the place's time, and changes before the
   place are skipped.

`forget` removes all state of a deleted handler. One transaction removes its current partitions, its document and all
small parts. From then on the rest cannot run, and is removed step by step (`remove`). Removal is limited to terms up
to the lease's at that moment: a handler that returns in a later term keeps its new state. If it is killed at any point,
repeat it.
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
from mongo_celery.bridge.state.subscriptions import add_gap, build_start_move, cut_gaps, watermark_fields
from mongo_celery.mongo.expressions import REMOVED, literal, next_number
from mongo_celery.mongo.locked import run_transaction
from mongo_celery.mongo.opening import open_session

T = TypeVar("T")

_SECONDS = 15.0
_COUNT_SECONDS = 30.0
_AT_ONCE = 100
_SMALL = ("partitions", "snapshots")
"""Collections whose documents of one handler fit into one transaction."""


@dataclass(frozen=True, slots=True)
class Move:
    """
    A move of a handler to a place.

    Attributes:
        token: the place. It sorts among tokens, but opens no stream.
        time: cluster time of the place.
        forward: True to move partitions before the place, False for those after it.
        partitioning: the term of the partitioning, as read.
        term: the term of the lease, as read.
        partition: the only partition to move. None for all.
        since: start of the part that a forward move skips, if it is before the watermark.
    """

    subscription: str
    token: Mapping[str, Any]
    time: Timestamp
    forward: bool
    partitioning: int
    term: int
    partition: int | None = None
    since: Timestamp | None = None


@dataclass(frozen=True, slots=True)
class Moved:
    """
    The effect of a move.

    Attributes:
        partitions: indexes of the moved partitions.
        withdrawn: number of withdrawn replay requests.
    """

    partitions: Sequence[int] = field(default=())
    withdrawn: int = 0


@dataclass(frozen=True, slots=True)
class Holdings:
    """
    Counts of the documents stored under a handler's name.

    Attributes:
        stored: documents of stored changes.
        letters: dead letters.
        replays: number of these with a requested replay.
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
        bridge: name of the bridge.
        audit: the audit records of the bridge.
    """

    def __init__(self, database: Database[dict[str, Any]], bridge: str, audit: AuditRecords) -> None:
        self._audit = audit
        self._database = database
        self._bridge = bridge

    def move(self, to: Move, record: Mapping[str, Any]) -> Moved | None:
        """
        Move a subscription, completely or not at all.

        Args:
            record: its audit record, which also gets the effect in numbers.

        Returns:
            None if a listener leads, has led since the lease was read, or the partitioning differs. Then nothing
            changes.

        Raises:
            PyMongoError: from the transaction. If a partition is locked, it satisfies `is_lock`.
        """
        subscription = f"{self._bridge}/{to.subscription}"

        def write(session: ClientSession) -> Moved | None:
            term = self.take_term(session, seen=to.term)
            guard = {"_id": subscription, "partitioning.term": to.partitioning}
            stages = _build_handler_move(to, Int64(term or 0))
            if term is None or not self._update("handlers", guard, stages, session):
                session.abort_transaction()
                return None
            moved = self._move_partitions(f"{subscription}/{to.partitioning}", to, term, session)
            effect = {**record["effect"], "partitions": len(moved.partitions), "withdrawn": moved.withdrawn}
            self._audit.add({**record, "effect": effect}, session)
            return moved

        return self.run_transaction(write)

    def pass_gap(
        self, subscription: str, lost: Mapping[str, Any], start: Timestamp, policy: str, record: Mapping[str, Any]
    ) -> bool:
        """
        Move a subscription over an oplog gap, completely or not at all.

        A listener may lead meanwhile: it stores nothing of a blocked subscription, and reads its position again. So
        this is the only move without its own term, which would make the leader drop its buffer.

        Args:
            lost: the lost history, as read.
            start: the place to continue from.
            record: its audit record.

        Returns:
            False if its position has changed. Then nothing changes.
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
        # An interrupted run has not crashed.
        interrupted_ones = {"_id": {"$in": interrupted}, "replay.state": STARTED}
        again = {"$set": {"replay.state": REQUESTED}, "$unset": {"replay.fencingToken": ""}}
        self._database["dead_letters"].update_many(interrupted_ones, again, session=session)
        return Moved(indexes, withdrawn)

    def _withdraw(self, to: Move, indexes: Sequence[int], session: ClientSession) -> int:
        """
        Withdraw the replays of later changes, in partitions that go back. Return their number.

        This includes replays of existing documents, which would run before earlier changes.
        """
        theirs = {"replay.partitioningTerm": to.partitioning, "replay.partition": {"$in": list(indexes)}}
        late = build_later_query(self._bridge, to.subscription, str(to.token["_data"]))
        over = self._database["dead_letters"].update_many(
            {"$and": [ASKED, theirs, late]}, {"$unset": {"replay": ""}}, session=session
        )
        return over.modified_count

    # -- a deleted handler ---------------------------------------------------------------------------

    def holdings(self, name: str) -> Holdings:
        """Count all documents stored under a name, whether in use or not."""
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
        Remove a subscription and its partitions. The other documents (`remove`) then belong to no handler.

        Returns:
            The lease's term: everything with a smaller one is over. None if the leading listener serves the
            subscription. Then nothing changes.
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
                again = {"$unset": {"startAtOperationTime": ""}}  # without positions a bridge starts anew
                self._database["leases"].update_one({"_id": self._bridge}, again, session=session)
            self._audit.add(record, session)
            return int(lease["term"])

        return self.run_transaction(remove)

    def remove(self, name: str, term: int, *, letters: bool) -> Iterator[int]:
        """
        Remove the other documents of a removed handler, step by step. Yield the number of each step.

        Args:
            term: the lease's term when the name was given up. Documents of later terms are kept, because the name is in
                use again.
            letters: True to also remove the dead letters.
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
        Take the lease's next term, which is above all others, in this session's transaction.

        It conflicts with a leader, even one that begins meanwhile.

        Args:
            seen: the term that the lease must have.

        Returns:
            None if a listener leads, or has led since.
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

    # -- internals -----------------------------------------------------------------------------------

    def _update(self, name: str, guard: Mapping[str, Any], change: Any, session: ClientSession) -> bool:
        return bool(self._database[name].update_one(guard, change, session=session).matched_count)

    def run_transaction(self, body: Callable[[ClientSession], T]) -> T:
        """Run a transaction on the state, repeated for a bounded time. A lock raises an error as `is_lock` has it."""
        with pymongo.timeout(_SECONDS), open_session(self._database.client) as session:
            return run_transaction(session, body)


def _is_moved(partition: Mapping[str, Any], data: str, *, forward: bool) -> bool:
    """Return True if a move changes a partition's position. A handled run counts as committed."""
    token = (partition.get("handled") or {}).get("resumeToken") or partition.get("resumeToken")
    own = str(token["_data"]) if token else ""
    return own < data if forward else own > data


def _build_handler_move(to: Move, term: Int64) -> list[dict[str, Any]]:
    """
    Return the stages that move a subscription's watermark and, if it goes back, its pinned start.

    Forward it records the gap. Back, the recorded gaps end at the place. One partition alone changes no gap.
    """
    # Without a token the position is a time: later changes have that time or a later one.
    own = {"$max": ["$startAtOperationTime", "$clusterTime"]}
    has_token = {"$gt": ["$resumeToken", None]}
    data = literal(to.token["_data"])
    comparison = "$lt" if to.forward else "$gt"
    moves: Any = {
        "$cond": [has_token, {comparison: ["$resumeToken._data", data]}, {comparison: [own, to.time]}],
    }
    if to.forward and to.partition is not None:
        moves = False  # the other partitions have not done the skipped changes
    place: dict[str, Any] = {name: literal(value) for name, value in watermark_fields(to.token, to.time).items()}
    place["fingerprint"] = REMOVED
    if to.forward:
        # The watermark is after changes that are stored but not handled.
        place["gaps"] = add_gap({"$min": [own, to.since]}, to.time, "now")
    else:
        place["startAtOperationTime"] = {"$min": ["$startAtOperationTime", to.time]}
    change = {name: {"$cond": ["$_moves", value, f"${name}"]} for name, value in place.items()}
    if not to.forward and to.partition is None:
        change["gaps"] = cut_gaps(to.time)
    return [{"$set": {"_moves": moves}}, {"$set": {**change, "term": term}}, {"$unset": "_moves"}]
