"""
The writes of an execution on its partition: the claim, and the outcomes.

The partition's document is the authority on who may run what::

                    claim (fencingToken + 1)                    commit
    waiting ----------------------------> claimed --handled--> handled ------> waiting (committed + n)
       ^                                   |  |  |
       |<--- the position, inline (7) -----+  |  |
       |<--- retry (parked until notBefore)+  |  +--- halt ---> halted (until an operator acts)
       |<--- wait (the same, not counted) -+  |
       |<--- claim lapses: crash + 1 (*) -----+--- dead letter or discard --> waiting (committed + 1)

1. Every execution claims anew (first delivery, redelivery, retry) and gets a strictly larger fencing token.
   With the term alone as fencing token a redelivered change runs twice under one number,
   and the second writes after the successor has.
2. A claim matches `term` for equality: "at least" would let a forged or foreign one poison it.
3. Every later write matches fencing token, owner and `committed`. A refusal is final: a retry that reads the
   state again would beat the fencing token by waiting.
4. A commit takes its values from `handled`, which was fenced when it was written. So whoever commits is
   right, and the commit message carries no authority.
5. (*) A crash is charged in the name of its owner, by whoever replaces the lapsed claim, and kept in
   `retry.lapsed`, unless it is of a process that is known to live, since it replaces the claim itself. An owner
   that proves to be alive, by asking, withdraws what was charged in its name, once.
   One that was told to leave marks its claim before, and its lapse is charged to nobody. Runs are one change
   each after any lapse, charged or not.
6. What is counted of an existing document is its own (`retry.of`, its token). One that was not stored when its term
   ended comes again elsewhere, behind other changes: these begin anew.
7. `parkedKeys` names the keys whose changes wait for a person, by `hash` and, for people, by the `key` of the change
   that was parked. It grows by the outcome of a claim alone, so
   what a claim has read of it holds, or is released, until the claim ends: a change of such a key is set aside
   unstarted, whoever has sent it (`replays` says how a key is released).
8. Where no commit task follows a run, its execution writes the position itself, in one write under its own guard (3):
   there is no `handled`, and nothing between success and position.
9. While a run is under way its execution may move the position behind what is done of it (`advance`), under its own
   guard (3), by majority: the claim goes on with the next change as its first, of which nothing is counted yet. Before
   a later change has an outcome it must, since every outcome is that of the claim's first.
10. What a success leaves, `handled` and then the position, is written with w:1: whoever looks at positions reads what a
    majority has, and what is written behind one, the next claim first, is a majority write and keeps it. So one that a
    failover takes back costs one more start at most. Its claim, which is there again, is renewed by nobody: it lapses
    as that of a process that died, and nobody withdraws the crash.

| failure | what happens |
|---|---|
| the answer of a claim is lost | ended by owner, best effort, and claimed anew; no crash is counted |
| a heartbeat is late | the claim lapses; the execution may finish if nobody claimed since, else the crash is undone |
| the worker is told to shut down, and killed later | the claim lapses; no crash is counted |
| `handled`, or the position, is lost in a rollback (w:1) | it runs once more, as after a worker's death |
| the worker dies | the claim lapses; the next claim counts a crash and runs change by change |
| the worker dies in a transaction of its claim | it names the session: what is locked is free when it lapses |
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from bson.binary import Binary
from bson.int64 import Int64
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import OperationFailure

from mongo_celery.bridge.existing import is_existing
from mongo_celery.bridge.state.dead_letters import REPLAYS_MAX, store
from mongo_celery.bridge.state.state_collection import to_unsigned
from mongo_celery.mongo.expressions import REMOVED, after, literal, millis, next_number, whole
from mongo_celery.mongo.oplog import time_of_token
from mongo_celery.mongo.table import ACKNOWLEDGED, MAJORITY, Table, call_timeout

PARKED_MAX = 1000
"""Limit of parked keys of one partition: each of its claims reads them all."""

_PARKED_CHARS = 200
_LAPSED_MAX = 16
_REPLACED: dict[str, Any] = {"$gt": ["$claim", None]}
_CHARGED: dict[str, Any] = {"$and": [_REPLACED, {"$ne": ["$claim.leaving", True]}]}


def _charge(living: Sequence[str] = ()) -> dict[str, Any]:
    lives = {"$in": ["$claim.owner", {"$literal": [*living]}]}
    charged = {"$and": [_CHARGED, {"$not": [lives]}]} if living else _CHARGED
    owners = {"$concatArrays": [{"$ifNull": ["$retry.lapsed", []]}, {"$cond": [charged, ["$claim.owner"], []]}]}
    return {
        "crashes": {"$add": [{"$ifNull": ["$retry.crashes", 0]}, {"$cond": [charged, 1, 0]}]},
        "lapsed": {"$slice": [owners, -_LAPSED_MAX]},
    }


def _is_gone(token: str | None) -> dict[str, Any]:
    """Return an expression: the counts are of a snapshot row, and a run with this token begins with another change."""
    return {"$and": [{"$gt": ["$retry.of", None]}, {"$ne": ["$retry.of", {"$literal": token}]}]}


_FREE: dict[str, Any] = {"$lte": ["$claim.until", "$$NOW"]}
_DUE: dict[str, Any] = {"$lte": ["$retry.notBefore", "$$NOW"]}
_OF_NO_ROW = _is_gone(None)
_CLAIMED_FIELDS = {"fencingToken": 1, "retry": 1, "parkedKeys.hash": 1, "claim.at": 1, "rewound": 1}
CHARGE = _charge()
"""Changes to `retry` when a lapsed claim, if there is one, is replaced or ended."""

COMMIT: dict[str, Any] = {
    "committed": "$handled.last",
    "resumeToken": "$handled.resumeToken",
    "positionAt": "$handled.positionAt",
    **dict.fromkeys(("claim", "handled", "retry"), REMOVED),
    "lastRun": {"last": "$handled.last", "took": "$handled.took", "claimed": "$claim.at", "at": "$$NOW"},
}
"""Fields that a commit sets from an execution's `handled`; also part of a take-over. `lastRun` is for people."""


