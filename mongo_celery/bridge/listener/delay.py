"""
The delay of one handler: how many of a partition's next changes may run now.

The class is pure: its input is places of changes, and times. A change is **due** when the server's clock is `delay`
after the end of the second of its cluster time. So no change runs early, and a run has only due changes. The server's
time comes from the lease, which each renewal stamps.

With coalescing, the handler waits until a partition key is quiet, which by default is a document:

1. A key is **quiet** if its last known change is due. A run has the last known change of each of its keys. No change is
   left out for a later one outside its run.
2. In a busy partition, bursts may overlap without end. If the first change has waited for `SPLIT_BURST` delays, the run
   ends before the first key that is not quiet. Some bursts then take two runs.
3. If the first change has waited for `LONGEST_BURST` delays, all due changes run, quiet or not. So a key that never
   becomes quiet, and the changes after it in its partition, wait for a bounded time.
4. Only as many changes count as fit into one run, because waiting for more could save no call.
5. While the listener catches up, the time is the one that the stream has reached: a later change may still be unread.

A snapshot row has no time of a change, so it is due immediately.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, takewhile

from mongo_celery.bridge.existing import is_existing
from mongo_celery.bridge.options import LONGEST_BURST, SPLIT_BURST
from mongo_celery.bridge.state.backlog import StoredChange
from mongo_celery.bridge.window import PendingChange
from mongo_celery.mongo.oplog import time_of_token

_READING_SECONDS = 0.1


class Delay:
    """
    The delay of one handler in one term.

    Args:
        seconds: the delay.
        coalesces: True if keys must be quiet.
    """

    def __init__(self, seconds: float, *, coalesces: bool) -> None:
        self.coalesces = coalesces
        self._seconds = seconds
        self._ahead = -math.inf
        self._read_to = -math.inf
        self._elapsed = ""

    def observe(self, ahead: float, read_to: float) -> None:
        """
        Take in the times of this turn.

        Args:
            ahead: seconds from this process's monotonic clock to the server's clock. It may be too small.
            read_to: cluster time in seconds that the listener has read while it catches up. Otherwise infinite.
        """
        self._ahead, self._read_to = ahead, read_to

    def elapse(self, place: str) -> None:
        """Let all changes up to a place be due."""
        self._elapsed = max(self._elapsed, place)

    def age(self, place: str, now: float) -> float:
        """Return the age in seconds of the change at a place, by the server's clock. Infinite for a snapshot row."""
        return now + self._ahead - self._due_time(place) + self._seconds

    def server_time(self, at: float) -> float:
        """Return the server's time in seconds at a monotonic time."""
        return at + self._ahead

    def count_due(self, known: Sequence[PendingChange | StoredChange], now: float) -> tuple[int, float]:
        """
        Return how many of a partition's next changes may run now, and the monotonic time for the next question.

        Args:
            known: the next changes, as many as one run may have.
        """
        if math.isinf(self._ahead):
            return 0, now + _READING_SECONDS
        times = [self._due_time(each.data) for each in known]
        at = min(now + self._ahead, self._read_to) if self.coalesces else now + self._ahead
        due = sum(1 for _ in takewhile(lambda time: time <= at, times))
        if not self.coalesces:
            return due, times[0] - self._ahead
        count, next_at = self._count_quiet(known, times, due, at)
        return count, max(next_at - self._ahead, now + _READING_SECONDS)

    def _count_quiet(
        self, known: Sequence[PendingChange | StoredChange], times: Sequence[float], due: int, at: float
    ) -> tuple[int, float]:
        """Return how many of the due changes may run, and the server's time when this number may grow from 0."""
        last = {each.hash: place for place, each in enumerate(known)}
        lasts = [last[each.hash] for each in known]
        ends = [place + 1 for place, reached in enumerate(accumulate(lasts, max)) if reached == place]
        rows = sum(1 for _ in takewhile(math.isinf, times))  # they wait for nothing, and are the beginning of no burst
        begun_at = times[rows] if rows < len(times) else -math.inf
        split_at, all_at = (begun_at + (delays - 1) * self._seconds for delays in (SPLIT_BURST, LONGEST_BURST))
        if due and all_at <= at:
            return due, at
        count = max([rows, *(end for end in ends if end <= due)])
        if not count and split_at <= at:
            count = sum(1 for _ in takewhile(lambda place: place < due, lasts[:due]))
        whole_at, first_at = max(times[: ends[0]]), times[lasts[0]]
        return count, min(whole_at, max(first_at, split_at), all_at)

    def _due_time(self, place: str) -> float:
        """Return the server's time at which a change is due. It is rounded up, because its time has whole seconds."""
        if is_existing(place) or place <= self._elapsed:
            return -math.inf
        time = time_of_token({"_data": place}, None)
        return -math.inf if time is None else time.time + 1 + self._seconds
