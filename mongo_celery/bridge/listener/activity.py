"""
The activity of a bridge's listener in one process: the state of its loop, its role, and its counters.

The listener's own threads write it, and any thread reads it. No thread waits, and a reader may see one number that is
newer than another. Counters start at 0 with the process, continue when the listener leads again, and never decrease.
Workers store the times of claim, handler and commit in the partition, which the listener reads anyway before it sends
the next run. So measuring needs no additional writes or reads.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from mongo_celery.bridge.listener.partition import Partition
from mongo_celery.bridge.state.partitions import Image
from mongo_celery.bridge.worker.envelope import Run

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Upper bounds of the counted latency buckets, in seconds."""

Role = Literal["starting", "standing by", "leading", "failed"]

RATE_SECONDS = 10.0
"""Seconds over which a rate is measured."""

AGAIN_SECONDS, AGAIN_PERIODS = 20.0, 3
"""If runs are sent again in this many periods in a row, a worker takes messages without a claim."""

STALLED_TTLS = 3
STALLED_SECONDS = 60.0
"""A loop without a turn for this time, or for three ttls of the lease, hangs. Each of its calls ends sooner."""


class Latencies:
    """Durations of a frequent event: counts by bucket, the last one without an upper bound, and their sum."""

    def __init__(self) -> None:
        self.sum = 0.0
        self._counts = [0] * (len(BUCKETS) + 1)

    def add(self, seconds: float) -> None:
        """Add a duration. A negative one, from two clocks, counts as 0."""
        seconds = max(seconds, 0.0)
        self._counts[bisect_left(BUCKETS, seconds)] += 1
        self.sum += seconds

    @property
    def counts(self) -> list[int]:
        """Return the count of each bucket."""
        return list(self._counts)


class HandlerActivity:
    """
    The activity of one handler since the process started, while this process led.

    Attributes:
        dispatched: changes in sent runs, including repeated ones.
        dispatched_again: changes in runs that were sent again because they had no visible effect.
        committed: changes that positions have passed, whatever their outcome.
        retries: attempts after which a handler requested another.
        crashes: attempts that ended without an outcome.
        waits: attempts that met an outage of MongoDB or the broker.
        stored: changes that were stored because their partition was blocked.
        undeliverable: changes that cannot be given to the handler.
        claim: time from the sending of a run to its claim by a worker.
        handler: time from the claim of a run to the record of its success, by the worker's clock.
        commit: time from that record to the commit.
    """

    def __init__(self) -> None:
        self.dispatched = self.dispatched_again = self.committed = 0
        self.retries = self.crashes = self.waits = 0
        self.stored = self.undeliverable = 0
        self.claim, self.handler, self.commit = Latencies(), Latencies(), Latencies()
        self._samples: tuple[tuple[float, int], ...] = ()
        self._again: tuple[int, ...] = ()

    def sample_rate(self, now: float) -> float | None:
        """Return the changes committed per second, over the last ten seconds. None before the second call."""
        kept = [each for each in self._samples if now - each[0] < RATE_SECONDS]
        began, first = kept[0] if kept else (now, self.committed)
        if not kept or now - kept[-1][0] >= 1:
            self._samples = (*kept, (now, self.committed))
        return round((self.committed - first) / (now - began), 1) if now - began >= 1 else None

    def note_sent(self, run: Run, now: float, partition: Partition) -> None:
        """Count the changes of a published run. The partition has its state from before."""
        if run.dead_letter is not None:  # the replay of a dead letter moves no position
            return
        count = run.last - run.first + 1
        self.dispatched += count
        self.dispatched_again += count * partition.is_repeated
        if partition.is_repeated and partition.image.claim is None:  # else a worker has claimed it, and crashed
            self._again = tuple(sorted({*self._again, int(now / AGAIN_SECONDS)})[-AGAIN_PERIODS - 1 :])

    def is_sending_again(self, now: float) -> bool:
        """Return True if unclaimed runs were sent again in each of the last complete periods."""
        period = int(now / AGAIN_SECONDS)
        return {*range(period - AGAIN_PERIODS, period)} <= {*self._again}

    def observe(self, partition: Partition, image: Image, seen: float) -> None:
        """Count the differences between a partition and a newer image, which was read at `seen`."""
        before = partition.image
        moved = image.committed > before.committed
        counts = (image.retries, image.crashes, image.waiting)
        if not moved and counts == (before.retries, before.crashes, before.waiting):
            return
        if not moved or counts != (0, 0, None):
            self.retries += _growth(0 if moved else before.retries, image.retries)
            self.crashes += _growth(0 if moved else before.crashes, image.crashes)
            self.waits += _growth(0 if moved else _waits(before), _waits(image))
        if moved:
            self.committed += image.committed - before.committed
            numbers, sent = partition.sent
            if image.live and image.committed + 1 in numbers:  # it has recorded its progress, and continues
                return
            partition.sent = (range(0), 0.0)
            self._measure(image, sent if before.committed + 1 in numbers else None, seen)

    def add_counts(self, counted: list[int]) -> None:
        """Add a subscription's counts of stored and undeliverable changes. Its counters then begin at 0."""
        self.stored += counted[0]
        self.undeliverable += counted[1]
        counted[:] = 0, 0

    def _measure(self, image: Image, sent: float | None, seen: float) -> None:
        """Measure each duration with one clock: the server's from claim to commit, ours from sending to reading."""
        ran: Mapping[str, Any] = image.ran or {}
        took, claimed, ended, read = ran.get("took"), ran.get("claimed"), ran.get("at"), image.read_at
        if ran.get("last") != image.committed:  # it was skipped
            return
        if not (isinstance(took, int) and isinstance(claimed, datetime) and isinstance(ended, datetime)):
            return
        seconds = took / 1000
        self.handler.add(seconds)
        self.commit.add((ended - claimed).total_seconds() - seconds)
        if sent is not None and isinstance(read, datetime):
            self.claim.add(seen - sent - (read - claimed).total_seconds())


