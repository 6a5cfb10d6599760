"""
Snapshots of one term: existing documents, each exactly at its place between the changes.

::

    begin (T)     read at T       the stream passes T      all committed or stored     cursor
    ----------> | ------------- | ----------------------- | ------------------------> | ---> begin ...
      the stream stands           its documents are          workers, as with
      at T until it is read       appended to the buffers    all other changes

1. A chunk begins with one majority write on the snapshot's record, whose own time is T: nothing newer was taken in, for
   nothing is from the sending of that write on until T is known. A chunk whose T cannot be known is given up.
2. Its documents are read as of T. The stream is not taken in behind T before they are there.
3. They are appended where the stream passes T: behind every change up to T, before every later one. Their tokens say
   the same to everybody who compares tokens (`existing`).
4. They hold no watermark. Only when each of them is committed by a majority, or stored and marked by this term, the
   record moves on (`state/snapshots.py`), and the next chunk may begin. So each may start once more after a fault.
5. A chunk is believed when the stream has passed a write that came after its reading: a collection that was dropped or
   renamed meanwhile reads as if it were empty.
6. A term that ends, repartitioning, and a stream that is opened again drop what is under way: it begins anew. What was
   stored of it runs where it is.
7. With look-up, an update at or before T may show its document as it was after T. The existing document would follow as
   it was at T, and go back: it is left out, where the handler is given all changes of documents.

A begin waits until all partitions are won, so that no older term runs changes behind T; until there is room for a
chunk, and for what has to be read before it; and while most partitions stand. What cannot go on, goes on later, ever
more rarely, and says why; what never can stands alone, and harms no handler.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from threading import Event
from typing import TYPE_CHECKING, Any

from mongo_celery.bridge.change import event_of
from mongo_celery.bridge.error_text import error_text
from mongo_celery.bridge.existing import TOKEN_TYPE, place_behind
from mongo_celery.bridge.listener import pace as paces
from mongo_celery.bridge.listener.chunk_work import ChunkWork, RefusedChunkError, gone
from mongo_celery.bridge.listener.chunks import Chunk, ConditionFailedError, ShortChunkError, is_passing
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
_STAND_SECONDS = 12.0
_PASS_SECONDS = 0.5
_TICK_SECONDS = 0.05


class Snapshotting:
    """
    The snapshots of one term. Used by the leading thread; `report` also by the one that renews the lease.

    Args:
        wiring: of the bridge.
        wake: ends the leading thread's wait.

    Attributes:
        is_standing: whether the stream must not be taken in until the chunk that is under way is known.
        progress: set when there may be something new of that chunk.
    """

    def __init__(self, wiring: Wiring, wake: Callable[[], None]) -> None:
        self.progress = Event()
        self.is_standing = False
        self._wiring = wiring
        self._wake = wake
        self._room = min(_CHUNK_BYTES, wiring.options.buffer_bytes // _ROOM_SHARE)
        self._looks_up = wiring.options.full_document == "updateLookup"
        self._errands = Errands("mongo_celery-snapshot", self._noticed)
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
        self._look_at = self._ready_at = self._rested_at = 0.0
        self._last_begun = ""
        self._has_looked = False

    def begin(self, led: Mapping[str, Subscription], version: int, owed: OwedSnapshots) -> None:
        """
        Begin a term, behind its take-over.

        Args:
            owed: snapshots with which subscriptions begin, and which were not asked for yet.
        """
        self._led = led
        self._work = ChunkWork(self._wiring, version, owed, self._noticed)

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

    def is_busy(self, now: float) -> bool:
        """Return True if a chunk is under way or may begin: then the stream is not to be waited for long."""
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

    def admits(self, item: ChangeEvent | Mark) -> bool:
        """
        Whether the stream may be taken in up to this. Where it passes T, the chunk is appended before.

        Called with each thing that was read, in front of all subscriptions.
        """
        chunk = self._reading
        if chunk is None:
            return True
        if not chunk.place:
            return False
        data = _data_of(item)
        if not data.startswith(TOKEN_TYPE):
            self._fail(chunk.snapshot, f"the server's tokens begin with {data[:2]}, among which T has no place")
        elif data > chunk.place:
            if not chunk.is_read:
                return False
            self._append(chunk)
        return True

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

    def looked_up(self, subscription: Subscription, item: ChangeEvent | Mark, change: PendingChange) -> None:
        """A subscription is owed this change: it may show its document as it was after T."""
        chunk = self._reading
        if chunk is None or chunk.subscription is not subscription or not self._looks_up or change.refusal is not None:
            return
        event: Any = item
        if event.document.get("operationType") != "update" or not event.document.get("fullDocument"):
            return
        if subscription.plan.handler.filter.takes_every_change:
            chunk.newer.add(_key_of(event.document))

    def reopened(self) -> None:
        """The stream is read from another place on: what is not appended is given up."""
        self._reached = ""
        if self._reading is not None:
            self._give_up(self._reading)

    def _append(self, chunk: Chunk) -> None:
        self._go_on(chunk)
        if chunk.subscription.lost or chunk.subscription.is_draining:
            return
        items = chunk.items
        if chunk.newer:
            items = [each for each in items if _key_in(each.raw) not in chunk.newer]
        if not chunk.subscription.append(items):
            self._put_off(chunk.snapshot, "a partition stands behind its place, so it counts as done there", chunk.size)
            return
        chunk.ends = {each.index: each.data for each in items}
        chunk.items, chunk.is_appended = [], True
        self._appended[chunk.snapshot.id] = chunk

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
        self.progress.clear()
        if self._errand is not None and self._errand.is_done:
            errand, self._errand = self._errand, None
            errand.settle()
        self._drop(now)
        self._secure(now)
        if self._errand is None and not self._waiting:
            self._next(now, may_begin=may_begin and room >= 2 * self._room)
        if self._errand is None and self._waiting:
            self._errand = self._waiting.popleft()
            self._errands.send(self._errand)
        chunk = self._reading
        self.is_standing = chunk is not None and not chunk.is_read

    def _next(self, now: float, *, may_begin: bool) -> None:
        if now < self._ready_at:
            return
        for snapshot_id in list(self._gone):
            self._gone.discard(snapshot_id)
            self._drop_of(snapshot_id)
            if snapshot_id in self._records:
                self._end_gone(self._records[snapshot_id])
                return
        for chunk in self._under_way():
            if self._is_to_be_passed(chunk, now):
                self._pass(chunk, now)
                return
        for chunk in list(self._appended.values()):
            if not chunk.ends and chunk.behind and self._reached >= chunk.behind:
                self._move(chunk)
                return
        if now >= self._look_at:
            self._look(now)
            return
        record = self._due(now) if may_begin and self._reading is None and now >= self._rested_at else None
        if record is not None:
            self._prepare(record)

    def _under_way(self) -> list[Chunk]:
        return [*([self._reading] if self._reading is not None else []), *self._appended.values()]

    def _drop(self, now: float) -> None:
        """Let go of what belongs to another layout, or to a subscription that is not read, or has taken too long."""
        for chunk in list(self._appended.values()):
            if self._is_stale(chunk):
                del self._appended[chunk.snapshot.id]
        reading = self._reading
        if reading is None:
            return
        if self._is_stale(reading) or reading.subscription.is_draining:
            self._give_up(reading)
        elif not reading.is_read and now - reading.sent_at > _STAND_SECONDS:
            self._give_up(reading)
            why = f"no answer within {_STAND_SECONDS:.0f} s"
            self._put_off(reading.snapshot, why, reading.size, stood=now - reading.sent_at)

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
                if subscription.trackers[index].image.data > chunk.place:
                    chunk.first_at.setdefault(index, now)
                if subscription.is_secured(index, data):
                    chunk.seconds = max(chunk.seconds, now - chunk.first_at.get(index, now))
                    del chunk.ends[index]
            awaited.setdefault(subscription.name, set()).update(chunk.ends)
        for name, subscription in self._led.items():
            if subscription.awaited or name in awaited:
                subscription.awaited = awaited.get(name, ())

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
        trackers = subscription.trackers.values()
        return all(each.won for each in trackers) and not mostly_stand([each.image for each in trackers])

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

    def _noticed(self) -> None:
        self.progress.set()
        self._wake()

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
        """From here on the stream stands, until T is known."""
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
        self.is_standing = True
        self._send(lambda: self.work.read(chunk), lambda errand: self._worked(chunk, errand))

    def _worked(self, chunk: Chunk, errand: Errand) -> None:
        error = errand.error
        if chunk not in self._under_way():  # it was given up meanwhile
            return
        if error is None or chunk.is_read:  # what has failed behind that is done again
            self._pace(chunk.snapshot.id).was_read(chunk, self._room)
        elif isinstance(error, RefusedChunkError):
            self._forget(chunk)
            self._records.pop(chunk.snapshot.id, None)
        else:
            self._give_up(chunk)
            self._put_off(chunk.snapshot, error, chunk.size, stood=time.monotonic() - chunk.sent_at)

    def _is_to_be_passed(self, chunk: Chunk, now: float) -> bool:
        """Whether something more has to be written, since the stream has not come past the chunk."""
        if not chunk.is_read or now - chunk.passed_at < _PASS_SECONDS:
            return False
        return not chunk.is_appended or not chunk.behind or self._reached < chunk.behind

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
        self._appended.pop(snapshot_id, None)
        if self._reading is not None and self._reading.snapshot.id == snapshot_id:
            self._give_up(self._reading)

    # -- what goes wrong ---------------------------------------------------------------------------

    def _give_up(self, chunk: Chunk) -> None:
        """Its T is forgotten; whatever is read of it later is nobody's."""
        if self._reading is chunk:
            self._go_on(chunk)

    def _go_on(self, chunk: Chunk) -> None:
        """The stream stands no more; nor does it for any other snapshot, until it has flowed for its share of time."""
        self._reading, self.is_standing = None, False
        stood = (chunk.read_at or time.monotonic()) - chunk.sent_at
        self._rested_at = chunk.sent_at + paces.STANDING_SHARE * stood

    def _forget(self, chunk: Chunk) -> None:
        self._give_up(chunk)
        if self._appended.get(chunk.snapshot.id) is chunk:
            del self._appended[chunk.snapshot.id]
        self._look_at = 0.0

    def _put_off(self, record: Snapshot, why: Exception | str, size: int, *, stood: float = 0.0) -> None:
        """Try again later, with less; what cannot be cured by that ends the snapshot, and nothing else."""
        pace, text = self._pace(record.id), str(why) if isinstance(why, str | ConditionFailedError) else error_text(why)
        if isinstance(why, Exception):
            final = explained(why, self._concern(record))
            if final is not None or not (is_passing(why) or isinstance(why, ShortChunkError)):
                self._fail(record, str(final or text))
                return
        pause = pace.has_failed(why, text, size, stood, time.monotonic())
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


def _key_of(event: Any) -> bytes:
    """Namespace and document key of an event, byte for byte."""
    return b"".join(bytes(event[name].raw) for name in ("ns", "documentKey"))


def _key_in(raw: bytes) -> bytes:
    return _key_of(event_of(raw))
