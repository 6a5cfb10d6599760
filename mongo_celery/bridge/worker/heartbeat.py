"""
Heartbeats: one thread of a worker process renews the claims of running handlers.

One write renews all claims that are due, so their number hardly affects its duration. A beat is first due one period
after the *start* of the claim call, so a slow answer shortens the first pause but not the safety. A failed beat is
repeated a quarter of a period later. A refused beat is final: the claim belongs to another execution, and later writes
of this one will be refused. Handlers that end within a period cost no write.

If a write takes too long, the next one is smaller: one locked document must not delay the others.

When a claim lapses, its next owner counts a crash of the change. This thread proves that the process lives, so it
withdraws crashes that were counted meanwhile:

| event | consequence |
|---|---|
| a heartbeat is refused | the crash is withdrawn |
| an execution ends after its claim may have lapsed | the crash is withdrawn if there is one |
| this process itself replaces the claim | no crash is counted |
| the handler itself kept the whole process busy for longer than the claim | none: the handler caused it |

A withdrawal is repeated after any error of MongoDB until it is answered, for as long as the process lives. At most the
last 1000 wait. An execution with an unwritten outcome has not ended: its claim is renewed as soon as MongoDB answers.
If its unwritten outcome is progress, the claim is not renewed, because its first change may differ by then. If that
claim lapses, the crash is withdrawn when the progress is settled.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from pymongo.errors import InvalidOperation, PyMongoError

from mongo_celery.bridge.state.claims import Claim, Claims, name_place
from mongo_celery.bridge.worker.lifetime import is_leaving
from mongo_celery.mongo.verdicts import brief, traceback_text
from mongo_celery.quantities import number
from mongo_celery.visible import Lines

logger = logging.getLogger("mongo_celery.worker")

_IDLE_SECONDS = 30.0
_LARGEST_WRITE = 2048
_SMALLEST_WRITE = 32
_FAILURES_A_TURN = 2
_WITHDRAWALS_MAX = 1000
_OWN_WORK = 0.1
"""Least share of its own work in a busy process's delay, even on a crowded machine. A frozen process has none."""


