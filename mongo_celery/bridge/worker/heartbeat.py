"""
Heartbeats: one thread of a worker process that renews the claims of running handlers.

All that are due are renewed by one write, so that their number does not matter to the time it takes. A beat is
first due one period after the *start* of the claim call, so that a slow answer shortens the first pause, not the
safety. A beat that fails is tried again a quarter of a period later. One that is refused is final: the claim belongs
to somebody else, and the execution's later writes will be refused too. Handlers that end within a period cost no
write.

A write that takes too long is made smaller the next time: one document that is locked must not hold up the others.

When a claim lapses, its next owner counts a crash of the change. This thread is the proof that the process lives, so
it withdraws crashes that were counted meanwhile:

| what happened | what follows |
|---|---|
| a heartbeat is refused | the crash is withdrawn |
| an execution ends after its claim may have lapsed | the crash is withdrawn if there is one |
| this process itself replaces the claim | no crash is counted |
| the handler itself kept the whole process busy for longer than the claim | nothing: this is the handler's doing |

A withdrawal is asked for until it is answered, for as long as the process lives. An execution that still owes its
outcome has not ended: its claim is renewed as soon as MongoDB answers. Only where it owes its progress is the claim not
renewed, since it may have another first change by then: if it lapses, that is withdrawn when the progress is settled.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

from pymongo.errors import PyMongoError

from mongo_celery.bridge.state.claims import Claim, Claims
from mongo_celery.bridge.worker.lifetime import is_leaving
from mongo_celery.mongo.verdicts import brief, traceback_text
from mongo_celery.visible import Lines

logger = logging.getLogger("mongo_celery.worker")

_IDLE_SECONDS = 30.0
_LARGEST_WRITE = 2048
_SMALLEST_WRITE = 32
_FAILURES_A_TURN = 2
_CHARGES_MAX = 1000
_OWN_WORK = 0.1
"""Of the time that it was late: a frozen process works nothing, a busy one has this even on a crowded machine."""


@dataclass(slots=True, eq=False)
class Heartbeat:
    """
    The heartbeat of one claim.

    Attributes:
        due: monotonic time of the next renewal. Infinite for a claim that is not renewed.
        renewed: monotonic start of the last call that was seen to renew it.
        ttl: seconds for which it then lives.
        leaving: whether the claim is marked as one of a worker that was told to end.
        charged: whether its lapse would be the handler's own doing.
        lost: whether the claim was found to belong to somebody else.
    """

    claim: Claim
    due: float
    renewed: float
    ttl: float
    leaving: bool = False
    charged: bool = False
    lost: bool = False


class Heartbeats:
    """The heartbeats of one process. Thread-safe. The thread starts with the first claim."""

    def __init__(self, claims: Claims, ttl: float) -> None:
        self._claims = claims
        self._ttl = ttl
        self._period = ttl / 3
        self._beats: dict[int, Heartbeat] = {}
        self._charges: deque[tuple[str, str]] = deque(maxlen=_CHARGES_MAX)
        self._write_size = _LARGEST_WRITE
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def begin(self, claim: Claim, started: float, *, ttl: float | None = None, renew: bool = True) -> Heartbeat:
        """
        Keep a claim alive from now on.

        Args:
            claim: what to renew.
            started: monotonic time at which the claim call began.
            ttl: seconds for which the claim lives. Those of the bridge's claims by default.
            renew: false for a claim that is long enough by itself: any write would abort its transaction.
        """
        beat = Heartbeat(claim, started + self._period if renew else float("inf"), started, ttl or self._ttl)
        with self._changed:
            self._beats[id(beat)] = beat
            if self._thread is None:
                self._start()
        return beat

    def end(self, beat: Heartbeat) -> None:
        """Renew it no more. A renewal may still be under way, and changes nothing once the claim has ended."""
        with self._changed:
            self._beats.pop(id(beat), None)
        if not beat.lost and not beat.charged and time.monotonic() - beat.renewed > beat.ttl:
            self.withdraw(beat.claim)

    def living(self, partition_id: str) -> list[str]:
        """Owners of this process whose claims of a partition, if they have lapsed, are no crashes."""
        with self._changed:
            beats = [*self._beats.values()]
        if not beats:
            return []
        return [beat.claim.owner for beat in beats if beat.claim.partition_id == partition_id and not beat.charged]

    def withdraw(self, claim: Claim) -> None:
        """See to it that the lapse of a claim is not charged if it was replaced."""
        with self._changed:
            self._charges.append((claim.partition_id, claim.owner))
            self._start()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mongo_celery-heartbeat", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        idle_since = time.monotonic()
        while True:
            self._wait()
            with self._changed:
                now = time.monotonic()
                if self._beats or self._charges:
                    idle_since = now
                elif now - idle_since > _IDLE_SECONDS:
                    self._thread = None
                    return
            try:
                self._renew(now)
                self._withdraw_all()
            except Exception as error:  # noqa: BLE001 - an end of this thread would let every claim of the process lapse
                logger.error(
                    "heartbeats failed: %s", Lines(traceback_text(error)), extra={"event": "heartbeat_crashed"}
                )
                with self._changed:
                    self._postpone([beat for beat in self._beats.values() if beat.due <= now])

    def _wait(self) -> None:
        """A quarter of a period. Whoever made it much longer by work of this process will be charged."""
        before, used = time.monotonic(), time.process_time()
        with self._changed:
            self._changed.wait(self._period / 4)
            late = time.monotonic() - before - self._period / 4
            if time.process_time() - used > late * _OWN_WORK:
                for beat in self._beats.values():
                    beat.charged |= late > beat.ttl - self._period

    def _renew(self, now: float) -> None:
        """Renew what is due, the oldest first. What has to be marked is due at once."""
        leaving = is_leaving()
        with self._changed:
            due = [
                beat
                for beat in self._beats.values()
                if beat.due <= now or (leaving and not beat.leaving and beat.due < float("inf"))
            ]
        due.sort(key=lambda beat: beat.renewed)
        failures = 0
        while due and failures < _FAILURES_A_TURN:
            size = self._write_size
            chosen, due = due[:size], due[size:]
            failures += not self._renew_some(chosen, leaving=leaving)

    def _renew_some(self, beats: list[Heartbeat], *, leaving: bool) -> bool:
        """One write. False where it got no answer."""
        started = time.monotonic()
        try:
            lost = set(self._claims.extend([beat.claim for beat in beats], leaving=leaving))
        except PyMongoError as error:
            logger.warning(
                "heartbeat of %d claims failed, trying again: %s",
                len(beats),
                brief(error),
                extra={"event": "heartbeat_failed"},
            )
            self._postpone(beats)
            if error.timeout:
                self._write_size = max(min(self._write_size, len(beats)) // 8, _SMALLEST_WRITE)
            return False
        self._write_size = min(self._write_size * 2, _LARGEST_WRITE)
        for beat in beats:
            beat.due = started + self._period
            if beat.claim in lost:
                self._lose(beat)
            else:
                beat.renewed, beat.leaving, beat.charged = started, leaving, False
        return True

    def _postpone(self, beats: list[Heartbeat]) -> None:
        for beat in beats:
            beat.due = time.monotonic() + self._period / 4

    def _lose(self, beat: Heartbeat) -> None:
        with self._changed:
            if self._beats.pop(id(beat), None) is None:  # it has just ended, and cleared its own claim: no loss
                return
        beat.lost = True
        logger.warning(
            "claim of %s (fencing token %d) was taken over while its handler runs",
            beat.claim.partition_id,
            beat.claim.fencing_token,
            extra={"event": "claim_lost"},
        )
        if not beat.charged:
            self.withdraw(beat.claim)

    def _withdraw_all(self) -> None:
        """Withdraw the crashes that were counted for living owners. The first one without an answer ends the turn."""
        for _ in range(len(self._charges)):
            partition_id, owner = self._charges[0]
            try:
                if self._claims.withdraw(partition_id, owner):
                    logger.info(
                        "the lapse of a claim of %s is no crash: its worker lives",
                        partition_id,
                        extra={"event": "crash_withdrawn"},
                    )
            except PyMongoError:
                return  # the next turn asks again
            self._charges.popleft()
