"""
Snapshots of one term: existing documents, each at its place between the changes.

::

    begin (L)      read      write (H)      the stream passes T      all committed or stored     cursor
    -----------> | ------> | -----------> | ----------------------> | ------------------------> | ---> begin ...
                                           its documents are           workers, as with
                                           appended to the buffers     all other changes

1. A chunk begins with one majority write on the snapshot's record, whose time is L. The stream is taken in meanwhile:
   no handler waits for a chunk. Another thread reads chunks, from here to H and again (`snapshot_thread`).
2. Its documents are read behind L, each as of any time. Then comes another majority write, whose time is H.
3. T is the time before H, or the one that the stream has reached by then. The documents are appended where the stream
   passes T: behind every change up to T, before every later one. Their tokens say so to everybody (`existing`).
4. A document whose key got a change of the handler's between L and T is left out: the change is newer. Where that
   brings no document, it is read again in a window of its own, from T on.
5. They hold no watermark. Only when each of them is committed by a majority, or stored and marked by this term, the
   record moves (`state/snapshots.py`), and the next chunk may begin. So each may start once more after a fault.
6. A collection that was dropped or renamed reads as if it were empty. So a chunk counts only if the collection has its
   UUID before and after the reading, and if the stream has passed no move of it by T. Else that is logged, and the
   chunk begins anew after a pause. Moves of other collections do not matter. A snapshot ends if the collection is not
   there with its UUID before a chunk.
7. A term that ends, repartitioning, and a stream that is opened again drop what is under way: it begins anew. What was
   stored of it runs where it is. Repartitioning waits while the rest of a chunk is read again, of any handler.
8. With look-up, an update before L may show its document as it was after T. The existing document would go back: it is
   left out, where the handler is given all changes of documents.

A begin waits until all partitions are won, so that no older term runs changes behind T. Until there is room for a
chunk, and while most partitions are blocked. What cannot be read is tried again, ever more rarely, and says why. What
never can ends alone, and harms no handler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.existing import END, PLACE_CHARS, TOKEN_TYPE, extract_time, place_after_time, previous_time
from mongo_celery.bridge.listener.chunks import ChunkFailedError, SnapshotFailedError
from mongo_celery.bridge.listener.snapshot_thread import SnapshotThread
from mongo_celery.bridge.state.partitions import is_mostly_blocked

if TYPE_CHECKING:
    from bson import Timestamp

    from mongo_celery.bridge.listener.chunks import Chunk
    from mongo_celery.bridge.listener.subscription import Subscription, TermFacts
    from mongo_celery.bridge.stream.items import ChangeEvent
    from mongo_celery.bridge.window import Mark, PendingChange
    from mongo_celery.bridge.wiring import Wiring

_CHUNK_BYTES = 8 << 20
_ROOM_SHARE = 8  # of the buffer, for a chunk


class Snapshotting:
    """
    The leading thread's part in the snapshots of one term.

    Args:
        wiring: of the bridge.
        wake: ends the leading thread's wait.

    Attributes:
        thread: reads and records chunks.
        reached: comparable part of the last place that all subscriptions have taken in. Empty before the first.
    """

    def __init__(self, wiring: Wiring, wake: Callable[[], None]) -> None:
        self._wiring = wiring
        self._room = min(_CHUNK_BYTES, wiring.options.buffer_bytes // _ROOM_SHARE)
        self._looks_up = wiring.options.full_document == "updateLookup"
        self._led: Mapping[str, Subscription] = {}
        self.thread = SnapshotThread(wiring, self._room, wake)
        self.reached = ""

    def begin(self, led: Mapping[str, Subscription], version: int, owed: Sequence[tuple[TermFacts, Timestamp]]) -> None:
        """
        Begin a term, behind its take-over.

        Args:
            owed: plans of those that begin with snapshots, each with the start that was pinned with that.
        """
        self._led = led
        self.thread.start(led, version, owed)

    @property
    def is_busy(self) -> bool:
        """Return True if a chunk is under way or may begin: then the stream is not awaited for long."""
        return bool(self.thread.under_way()) or self.thread.choose() is not None

    def holds(self, name: str) -> bool:
        """Return True if documents were given to a subscription, and its snapshot's record does not say so yet."""
        appended = list(self.thread.appended.values())
        return self.reads_again(name) or any(each.subscription.name == name for each in appended)

    def reads_again(self, name: str | None = None) -> bool:
        """Return True if a part of a chunk was given to this subscription, or any, and the rest is being read again."""
        chunk = self.thread.reading
        return chunk is not None and name in (None, chunk.subscription.name) and chunk.rounds > 0

    def report(self) -> list[dict[str, Any]]:
        """Return what `status` shows of those that are tried again and again."""
        failing = [(name, each) for name, each in list(self.thread.attempts.items()) if each.error is not None]
        return [{"id": name, "error": each.error, "attempts": each.gate.failures} for name, each in failing]

    # -- the stream --------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Return True if a turn has something to see to. False without snapshots."""
        thread = self.thread
        return bool(thread.records or thread.appended or thread.allowed) or thread.reading is not None

    def note_arrival(self, item: ChangeEvent | Mark) -> None:
        """Append a chunk whose place lies before this. Called before each item while a chunk is read."""
        chunk = self.thread.reading
        if chunk is None or chunk.high is None:
            return
        data = _token_data(item)
        if not data.startswith(TOKEN_TYPE):
            error = SnapshotFailedError(f"the server's tokens begin with {data[:2]}, among which T has no place")
            self.thread.end_reading(chunk, error)
            return
        if not chunk.place:  # all was read before H was written, which moves the stream past it
            reached = self.reached[:PLACE_CHARS] + END if self.reached else ""
            chunk.place = max(place_after_time(previous_time(chunk.high)), reached)
        if data > chunk.place:
            self._append(chunk)

    def note_taken(self, item: ChangeEvent | Mark) -> None:
        """Note a move of the collection that is read. Called behind each item while a chunk is read."""
        chunk, event = self.thread.reading, getattr(item, "document", None)
        if chunk is not None and event is not None:
            with contextlib.suppress(Exception):  # an event of whatever form
                chunk.note_move(event)

    def note_change(self, subscription: Subscription, item: ChangeEvent | Mark, change: PendingChange) -> None:
        """A subscription is owed this change: it may be newer than a document that is being read."""
        chunk = self.thread.reading
        if chunk is not None and chunk.subscription is subscription:
            event: Any = item
            chunk.note(change, event)

    def note_reopening(self) -> None:
        """The stream is read from another place on: what is not appended begins anew."""
        self.reached = ""
        if self.thread.reading is not None:
            self.thread.end_reading(self.thread.reading)

    def _append(self, chunk: Chunk) -> None:
        if chunk.objection:
            self.thread.end_reading(chunk, ChunkFailedError(chunk.objection))
            return
        if chunk.subscription.is_draining or self._is_stale(chunk):
            self.thread.end_reading(chunk)
            return
        items = chunk.settle(self._looks_up)
        if not chunk.subscription.append(items):
            error = ChunkFailedError("a partition is behind its place, so it counts as done there")
            self.thread.end_reading(chunk, error)
            return
        chunk.ends.update({each.index: each.data for each in items})
        if chunk.again:
            chunk.rounds += 1
            chunk.low, chunk.place, chunk.changes = extract_time(chunk.place), "", {}
            chunk.high = None  # last: from here on the thread writes it
            self.thread.notify()
        else:
            self.thread.hand_over(chunk)

    # -- a turn ------------------------------------------------------------------------------------

    def turn(self, *, room: int, may_begin: bool) -> None:
        """
        See what is done of chunks, and who may begin one. Waits for nothing.

        Args:
            room: bytes for which the buffer has room. A chunk begins only with room for it and what is before it.
            may_begin: whether the stream is read, and nothing holds it back for others.
        """
        for chunk in self.thread.under_way():
            if self._is_stale(chunk) or (chunk is self.thread.reading and chunk.subscription.is_draining):
                self.thread.drop(chunk.snapshot.id)
        self._secure()
        names: frozenset[str] = frozenset()
        if self.thread.records and may_begin and room >= 2 * self._room:
            names = frozenset(name for name, each in self._led.items() if _may_begin(each))
        self.thread.allow(names)

    def _is_stale(self, chunk: Chunk) -> bool:
        """Return True if it belongs to another partitioning, or to a subscription that is not read."""
        subscription = chunk.subscription
        return self._led.get(subscription.name) is not subscription or subscription.lost

    def _secure(self) -> None:
        """See which partitions have committed or stored their part of a chunk. The rest holds it."""
        for chunk in list(self.thread.appended.values()):
            subscription, held = chunk.subscription, bool(chunk.ends)
            for index, data in list(chunk.ends.items()):
                if subscription.partitions[index].is_secured(data):
                    del chunk.ends[index]
            if held and not chunk.ends:
                self.thread.notify()


def _may_begin(subscription: Subscription) -> bool:
    """Return True if a chunk may begin for a subscription, as far as its partitions are concerned."""
    if subscription.lost or subscription.unstored is not None:
        return False
    if subscription.is_draining:  # it leaves what is before T, and reads that again
        return False
    partitions = subscription.partitions.values()
    return all(each.won for each in partitions) and not is_mostly_blocked([each.image for each in partitions])


def _token_data(item: ChangeEvent | Mark) -> str:
    mark: Any = getattr(item, "mark", item)
    data: str = mark.data
    return data
