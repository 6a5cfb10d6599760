"""
Dead letters that are to be replayed, and what becomes of each attempt.

One document a letter, with its `_id`, in a collection that is nearly always empty, since the listener reads it every
second. It is there from the command until the letter is gone or has failed again::

                  start (claim, starts + 1)                  success: letter and request are removed
    requested ---------------------------------> started ---------------------------------------->
       ^                                          |  |  |
       |<--- later (a retry, infrastructure) -----+  |  +--- failure: the letter has the new error, the request has
       |<--- started again after a lapse: crash + 1 -+       failed; the listener withdraws what waits behind it

1. A replay runs under a claim of the partition to which its key belongs now, as a change does: nothing else of that
   partition runs meanwhile, and each start has a fence of its own. Its outcome is written in one transaction with the
   end of that claim, so one that was replaced writes none.
2. The claim counts on no change: it is marked as one whose lapse is charged to nobody, and what the first change of
   the partition has counted is left alone. What is counted of the letter stands in the request.
3. The fencing token for targets is not the claim's. It is the next of those that were kept free behind the attempts of
   the change (see `dead_letters`), in the layout of that time: so a target refuses an older attempt of the same letter,
   and refuses the letter where a change has written that was handled after it was set aside. With the claim's own,
   which is the newest of all, older data would go over newer, and no fence would see it. Who wants that says so
   (`over_newer`).
4. `starts` is in the message: of two messages of one attempt only the first is taken. The record of a start is written
   before the handler begins, in the request and in the letter, which outlives it. So its number is never used again,
   also where the process ends right behind it, or the request is withdrawn.

A parked key is released by a chain of replays. Its letters (those with its hash in `parked`) are replayed from the
first one on, in the order of the stream:

5. A start finds that its letter is the first that waits for its key; else the first one is asked for in its place. It
   is looked for under the claim: nobody can set a change aside meanwhile. But one may be discarded meanwhile, so the
   transaction that asks for the first one looks again.
6. What removes a letter, a replay or a discarding, asks for the next one in the same transaction. What comes in
   meanwhile is set aside behind, so it is next at some time.
7. Where none is next, the same transaction takes the hash out of `parkedKeys`. Whoever sets a change aside behind
   writes that document too, on the condition that the hash is there: so either the change is found as the next one,
   or it is not set aside, and runs.
8. Each transaction that removes a letter of a parked key writes that document (`removed`). Two that remove the last two
   letters at once would each leave the hash to the other.
9. Each asking has an id of its own (`asking`), also where the letter was asked for before. A listener withdraws only
   what it has read: one that is late would take away what was asked for since, and nobody would ask again.
10. What does not wait for a parked key, and would have a newer token than what does, fails at its start while the key
    is parked: behind it targets would refuse the release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import pymongo
from bson import ObjectId
from bson.int64 import Int64
from pymongo import ReturnDocument
from pymongo.client_session import ClientSession
from pymongo.collection import Collection

from mongo_celery.bridge.state.claims import TRANSACTION_SECONDS, Claim, name_session, own
from mongo_celery.bridge.state.dead_letters import PARKED, PARKED_BEHIND, DeadLetters, Letter, signed, unsigned
from mongo_celery.bridge.state.partitions import MOVING
from mongo_celery.mongo.expressions import after, literal, next_number, remaining
from mongo_celery.mongo.opening import open_session
from mongo_celery.mongo.table import Table, call_timeout

if TYPE_CHECKING:
    from mongo_celery.bridge.state.subscriptions import Layout

T = TypeVar("T")

REQUESTS_MAX = 1000
"""How many dead letters of one subscription may wait at a time: the listener reads all of them every second."""

_FIELDS: dict[str, Any] = {
    **dict.fromkeys(
        (
            "subscription", "generation", "partition", "hash", "key", "overNewer", "starts", "crashes", "fence",
            "retries", "waits", "doubts", "error", "failed", "at", "parked", "asking", "data",
        ),
        1,
    ),
    "due": remaining("notBefore"),
}  # fmt: skip


_KINDS: Mapping[str, Any] = {
    **dict.fromkeys(("_id", "subscription", "key", "data"), str),
    **dict.fromkeys(("generation", "partition", "hash", "starts", "crashes", "retries", "waits", "doubts"), int),
    **dict.fromkeys(("overNewer", "failed", "parked"), bool),
    "asking": ObjectId,
    "fence": int | None,
    "error": str | None,
}


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """
    One dead letter that is to be replayed.

    Attributes:
        letter: its `_id`.
        generation: of the layout in which it is to run, `partition` its partition there.
        hash: of its partition key, from 0 to 2^64 - 1.
        key: names its change in logs.
        over_newer: whether it may write over what newer changes have written.
        starts: how often the letter was started, all its replays together.
        crashes: how many of these ended without an outcome, in this replay.
        fence: of the claim under which it was started last; None behind an outcome.
        retries: attempts of this replay that asked for a retry.
        waits: how often in a row it has waited for MongoDB or the broker, `doubts` of these in doubt.
        due_in: seconds until it may run again; 0 or less when it may.
        failed: whether it has failed for good, and the listener has yet to take notice.
        parked: whether its letter waits for a parked key: those behind it follow.
        asking: changes whenever it is asked for.
        data: comparable part of its change's token.
    """

    letter: str
    subscription: str
    generation: int
    partition: int
    hash: int
    key: str
    over_newer: bool
    starts: int
    crashes: int
    fence: int | None
    retries: int
    waits: int
    doubts: int
    error: str | None
    due_in: float
    failed: bool
    at: datetime | None
    parked: bool
    asking: ObjectId
    data: str

    @property
    def order(self) -> tuple[str, str]:
        """What compares as their changes do in the stream; an existing document's letter is not named by its place."""
        return self.data, self.letter


