"""A bridge with two listeners, workers and a load, as a test of the listener sets it up."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from pymongo.errors import PyMongoError

from mongo_celery.mongo.oplog import operation_time
from tests.fixtures.process import ProjectProcess, wait_for
from tests.rig.deployment import SHORT_TIMES, Deployment
from tests.rig.history import Due, longest_gap

Document = dict[str, Any]

LEASE_TTL: float = SHORT_TIMES["lease_ttl"]
_BUSY_SECONDS = 10.0
"""What a machine that is busy with other tests may add to a time; `mongo-celery bench` measures it on its own."""
TAKE_OVER_SECONDS_MAX = LEASE_TTL + 2 + _BUSY_SECONDS
HANDLER = "plain"
KEYS = tuple(f"key{number}" for number in range(8))
_WRITE_PAUSE = 0.04
_SECOND = 1_000_000_000


class Scene(Deployment):
    """One bridge, a load on it, and the moments at which its handlers start."""

    def pair(self, **given: Any) -> tuple[ProjectProcess, ProjectProcess]:
        """Start a worker and two listeners, and return the leader and the standby."""
        both = [self.listener(name, awaited="", **given) for name in ("first", "second")]
        self.worker(**given)
        for each in both:
            each.wait_for_output("reading from|standing by")
        leading = [each for each in both if "leading bridge" in each.text]
        assert len(leading) == 1, "one of two leads"
        return leading[0], next(each for each in both if each is not leading[0])

    @contextmanager
    def load(self) -> Iterator[None]:
        stopping = threading.Event()

        def write() -> None:
            for number, key in enumerate(itertools.cycle(KEYS)):
                if stopping.wait(_WRITE_PAUSE):
                    return
                wait_for(partial(self._try_to_write, key, 1 + number // len(KEYS)), message=f"{key} is written")

        writer = threading.Thread(target=write, name="load", daemon=True)
        writer.start()
        try:
            yield
        finally:
            stopping.set()
            writer.join()

    def _try_to_write(self, key: str, n: int) -> Due | None:
        """Write one change, if the server takes it: repeating it changes nothing."""
        with suppress(PyMongoError):
            return self.write(HANDLER, key, n)
        return None

    def flow(self, more: int = 20) -> None:
        """Wait until more handlers have started."""
        enough = len(self.starts()) + more
        wait_for(lambda: len(self.starts()) >= enough, message=f"{more} more starts")

    def seconds_until_resumed(self, end: Callable[[], object]) -> float:
        """End a leader, and wait until a handler starts under a later term; the seconds from one to the other."""
        term, since = self.lease["term"], time.monotonic_ns()
        end()
        wait_for(lambda: self.lease["term"] > term, message="a later term")
        led = time.monotonic_ns()

        def started() -> float | None:
            return next((start.at for start in self.starts() if start.at >= led), None)

        return (wait_for(started, message="a handler starts under the new term") - since) / _SECOND

    def longest_gap(self, since: int) -> float:
        """Give the longest time without a start from a moment on, in seconds."""
        return longest_gap(self.starts(), since, time.monotonic_ns()) / _SECOND

    def settle(self, *, faults: int = 0) -> None:
        """Wait until everything written is done, and the watermark is there; then judge the history."""
        self.wait_effects()
        last = operation_time(self.client)
        passed = {"_id": f"chain/{HANDLER}", "clusterTime": {"$gte": last}}
        wait_for(lambda: self.state["handlers"].count_documents(passed), message="the watermark passes all writes")
        self.judge_oplog(spare=faults)
