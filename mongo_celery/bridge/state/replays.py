"""
Replays of dead letters, and the outcome of each attempt.

A request is the sub-document `replay` of its dead letter. The listener reads all requests every second, by a partial
index. It exists from the command until the dead letter is removed or has failed again::

                  start (claim, replays + 1)               success: the dead letter is removed, and its request with it
    requested ---------------------------------> started ---------------------------------------->
       ^                                          |  |  |
       |<--- later (a retry, infrastructure) -----+  |  +--- failed: the dead letter has the new error; its request
       |<--- started again after a lapse: crash + 1 -+       goes, with those after it of its key

1. A replay runs under a claim of its key's current partition, like a change: nothing else in that partition runs
   meanwhile, and each start has its own fencing token. Its outcome and the end of that claim are one transaction, so a
   replaced claim writes no outcome.
2. The claim counts for no change: its lapse is not counted, and the counts of the partition's first change do not
   change. The request has the counts of the dead letter. A start after one without an outcome counts a crash, and
   names it in `lapsed`. A process that lives, or started no handler, withdraws its crash (`withdraw`).
3. Targets do not see the claim's fencing token, but the next of those that were reserved after the change's attempts
   (see `dead_letters`), in the partitioning of that time. So a target refuses an older attempt of the same dead letter,
   and refuses the dead letter if a later change has written. The claim's token is the newest of all: with it, older
   data would overwrite newer data unnoticed. `over_newer` requests that.
4. The message contains `replays`, the number of starts: of two messages of one attempt, only the first is accepted. A
   start is one write of the dead letter, before the handler begins. So its number is never used again, even if the
   process ends right after it, or the request is withdrawn. A change that becomes a dead letter again counts as a
   start. So a message for its earlier place is not accepted, and the listener sends another in turn.
A chain of replays releases a parked key. Its dead letters (those with its hash in `parked`) are replayed in stream
order, from the first one:

5. A start checks that its dead letter is the first that waits for its key. Otherwise it requests the first one instead.
   It checks under the claim, so no change can become a dead letter meanwhile. But one may be discarded meanwhile, so
   the transaction that requests the first one checks again.
6. A replay or discard that removes a dead letter requests the next one in the same transaction. A change that arrives
   meanwhile becomes a dead letter after it, so its turn comes.
7. If there is no next one, the same transaction removes the hash from `parkedKeys`. A change that becomes a dead letter
   for a parked key also writes that document, on condition that the hash exists. So either it is found as the next one,
   or it is not moved and runs.
8. Each transaction that removes a dead letter of a parked key writes that document (`removed`). Otherwise two that
   remove the last two at the same time would each leave the hash to the other.
9. A failure withdraws the later requests of its key in the same transaction. Otherwise they would run before it.
10. A dead letter that does not wait for a parked key, and has a newer token than those that do, fails at its start
    while the key is parked. After it, targets would refuse the release.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from bson.int64 import Int64
from pymongo import ReturnDocument
from pymongo.client_session import ClientSession
from pymongo.collection import Collection

from mongo_celery.bridge.state.claims import LAPSED_MAX, Claim, claim_filter, record_session
from mongo_celery.bridge.state.dead_letters import (
    ASKED,
    PARKED,
    PARKED_BEHIND,
    REPLAY_FIELDS,
    REQUESTED,
    STARTED,
    DeadChange,
    DeadLetters,
    ReplayRequest,
    parse_replay,
    read_starts,
)
from mongo_celery.bridge.state.state_collection import ids_under, to_signed
from mongo_celery.mongo.expressions import REMOVED, after, literal, next_number
from mongo_celery.mongo.locked import run_transaction
from mongo_celery.mongo.steps import Session, Steps, run_sync, see_collection
from mongo_celery.mongo.table import Table, call_timeout

if TYPE_CHECKING:
    from mongo_celery.bridge.state.subscriptions import Layout

REQUESTS_MAX = 1000
"""Limit of waiting dead letters of one handler, because the listener reads all of them every second."""


class Replays:
    """The replays of one bridge. Thread-safe."""

    def __init__(
        self,
        dead_letters: Collection[dict[str, Any]],
        partitions: Collection[dict[str, Any]],
        bridge: str,
        ttl: float,
    ) -> None:
        self._table = Table(dead_letters, call_timeout(ttl))
        self._partitions = Table(partitions, call_timeout(ttl))
        self._dead_letters = dead_letters
        self._letters = DeadLetters(dead_letters, bridge, ttl)
        self._bridge = bridge

    def ensure_index(self) -> None:
        """Create the index for finding requests, with the other indexes of dead letters. It may take long."""
        self._letters.ensure_indexes(patiently=True)

    def read(self) -> list[ReplayRequest]:
        """Return all requests by subscription, then in stream order. Damaged ones are left out."""
        scope = {**ASKED, "_id": ids_under(self._bridge)}
        found = (parse_replay(document) for document in self._table.find(scope, REPLAY_FIELDS))
        return sorted((each for each in found if each is not None), key=lambda each: (each.subscription, each.order))

    def find(self, letter: str) -> ReplayRequest | None:
        """Return the request of one dead letter, by its `_id`."""
        return parse_replay(self._table.find_one({"_id": letter}, REPLAY_FIELDS))

    # -- commands ------------------------------------------------------------------------------------

    def request(
        self, letter: str, *, partitioning: int, partition: int, hash_: int, over_newer: bool
    ) -> Literal["done", "requested", "gone"]:
        """
        Request the replay of a dead letter.

        Args:
            letter: `_id` of the dead letter.
            partitioning: term of the partitioning in force. `partition` is the key's partition there.
            hash_: the hash of its partition key.

        Returns:
            `requested` if there is already a request, `gone` if the dead letter no longer exists.
        """
        found = self._table.find_one({"_id": letter}, REPLAY_FIELDS)
        asked = parse_replay(found)
        if found is None:
            return "gone"
        if asked is not None:
            return "requested"
        guard = {"_id": letter, "replay": found.get("replay"), "replays": found.get("replays")}
        change = _request(read_starts(found), partitioning, partition, hash_, over_newer=over_newer)
        return "done" if self._table.update(guard, change) else "requested"

    def discard(self, letter: str, layout: Layout | None = None) -> Literal["done", "running", "gone"]:
        """
        Remove a dead letter and the request for its replay, unless that is running.

        If it is the first that waits for a parked key, those after it are replayed. If it is the only one, the key is
        released.

        Args:
            layout: the partitioning in force for the subscription. Without it, other dead letters of the key still
                wait.
        """
        found = self._letters.header(letter)
        if found is None:
            return "gone"
        if found.replay is not None and self._is_running(found.replay):
            return "running"
        guard = {"_id": letter, **_as_seen(found)}
        parked = found.parked
        if parked is None:
            with self._table.limit():
                is_removed = self._dead_letters.delete_one(guard).deleted_count
            return "done" if is_removed else "running"

        def remove(session: Session) -> Steps[Literal["done", "running"]]:
            gone, first = yield from self._remove_letter(guard, session)
            if gone is None:
                return "running"
            to = (layout.term, parked % layout.partitions) if first and layout is not None else None
            yield from self._release_key(gone, to, session, over_newer=False)
            return "done"

        with self._table.session() as session:
            return run_transaction(session, lambda inside: run_sync(remove(inside)))

    def _is_running(self, replay: ReplayRequest) -> bool:
        """Return True if a started replay may still have an outcome. This ends a lapsed claim."""
        if replay.state != STARTED:
            return False
        partition_id = f"{self._bridge}/{replay.subscription}/{replay.term}/{replay.partition}"
        mine = {"_id": partition_id, "fencingToken": replay.fencing_token, "claim.replay": replay.letter}
        has_lapsed = {"$expr": {"$lte": ["$claim.until", "$$NOW"]}}
        end = [{"$set": {"fencingToken": next_number("fencingToken"), "claim": REMOVED}}]
        return not self._partitions.update({**mine, **has_lapsed}, end) and bool(self._partitions.find_one(mine))

    # -- executions ----------------------------------------------------------------------------------

    def start(self, claim: Claim, letter: str, starts: int) -> ReplayRequest | None:
        """
        Record under this claim that the handler is about to start.

        Args:
            starts: number of earlier starts, from the message.

        Returns:
            The replay. None if another message has started it, or nothing is left to replay.
        """
        is_again = {"$eq": ["$replay.state", STARTED]}
        lapsed = {"$cond": [is_again, ["$replay.fencingToken"], []]}
        change = {
            "replays": {"$add": ["$replays", Int64(1)]},
            "replay": {
                "state": STARTED,
                "crashes": {"$add": [{"$ifNull": ["$replay.crashes", 0]}, {"$cond": [is_again, 1, 0]}]},
                "lapsed": {"$slice": [{"$concatArrays": [{"$ifNull": ["$replay.lapsed", []]}, lapsed]}, -LAPSED_MAX]},
                "fencingToken": Int64(claim.fencing_token),
                "notBefore": REMOVED,
            },
        }
        guard = {"_id": letter, "replays": starts, "replay.state": {"$in": [REQUESTED, STARTED]}}
        with self._table.limit():
            found = self._dead_letters.find_one_and_update(
                guard, [{"$set": change}], REPLAY_FIELDS, return_document=ReturnDocument.AFTER
            )
        return parse_replay(found)

    def withdraw(self, letter: str, fencing_token: int) -> bool:
        """
        Withdraw the crash that was counted for a start, or will be, because its process lives or started no handler.

        Returns:
            False if none is counted: the start has an outcome, or the crash was withdrawn.
        """
        token = Int64(fencing_token)
        unused = {"_id": letter, "replay.state": STARTED, "replay.fencingToken": token}
        if self._table.update(unused, _build_postponement({})):
            return True
        change = {
            "crashes": {"$subtract": ["$replay.crashes", 1]},
            "lapsed": {"$filter": {"input": "$replay.lapsed", "cond": {"$ne": ["$$this", token]}}},
        }
        return self._table.update({"_id": letter, "replay.lapsed": token}, [{"$set": {"replay": change}}])

    def succeed(self, claim: Claim, letter: str) -> bool:
        """Remove a dead letter whose handler succeeded. Return False if a newer execution decides."""
        return self._settle(claim, lambda session: self._remove_done(claim, letter, session))

    def succeed_inside(self, session: Session, claim: Claim, letter: str) -> Steps[bool]:
        """Do the same as the last writes of a transactional handler's transaction, as steps."""
        return self._end(claim, lambda inside: self._remove_done(claim, letter, inside), session)

    def _remove_done(self, claim: Claim, letter: str, session: Session) -> Steps[None]:
        gone, _ = yield from self._remove_letter({"_id": letter}, session)
        if gone is not None and gone.parked is not None:
            partitioning, partition = map(int, claim.partition_id.split("/")[-2:])
            over_newer = gone.replay is not None and gone.replay.over_newer
            yield from self._release_key(gone, (partitioning, partition), session, over_newer=over_newer)

    def fail(self, claim: Claim, replay: ReplayRequest, error: str, traceback: str, attempts: int) -> bool:
        """
        Keep a dead letter with its new error. Withdraw its request and the later ones of its key.

        Args:
            attempts: number of its handler's attempts.

        Returns:
            False if a newer execution decides.
        """
        is_behind = {"$eq": ["$cause", PARKED_BEHIND]}  # now it waits because of itself
        change = {
            "error": literal(error),
            "traceback": literal(traceback),
            "attempts": {"$add": ["$attempts", attempts]},
            "replayedAt": "$$NOW",
            "cause": {"$cond": [is_behind, PARKED, "$cause"]},
            "replay": REMOVED,
        }
        data, id_ = replay.order
        key = {
            "bridge": self._bridge,
            "handler": replay.subscription,
            "replay.partitioningTerm": replay.term,
            "replay.hash": Int64(to_signed(replay.hash)),
        }
        after = {"$or": [{"resumeToken._data": {"$gt": data}}, {"resumeToken._data": data, "_id": {"$gt": id_}}]}

        def leave(session: Session) -> Steps[None]:
            yield see_collection(self._dead_letters, session).update_one(
                {"_id": replay.letter}, [{"$set": change}], session=session
            )
            yield see_collection(self._dead_letters, session).update_many(
                {**ASKED, **key, **after}, {"$unset": {"replay": ""}}, session=session
            )

        return self._settle(claim, leave)

    def retry_later(
        self, claim: Claim, letter: str, error: str, *, delay: float | None, not_before: datetime | None
    ) -> bool:
        """Park a replay until its retry time, and count the attempt. Arguments and answer as in `Claims.park`."""
        due = after(delay) if delay is not None else literal(not_before)
        retries = {"$add": [{"$ifNull": ["$replay.retries", 0]}, 1]}
        counts = {"retries": retries, "waits": REMOVED, "doubts": REMOVED}
        return self._postpone(claim, letter, {"notBefore": due, "error": literal(error), **counts})

    def wait(self, claim: Claim, letter: str, cause: str, *, delay: float, doubtful: bool) -> bool:
        """Let a replay wait for MongoDB or the broker. Nothing is counted. Arguments as in `Claims.wait`."""
        counts = {"waits": claim.waits + 1, "doubts": claim.doubts + 1 if doubtful else 0}
        return self._postpone(claim, letter, {"notBefore": after(delay), "error": literal(cause), **counts})

    def release(self, claim: Claim, letter: str) -> bool:
        """End an attempt without a failure. The replay may be started again immediately."""
        return self._postpone(claim, letter, {})

    def redirect(self, claim: Claim, replay: ReplayRequest, hash_: int) -> bool:
        """
        End an attempt if another dead letter of the same key must come first, and request that one instead.

        If the dead letter is now the first one, it is started again.

        Args:
            hash_: the hash of the key.

        Returns:
            False if a newer execution decides.
        """

        def ask(session: Session) -> Steps[None]:
            first = yield from self._letters.find_waiting(replay.subscription, hash_, session)
            if first is None or first.document_id == replay.letter:
                yield see_collection(self._dead_letters, session).update_one(
                    {"_id": replay.letter}, _build_postponement({}), session=session
                )
                return
            yield see_collection(self._dead_letters, session).update_one(
                {"_id": replay.letter}, {"$unset": {"replay": ""}}, session=session
            )
            yield from self._ask_next(first, replay.term, replay.partition, session, over_newer=replay.over_newer)

        return self._settle(claim, ask)

    def _postpone(self, claim: Claim, letter: str, change: Mapping[str, Any]) -> bool:
        def postpone(session: Session) -> Steps[None]:
            yield see_collection(self._dead_letters, session).update_one(
                {"_id": letter}, _build_postponement(change), session=session
            )

        return self._settle(claim, postpone)

    def _settle(self, claim: Claim, write: Callable[[Session], Steps[None]]) -> bool:
        with self._table.session() as session:
            named = record_session(self._partitions, claim, session)
            return named and session.with_transaction(
                lambda _: run_sync(self._end(claim, write, session)) or _abort_transaction(session)
            )

    def _end(self, claim: Claim, write: Callable[[Session], Steps[None]], session: Session) -> Steps[bool]:
        partitions = see_collection(self._partitions.collection, session)
        ended = yield partitions.update_one(claim_filter(claim), {"$unset": {"claim": ""}}, session=session)
        if ended.matched_count:
            yield from write(session)
        return bool(ended.matched_count)

    # -- parked keys -------------------------------------------------------------------------------

    def _remove_letter(self, guard: Mapping[str, Any], session: Session) -> Steps[tuple[DeadChange | None, bool]]:
        """Remove a dead letter. Return it, and whether it was the first of its parked key."""
        found = yield from self._letters.find_header(str(guard["_id"]), session)
        first = None
        if found is not None and found.parked is not None:
            first = yield from self._letters.find_waiting(found.subscription, found.parked, session)
        if found is None:
            return None, False
        removed = yield see_collection(self._dead_letters, session).delete_one(guard, session=session)
        if not removed.deleted_count:
            return None, False
        return found, first is not None and first.document_id == found.document_id

    def _release_key(
        self, gone: DeadChange, to: tuple[int, int] | None, session: Session, *, over_newer: bool
    ) -> Steps[None]:
        """
        After removing a dead letter of a parked key, request the next one, or release the key if there is none.

        Each removal writes the document of the parked key, so that two removals conflict.

        Args:
            to: term and index of the partition for the next one. None if it continues to wait.
        """
        assert gone.parked is not None, "it waited for its key"
        following = yield from self._letters.find_waiting(gone.subscription, gone.parked, session)
        hash_ = Int64(to_signed(gone.parked))
        change: dict[str, Any] = {"$inc": {"removed": Int64(1)}}
        if following is None:
            change["$pull"] = {"parkedKeys": {"hash": hash_}}
        holding = {"_id": ids_under(f"{self._bridge}/{gone.subscription}"), "parkedKeys.hash": hash_}
        yield see_collection(self._partitions.collection, session).update_many(holding, change, session=session)
        if following is not None and to is not None:
            yield from self._ask_next(following, *to, session, over_newer=over_newer)

    def _ask_next(
        self, letter: DeadChange, partitioning: int, partition: int, session: Session, *, over_newer: bool
    ) -> Steps[None]:
        """
        Request the replay of a dead letter, unless it is already requested.

        If the previous replay was allowed to overwrite newer data, this one is as well, because its change is newer.
        """
        key, dead_letters = {"_id": letter.document_id}, see_collection(self._dead_letters, session)
        if letter.replay is not None:
            if over_newer:
                yield dead_letters.update_one(key, {"$set": {"replay.overNewer": True}}, session=session)
            return
        assert letter.parked is not None, "it waits for its key"
        change = _request(letter.replays, partitioning, partition, letter.parked, over_newer=over_newer)
        yield dead_letters.update_one(key, change, session=session)

    # -- listener ------------------------------------------------------------------------------------

    def withdraw_older(self, subscription: str, term: int) -> None:
        """
        Forget a handler's requests from an older partitioning. Their dead letters stay.

        Their executions, even started ones, can no longer have an outcome.

        Args:
            term: the term of the partitioning in force.
        """
        older = {"bridge": self._bridge, "handler": subscription, "replay.partitioningTerm": {"$lt": term}}
        with self._table.limit():
            self._dead_letters.update_many({**ASKED, **older}, {"$unset": {"replay": ""}})


