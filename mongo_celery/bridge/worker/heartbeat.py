"""
Heartbeats: one thread of a worker process that renews the claims of running handlers.

A beat is first due one period after the *start* of the claim call, so that a slow answer shortens the
first pause, not the safety. A beat that fails is tried again a quarter of a period later; one that is
refused is final: the claim belongs to somebody else, and the execution's later writes will be refused
too. Handlers that end within a period cost no write.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from pymongo.errors import PyMongoError

from mongo_celery.bridge.state.claims import Claim, Claims

logger = logging.getLogger("mongo_celery.worker")

_IDLE_SECONDS = 30.0


@dataclass(slots=True, eq=False)
class Heartbeat:
    """
    The heartbeat of one claim.

    Attributes:
        lost: whether the claim was found to belong to somebody else.
    """

    claim: Claim
    due: float
    lost: bool = False


class Heartbeats:
    """The heartbeats of one process. Thread-safe; the thread starts with the first claim."""

    def __init__(self, claims: Claims, ttl: float) -> None:
        self._claims = claims
        self._period = ttl / 3
        self._beats: dict[int, Heartbeat] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def begin(self, claim: Claim, started: float) -> Heartbeat:
        """
        Keep a claim alive from now on.

        Args:
            claim: what to renew.
            started: monotonic time at which the claim call began.
        """
        beat = Heartbeat(claim, started + self._period)
        with self._changed:
            self._beats[id(beat)] = beat
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mongo_celery-heartbeat", daemon=True)
                self._thread.start()
        return beat

    def end(self, beat: Heartbeat) -> None:
        """Renew it no more; a renewal may still be under way, and changes nothing once the claim has ended."""
        with self._changed:
            self._beats.pop(id(beat), None)

    def _run(self) -> None:
        idle_since = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait(self._period / 4)
                now = time.monotonic()
                if self._beats:
                    idle_since = now
                elif now - idle_since > _IDLE_SECONDS:
                    self._thread = None
                    return
                due = [beat for beat in self._beats.values() if beat.due <= now]
            for beat in due:
                try:
                    self._beat(beat)
                except Exception:  # an end of this thread would let every claim of the process lapse
                    logger.exception(
                        "heartbeat of %s failed", beat.claim.partition_id, extra={"event": "heartbeat_crashed"}
                    )
                    beat.due = time.monotonic() + self._period / 4

    def _beat(self, beat: Heartbeat) -> None:
        started = time.monotonic()
        try:
            alive = self._claims.extend(beat.claim)
        except PyMongoError as error:
            logger.warning(
                "heartbeat of %s failed, trying again: %s",
                beat.claim.partition_id,
                error,
                extra={"event": "heartbeat_failed"},
            )
            beat.due = time.monotonic() + self._period / 4
            return
        beat.due = started + self._period
        if not alive and self._is_watched(beat):
            beat.lost = True
            self.end(beat)
            logger.warning(
                "claim of %s (fence %d) was taken over while its handler runs",
                beat.claim.partition_id,
                beat.claim.fence,
                extra={"event": "claim_lost"},
            )

    def _is_watched(self, beat: Heartbeat) -> bool:
        """An execution that has just ended clears its own claim; that is no loss."""
        with self._changed:
            return id(beat) in self._beats
