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
import time
from collections.abc import Callable
from dataclasses import dataclass

from mongo_celery.bridge.error_text import traceback_text
from mongo_celery.bridge.wiring import Wiring
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.verdicts import is_transient
from mongo_celery.visible import Lines

logger = logging.getLogger("mongo_celery.worker")

_PAUSES = Pauses(first=0.1, longest=1.0)


@dataclass(slots=True, eq=False)
class DeferredWrite:
    """
    One write that is still owed.

    Attributes:
        what: for the log.
        write: makes it; whether it was accepted.
        answers: how often a refusal is not believed: a command whose answer was lost may still take effect.
        ended: called when it is owed no longer, however that came.
    """

    what: str
    write: Callable[[], bool]
    answers: int = 0
    ended: Callable[[], None] = lambda: None
    due: float = 0.0
    failures: int = 0


class DeferredWrites:
    """
    What one process still has to write for executions that have ended. Thread-safe.

    Args:
        wiring: of the bridge; a process has one of these for each.
    """

    def __init__(self, wiring: Wiring) -> None:
        self._name = f"mongo_celery-deferred-{wiring.name}"
        self._owed: list[DeferredWrite] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(
        self, what: str, write: Callable[[], bool], *, answers: int = 0, ended: Callable[[], None] = lambda: None
    ) -> None:
        """
        Make a write until it is answered; with `answers`, until it is accepted or was refused so often.

        Then `ended` is called, which must not raise.
        """
        with self._changed:
            self._owed.append(DeferredWrite(what, write, answers, ended))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._owed:
                    self._thread = None
                    return
                following = min(self._owed, key=lambda owed: owed.due)
                pause = following.due - time.monotonic()
                if pause > 0:
                    self._changed.wait(pause)
                    continue
            if self._is_done(following):
                following.ended()
                with self._changed:
                    self._owed.remove(following)
            else:
                following.due = time.monotonic() + _PAUSES.nth(following.failures)
                following.failures += 1

    def _is_done(self, owed: DeferredWrite) -> bool:
        try:
            accepted = owed.write()
        except Exception as error:  # noqa: BLE001 - a write that nobody foresaw to fail is told, and given up
            if is_transient(error):
                return False
            logger.error(
                "%s cannot be written; its claim will lapse: %s",
                owed.what,
                Lines(traceback_text(error)),
                extra={"event": "deferred_write_lost"},
            )
            return True
        if accepted:
            logger.info("%s is written, late", owed.what, extra={"event": "deferred_write_done"})
            return True
        owed.answers -= 1
        if owed.answers > 0:
            return False
        logger.info("%s was refused: it is no longer needed", owed.what, extra={"event": "deferred_write_refused"})
        return True
