"""
Snapshots of one term: existing documents, each at its place between the changes.

::

    begin (L)      read      write (H)      the stream passes T      all committed or stored     cursor
    -----------> | ------> | -----------> | ----------------------> | ------------------------> | ---> begin ...
                                           its documents are           workers, as with
                                           appended to the buffers     all other changes

1. A chunk begins with one majority write on the snapshot's record, whose time is L. The stream is taken in meanwhile:
   no handler waits for a chunk.
2. Its documents are read behind L, each as of any time. Then comes another majority write, whose time is H.
3. T is the time before H, or the one that the stream has reached by then. The documents are appended where the stream
   passes T: behind every change up to T, before every later one. Their tokens say so to everybody (`existing`).
4. A document whose key got a change of the handler's between L and T is left out: the change is newer. Where that
   brings no document, it is read again in a window of its own, from T on.
5. They hold no watermark. Only when each of them is committed by a majority, or stored and marked by this term, the
   record moves (`state/snapshots.py`), and the next chunk may begin. So each may start once more after a fault.
6. A collection that was dropped or renamed reads as if it were empty. The stream passes that before T, and it ends.
7. A term that ends, repartitioning, and a stream that is opened again drop what is under way: it begins anew. What was
   stored of it runs where it is.
8. With look-up, an update before L may show its document as it was after T. The existing document would go back: it is
   left out, where the handler is given all changes of documents.

A begin waits until all partitions are won, so that no older term runs changes behind T; until there is room for a
chunk; and while most partitions are blocked. What cannot be read is tried again, ever more rarely, and says why; what
never can ends alone, and harms no handler.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.error_text import error_text
from mongo_celery.bridge.existing import END, PLACE_CHARS, TOKEN_TYPE, place_behind, time_before, time_of
from mongo_celery.bridge.listener import pace as paces
from mongo_celery.bridge.listener.chunk_work import ChunkWork, RefusedChunkError, gone
from mongo_celery.bridge.listener.chunks import Chunk, ConditionFailedError, is_passing
from mongo_celery.bridge.listener.errand import Errand, Errands
from mongo_celery.bridge.listener.pace import PAUSES, ChunkPace
from mongo_celery.bridge.state.partitions import mostly_stand
from mongo_celery.bridge.state.snapshots import GONE
from mongo_celery.bridge.stream.operation_types import MOVES
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.verdicts import Concern, explained

if TYPE_CHECKING:
    from mongo_celery.bridge.listener.owed import OwedSnapshots
    from mongo_celery.bridge.listener.subscription import Subscription
    from mongo_celery.bridge.state.snapshots import Snapshot
    from mongo_celery.bridge.stream.items import ChangeEvent
    from mongo_celery.bridge.window import Mark, PendingChange
    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.listener")

_CHUNK_BYTES = 8 << 20
_ROOM_SHARE = 8  # of the buffer, for a chunk
_LOOK_SECONDS = 1.0
_PASS_SECONDS = 0.5
_TICK_SECONDS = 0.05
_ROUNDS_MAX = 20
"""Number of times that documents of one chunk are read again before the chunk counts as failed."""


class Snapshotting:
    """
    The snapshots of one term. Used by the leading thread; `report` also by the one that renews the lease.

    Args:
        wiring: of the bridge.
        wake: ends the leading thread's wait.
    """

    def __init__(self, wiring: Wiring, wake: Callable[[], None]) -> None:
        self._wiring = wiring
        self._wake = wake
        self._room = min(_CHUNK_BYTES, wiring.options.buffer_bytes // _ROOM_SHARE)
        self._looks_up = wiring.options.full_document == "updateLookup"
        self._errands = Errands("mongo_celery-snapshot", wake)
        self._errand: Errand | None = None
        self._waiting: deque[Errand] = deque()
        self._work: ChunkWork | None = None
        self._led: Mapping[str, Subscription] = {}
        self._records: dict[str, Snapshot] = {}
        self._paces: dict[str, ChunkPace] = {}
        self._reading: Chunk | None = None
        self._appended: dict[str, Chunk] = {}
        self._gone: set[str] = set()
        self._reached = ""
        self._look_at = self._ready_at = 0.0
        self._last_begun = ""
        self._has_looked = self._is_awaiting = False

    def begin(self, led: Mapping[str, Subscription], version: int, owed: OwedSnapshots) -> None:
        """
        Begin a term, behind its take-over.

        Args:
            owed: snapshots with which subscriptions begin, and which were not asked for yet.
        """
        self._led = led
        self._work = ChunkWork(self._wiring, version, owed, self._wake)

    def look_now(self) -> None:
        """Have the next turn find what was asked for, whenever that would have been due."""
        self._look_at = 0.0

    def close(self) -> None:
        """Begin nothing more."""
        self._errands.close()

    @property
    def is_idle(self) -> bool:
        """Whether it has looked, and no snapshot is under way or was asked for by then."""
        return self._has_looked and not self._records

    @property
    def is_active(self) -> bool:
        """Return True if any snapshot of this term's handlers runs, or waits to go on."""
        return bool(self._records)

    def holds(self, name: str) -> bool:
        """Return True if documents were given to a subscription, and its snapshot's record does not say so yet."""
        return self.reads_again(name) or any(each.subscription.name == name for each in self._appended.values())

    def reads_again(self, name: str) -> bool:
        """Return True if a part of a subscription's chunk was given to it, and the rest is being read again."""
        return self._reading is not None and self._reading.subscription.name == name and self._reading.rounds > 0

    def is_busy(self, now: float) -> bool:
        """Return True if a chunk is under way or may begin: then the stream is not awaited for long."""
        return bool(self._under_way()) or any(self._may_begin(each, now) for each in self._records.values())

    def next_at(self) -> float:
        """Monotonic time of the next turn that has something to do."""
        if self._errand is not None:
            return math.inf  # whose end wakes
        now = time.monotonic()
        if self.is_busy(now):
            return now + _TICK_SECONDS
        rests = (self._pace(name).ready_at for name in self._records)
        return max(min([self._look_at, *(at for at in rests if at > now)]), self._ready_at)

    def report(self) -> list[dict[str, Any]]:
        """What `status` shows of those that are tried again and again."""
        paces = [(name, pace) for name, pace in list(self._paces.items()) if pace.error is not None]
        return [{"id": name, "error": pace.error, "attempts": pace.failures} for name, pace in paces]

    # -- the stream --------------------------------------------------------------------------------

    def comes_to(self, item: ChangeEvent | Mark) -> None:
        """Append a chunk whose place lies before this. Called with each thing that was read, before it is taken in."""
        chunk = self._reading
        if chunk is None or chunk.high is None:
            return
        data = _data_of(item)
        if not data.startswith(TOKEN_TYPE):
            self._fail(chunk.snapshot, f"the server's tokens begin with {data[:2]}, among which T has no place")
            return
        if not chunk.place:  # all was read before H was written, which moves the stream past it
            reached = self._reached[:PLACE_CHARS] + END if self._reached else ""
            chunk.place = max(place_behind(time_before(chunk.high)), reached)
        if data > chunk.place:
            self._append(chunk)

    def took_in(self, item: ChangeEvent | Mark) -> None:
        """The stream has been taken in up to this, by all subscriptions."""
        self._reached = _data_of(item)
        if not (self._records or self._appended) or not hasattr(item, "document"):
            return
        event: Any = item
        try:
            operation = event.document.get("operationType")
            if operation in MOVES:
                self._note_move(operation, event)
        except Exception as error:  # noqa: BLE001 - an event of whatever form
            logger.debug("an event that cannot be looked at: %s", short(error))

    def took_change(self, subscription: Subscription, item: ChangeEvent | Mark, change: PendingChange) -> None:
        """A subscription is owed this change: it may be newer than a document that is being read."""
        chunk = self._reading
        if chunk is not None and chunk.subscription is subscription:
            event: Any = item
            chunk.note(change, event)

    def reopened(self) -> None:
        """The stream is read from another place on: what is not appended begins anew."""
        self._reached, self._reading = "", None

    def _append(self, chunk: Chunk) -> None:
        record = chunk.snapshot
        if chunk.is_spoiled or chunk.subscription.is_draining or self._is_stale(chunk):
            self._reading = None
            return
        items = chunk.settle(self._looks_up)
        if not chunk.subscription.append(items):
            self._put_off(record, "a partition is behind its place, so it counts as done there", chunk.size)
            return
        chunk.ends.update({each.index: each.data for each in items})
        if not chunk.again:
            self._reading, self._appended[record.id] = None, chunk
            self._pace(record.id).was_read(chunk, self._room)
            return
        chunk.rounds += 1
        if chunk.rounds > _ROUNDS_MAX:
            self._put_off(record, "a document is changed faster than it can be read", chunk.size)
            return
        chunk.low, chunk.high, chunk.place, chunk.changes = time_of(chunk.place), None, "", {}
        self._send(lambda: self.work.read(chunk), lambda errand: self._worked(chunk, errand))

    def _note_move(self, operation: str, event: ChangeEvent) -> None:
        ns, to = event.document.get("ns") or {}, event.document.get("to") or {}
        places = {f"{each.get('db')}.{each.get('coll')}" for each in (ns, to) if each}
        under_way = {chunk.snapshot.id: chunk.snapshot for chunk in self._under_way()}
        for record in (self._records | under_way).values():
            database = record.source.partition(".")[0]
            concerned = (
                operation == "invalidate"
                or record.source in places
                or (operation == "dropDatabase" and ns.get("db") == database)
            )
            if concerned and record.at is not None and event.mark.data > place_behind(record.at):
                self._gone.add(record.id)

    # -- a turn ------------------------------------------------------------------------------------

    def turn(self, led: Mapping[str, Subscription], now: float, *, room: int, may_begin: bool) -> None:
        """
        Do what is due. Waits for nothing.

        Args:
            led: the subscriptions of this term.
            room: bytes for which the buffer has room; a chunk begins only with room for it and what is before it.
            may_begin: whether the stream is read, and nothing holds it back for others.
        """
        self._led = led
        if self._errand is not None and self._errand.is_done:
            errand, self._errand = self._errand, None
            errand.settle()
        self._drop()
        self._secure(now)
        if self._errand is None and not self._waiting:
            self._next(now, may_begin=may_begin and room >= 2 * self._room)
        if self._errand is None and self._waiting:
            self._errand = self._waiting.popleft()
            self._errands.send(self._errand)

    def _next(self, now: float, *, may_begin: bool) -> None:
        if now < self._ready_at:
            return
        for snapshot_id in list(self._gone):
            self._gone.discard(snapshot_id)
            self._drop_of(snapshot_id)
            if snapshot_id in self._records:
                self._end_gone(self._records[snapshot_id])
                return
        chunk = self._reading
        if chunk is not None and chunk.high is not None and now - chunk.passed_at >= _PASS_SECONDS:
            self._pass(chunk, now)
            return
        for chunk in list(self._appended.values()):
            if not chunk.ends:
                self._move(chunk)
                return
        if now >= self._look_at:
            self._look(now)
            return
        record = self._due(now) if may_begin and self._reading is None else None
        if record is not None:
            self._prepare(record)

    def _under_way(self) -> list[Chunk]:
        return [*([self._reading] if self._reading is not None else []), *self._appended.values()]

    def _drop(self) -> None:
        """Let go of what belongs to another partitioning, or to a subscription that is not read."""
        for chunk in self._under_way():
            if self._is_stale(chunk) or (chunk is self._reading and chunk.subscription.is_draining):
                self._drop_of(chunk.snapshot.id)

    def _is_stale(self, chunk: Chunk) -> bool:
        subscription = chunk.subscription
        is_led = self._led.get(subscription.name) is subscription
        return not is_led or subscription.lost

    def _secure(self, now: float) -> None:
        """See which partitions have committed or stored their part of a chunk; the rest holds it."""
        awaited: dict[str, set[int]] = {}
        for chunk in self._appended.values():
            subscription = chunk.subscription
            for index, data in list(chunk.ends.items()):
                if subscription.partitions[index].image.data > chunk.place:
                    chunk.first_at.setdefault(index, now)
                if subscription.partitions[index].is_secured(data):
                    chunk.seconds = max(chunk.seconds, now - chunk.first_at.get(index, now))
                    del chunk.ends[index]
            awaited.setdefault(subscription.name, set()).update(chunk.ends)
        if awaited or self._is_awaiting:
            for name, subscription in self._led.items():
                for index, partition in subscription.partitions.items():
                    partition.is_awaited = index in awaited.get(name, ())
        self._is_awaiting = bool(awaited)

    def _due(self, now: float) -> Snapshot | None:
        """The next one that may begin a chunk: each in its turn."""
        waiting = sorted(
            (each for each in self._records.values() if self._may_begin(each, now)), key=lambda each: each.id
        )
        after = next((each for each in waiting if each.id > self._last_begun), None)
        return after or next(iter(waiting), None)

    def _may_begin(self, record: Snapshot, now: float) -> bool:
        subscription = self._led.get(record.subscription)
        if subscription is None or record.id in self._appended or now < self._pace(record.id).ready_at:
            return False
        if subscription.lost or subscription.unstored is not None:
            return False
        if subscription.is_draining:  # it leaves what is before T, and reads that again
            return False
        partitions = subscription.partitions.values()
        return all(each.won for each in partitions) and not mostly_stand([each.image for each in partitions])

    def _pace(self, snapshot_id: str) -> ChunkPace:
        return self._paces.setdefault(snapshot_id, ChunkPace(paces.FIRST_SIZE))

    @property
    def work(self) -> ChunkWork:
        """What is done in the other thread, in this term."""
        assert self._work is not None, "a term has begun"
        return self._work

    # -- errands -----------------------------------------------------------------------------------

    def _send(self, act: Callable[[], Any], settle: Callable[[Errand], None]) -> None:
        self._waiting.append(Errand(act, settle))

    def _look(self, now: float) -> None:
        """Find what was asked for, stopped, or left by a term before."""
        self._look_at = now + _LOOK_SECONDS
        self._send(self.work.look, self._looked)

    def _looked(self, errand: Errand) -> None:
        if errand.error is not None:
            self._unread(errand.error)
            return
        self._has_looked = True
        self._records = {each.id: each for each in errand.result if each.subscription in self._led}
        self._paces = {name: pace for name, pace in self._paces.items() if name in self._records}

    def _prepare(self, record: Snapshot) -> None:
        """Read the record as it is now; the stream goes on meanwhile."""
        self._last_begun = record.id
        self._send(lambda: self.work.prepare(record), lambda errand: self._begin(record, errand))

    def _begin(self, record: Snapshot, errand: Errand) -> None:
        now = time.monotonic()
        if errand.error is not None:
            self._put_off(record, errand.error, self._pace(record.id).size)
            return
        found: Snapshot | None = errand.result
        if found is None:
            self._look_at = 0.0
            self._records.pop(record.id, None)
            return
        if not self._may_begin(found, now):
            return
        self._records[found.id] = found
        size = self._pace(found.id).size_for(found.rate)
        chunk = self._reading = Chunk(found, self._led[found.subscription], size, sent_at=now)
        self._send(lambda: self.work.read(chunk), lambda errand: self._worked(chunk, errand))

    def _worked(self, chunk: Chunk, errand: Errand) -> None:
        if chunk is not self._reading:  # it was dropped meanwhile
            return
        if isinstance(errand.error, RefusedChunkError):
            self._forget(chunk)
            self._records.pop(chunk.snapshot.id, None)
        elif errand.error is not None:
            self._put_off(chunk.snapshot, errand.error, chunk.size)

    def _pass(self, chunk: Chunk, now: float) -> None:
        chunk.passed_at = now
        self._send(lambda: self.work.pass_on(chunk), lambda errand: self._passed_on(chunk, errand))

    def _passed_on(self, chunk: Chunk, errand: Errand) -> None:
        if isinstance(errand.error, RefusedChunkError):
            self._forget(chunk)
        elif errand.error is not None:
            self._unread(errand.error)

    def _move(self, chunk: Chunk) -> None:
        """The chunk is done: the record moves on, or ends."""
        record = chunk.snapshot
        if chunk.end is not None:
            self._send(lambda: self.work.move(chunk), lambda errand: self._moved(chunk, errand))
        elif chunk.is_there:
            self._send(lambda: self.work.finish(record, chunk.begun), lambda errand: self._finished(chunk, errand))
        else:
            self._drop_of(record.id)
            self._end_gone(record)

    def _moved(self, chunk: Chunk, errand: Errand) -> None:
        record = chunk.snapshot
        if errand.error is not None:
            self._unread(errand.error)  # moved again in a later turn; a second time counts for nothing
            return
        self._appended.pop(record.id, None)
        if not errand.result:  # recorded already, or not mine: the next begin finds out which
            self._look_at = 0.0
        self._pace(record.id).was_handled(chunk)

    def _finished(self, chunk: Chunk, errand: Errand) -> None:
        if errand.error is not None:
            self._unread(errand.error)
            return
        record = chunk.snapshot
        self._forget(chunk)
        if errand.result:
            self._records.pop(record.id, None)

    def _end_gone(self, record: Snapshot) -> None:
        """The collection was dropped or renamed: what is left of it cannot be read, and that was not all."""

        def ended(errand: Errand) -> None:
            if errand.error is not None:
                self._gone.add(record.id)
                self._unread(errand.error)
            elif errand.result:
                self._records.pop(record.id, None)

        self._send(lambda: self.work.end(record, gone(record.source), GONE), ended)

    def _drop_of(self, snapshot_id: str) -> None:
        """Forget what is under way of a snapshot; whatever is read of it later is nobody's."""
        self._appended.pop(snapshot_id, None)
        if self._reading is not None and self._reading.snapshot.id == snapshot_id:
            self._reading = None

    def _forget(self, chunk: Chunk) -> None:
        self._drop_of(chunk.snapshot.id)
        self._look_at = 0.0

    # -- what goes wrong ---------------------------------------------------------------------------

    def _put_off(self, record: Snapshot, why: Exception | str, size: int) -> None:
        """Try again later, with less; what cannot be cured by that ends the snapshot, and nothing else."""
        self._drop_of(record.id)
        pace, text = self._pace(record.id), str(why) if isinstance(why, str | ConditionFailedError) else error_text(why)
        if isinstance(why, Exception):
            final = explained(why, self._concern(record))
            if final is not None or not is_passing(why):
                self._fail(record, str(final or text))
                return
        pause = pace.has_failed(why, text, size, time.monotonic())
        if pace.is_hopeless:
            self._fail(record, f"{pace.errors} chunks one after the other could not be read, the last one: {text}")
            return
        logger.warning(
            "a chunk of the snapshot of %s for handler %s could not be read, next try in %.1f s: %s",
            record.source,
            record.subscription,
            pause,
            text,
            extra={"event": "snapshot_chunk_failed", "snapshot": record.id},
        )

    def _fail(self, record: Snapshot, sentence: str) -> None:
        self._drop_of(record.id)
        self._records.pop(record.id, None)
        self._pace(record.id).ready_at = time.monotonic() + PAUSES.longest

        def settle(errand: Errand) -> None:
            if errand.error is not None:
                self._unread(errand.error)

        self._send(lambda: self.work.end(record, sentence), settle)

    def _concern(self, record: Snapshot) -> Concern:
        grant = f"find and listCollections there, and find and update on snapshots in {self._wiring.options.database}"
        return Concern(f"the snapshot of {record.source}", grant)

    def _unread(self, error: Exception) -> None:
        self._ready_at = time.monotonic() + _LOOK_SECONDS
        logger.warning(
            "reading or writing the records of snapshots failed, trying again: %s",
            explained(error, self._wiring.state_concern) or error_text(error),
            extra={"event": "snapshots_unread"},
        )


def _data_of(item: ChangeEvent | Mark) -> str:
    mark: Any = getattr(item, "mark", item)
    data: str = mark.data
    return data