def _request(starts: int, partitioning: int, partition: int, hash_: int, *, over_newer: bool) -> list[dict[str, Any]]:
    """Return the update that requests the replay of a dead letter, replacing an earlier request."""
    request = {
        "state": REQUESTED,
        "partitioningTerm": Int64(partitioning),
        "partition": partition,
        "hash": Int64(to_signed(hash_)),
        "overNewer": over_newer,
        "at": "$$NOW",
    }
    return [{"$unset": "replay"}, {"$set": {"replays": Int64(starts), "replay": request}}]


def _build_postponement(change: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the update after which a started dead letter may be started again."""
    return [{"$set": {"replay": {**change, "state": REQUESTED, "fencingToken": REMOVED}}}]


def _as_seen(letter: DeadChange) -> dict[str, Any]:
    """Return the condition that a dead letter was not started since it was read, and waits for the same key."""
    start: dict[str, Any] = {"replay.state": {"$ne": STARTED}}
    if letter.replay is not None and letter.replay.state == STARTED:
        start = {"replay.fencingToken": letter.replay.fencing_token}
    waits = {"$not": {"$type": "number"}} if letter.parked is None else Int64(to_signed(letter.parked))
    return {**start, "parked": waits}


def _abort_transaction(session: ClientSession) -> bool:
    session.abort_transaction()
    return False
