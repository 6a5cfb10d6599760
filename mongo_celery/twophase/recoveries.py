"""
Notes of recoveries: the time of the last one, and outcomes, for metrics and for processes that begin transactions.

A recovery stores its note beside the transactions, one document for each log and application. Nothing depends on the
note: a recovery without the right to write it still works.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bson.int64 import Int64
from pymongo.collection import Collection
from pymongo.errors import PyMongoError

from mongo_celery.command_line import ANY_APP
from mongo_celery.mongo.expressions import literal
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.verdicts import Verdict, brief, judge_error
from mongo_celery.periodic import PeriodicNotes, PeriodicWatch

logger = logging.getLogger("mongo_celery.twophase")

COLLECTION = "transactionRecoveries"
_RUNNING_SECONDS = 30.0
"""Interval at which a long recovery updates its note."""

OUTCOMES = ("done", "canceled")
"""The final states of recovered transactions."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """
    The recovery of one abandoned transaction.

    Attributes:
        id: `_id` of the transaction.
        before: state when it was found.
        after: state now, which is the same if it did not advance.
        error: reason why it did not advance. None if it is done, or canceled as planned.
        stopped: True if it waits for a person.
    """

    id: Any
    before: str
    after: str
    error: str | None = None
    stopped: bool = False

    @property
    def outcome(self) -> str | None:
        """One of `OUTCOMES`, or None if it is unfinished."""
        return None if self.error is not None else self.after


@dataclass(frozen=True, slots=True)
class LastRecovery:
    """
    The last noted recovery, and the totals of all.

    Attributes:
        seconds: time since its last note, by the server's clock. A long recovery updates its note.
        stopped: number of transactions that wait for a person.
        silent: clusters that did not answer it.
        outcomes: number of transactions finished by recoveries so far, by `OUTCOMES`.
    """

    seconds: float
    stopped: int
    silent: tuple[str, ...]
    outcomes: Mapping[str, int]


class RecoveryRecords(PeriodicNotes):
    """
    The recovery notes of one log and application.

    Args:
        transactions: the log's collection, beside which the notes are stored.
        application: the owner of the recovered transactions.
    """

    def __init__(self, transactions: Collection[Any], application: str) -> None:
        beside = transactions.database[COLLECTION].with_options(
            codec_options=transactions.codec_options, read_preference=transactions.read_preference
        )
        super().__init__(beside, f"{transactions.name}/{application}")
        self._is_refused = False
        self._next_at = -math.inf

    def note(self, report: Sequence[Recovery], silent: Sequence[str]) -> None:
        """Note a finished recovery and its outcomes. It never fails."""
        self._next_at = -math.inf
        counts = Counter(each.outcome for each in report)
        self._note(
            stopped=sum(each.stopped for each in report),
            silent=literal(list(silent)),
            **{name: {"$add": [{"$ifNull": [f"${name}", Int64(0)]}, counts[name]]} for name in OUTCOMES},
        )

    def note_running(self) -> None:
        """Note regularly that a recovery is still running. It never fails."""
        now = time.monotonic()
        if now >= self._next_at:  # threads that race for it note it twice
            self._next_at = now + _RUNNING_SECONDS
            self._note()

    def _note(self, **note: Any) -> None:
        try:
            self.write(note)
        except PyMongoError as error:
            if judge_error(error) is not Verdict.ACCESS or self._is_refused:
                logger.debug("A recovery of transactions could not be recorded: %s", short(error))
                return
            self._is_refused = True
            logger.warning(
                "Recoveries cannot be recorded in %s (%s). Other processes will therefore log that no recovery "
                "runs. Grant find, insert and update there.",
                self.collection.full_name,
                brief(error),
                extra={"event": "recovery_unnoted"},
            )

    def last(self) -> LastRecovery | None:
        """
        Return the last recovery. None if there is no note.

        Raises:
            PyMongoError: MongoDB did not answer, or refused it.
        """
        found = self.read()
        if found is None:
            return None
        return LastRecovery(
            seconds=found["seconds"],
            stopped=int(found.get("stopped", 0)),
            silent=tuple(map(str, found.get("silent", ()))),
            outcomes={name: int(found.get(name, 0)) for name in OUTCOMES},
        )


def recovery_watch(name: str, records: Callable[[], RecoveryRecords], patience: float) -> PeriodicWatch:
    """
    Return the watch with which a process that begins transactions notices missing recoveries.

    Args:
        name: the name of the `TwoPhaseCommit` in logs.
        records: returns the notes of recoveries.
        patience: seconds without a note before this is logged.
    """

    def age() -> float | None:
        last = records().last()
        return None if last is None else last.seconds

    def log_missing(since: str) -> None:
        logger.error(
            "Transactions %s: no recovery has run %s. A crash or an outage may leave transactions incomplete. "
                "Run `%s` (or the listener of a bridge) and a worker. Both must import the TwoPhaseCommit. Or run "
                "`%s`. If a recovery already runs, grant it find, insert and update on %s.",
            name, since, ANY_APP.celery("beat"), ANY_APP.celery("transactions", "recover"),
            records().collection.full_name,
            extra={"event": "nobody_recovers"},
        )  # fmt: skip

    return PeriodicWatch("mongo-celery-recovery-watch", age, log_missing, patience)
