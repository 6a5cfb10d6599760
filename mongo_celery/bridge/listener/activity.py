"""
The activity of one process's listener of a bridge: whether its loop turns, whether it leads, and what it has counted.

Written by the listener's own threads, read by any: nobody waits for anybody, and a reader may see one number newer than
another. Counts begin at 0 with the process, continue over all its terms, and never go back. What of a run only its
worker knows, the times of its claim, its handler and its commit, comes with the partition's image, which the listener
reads anyhow before it sends the next run. So nothing is written, and nothing is asked, for their sake.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from mongo_celery.bridge.listener.dispatcher import Dispatch
from mongo_celery.bridge.listener.partition import Partition
from mongo_celery.bridge.state.partitions import Image

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Upper ends of the latencies that are counted separately, in seconds."""

Role = Literal["starting", "standing by", "leading", "failed"]

RATE_SECONDS = 10.0
"""Time over which a rate is measured."""

STALLED_TTLS = 3
STALLED_SECONDS = 60.0
"""A loop that has not turned for so long, or for three ttls of the lease, hangs: each of its calls ends sooner."""


class Latencies:
    """Durations of something that happens often: counts by bucket, the last one without an end, and their sum."""

    def __init__(self) -> None:
        self.sum = 0.0
        self._counts = [0] * (len(BUCKETS) + 1)

    def add(self, seconds: float) -> None:
        """One more. What two clocks make negative took no time."""
        seconds = max(seconds, 0.0)
        self._counts[bisect_left(BUCKETS, seconds)] += 1
        self.sum += seconds

    @property
    def counts(self) -> list[int]:
        """Those of each bucket alone."""
        return list(self._counts)


class HandlerActivity:
    """
    The activity of one handler since the process started, while it led.

    Attributes:
        dispatched: changes in the runs that were sent, those that were sent again included.
        dispatched_again: changes in the runs that were sent again, since nothing was seen of them.
        committed: changes that positions have passed, whatever became of them.
        retries: attempts after which a handler asked for another.
        crashes: attempts that ended without an outcome.
        waits: attempts that met an outage of MongoDB or the broker.
        stored: changes that were stored, since their partition was blocked.
        undeliverable: changes that cannot be given to the handler.
        claim: from the sending of a run to its claim by a worker.
        handler: from the claim of a run to the record that its handler succeeded, by the worker's clock.
        commit: from that record to the commit.
    """

    def __init__(self) -> None:
        self.dispatched = self.dispatched_again = self.committed = 0
        self.retries = self.crashes = self.waits = 0
        self.stored = self.undeliverable = 0
        self.claim, self.handler, self.commit = Latencies(), Latencies(), Latencies()
        self._samples: tuple[tuple[float, int], ...] = ()

    def sample_rate(self, now: float) -> float | None:
        """Return the changes that were committed a second, over the last ten seconds; None before the second call."""
        kept = [each for each in self._samples if now - each[0] < RATE_SECONDS]
        began, first = kept[0] if kept else (now, self.committed)
        if not kept or now - kept[-1][0] >= 1:
            self._samples = (*kept, (now, self.committed))
        return round((self.committed - first) / (now - began), 1) if now - began >= 1 else None

    def note_sent(self, dispatch: Dispatch, *, again: bool) -> None:
        """Count the changes of a run that was published."""
        run = dispatch.run
        if run.dead_letter is not None:  # a dead letter that is replayed moves no position
            return
        count = run.last - run.first + 1
        self.dispatched += count
        self.dispatched_again += count * again

    def observe(self, partition: Partition, image: Image, seen: float) -> None:
        """Compare a partition with a newer image of it, which was there at `seen`."""
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
            if image.live and image.committed + 1 in numbers:  # it has recorded how far it is, and continues
                return
            partition.sent = (range(0), 0.0)
            self._measure(image, sent if before.committed + 1 in numbers else None, seen)

    def add_counts(self, counted: list[int]) -> None:
        """Add the stored and undeliverable changes that a subscription has counted. It counts from 0 again."""
        self.stored += counted[0]
        self.undeliverable += counted[1]
        counted[:] = 0, 0

    def _measure(self, image: Image, sent: float | None, seen: float) -> None:
        """Times by one clock each: the server's from claim to commit, and mine from sending to reading."""
        times, read = read_times(image), image.read_at
        if times is None or image.ran is None:
            return
        seconds, whole = times
        self.handler.add(seconds)
        self.commit.add(whole - seconds)
        if sent is not None and isinstance(read, datetime):
            self.claim.add(seen - sent - (read - image.ran["claimed"]).total_seconds())


def read_times(image: Image) -> tuple[float, float] | None:
    """Of the last run of a partition, the seconds of its handler, and those from its claim to its commit, if known."""
    ran: Mapping[str, Any] = image.ran or {}
    took, claimed, ended = ran.get("took"), ran.get("claimed"), ran.get("at")
    if ran.get("last") != image.committed:  # it was passed over
        return None
    if not (isinstance(took, int) and isinstance(claimed, datetime) and isinstance(ended, datetime)):
        return None
    return took / 1000, (ended - claimed).total_seconds()


def _growth(before: int, now: int) -> int:
    return max(now - before, 0)


def _waits(image: Image) -> int:
    return int(image.waiting.get("count", 0)) if image.waiting is not None else 0


class Activity:
    """
    The activity of the listener of one bridge in this process.

    Attributes:
        bridge: its name.
        role: `starting`, `standing by`, `leading`, or `failed` until it is started again.
        takeovers: how often this process has begun to lead.
        sweeps: how often all partitions were compared with what is out.
        reopenings: how often the stream had to be opened again.
        handlers: by name.

    Args:
        bridge: its name.
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
        """The loop turns. The next time within so many seconds more than usual."""
        self._alive_until = time.monotonic() + self._stalled_after + pause

    def note_standby(self) -> None:
        """Another process leads, or the lease is about to be free."""
        self.role = "standing by"

    def note_failure(self, pause: float) -> None:
        """The listener has failed, and is started again after a pause. Nothing hangs meanwhile."""
        self.role = "failed"
        self.note_turn(pause)

    @property
    def is_ready(self) -> bool:
        """Return True if it leads or stands by, and its loop works."""
        return self.is_alive and self.role in ("leading", "standing by")

    @property
    def is_alive(self) -> bool:
        """Return True if the loop has turned lately, or is known to pause."""
        return time.monotonic() < self._alive_until

    def of(self, handler: str) -> HandlerActivity:
        """Return the activity of a handler, also of one that was registered late."""
        found = self.handlers.get(handler)
        if found is None:
            found = self.handlers[handler] = HandlerActivity()
        return found

    def note_term_begin(self) -> None:
        """This process leads."""
        self.takeovers += 1
        self.role = "leading"
        self._reopenings_of_term = 0

    def note_term_end(self) -> None:
        """It leads no longer."""
        self.role = "standing by"

    def note_sweep(self, reopenings: int) -> None:
        """All partitions were read, and so often the stream was opened again in this term."""
        self.sweeps += 1
        self.reopenings += _growth(self._reopenings_of_term, reopenings)
        self._reopenings_of_term = reopenings
