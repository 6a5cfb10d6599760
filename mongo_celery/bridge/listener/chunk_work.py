"""
The work of a chunk: what a snapshot does with servers, in a thread that the leading one does not wait for.

Each is one errand. What they find is in the chunk, or in what they return; the leading thread judges it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mongo_celery.bridge.listener.chunks import ChunkReader, estimate, facts_of
from mongo_celery.bridge.state.snapshots import DONE, FAILED, GONE, RUNNING

if TYPE_CHECKING:
    from bson import Timestamp

    from mongo_celery.bridge.listener.chunks import Chunk
    from mongo_celery.bridge.listener.owed import OwedSnapshots
    from mongo_celery.bridge.state.snapshots import Snapshot
    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.listener")


def gone(source: str) -> str:
    """Why a snapshot of a collection that was dropped or renamed has ended."""
    return (
        f"{source} was dropped or renamed while it was read; what was not read by then is not delivered. "
        "Start another snapshot of what has taken its place"
    )


class RefusedChunkError(Exception):
    """A write on the record was refused: it is another term's, or somebody has stopped it."""


class ChunkWork:
    """
    The work of one term.

    Args:
        wiring: of the bridge.
        version: of the term.
        owed: snapshots with which subscriptions begin.
        notice: called when the leading thread may do more with a chunk.
    """

    def __init__(self, wiring: Wiring, version: int, owed: OwedSnapshots, notice: Callable[[], None]) -> None:
        self._client = wiring.client
        self._store = wiring.store.snapshots
        self._reader = ChunkReader(wiring.client, wiring.options.pipeline, version)
        self._version = version
        self._owed = owed
        self._notice = notice

    def look(self) -> list[Snapshot]:
        """Those of this term that run; what is owed is asked for, and what is nobody's yet is taken over."""
        self._owed.ask()
        found = self._store.read(running=True)
        if any(each.epoch < self._version for each in found):
            self._store.take_over(self._version)
            found = self._store.read(running=True)
        return [each for each in found if each.epoch == self._version]

    def prepare(self, record: Snapshot) -> Snapshot | None:
        """
        The record as it is now, and which collection it is. The stream goes on meanwhile.

        None where it is not this term's, or ends here: the collection is not there, or can have no snapshot.
        """
        found = self._store.read_one(record.id)
        if found is None or found.epoch != self._version or found.state != RUNNING:
            return None
        facts = facts_of(self._client, found.source)
        if found.uuid is not None:  # it may have been dropped while nobody has looked
            if facts is not None and facts.uuid == found.uuid:
                return found
            self.end(found, gone(found.source), GONE)
        elif facts is None:  # all that will be in it is in the stream
            self.finish(found, found.begun)
        elif facts.objection is not None or facts.uuid is None:
            self.end(found, f"there can be none of {found.source}: {facts.objection}")
        else:
            count = estimate(self._client, found.source)
            if self._store.prepare(found, self._version, uuid=facts.uuid, at=facts.at, estimated=count):
                return self._store.read_one(found.id)
        return None

    def read(self, chunk: Chunk) -> None:
        """
        Begin a chunk, or what is read again of one, and read it.

        Raises:
            RefusedChunkError: it is not this term's.
            Exception: nothing of what was read may be used.
        """
        record = chunk.snapshot
        if not chunk.begun:
            chunk.low = self._store.begin(record, self._version)
            if chunk.low is None:
                raise RefusedChunkError
            chunk.begun = record.begun + 1
        self._reader.read(chunk)
        if chunk.end is None:
            facts = facts_of(self._client, record.source)
            chunk.is_there = facts is not None and facts.uuid == record.uuid
        chunk.high = self.pass_on(chunk)
        self._notice()

    def pass_on(self, chunk: Chunk) -> Timestamp:
        """
        Write something, which the stream has to come by; return its cluster time.

        Raises:
            RefusedChunkError: it is not this term's.
        """
        chunk.passed_at = time.monotonic()
        time_ = self._store.pass_on(chunk.snapshot.id, self._version, chunk.begun)
        if time_ is None:
            raise RefusedChunkError
        return time_

    def move(self, chunk: Chunk) -> bool:
        """Record that a chunk is done; False where it is recorded already, or not this term's."""
        assert chunk.end is not None, "something was read"
        until = chunk.until if chunk.snapshot.until is None else None
        return self._store.move(chunk.snapshot.id, self._version, chunk.begun, chunk.end, chunk.count, until)

    def finish(self, record: Snapshot, begun: int) -> bool:
        """Nothing is left to read; False where it is not this term's."""
        is_done = self._store.finish(record.id, self._version, begun, DONE)
        if is_done:
            logger.info(
                "the snapshot of %s for handler %s is done",
                record.source,
                record.subscription,
                extra={"event": "snapshot_done", "snapshot": record.id},
            )
        return is_done

    def end(self, record: Snapshot, sentence: str, state: str = FAILED) -> bool:
        """It cannot go on; False where it is not this term's, or does not run."""
        is_ended = self._store.fail(record.id, self._version, sentence, state)
        if is_ended:
            logger.error(
                "the snapshot of %s for handler %s has ended after %d documents: %s. Other handlers, and the changes "
                "of this one, go on",
                record.source,
                record.subscription,
                record.done,
                sentence,
                extra={"event": "snapshot_failed", "snapshot": record.id},
            )
        return is_ended
