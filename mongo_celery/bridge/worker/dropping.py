"""
Dropped messages of one worker process: counted in the state, and logged once a minute for each reason.

Anybody who can write to the broker can send them, so no text of theirs is shown. A flood fills no log and no state.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from pymongo.errors import PyMongoError

from mongo_celery.bridge.identity import ways_out
from mongo_celery.bridge.state.leases import FOREIGN, FORGED, MALFORMED, MISDIRECTED, TAMPERED
from mongo_celery.mongo.verdicts import brief
from mongo_celery.quantities import number

if TYPE_CHECKING:
    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.worker")

_WRITE_SECONDS = 1.0
_RECORD_SECONDS = 60.0
_SENDER_CHARS = 300
_PROCESS = re.compile(r"(?:^|\.)([0-9]{1,10}@[A-Za-z0-9._-]{1,253})\Z")


def parse_process(origin: object) -> str | None:
    """Return `pid@host` of the sender that a message claims. None unless it looks like that. Nobody signs it."""
    found = _PROCESS.search(origin[-_SENDER_CHARS:]) if isinstance(origin, str) else None
    return found.group(1) if found is not None else None


class Repetitions:
    """Counts what is repeated: one log record a minute for each kind. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._told_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, kind: str) -> int:
        """Count one more. Return how many the record that is due has to name, or 0 if none is due."""
        now = time.monotonic()
        with self._lock:
            self._counts[kind] += 1
            if now - self._told_at.get(kind, -_RECORD_SECONDS) < _RECORD_SECONDS:
                return 0
            self._told_at[kind] = now
            return self._counts.pop(kind)


class Dropper:
    """
    Counts and logs dropped messages: `wiring.of_process(Dropper)`. Thread-safe, and waits for nothing.

    A thread of its own writes the counts, at most once a second. Not promised: the counts of a process that is killed
    within that second.

    Args:
        wiring: of the bridge.
    """

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._repetitions = Repetitions()
        self._counts: Counter[str] = Counter()
        self._process: str | None = None
        self._written_at = -_WRITE_SECONDS
        self._is_waiting = False
        self._lock = threading.Lock()

    def drop_forged(self) -> None:
        """Drop a message whose signature does not fit, and that does not claim to come from elsewhere."""
        if count := self._count(FORGED):
            logger.warning(
                "dropped %s of bridge %s: forged or damaged, or signed with a key that is no longer accepted. Find out "
                "who else writes to the broker",
                _messages(count),
                self._wiring.name,
                extra={"event": "envelope_dropped"},
            )

    def drop_tampered(self, what: str) -> None:
        """Drop a message whose envelope may be right, and that has something else which no listener sends."""
        if count := self._count(TAMPERED):
            logger.warning(
                "dropped %s of bridge %s: the %s of the last one was changed after signing. Somebody else writes to "
                "the broker, or a signal handler of this app changes messages",
                _messages(count),
                self._wiring.name,
                what,
                extra={"event": "message_tampered"},
            )

    def drop_misdirected(self) -> None:
        """Drop a valid envelope that came to another handler's task."""
        if count := self._count(MISDIRECTED):
            logger.warning(
                "dropped %s of bridge %s that came to the task of another handler",
                _messages(count),
                self._wiring.name,
                extra={"event": "envelope_misdirected"},
            )

    def drop_malformed(self) -> None:
        """Drop a message that is none of Celery's."""
        if count := self._count(MALFORMED):
            logger.warning(
                "dropped %s in the queues of bridge %s: not a message of Celery's. Find out who else writes to the "
                "broker",
                _messages(count),
                self._wiring.name,
                extra={"event": "message_malformed"},
            )

    def drop_foreign(self, origin: object) -> None:
        """Drop a message of another installation or environment of this bridge. The sender's name is a claim."""
        process = parse_process(origin)
        if count := self._count(FOREIGN, process):
            logger.warning(
                "dropped %s of another installation or environment of bridge %s, from process %s as it says: each "
                "takes the other's messages. Give one of the two another name, Bridge(..., name='...'), or a broker "
                "database of its own",
                _messages(count),
                self._wiring.name,
                process or "unknown",
                extra={"event": "foreign_bridge"},
            )

    def drop_moved(self, subscription: str) -> None:
        """Drop a run whose handler listens to other databases here than the leader's does."""
        if count := self._count(FOREIGN, kind=f"moved {subscription}"):
            logger.warning(
                "dropped %s for handler %s of bridge %s: it listens to other databases here than where the listener "
                "runs. Deploy the same code and settings to listener and workers. %s",
                _messages(count),
                subscription,
                self._wiring.name,
                ways_out(),
                extra={"event": "handler_moved"},
            )

    def _count(self, reason: str, process: str | None = None, *, kind: str = "") -> int:
        """Count a message for the state. Return how many a record of its kind has to name now."""
        with self._lock:
            self._counts[reason] += 1
            self._process = process or self._process
            if not self._is_waiting:
                self._is_waiting = True
                self._schedule_write(max(0.0, self._written_at + _WRITE_SECONDS - time.monotonic()))
        return self._repetitions.add(kind or reason)

    def _schedule_write(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._write)
        timer.daemon = True
        timer.start()

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
                self._counts.update(counts)  # written with the next one
            logger.debug("could not count dropped messages: %s", brief(error))


def _messages(count: int) -> str:
    return number(count, "message", "messages")