class Replays:
    """The replays of one bridge. Thread-safe."""

    def __init__(
        self,
        requests: Collection[dict[str, Any]],
        partitions: Collection[dict[str, Any]],
        dead_letters: Collection[dict[str, Any]],
        bridge: str,
        ttl: float,
    ) -> None:
        self._table = Table(requests, call_timeout(ttl))
        self._partitions = Table(partitions, call_timeout(ttl))
        self._dead_letters = dead_letters
        self._letters = DeadLetters(dead_letters, bridge, ttl)
        self._bridge = bridge

    def read(self) -> list[ReplayRequest]:
        """All of them, by subscription, then in the order of the stream; what nobody can read counts as not there."""
        scope = {"_id": {"$gte": f"{self._bridge}/", "$lt": f"{self._bridge}0"}}
        found = (_replay(document) for document in self._table.find(scope, _FIELDS))
        return sorted((each for each in found if each is not None), key=lambda each: (each.subscription, each.order))

    def find(self, letter: str) -> ReplayRequest | None:
        """That of one letter."""
        return _replay(self._table.find_one({"_id": letter}, _FIELDS))

    # -- what a person decides ---------------------------------------------------------------------

    def request(
        self, letter: Letter, *, generation: int, partition: int, hash_: int, over_newer: bool
    ) -> Literal["done", "requested", "gone"]:
        """
        Ask for the replay of a letter.

        Args:
            generation: of the layout in force, `partition` the one of the letter's key there.
            hash_: of its partition key.

        Returns:
            `requested` where somebody else has done so before, `gone` where there is no letter any more.
        """
        document_id = letter.document_id
        document = _request_of(letter, generation, partition, hash_, over_newer=over_newer)

        def ask(session: ClientSession) -> Literal["done", "requested", "gone"]:
            # The letter is written too: who discards it at the same time is in conflict with this.
            asked = {"$currentDate": {"replayAskedAt": True}}
            guard = {"_id": document_id, "replays": letter.replays} if letter.place else {"_id": document_id}
            found = self._dead_letters.find_one_and_update(guard, asked, {"_id": 1}, session=session)
            there = _replay(self._table.collection.find_one({"_id": document_id}, _FIELDS, session=session))
            if there is not None and not there.failed:
                session.abort_transaction()
                return "requested"
            if found is None:
                session.abort_transaction()
                return "gone"
            self._table.collection.replace_one({"_id": document_id}, document, upsert=True, session=session)
            self._table.collection.update_one({"_id": document_id}, {"$currentDate": {"at": True}}, session=session)
            return "done"

        return self._together(ask)

    def discard(self, letter: str, layout: Layout | None = None) -> Literal["done", "running", "moving", "gone"]:
        """
        Remove a letter, and the request for its replay; not while that is running.

        Where it is the first that waits for a parked key, those behind it are replayed; where it is the only one, the
        key is released.

        Args:
            layout: of its subscription, in force; without it what waits behind goes on waiting.

        Returns:
            `moving` where its key is parked, and its partition is closed for a new layout.
        """

        def remove(session: ClientSession) -> Literal["done", "running", "moving", "gone"]:
            found = _replay(self._table.collection.find_one({"_id": letter}, _FIELDS, session=session))
            if found is not None and self._is_running(found, session):
                session.abort_transaction()
                return "running"
            gone, first = self._removed(letter, session)
            if gone is None:
                return "gone"
            if gone.parked is not None and not self._go_on_without(gone, first, layout, session):
                session.abort_transaction()
                return "moving"
            return "done"

        return self._together(remove)

    def _is_running(self, replay: ReplayRequest, session: ClientSession) -> bool:
        """Whether a replay that was started may still end by itself; one whose claim has lapsed is ended here."""
        if replay.fence is None or replay.failed:
            return False
        partition_id = f"{self._bridge}/{replay.subscription}/{replay.generation}/{replay.partition}"
        mine = {"_id": partition_id, "fence": replay.fence, "claim.replay": replay.letter}
        live = {"live": {"$gt": ["$claim.until", "$$NOW"]}}
        found = self._partitions.collection.find_one(mine, live, session=session)
        if found is None or found["live"]:
            return found is not None
        self._partitions.collection.update_one(
            mine, [{"$set": {"fence": next_number("fence"), "claim": None}}], session=session
        )
        return False

    # -- what an execution does --------------------------------------------------------------------

    def start(self, claim: Claim, letter: str, starts: int) -> ReplayRequest | None:
        """
        Record that the handler is about to start, under this claim.

        Args:
            starts: before this one, as the message says.

        Returns:
            What is to be replayed; None where another message has started it, or there is nothing to replay any more.
        """
        change = {
            "starts": {"$add": ["$starts", Int64(1)]},
            "crashes": {"$add": ["$crashes", {"$cond": [{"$gt": ["$fence", None]}, 1, 0]}]},
            "fence": Int64(claim.fence),
            "notBefore": None,
        }
        guard = {"_id": letter, "starts": starts, "failed": False}

        def record(session: ClientSession) -> ReplayRequest | None:
            found = self._table.collection.find_one_and_update(
                guard, [{"$set": change}], _FIELDS, return_document=ReturnDocument.AFTER, session=session
            )
            replay = _replay(found)
            if replay is None:
                session.abort_transaction()
                return None
            number = {"$set": {"replays": Int64(replay.starts)}}
            self._dead_letters.update_one({"_id": letter}, number, session=session)
            return replay

        return self._together(record)

    def succeed(self, claim: Claim, letter: str, session: ClientSession | None = None) -> bool:
        """
        Remove a letter whose handler has succeeded.

        Args:
            session: of a transactional handler, as the last writes of its transaction.

        Returns:
            False where a newer execution decides.
        """

        def remove(session: ClientSession) -> None:
            done = _replay(self._table.collection.find_one({"_id": letter}, _FIELDS, session=session))
            gone, _ = self._removed(letter, session)
            if gone is not None and gone.parked is not None:
                self._go_on_behind(gone, claim, done, session)

        if session is not None:
            return self._end(claim, remove, session)
        return self._settle(claim, remove)

    def fail(self, claim: Claim, replay: ReplayRequest, error: str, traceback: str, attempts: int) -> bool:
        """
        Leave a letter with its new error; the request stays, as failed, until the listener has taken notice.

        Args:
            attempts: how often its handler was tried.

        Returns:
            False where a newer execution decides.
        """

        def note(session: ClientSession) -> None:
            change: dict[str, Any] = {
                "$set": {"error": error, "traceback": traceback, "replays": Int64(replay.starts)},
                "$inc": {"attempts": attempts},
                "$currentDate": {"replayedAt": True},
            }
            self._dead_letters.update_one({"_id": replay.letter}, change, session=session)
            behind = {"_id": replay.letter, "cause": PARKED_BEHIND}  # it waits because of itself now
            self._dead_letters.update_one(behind, {"$set": {"cause": PARKED}}, session=session)
            done = {"$set": {"failed": True, "fence": None, "error": error}}
            self._table.collection.update_one({"_id": replay.letter}, done, session=session)

        return self._settle(claim, note)

    def retry_later(
        self, claim: Claim, letter: str, error: str, *, delay: float | None, not_before: datetime | None
    ) -> bool:
        """Set a replay aside until its retry time, and count the attempt; arguments and answer as of `Claims.park`."""
        due = after(delay) if delay is not None else literal(not_before)
        counts = {"retries": {"$add": ["$retries", 1]}, "waits": 0, "doubts": 0}
        return self._postpone(claim, letter, {"notBefore": due, "error": literal(error), **counts})

    def wait(self, claim: Claim, letter: str, cause: str, *, delay: float, doubtful: bool) -> bool:
        """Set a replay aside, since infrastructure was away; nothing is counted; arguments as of `Claims.wait`."""
        counts = {"waits": claim.waits + 1, "doubts": claim.doubts + 1 if doubtful else 0}
        return self._postpone(claim, letter, {"notBefore": after(delay), "error": literal(cause), **counts})

    def release(self, claim: Claim, letter: str) -> bool:
        """End a start that is nobody's fault: it may be started again at once."""
        return self._postpone(claim, letter, {})

    def put_in_place(self, claim: Claim, letter: str, data: str) -> bool:
        """
        End a start of a letter that stands elsewhere in the stream than its request says: it is started in its turn.

        Args:
            data: comparable part of its change's token.

        Returns:
            False where a newer execution decides.
        """
        return self._postpone(claim, letter, {"data": literal(data)})

    def redirect(self, claim: Claim, replay: ReplayRequest, hash_: int) -> bool:
        """
        End a start in front of whose letter another one waits for the same key: that one is asked for instead.

        Where the letter is the first one by now, it is to be started again.

        Args:
            hash_: of the key.

        Returns:
            False where a newer execution decides.
        """

        def ask(session: ClientSession) -> None:
            first = self._letters.first_waiting(replay.subscription, hash_, session)
            key = {"_id": replay.letter}
            if first is None or first.document_id == replay.letter:
                self._table.collection.update_one(key, {"$set": {"fence": None}}, session=session)
                return
            self._table.collection.delete_one(key, session=session)
            self._ask_next(first, replay.generation, replay.partition, session, over_newer=replay.over_newer)

        return self._settle(claim, ask)

    def _postpone(self, claim: Claim, letter: str, change: Mapping[str, Any]) -> bool:
        def note(session: ClientSession) -> None:
            self._table.collection.update_one({"_id": letter}, [{"$set": {**change, "fence": None}}], session=session)

        return self._settle(claim, note)

    def _settle(self, claim: Claim, write: Callable[[ClientSession], None]) -> bool:
        with self._session() as session:
            named = name_session(self._partitions, claim, session)
            return named and _in_transaction(session, lambda _: self._end(claim, write, session) or _aborted(session))

    def _end(self, claim: Claim, write: Callable[[ClientSession], None], session: ClientSession) -> bool:
        ended = self._partitions.collection.update_one(own(claim), {"$set": {"claim": None}}, session=session)
        if ended.matched_count:
            write(session)
        return bool(ended.matched_count)

    # -- parked keys -------------------------------------------------------------------------------

    def _removed(self, letter: str, session: ClientSession) -> tuple[Letter | None, bool]:
        """Remove a letter and its request; the letter as it was, and whether it was the first of its parked key."""
        self._table.collection.delete_one({"_id": letter}, session=session)
        found = self._letters.header(letter, session)
        if found is None:
            return None, False
        first = None
        if found.parked is not None:
            first = self._letters.first_waiting(found.subscription, found.parked, session)
        self._dead_letters.delete_one({"_id": letter}, session=session)
        return found, first is not None and first.document_id == letter

    def _go_on_behind(self, gone: Letter, claim: Claim, done: ReplayRequest | None, session: ClientSession) -> None:
        """Behind a letter of a parked key that was replayed: the next one, or the key is released."""
        assert gone.parked is not None, "it waited for its key"
        following = self._letters.first_waiting(gone.subscription, gone.parked, session)
        self._count_removed(gone, session, is_last=following is None)
        if following is None:
            return
        generation, partition = map(int, claim.partition_id.split("/")[-2:])
        self._ask_next(following, generation, partition, session, over_newer=done is not None and done.over_newer)

    def _go_on_without(self, gone: Letter, first: bool, layout: Layout | None, session: ClientSession) -> bool:
        """As `_go_on_behind`, of one that was discarded; False where its partition is closed for a new layout."""
        assert gone.parked is not None, "it waited for its key"
        holding, in_force = self._holding(gone), layout.generation if layout is not None else 0
        found = self._partitions.collection.find(holding, {"state": 1}, session=session)
        if any(each["state"] == MOVING and _generation(each["_id"]) >= in_force for each in found):
            return False  # what is left of an older layout is over, and stays closed until it is removed
        following = self._letters.first_waiting(gone.subscription, gone.parked, session)
        self._count_removed(gone, session, is_last=following is None)
        if following is None:
            return True
        if first and layout is not None:
            self._ask_next(following, layout.generation, gone.parked % layout.partitions, session, over_newer=False)
        return True

    def _holding(self, letter: Letter) -> dict[str, Any]:
        """The partition in which the key of a letter is parked; two, while a layout is being prepared or left."""
        assert letter.parked is not None, "it waits for its key"
        prefix = f"{self._bridge}/{letter.subscription}"
        return {"_id": {"$gt": f"{prefix}/", "$lt": f"{prefix}0"}, "parkedKeys": Int64(signed(letter.parked))}

    def _count_removed(self, gone: Letter, session: ClientSession, *, is_last: bool) -> None:
        """Write where the key of a letter is parked; behind its last letter it is released."""
        holding = self._holding(gone)
        change: dict[str, Any] = {"$inc": {"removed": Int64(1)}}
        if is_last:
            change["$pull"] = {"parkedKeys": holding["parkedKeys"]}
        self._partitions.collection.update_many(holding, change, session=session)

    def _ask_next(
        self, letter: Letter, generation: int, partition: int, session: ClientSession, *, over_newer: bool
    ) -> None:
        """
        Ask for the replay of a letter; where that was done, it is noted that somebody counts on it.

        What follows a replay over newer data goes over it too, for it is newer than what that one has written.
        """
        key = {"_id": letter.document_id}
        there = _replay(self._table.collection.find_one(key, _FIELDS, session=session))
        if there is not None and not there.failed:
            noted = {"asking": ObjectId(), "overNewer": there.over_newer or over_newer}
            self._table.collection.update_one(key, {"$set": noted}, session=session)
            return
        assert letter.parked is not None, "it waits for its key"
        document = _request_of(letter, generation, partition, letter.parked, over_newer=over_newer)
        self._table.collection.replace_one(key, document, upsert=True, session=session)
        self._table.collection.update_one(key, {"$currentDate": {"at": True}}, session=session)

    # -- what the listener does --------------------------------------------------------------------

    def place(self, replay: ReplayRequest, layout: Layout) -> None:
        """Send a request for a parked key to where that belongs in a later layout, whose key is as it was."""
        where = {"generation": Int64(layout.generation), "partition": replay.hash % layout.partitions}
        with self._table.limit():
            guard = {"_id": replay.letter, "generation": replay.generation}
            self._table.collection.update_one(guard, {"$set": where})

    def withdraw(self, replays: Sequence[ReplayRequest], *, is_over: bool = False) -> None:
        """
        Forget requests as they were seen, unless they were started or asked for meanwhile; their letters stay.

        Args:
            is_over: whether no execution of theirs can have an outcome any more, also of those that were started.
        """
        for each in replays:
            fence = each.fence if is_over else None
            guard = {
                "_id": each.letter, "starts": each.starts, "failed": each.failed, "fence": fence, "asking": each.asking,
            }  # fmt: skip
            with self._table.limit():
                self._table.collection.delete_one(guard)

    def forget(self, letter: str) -> None:
        """The request of a letter that is gone is of no use."""
        with self._table.limit():
            self._table.collection.delete_one({"_id": letter})

    def _together(self, body: Callable[[ClientSession], T]) -> T:
        with self._session() as session:
            return _in_transaction(session, body)

    @contextmanager
    def _session(self) -> Iterator[ClientSession]:
        """For one transaction, within its time."""
        with (
            pymongo.timeout(max(self._table.timeout, TRANSACTION_SECONDS)),
            open_session(self._dead_letters.database.client) as session,
        ):
            yield session


