"""
One run of the demo.

::

    writer --> orders --> bridge: 2 listeners, 1 worker with 2 processes --> summaries --> verdict

At first the writer writes as fast as it can without faults, to measure changes per second. Then it writes for some more
seconds while the leading listener and a worker process are killed.
"""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import redis
from pymongo import MongoClient, WriteConcern
from pymongo.errors import PyMongoError

from mongo_celery.demo.app import DemoSetting
from mongo_celery.embedded import MongoReplicaSet, RedisServer
from mongo_celery.embedded.processes import ChildProcess, Supervisor
from mongo_celery.embedded.server import find_binary
from mongo_celery.errors import MongoCeleryError, ServerUnavailableError
from mongo_celery.mongo.oplog import operation_time

REWRITES = 4
"""How often each order is written after its insert."""

WORKER_PROCESSES = 2
_APP = "mongo_celery.demo.app"
_FAULT_SECONDS = 8.0
_STALL_SECONDS_MAX = 60.0
_POLL_SECONDS = 0.1
_OPEN_ORDERS = 10  # written in turns: so few that the changes of an order follow each other
_ANSWER_MILLISECONDS_MAX = 10_000
# A fenced upsert that creates a document is a transaction. If its process is killed, the server locks the document for
# this time. With the default of 60 s a demo would seem to hang.
_PARAMETERS = ["transactionLifetimeLimitSeconds=5"]


class DemoFailedError(MongoCeleryError):
    """The demo did not finish. The message names the missing part."""


