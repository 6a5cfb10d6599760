"""
The heartbeat of idempotency records: one thread of a process renews claims while their functions run.

A claim is first due a third of its time after the *start* of the claim call: a slow answer shortens the first pause,
not the safety. One write renews all due claims of a `once`. A renewal without an answer is tried again soon. A function
that ends within a third of the time costs no write.

Not promised: that no second run starts beside a frozen process (stopped, swapped out, in a debugger). Its claim lapses
by the server's clock, whatever the process believes.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

import pymongo
from bson import ObjectId

from mongo_celery.forking import PerProcess
from mongo_celery.mongo.redaction import short
from mongo_celery.outbox.idempotency import IdempotencyStore

logger = logging.getLogger("mongo_celery.outbox")

_IDLE_SECONDS = 30.0
_ANSWER_SECONDS_MIN = 1.0
_TEXT_MAX = 200


@dataclass(slots=True, eq=False)
class RunningClaim:
    """
    The claim of a function that runs.

    Attributes:
        store: of its record.
        identity: `_id` of its record.
        owner: of the claim.
        due: monotonic time of the next renewal.
        lost: whether another run was found to have it.
    """

    store: IdempotencyStore
    identity: Any
    owner: ObjectId
    due: float
    lost: bool = False

    def lose(self) -> None:
        """Log, at the first call, that another run does the same."""
        if not self.lost:
            self.lost = True
            logger.warning(
                "%s may run twice: this process was frozen, and its claim lapsed",
                describe_identity(self.identity),
                extra={"event": "mark_lost"},
            )


class ClaimHeartbeats:
    """The heartbeats of one process. Thread-safe; the thread starts with the first claim, and ends after the last."""

    def __init__(self) -> None:
        self._running: dict[ObjectId, RunningClaim] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def begin(self, store: IdempotencyStore, identity: Any, owner: ObjectId, started: float) -> RunningClaim:
        """Renew a claim from now on; `started` is the monotonic time at which the claim call began."""
        running = RunningClaim(store, identity, owner, started + store.claim_ttl / 3)
        with self._changed:
            self._running[owner] = running
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mongo_celery-once", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return running

    def end(self, running: RunningClaim) -> None:
        """Renew it no more; a renewal in progress changes nothing once the record is done."""
        with self._changed:
            self._running.pop(running.owner, None)

    def _run(self) -> None:
        while due := self._next():
            for store in {each.store for each in due}:
                self._renew(store, [each for each in due if each.store is store])

    def _next(self) -> list[RunningClaim]:
        """Wait for what is due; nothing, and no thread from now on, if nothing has run for a while."""
        idle_at = time.monotonic() + _IDLE_SECONDS
        with self._changed:
            while True:
                now = time.monotonic()
                due = [each for each in self._running.values() if each.due <= now]
                if due:
                    return due
                if not self._running and now >= idle_at:
                    self._thread = None
                    return []
                self._changed.wait(min((each.due for each in self._running.values()), default=idle_at) - now)

    def _renew(self, store: IdempotencyStore, due: list[RunningClaim]) -> None:
        """Renew some of one store; whatever goes wrong, the thread continues for the others."""
        started, period = time.monotonic(), store.claim_ttl / 3
        try:
            with pymongo.timeout(max(period, _ANSWER_SECONDS_MIN)):
                lost = store.renew([(each.identity, each.owner) for each in due])
        except Exception as error:  # noqa: BLE001 - the user's callable, too; without this thread every claim lapses
            logger.warning(
                "renewal of %d claims of once failed, trying again: %s",
                len(due),
                short(error),
                extra={"event": "mark_renewal_failed"},
            )
            lost, started, period = set(), time.monotonic(), period / 4
        for each in due:
            each.due = started + period
            with self._changed:  # one that has just ended is not lost
                is_lost = each.owner in lost and self._running.pop(each.owner, None) is not None
            if is_lost:
                each.lose()


def describe_identity(identity: Any) -> str:
    """Return the text of an id for logs and errors: the task and its key, or the task's id."""
    named = isinstance(identity, dict)
    text = f"{identity['t']} for {identity['k']!r}" if named else repr(identity)
    return text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}..."


HEARTBEATS = PerProcess(ClaimHeartbeats)
"""Those of this process."""
