"""A bridge with listeners, workers and a load, as a test of the listener sets it up and takes it apart."""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Self
from uuid import uuid4

from pymongo import MongoClient, WriteConcern
from pymongo.errors import PyMongoError

from tests.acceptance.watcher import Watcher
from tests.chaos.history import Effect, Led, Started, Stored, Wrote, lost, violations
from tests.fixtures.mongo import empty
from tests.fixtures.process import PATIENCE_SECONDS, Processes, ProjectProcess, wait_for

Document = dict[str, Any]
Variables = Mapping[str, str]

LEASE_TTL = 2.0
_BUSY_SECONDS = 10.0
"""What a machine that is busy with other tests may add to a time; `mongo-celery bench` measures it on its own."""
TAKE_OVER_SECONDS_MAX = LEASE_TTL + 2 + _BUSY_SECONDS
OPTIONS: Document = {
    "partitions": 4,
    "queues": 2,
    "lease_ttl": LEASE_TTL,
    "claim_ttl": 2.0,
    "dispatch_grace": 1.5,
    "commit_grace": 0.5,
}
KEYS = tuple(f"key{number}" for number in range(8))
_WRITE_PAUSE = 0.04
_APP = "tests.acceptance.project.app"


class Load:
    """Writes to the watched collection, one key after another, until it is stopped."""

    def __init__(self, client: MongoClient[Document], names: str, numbers: dict[str, int]) -> None:
        self._items = client[f"{names}_data"].get_collection("items", write_concern=WriteConcern("majority"))
        self._numbers = numbers
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        self._thread.join()

    def write(self, key: str) -> int:
        """Write the next number of a key, whatever it takes; written twice it is still one change."""
        number = self._numbers[key] = self._numbers.get(key, 0) + 1
        for _ in range(100):
            try:
                self._items.update_one({"_id": key}, {"$set": {"n": number}}, upsert=True)
                return number
            except PyMongoError:
                self._stopping.wait(0.1)
        raise AssertionError(f"could not write {key} {number}")

    def _run(self) -> None:
        for key in itertools.cycle(KEYS):
            if self._stopping.wait(_WRITE_PAUSE):
                return
            self.write(key)


