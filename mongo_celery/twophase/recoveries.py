"""
What recoveries have done, and when: what a person, a writer and a scrape go by who want to know whether anybody
recovers at all.

A recovery notes itself beside the transactions, in one document for each log and application. Nothing rests on it: a
recovery that may not write there recovers all the same.
"""

from __future__ import annotations

import logging
import math
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pymongo
from bson.int64 import Int64
from pymongo import WriteConcern
from pymongo.collection import Collection
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern

from mongo_celery.command_line import ANY_APP
from mongo_celery.mongo.expressions import literal
from mongo_celery.mongo.opening import ANSWER_SECONDS
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.verdicts import Verdict, brief, judge_error
from mongo_celery.periodic import PeriodicWatch

logger = logging.getLogger("mongo_celery.twophase")

COLLECTION = "transactionRecoveries"
GOING_ON_SECONDS = 30.0
"""A recovery that lasts says so at such intervals."""

OUTCOMES = ("done", "canceled", "overdue")
"""What recovery brings a transaction to; `overdue` is one that is canceled since its deadline has passed."""

_PATIENCE_SECONDS = 180.0
_PERIODS = 3
_UNKNOWN_PERIOD_SECONDS = 900.0


def patience(every: float | None) -> float:
    """
    For how many seconds nobody need have recovered, before it is said that nobody does.

    Args:
        every: seconds between two recoveries by this app; None where others see to it, nobody knows how often.
    """
    return _UNKNOWN_PERIOD_SECONDS if every is None else max(_PATIENCE_SECONDS, _PERIODS * every)


@dataclass(frozen=True, slots=True)
class Recovery:
    """
    What became of one abandoned transaction.

    Attributes:
        id: its `_id`.
        before: its state when it was found.
        after: its state now; the same if it got no further.
        error: why not, in words; None if it is done, or canceled as it should be.
        overdue: whether it was canceled since its deadline had passed.
        stopped: whether it stays as it is until a person has put something right.
    """

    id: Any
    before: str
    after: str
    error: str | None = None
    overdue: bool = False
    stopped: bool = False

    @property
    def outcome(self) -> str | None:
        """One of `OUTCOMES`; None if it was not finished."""
        if self.error is not None:
            return None
        return "overdue" if self.overdue else self.after


@dataclass(frozen=True, slots=True)
class LastRecovery:
    """
    The last recovery that somebody has noted, and the sums of all.

    Attributes:
        seconds: how long ago it ended, by the server's clock.
        process: host and pid of the process.
        stopped: how many transactions it found that stay as they are until a person has put something right.
        silent: clusters that did not answer it.
        sign_seconds: since one has ended, begun or gone on.
        outcomes: how many transactions recoveries have finished so far, by `OUTCOMES`.
    """

    seconds: float
    process: str
    stopped: int
    silent: tuple[str, ...]
    sign_seconds: float
    outcomes: Mapping[str, int]


class RecoveryRecords:
    """
    The notes on one log and application.

    Args:
        transactions: the log's collection; the notes are beside it.
        application: whose transactions are recovered.
    """

    def __init__(self, transactions: Collection[Any], application: str) -> None:
        # None of this need outlast an election: the next recovery notes itself, too.
        self._collection = transactions.database[COLLECTION].with_options(
            codec_options=transactions.codec_options,
            write_concern=WriteConcern(1),
            read_concern=ReadConcern("local"),
            read_preference=transactions.read_preference,
        )
        self._id = f"{transactions.name}/{application}"
        self._is_refused = False

    @property
    def full_name(self) -> str:
        """The namespace of the notes on all logs of a database."""
        return self._collection.full_name

    def note(self, report: Sequence[Recovery], silent: Sequence[str]) -> None:
        """Note a recovery that has ended, and what became of what it found. It never fails."""
        counts = Counter(each.outcome for each in report)
        note: dict[str, Any] = {
            "at": "$$NOW",
            "goingOn": "$$REMOVE",
            "process": literal(f"{socket.gethostname()}:{os.getpid()}"),
            "stopped": sum(each.stopped for each in report),
            "silent": literal(sorted(silent)),
            **{name: {"$add": [{"$ifNull": [f"${name}", Int64(0)]}, counts[name]]} for name in OUTCOMES},
        }
        self._write(note)

    def note_going_on(self) -> None:
        """Note that there is a recovery, which has not ended. It never fails."""
        self._write({"goingOn": "$$NOW"})

    def _write(self, note: Mapping[str, Any]) -> None:
        try:
            with pymongo.timeout(ANSWER_SECONDS):
                self._collection.update_one({"_id": self._id}, [{"$set": note}], upsert=True)
        except PyMongoError as error:
            if judge_error(error) is not Verdict.ACCESS or self._is_refused:
                logger.debug("a recovery of transactions is not noted: %s", short(error))
                return
            self._is_refused = True
            logger.warning(
                "recoveries of transactions may not note themselves in %s (%s), so processes that begin some will say "
                "that nobody recovers them; grant find, insert and update there",
                self.full_name,
                brief(error),
                extra={"event": "recovery_unnoted"},
            )

    def last(self) -> LastRecovery | None:
        """
        The last recovery that has ended, or the first one, which has not; None where there is no note of one.

        Raises:
            PyMongoError: MongoDB did not answer, or refused it.
        """
        ages = {"seconds": _age({"$ifNull": ["$at", "$goingOn"]}), "sign": _age({"$max": ["$at", "$goingOn"]})}
        pipeline: list[dict[str, Any]] = [{"$match": {"_id": self._id}}, {"$set": ages}]
        with pymongo.timeout(ANSWER_SECONDS):
            found = next(iter(self._collection.aggregate(pipeline)), None)
        if found is None:
            return None
        return LastRecovery(
            seconds=_seconds(found["seconds"]),
            process=str(found.get("process", "?")),
            stopped=int(found.get("stopped", 0)),
            silent=tuple(map(str, found.get("silent", ()))),
            sign_seconds=_seconds(found["sign"]),
            outcomes={name: int(found.get(name, 0)) for name in OUTCOMES},
        )


def recovery_watch(name: str, records: Callable[[], RecoveryRecords], patience: float) -> PeriodicWatch:
    """
    What a process that begins transactions looks by, whether somebody recovers them.

    Args:
        name: what logs call the `TwoPhaseCommit`.
        records: gives the notes of recoveries.
        patience: seconds without a sign of one after which it is said that nobody does.
    """

    def age() -> float | None:
        last = records().last()
        return None if last is None else last.sign_seconds

    def tell(since: str) -> None:
        logger.error(
            "transactions %s: no recovery has noted itself %s, so what a crash or an outage leaves may stay half done; "
            "run `%s`, or the listener of a bridge, and a worker that import them, or `%s`. "
            "If one runs, grant it find, insert and update on %s",
            name, since, ANY_APP.celery("beat"), ANY_APP.celery("transactions", "recover"), records().full_name,
            extra={"event": "nobody_recovers"},
        )  # fmt: skip

    return PeriodicWatch("mongo-celery-recovery-watch", age, tell, patience)


def _age(moment: Any) -> dict[str, Any]:
    """Milliseconds since then, by the server's clock; null where there is none."""
    return {"$subtract": ["$$NOW", moment]}


def _seconds(age: Any) -> float:
    return math.inf if age is None else max(float(age) / 1000, 0.0)
