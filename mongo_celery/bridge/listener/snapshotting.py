"""
Snapshots of one term: existing documents, each at its place between the changes.

::

    begin (L)      read      write (H)      the stream passes T      all committed or stored     record
    -----------> | ------> | -----------> | ----------------------> | ------------------------> | --->
                                           its documents are           workers, as with
                                           appended to the buffers     all other changes
                                                                      begin of the next ...

1. A chunk begins with one majority write on the snapshot's record, at the time L. The stream is read meanwhile, so no
   handler waits for a chunk. Another thread reads the chunks and makes these writes (`snapshot_thread`).
2. The documents of the chunk are read after L, possibly at different times. Then comes another majority write, at the
   time H.
3. T is the time before H, or the time that the stream has reached by then. The documents are appended when the stream
   passes T: after every change up to T, before all later ones. Their tokens show this place (`existing`).
4. A document is omitted if its key got a change of the handler between L and T, because the change is newer. If that
   change has no document, the document is read again in its own window, from T on.
5. Documents hold no watermark. The record advances (`state/snapshots.py`) only when each is committed by a majority, or
   stored and marked by this term. Meanwhile the next chunk may be read, after the end of this one. So after a fault, a
   document of these two may arrive once more.
6. A dropped or renamed collection reads as empty. So a chunk counts only if the collection has its UUID before and
   after the reading, and the stream has passed no move of it up to T. Otherwise that is logged, and the chunk begins
   anew after a pause. Moves of other collections do not matter. If the collection does not exist with its UUID before a
   chunk, the snapshot ends.
7. The end of a term, repartitioning, and a reopened stream drop chunks in progress, which begin anew. Their stored
   documents run where they are. Repartitioning waits while the rest of any handler's chunk is read again.
8. With lookup, an update before L may show its document as it was after T. The existing document would be older, so it
   is omitted if the handler gets all changes of documents.

A chunk begins only when all partitions are won, so no older term runs changes after T. It also waits for room in
memory, and while most partitions are blocked. Unreadable documents are tried again, less and less often, with a reason.
A permanent failure ends only that snapshot, without harm to its handler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.existing import END, PLACE_CHARS, TOKEN_TYPE, extract_time, place_after_time, previous_time
from mongo_celery.bridge.listener.chunks import ChunkFailedError, SnapshotFailedError
from mongo_celery.bridge.listener.snapshot_thread import SnapshotThread
from mongo_celery.bridge.state.partitions import is_mostly_blocked
from mongo_celery.findings import list_some

if TYPE_CHECKING:
    from mongo_celery.bridge.listener.chunks import Chunk
    from mongo_celery.bridge.listener.subscription import Subscription
    from mongo_celery.bridge.stream.items import ChangeEvent
    from mongo_celery.bridge.window import Mark, PendingChange
    from mongo_celery.bridge.wiring import Wiring

_CHUNK_BYTES = 8 << 20
_ROOM_SHARE = 8  # share of the buffer for a chunk


class Snapshotting:
    """
    The leading thread's part in one term's snapshots.

    Args:
        wiring: the wiring of the bridge.
        led: the subscriptions of this term.
        version: the number of this term.
        wake: ends the leading thread's wait.

    Attributes:
        thread: reads and records chunks.
        reached: comparable part of the last place that all subscriptions have taken in. Empty before the first.
    """

    def __init__(self, wiring: Wiring, led: Mapping[str, Subscription], version: int, wake: Callable[[], None]) -> None:
        self._room = min(_CHUNK_BYTES, wiring.options.buffer_bytes // _ROOM_SHARE)
        self._looks_up = wiring.options.full_document == "updateLookup"
        self._led = led
        self.thread = SnapshotThread(wiring, led, version, self._room, wake)
        self.reached = ""

    @property
    def is_busy(self) -> bool:
        """Return True if a chunk is in progress or may begin, so that the stream must report its place soon."""
        return bool(self.thread.under_way()) or self.thread.choose() is not None

    def holds(self, name: str) -> bool:
        """Return True if a subscription got documents that its snapshot's record does not include yet."""
        return self.reads_again(name) or any(each.subscription.name == name for each in list(self.thread.appended))

    def reads_again(self, name: str | None = None) -> bool:
        """Return True if this subscription (by default any) got part of a chunk, and the rest is being read again."""
        chunk = self.thread.reading
        return chunk is not None and name in (None, chunk.subscription.name) and chunk.rounds > 0

    def report(self) -> list[dict[str, Any]]:
        """Return the facts about repeatedly failing snapshots for `status`."""
        failing = [(name, each) for name, each in list(self.thread.attempts.items()) if each.error is not None]
        return [{"id": name, "error": each.error, "attempts": each.gate.failures} for name, each in failing]

    def report_unrequested(self) -> list[dict[str, Any]]:
        """Return the handlers whose initial snapshots cannot be requested, for `status`."""
        return [
            {
                "subscription": name,
                "source": list_some([str(source) for source in self._led[name].plan.selector.sources]),
                "error": each.error,
                "attempts": each.gate.failures,
            }
            for name, each in list(self.thread.unrequested.items())
            if name in self._led
        ]

    # -- the stream --------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Return True if a turn has work. False without snapshots."""
        thread = self.thread
        return bool(thread.records or thread.appended or thread.allowed) or thread.reading is not None

    def note_arrival(self, item: ChangeEvent | Mark) -> None:
        """Append a chunk whose place is before this item. Called before each item while a chunk is read."""
        chunk = self.thread.reading
        if chunk is None or chunk.high is None:
            return
        data = item.data
        if not data.startswith(TOKEN_TYPE):
            error = SnapshotFailedError(
                f"this server's resume tokens begin with {data[:2]}, which this version does not support"
            )
            self.thread.drop(chunk, error)
            return
        if not chunk.place:  # all was read before the write at H, which moves the stream past it
            reached = self.reached[:PLACE_CHARS] + END if self.reached else ""
            chunk.place = max(place_after_time(previous_time(chunk.high)), reached)
        if data > chunk.place:
            self._append(chunk)

    def note_taken(self, item: ChangeEvent | Mark) -> None:
        """Note a move of the collection that is being read. Called after each item while a chunk is read."""
        chunk, event = self.thread.reading, getattr(item, "document", None)
        if chunk is not None and event is not None:
            with contextlib.suppress(Exception):  # an event of any form
                chunk.note_move(event)

    def note_change(self, subscription: Subscription, item: ChangeEvent | Mark, change: PendingChange) -> None:
        """Note a change of a subscription, which may be newer than a document that is being read."""
        chunk = self.thread.reading
        if chunk is not None and chunk.subscription is subscription:
            event: Any = item
            chunk.note(change, event)

    def note_reopening(self) -> None:
        """Restart chunks that are not appended, because the stream is read from another place."""
        self.reached = ""
        if self.thread.reading is not None:
            self.thread.drop(self.thread.reading)

    def _append(self, chunk: Chunk) -> None:
        if chunk.objection:
            self.thread.drop(chunk, ChunkFailedError(chunk.objection))
            return
        if chunk.subscription.is_draining or self._is_stale(chunk):
            self.thread.drop(chunk)
            return
        items = chunk.settle(self._looks_up)
        if not chunk.subscription.append(items):
            error = ChunkFailedError("a partition has already passed the position of these documents")
            self.thread.drop(chunk, error)
            return
        chunk.ends.update({each.index: each.data for each in items})
        if chunk.again:
            chunk.rounds += 1
            chunk.low, chunk.place, chunk.changes = extract_time(chunk.place), "", {}
            chunk.high = None  # last: from now on the thread writes it
            self.thread.notify()
        else:
            self.thread.hand_over(chunk)

    # -- a turn ------------------------------------------------------------------------------------

    def turn(self, *, room: int, may_begin: bool) -> None:
        """
        Read the progress of chunks, and select the snapshots that may begin one, without waiting.

        Args:
            room: free bytes of the buffer. A chunk begins only if it and everything before it fit.
            may_begin: True if the stream is read, and nothing delays it.
        """
        for chunk in self.thread.under_way():
            if self._is_stale(chunk) or (chunk is self.thread.reading and chunk.subscription.is_draining):
                self.thread.drop(chunk)
        self._secure()
        names: frozenset[str] = frozenset()
        if self.thread.records and may_begin and room >= 2 * self._room:
            appended = list(self.thread.appended)
            busy = {each.subscription for each in appended if each.subscription.window.count > each.count}
            names = frozenset(name for name, each in self._led.items() if each not in busy and _may_begin(each))
        self.thread.allow(names)

    def _is_stale(self, chunk: Chunk) -> bool:
        """Return True if a chunk belongs to another partitioning, or to a subscription that is not read."""
        subscription = chunk.subscription
        return self._led.get(subscription.name) is not subscription or subscription.lost

    def _secure(self) -> None:
        """Find which partitions have committed or stored their part of a chunk. The others hold it."""
        for chunk in list(self.thread.appended):
            subscription, held = chunk.subscription, bool(chunk.ends)
            for index, data in list(chunk.ends.items()):
                if subscription.partitions[index].is_secured(data):
                    del chunk.ends[index]
            if held and not chunk.ends:
                self.thread.notify()


def _may_begin(subscription: Subscription) -> bool:
    """Return True if a subscription's partitions allow a chunk to begin."""
    if subscription.lost or subscription.unstored is not None:
        return False
    if subscription.is_draining:  # it omits changes before T, and reads them again
        return False
    partitions = subscription.partitions.values()
    return all(each.won for each in partitions) and not is_mostly_blocked([each.image for each in partitions])