class Scene:
    """
    One bridge on real servers; all its databases have one name in common.

    Args:
        processes: starts and ends the processes.
        client: of the replica set that holds data, state and sink.
        url: of that set.
        broker: URL of the broker.
        options: the bridge's options, over `OPTIONS`.
    """

    def __init__(
        self, processes: Processes, client: MongoClient[Document], url: str, broker: str, **options: Any
    ) -> None:
        self.names = f"scene_{uuid4().hex[:10]}"
        self.client = client
        self.state = client[f"{self.names}_state"]
        self.sink = client[f"{self.names}_sink"]
        self.items = client[f"{self.names}_data"]["items"]
        self.numbers: dict[str, int] = {}
        self.watcher = Watcher(client, self.names)
        self.handlers: dict[str, str] = {"record": ""}
        self._processes = processes
        self._options = {**OPTIONS, **options}
        self._environment = {
            "PROJECT_MONGO": url,
            "PROJECT_BROKER": broker,
            "PROJECT_SINK": url,
            "PROJECT_NAMES": self.names,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._processes.__exit__()
        self.watcher.stop()
        for part in ("data", "state", "sink"):
            empty(self.client, f"{self.names}_{part}")

    # -- processes ---------------------------------------------------------------------------------

    def listener(self, name: str = "listener", *, added: Variables | None = None, **options: Any) -> ProjectProcess:
        """Start a listener; does not wait."""
        return self._start(name, ["listener", "-l", "INFO"], added, options)

    def worker(self, name: str = "worker", *, added: Variables | None = None, **options: Any) -> ProjectProcess:
        """Start a worker with two processes; does not wait."""
        arguments = ["worker", "-c", "2", "-l", "INFO", "--without-gossip", "--without-mingle", "-n", f"{name}@here"]
        return self._start(name, arguments, added, options)

    def leader(self, name: str = "leader", **options: Any) -> ProjectProcess:
        """Start a listener and wait until it reads the stream."""
        process = self.listener(name, **options)
        process.wait_for_output("reading from")
        return process

    def pair(self, workers: int = 1, **options: Any) -> tuple[ProjectProcess, ProjectProcess]:
        """Start workers and two listeners at once, wait for all, and return the leader and the standby."""
        working = [self.worker(f"worker{number}") for number in range(workers)]
        both = [self.listener("first", **options), self.listener("second", **options)]
        for each in working:
            each.wait_for_output("ready")
        for each in both:
            each.wait_for_output("reading from|standing by")
        leading = [each for each in both if "leading bridge" in each.text]
        assert len(leading) == 1, "one of two leads"
        return leading[0], next(each for each in both if each is not leading[0])

    def _start(self, name: str, arguments: list[str], added: Variables | None, options: Document) -> ProjectProcess:
        chosen = json.dumps({**self._options, **options})
        variables = {**self._environment, "PROJECT_OPTIONS": chosen, **(added or {})}
        return self._processes.start(
            name, sys.executable, "-m", "celery", "-A", _APP, *arguments, environment=variables
        )

    # -- load --------------------------------------------------------------------------------------

    def load(self) -> Load:
        """A load that runs as long as its `with` block."""
        return Load(self.client, self.names, self.numbers)

    def write(self, *keys: str) -> None:
        """Write the next number of each key."""
        load = self.load()
        for key in keys:
            load.write(key)

    def open_gate(self, key: str) -> None:
        """Let the slow handlers of a key go on."""
        self.sink["gates"].insert_one({"_id": key})

    # -- what happened -----------------------------------------------------------------------------

    @property
    def starts(self) -> list[Started]:
        """All starts so far."""
        return [fact for fact in self.watcher.history if isinstance(fact, Started)]

    @property
    def effects(self) -> list[Effect]:
        """All accepted effects so far."""
        return [fact for fact in self.watcher.history if isinstance(fact, Effect)]

    @property
    def terms(self) -> list[Led]:
        """All acquisitions of the lease so far."""
        return [fact for fact in self.watcher.history if isinstance(fact, Led)]

    def lease(self) -> Document:
        """The lease document."""
        return self.state["leases"].find_one({"_id": "project"}) or {}

    def last_place_before(self, key: str, n: int, more: int = 0) -> str:
        """A place between the write before this one (or, with `more`, this one) and the next."""
        written = wait_for(lambda: self._written_until(key, n))
        places = [fact.place for fact in written]
        return places[-1] if more else places[-2]

    def _written_until(self, key: str, n: int) -> list[Wrote]:
        written = [fact for fact in self.watcher.history if isinstance(fact, Wrote)]
        found = next((at for at, fact in enumerate(written) if (fact.key, fact.n) == (key, n)), None)
        return [] if found is None else written[: found + 1]

    def flows(self, more: int = 20) -> None:
        """Wait until more handlers have started."""
        enough = len(self.starts) + more
        wait_for(lambda: len(self.starts) >= enough, message=f"{more} more starts")

    def resumed_after(self, since: float) -> float:
        """Seconds from a moment of `time.time` to the first start of a later term than the one of then."""
        version = max((term.version for term in self.terms if term.at <= since), default=0)

        def first() -> float | None:
            later = [term.at for term in self.terms if term.version > version]
            times = [fact.at for fact in self.starts if later and fact.at >= later[0]]
            return times[0] - since if times else None

        return wait_for(first, message="a handler starts under a new term")

    def settle(self, seconds: float = PATIENCE_SECONDS, *, faults: int = 0) -> None:
        """Wait until everything written is done and the watermark is there; then judge the history."""
        history = self.watcher.history
        last = self.items.find_one(sort=[("n", -1)])
        if last is not None:
            wait_for(lambda: any(isinstance(fact, Wrote) and fact.n == last["n"] for fact in history))
        wait_for(
            lambda: not lost(list(history), self.handlers),
            seconds,
            lambda: f"not all is done: {lost(list(history), self.handlers)[:5]}",
        )
        wait_for(self._watermarks_are_there, seconds, "the watermarks have reached the last write")
        found = violations(list(history), self.handlers, spare=faults)
        assert not found, f"{len(found)} violations: {found[:10]}"

    def _watermarks_are_there(self) -> bool:
        history = list(self.watcher.history)
        place = max((fact.place for fact in history if isinstance(fact, Wrote)), default="")
        reached = {fact.passed for fact in history if isinstance(fact, Stored) and fact.passed and fact.place >= place}
        return not place or reached >= set(self.handlers)


def now() -> float:
    """The time of this machine, which is also the servers'."""
    return time.time()
