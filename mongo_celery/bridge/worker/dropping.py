"""
Dropped messages of one worker process: counted in the state, and logged once a minute for each reason.

Every writer to the broker can send such messages, so their texts are never shown. A flood fills no log and no state.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from pymongo.errors import PyMongoError

from mongo_celery.bridge.identity import ways_out
from mongo_celery.bridge.state.leases import FOREIGN, FORGED, MALFORMED, MISDIRECTED, TAMPERED
from mongo_celery.mongo.verdicts import brief
from mongo_celery.quantities import number

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.worker")

MOVED = "moved"
"""This worker's handler watches other databases than the leader's. Counted as foreign."""

_TEXTS = {
    FORGED: (
        "their signature is wrong, so they were forged or damaged, or signed with an expired key. Find the program "
        "that sends them"
    ),
    TAMPERED: (
        "the {about} of the last one was changed after signing. Find the other program that writes to the broker, or "
        "the signal handler of this app that changes messages"
    ),
    MISDIRECTED: "they were sent to the task of another handler. Find the program that sends them",
    MALFORMED: "they are not valid Celery messages. Find the other program that writes to the broker",
    FOREIGN: (
        "another installation or environment sent them (process {about}, as the message claims). Each takes messages "
        "of the other. Give one of the two another name, Bridge(..., name='...'), or a separate broker database"
    ),
    MOVED: (
        "their handler {about} watches other databases in this worker than in the listener. Deploy the same code and "
        "settings to listeners and workers. {ways_out}"
    ),
}
_WRITE_SECONDS = 1.0
_RECORD_SECONDS = 60.0
_SENDER_CHARS = 300
_PROCESS = re.compile(r"(?:^|\.)([0-9]{1,10}@[A-Za-z0-9._-]{1,253})\Z")


def parse_process(origin: object) -> str | None:
    """Return `pid@host` of the sender that a message claims, without a signature. None if it has another form."""
    found = _PROCESS.search(origin[-_SENDER_CHARS:]) if isinstance(origin, str) else None
    return found.group(1) if found is not None else None


class Repetitions:
    """Counts repetitions, and allows one log record a minute for each kind. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._told_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, kind: str) -> int:
        """Count one more message. Return the number of messages for a log record if one is due, otherwise 0."""
        now = time.monotonic()
        with self._lock:
            self._counts[kind] += 1
            if now - self._told_at.get(kind, -_RECORD_SECONDS) < _RECORD_SECONDS:
                return 0
            self._told_at[kind] = now
            return self._counts.pop(kind)


class Dropper:
    """
    Counts and logs dropped messages: `wiring.of_process(Dropper)`. Thread-safe. It never blocks.

    Its thread writes the counts at most once a second. If the process is killed, the counts of the last second may be
    lost.

    Args:
        wiring: the wiring of the bridge.
    """

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._repetitions = Repetitions()
        self._counts: Counter[str] = Counter()
        self._process: str | None = None
        self._written_at = -_WRITE_SECONDS
        self._is_waiting = False
        self._lock = threading.Lock()

    def drop(self, reason: str, about: str = "") -> None:
        """
        Drop a message.

        Args:
            reason: `MOVED`, or a reason that the state counts.
            about: the altered part, the claimed sender, or the moved handler.
        """
        with self._lock:
            self._counts[FOREIGN if reason == MOVED else reason] += 1
            if reason == FOREIGN:
                self._process = about or self._process
            if not self._is_waiting:
                self._schedule_write(max(0.0, self._written_at + _WRITE_SECONDS - time.monotonic()))
        if count := self._repetitions.add(f"{reason} {about}" if reason == MOVED else reason):
            logger.warning(
                "the worker has dropped %s of bridge %s: %s",
                number(count, "message", "messages"),
                self._wiring.name,
                _TEXTS[reason].format(about=about or "unknown", ways_out=ways_out(self._wiring.line)),
                extra={"event": "message_dropped", "reason": reason, "about": about},
            )

    def _schedule_write(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._write)
        timer.daemon = True
        with suppress(RuntimeError):  # the process can start no thread, and the next dropped message tries again
            timer.start()
            self._is_waiting = True

    def _write(self) -> None:
        with self._lock:
            counts, self._counts = self._counts, Counter()
            self._written_at = time.monotonic()
            self._is_waiting = False
            process = self._process
        try:
            self._wiring.store.drops.count(counts, process)
        except PyMongoError as error:
            with self._lock:
                self._counts.update(counts)  # written with the next counts
            logger.debug(
                "the worker could not count dropped messages, and counts them with the next ones: %s", brief(error)
            )
