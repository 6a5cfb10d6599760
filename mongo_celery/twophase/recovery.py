"""
Recovery finishes transactions of dead coordinators, and cancels overdue ones.

It reads the log page by page, the oldest step first, and finishes a few transactions concurrently. If a cluster does
not answer, this run does not query it again, and later pages omit its transactions. On the current page, transactions
in undo are undone in the clusters that answer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import Any

import pymongo
from pymongo.cursor import Cursor
from pymongo.errors import PyMongoError

from mongo_celery.errors import ConfigurationError, TransactionStateError, TransactionTimeoutError
from mongo_celery.mongo.opening import ANSWER_SECONDS
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.verdicts import is_unanswered
from mongo_celery.quantities import number
from mongo_celery.twophase.engine import Engine
from mongo_celery.twophase.log import OvertakenError
from mongo_celery.twophase.recoveries import Recovery, RecoveryRecords
from mongo_celery.twophase.transaction import State, Transaction
from mongo_celery.twophase.values import to_text

logger = logging.getLogger("mongo_celery.twophase")

Document = dict[str, Any]

_PAGE = 200
_WORKERS = 8
"""Number of concurrent transactions. Most of the time is spent waiting for a majority."""

_ASK_SECONDS = 3.0
"""Time limit for a cluster's answer to a ping. Otherwise it is skipped."""

_NAMED = 3
"""Largest number of unrecoverable transactions that a log record names."""


