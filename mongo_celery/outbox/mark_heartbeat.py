"""
The heartbeat of running marks: one thread of a process renews them while their functions run.

A mark is first due a third of its time after the *start* of the claim call, so that a slow answer shortens the first
pause, not the safety. All that are due are renewed by one write for each `once`. What gets no answer is tried again
soon; what is refused belongs to somebody else, and is renewed no more. A function that ends within a third costs no
write.

Not promised: that no second run starts beside a process that stands still (frozen, swapped out, a debugger). Its mark
lapses by the server's clock, whatever the process believes.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pymongo
from bson import ObjectId
from pymongo.errors import PyMongoError

from mongo_celery.forking import PerProcess
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.verdicts import brief
from mongo_celery.outbox.marks import Marks

logger = logging.getLogger("mongo_celery.outbox")

_IDLE_SECONDS = 30.0
_ANSWER_SECONDS_MIN = 1.0
_TEXT_MAX = 200


@dataclass(slots=True, eq=False)
class RunningMark:
    """
    A mark whose function runs.

    Attributes:
        marks: where it is stored.
        identity: its `_id`.
        owner: of its claim.
        due: monotonic time of the next renewal.
        lost: whether somebody else was found to have it.
    """

    marks: Marks
    identity: Any
    owner: ObjectId
    due: float
    lost: bool = False

    def lose(self) -> None:
        """Say, once, that somebody else runs the same."""
        if not self.lost:
            self.lost = True
            logger.warning(
                "%s may run twice: this process stood still, and its claim lapsed",
                described(self.identity),
                extra={"event": "mark_lost"},
            )


class MarkHeartbeats:
    """The heartbeats of one process. Thread-safe; the thread starts with the first mark, and ends after the last."""

    def __init__(self) -> None:
        self._running: dict[int, RunningMark] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._wakes = 0.0

    def begin(self, marks: Marks, identity: Any, owner: ObjectId, started: float) -> RunningMark:
        """Keep a mark from now on; `started` is the monotonic time at which the claim call began."""
        running = RunningMark(marks, identity, owner, started + marks.claim_ttl / 3)
        with self._changed:
            self._running[id(running)] = running
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mongo_celery-once", daemon=True)
                self._thread.start()
            elif running.due < self._wakes:
                self._changed.notify_all()
        return running

    def end(self, running: RunningMark) -> None:
        """Renew it no more; a renewal may still be under way, and changes nothing once the mark is done."""
        with self._changed:
            self._running.pop(id(running), None)

    def _run(self) -> None:
        while (due := self._next()) is not None:
            for _, group in groupby(sorted(due, key=_place), key=_place):
                self._renew([*group])

    def _next(self) -> list[RunningMark] | None:
        """Wait for what is due; None, and no thread from now on, if nothing has run for a while."""
        idle_since = time.monotonic()
        with self._changed:
            while True:
                now = time.monotonic()
                due = [each for each in self._running.values() if each.due <= now]
                if due:
                    return due
                if self._running:
                    idle_since = now
                elif now - idle_since >= _IDLE_SECONDS:
                    self._thread = None
                    return None
                self._wakes = min((each.due for each in self._running.values()), default=idle_since + _IDLE_SECONDS)
                self._changed.wait(self._wakes - now)

    def _renew(self, due: list[RunningMark]) -> None:
        """Renew some of one place; whatever goes wrong, the thread goes on for the others."""
        marks, started = due[0].marks, time.monotonic()
        period = marks.claim_ttl / 3
        try:
            with pymongo.timeout(max(period, _ANSWER_SECONDS_MIN)):
                lost = marks.renew((each.identity, each.owner) for each in due)
        except Exception as error:  # noqa: BLE001 - the user's callable, too; without this thread every mark lapses
            logger.warning(
                "renewal of %d marks of once failed, trying again: %s",
                len(due),
                brief(error) if isinstance(error, PyMongoError) else short(error),
                extra={"event": "mark_renewal_failed"},
            )
            lost, started, period = set(), time.monotonic(), period / 4
        for each in due:
            each.due = started + period
            if each.owner in lost:
                with self._changed:  # one that has just ended is not lost
                    found = self._running.pop(id(each), None)
                if found is not None:
                    each.lose()


def described(identity: Any) -> str:
    """A mark for logs and errors: the task and its key, or the task's id."""
    named = isinstance(identity, dict)
    text = f"{identity['t']} for {identity['k']!r}" if named else repr(identity)
    return text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}..."


def _place(running: RunningMark) -> int:
    return id(running.marks)


HEARTBEATS = PerProcess(MarkHeartbeats)
"""Those of this process."""
