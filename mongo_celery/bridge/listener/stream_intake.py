"""
The intake of the leading thread: the items of successive readers, in stream order.

A full buffer is normal with a backlog. Then the stream is not read until workers have made room.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, Any

from bson import Timestamp

from mongo_celery.bridge.listener.pacing import LogThrottle
from mongo_celery.bridge.stream.cursor import Position
from mongo_celery.bridge.stream.items import ChangeEvent, Failed, Item, weigh
from mongo_celery.bridge.stream.reader import StreamReader, StreamStatus
from mongo_celery.mongo.oplog import time_of_token

if TYPE_CHECKING:
    from mongo_celery.bridge.listener.snapshotting import Snapshotting
    from mongo_celery.bridge.listener.storing import Storing
    from mongo_celery.bridge.listener.subscription import Subscription
    from mongo_celery.bridge.stream.source import Scope
    from mongo_celery.bridge.window import Mark
    from mongo_celery.bridge.wiring import Wiring
    from mongo_celery.errors import MongoCeleryError

logger = logging.getLogger("mongo_celery.listener")

_ITEMS_A_TURN = 2000
_ITEMS_A_CHECK = 16
_WEIGHT_AHEAD = 2000
"""Weight limit: 62 MiB and one batch."""
_SILENCE_SECONDS = 5
_FULL_SECONDS = 0.03


class ReadAhead(Queue[Sequence[Item]]):
    """
    Batches that were read but not yet taken in, limited by the weight of their items.

    Args:
        maxsize: the weight from which `put` waits.
    """

    def _init(self, maxsize: int) -> None:
        super()._init(maxsize)
        self._weight = 0

    def _qsize(self) -> int:
        return self._weight

    def _put(self, item: Sequence[Item]) -> None:
        self._weight += _weigh_batch(item)
        super()._put(item)

    def _get(self) -> Sequence[Item]:
        batch = super()._get()
        self._weight -= _weigh_batch(batch)
        return batch


def _weigh_batch(batch: Sequence[Item]) -> int:
    return sum(map(weigh, batch)) or 1  # an empty batch wakes the reader of the queue


class StreamIntake:
    """
    The intake of one term. The leading thread uses it. Any thread may call `wake` and `report`.

    Args:
        wiring: the wiring of the bridge.
        scope: the stream.
        led: the subscriptions of this term.
        storing: reports whether the buffer is full.
        snapshots: the snapshots, whose documents come between the items.
        note_progress: called regularly, so that a long backlog does not look like a hanging thread.

    Attributes:
        at_end: True if the stream had no more changes at the last item.
        is_held_up: True if the last turn left items because the buffer is full.
        is_hurried: True if the stream reports its place soon, even without a change, because a thread waits for it.
        full: reason why nothing is taken in. Empty while items are taken in.
    """

    def __init__(
        self,
        wiring: Wiring,
        scope: Scope,
        led: Mapping[str, Subscription],
        storing: Storing,
        snapshots: Snapshotting,
        note_progress: Callable[[], None],
    ) -> None:
        self.at_end = self.is_held_up = self.is_hurried = False
        self.full = ""
        self._wiring = wiring
        self._scope = scope
        self._led = led
        self._storing = storing
        self._snapshots = snapshots
        self._note_progress = note_progress
        self._queue = ReadAhead(_WEIGHT_AHEAD)
        self._batch: Sequence[Item] = ()
        self._at = 0  # the batch's items before this index are taken in
        self._reader: StreamReader | None = None
        self._status: StreamStatus | None = None
        self._full_at = math.inf
        self._opened_at = 0.0
        self._throttle = LogThrottle()

    @property
    def has_stream(self) -> bool:
        """Return True if the stream has a reader."""
        return self._reader is not None

    @property
    def is_alive(self) -> bool:
        """Return True if the reader is running, or has delivered items that are not taken in yet."""
        return self._reader is None or self._reader.is_running or self._has_item()

    @property
    def reopenings(self) -> int:
        """Number of times that the stream had to be opened again in this term."""
        status = self._reader.status if self._reader is not None else self._status
        return status.reopenings if status is not None else 0

    @property
    def reading_time(self) -> Timestamp | None:
        """Cluster time up to which items are taken in, while more are left. None if no more may be read now."""
        if self.at_end or self.is_held_up or self._reader is None:
            return None
        return time_of_token({"_data": self._snapshots.reached}, None) or Timestamp(0, 0)

    def has_reached(self, place: Timestamp) -> bool:
        """Return True if everything up to a cluster time was read and taken in."""
        read_to = self._reader.read_to if self._reader is not None else None
        return read_to is not None and read_to >= place and not self.is_held_up and not self._has_item()

    def open_reader(self, position: Position | None) -> None:
        """Read from a position, and drop the rest of earlier reads. None stops reading."""
        self.stop()
        # A place that the old reader delivers now must not count as the new one's.
        self._queue, self._batch, self._at, self.at_end = ReadAhead(_WEIGHT_AHEAD), (), 0, False
        self._snapshots.note_reopening()
        if position is None:
            return
        logger.info(
            "reading from %s",
            "a stored token" if position.token else position.time,
            extra={"event": "stream_opening"},
        )
        self._opened_at = time.monotonic()
        self._reader = StreamReader(
            self._wiring.stream_client,
            self._scope,
            position,
            deliver=self._queue.put,
            comment=self._wiring.options.comment,
            status=self._status,
        )
        self._reader.set_low_latency(self.is_hurried)
        self._reader.start()

    def stop(self) -> None:
        """Stop reading."""
        if self._reader is not None:
            self._reader.stop()
            with contextlib.suppress(Empty):
                while True:  # it may wait for room
                    self._queue.get_nowait()
            self._status, self._reader = replace(self._reader.status), None

    def hurry(self) -> None:
        """Make the reader report its position quickly, while a thread waits for it."""
        if self._reader is not None:
            self._reader.set_low_latency(self.is_hurried or self._snapshots.is_busy)

    def ingest_items(self, now: float) -> MongoCeleryError | None:
        """
        Take in the read changes, as far as the turn's time and the buffer's room allow.

        Returns:
            The error that ended the reader, once everything before it is taken in.
        """
        self.is_held_up = False
        for number in range(_ITEMS_A_TURN):
            if not self._batch and not self._has_item():
                return None
            item = self._batch[self._at]
            if isinstance(item, Failed):
                self._batch = ()
                return item.error
            if number % _ITEMS_A_CHECK == 0:
                if number:
                    self._note_progress()
                if self._storing.is_full:
                    self._note_full(now)
                    return None
                self.full, self._full_at = "", math.inf
            self._ingest_item(item)
            self._at += 1
            if self._at == len(self._batch):
                self._batch = ()
        return None

    def _has_item(self) -> bool:
        """Return True if there is an item that is not taken in."""
        while not self._batch:
            try:
                self._batch, self._at = self._queue.get_nowait(), 0
            except Empty:
                return False
        return True

    def _ingest_item(self, item: ChangeEvent | Mark) -> None:
        snapshots, is_change = self._snapshots, isinstance(item, ChangeEvent)
        thread = snapshots.thread
        if thread.reading is not None:  # existing documents come before it
            snapshots.note_arrival(item)
        self.at_end = not is_change
        for subscription in self._led.values():
            change = subscription.ingest_item(item)
            if change is not None and thread.reading is not None:
                snapshots.note_change(subscription, item, change)
        snapshots.reached = item.data
        if is_change and thread.reading is not None:
            snapshots.note_taken(item)

    def _note_full(self, now: float) -> None:
        """Log that the buffer is full. It is an error if no more changes of blocked partitions may be stored."""
        largest = max(self._led.values(), key=lambda subscription: subscription.window.size)
        is_held = bool(self._storing.waits)
        self.is_held_up, self.at_end = True, False
        self._full_at = min(self._full_at, now)
        waits = f". Also, {self._storing.waits}" if is_held else ""
        most = f"{largest.name} ({largest.window.count})"
        self.full = f"the listener's memory is full, mostly with changes of handler {most}{waits}"
        if self._throttle.may_log():
            logger.log(
                logging.ERROR if is_held else logging.INFO,
                "%s. The listener reads no further changes until workers have handled some",
                self.full,
                extra={"event": "buffer_full"},
            )

    def wake(self) -> None:
        """End the current wait. Any thread may call this."""
        with contextlib.suppress(Full):  # then nobody waits
            self._queue.put_nowait(())

    def wait(self, seconds: float) -> None:
        """Wait for the next items, or briefly while the buffer is full."""
        if self.is_held_up:
            time.sleep(min(seconds, _FULL_SECONDS))
        elif not self._batch:
            with contextlib.suppress(Empty):
                self._batch, self._at = self._queue.get(timeout=seconds), 0

    def report(self) -> dict[str, Any]:
        """Return the state of reading. Short pauses between reads are not reported."""
        if self._reader is None:
            return {"unreadSeconds": 0, "readingWaits": None}
        status = self._reader.status
        last_read = status.last_read or self._opened_at
        silent = int(time.monotonic() - (min(last_read, self._full_at) if self.full else last_read))
        waits = self.full or status.last_error
        return {"unreadSeconds": silent if silent >= _SILENCE_SECONDS else 0, "readingWaits": waits}