class Recoverer:
    """
    Finishes abandoned transactions of one log.

    Args:
        engine: the engine of the log.
        records: the recovery notes.
        age: seconds since the last step, by the server's clock.
        any_application: True to include other applications.
    """

    def __init__(self, engine: Engine, records: RecoveryRecords, age: float, *, any_application: bool) -> None:
        self._engine = engine
        self._log = engine.log
        self._records = records
        self._age = age
        self._any_application = any_application
        self._report: dict[str, Recovery | None] = {}
        self._silent: dict[str | None, str] = {}
        self._asked: set[str | None] = {None}
        self._unfit: dict[str, ConfigurationError] = {}
        self._taken: list[Any] = []

    def recover(self, limit: int) -> list[Recovery]:
        """
        Finish abandoned transactions: pending and applied ones go forward, canceling ones go back.

        Args:
            limit: largest number to take over. Unreadable transactions, and those in silent clusters, do not count:
                they stay the oldest, and would block all others.
        """
        try:
            report = self._recover_pages(limit)
        except (PyMongoError, TransactionTimeoutError):  # without the index, reading a large log takes too long
            self._log.prepare(patiently=True)
            raise
        self._log.prepare(patiently=True)  # last: on a large log it takes minutes, and money is waiting
        return report

    def _recover_pages(self, limit: int) -> list[Recovery]:
        pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="mongo-celery-recovery")
        is_noted = False
        try:
            for page in self._read_pages(limit):
                self._records.note_running()
                is_noted = True  # a process that cannot read the log has not recovered
                clusters = {each for document in page for each in self._find_clusters(document)}
                list(pool.map(self._ask, clusters - self._asked))
                list(pool.map(self._recover_one, page))
        finally:  # even after a time limit, finished work is noted
            pool.shutdown(cancel_futures=True)
            self._log_unfit()
            report = [each for each in self._report.values() if each is not None]
            if is_noted:
                self._records.note(report, sorted(each for each in self._silent if each))
        return report

    def _read_pages(self, limit: int) -> Iterator[Sequence[Document]]:
        """Yield abandoned transactions up to the limit. After an error read again, without silent clusters."""
        cursor: Cursor[Document] | None = None
        silent: list[str] = []

        def read() -> list[Document]:
            nonlocal cursor, silent
            known = [each for each in self._silent if each is not None]
            try:
                if cursor is None or known != silent:
                    silent = known
                    cursor = self._log.find_abandoned(self._age, any_application=self._any_application, without=silent)
                new = (each for each in cursor if to_text(each["_id"]) not in self._report)
                return list(islice(new, min(_PAGE, limit - len(self._taken))))
            except PyMongoError:
                cursor = None
                raise

        while len(self._taken) < limit:
            page = self._engine.call(read)
            self._report.update(dict.fromkeys(to_text(each["_id"]) for each in page))
            yield page
            if not page:
                return

    def _find_clusters(self, document: Document) -> set[str | None]:
        """Return the clusters of a transaction: those of its participants, and the log's own."""
        try:
            return {None, *(part.cluster for part in self._log.read(document).parts)}
        except TransactionStateError:  # reported in its turn
            return {None}

    def _ask(self, cluster: str | None) -> None:
        """Query a cluster. If it does not answer, skip it from now on."""
        self._asked.add(cluster)
        try:
            with pymongo.timeout(_ASK_SECONDS):
                self._engine.clusters.ping(cluster)
        except Exception as error:  # noqa: BLE001 - whatever else it says, its transactions will report
            if _is_silence(error):
                name = "the log's cluster" if cluster is None else f"cluster {cluster!r}"
                self._silent[cluster] = f"not tried, because {name} does not answer: {short(error)}"

    def _recover_one(self, document: Document) -> None:
        """Recover a transaction. If one of its clusters is silent, only undo it if it is in undo."""
        silent = frozenset(self._silent) & self._find_clusters(document)
        if not silent:
            self._finish(document)
            return
        self._note(document, str(document["state"]), self._silent[next(iter(silent))])
        if document["state"] in {State.PENDING, State.CANCELING} and None not in silent:
            self._finish(document, without=silent)

    def _finish(self, document: Document, without: frozenset[str | None] = frozenset()) -> None:
        """
        Take over a transaction, finish it, and report the outcome.

        Args:
            document: the document of the transaction.
            without: clusters that are not queried. Then only transactions in undo are taken over.
        """
        identity, before = document["_id"], str(document["state"])
        self._records.note_running()
        try:
            with self._engine.limit_calls() as deadline:
                read = self._log.read(document)
                self._engine.clusters.refuse_unknown(read.parts)
                coordinator = self._engine.make_coordinator(any_application=self._any_application, silent=without)

                def take() -> Transaction | None:
                    with suppress(OvertakenError):
                        if read.state is State.INITIAL:
                            return read if "queuedAt" in document else self._log.expire(read)
                        return self._log.take_over(
                            read,
                            coordinator.identity,
                            older_than=self._age,
                            is_overdue=bool(without) and read.state is State.PENDING,
                            any_application=self._any_application,
                        )
                    mine = self._log.get(identity)  # an answer may have been lost
                    return mine if mine.coordinator == coordinator.identity else None

                taken = self._engine.until_answered(take, deadline, id=identity)
                if taken is None:  # another process was faster, or it must not be undone
                    return
                if not without:
                    self._taken.append(identity)
                ended = self._engine.finish(taken, deadline, coordinator)
        except Exception as error:  # noqa: BLE001 - whatever one transaction does, the others have their turn
            self._report_failure(document, error, is_known=bool(without))
            return
        logger.warning(
            "transaction %r was recovered: %s, now %s",
            identity,
            before,
            ended.state,
            extra={"event": "transaction_recovered"},
        )
        self._note(document, str(ended.state))

    def _report_failure(self, document: Document, error: Exception, *, is_known: bool) -> None:
        identity = document["_id"]
        if isinstance(error, ConfigurationError):  # there may be many, with one fix
            self._unfit[repr(identity)] = error
        elif not is_known:
            logger.error(
                "transaction %r could not be recovered: %s", identity, short(error), extra={"event": "recovery_failed"}
            )
            if _is_silence(error):
                for cluster in self._find_clusters(document) - set(self._silent):
                    self._ask(cluster)
        is_stopped = isinstance(error, TransactionStateError | ConfigurationError)
        now = document
        with suppress(PyMongoError), pymongo.timeout(ANSWER_SECONDS):
            now = self._log.find_one(identity) or document
        self._note(document, str(now.get("state")), short(error), stopped=is_stopped)

    def _note(self, document: Document, after: str, error: str | None = None, *, stopped: bool = False) -> None:
        identity = document["_id"]
        self._report[to_text(identity)] = Recovery(identity, str(document["state"]), after, error, stopped)

    def _log_unfit(self) -> None:
        """Log once which transactions this process cannot recover with its configuration."""
        if self._unfit:
            logger.error(
                "This process could not recover %s, among them %s. Processes with other clients or code may "
                "finish them: %s",
                number(len(self._unfit), "transaction", "transactions"),
                ", ".join(list(self._unfit)[:_NAMED]),
                short(next(iter(self._unfit.values()))),
                extra={"event": "recovery_failed"},
            )


def _is_silence(error: BaseException | None) -> bool:
    """Return True if the root cause is that a server did not answer."""
    while error is not None:
        if is_unanswered(error):
            return True
        error = error.__cause__
    return False
