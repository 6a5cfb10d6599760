"""
Removing stored changes that are done, and measuring what is stored.

Nothing waits for either. A removal takes what a majority image showed as committed, and only what no later term has
stored, so that it is harmless whenever it happens. Partitions of which something is stored are known by what this term
stores, and by a walk over all that is stored, at the beginning and now and then: a listener that ended between storing
and marking leaves changes without a mark. A partition is let go of only when all of it was removed.
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
"""How many times as long as it took nothing is measured: reading what a bridge has takes some seconds."""


@dataclass(frozen=True, slots=True)
class Done:
    """
    Up to where the changes of a partition are done.

    Attributes:
        committed: comparable part of the committed token of a majority image. Empty for nothing.
        passed: the same, no further than the stored watermark: up to there no change is read again.
    """

    committed: str
    passed: str


class Removal:
    """
    The removals of one term: a job of its housekeeping.

    Args:
        backlog: where the changes are stored.
        version: of the term.
        bound: bytes that the bridge may have stored.
    """

    def __init__(self, backlog: Backlog, version: int, bound: int) -> None:
        self._backlog = backlog
        self._version = version
        self._lock = threading.Lock()
        self._last: dict[str, str] = {}  # places up to which something is stored, by partition
        self._asked: dict[str, Done] = {}
        self._wanted: dict[str, Done] = {}
        self._measured = self._added = 0
        self._measured_next = 0.0
        self._bound = bound
        self._throttles = {"removing": LogThrottle(), "measuring": LogThrottle()}
        self._steps = self._remove_wanted()

    @property
    def size(self) -> int:
        """Bytes that are stored: as they were measured last, with what this term has added since."""
        with self._lock:
            return self._measured + self._added

    def note(self, partition_id: str, place: str, size: int = 0) -> None:
        """Something is stored of a partition up to a place, or may be. This term has added so many bytes."""
        with self._lock:
            self._last[partition_id] = max(self._last.get(partition_id, ""), place)
            self._added += size

    def ask(self, images: Mapping[str, Image], watermarks: Mapping[str, str]) -> bool:
        """
        Have removed what is done by now. Return True if there is anything.

        All that is stored goes of a partition that its handler no longer has, since it was repartitioned.

        Args:
            images: of all partitions that are led, by their `_id`s.
            watermarks: the stored ones, by handler: from there a later term reads.
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
        """Measure what is stored, if that is due, and make one call of a removal or the walk. Return the pause then."""
        try:
            self._measure()
            return next(self._steps)
        except InvalidOperation:
            return math.inf  # the client was closed: nobody is left for whom this is done
        except Exception as error:
            self._steps = self._remove_wanted()  # one that has raised would give nothing any more
            if not isinstance(error, PyMongoError):
                raise
            self._note_failure("removing", error)
            return _PAUSE_SECONDS

    def _measure(self) -> None:
        """Measure what is stored, if that is due. Where it fails, removal goes on, and it is tried again."""
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
                self._added -= added  # what was stored meanwhile may count twice for a while, and never not at all
        self._measured_next = time.monotonic() + rest

    def _note_failure(self, what: str, error: PyMongoError) -> None:
        if self._throttles[what].may_log():
            logger.warning(
                "%s stored changes failed, trying again: %s", what, brief(error), extra={"event": "removal_failed"}
            )

    def _remove_wanted(self) -> Iterator[float]:
        """Remove what is wanted, and walk on when nothing is."""
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
        """Steps over all partitions that have anything stored. The pauses after them."""
        while True:
            found: str | None = None
            while (found := self._backlog.next_partition(found)) is not None:
                self.note(found, self._backlog.last(found))
                yield _STEP_SECONDS
            walked_at = time.monotonic()
            while time.monotonic() - walked_at < _WALK_SECONDS:
                yield _MEASURED_SECONDS
