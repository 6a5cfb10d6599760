"""
The thread of snapshots: it asks for what is owed, reads one chunk after the other, and moves the records.

A chunk is read straight through: note L, read its documents, note H, let the leading thread hand them over, and read
again what was changed too fast. What was handed over is moved later, when all partitions have it: meanwhile chunks of
other snapshots are read.

The leading thread never waits for this one. What both use is changed by one assignment, or one call on a dictionary:
a chunk is written by this thread up to `high`, and by the leading one from then on. `reading` is set here alone, and
whoever takes it away has dropped the chunk.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pymongo
from pymongo.errors import InvalidOperation

from mongo_celery.bridge.listener import chunks
from mongo_celery.bridge.listener.chunks import (
    Chunk,
    ChunkFailedError,
    ChunkReader,
    SnapshotFailedError,
    estimate,
    find_collections,
    is_passing,
    read_facts,
)
from mongo_celery.bridge.listener.pacing import RetryGate
from mongo_celery.bridge.state.snapshots import DONE, FAILED, GONE, RUNNING
from mongo_celery.mongo.opening import ANSWER_SECONDS
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.verdicts import ErrorContext, error_text, explain_error, is_outage, is_unanswered

if TYPE_CHECKING:
    from bson import Timestamp

    from mongo_celery.bridge.listener.subscription import Subscription, TermFacts
    from mongo_celery.bridge.state.snapshots import Snapshot
    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.listener")

_POLL_SECONDS = 1.0
_PASS_SECONDS = 0.5
_ROUNDS_MAX = 20
"""Number of times that documents of one chunk are read again before the chunk counts as failed."""


ATTEMPTS_MAX = 20
"""Chunks that fail one after the other although all servers answer; then the snapshot has failed."""

PAUSES = Pauses(first=0.5, longest=30.0, jitter=0.2)
"""Between two attempts that fail."""


@dataclass(slots=True)
class Attempts:
    """
    The attempts at the next chunk of one snapshot in this term.

    Attributes:
        gate: the next one.
        errors: those that have failed, and for which no outage can be the reason.
        error: why the last one has failed, in words. None where it has not.
        rows: of the next one at most: half as many after each failure, a quarter more after each success.
    """

    gate: RetryGate = field(default_factory=lambda: RetryGate(PAUSES))
    errors: int = 0
    error: str | None = None
    rows: int = field(default_factory=lambda: chunks.ROWS)

    def limit_rows(self, rate: float | None) -> int:
        """Return the number of rows of the next chunk: after failures fewer, and no more than a second may have."""
        return max(self.rows if rate is None else min(self.rows, int(rate)), 1)

    def after_success(self) -> Attempts:
        """Return the attempts at the chunk that follows."""
        return Attempts(rows=min(self.rows + max(self.rows // 4, 1), chunks.ROWS))

    def note_failure(self, error: Exception, text: str) -> None:
        """Note that it has failed."""
        self.errors += not (is_unanswered(error) or is_outage(error))
        self.error = text
        self.rows = max(self.rows // 2, 1)
        self.gate.note_failure()


class RefusedChunkError(Exception):
    """Nothing of a chunk may be used, and the next begin finds out why: its record or its collection is another."""


class SnapshotThread:
    """
    The thread of one term, and what it shares with the leading one.

    Args:
        wiring: of the bridge.
        room: bytes that a chunk has at most.
        wake: ends the leading thread's wait.

    Attributes:
        records: snapshots of this term's handlers that run, by id.
        attempts: of these, by id.
        reading: the chunk that is being read, or waits to be handed over.
        appended: chunks that were handed over, by the id of their snapshot.
        allowed: names of the subscriptions for which chunks may begin.
        has_polled: whether it has polled snapshots once.
    """

    def __init__(self, wiring: Wiring, room: int, wake: Callable[[], None]) -> None:
        self.records: Mapping[str, Snapshot] = {}
        self.attempts: dict[str, Attempts] = {}
        self.reading: Chunk | None = None
        self.appended: dict[str, Chunk] = {}
        self.has_polled = False
        self._wiring = wiring
        self._store = wiring.store.snapshots
        self._room = room
        self._wake = wake
        self._led: Mapping[str, Subscription] = {}
        self._version = 0
        self.allowed: frozenset[str] = frozenset()
        self._last_begun = ""
        self._poll_at = 0.0
        self._gate = RetryGate()
        self._changed = threading.Event()
        self._is_closed = False

    # -- the leading thread's side -----------------------------------------------------------------

    def start(self, led: Mapping[str, Subscription], version: int, owed: Sequence[tuple[TermFacts, Timestamp]]) -> None:
        """
        Begin the thread of a term.

        Args:
            owed: plans of those that begin with snapshots, each with the start that was pinned with that. (The start
                itself goes back with a rewind.)
        """
        self._led, self._version, self._owed = led, version, list(owed)
        self._reader = ChunkReader(self._wiring.client, self._room, version)
        threading.Thread(target=self._run, name="mongo_celery-snapshot", daemon=True).start()

    def close(self) -> None:
        """Begin nothing more. Does not wait: a call that is under way has a limit."""
        self._is_closed = True
        self.notify()

    def notify(self) -> None:
        """End the thread's wait."""
        self._changed.set()

    def poll_now(self) -> None:
        """Have it poll snapshots."""
        self._poll_at = 0.0
        self.notify()

    def allow(self, names: frozenset[str]) -> None:
        """Let chunks begin for these subscriptions, and for no others."""
        if names != self.allowed:
            self.allowed = names
            self.notify()

    @property
    def is_idle(self) -> bool:
        """Return True if it has polled, and no snapshot is under way or was asked for by then."""
        return self.has_polled and not self.records

    def under_way(self) -> list[Chunk]:
        """Return the chunks that are read or not recorded yet."""
        reading = self.reading
        return [*([reading] if reading is not None else []), *list(self.appended.values())]

    def hand_over(self, chunk: Chunk) -> None:
        """Note that all documents of a chunk are in the queues of their partitions."""
        attempts = self.attempts[chunk.snapshot.id] = self._get_attempts(chunk.snapshot.id).after_success()
        if chunk.snapshot.rate:
            attempts.gate.opens_at = chunk.sent_at + chunk.count / chunk.snapshot.rate
        self.appended[chunk.snapshot.id] = chunk
        self.reading = None
        self.notify()

    def end_reading(self, chunk: Chunk, error: Exception | None = None) -> None:
        """Drop the chunk that is being read, with a reason or to begin anew."""
        chunk.error = error
        self.reading = None
        self.notify()

    def drop(self, snapshot_id: str) -> None:
        """Forget what is under way of a snapshot. Whatever is read of it later is nobody's."""
        self.appended.pop(snapshot_id, None)
        if self.reading is not None and self.reading.snapshot.id == snapshot_id:
            self.reading = None
        self.notify()

    def choose(self) -> Snapshot | None:
        """Return the next one that may begin a chunk: each in its turn."""
        records = sorted(self.records.values(), key=lambda each: each.id)
        waiting = [each for each in records if self._may_begin(each)] if self.reading is None else []
        after = next((each for each in waiting if each.id > self._last_begun), None)
        return after or next(iter(waiting), None)

    def _may_begin(self, record: Snapshot) -> bool:
        if record.subscription not in self.allowed or record.id in self.appended:
            return False
        return self._get_attempts(record.id).gate.is_open(time.monotonic())

    def _get_attempts(self, snapshot_id: str) -> Attempts:
        return self.attempts.setdefault(snapshot_id, Attempts())

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closed:
            self._serve()
            record = self.choose() if self._gate.is_open(time.monotonic()) else None
            if record is not None:
                self._read_chunk(record)
            else:
                self._await_change(self._find_next_time() - time.monotonic())

    def _find_next_time(self) -> float:
        now = time.monotonic()
        rests = [at for name in self.records if (at := self._get_attempts(name).gate.opens_at) > now]
        return max(min([self._poll_at, *rests]), self._gate.opens_at)

    def _await_change(self, seconds: float) -> None:
        self._changed.wait(max(seconds, 0.0))
        self._changed.clear()

    def _serve(self) -> None:
        """Do what is due of chunks that were handed over, and find what was asked for."""
        if not self._gate.is_open(time.monotonic()):
            return
        try:
            for chunk in list(self.appended.values()):
                if not chunk.ends:
                    self._move(chunk)
            if time.monotonic() >= self._poll_at:
                self._poll()
        except Exception as error:  # noqa: BLE001 - whatever the driver raises: it is tried again
            self._note_unread(error)

    def _poll(self) -> None:
        """Find the snapshots of this term that run. Those that are owed are asked for, and nobody's taken over."""
        self._poll_at = time.monotonic() + _POLL_SECONDS
        self._request_owed()
        found = self._store.read(running=True)
        if any(each.term < self._version for each in found):
            self._store.take_over(self._version)
            found = self._store.read(running=True)
        mine = [each for each in found if each.term == self._version and each.subscription in self._led]
        was_active, records = bool(self.records), {each.id: each for each in mine}
        self.attempts = {
            name: each for name, each in list(self.attempts.items()) if name in records
        }  # the leader inserts
        self.records = records
        self.has_polled = True
        if self.records and not was_active:
            self._wake()  # it says who may begin

    def _request_owed(self) -> None:
        """
        Ask for the snapshots with which handlers begin: `start_from="snapshot"`.

        The start was pinned first, and said in the same write that they are owed. So all that is written from then on
        is in the stream, also the first document of a collection that is made later. Their names are made of that
        start and the collection: a term that ends in between leaves to the next one what it has not asked for, and
        nothing is asked for twice.
        """
        while self._owed:
            plan, start = self._owed[0]
            name, pinned = plan.handler.name, f"{start.time:08x}{start.inc:08x}"
            with pymongo.timeout(ANSWER_SECONDS):
                found = {name for source in plan.selector.sources for name in find_collections(self._wiring, source)}
            self._store.insert(
                {
                    "_id": self._store.make_id(name, f"{pinned}-{_brief(source)}"),
                    "source": source,
                    "by": "start_from='snapshot'",
                }
                for source in sorted(found)
            )
            self._wiring.store.subscriptions.note_snapshot(name, plan.version)
            del self._owed[0]

    def _forget(self, snapshot_id: str) -> None:
        """Let go of a record that does not run any more."""
        self.records = {name: each for name, each in self.records.items() if name != snapshot_id}
        self._poll_at = 0.0

    # -- a chunk -----------------------------------------------------------------------------------

    def _read_chunk(self, record: Snapshot) -> None:
        """Read the next chunk of a snapshot, and wait until it is handed over."""
        self._last_begun = record.id
        try:
            found = self._prepare(record)
            if found is None:
                self._forget(record.id)
                return
            if not self._may_begin(found):
                return
            rows = self._get_attempts(found.id).limit_rows(found.rate)
            chunk = Chunk(found, self._led[found.subscription], rows, sent_at=time.monotonic())
            self.reading = chunk  # from here on the leading thread notes changes
            chunk.low = self._store.begin(found, self._version)
            chunk.begun = found.begun + 1
            if chunk.low is None:
                raise RefusedChunkError
            self._read(chunk)
            while self._await_hand_over(chunk):
                if chunk.rounds > _ROUNDS_MAX:
                    raise ChunkFailedError("a document is changed faster than it can be read")
                self._read(chunk)
        except RefusedChunkError:
            self.drop(record.id)
            self._forget(record.id)
        except Exception as error:  # noqa: BLE001 - nothing of what was read may be used
            self._postpone(record, error)

    def _prepare(self, record: Snapshot) -> Snapshot | None:
        """
        Return the record as it is now, with the collection that it is of.

        None if it is not this term's, or ends here: the collection is not there, or can have no snapshot.
        """
        found = self._store.read_one(record.id)
        if found is None or found.term != self._version or found.state != RUNNING:
            return None
        facts = read_facts(self._wiring.client, found.source)
        if found.uuid is not None:
            if facts is not None and facts.uuid == found.uuid:
                return found
            self._end(
                found,
                f"{found.source} was dropped or renamed while it was read; what was not read by then is not delivered. "
                "Start another snapshot of what has taken its place",
                GONE,
            )
        elif facts is None:  # all that will be in it is in the stream
            self._finish(found, found.begun)
        elif facts.objection is not None or facts.uuid is None:
            self._end(found, f"there can be none of {found.source}: {facts.objection}")
        else:
            count = estimate(self._wiring.client, found.source)
            if self._store.prepare(found, self._version, uuid=facts.uuid, estimated=count):
                return self._store.read_one(found.id)
        return None

    def _read(self, chunk: Chunk) -> None:
        """Read the documents of a chunk, or some of them again. From here on the leading thread may append them."""
        self._reader.read(chunk)
        facts = read_facts(self._wiring.client, chunk.snapshot.source)
        if facts is None or facts.uuid != chunk.snapshot.uuid:
            raise RefusedChunkError
        chunk.high = self._move_stream(chunk)
        self._wake()

    def _move_stream(self, chunk: Chunk) -> Timestamp:
        """Write something, which the stream has to come by. Return its cluster time."""
        chunk.passed_at = time.monotonic()
        time_ = self._store.mark_read_end(chunk.snapshot.id, self._version, chunk.begun)
        if time_ is None:
            raise RefusedChunkError
        return time_

    def _await_hand_over(self, chunk: Chunk) -> bool:
        """
        Wait until the stream is past a chunk's place, and move it there. Serve other chunks meanwhile.

        Returns:
            True if some of its documents are to be read again. False if it was handed over, or dropped.

        Raises:
            Exception: the reason for that, or of the driver: then it is dropped, and begins anew.
        """
        while self.reading is chunk and chunk.high is not None and not self._is_closed:
            pause = chunk.passed_at + _PASS_SECONDS - time.monotonic()
            if pause > 0:
                self._await_change(pause)
            else:
                self._move_stream(chunk)
            self._serve()
        if chunk.error is not None:
            raise chunk.error
        return self.reading is chunk and not self._is_closed

    # -- its record --------------------------------------------------------------------------------

    def _move(self, chunk: Chunk) -> None:
        """Record that a chunk is done, or that the snapshot has come to its end. Repeating it is harmless."""
        record = chunk.snapshot
        if chunk.end is not None:
            until = chunk.until if record.until is None else None
            is_moved = self._store.move(record.id, self._version, chunk.begun, chunk.end, chunk.count, until)
            self.drop(record.id)
            if not is_moved:  # recorded already, or not mine: the next begin finds out which
                self._poll_at = 0.0
        else:
            if self._finish(record, chunk.begun):
                self._forget(record.id)
            self.drop(record.id)
        self._wake()

    def _finish(self, record: Snapshot, begun: int) -> bool:
        """Record that nothing is left to read. False if it is not this term's."""
        is_done = self._store.finish(record.id, self._version, begun, DONE)
        if is_done:
            logger.info(
                "the snapshot of %s for handler %s is done",
                record.source,
                record.subscription,
                extra={"event": "snapshot_done", "snapshot": record.id},
            )
        return is_done

    def _end(self, record: Snapshot, sentence: str, state: str = FAILED) -> bool:
        """Record that it cannot continue. False if it is not this term's, or does not run."""
        is_ended = self._store.fail(record.id, self._version, sentence, state)
        if is_ended:
            logger.error(
                "the snapshot of %s for handler %s has ended after %d documents: %s. Other handlers, and the changes "
                "of this one, continue",
                record.source,
                record.subscription,
                record.done,
                sentence,
                extra={"event": "snapshot_failed", "snapshot": record.id},
            )
        return is_ended

    # -- what goes wrong ---------------------------------------------------------------------------

    def _postpone(self, record: Snapshot, error: Exception) -> None:
        """Try again later, with less. What cannot be cured by that ends the snapshot, and nothing else."""
        self.drop(record.id)
        if self._is_closed:
            return
        is_own = isinstance(error, ChunkFailedError | SnapshotFailedError)
        attempts, text = self._get_attempts(record.id), str(error) if is_own else error_text(error)
        final = explain_error(error, self._concern(record))
        if final is not None or not (is_passing(error) or isinstance(error, ChunkFailedError)):
            self._give_up(record, str(final or text))
            return
        attempts.note_failure(error, text)
        if attempts.errors >= ATTEMPTS_MAX:
            self._give_up(record, f"{ATTEMPTS_MAX} chunks one after the other could not be read, the last one: {text}")
            return
        logger.warning(
            "a chunk of the snapshot of %s for handler %s could not be read, next try in %.1f s: %s",
            record.source,
            record.subscription,
            attempts.gate.opens_at - time.monotonic(),
            text,
            extra={"event": "snapshot_chunk_failed", "snapshot": record.id},
        )

    def _give_up(self, record: Snapshot, sentence: str) -> None:
        self.records = {name: each for name, each in self.records.items() if name != record.id}
        self._get_attempts(record.id).gate.opens_at = time.monotonic() + PAUSES.longest
        try:
            self._end(record, sentence)
        except Exception as error:  # noqa: BLE001 - whatever the driver raises: the next attempt fails as well
            self._note_unread(error)

    def _concern(self, record: Snapshot) -> ErrorContext:
        grant = f"find and listCollections there, and find and update on snapshots in {self._wiring.options.database}"
        return ErrorContext(f"the snapshot of {record.source}", grant)

    def _note_unread(self, error: Exception) -> None:
        if self._is_closed or isinstance(error, InvalidOperation):  # nobody is left for whom this is done
            self._is_closed = True
            return
        self._gate.note_failure()
        logger.warning(
            "reading or writing the records of snapshots failed, trying again: %s",
            explain_error(error, self._wiring.state_concern) or error_text(error),
            extra={"event": "snapshots_unread"},
        )


def _brief(source: str) -> str:
    return hashlib.blake2b(source.encode(), digest_size=6).hexdigest()
