"""
The writes of an execution on its partition: the claim, and the outcomes.

The partition's document decides which execution may run what::

                    claim (fencingToken + 1)                    commit
    waiting ----------------------------> claimed --handled--> handled ------> waiting (committed + n)
       ^                                   |  |  |
       |<--- the position, inline (7) -----+  |  |
       |<--- retry (parked until notBefore)+  |  +--- halt ---> halted (until an operator acts)
       |<--- wait (the same, not counted) -+  |
       |<--- claim lapses: crash + 1 (*) -----+--- dead letter or discard --> waiting (committed + 1)

1. Every execution (first delivery, redelivery, retry) claims anew and gets a strictly larger fencing token. With the
   term alone as token, a redelivered change would run twice under one number, and the second run could write after its
   successor.
2. A claim matches `term` exactly: with "at least", a forged or foreign one could block it.
3. Every later write matches fencing token, owner and `committed`. A refusal is final: a retry after another read would
   defeat the fencing token by waiting.
4. A commit takes its values from `handled`, which was fenced when written. So any process may commit, and the commit
   message has no authority.
5. (*) The process that replaces a lapsed claim counts a crash for its owner, in `retry.lapsed`. It does not count one
   for a process that is known to live, because that process itself replaces the claim. If an owner asks and so proves
   to be alive, its crash is withdrawn, once. A process that was asked to leave marks its claim first, and the lapse is
   not counted. After any lapse, counted or not, runs have one change each.
6. An existing document has its own counts (`retry.row`, its token). If it was not stored when its term ended, it comes
   again elsewhere, after other changes, and its counts begin anew.
7. `parkedKeys` names the keys whose changes wait for a person, by `hash` and, for people, by the `key` of the parked
   change. Only the outcome of a claim adds to it. So the parked keys that a claim has read stay parked or are released
   until the claim ends. A change of a parked key is moved to the dead letters without a start, whichever message
   contains it (`replays` describes the release of a key).
8. If no commit task follows a run, or its position has moved since the claim (9), its execution writes the position
   itself. This is one write under its own guard (3): no `handled`, and nothing between success and position.
9. During a run its execution may advance the position past finished changes (`advance`), under its own guard (3), by
   majority. The claim continues with the next change as its first, without counts. It must do this before a later
   change has an outcome, because every outcome belongs to the claim's first change.
10. The writes after a success, `handled` and then the position, use w:1. Readers of positions read a majority's data,
    and later writes, first the next claim, are majority writes and preserve it. So if a failover rolls one back, this
    costs at most one more start. No process renews the restored claim: it lapses like that of a dead process, and
    no process withdraws the crash.
11. Under a limit of its handler, a claim matches the fencing token that its message contains. So one claim ends all
    earlier messages of its partition. If a message or a lapsed claim is needed no more, `void` ends it.

| failure | what happens |
|---|---|
| the answer of a claim is lost | ended by owner, best effort, and claimed again; no crash is counted |
| the answer of an outcome is lost | written again. If that is refused, `find_end` tells why until the next claim |
| a heartbeat is late | the claim lapses; without a newer claim it may finish, else the crash is withdrawn |
| the worker is asked to shut down, and killed later | the claim lapses; no crash is counted |
| `handled`, or the position, is lost in a rollback (w:1) | it runs once more, as after a worker's death |
| the worker dies | the claim lapses; the next claim counts a crash and runs change by change |
| the worker dies in a transaction of its claim | the claim names the session, so its locks are freed when it lapses |
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from bson.binary import Binary
from bson.int64 import Int64
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import OperationFailure

from mongo_celery.bridge.existing import is_existing
from mongo_celery.bridge.state.dead_letters import REPLAYS_MAX, store
from mongo_celery.bridge.state.state_collection import to_unsigned
from mongo_celery.mongo.expressions import REMOVED, after, literal, millis, next_number, whole
from mongo_celery.mongo.opening import renew_connections
from mongo_celery.mongo.oplog import time_of_token
from mongo_celery.mongo.steps import Session, Steps, see_collection
from mongo_celery.mongo.table import ACKNOWLEDGED, MAJORITY, Table, Update, call_timeout

PARKED_MAX = 1000
"""Limit of parked keys in one partition, because each of its claims reads them all."""

LAPSED_MAX = 16
"""Limit of owners whose crashes can be withdrawn."""

_PARKED_CHARS = 200
_REPLACED: dict[str, Any] = {"$gt": ["$claim", None]}
_CHARGED: dict[str, Any] = {"$and": [_REPLACED, {"$ne": ["$claim.leaving", True]}]}


def _charge(living: Sequence[str] = ()) -> dict[str, Any]:
    lives = {"$in": ["$claim.owner", {"$literal": [*living]}]}
    charged = {"$and": [_CHARGED, {"$not": [lives]}]} if living else _CHARGED
    owners = {"$concatArrays": [{"$ifNull": ["$retry.lapsed", []]}, {"$cond": [charged, ["$claim.owner"], []]}]}
    return {
        "crashes": {"$add": [{"$ifNull": ["$retry.crashes", 0]}, {"$cond": [charged, 1, 0]}]},
        "lapsed": {"$slice": [owners, -LAPSED_MAX]},
    }


def _is_gone(token: str | None) -> dict[str, Any]:
    """
    Return an expression: the counts belong to a snapshot row, and a run with this token begins with
    another change.
    """
    return {"$and": [{"$gt": ["$retry.row", None]}, {"$ne": ["$retry.row", {"$literal": token}]}]}


_FREE: dict[str, Any] = {"$lte": ["$claim.until", "$$NOW"]}
_DUE: dict[str, Any] = {"$lte": ["$retry.notBefore", "$$NOW"]}
_OF_NO_ROW = _is_gone(None)
_CLAIMED_FIELDS = {"fencingToken": 1, "retry": 1, "parkedKeys.hash": 1, "claim.at": 1, "rewound": 1}
CHARGE = _charge()
"""Changes to `retry` when a lapsed claim is replaced or ended."""

_SUCCESSION: dict[str, Any] = {
    "fencingToken": next_number("fencingToken"),
    "retry": {"$cond": [_REPLACED, {"$mergeObjects": ["$retry", CHARGE]}, "$retry"]},
    "oneByOneUntil": {"$cond": [_REPLACED, {"$max": ["$oneByOneUntil", "$claim.last"]}, "$oneByOneUntil"]},
}
"""Changes with which a lapsed claim ends, if there is one, for anything but the next run."""

COMMIT: dict[str, Any] = {
    "committed": "$handled.last",
    "resumeToken": "$handled.resumeToken",
    "positionAt": "$handled.positionAt",
    **dict.fromkeys(("claim", "handled", "retry"), REMOVED),
    "lastRun": {"last": "$handled.last", "took": "$handled.took", "claimed": "$claim.at", "at": "$$NOW"},
}
"""Fields that a commit sets from an execution's `handled`. A take-over also uses them. `lastRun` is for people."""