@dataclass(slots=True)
class Result:
    """
    The result of a run.

    Attributes:
        changes_per_second: the rate without faults.
        handled: the changes that took effect.
        takeover_seconds: the time from the kill of the leading listener to the next term.
        unfinished: reason why the run did not end. None if it did.
    """

    written: int = 0
    handled: int = 0
    changes_per_second: float | None = None
    takeover_seconds: float | None = None
    lost: Sequence[str] = ()
    out_of_order: Sequence[str] = ()
    duplicates: int = 0
    seconds: float = 0.0
    unfinished: str | None = None
    events: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if the run ended, and nothing was lost or out of order."""
        return self.unfinished is None and not self.lost and not self.out_of_order


@dataclass(frozen=True, slots=True)
class Servers:
    """The URLs of the servers."""

    mongo: str
    redis: str


@contextmanager
def embedded_servers() -> Iterator[Servers]:
    """Start MongoDB and Redis, and end them after the block."""
    find_binary("redis-server")  # fail before spending three seconds on the other one
    with MongoReplicaSet(parameters=_PARAMETERS) as mongo, RedisServer() as broker:
        yield Servers(mongo.url, broker.url)


def run_demo(
    orders: int, *, faults: bool, servers: Servers, show: Callable[[str], None], announce: Callable[[str], None]
) -> Result:
    """
    Run the demo once. Afterwards it leaves nothing on the servers.

    Args:
        orders: number of orders. Each is written several times.
        faults: True to kill processes.
        show: called often with a line about progress.
        announce: called with each event.

    Raises:
        ServerUnavailableError: a server does not answer.
        DeploymentError: MongoDB is not a replica set.
    """
    with ExitStack() as stack:
        try:
            client: MongoClient[dict[str, Any]] = stack.enter_context(
                MongoClient(servers.mongo, serverSelectionTimeoutMS=_ANSWER_MILLISECONDS_MAX)
            )
            start = operation_time(client)
            broker = stack.enter_context(redis.Redis.from_url(servers.redis))
            broker.ping()
        except (PyMongoError, redis.RedisError) as error:
            raise ServerUnavailableError(f"A server did not answer: {str(error).split(', Timeout:')[0]}.") from error
        name = f"mongo_celery_demo_{secrets.token_hex(4)}"
        setting = DemoSetting(servers.mongo, servers.redis, name, (start.time, start.inc))
        stack.callback(_remove_traces, client, broker, setting)
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="mongo_celery_demo_"))
        processes = stack.enter_context(Supervisor(Path(directory), ChildProcess, environment=setting.environment()))
        return _Demo(client, setting, processes, show, announce).play(orders, faults=faults)


class _Demo:
    """The script of a run."""

    def __init__(
        self,
        client: MongoClient[dict[str, Any]],
        setting: DemoSetting,
        processes: Supervisor[ChildProcess],
        show: Callable[[str], None],
        announce: Callable[[str], None],
    ) -> None:
        database = client.get_database(setting.name, write_concern=WriteConcern("majority"))
        self._orders, self._summaries = database["orders"], database["summaries"]
        self._leases = client[setting.state_database]["leases"]
        self._processes = processes
        self._show, self._announce = show, announce
        self._began = time.monotonic()
        self._result = Result()
        self._ended = threading.Event()

    def play(self, orders: int, *, faults: bool) -> Result:
        """Start the processes, write, kill, wait until all changes are handled, and judge."""
        keys = [f"order-{number:05d}" for number in range(orders)]
        with ThreadPoolExecutor(1) as pool:
            try:
                self._start_processes()
                self._measure(pool.submit(self._write, keys[: orders // 2], 0.0))
                writer = pool.submit(self._write, keys[orders // 2 :], _FAULT_SECONDS if faults else 0.0)
                if faults:
                    self._kill_leader()
                    self._kill_worker_process()
                self._wait_until_handled(writer)
            except DemoFailedError as error:
                self._result.unfinished = str(error)
            finally:
                self._ended.set()
        self._processes.end()
        self._judge(keys)
        return self._result

    def _start_processes(self) -> None:
        self._show("starting two listeners and a worker")
        self._listeners = [self._processes.celery(_APP, "listener", "-l", "WARNING") for _ in range(2)]
        pool = ("-P", "prefork", "-c", str(WORKER_PROCESSES), "-l", "WARNING")
        self._worker = self._processes.celery(_APP, "worker", *pool, "--without-gossip", "--without-mingle")
        self._wait("a listener that leads", lambda: self._lease().get("state") == "leading")

    def _write(self, keys: Sequence[str], seconds: float) -> None:
        """Insert and replace orders, spread over a time. A majority acknowledges each write."""
        writes = list(plan_writes(keys))
        began = time.monotonic()
        for place, (key, n) in enumerate(writes):
            if self._ended.wait(max(began + seconds * place / len(writes) - time.monotonic(), 0.0)):
                return
            self._orders.replace_one({"_id": key}, {"n": n, "amount": 10 * n}, upsert=True)
            self._result.written += 1

    def _measure(self, writer: Future[None]) -> None:
        """Measure the rate from the first handled change, without faults."""
        self._wait("the first change", lambda: self._result.handled)
        began, before = time.monotonic(), self._result.handled
        self._wait_until_handled(writer)
        count, seconds = self._result.handled - before, time.monotonic() - began
        self._result.changes_per_second = count / seconds
        self._note(f"{count / seconds:.0f} changes a second without faults ({count} in {seconds:.1f} s)")

    def _kill_leader(self) -> None:
        lease = self._lease()
        leader = next(each for each in self._listeners if each.pid == lease["pid"])
        began = time.monotonic()
        leader.kill()
        self._note(f"killed the leading listener (pid {leader.pid}) with SIGKILL")
        self._wait("the take-over", lambda: self._lease().get("term", 0) > lease["term"])
        self._result.takeover_seconds = time.monotonic() - began
        self._note(f"pid {self._lease()['pid']} took over after {self._result.takeover_seconds:.1f} s")

    def _kill_worker_process(self) -> None:
        before = self._result.handled
        self._wait("a change after the take-over", lambda: self._result.handled > before)
        victim = self._worker.children()[0]
        os.kill(victim, signal.SIGKILL)
        self._note(f"killed a process of the worker (pid {victim}) with SIGKILL")

    def _wait_until_handled(self, writer: Future[None]) -> None:
        self._wait("the rest", lambda: writer.done() and self._result.handled == self._result.written)
        writer.result()

    def _wait(self, what: str, condition: Callable[[], object]) -> None:
        """
        Wait for a condition, as long as there is progress.

        Raises:
            DemoFailedError: a process failed, or there was no progress for a minute.
        """
        last, until = (-1, -1), time.monotonic() + _STALL_SECONDS_MAX
        while not condition():
            failed = self._processes.failed()
            if failed is not None:
                words = f"{failed.name} ended with status {failed.returncode}. Its last words:\n{failed.last_words}"
                raise DemoFailedError(words)
            now = self._result.written, self._read_handled()
            if now != last:
                last, until = now, time.monotonic() + _STALL_SECONDS_MAX
            if time.monotonic() > until:
                raise DemoFailedError(
                    f"Nothing changed for {_STALL_SECONDS_MAX:.0f} s while the demo waited for {what}."
                )
            leader = self._lease().get("pid", "none")
            self._show(f"written {now[0]}, handled {now[1]}, leading listener: pid {leader}")
            time.sleep(_POLL_SECONDS)

    def _read_handled(self) -> int:
        """Let the server count changes that took effect."""
        count = {"$sum": {"$size": {"$setUnion": "$seen"}}}
        found = next(self._summaries.aggregate([{"$group": {"_id": None, "count": count}}]), {"count": 0})
        self._result.handled = found["count"]
        return self._result.handled

    def _lease(self) -> Mapping[str, Any]:
        return self._leases.find_one({"_id": "demo"}) or {}

    def _note(self, event: str) -> None:
        self._result.events.append(event)
        self._announce(event)

    def _judge(self, keys: Sequence[str]) -> None:
        self._read_handled()
        summaries = {each["_id"]: each["seen"] for each in self._summaries.find()}
        self._result.lost = find_lost(keys, summaries)
        self._result.out_of_order = find_out_of_order(summaries)
        self._result.duplicates = sum(len(seen) - len(set(seen)) for seen in summaries.values())
        self._result.seconds = time.monotonic() - self._began


def plan_writes(keys: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield key and number of each write, for a few orders in turn."""
    for first in range(0, len(keys), _OPEN_ORDERS):
        for n in range(REWRITES + 1):
            for key in keys[first : first + _OPEN_ORDERS]:
                yield key, n


def find_lost(keys: Iterable[str], summaries: Mapping[str, Sequence[int]]) -> list[str]:
    """Return a sentence for each write that no summary contains."""
    writes = plan_writes(list(keys))
    return [f"{key} n={n} was lost" for key, n in writes if n not in summaries.get(key, ())]


def find_out_of_order(summaries: Mapping[str, Sequence[int]]) -> list[str]:
    """Return a sentence for each effect that came after a later one of the same order."""
    return [
        f"{key} n={later} took effect after n={earlier}"
        for key, seen in summaries.items()
        for earlier, later in pairwise(seen)
        if later < earlier
    ]


def _remove_traces(client: MongoClient[dict[str, Any]], broker: redis.Redis, setting: DemoSetting) -> None:
    client.drop_database(setting.name)
    client.drop_database(setting.state_database)
    for key in broker.scan_iter(match=f"{setting.name}.*"):
        broker.delete(key)
