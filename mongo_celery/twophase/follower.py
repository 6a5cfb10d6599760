"""
The log follows its transactions: what the last branch has decided is said there a moment later, many at once.

Whoever asked for a transaction over several clusters is released by the commit that decides it. That commit is a fact
with a receipt, whatever the log says; so a thread of this process says `applied`, lets receipts expire and says `done`
for all that came together, instead of three more writes for each.

- What shares clusters has a thread of its own, so that one cluster that does not answer keeps no others waiting.
- The queue is bounded: where it is full, the caller finishes its transaction itself.
- What cannot be finished in time, or is lost with the process, is done all the same; recovery finds it, asks the branch
  that decides, and says so.
- At the end of a process what is queued is finished within two seconds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence

from celery.exceptions import SoftTimeLimitExceeded

from mongo_celery.exits import close_at_exit
from mongo_celery.mongo.redaction import short
from mongo_celery.twophase.states import Transaction

logger = logging.getLogger("mongo_celery.twophase")

Finish = Callable[[Sequence[Transaction], float | None], object]
"""Says of transactions in the log that they are done, before a time of the monotonic clock; None: of its own."""

BATCH = 100
"""Transactions that are finished at once."""

QUEUE_MAX = 1000
"""Of those that share clusters: what dies with the process is left to recovery."""

LINGER_SECONDS = 0.2
LONGEST_SECONDS = 1.0
"""
For so long the first one waits for others, and on while others come; unless a batch is full before. A batch costs about
as much as a transaction, whether it has ten or a hundred.
"""

INLINE_SECONDS = 2.0
"""How long a caller whose transaction is done waits for the log, if there is no place in the queue."""

CLOSE_SECONDS = 2.0
"""How long the end of a process may take."""

_IDLE_SECONDS = 5.0
"""After which a thread with nothing to do ends."""


class FollowerLane:
    """
    What is decided in the same clusters, and a thread that finishes it.

    Args:
        finish: what its thread does.
    """

    def __init__(self, finish: Finish) -> None:
        self._finish = finish
        self._changed = threading.Condition()
        self._waiting: list[Transaction] = []
        self._under_way = 0
        self._hurried = False
        self._thread: threading.Thread | None = None

    def take(self, transaction: Transaction) -> bool:
        """Finish a transaction soon; False if there is no place for it, or the process ends."""
        with self._changed:
            if len(self._waiting) >= QUEUE_MAX or not self._has_thread():
                return False
            self._waiting.append(transaction)
            if len(self._waiting) in {1, BATCH}:
                self._changed.notify_all()
        return True

    def hurry(self) -> None:
        """What waits for others waits no longer."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    def wait(self, until: float) -> bool:
        """Whether all is finished, or given up, before a time of the monotonic clock."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._waiting and not self._under_way, max(until - time.monotonic(), 0)
            )

    def _has_thread(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="mongo_celery-log", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter ends, or there are too many
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        while batch := self._next():
            try:
                self._finish(batch, None)
            except Exception as error:  # noqa: BLE001 - whatever happens to these, those that follow have their turn
                note_left(batch, error)
            finally:
                with self._changed:
                    self._under_way = 0
                    self._changed.notify_all()

    def _next(self) -> list[Transaction]:
        """What comes next; nothing if the thread is no longer needed."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiting, _IDLE_SECONDS):
                self._thread = None
                return []
            self._linger()
            batch, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
            self._under_way = len(batch)
            self._hurried = self._hurried and bool(self._waiting)
            return batch

    def _linger(self) -> None:
        """Wait for others."""
        until = time.monotonic() + max(LINGER_SECONDS, LONGEST_SECONDS)
        count = 0
        while len(self._waiting) > count and (left := until - time.monotonic()) > 0:
            count = len(self._waiting)
            seconds = min(LINGER_SECONDS, left)
            if self._changed.wait_for(lambda: self._hurried or len(self._waiting) >= BATCH, seconds):
                return


class LogFollower:
    """
    Has the log of one `TwoPhaseCommit` follow, in this process. Any thread may hand over.

    Args:
        finish: as for `FollowerLane`.
    """

    def __init__(self, finish: Finish) -> None:
        self._finish = finish
        self._lanes: dict[Hashable, FollowerLane] = {}
        self._close_until: float | None = None

    def take(self, transaction: Transaction, deadline: float) -> None:
        """
        Have the log follow a transaction that is decided.

        Args:
            transaction: as it was decided.
            deadline: of the monotonic clock. If there is no place in the queue, it is finished here, as far as that
                goes until then, and in two seconds.

        Raises:
            SoftTimeLimitExceeded: the task that calls this has run for too long; the transaction is done all the same.
        """
        clusters = frozenset(part.cluster for part in transaction.parts)
        lane = self._lanes.get(clusters) or self._new_lane(clusters)
        if self._close_until is None and lane.take(transaction):
            return
        try:
            self._finish([transaction], min(deadline, time.monotonic() + INLINE_SECONDS))
        except SoftTimeLimitExceeded as error:  # of the task that this is called in
            note_left([transaction], error)
            raise
        except Exception as error:  # noqa: BLE001 - it is done, whatever keeps the log from saying so
            note_left([transaction], error)

    def _new_lane(self, clusters: Hashable) -> FollowerLane:
        close_at_exit(self)
        return self._lanes.setdefault(clusters, FollowerLane(self._finish))

    def flush(self, until: float) -> bool:
        """Whether all that was handed over is finished, or given up, before a time of the monotonic clock."""
        lanes = list(self._lanes.values())
        for lane in lanes:
            lane.hurry()
        return all(lane.wait(until) for lane in lanes)

    def close_soon(self) -> None:
        """The process ends: what waits for others waits no longer."""
        self._close_until = time.monotonic() + CLOSE_SECONDS
        for lane in list(self._lanes.values()):
            lane.hurry()

    def close(self) -> None:
        """Finish what was handed over, as far as that goes in time."""
        if self._close_until is None:
            self.close_soon()
        self.flush(self._close_until or 0.0)


def note_left(transactions: Sequence[Transaction], error: BaseException) -> None:
    """Say that transactions are done, and the log does not say so."""
    logger.warning(
        "%s transactions that are done, among them %r, could not be noted so in the log: %s; recovery will do it",
        len(transactions),
        transactions[0].id,
        short(error),
        extra={"event": "log_behind"},
    )