@dataclass(frozen=True, slots=True)
class Claim:
    """
    The right of one execution to execute a run.

    Attributes:
        fencing_token: the fencing token of this execution.
        retries: attempts of the first change that requested a retry.
        crashes: attempts of the run that ended without an outcome.
        waits: number of consecutive waits of its first change for MongoDB or the broker.
        doubts: number of the latest consecutive waits that were doubtful: the handler may have caused them.
        parked: hashes of its partition's parked keys, from 0 to 2^64 - 1.
        at: time of the claim, by the server's clock. Only for metrics.
        error: the last recorded failure of its first change, or the reason why a process ended under it.
        passed_over: earlier changes of the same document that the first change replaces: `count` and `tokens`.
        rewound: term of the last rewind that moved the partition back with all others. 0 for none.
        taken: time of the answer, on the monotonic clock.
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
    at: datetime | None = None
    error: str | None = None
    passed_over: Mapping[str, Any] | None = field(default=None, hash=False)
    rewound: int = 0
    taken: float = field(default_factory=time.monotonic, compare=False, repr=False)


def new_owner() -> str:
    """Return a random owner id for one execution. It begins with the process, so that people can read it."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"


def name_place(partition_id: str) -> str:
    """Return the handler and the index of a partition in the form of status and commands: `summarise/13`."""
    return "/".join(partition_id.split("/")[1::2])


def describe_owner(owner: str) -> str:
    """Describe the process that holds a claim."""
    pid = owner_pid(owner)
    return f"owner {owner}" if pid is None else f"process {pid} on {owner.rsplit(':', 2)[0]}"