def _request_of(letter: Letter, generation: int, partition: int, hash_: int, *, over_newer: bool) -> dict[str, Any]:
    """The document that asks for the replay of a letter, without its `_id`."""
    return {
        "subscription": letter.subscription,
        "generation": Int64(generation),
        "partition": partition,
        "hash": Int64(signed(hash_)),
        "key": letter.key,
        "overNewer": over_newer,
        "starts": Int64(letter.replays),
        "crashes": 0,
        "fence": None,
        "retries": 0,
        "waits": 0,
        "doubts": 0,
        "notBefore": None,
        "error": None,
        "failed": False,
        "parked": letter.parked is not None,
        "asking": ObjectId(),
        "data": letter.order[0] or letter.id,
    }


def _generation(partition_id: str) -> int:
    return int(partition_id.split("/")[-2])


def _in_transaction(session: ClientSession, body: Callable[[ClientSession], T]) -> T:
    return session.with_transaction(body)


def _aborted(session: ClientSession) -> bool:
    session.abort_transaction()
    return False


def _replay(document: Mapping[str, Any] | None) -> ReplayRequest | None:
    """None also for what is damaged: nothing is replayed by it, and asking once more replaces it."""
    if document is None or any(not isinstance(document.get(name), kind) for name, kind in _KINDS.items()):
        return None
    return ReplayRequest(
        letter=document["_id"],
        subscription=document["subscription"],
        generation=document["generation"],
        partition=document["partition"],
        hash=unsigned(document["hash"]),
        key=document["key"],
        over_newer=document["overNewer"],
        starts=document["starts"],
        crashes=document["crashes"],
        fence=document.get("fence"),
        retries=document["retries"],
        waits=document["waits"],
        doubts=document["doubts"],
        error=document.get("error"),
        due_in=(document.get("due") or 0) / 1000,
        failed=document["failed"],
        at=document.get("at"),
        parked=document["parked"],
        asking=document["asking"],
        data=document["data"],
    )