@dataclass(frozen=True, slots=True)
class Claim:
    """
    The right of one execution to run a run.

    Attributes:
        fencing_token: the fencing token of this execution.
        retries: attempts of the first change that asked for a retry.
        crashes: attempts of the run that ended without an outcome.
        waits: how often in a row its first change has waited for MongoDB or the broker.
        doubts: how often in a row, at the end of these, in doubt: it may have been the handler's own doing.
        parked: hashes of the keys that were parked in its partition, from 0 to 2^64 - 1.
        inline: whether no commit task follows: its success is written as the position.
        at: when it was taken, by the server's clock. For metrics alone.
        passed_over: earlier changes of its document for which its first change stands: `count` and `tokens`.
        rewound: term of the last rewind that has sent the partition back with all others; 0 for none.
        taken: when it was answered for, on the monotonic clock.
    """

    partition_id: str
    owner: str
    first: int
    last: int
    fencing_token: int
    retries: int
    crashes: int
    waits: int = 0
    doubts: int = 0
    parked: frozenset[int] = frozenset()
    inline: bool = False
    at: datetime | None = None
    passed_over: Mapping[str, Any] | None = None
    rewound: int = 0
    taken: float = field(default_factory=time.monotonic, compare=False, repr=False)


def new_owner() -> str:
    """An owner for one execution: random, and with the process in front, for people."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"


def describe_owner(owner: str) -> str:
    """Return the process that holds a claim, in words."""
    pid = owner_pid(owner)
    return f"owner {owner}" if pid is None else f"process {pid} on {owner.rsplit(':', 2)[0]}"


def owner_pid(owner: str) -> str | None:
    """Return the id of the process that holds a claim. None where its owner names none."""
    _, pid, *rest = [*owner.rsplit(":", 2), ""]
    return pid if len(rest) > 1 and pid.isdecimal() else None


class Claims:
    """Claims and outcomes of one bridge's partitions. Thread-safe."""

    def __init__(
        self, collection: Collection[dict[str, Any]], dead_letters: Collection[dict[str, Any]], ttl: float
    ) -> None:
        self._table = Table(collection, call_timeout(ttl))
        self._dead_letters = dead_letters
        self._ttl = ttl
        self._next_token = next_number("fencingToken")

    def take(
        self,
        partition_id: str,
        *,
        owner: str,
        term: int,
        first: int,
        last: int,
        token: str,
        ttl: float | None = None,
        session: Binary | None = None,
        living: Sequence[str] = (),
        inline: bool = False,
    ) -> Claim | None:
        """
        Claim a run.

        Args:
            owner: of this execution alone, from `new_owner`.
            term: that of the message.
            token: comparable part of the first change's resume token.
            ttl: seconds. The bridge's `claim_ttl` by default.
            session: of the server, in which a transactional handler will write. See `end_transactions`.
            living: owners whose process is known to live: the lapse of a claim of theirs is charged to nobody.
            inline: whether no commit task follows the run, so that its success is the position.

        Returns:
            The claim, or None: the message is a duplicate, stale or early, and is dropped.
        """
        claim = {**self._claim(owner, ttl, session), "first": Int64(first), "last": Int64(last)}
        own: dict[str, Any] = {"$literal": token}
        gone, of = (_is_gone(token), own) if is_existing(token) else (_OF_NO_ROW, REMOVED)
        retry = {
            "count": {"$ifNull": ["$retry.count", 0]},
            **(_charge(living) if living else CHARGE),
            "notBefore": REMOVED,
            "of": of,
        }
        conditions = [_FREE, {"$or": [_DUE, gone]}, {"$lt": ["$resumeToken._data", own]}]
        document = self._table.find_and_update_unretried(
            {
                "_id": partition_id,
                "term": term,
                "committed": first - 1,
                "handled": None,
                "state": "flowing",
                "$expr": {"$and": conditions},
            },
            [
                {
                    "$set": {
                        "claim": {"$cond": [gone, REMOVED, "$claim"]},
                        "retry": {"$cond": [gone, REMOVED, "$retry"]},
                        "single": {"$cond": [gone, REMOVED, "$single"]},
                    }
                },
                {
                    "$set": {
                        "fencingToken": self._next_token,
                        "claim": {"$mergeObjects": [claim]},
                        "retry": retry,
                        "single": {"$cond": [_REPLACED, {"$max": ["$single", "$claim.last"]}, "$single"]},
                    }
                },
            ],
            _CLAIMED_FIELDS,
        )
        if document is None:
            return None
        counts, waiting = document["retry"], document["retry"].get("waiting") or {}
        return Claim(
            partition_id,
            owner,
            first,
            last,
            document["fencingToken"],
            counts["count"],
            counts["crashes"],
            waits=waiting.get("count", 0),
            doubts=waiting.get("timeOuts", 0),
            parked=collect_parked_hashes(document) if "parkedKeys" in document else frozenset(),
            inline=inline,
            at=document["claim"]["at"],
            passed_over=counts.get("passedOver"),
            rewound=document.get("rewound", 0),
        )

    def take_for_replay(
        self,
        partition_id: str,
        letter: str,
        *,
        owner: str,
        term: int,
        ttl: float | None = None,
        session: Binary | None = None,
    ) -> Claim | None:
        """
        Claim a partition for the replay of a dead letter, between two runs of it.

        No position is demanded, for none moves. Whoever replaces this claim charges nobody. A lapsed one of a run, if
        this replaces one, is charged as always. Arguments and answer as of `take`.

        Args:
            letter: its `_id`.
        """
        claim = {
            **self._claim(owner, ttl, session),
            "first": {"$add": ["$committed", Int64(1)]},
            "last": "$committed",
            "leaving": True,
            "replay": literal(letter),
        }
        change = {
            "fencingToken": next_number("fencingToken"),
            "claim": whole(claim),
            "retry": {"$cond": [_REPLACED, {"$mergeObjects": ["$retry", CHARGE]}, "$retry"]},
            "single": {"$cond": [_REPLACED, {"$max": ["$single", "$claim.last"]}, "$single"]},
        }
        guard = {
            "_id": partition_id,
            "term": term,
            "handled": None,
            "state": "flowing",
            "$expr": {"$lte": ["$claim.until", "$$NOW"]},
        }
        document = self._table.find_and_update_unretried(guard, [{"$set": change}], _REPLAY_FIELDS)
        if document is None:
            return None
        committed = document["committed"]
        return Claim(
            partition_id,
            owner,
            committed + 1,
            committed,
            document["fencingToken"],
            0,
            0,
            parked=collect_parked_hashes(document),
            rewound=document.get("rewound", 0),
        )

    def _claim(self, owner: str, ttl: float | None, session: Binary | None) -> dict[str, Any]:
        """Return what every new claim has."""
        length = millis(ttl or self._ttl)
        until = {"$add": ["$$NOW", length]}
        claim: dict[str, Any] = {"owner": {"$literal": owner}, "at": "$$NOW", "ttl": length, "until": until}
        return claim if session is None else {**claim, "session": session}

    def end_transactions(self, partition_ids: Sequence[str]) -> list[str]:
        """
        End what executions have left open whose claims of these partitions have lapsed. Of which there were such.

        That is the transaction of a transactional handler, or one that sets a change aside. Its process is dead, or
        frozen, and will be refused. Until then its documents, and the partition, are locked: else the server ends it
        after `transactionLifetimeLimitSeconds`. A transaction that is over is not touched by this.
        """
        lapsed = {"$lte": ["$claim.until", "$$NOW"]}
        chosen = {"_id": {"$in": list(partition_ids)}, "claim.session": {"$ne": None}, "handled": None}
        sessions = {
            found["_id"]: found["claim"]["session"]
            for found in self._table.find({**chosen, "$expr": lapsed}, {"claim.session": 1})
        }
        if not sessions:
            return []
        try:
            with self._table.limit():
                self._table.collection.database.command({"killSessions": [{"id": each} for each in sessions.values()]})
        except OperationFailure:
            return []  # then the server's own limit ends them
        return list(sessions)

    def relinquish(self, partition_id: str, owner: str) -> bool:
        """End a claim whose answer was lost or came too late. False when there is none. It counts as no attempt."""
        guard = {"_id": partition_id, "claim.owner": owner, "handled": None}
        return self._table.update(guard, {"$unset": {"claim": ""}})

    def withdraw(self, partition_id: str, owner: str) -> bool:
        """
        Take back the crash that was charged in the name of an owner whose process lives. Once, and never below 0.

        Returns:
            False when none is charged: nobody replaced its claim, it was withdrawn, or the change is done.
        """
        rest = {"$filter": {"input": "$retry.lapsed", "cond": {"$ne": ["$$this", literal(owner)]}}}
        crashes = {"$max": [{"$subtract": [{"$ifNull": ["$retry.crashes", 0]}, 1]}, 0]}
        retry = {"$mergeObjects": ["$retry", {"crashes": crashes, "lapsed": rest}]}
        return self._table.update({"_id": partition_id, "retry.lapsed": owner}, [{"$set": {"retry": retry}}])

    def extend(self, claims: Sequence[Claim], *, leaving: bool = False) -> list[Claim]:
        """
        The heartbeat of several claims, in one write. Another call only where one was refused.

        Args:
            claims: what to renew.
            leaving: whether their process was told to end: if they lapse from now on, nobody is charged.

        Returns:
            Those that are no longer ours.
        """
        change: dict[str, Any] = {"claim.until": {"$add": ["$$NOW", "$claim.ttl"]}}
        if leaving:
            change["claim.leaving"] = True
        matched = self._table.update_each_unretried([claim_filter(claim) for claim in claims], [{"$set": change}])
        if matched == len(claims):
            return []
        standing = self._table.find({"_id": {"$in": [claim.partition_id for claim in claims]}}, _OWN_FIELDS)
        mine = {
            (found["_id"], found["fencingToken"], (found.get("claim") or {}).get("owner")): found for found in standing
        }
        return [claim for claim in claims if not _is_held(claim, mine)]

    def is_mine(self, claim: Claim) -> bool:
        """Return True if the claim is still in force, by a majority read."""
        return self._table.find_one(claim_filter(claim), {"_id": 1}) is not None

    def handle(
        self,
        claim: Claim,
        last: int,
        token: Mapping[str, Any],
        session: ClientSession | None = None,
    ) -> bool:
        """
        Record that the handler succeeded up to `last`. From then on no message can start it again.

        Repeating it is harmless, and refused in a transaction. Outside of one it is written with w:1: losing it
        costs one more start, behind a crash that was none. Under a claim that is `inline` it is the position itself.

        Args:
            claim: under which the handler ran.
            last: number of the last change that is done, `token` its resume token.
            session: of a transactional handler.
        """
        if claim.inline:
            guard, change = _claim_or_done_filter(claim, last, token), _build_commit(claim, last, token)
        else:
            guard = claim_filter(claim)
            del guard["handled"]  # that of every write, or it is there already
            guard["$or"] = [{"handled": None}, {"handled.owner": claim.owner}]
            took = millis(time.monotonic() - claim.taken)
            handled = {"owner": claim.owner, "last": Int64(last), **position_fields(token), "took": took}
            change = {"$set": {"handled": handled}}
        if session is not None:  # the transaction's own limits hold, and its write concern
            # The effects of a body that is repeated behind its own commit would be there twice.
            return self._table.collection.update_one(claim_filter(claim), change, session=session).matched_count == 1
        return self._table.update_unretried(guard, change, ACKNOWLEDGED)

    def commit(self, partition_id: str, first: int | None = None, *, lasting: bool = True) -> bool:
        """
        The position becomes what `handled` says. `state` is untouched.

        Args:
            first: what the commit task demands to be next. The listener, which has just read the
                document, gives it too.
            lasting: whether to wait until a majority has it. Nothing rests on that.

        Returns:
            False when there was nothing to commit: it is already done, or a newer run is under way.
        """
        guard: dict[str, Any] = {"_id": partition_id, "handled": {"$ne": None}}
        if first is not None:
            guard["committed"] = first - 1
        return self._table.update_unretried(guard, [{"$set": COMMIT}], MAJORITY if lasting else ACKNOWLEDGED)

    def commit_all(self, heads: Mapping[str, int]) -> None:
        """Commit as `commit` does, several partitions by one command, each from the number that is to be next."""
        guards = [
            {"_id": partition_id, "handled": {"$ne": None}, "committed": first - 1}
            for partition_id, first in heads.items()
        ]
        self._table.update_each_unretried(guards, [{"$set": COMMIT}])

    def park(self, claim: Claim, *, delay: float | None, not_before: datetime | None, error: str) -> bool:
        """
        Set the first change aside until its retry time, by the server's clock, and count the attempt.

        Args:
            delay: seconds from now. Or
            not_before: a time.
        """
        due = after(delay) if delay is not None else literal(not_before)
        count = {"$add": ["$retry.count", 1]}
        retry = {"count": count, "notBefore": due, "error": literal(error), "waiting": REMOVED}
        return self._write(claim, [{"$set": {"claim": REMOVED, "retry": retry}}])

    def wait(self, claim: Claim, *, delay: float, cause: str, doubtful: bool) -> bool:
        """
        Set the first change aside because infrastructure was away, or may have been: no attempt, no crash is counted.

        Args:
            delay: seconds from now, by the server's clock.
            cause: what was away, for people.
            doubtful: the handler's own transaction may have done it to itself.
        """
        waiting = {
            "since": {"$ifNull": ["$retry.waiting.since", "$$NOW"]},
            "cause": literal(cause),
            "count": Int64(claim.waits + 1),
            "timeOuts": Int64(claim.doubts + 1 if doubtful else 0),
        }
        retry = {"notBefore": after(delay), "waiting": waiting}
        return self._write(claim, [{"$set": {"claim": REMOVED, "retry": retry}}])

    def crash(self, claim: Claim, error: str) -> bool:
        """End a claim whose execution is being killed: counted, and run change by change from now on."""
        retry = {"crashes": {"$add": ["$retry.crashes", 1]}, "error": literal(error), "waiting": REMOVED}
        single = {"$max": ["$single", Int64(claim.last)]}
        return self._write(claim, [{"$set": {"claim": REMOVED, "retry": retry, "single": single}}])

    def halt(self, claim: Claim, token: Mapping[str, Any], key: str, error: str) -> bool:
        """Stop the partition at the claim's first change, until an operator retries or skips it."""
        change = {
            "claim": REMOVED,
            "state": "halted",
            "halted": {"at": "$$NOW", "key": literal(key), "resumeToken": literal(dict(token))},
            "retry": {"error": literal(error), "waiting": REMOVED},
        }
        return self._write(claim, [{"$set": change}])

    def discard(self, claim: Claim, token: Mapping[str, Any]) -> bool:
        """Pass over the claim's first change: the execution writes the position itself, and nothing is kept."""
        return self._write(claim, _build_skip(claim, token))

    def set_aside(
        self, claim: Claim, token: Mapping[str, Any], dead_letter: Mapping[str, Any], *, parks: bool = False
    ) -> bool:
        """
        Pass over the claim's first change and store its dead letter, both or neither.

        The dead letter replaces one with the same `_id`, so that a rewound change can be set aside again. The fencing
        tokens behind the claim's own are left to its replays. One that waits for its key (`parked`) is refused where
        that is not parked any more. The claim names the session before, so that `end_transactions` frees the
        partition from a process that died inside.

        Args:
            parks: whether its key is parked by this.
        """

        def both(session: ClientSession) -> bool:
            guard, change = claim_filter(claim), _build_skip(claim, token)
            change["$set"]["fencingToken"] = Int64(claim.fencing_token + REPLAYS_MAX)
            if parks:
                key = dead_letter["key"][:_PARKED_CHARS]
                change["$addToSet"] = {"parkedKeys": {"key": key, "hash": dead_letter["parked"]}}
            elif dead_letter.get("parked") is not None:
                guard["parkedKeys.hash"] = dead_letter["parked"]
            if self._table.collection.update_one(guard, change, session=session).matched_count == 0:
                session.abort_transaction()
                return False
            store(self._dead_letters, dead_letter, session)
            return True

        with self._table.session() as session:
            named = record_session(self._table, claim, session)
            return named and session.with_transaction(both)

    def advance(
        self,
        claim: Claim,
        last: int,
        token: Mapping[str, Any],
        *,
        passed_over: Mapping[str, Any] | None = None,
        of: str | None = None,
        ends: bool = False,
        session: ClientSession | None = None,
    ) -> bool:
        """
        Move the position up to a change of the run that is done. The claim goes on with the next one as its first.

        Of that one nothing is counted yet. Outside of a transaction repeating it is harmless.

        Args:
            last: number of the change, `token` its resume token.
            passed_over: the changes for which the next one stands, as the claim has them.
            of: comparable part of the next one's token, where that is an existing document.
            ends: whether the whole run is done, so that the claim ends.
            session: of a transactional handler.
        """
        # Not in a transaction: the effects of a body that is repeated behind its own commit would be there twice.
        guard = claim_filter(claim)
        change: Any = _build_advance(last, token, of, passed_over)
        if ends:
            change = _build_commit(claim, last, token)
        if session is not None:
            return self._table.collection.update_one(guard, change, session=session).matched_count == 1
        if ends:
            return self._table.update(_claim_or_done_filter(claim, last, token), change)
        return self._table.update({**guard, "committed": {"$in": [claim.first - 1, last]}}, change)

    def single_out(self, claim: Claim) -> bool:
        """End a claim whose changes are to be run one by one from now on. Nothing is counted."""
        return self._write(claim, [{"$set": {"claim": REMOVED, "single": {"$max": ["$single", Int64(claim.last)]}}}])

    def _write(self, claim: Claim, change: Any) -> bool:
        return self._table.update(claim_filter(claim), change)


