"""Dropped messages of one worker process: logged, and counted in the state, however many come."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from pymongo.errors import PyMongoError

from mongo_celery.bridge.state.drops import FOREIGN, FORGED, MISDIRECTED, TAMPERED
from mongo_celery.mongo.verdicts import brief

if TYPE_CHECKING:
    from mongo_celery.bridge.state.drops import Drops

logger = logging.getLogger("mongo_celery.worker")

_WRITE_SECONDS = 1.0
_COMPLAINT_SECONDS = 30.0
_SENDER_CHARS = 200


def named_by_itself(sender: object) -> str | None:
    """What a message says of its sender, fit for a log and for the state, whatever it is."""
    return "".join(filter(str.isprintable, str(sender)[:_SENDER_CHARS])) or None if sender else None


class Dropper:
    """
    Says what was dropped, and why. Thread-safe.

    Counts are written at once, but at most once a second: a flood of forged messages must not become one of
    writes. Not promised: the count of a process that is killed within that second.
    """

    def __init__(self, bridge: str, drops: Drops) -> None:
        self._bridge = bridge
        self._drops = drops
        self._counts: Counter[str] = Counter()
        self._sender: str | None = None
        self._written_at = self._complained_at = -_COMPLAINT_SECONDS
        self._waiting = False
        self._lock = threading.Lock()

    def forged(self, kind: str) -> None:
        """A signature does not fit, and the message does not claim to come from elsewhere."""
        logger.warning(
            "dropped a %s message for bridge %s that is forged or damaged, or signed with a key that is no longer "
            "accepted",
            kind,
            self._bridge,
            extra={"event": "envelope_dropped"},
        )
        self._count(FORGED)

    def tampered(self, kind: str, task_id: str, what: str) -> None:
        """The envelope may be right; the message around it is not the listener's."""
        logger.warning(
            "dropped %s message %s of bridge %s: its %s is not what a listener sends; somebody writes to the broker, "
            "or a signal handler of this app changes messages",
            kind,
            task_id,
            self._bridge,
            what,
            extra={"event": "message_tampered"},
        )
        self._count(TAMPERED)

    def misdirected(self, partition: str) -> None:
        """A valid envelope came to another handler's task."""
        logger.warning(
            "dropped a message of %s that was sent to another handler",
            partition,
            extra={"event": "envelope_misdirected"},
        )
        self._count(MISDIRECTED)

    def foreign(self, sender: object) -> None:
        """A message of another installation whose bridge has the same name: its sender loses time by each."""
        name = named_by_itself(sender)
        with self._lock:
            complains = time.monotonic() - self._complained_at >= _COMPLAINT_SECONDS
            if complains:
                self._complained_at = time.monotonic()
        if complains:
            logger.error(
                "another app uses the bridge name %s on this broker, with a state database of its own (its listener: "
                "%s): its messages come here and are dropped, and ours go there. Give each bridge a name of its own "
                "with name='...', or each app a broker database of its own",
                self._bridge,
                name or "unknown",
                extra={"event": "foreign_bridge"},
            )
        self._count(FOREIGN, name)

    def _count(self, reason: str, sender: str | None = None) -> None:
        with self._lock:
            self._counts[reason] += 1
            self._sender = sender or self._sender
            if self._waiting:
                return
            pause = self._written_at + _WRITE_SECONDS - time.monotonic()
            if pause > 0:
                self._waiting = True
                timer = threading.Timer(pause, self._write)
                timer.daemon = True
                timer.start()
                return
        self._write()

    def _write(self) -> None:
        with self._lock:
            counts, self._counts = self._counts, Counter()
            self._written_at = time.monotonic()
            self._waiting = False
            sender = self._sender
        if not counts:
            return
        try:
            self._drops.count(counts, sender)
        except PyMongoError as error:
            with self._lock:
                self._counts.update(counts)  # written with the next one
            logger.debug("could not count dropped messages: %s", brief(error))