@dataclass(slots=True, eq=False)
class Heartbeat:
    """
    The heartbeat of one claim.

    Attributes:
        due: monotonic time of the next renewal. Infinite for a claim that is not renewed.
        renewed: monotonic start of the last call known to have renewed it.
        ttl: seconds for which the claim lives after that.
        leaving: True if the claim is marked as belonging to a worker that is shutting down.
        charged: True if the handler itself would cause its lapse.
        withdraw: withdraws the crash that was or will be counted for its lapse. Returns False if there is none.
        lost: True if the claim belongs to another execution.
    """

    claim: Claim
    due: float
    renewed: float
    ttl: float
    withdraw: Callable[[], bool]
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
        self._withdrawals: deque[Heartbeat] = deque(maxlen=_WITHDRAWALS_MAX)
        self._write_size = _LARGEST_WRITE
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def begin(
        self,
        claim: Claim,
        started: float,
        *,
        ttl: float | None = None,
        renew: bool = True,
        withdraw: Callable[[str], bool] | None = None,
    ) -> Heartbeat:
        """
        Keep a claim alive from now on.

        Args:
            claim: the claim to renew.
            started: monotonic time at which the claim call began.
            ttl: seconds for which the claim lives. By default those of the bridge's claims.
            renew: False for a claim that is long enough already: any write would abort its transaction.
            withdraw: withdraws a crash that was counted for an owner. By default that of the partition.

        Raises:
            RuntimeError: the process can start no thread. Nothing renews the claim.
        """
        end = partial(withdraw or partial(self._claims.withdraw, claim.partition_id), claim.owner)
        beat = Heartbeat(claim, started + self._period if renew else float("inf"), started, ttl or self._ttl, end)
        with self._changed:
            self._start_thread()
            self._beats[id(beat)] = beat
        return beat

    def end(self, beat: Heartbeat) -> None:
        """Stop renewing a claim. A renewal in flight changes nothing after the claim has ended."""
        with self._changed:
            self._beats.pop(id(beat), None)
        if not beat.lost and not beat.charged and time.monotonic() - beat.renewed > beat.ttl:
            self.withdraw(beat)

    def living(self, partition_id: str) -> list[str]:
        """Return owners in this process whose lapsed claims of a partition are not crashes."""
        with self._changed:
            beats = [*self._beats.values()]
        if not beats:
            return []
        return [beat.claim.owner for beat in beats if beat.claim.partition_id == partition_id and not beat.charged]

    def withdraw(self, beat: Heartbeat) -> None:
        """Withdraw the crash if a claim's lapse was counted or will be."""
        with self._changed:
            self._withdrawals.append(beat)
            with suppress(RuntimeError):  # the process can start no thread, and the next claim tries again
                self._start_thread()

    def _start_thread(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="mongo_celery-heartbeat", daemon=True)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        idle_since = time.monotonic()
        while True:
            self._wait()
            with self._changed:
                now = time.monotonic()
                if self._beats or self._withdrawals:
                    idle_since = now
                elif now - idle_since > _IDLE_SECONDS:
                    self._thread = None
                    return
            try:
                self._renew(now)
                self._withdraw_crashes()
            except Exception as error:  # noqa: BLE001 - an end of this thread would let every claim of the process lapse
                logger.error(
                    "heartbeats failed: %s", Lines(traceback_text(error)), extra={"event": "heartbeat_crashed"}
                )
                with self._changed:
                    self._postpone([beat for beat in self._beats.values() if beat.due <= now])

    def _wait(self) -> None:
        """Wait a quarter of a period. If a handler blocked the process for much longer, a lapse counts as its crash."""
        before, used = time.monotonic(), time.process_time()
        with self._changed:
            self._changed.wait(self._period / 4)
            late = time.monotonic() - before - self._period / 4
            if time.process_time() - used > late * _OWN_WORK:
                for beat in self._beats.values():
                    beat.charged |= late > beat.ttl - self._period

    def _renew(self, now: float) -> None:
        """Renew due claims, the oldest first. A claim that must be marked is due immediately."""
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
        """Renew some claims with one write. Return False if it got no answer."""
        started = time.monotonic()
        try:
            lost = set(self._claims.extend([beat.claim for beat in beats], leaving=leaving))
        except PyMongoError as error:
            logger.warning(
                "the worker could not renew %s, and tries again: %s",
                number(len(beats), "claim", "claims"),
                brief(error),
                extra={"event": "heartbeat_failed"},
            )
            self._claims.renew_connections(error)
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

    def _withdraw_crashes(self) -> None:
        """Withdraw crashes that were counted for living owners. Stop at an error, which would delay heartbeats."""
        for _ in range(len(self._withdrawals)):
            beat = self._withdrawals.popleft()
            try:
                is_withdrawn = beat.withdraw()
            except InvalidOperation:  # the client was closed: this process cannot withdraw any more
                self._withdrawals.clear()
                return
            except PyMongoError as error:
                self._claims.renew_connections(error)
                self._withdrawals.append(beat)
                logger.warning(
                    "a crash was counted for partition %s although this worker is alive. The worker could not "
                    "withdraw the crash, and tries again: %s",
                    name_place(beat.claim.partition_id),
                    brief(error),
                    extra={"event": "withdrawal_failed"},
                )
                return
            if is_withdrawn:
                logger.info(
                    "the claim of partition %s lapsed, but is not counted as a crash, because this worker is alive",
                    name_place(beat.claim.partition_id),
                    extra={"event": "crash_withdrawn"},
                )

    def _postpone(self, beats: list[Heartbeat]) -> None:
        for beat in beats:
            beat.due = time.monotonic() + self._period / 4

    def _lose(self, beat: Heartbeat) -> None:
        with self._changed:
            if self._beats.pop(id(beat), None) is None:  # it has just ended, and removed its own claim: not lost
                return
        beat.lost = True
        logger.warning(
            "the claim of partition %s (fencing token %d) has ended while its handler runs: a worker or a command has "
            "taken it over. This worker's result will be refused",
            name_place(beat.claim.partition_id),
            beat.claim.fencing_token,
            extra={"event": "claim_lost"},
        )
        if not beat.charged:
            self.withdraw(beat)