def owner_pid(owner: str) -> str | None:
    """Return the process id of a claim's owner. None if the owner names none."""
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
        expected: int | None = None,
    ) -> Claim | None:
        """
        Claim a run.

        Args:
            owner: unique to this execution, from `new_owner`.
            term: the term in the message.
            token: comparable part of the first change's resume token.
            ttl: seconds. The bridge's `claim_ttl` by default.
            session: the server session in which a transactional handler will write. See `end_transactions`.
            living: owners whose processes are known to live, so the lapse of their claims is not counted.
            expected: the partition's fencing token in the message. None to accept any.

        Returns:
            The claim, or None for a message that is a duplicate, stale or early, and is dropped.
        """
        claim = {**self._claim(owner, ttl, session), "first": Int64(first), "last": Int64(last)}
        own: dict[str, Any] = {"$literal": token}
        gone, row = (_is_gone(token), own) if is_existing(token) else (_OF_NO_ROW, REMOVED)
        retry = {
            "count": {"$ifNull": ["$retry.count", 0]},
            **(_charge(living) if living else CHARGE),
            "notBefore": REMOVED,
            "row": row,
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
                **_match_token(expected),
            },
            [
                {
                    "$set": {
                        "claim": {"$cond": [gone, REMOVED, "$claim"]},
                        "retry": {"$cond": [gone, REMOVED, "$retry"]},
                        "oneByOneUntil": {"$cond": [gone, REMOVED, "$oneByOneUntil"]},
                    }
                },
                {
                    "$set": {
                        "fencingToken": self._next_token,
                        "claim": {"$mergeObjects": [claim]},
                        "retry": retry,
                        "oneByOneUntil": {
                            "$cond": [_REPLACED, {"$max": ["$oneByOneUntil", "$claim.last"]}, "$oneByOneUntil"]
                        },
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
            doubts=waiting.get("doubts", 0),
            parked=collect_parked_hashes(document) if "parkedKeys" in document else frozenset(),
            at=document["claim"]["at"],
            error=counts.get("error"),
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
        expected: int | None = None,
    ) -> Claim | None:
        """
        Claim a partition to replay a dead letter between two of its runs.

        No position is required, because none moves. The lapse of this claim is not counted. If it replaces a lapsed
        claim of a run, that lapse is counted as usual. Arguments and answer as in `take`.

        Args:
            letter: `_id` of the dead letter.
        """
        claim = {
            **self._claim(owner, ttl, session),
            "first": {"$add": ["$committed", Int64(1)]},
            "last": "$committed",
            "leaving": True,
            "replay": literal(letter),
        }
        change = {**_SUCCESSION, "claim": whole(claim)}
        guard = {
            "_id": partition_id,
            "term": term,
            "handled": None,
            "state": "flowing",
            "$expr": _FREE,
            **_match_token(expected),
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

    def void(self, term: int, tokens: Mapping[str, int]) -> None:
        """
        End what may still claim or continue under some fencing tokens: unclaimed messages, and lapsed claims.

        The lapse of a claim is counted as if another one had replaced it. A live claim does not change.

        Args:
            term: the listener's term.
            tokens: the fencing tokens by partition.
        """
        guards = [
            {"_id": id_, "term": term, "fencingToken": token, "handled": None, "$expr": _FREE}
            for id_, token in tokens.items()
        ]
        self._table.update_each_unretried(guards, [{"$set": {**_SUCCESSION, "claim": REMOVED}}])

    def _claim(self, owner: str, ttl: float | None, session: Binary | None) -> dict[str, Any]:
        """Return the fields of every new claim."""
        length = millis(ttl or self._ttl)
        until = {"$add": ["$$NOW", length]}
        claim: dict[str, Any] = {"owner": {"$literal": owner}, "at": "$$NOW", "ttl": length, "until": until}
        return claim if session is None else {**claim, "session": session}

    def end_transactions(self, partition_ids: Sequence[str]) -> list[str]:
        """
        End transactions of executions with lapsed claims of these partitions. Return the affected partitions.

        These are transactions of transactional handlers, or ones that move a change to the dead letters. The process is
        dead, or frozen and will be refused. Until then its documents and the partition are locked, up to the server's
        `transactionLifetimeLimitSeconds`. A finished transaction is not affected.
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
            return []  # the server's own limit ends them
        return list(sessions)

    def relinquish(self, partition_id: str, owner: str) -> bool:
        """End a claim whose answer was lost or too late, without counting an attempt. Return False if there is none."""
        guard = {"_id": partition_id, "claim.owner": owner, "handled": None}
        return self._table.update(guard, {"$unset": {"claim": ""}})

    def withdraw(self, partition_id: str, owner: str) -> bool:
        """
        Withdraw the crash that was counted for an owner whose process lives. The count never falls below 0.

        Returns:
            False if none is counted: its claim was not replaced, the crash was withdrawn, or the change is done.
        """
        rest = {"$filter": {"input": "$retry.lapsed", "cond": {"$ne": ["$$this", literal(owner)]}}}
        crashes = {"$max": [{"$subtract": [{"$ifNull": ["$retry.crashes", 0]}, 1]}, 0]}
        retry = {"$mergeObjects": ["$retry", {"crashes": crashes, "lapsed": rest}]}
        return self._table.update({"_id": partition_id, "retry.lapsed": owner}, [{"$set": {"retry": retry}}])

    def extend(self, claims: Sequence[Claim], *, leaving: bool = False) -> list[Claim]:
        """
        Renew several claims with one write. A second call is needed only if one claim was refused.

        Args:
            claims: the claims to renew.
            leaving: True if their process was asked to end. Then a later lapse is not counted.

        Returns:
            The claims that are no longer ours.
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
        """Return True if the claim is still valid. This is a majority read."""
        return self._table.find_one(claim_filter(claim), {"_id": 1}) is not None

    def renew_connections(self, error: BaseException) -> None:
        """Replace the connections if the error of a write means that one of them is unusable. See `opening`."""
        renew_connections(self._table.collection.database.client, error)

    def find_end(self, claim: Claim) -> Literal["stored", "held", "replaced"]:
        """
        Return the reason why the outcome of an execution was refused. Call it before anything else ends the claim.

        Returns:
            `stored`: the outcome, or the commit of the handler's transaction, was stored before, and its answer was
            lost. Only this execution ends its claim without another fencing token. `held`: the claim is still valid, so
            another condition of the outcome failed. `replaced`: a newer execution or a command has replaced the claim.
        """
        found = self._table.find_one({"_id": claim.partition_id}, {"fencingToken": 1, "claim.owner": 1}) or {}
        token, holder = found.get("fencingToken"), found.get("claim")
        if holder is None:
            is_own = token in (claim.fencing_token, claim.fencing_token + REPLAYS_MAX)  # see `set_aside`
            return "stored" if is_own else "replaced"
        return "held" if (token, holder.get("owner")) == (claim.fencing_token, claim.owner) else "replaced"

    def handle(self, claim: Claim, last: int, token: Mapping[str, Any]) -> bool:
        """
        Record that the handler succeeded up to `last`. From then on no message can start it again.

        Repeating it is harmless. It uses w:1: if it is lost, the changes start once more, after a crash that did not
        happen.

        Args:
            claim: the claim under which the handler ran.
            last: number of the last finished change. `token` is its resume token.
        """
        guard = claim_filter(claim)
        del guard["handled"]  # the guard of other writes, or it exists already
        guard["$or"] = [{"handled": None}, {"handled.owner": claim.owner}]
        return self._table.update_unretried(guard, build_handled(claim, last, token), ACKNOWLEDGED)

    def finish(self, claim: Claim, last: int, token: Mapping[str, Any]) -> bool:
        """
        Write the position and end the claim, without a commit task. Arguments and promises as in `handle`.

        No other process can have moved the position there under this token: claims and commands that move it raise the
        token.
        """
        guard = claim_filter(claim)
        which = {"_id": guard.pop("_id"), "fencingToken": guard.pop("fencingToken")}
        is_there = {"committed": last, "claim": None, "resumeToken._data": token["_data"]}
        change = build_finished(claim, last, token)
        return self._table.update_unretried({**which, "$or": [guard, is_there]}, change, ACKNOWLEDGED)

    def write_inside(self, session: Session, claim: Claim, change: Update) -> Steps[bool]:
        """
        Record a success in the open transaction of a handler, as steps. The transaction's own limits and concerns
        apply.

        A repetition is refused: if a body repeated after its own commit, its effects would exist twice.

        Args:
            session: the handler's session.
            claim: the claim under which the handler ran.
            change: `build_handled`, `build_finished` or `build_advance`.
        """
        partitions = see_collection(self._table.collection, session)
        done = yield partitions.update_one(claim_filter(claim), change, session=session)
        return bool(done.matched_count == 1)

    def commit(self, partition_id: str, first: int | None = None, *, lasting: bool = True) -> bool:
        """
        Make the `handled` change the new position. `state` does not change.

        Args:
            first: the number that must be next, according to the commit task or to the document that the listener has
                just read.
            lasting: True to wait for a majority, which is never needed for correctness.

        Returns:
            False if there was nothing to commit: it is already done, or a newer run is in progress.
        """
        guard: dict[str, Any] = {"_id": partition_id, "handled": {"$ne": None}}
        if first is not None:
            guard["committed"] = first - 1
        return self._table.update_unretried(guard, [{"$set": COMMIT}], MAJORITY if lasting else ACKNOWLEDGED)

    def commit_all(self, heads: Mapping[str, int]) -> None:
        """Commit several partitions with one command, like `commit`, each from the number that must be next."""
        guards = [
            {"_id": partition_id, "handled": {"$ne": None}, "committed": first - 1}
            for partition_id, first in heads.items()
        ]
        self._table.update_each_unretried(guards, [{"$set": COMMIT}])

    def park(self, claim: Claim, *, delay: float | None, not_before: datetime | None, error: str) -> bool:
        """
        Park the first change until its retry time, by the server's clock, and count the attempt.

        Args:
            delay: seconds from now, or
            not_before: a time.
        """
        due = after(delay) if delay is not None else literal(not_before)
        count = {"$add": ["$retry.count", 1]}
        retry = {"count": count, "notBefore": due, "error": literal(error), "waiting": REMOVED}
        return self._write(claim, [{"$set": {"claim": REMOVED, "retry": retry}}])

    def wait(self, claim: Claim, *, delay: float, cause: str, doubtful: bool) -> bool:
        """
        Let the first change wait, because MongoDB, the broker or a service was probably unavailable.

        No attempt or crash is counted.

        Args:
            delay: seconds from now, by the server's clock.
            cause: the unavailable server, for people.
            doubtful: True if the handler's own transaction may be the cause.
        """
        waiting = {
            "since": {"$ifNull": ["$retry.waiting.since", "$$NOW"]},
            "cause": literal(cause),
            "count": Int64(claim.waits + 1),
            "doubts": Int64(claim.doubts + 1 if doubtful else 0),
        }
        retry = {"notBefore": after(delay), "waiting": waiting}
        return self._write(claim, [{"$set": {"claim": REMOVED, "retry": retry}}])

    def crash(self, claim: Claim, error: str) -> bool:
        """End a claim whose execution is being killed. The crash is counted, and later runs have one change each."""
        retry = {"crashes": {"$add": ["$retry.crashes", 1]}, "error": literal(error), "waiting": REMOVED}
        single = {"$max": ["$oneByOneUntil", Int64(claim.last)]}
        return self._write(claim, [{"$set": {"claim": REMOVED, "retry": retry, "oneByOneUntil": single}}])

    def halt(self, claim: Claim, token: Mapping[str, Any], key: str, error: str, traceback: str = "") -> bool:
        """Stop the partition at the claim's first change, until an operator retries or skips it."""
        halted = {"at": "$$NOW", "key": literal(key), "resumeToken": literal(dict(token))}
        change = {
            "claim": REMOVED,
            "state": "halted",
            "halted": {**halted, "traceback": literal(traceback)} if traceback else halted,
            "retry": {"error": literal(error), "waiting": REMOVED},
        }
        return self._write(claim, [{"$set": change}])

    def discard(self, claim: Claim, token: Mapping[str, Any]) -> bool:
        """Skip the claim's first change without storing it. The execution itself writes the position."""
        return self._write(claim, _build_skip(claim, token))

    def set_aside(
        self, claim: Claim, token: Mapping[str, Any], dead_letter: Mapping[str, Any], *, parks: bool = False
    ) -> bool:
        """
        Skip the claim's first change and store its dead letter, both or neither.

        The dead letter replaces one with the same `_id`, so a rewound change can become one again. Its replays use the
        fencing tokens after the claim's own. If it waits for its key (`parked`), it is refused if the key is no longer
        parked. The claim names the session first, so `end_transactions` frees the partition if the process dies inside.

        Args:
            parks: True to park the key of the change.
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
        row: str | None = None,
    ) -> bool:
        """
        Advance the position to a finished change of the run. The claim continues with the next one as its first.

        The next change has no counts yet. Repeating it is harmless.

        Args:
            last: number of the change. `token` is its resume token.
            passed_over: the changes that the next one replaces, in the claim's form.
            row: comparable part of the next one's token, if it is a snapshot row.
        """
        guard, change = claim_filter(claim), build_advance(last, token, row, passed_over)
        return self._table.update({**guard, "committed": {"$in": [claim.first - 1, last]}}, change)

    def single_out(self, claim: Claim) -> bool:
        """End a claim whose changes must run one by one from now on. Nothing is counted."""
        return self._write(
            claim, [{"$set": {"claim": REMOVED, "oneByOneUntil": {"$max": ["$oneByOneUntil", Int64(claim.last)]}}}]
        )

    def _write(self, claim: Claim, change: Any) -> bool:
        return self._table.update(claim_filter(claim), change)


def record_session(partitions: Table, claim: Claim, session: ClientSession) -> bool:
    """
    Record in a claim the session of the transaction that will end it. See `Claims.end_transactions`.

    Returns:
        False if a newer execution decides.
    """
    return partitions.update(claim_filter(claim), {"$set": {"claim.session": session.session_id["id"]}})


def claim_filter(claim: Claim) -> dict[str, Any]:
    """Return the guard of every write of an execution."""
    return {
        "_id": claim.partition_id,
        "fencingToken": claim.fencing_token,
        "claim.owner": claim.owner,
        "committed": claim.first - 1,
        "handled": None,
    }


def collect_parked_hashes(document: Mapping[str, Any]) -> frozenset[int]:
    """Return the hashes of a partition's parked keys, from 0 to 2^64 - 1."""
    return frozenset(to_unsigned(each["hash"]) for each in document.get("parkedKeys", ()))


def _match_token(expected: int | None) -> dict[str, Any]:
    return {} if expected is None else {"fencingToken": expected}


def build_handled(claim: Claim, last: int, token: Mapping[str, Any]) -> dict[str, Any]:
    """Return the update of `Claims.handle`."""
    took = millis(time.monotonic() - claim.taken)
    handled = {"owner": claim.owner, "last": Int64(last), **position_fields(token), "took": took}
    return {"$set": {"handled": handled}}


def build_finished(claim: Claim, last: int, token: Mapping[str, Any]) -> dict[str, Any]:
    """Return the update of `Claims.finish`, with plain values: a pipeline like `COMMIT` would cost the server more."""
    took = millis(time.monotonic() - claim.taken)
    at = claim.at + timedelta(milliseconds=took) if claim.at is not None else None
    ran = {"last": Int64(last), "took": took, "claimed": claim.at, "at": at}
    return {
        "$set": {"committed": Int64(last), **position_fields(token), "lastRun": ran},
        "$unset": {"claim": "", "retry": ""},
    }


def build_advance(
    last: int, token: Mapping[str, Any], row: str | None, passed_over: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return the update to a position inside a run. The claim then begins with the next change."""
    fresh: dict[str, Any] = {"count": 0, "crashes": 0, "lapsed": []}
    if row is not None:
        fresh["row"] = row
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
    """Return True if these documents include the claim's partition and it matches `claim_filter`."""
    found = documents.get((claim.partition_id, claim.fencing_token, claim.owner))
    return found is not None and found["committed"] == claim.first - 1 and "handled" not in found


def _build_skip(claim: Claim, token: Mapping[str, Any]) -> dict[str, Any]:
    return {"$set": {"committed": Int64(claim.first), **position_fields(token)}, "$unset": {"claim": "", "retry": ""}}


def position_fields(token: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a position: its token and, for people, the token's time."""
    time_ = time_of_token(token, None)
    at = {} if time_ is None else {"positionAt": time_.as_datetime()}
    return {"resumeToken": dict(token), **at}