def _growth(before: int, now: int) -> int:
    return max(now - before, 0)


def _waits(image: Image) -> int:
    return int(image.waiting.get("count", 0)) if image.waiting is not None else 0


class Activity:
    """
    The activity of the listener of one bridge in this process.

    Attributes:
        bridge: name of the bridge.
        role: `starting`, `standing by`, `leading`, or `failed` until it is started again.
        takeovers: number of terms that this process has begun.
        sweeps: number of comparisons of all partitions with the runs in flight.
        reopenings: number of times that the stream was opened again.
        handlers: the handlers by name.

    Args:
        bridge: name of the bridge.
        handlers: names of its handlers.
        lease_ttl: seconds.
    """

    def __init__(self, bridge: str, handlers: Sequence[str], lease_ttl: float) -> None:
        self.bridge = bridge
        self.role: Role = "starting"
        self.takeovers = self.sweeps = self.reopenings = 0
        self.handlers = {name: HandlerActivity() for name in handlers}
        self._stalled_after = max(STALLED_TTLS * lease_ttl, STALLED_SECONDS)
        self._alive_until = time.monotonic() + self._stalled_after
        self._reopenings_of_term = 0

    def note_turn(self, pause: float = 0.0) -> None:
        """Note a turn of the loop. The next one is due within this additional pause."""
        self._alive_until = time.monotonic() + self._stalled_after + pause

    def note_standby(self) -> None:
        """Note that another process leads, or that the lease will soon be free."""
        self.role = "standing by"

    def note_failure(self, pause: float) -> None:
        """Note that the listener failed, and restarts after a pause. Meanwhile nothing counts as hanging."""
        self.role = "failed"
        self.note_turn(pause)

    @property
    def is_ready(self) -> bool:
        """Return True if the listener leads or stands by, and its loop works."""
        return self.is_alive and self.role in ("leading", "standing by")

    @property
    def is_alive(self) -> bool:
        """Return True if the loop has made a turn recently, or is in a planned pause."""
        return time.monotonic() < self._alive_until

    def of(self, handler: str) -> HandlerActivity:
        """Return the activity of a handler, even if it was registered late."""
        found = self.handlers.get(handler)
        if found is None:
            found = self.handlers[handler] = HandlerActivity()
        return found

    def note_term_begin(self) -> None:
        """Note that this process leads."""
        self.takeovers += 1
        self.role = "leading"
        self._reopenings_of_term = 0

    def note_sweep(self, reopenings: int) -> None:
        """Count a sweep of all partitions. Store the number of times that the stream was opened again in this term."""
        self.sweeps += 1
        self.reopenings += _growth(self._reopenings_of_term, reopenings)
        self._reopenings_of_term = reopenings
