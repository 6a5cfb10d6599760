"""
Replays of dead letters, and what each attempt leaves.

A request is the sub-document `replay` of its dead letter, found by a partial index: the listener reads all of them
every second. It is there from the command until the dead letter is gone or has failed again::

                  start (claim, replays + 1)               success: the dead letter is removed, and its request with it
    requested ---------------------------------> started ---------------------------------------->
       ^                                          |  |  |
       |<--- later (a retry, infrastructure) -----+  |  +--- failed: the dead letter has the new error; the listener
       |<--- started again after a lapse: crash + 1 -+       withdraws the requests after it, and then this one

1. A replay runs under a claim of the partition to which its key belongs now, as a change does: nothing else of that
   partition runs meanwhile, and each start has its own fencing token. Its outcome is written in one transaction with
   the end of that claim, so one that was replaced writes none.
2. The claim counts on no change: it is marked as one whose lapse is charged to nobody, and what the first change of
   the partition has counted is left alone. What is counted of the dead letter stands in the request.
3. The fencing token for targets is not the claim's. It is the next of those that were kept free after the attempts of
   the change (see `dead_letters`), in the layout of that time: so a target refuses an older attempt of the same dead
   letter, and refuses the dead letter where a change has written that was handled after it was set aside. With the
   claim's own, which is the newest of all, older data would go over newer, and no token would see it. `over_newer`
   asks for that.
4. `replays`, the number of starts, is in the message: of two messages of one attempt only the first is taken. A start
   is one write of the dead letter, before the handler begins. So its number is never used again, also where the
   process ends right after it, or the request is withdrawn. A change that is set aside once more counts as a start: a
   message for its earlier place is not taken, and the listener sends another in its turn.

A parked key is released by a chain of replays. Its dead letters (those with its hash in `parked`) are replayed from the
first one on, in the order of the stream:

5. A start finds that its dead letter is the first that waits for its key. Else the first one is asked for in its place.
   It is looked for under the claim: nobody can set a change aside meanwhile. But one may be discarded meanwhile, so the
   transaction that asks for the first one looks again.
6. A replay or a discarding that removes a dead letter asks for the next one in the same transaction. A change that
   comes in meanwhile is set aside after it, so it is next at some time.
7. Where none is next, the same transaction takes the hash out of `parkedKeys`. Setting a change aside for a parked key
   writes that document too, on the condition that the hash is there: so either the change is found as the next one,
   or it is not set aside, and runs.
8. Each transaction that removes a dead letter of a parked key writes that document (`removed`). Two that remove the
   last two at once would each leave the hash to the other.
9. Each asking has an id of its own (`replay.id`), also where it was asked for before. A listener withdraws only
   what it has read: one that is late would take away what was asked for since, and nobody would ask again.
10. A dead letter that does not wait for a parked key, and would have a newer token than those that do, fails at its
    start while the key is parked: after it targets would refuse the release.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from bson import ObjectId
from bson.int64 import Int64
from pymongo import ReturnDocument
from pymongo.client_session import ClientSession
from pymongo.collection import Collection

from mongo_celery.bridge.state.claims import Claim, claim_filter, record_session
from mongo_celery.bridge.state.dead_letters import (
    ASKED,
    PARKED,
    PARKED_BEHIND,
    REPLAY_FAILED,
    REPLAY_FIELDS,
    REQUESTED,
    STARTED,
    DeadLetters,
    Letter,
    ReplayRequest,
    parse_replay,
    read_starts,
)
from mongo_celery.bridge.state.state_collection import ids_under, to_signed
from mongo_celery.mongo.expressions import REMOVED, after, literal, next_number
from mongo_celery.mongo.table import Table, call_timeout

if TYPE_CHECKING:
    from mongo_celery.bridge.state.subscriptions import Layout

REQUESTS_MAX = 1000
"""Limit of waiting dead letters of one handler: the listener reads all of them every second."""


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
        """Create the index by which requests are found, with the others of the dead letters. It may take long."""
        self._letters.ensure_indexes(patiently=True)

    def read(self) -> list[ReplayRequest]:
        """Return all requests, by subscription, then in the order of the stream. Damaged ones are left out."""
        scope = {**ASKED, "_id": ids_under(self._bridge)}
        found = (parse_replay(document) for document in self._table.find(scope, REPLAY_FIELDS))
        return sorted((each for each in found if each is not None), key=lambda each: (each.subscription, each.order))

    def find(self, letter: str) -> ReplayRequest | None:
        """Return the request of one dead letter, by its `_id`."""
        return parse_replay(self._table.find_one({"_id": letter}, REPLAY_FIELDS))

    # -- what a person decides ---------------------------------------------------------------------

    def request(
        self, letter: str, *, generation: int, partition: int, hash_: int, over_newer: bool
    ) -> Literal["done", "requested", "gone"]:
        """
        Ask for the replay of a dead letter.

        Args:
            letter: its `_id`.
            generation: of the layout in force, `partition` the one of its key there.
            hash_: of its partition key.

        Returns:
            `requested` where somebody else has done so before, `gone` where there is no such dead letter any more.
        """
        found = self._table.find_one({"_id": letter}, REPLAY_FIELDS)
        asked = parse_replay(found)
        if found is None:
            return "gone"
        if asked is not None and not asked.failed:
            return "requested"
        guard = {"_id": letter, "replay": found.get("replay"), "replays": found.get("replays")}
        change = _request(read_starts(found), generation, partition, hash_, over_newer=over_newer)
        return "done" if self._table.update(guard, change) else "requested"

    def discard(self, letter: str, layout: Layout | None = None) -> Literal["done", "running", "gone"]:
        """
        Remove a dead letter, and the request for its replay. Not while that is running.

        Where it is the first that waits for a parked key, those after it are replayed. Where it is the only one, the
        key is released.

        Args:
            layout: of its subscription, in force. Without it the others of its key go on waiting.
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

        def remove(session: ClientSession) -> Literal["done", "running"]:
            gone, first = self._remove_letter(guard, session)
            if gone is None:
                return "running"
            to = (layout.term, parked % layout.partitions) if first and layout is not None else None
            self._release_key(gone, to, session, over_newer=False)
            return "done"

        with self._table.session() as session:
            return session.with_transaction(remove)

    def _is_running(self, replay: ReplayRequest) -> bool:
        """Return True if a replay that was started may still have an outcome. A claim that has lapsed is ended here."""
        if replay.state != STARTED:
            return False
        partition_id = f"{self._bridge}/{replay.subscription}/{replay.term}/{replay.partition}"
        mine = {"_id": partition_id, "fencingToken": replay.fencing_token, "claim.replay": replay.letter}
        has_lapsed = {"$expr": {"$lte": ["$claim.until", "$$NOW"]}}
        end = [{"$set": {"fencingToken": next_number("fencingToken"), "claim": REMOVED}}]
        return not self._partitions.update({**mine, **has_lapsed}, end) and bool(self._partitions.find_one(mine))

    # -- what an execution does --------------------------------------------------------------------

    def start(self, claim: Claim, letter: str, starts: int) -> ReplayRequest | None:
        """
        Record that the handler is about to start, under this claim.

        Args:
            starts: before this one, as the message says.

        Returns:
            What is to be replayed. None where another message has started it, or there is nothing to replay any more.
        """
        is_again = {"$cond": [{"$eq": ["$replay.state", STARTED]}, 1, 0]}
        change = {
            "replays": {"$add": ["$replays", Int64(1)]},
            "replay": {
                "state": STARTED,
                "crashes": {"$add": [{"$ifNull": ["$replay.crashes", 0]}, is_again]},
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

    def succeed(self, claim: Claim, letter: str, session: ClientSession | None = None) -> bool:
        """
        Remove a dead letter whose handler has succeeded.

        Args:
            session: of a transactional handler, as the last writes of its transaction.

        Returns:
            False where a newer execution decides.
        """

        def remove(session: ClientSession) -> None:
            gone, _ = self._remove_letter({"_id": letter}, session)
            if gone is not None and gone.parked is not None:
                generation, partition = map(int, claim.partition_id.split("/")[-2:])
                over_newer = gone.replay is not None and gone.replay.over_newer
                self._release_key(gone, (generation, partition), session, over_newer=over_newer)

        if session is not None:
            return self._end(claim, remove, session)
        return self._settle(claim, remove)

    def fail(self, claim: Claim, replay: ReplayRequest, error: str, traceback: str, attempts: int) -> bool:
        """
        Leave a dead letter with its new error. Its request stays, as failed, until the listener has taken notice.

        Args:
            attempts: how often its handler was tried.

        Returns:
            False where a newer execution decides.
        """
        is_behind = {"$eq": ["$cause", PARKED_BEHIND]}  # it waits because of itself now
        change = {
            "error": literal(error),
            "traceback": literal(traceback),
            "attempts": {"$add": ["$attempts", attempts]},
            "replayedAt": "$$NOW",
            "cause": {"$cond": [is_behind, PARKED, "$cause"]},
            "replay": {"state": REPLAY_FAILED, "error": literal(error), "fencingToken": REMOVED},
        }
        return self._settle(claim, partial(self._dead_letters.update_one, {"_id": replay.letter}, [{"$set": change}]))

    def retry_later(
        self, claim: Claim, letter: str, error: str, *, delay: float | None, not_before: datetime | None
    ) -> bool:
        """Set a replay aside until its retry time, and count the attempt. Arguments and answer as of `Claims.park`."""
        due = after(delay) if delay is not None else literal(not_before)
        retries = {"$add": [{"$ifNull": ["$replay.retries", 0]}, 1]}
        counts = {"retries": retries, "waits": REMOVED, "doubts": REMOVED}
        return self._postpone(claim, letter, {"notBefore": due, "error": literal(error), **counts})

    def wait(self, claim: Claim, letter: str, cause: str, *, delay: float, doubtful: bool) -> bool:
        """Set a replay aside, since infrastructure was away. Nothing is counted. Arguments as of `Claims.wait`."""
        counts = {"waits": claim.waits + 1, "doubts": claim.doubts + 1 if doubtful else 0}
        return self._postpone(claim, letter, {"notBefore": after(delay), "error": literal(cause), **counts})

    def release(self, claim: Claim, letter: str) -> bool:
        """End a start that is nobody's fault: it may be started again immediately."""
        return self._postpone(claim, letter, {})

    def redirect(self, claim: Claim, replay: ReplayRequest, hash_: int) -> bool:
        """
        End a start before whose dead letter another one waits for the same key: that one is asked for instead.

        Where the dead letter is the first one by now, it is to be started again.

        Args:
            hash_: of the key.

        Returns:
            False where a newer execution decides.
        """

        def ask(session: ClientSession) -> None:
            first = self._letters.first_waiting(replay.subscription, hash_, session)
            if first is None or first.document_id == replay.letter:
                self._dead_letters.update_one({"_id": replay.letter}, _build_postponement({}), session=session)
                return
            self._dead_letters.update_one({"_id": replay.letter}, {"$unset": {"replay": ""}}, session=session)
            self._ask_next(first, replay.term, replay.partition, session, over_newer=replay.over_newer)

        return self._settle(claim, ask)

    def _postpone(self, claim: Claim, letter: str, change: Mapping[str, Any]) -> bool:
        return self._settle(claim, partial(self._dead_letters.update_one, {"_id": letter}, _build_postponement(change)))

    def _settle(self, claim: Claim, write: Callable[..., object]) -> bool:
        with self._table.session() as session:
            named = record_session(self._partitions, claim, session)
            return named and session.with_transaction(
                lambda _: self._end(claim, write, session) or _abort_transaction(session)
            )

    def _end(self, claim: Claim, write: Callable[..., object], session: ClientSession) -> bool:
        ended = self._partitions.collection.update_one(claim_filter(claim), {"$unset": {"claim": ""}}, session=session)
        if ended.matched_count:
            write(session=session)
        return bool(ended.matched_count)

    # -- parked keys -------------------------------------------------------------------------------

    def _remove_letter(self, guard: Mapping[str, Any], session: ClientSession) -> tuple[Letter | None, bool]:
        """Remove a dead letter. It as it was, and whether it was the first of its parked key."""
        found = self._letters.header(str(guard["_id"]), session)
        first = None
        if found is not None and found.parked is not None:
            first = self._letters.first_waiting(found.subscription, found.parked, session)
        if found is None or not self._dead_letters.delete_one(guard, session=session).deleted_count:
            return None, False
        return found, first is not None and first.document_id == found.document_id

    def _release_key(
        self, gone: Letter, to: tuple[int, int] | None, session: ClientSession, *, over_newer: bool
    ) -> None:
        """
        After a removed dead letter of a parked key: ask for the next one, or release the key if it was the last.

        Each removal writes where the key is parked, so that two of them meet.

        Args:
            to: term and index of the partition in which the next one is to run. None if it goes on waiting.
        """
        assert gone.parked is not None, "it waited for its key"
        following = self._letters.first_waiting(gone.subscription, gone.parked, session)
        hash_ = Int64(to_signed(gone.parked))
        change: dict[str, Any] = {"$inc": {"removed": Int64(1)}}
        if following is None:
            change["$pull"] = {"parkedKeys": {"hash": hash_}}
        holding = {"_id": ids_under(f"{self._bridge}/{gone.subscription}"), "parkedKeys.hash": hash_}
        self._partitions.collection.update_many(holding, change, session=session)
        if following is not None and to is not None:
            self._ask_next(following, *to, session, over_newer=over_newer)

    def _ask_next(
        self, letter: Letter, generation: int, partition: int, session: ClientSession, *, over_newer: bool
    ) -> None:
        """
        Ask for the replay of a dead letter. Where that was done, it is noted that somebody counts on it.

        After a replay over newer data it goes over them too, for it is newer than what that has written.
        """
        key = {"_id": letter.document_id}
        if letter.replay is not None and not letter.replay.failed:
            noted = {"replay.id": ObjectId(), "replay.overNewer": letter.replay.over_newer or over_newer}
            self._dead_letters.update_one(key, {"$set": noted}, session=session)
            return
        assert letter.parked is not None, "it waits for its key"
        change = _request(letter.replays, generation, partition, letter.parked, over_newer=over_newer)
        self._dead_letters.update_one(key, change, session=session)

    # -- what the listener does --------------------------------------------------------------------

    def withdraw(self, replays: Sequence[ReplayRequest], *, is_over: bool = False) -> None:
        """
        Forget requests as they were seen, unless they were started or asked for meanwhile. Their dead letters stay.

        Args:
            is_over: whether no execution of theirs can have an outcome any more, also of those that were started.
        """
        for each in replays:
            if is_over or each.state != STARTED:
                seen = {"replays": each.starts, "replay.state": each.state, "replay.id": each.asking}
                self._table.update({"_id": each.letter, **seen}, {"$unset": {"replay": ""}})


def _request(starts: int, generation: int, partition: int, hash_: int, *, over_newer: bool) -> list[dict[str, Any]]:
    """Return the update that asks for the replay of a dead letter, in the place of an earlier request."""
    request = {
        "id": ObjectId(),
        "state": REQUESTED,
        "partitioningTerm": Int64(generation),
        "partition": partition,
        "hash": Int64(to_signed(hash_)),
        "overNewer": over_newer,
        "at": "$$NOW",
    }
    return [{"$unset": "replay"}, {"$set": {"replays": Int64(starts), "replay": request}}]


def _build_postponement(change: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the update after which a dead letter that was started may be started again."""
    return [{"$set": {"replay": {**change, "state": REQUESTED, "fencingToken": REMOVED}}}]


def _as_seen(letter: Letter) -> dict[str, Any]:
    """Return a guard for a dead letter that was not started since it was read, and waits for the same key."""
    start: dict[str, Any] = {"replay.state": {"$ne": STARTED}}
    if letter.replay is not None and letter.replay.state == STARTED:
        start = {"replay.fencingToken": letter.replay.fencing_token}
    waits = {"$not": {"$type": "number"}} if letter.parked is None else Int64(to_signed(letter.parked))
    return {**start, "parked": waits}


def _abort_transaction(session: ClientSession) -> bool:
    session.abort_transaction()
    return False