def record_session(partitions: Table, claim: Claim, session: ClientSession) -> bool:
    """
    Say in a claim in which session a transaction is to end it. See `Claims.end_transactions`.

    Returns:
        False where a newer execution decides.
    """
    return partitions.update(claim_filter(claim), {"$set": {"claim.session": session.session_id["id"]}})


def claim_filter(claim: Claim) -> dict[str, Any]:
    """The guard of every write of an execution."""
    return {
        "_id": claim.partition_id,
        "fencingToken": claim.fencing_token,
        "claim.owner": claim.owner,
        "committed": claim.first - 1,
        "handled": None,
    }


def collect_parked_hashes(document: Mapping[str, Any]) -> frozenset[int]:
    """Return the hashes of the keys that are parked in a partition, from 0 to 2^64 - 1."""
    return frozenset(to_unsigned(each["hash"]) for each in document.get("parkedKeys", ()))


def _claim_or_done_filter(claim: Claim, last: int, token: Mapping[str, Any]) -> dict[str, Any]:
    """
    The guard of a position that is written inline: that of every write, or it is there already.

    Nobody else can have moved it there under this token: every claim, and every command that moves one, raises it.
    """
    guard = claim_filter(claim)
    which = {"_id": guard.pop("_id"), "fencingToken": guard.pop("fencingToken")}
    return {**which, "$or": [guard, {"committed": last, "claim": None, "resumeToken._data": token["_data"]}]}


