"""
Removing what is committed from the stored changes, and counting what is left: in a thread of its own.

Nothing waits for either. A removal takes what a majority image showed as committed, and only what no later term has
stored, so that it is harmless whenever it happens. Which partitions have anything stored is known by their marks, and
found by a walk over all of them after a take-over and now and then: a listener that ended between storing and
marking leaves changes without a mark.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from pymongo.errors import InvalidOperation, PyMongoError

from mongo_celery.bridge.state.spill import REMOVED, Amount, Spill
from mongo_celery.mongo.verdicts import brief

logger = logging.getLogger("mongo_celery.listener")

_PAUSE_SECONDS = 1.0
_STEP_SECONDS = 0.05
_WALK_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Done:
    """
    Up to where the changes of a partition are done.

    Attributes:
        committed: comparable part of the committed token of a majority image; empty for nothing.
        passed: the same, no further than the stored watermark: up to there no change is read again.
    """

    committed: str
    passed: str


@dataclass(frozen=True, slots=True)
class Removed:
    """
    What the thread has found, or done.

    Attributes:
        removed: how many documents were removed.
        amount: what is left, where that was counted.
        additions: as of `want`, where that was counted.
        is_met: whether the walk has met a partition of which something is stored.
    """

    partition_id: str
    removed: int = 0
    amount: Amount | None = None
    additions: int | None = None
    is_met: bool = False


class Removal:
    """
    The removals of one term.

    Args:
        spill: where the changes are stored.
        version: of the term.
    """

    def __init__(self, spill: Spill, version: int) -> None:
        self._spill = spill
        self._version = version
        self._changed = threading.Condition()
        self._wanted: dict[str, tuple[Done, int | None, str]] = {}
        self._findings: list[Removed] = []
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="mongo_celery-removal", daemon=True)

    def start(self) -> None:
        """Begin, with a walk over everything that is stored."""
        self._thread.start()

    def stop(self) -> None:
        """Begin nothing more. Does not wait: a call that is under way has a limit."""
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def want(self, partition_id: str, done: Done, additions: int | None, *, after: str) -> None:
        """
        Remove what is stored of a partition up to a place, soon.

        An undeliverable change that may be read again stays: it says in which partition the change is done.

        Args:
            after: up to where all but those was removed before.
            additions: how often something was stored there, to be told with a count of what is left afterwards; None
                where nothing is to be counted.
        """
        with self._changed:
            _, counts, begins = self._wanted.get(partition_id, (done, None, after))
            self._wanted[partition_id] = done, counts if additions is None else additions, min(begins, after)
            self._changed.notify()

    def findings(self) -> list[Removed]:
        """What was found or done since the last call."""
        with self._changed:
            found, self._findings = self._findings, []
        return found

    def _run(self) -> None:
        steps = self._walk()
        while True:
            try:
                if not self._work():
                    return
                pause = next(steps)
            except InvalidOperation:
                return  # the client was closed: nobody is left for whom this is done
            except PyMongoError as error:
                if self._is_over:
                    return
                logger.warning(
                    "removing or counting stored changes failed, trying again: %s",
                    brief(error),
                    extra={"event": "removal_failed"},
                )
                steps = self._walk()
                with self._changed:
                    self._changed.wait(_PAUSE_SECONDS)
                continue
            with self._changed:
                if not self._wanted and not self._is_over:
                    self._changed.wait(pause)

    def _work(self) -> bool:
        """Do what is wanted; False when it is over."""
        while True:
            with self._changed:
                if self._is_over:
                    return False
                if not self._wanted:
                    return True
                partition_id = next(iter(self._wanted))
                wanted = done, additions, after = self._wanted[partition_id]
            removed = self._remove(partition_id, done, after)
            amount = self._spill.amount(partition_id) if additions is not None else None
            with self._changed:
                if self._wanted.get(partition_id) == wanted:
                    del self._wanted[partition_id]
                self._findings.append(Removed(partition_id, removed, amount, additions))

    def _remove(self, partition_id: str, done: Done, after: str) -> int:
        removed = last = 0
        while done.passed and not self._is_over:
            last = self._spill.remove(partition_id, done.passed, self._version)
            removed += last
            if last < REMOVED:
                break
        begins = max(done.passed, after)
        if begins < done.committed:
            for last in self._spill.remove_delivered(partition_id, begins, done.committed, self._version):
                removed += last
                if self._is_over:
                    break
        return removed

    def _walk(self) -> Iterator[float]:
        """Steps over all partitions that have anything stored; the pauses after them."""
        while True:
            found: str | None = None
            while (found := self._spill.next_partition(found)) is not None:
                with self._changed:
                    self._findings.append(Removed(found, is_met=True))
                yield _STEP_SECONDS
            yield _WALK_SECONDS
