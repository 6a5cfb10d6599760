"""
Writes to the state without MongoDB's answer, repeated in the background until it answers.

A refused login and a missing right are no answer either: an operator usually causes and ends both.

An execution does not wait for the end of an outage: its process must end the task within time limits. A thread of the
process continues with the unfinished writes. The owner of the claim guards each write, so a late one is refused and
changes nothing.

This is best effort: if the process ends first, the claim lapses, as after any other end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from mongo_celery.bridge.wiring import Wiring
from mongo_celery.mongo.opening import renew_connections
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.verdicts import is_refused_user, is_transient, traceback_text
from mongo_celery.visible import Lines

logger = logging.getLogger("mongo_celery.worker")

_PAUSES = Pauses(first=0.1, longest=1.0)


@dataclass(slots=True, eq=False)
class DeferredWrite:
    """
    One unfinished write.

    Attributes:
        what: name of the write in the log.
        write: makes the write, and returns True if MongoDB accepted it.
        answers: number of repetitions after a refusal, because an earlier command may still take effect.
        ended: called when the write is finished or abandoned.
    """

    what: str
    write: Callable[[], bool]
    answers: int
    ended: Callable[[], None]


class DeferredWrites:
    """
    The unfinished writes of one process, for executions that have ended. Thread-safe.

    Args:
        wiring: the wiring of the bridge. A process has one instance for each bridge.
    """

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._name = f"mongo_celery-deferred-{wiring.name}"
        self._writes: list[DeferredWrite] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(
        self, what: str, write: Callable[[], bool], *, answers: int = 0, ended: Callable[[], None] = lambda: None
    ) -> None:
        """
        Repeat a write until it is answered. With `answers`, until it is accepted or its guard refused it that often.

        Then call `ended`, which must not raise.

        Raises:
            RuntimeError: the process can start no thread, so the write is not made.
        """
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            self._writes.append(DeferredWrite(what, write, answers, ended))
            self._changed.notify()

    def _run(self) -> None:
        """Repeat the writes, with pauses, until none is left."""
        failures = 0
        while True:
            with self._changed:
                due = [*self._writes]
            done = [each for each in due if self._make(each)]
            failures = 0 if done else failures + 1
            with self._changed:
                self._writes = [each for each in self._writes if each not in done]
                if not self._writes:
                    self._thread = None
                    return
                if len(self._writes) + len(done) == len(due):
                    self._changed.wait(_PAUSES.nth(failures))

    def _make(self, deferred: DeferredWrite) -> bool:
        """Attempt a write. Return True if it must not be repeated."""
        try:
            accepted = deferred.write()
        except Exception as error:  # noqa: BLE001 - an unexpected failure is logged, and the write given up
            renew_connections(self._wiring.client, error)
            if is_transient(error) or is_refused_user(error):
                return False
            logger.error(
                "the worker cannot write %s, so its claim lapses and the change runs again: %s",
                deferred.what,
                Lines(traceback_text(error)),
                extra={"event": "deferred_write_lost"},
            )
        else:
            deferred.answers -= 1
            if not accepted and deferred.answers > 0:
                return False
            if accepted:
                logger.info(
                    "the worker has written %s late, after an outage",
                    deferred.what,
                    extra={"event": "deferred_write_done"},
                )
            else:
                what = deferred.what
                text = "the worker did not write %s, because it is no longer needed"
                logger.info(text, what, extra={"event": "deferred_write_refused"})
        deferred.ended()
        return True