def _build_commit(claim: Claim, last: int, token: Mapping[str, Any]) -> dict[str, Any]:
    """Return the update of `COMMIT` with plain values: a pipeline would cost the server more."""
    took = millis(time.monotonic() - claim.taken)
    at = claim.at + timedelta(milliseconds=took) if claim.at is not None else None
    ran = {"last": Int64(last), "took": took, "claimed": claim.at, "at": at}
    return {
        "$set": {"committed": Int64(last), **position_fields(token), "lastRun": ran},
        "$unset": {"claim": "", "retry": ""},
    }


def _build_advance(
    last: int, token: Mapping[str, Any], of: str | None, passed_over: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Return the update to a position inside of a run. The claim then begins with the next change."""
    fresh: dict[str, Any] = {"count": 0, "crashes": 0, "lapsed": []}
    if of is not None:
        fresh["of"] = of
    if passed_over is not None:
        fresh["passedOver"] = dict(passed_over)
    change = {
        "committed": Int64(last),
        **{name: literal(value) for name, value in position_fields(token).items()},
        "retry": literal(fresh),
        "claim.first": Int64(last + 1),
        "claim.until": {"$add": ["$$NOW", "$claim.ttl"]},
    }
    return [{"$set": change}]


_REPLAY_FIELDS = {"fencingToken": 1, "committed": 1, "parkedKeys.hash": 1, "rewound": 1}
_OWN_FIELDS = {"fencingToken": 1, "claim.owner": 1, "committed": 1, "handled": 1}


def _is_held(claim: Claim, documents: Mapping[tuple[Any, ...], Mapping[str, Any]]) -> bool:
    """Return True if the partition of a claim is among these documents, and matches `claim_filter`."""
    found = documents.get((claim.partition_id, claim.fencing_token, claim.owner))
    return found is not None and found["committed"] == claim.first - 1 and "handled" not in found


def _build_skip(claim: Claim, token: Mapping[str, Any]) -> dict[str, Any]:
    return {"$set": {"committed": Int64(claim.first), **position_fields(token)}, "$unset": {"claim": "", "retry": ""}}


def position_fields(token: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a position: its token and, for people, the time of that."""
    time_ = time_of_token(token, None)
    at = {} if time_ is None else {"positionAt": time_.as_datetime()}
    return {"resumeToken": dict(token), **at}
