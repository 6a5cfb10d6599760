"""
Removing finished stored changes, and measuring the stored ones.

Nothing waits for either of them. A removal takes only changes that a majority image showed as committed, and none that
a later term has stored, so it is always harmless. Partitions with stored changes are known from this term's writes, and
from a walk over all stored changes at the beginning and from time to time: a listener that ended between storing and
marking leaves changes without a mark. A partition is forgotten only when all its changes are removed.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pymongo.errors import InvalidOperation, PyMongoError

from mongo_celery.bridge.existing import token_place
from mongo_celery.bridge.listener.pacing import LogThrottle
from mongo_celery.bridge.state.backlog import EVERYTHING, Backlog
from mongo_celery.mongo.verdicts import brief

if TYPE_CHECKING:
    from mongo_celery.bridge.state.partitions import Image

logger = logging.getLogger("mongo_celery.listener")

_PAUSE_SECONDS = 1.0
_STEP_SECONDS = 0.05
_WALK_SECONDS = 600.0
_MEASURED_SECONDS = 5.0
_REST = 20.0
"""Factor for the pause after a measurement: reading a bridge's size may take some seconds."""


@dataclass(frozen=True, slots=True)
class Done:
    """
    The place up to which a partition's changes are done.

    Attributes:
        committed: comparable part of the committed token in a majority image. Empty if nothing is committed.
        passed: the smaller of `committed` and the stored watermark. Changes before this place are never read again.
    """

    committed: str
    passed: str


class Removal:
    """
    The removals of one term: a job of its housekeeping.

    Args:
        backlog: the collection of stored changes.
        version: the number of the term.
        bound: limit of the bridge's stored bytes.
    """

    def __init__(self, backlog: Backlog, version: int, bound: int) -> None:
        self._backlog = backlog
        self._version = version
        self._lock = threading.Lock()
        self._last: dict[str, str] = {}  # the last stored place, by partition
        self._asked: dict[str, Done] = {}
        self._wanted: dict[str, Done] = {}
        self._measured = self._added = 0
        self._measured_next = 0.0
        self._bound = bound
        self._throttles = {"removing": LogThrottle(), "measuring": LogThrottle()}
        self._steps = self._remove_wanted()

    @property
    def size(self) -> int:
        """Return stored bytes: the last measurement plus this term's writes since."""
        with self._lock:
            return self._measured + self._added

    def note(self, partition_id: str, data: str, size: int = 0) -> None:
        """
        Note that a partition has or may have stored changes up to a token or place, and the bytes that this term
        has added.
        """
        with self._lock:
            self._last[partition_id] = max(self._last.get(partition_id, ""), token_place(data))
            self._added += size

    def ask(self, images: Mapping[str, Image], watermarks: Mapping[str, str]) -> bool:
        """
        Request the removal of finished changes. Return True if there are any.

        If a handler has another partitioning now, all stored changes of an old partition are removed.

        Args:
            images: the images of all led partitions, by `_id`.
            watermarks: the stored ones, by handler, from which a later term reads.
        """
        handlers = {partition_id.rsplit("/", 2)[0] for partition_id in images}
        with self._lock:
            for partition_id in self._last:
                image = images.get(partition_id)
                if image is not None:
                    watermark = watermarks.get(partition_id.split("/")[1], "")
                    done = Done(image.data, min(image.data, watermark))
                elif partition_id.rsplit("/", 2)[0] in handlers:
                    done = Done(EVERYTHING, EVERYTHING)
                else:
                    continue
                if done.committed and done != self._asked.get(partition_id):
                    self._asked[partition_id] = self._wanted[partition_id] = done
            return bool(self._wanted)

    def work(self) -> float:
        """Measure the stored bytes if due, and make one call of a removal or walk. Return the next pause."""
        try:
            self._measure()
            return next(self._steps)
        except InvalidOperation:
            return math.inf  # the client was closed: the work has no more use
        except Exception as error:
            self._steps = self._remove_wanted()  # after an error, the iterator would yield nothing more
            if not isinstance(error, PyMongoError):
                raise
            self._note_failure("removing", error)
            return _PAUSE_SECONDS

    def _measure(self) -> None:
        """Measure the stored bytes if due. If it fails, removal continues, and the measurement is repeated."""
        begun_at = time.monotonic()
        if begun_at < self._measured_next:
            return
        added, rest = self._added, _MEASURED_SECONDS
        try:
            size = self._backlog.size(self._bound // 2)
        except InvalidOperation:
            raise
        except PyMongoError as error:
            self._note_failure("measuring", error)
        else:
            rest = max(rest, _REST * (time.monotonic() - begun_at))
            with self._lock:
                self._measured = size
                self._added -= added  # bytes stored meanwhile may count twice for a while, but are never missed
        self._measured_next = time.monotonic() + rest

    def _note_failure(self, what: str, error: PyMongoError) -> None:
        if self._throttles[what].may_log():
            logger.warning(
                "the listener failed at %s stored changes, and tries again: %s",
                what,
                brief(error),
                extra={"event": "removal_failed"},
            )

    def _remove_wanted(self) -> Iterator[float]:
        """Make the requested removals, and otherwise continue the walk."""
        walk = self._walk()
        while True:
            while self._wanted:
                with self._lock:
                    partition_id, done = next(iter(self._wanted.items()))
                for _ in self._backlog.remove(partition_id, done.committed, done.passed, self._version):
                    yield 0.0
                with self._lock:
                    if self._wanted[partition_id] == done:
                        del self._wanted[partition_id]
                        if self._last[partition_id] <= token_place(done.passed):
                            del self._last[partition_id], self._asked[partition_id]
            yield next(walk)

    def _walk(self) -> Iterator[float]:
        """Walk over all partitions with stored changes. Yield the pauses after each step."""
        while True:
            found: str | None = None
            while (found := self._backlog.next_partition(found)) is not None:
                self.note(found, self._backlog.last(found))
                yield _STEP_SECONDS
            walked_at = time.monotonic()
            while time.monotonic() - walked_at < _WALK_SECONDS:
                yield _MEASURED_SECONDS
