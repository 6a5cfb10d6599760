"""
Writes to the state that MongoDB has not answered for, made again in the background until it does.

An execution does not wait for the end of an outage: its worker process has a task to end and time limits to keep. What
it could not write goes on here, in a thread of the process. Each write is guarded by the owner of its claim, so one
that comes too late is refused and changes nothing.

Best effort: when the process ends first, the claim lapses, as after any other end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from mongo_celery.bridge.wiring import Wiring
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.verdicts import is_transient, traceback_text
from mongo_celery.visible import Lines

logger = logging.getLogger("mongo_celery.worker")

_PAUSES = Pauses(first=0.1, longest=1.0)


@dataclass(slots=True, eq=False)
class DeferredWrite:
    """
    One write that is still to be made.

    Attributes:
        what: for the log.
        write: makes it. Returns True if it was accepted.
        answers: how often it is made again after a refusal: an earlier command may still take effect.
        ended: called when it is not to be made any more, for whatever reason.
    """

    what: str
    write: Callable[[], bool]
    answers: int
    ended: Callable[[], None]


class DeferredWrites:
    """
    The writes that one process still has to make for executions that have ended. Thread-safe.

    Args:
        wiring: of the bridge. A process has one of these for each.
    """

    def __init__(self, wiring: Wiring) -> None:
        self._name = f"mongo_celery-deferred-{wiring.name}"
        self._writes: list[DeferredWrite] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(
        self, what: str, write: Callable[[], bool], *, answers: int = 0, ended: Callable[[], None] = lambda: None
    ) -> None:
        """
        Make a write until it is answered. With `answers`, until it is accepted or was refused so often.

        Then `ended` is called, which must not raise.
        """
        with self._changed:
            self._writes.append(DeferredWrite(what, write, answers, ended))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        """Make all writes, again and again with pauses. End when none is left."""
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
        """Make a write. Return True if it is not to be made again."""
        try:
            accepted = deferred.write()
        except Exception as error:  # noqa: BLE001 - a write that nobody foresaw to fail is logged, and given up
            if is_transient(error):
                return False
            logger.error(
                "%s cannot be written; its claim will lapse: %s",
                deferred.what,
                Lines(traceback_text(error)),
                extra={"event": "deferred_write_lost"},
            )
        else:
            deferred.answers -= 1
            if not accepted and deferred.answers > 0:
                return False
            if accepted:
                logger.info("%s is written, late", deferred.what, extra={"event": "deferred_write_done"})
            else:
                what = deferred.what
                logger.info("%s was refused: it is no longer needed", what, extra={"event": "deferred_write_refused"})
        deferred.ended()
        return True
