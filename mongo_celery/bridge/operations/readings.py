"""
Reading MongoDB for whoever asks, without letting them hang.

Each thing that is read has a thread of its own, which reads only when somebody asks, and not more than once a second. A
server that hangs keeps that thread; whoever asks waits for some seconds, and is then told that there was no answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from mongo_celery.errors import MongoCeleryError
from mongo_celery.mongo.redaction import short, without_credentials

T = TypeVar("T")

WAIT_SECONDS = 3.0
"""For so long who asks by HTTP waits for MongoDB."""

_KEEP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """
    What was read last.

    Attributes:
        value: None where nothing was, or not in time.
        error: then why, in one sentence.
    """

    value: T | None
    error: str | None = None


class Reading(Generic[T]):
    """
    One thing that is read again and again. Thread-safe.

    Args:
        what: for the sentence on an answer that does not come.
        read: gives it, however long that takes.
        keep: seconds for which what was read is given again.
    """

    def __init__(self, what: str, read: Callable[[], T], *, keep: float = _KEEP_SECONDS) -> None:
        self._what = what
        self._read = read
        self._keep = keep
        self._turn = threading.Condition()
        self._answer: Answer[T] | None = None
        self._began = self._ended = 0.0
        self._wanted = self._stopping = False
        self._thread: threading.Thread | None = None

    def ask(self) -> None:
        """Have it read, unless that was just done; does not wait."""
        with self._turn:
            self._ask()

    def get(self, until: float) -> Answer[T]:
        """What was read lately; waits for it until a monotonic time."""
        with self._turn:
            while not self._is_fresh():
                self._ask()
                left = until - time.monotonic()
                if left <= 0:
                    waited = time.monotonic() - self._began
                    return Answer(None, f"{self._what} gave no answer for {max(waited, 0):.0f} s.")
                self._turn.wait(left)
            assert self._answer is not None, "what is fresh was read"
            return self._answer

    def stop(self) -> None:
        """Read no more; a reading that hangs is left to end with the process."""
        with self._turn:
            self._stopping = True
            self._turn.notify_all()

    def _is_fresh(self) -> bool:
        return not self._wanted and self._answer is not None and time.monotonic() - self._ended <= self._keep

    def _ask(self) -> None:
        if self._wanted or self._stopping or self._is_fresh():
            return
        self._wanted = True
        self._began = time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mongo_celery-reading", daemon=True)
            self._thread.start()
        self._turn.notify_all()

    def _run(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._wanted or self._stopping)
                if self._stopping:
                    return
            answer = self._try()
            with self._turn:
                self._answer, self._wanted = answer, False
                self._ended = time.monotonic()
                self._turn.notify_all()

    def _try(self) -> Answer[T]:
        try:
            return Answer(self._read())
        except Exception as error:  # noqa: BLE001 - whatever it is, somebody waits for a sentence
            sentence = without_credentials(str(error))
            if not isinstance(error, MongoCeleryError):
                sentence = f"{self._what} cannot be read: {type(error).__name__}: {short(error)}."
            return Answer(None, sentence)
