"""
The snapshot thread: it requests initial snapshots, reads one chunk after another, and stores the progress.

A chunk is read in one sequence: note L, read its documents, note H, let the leading thread append them, and read again
those that changed too fast. The record advances later, when all partitions have the chunk. Meanwhile the thread reads
the next chunk, but not a third one, and chunks of other snapshots.

The leading thread never waits for this one. Shared data changes by one assignment, or one call on a dictionary. This
thread writes a chunk up to `high`, and the leading one afterwards. Only this thread sets `reading`, and removing it
drops the chunk.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

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
from mongo_celery.bridge.state.snapshots import FAILED, GONE, RUNNING
from mongo_celery.findings import list_some
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.verdicts import ErrorContext, error_text, explain_error, is_outage, is_unanswered

if TYPE_CHECKING:
    from bson import Timestamp

    from mongo_celery.bridge.listener.subscription import Subscription
    from mongo_celery.bridge.listener.term_facts import TermFacts
    from mongo_celery.bridge.state.snapshots import Snapshot
    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.listener")

_POLL_SECONDS = 1.0
_PASS_SECONDS = 0.5
_CHUNK_SECONDS = 1.0
_ROUNDS_MAX = 20
"""Largest number of repeated readings in one chunk before it fails."""


ATTEMPTS_MAX = 20
"""Chunks that fail in a row although all servers answer. Then the snapshot has failed."""

PAUSES = Pauses(first=0.5, longest=30.0, jitter=0.2)
"""Pauses between two failing attempts."""


@dataclass(slots=True)
class Attempts:
    """
    The attempts at the next chunk of one snapshot in this term, or at the request of a handler's initial snapshots.

    Attributes:
        gate: the gate of the next attempt.
        errors: failures that no outage can explain.
        error: the reason of the last failure, in words. None without one.
        rows: largest number of rows in the next attempt. A failure halves it.
    """

    gate: RetryGate = field(default_factory=lambda: RetryGate(PAUSES))
    errors: int = 0
    error: str | None = None
    rows: int = field(default_factory=lambda: chunks.ROWS)

    def limit_rows(self, rate: float | None) -> int:
        """Return the number of rows in the next chunk: fewer after failures, and at most a second's rate."""
        return max(self.rows if rate is None else min(self.rows, int(rate)), 1)

    def after_success(self) -> Attempts:
        """Return the attempts for the next chunk."""
        return Attempts(rows=self.rows)

    def adapt(self, seconds: float) -> None:
        """
        Adapt the number of rows to the time that a whole chunk took, at most by a factor of two.

        After failures, chunks grow to the least size however long they take.
        """
        rows = int(self.rows * min(max(_CHUNK_SECONDS / max(seconds, _CHUNK_SECONDS / 2), 0.5), 2.0))
        least = min(self.rows + max(self.rows // 4, 1), chunks.LEAST_ROWS)
        self.rows = min(max(rows, least), chunks.MOST_ROWS)

    def note_failure(self, error: Exception, text: str) -> None:
        """Note a failure."""
        self.errors += not (is_unanswered(error) or is_outage(error))
        self.error = text
        self.rows = max(self.rows // 2, 1)
        self.gate.note_failure()


class RefusedChunkError(Exception):
    """A chunk must not be used, because its record or its collection has changed. The next chunk reports the reason."""


class SnapshotThread:
    """
    The thread of one term, and the data that it shares with the leading one.

    Args:
        wiring: the wiring of the bridge.
        led: the subscriptions of this term.
        version: the number of this term.
        room: largest number of bytes in a chunk.
        wake: ends the leading thread's wait.

    Attributes:
        records: running snapshots of this term's handlers, by id.
        attempts: the attempts at the next chunk of each snapshot, by id.
        unrequested: the failed attempts to request initial snapshots, by handler.
        reading: the chunk that is being read, or waits to be appended.
        appended: appended chunks that are not recorded, in the order of their numbers.
        allowed: names of the subscriptions for which chunks may begin.
        has_polled: True if it has polled snapshots at least once.
    """

    def __init__(
        self,
        wiring: Wiring,
        led: Mapping[str, Subscription],
        version: int,
        room: int,
        wake: Callable[[], None],
    ) -> None:
        self.records: Mapping[str, Snapshot] = {}
        self.attempts: dict[str, Attempts] = {}
        self.unrequested: dict[str, Attempts] = {}
        self.reading: Chunk | None = None
        self.appended: dict[Chunk, None] = {}
        self.has_polled = False
        self._wiring = wiring
        self._store = wiring.store.snapshots
        self._wake = wake
        self._led, self._version = led, version
        self._reader = ChunkReader(wiring.client, room, version)
        self._owed: list[tuple[TermFacts, Timestamp]] = []
        self.allowed: frozenset[str] = frozenset()
        self._last_begun = ""
        self._poll_at = 0.0
        self._gate = RetryGate()
        self._changed = threading.Event()
        self._is_closed = False

    # -- in the leading thread -----------------------------------------------------------------------

    def start(self, owed: Sequence[tuple[TermFacts, Timestamp]]) -> None:
        """
        Start the thread of a term.

        Args:
            owed: plans of subscriptions that begin with snapshots, each with its original start. (The start
                itself moves back with a rewind.)
        """
        self._owed = list(owed)
        threading.Thread(target=self._run, name="mongo_celery-snapshot", daemon=True).start()

    def close(self) -> None:
        """Begin no more chunks, without waiting. A running call has a time limit."""
        self._is_closed = True
        self.notify()

    def notify(self) -> None:
        """End the thread's wait."""
        self._changed.set()

    def poll_now(self) -> None:
        """Make it poll snapshots."""
        self._poll_at = 0.0
        self.notify()

    def allow(self, names: frozenset[str]) -> None:
        """Set the subscriptions for which chunks may begin."""
        if names != self.allowed:
            self.allowed = names
            self.notify()

    @property
    def is_idle(self) -> bool:
        """Return True if the last poll found no snapshot in progress, and none is still to be requested."""
        return self.has_polled and not (self.records or self._owed)

    def under_way(self) -> list[Chunk]:
        """Return the chunks that are not recorded yet, and last the one that is being read."""
        reading = self.reading  # first: what is appended meanwhile is in both
        return [*list(self.appended), *([reading] if reading is not None else [])]

    def hand_over(self, chunk: Chunk) -> None:
        """Note that all documents of a chunk are in their partitions' queues."""
        attempts = self.attempts[chunk.snapshot.id] = self._get_attempts(chunk.snapshot.id).after_success()
        if chunk.snapshot.rate:
            attempts.gate.opens_at = chunk.sent_at + chunk.count / chunk.snapshot.rate
        self.appended[chunk] = None
        self.reading = None
        self.notify()

    def drop(self, chunk: Chunk, error: Exception | None = None) -> None:
        """
        Drop a chunk, with a reason or to read it again. Late results of its reading are ignored.

        This drops the next chunk too, since the record must not pass its end before the end of this one.
        """
        chunk.error = error
        open_chunks = self.under_way()
        for each in open_chunks[open_chunks.index(chunk) :] if chunk in open_chunks else []:
            if each.snapshot.id == chunk.snapshot.id:
                self.appended.pop(each, None)
                if self.reading is each:
                    self.reading = None
        self.notify()

    def choose(self) -> Snapshot | None:
        """Return the next snapshot that may begin a chunk. Snapshots take turns."""
        records = sorted(self.records.values(), key=lambda each: each.id)
        waiting = [each for each in records if self._may_begin(each)] if self.reading is None else []
        after = next((each for each in waiting if each.id > self._last_begun), None)
        return after or next(iter(waiting), None)

    def _may_begin(self, record: Snapshot) -> bool:
        appended = self._list_appended(record.id)
        if record.subscription not in self.allowed or len(appended) > 1 or any(each.end is None for each in appended):
            return False
        return self._get_attempts(record.id).gate.is_open(time.monotonic())

    def _list_appended(self, snapshot_id: str) -> list[Chunk]:
        """Return the chunks of a snapshot that are appended and not recorded, in order."""
        return [each for each in list(self.appended) if each.snapshot.id == snapshot_id]

    def _get_attempts(self, snapshot_id: str) -> Attempts:
        return self.attempts.setdefault(snapshot_id, Attempts())

    # -- in the thread -------------------------------------------------------------------------------

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
        """Do the due work on appended chunks, and find requests."""
        if not self._gate.is_open(time.monotonic()):
            return
        try:
            for chunk in list(self.appended):  # those of a snapshot in their order
                if not chunk.ends and self._list_appended(chunk.snapshot.id)[:1] == [chunk]:
                    self._move(chunk)
            if time.monotonic() >= self._poll_at:
                self._poll()
        except Exception as error:  # noqa: BLE001 - whatever the driver raises: it is tried again
            self._note_unread(error)

    def _poll(self) -> None:
        """Find this term's running snapshots. Request missing initial ones, and adopt those without an owner."""
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
            self._wake()  # it decides which may begin

    def _request_owed(self) -> None:
        """
        Request the snapshots with which handlers begin: `start_from="snapshot"`.

        The start was pinned first, in the same write that made them owed. So all later writes are in the stream, even
        the first document of a later collection. Their names consist of that start and the collection. If a term ends
        in between, the next one requests the rest, and nothing is requested twice. If collections cannot be listed,
        only this handler's snapshots wait.
        """
        for owed in list(self._owed):
            plan, start = owed
            name, pinned = plan.handler.name, f"{start.time:08x}{start.inc:08x}"
            found = self._list_collections(plan)
            if found is None:
                continue
            self._store.insert(
                {
                    "_id": self._store.make_id(name, f"{pinned}-{_brief(source)}"),
                    "source": source,
                    "by": "start_from='snapshot'",
                }
                for source in sorted(found)
            )
            self._wiring.store.subscriptions.note_snapshot(name, plan.version)
            self._owed.remove(owed)

    def _list_collections(self, plan: TermFacts) -> set[str] | None:
        """Return the collections of a handler's initial snapshots. None if they cannot be listed now."""
        name = plan.handler.name
        tried = self.unrequested.get(name) or Attempts()
        if not tried.gate.is_open(time.monotonic()):
            return None
        try:
            found = {each for source in plan.selector.sources for each in find_collections(self._wiring, source)}
        except InvalidOperation:  # the work has no more use
            raise
        except Exception as error:  # noqa: BLE001 - whatever the driver raises: it is tried again
            self._postpone_request(plan, tried, error)
            return None
        self.unrequested.pop(name, None)
        return found

    def _forget(self, snapshot_id: str) -> None:
        """Forget a record that is no longer running."""
        self.records = {name: each for name, each in self.records.items() if name != snapshot_id}
        self._poll_at = 0.0

    # -- a chunk -----------------------------------------------------------------------------------

    def _read_chunk(self, record: Snapshot) -> None:
        """Read the next chunk of a snapshot, and wait until it is appended."""
        try:
            found = self._prepare(record)
            if found is None:
                self._forget(record.id)
                return
            if not self._may_begin(found):
                return
            rows = self._get_attempts(found.id).limit_rows(found.rate)
            chunk = Chunk(found, self._led[found.subscription], rows, sent_at=time.monotonic(), after=found.moved)
            self.reading, self._last_begun = chunk, found.id  # from now on the leading thread notes changes
            for earlier in self._list_appended(found.id):
                chunk.snapshot, chunk.after = replace(found, last=earlier.end, until=earlier.until), earlier.begun
            chunk.low = self._store.begin(found, self._version)
            chunk.begun = found.begun + 1
            if chunk.low is None:
                raise RefusedChunkError
            self._read(chunk)
            while self._await_hand_over(chunk):
                if chunk.rounds > _ROUNDS_MAX:
                    raise ChunkFailedError("a document changes faster than the listener can read it")
                self._read(chunk)
        except RefusedChunkError:
            self._drop_reading()
            self._forget(record.id)
        except Exception as error:  # noqa: BLE001 - nothing of what was read may be used
            self._drop_reading()
            self._postpone(record, error)

    def _drop_reading(self) -> None:
        """Drop the chunk that is being read, unless it has just been appended."""
        if (chunk := self.reading) is not None:
            self.drop(chunk)

    def _prepare(self, record: Snapshot) -> Snapshot | None:
        """
        Return the current record, with the identity of its collection.

        None if it is not this term's, or if it ends here: the collection does not exist, or cannot have a snapshot.
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
                f"{found.source} was dropped or renamed during the snapshot. Its other documents are not delivered. "
                "Start another snapshot of the collection that replaced it",
                GONE,
            )
        elif facts is None:  # all its future documents are in the stream
            self._finish(found, found.begun, found.moved)
        elif facts.objection is not None or facts.uuid is None:
            self._end(found, f"a snapshot of {found.source} is not possible: {facts.objection}")
        else:
            count = estimate(self._wiring.client, found.source)
            if self._store.prepare(found, self._version, uuid=facts.uuid, estimated=count):
                return self._store.read_one(found.id)
        return None

    def _read(self, chunk: Chunk) -> None:
        """Read the documents of a chunk, or some of them again. Afterwards the leading thread may append them."""
        self._reader.read(chunk)
        facts = read_facts(self._wiring.client, chunk.snapshot.source)
        if facts is None or facts.uuid != chunk.snapshot.uuid:
            raise RefusedChunkError
        chunk.high = self._move_stream(chunk)
        self._wake()

    def _move_stream(self, chunk: Chunk) -> Timestamp:
        """Write something that moves the stream. Return its cluster time."""
        chunk.passed_at = time.monotonic()
        time_ = self._store.mark_read_end(chunk.snapshot.id, self._version, chunk.begun)
        if time_ is None:
            raise RefusedChunkError
        return time_

    def _await_hand_over(self, chunk: Chunk) -> bool:
        """
        Wait until the stream is past a chunk's place, and move it there. Meanwhile serve other chunks.

        Returns:
            True if some of its documents must be read again. False if it was appended or dropped.

        Raises:
            Exception: the reason of a drop, or a driver's error. The chunk is dropped and begins anew.
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
        """Record the end of a chunk or of the snapshot. Repeating it is harmless."""
        record = chunk.snapshot
        if chunk.end is not None:
            until = chunk.until if record.until is None else None
            begun, after = chunk.begun, chunk.after
            if self._store.move(record.id, self._version, begun, after, chunk.end, chunk.count, until):
                self.appended.pop(chunk, None)
                self._get_attempts(record.id).adapt(time.monotonic() - chunk.sent_at)
            else:  # not mine: the next begin finds out
                self.drop(chunk)
                self._poll_at = 0.0
        else:
            if self._finish(record, chunk.begun, chunk.after):
                self._forget(record.id)
            self.drop(chunk)
        self._wake()

    def _finish(self, record: Snapshot, begun: int, after: int) -> bool:
        """Record that nothing is left to read. Return False if the snapshot belongs to another term."""
        is_done = self._store.finish(record.id, self._version, begun, after)
        if is_done:
            logger.info(
                "the snapshot of %s for handler %s is complete",
                record.source,
                record.subscription,
                extra={"event": "snapshot_done", "snapshot": record.id},
            )
        return is_done

    def _end(self, record: Snapshot, sentence: str, state: str = FAILED) -> bool:
        """Record that a snapshot cannot continue. Return False if it belongs to another term or is not running."""
        is_ended = self._store.fail(record.id, self._version, sentence, state)
        if is_ended:
            logger.error(
                "the snapshot of %s for handler %s has failed after %d documents: %s. Only this snapshot has stopped",
                record.source,
                record.subscription,
                record.done,
                sentence,
                extra={"event": "snapshot_failed", "snapshot": record.id},
            )
        return is_ended

    # -- failures ------------------------------------------------------------------------------------

    def _postpone(self, record: Snapshot, error: Exception) -> None:
        """Try again later, with a smaller chunk. If that cannot help, end only this snapshot."""
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
            self._give_up(record, f"{ATTEMPTS_MAX} attempts to read documents have failed. The last error: {text}")
            return
        logger.warning(
            "the snapshot of %s for handler %s could not read documents, and tries again in %.1f s: %s",
            record.source,
            record.subscription,
            attempts.gate.opens_at - time.monotonic(),
            text,
            extra={"event": "snapshot_chunk_failed", "snapshot": record.id},
        )

    def _postpone_request(self, plan: TermFacts, tried: Attempts, error: Exception) -> None:
        """Try to request a handler's initial snapshots again later."""
        if self._is_closed:
            return
        name, sources = plan.handler.name, list_some([str(each) for each in plan.selector.sources])
        concern = ErrorContext(f"the collections of {sources}", "listCollections there")
        text = str(explain_error(error, concern) or error_text(error))
        tried.note_failure(error, text)
        self.unrequested[name] = tried
        logger.warning(
            "the snapshot of %s for handler %s has not started. The listener tries again in %.1f s: %s",
            sources,
            name,
            tried.gate.opens_at - time.monotonic(),
            text,
            extra={"event": "snapshot_not_started", "handler": name},
        )

    def _give_up(self, record: Snapshot, sentence: str) -> None:
        self._forget(record.id)
        self._get_attempts(record.id).gate.opens_at = time.monotonic() + PAUSES.longest
        try:
            self._end(record, sentence)
        except Exception as error:  # noqa: BLE001 - whatever the driver raises: the next attempt fails as well
            self._note_unread(error)

    def _concern(self, record: Snapshot) -> ErrorContext:
        grant = f"find and listCollections there, and find and update on snapshots in {self._wiring.options.database}"
        return ErrorContext(f"the snapshot of {record.source}", grant)

    def _note_unread(self, error: Exception) -> None:
        if self._is_closed or isinstance(error, InvalidOperation):  # the work has no more use
            self._is_closed = True
            return
        self._gate.note_failure()
        logger.warning(
            "the listener could not read or write the progress of snapshots, and tries again: %s",
            explain_error(error, self._wiring.state_concern) or error_text(error),
            extra={"event": "snapshots_unread"},
        )


def _brief(source: str) -> str:
    return hashlib.blake2b(source.encode(), digest_size=6).hexdigest()
