"""The stage of a run: servers, unique names, and the processes of one measurement."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import redis
from pymongo import MongoClient
from pymongo.collection import Collection
from pymongo.database import Database

from mongo_celery.bench.payload import present_time
from mongo_celery.bench.setting import BenchSetting
from mongo_celery.bench.stopwatch import Laps, cpu_seconds
from mongo_celery.embedded import MongoReplicaSet, RedisServer
from mongo_celery.embedded.processes import GRACE_SECONDS, ChildProcess, Supervisor
from mongo_celery.errors import MongoCeleryError

_OPLOG_MB = 2048
_STALL_SECONDS_MAX = 60.0
_LOOK_SECONDS = 0.01
_PATH = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]


class BenchError(MongoCeleryError):
    """A measurement did not end. The message names the process that failed, and quotes its log."""


def pause(seconds: float) -> None:
    """Wait between two polls."""
    time.sleep(seconds)


class Stage:
    """
    The servers of a run. A context manager.

    Args:
        mongo_url: the URL of a replica set. By default an embedded one starts.
        redis_url: the URL of a Redis. By default an embedded one starts.

    Attributes:
        server_pids: process ids of embedded servers, by name. The CPU time of other servers is unknown.
    """

    def __init__(self, mongo_url: str | None = None, redis_url: str | None = None) -> None:
        self._given = (mongo_url, redis_url)
        self._stack = contextlib.ExitStack()
        self._numbers = itertools.count(1)
        self._token = secrets.token_hex(3)
        self.server_pids: dict[str, int] = {}

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            mongo_url, redis_url = self._given
            if mongo_url is None:
                mongo = stack.enter_context(MongoReplicaSet(oplog_mb=_OPLOG_MB))
                mongo_url, self.server_pids["mongod"] = mongo.url, mongo.pid
            if redis_url is None:
                server = stack.enter_context(RedisServer())
                redis_url, self.server_pids["redis"] = server.url, server.pid
            self.mongo_url, self.redis_url = mongo_url, redis_url
            self.client: MongoClient[dict[str, Any]] = stack.enter_context(MongoClient(mongo_url))
            self.broker = redis.Redis.from_url(redis_url)
            stack.callback(self.broker.close)
            self.directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mongo_celery_bench_")))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def scene(self, mode: str, **bridge: Any) -> Iterator[Scene]:
        """
        Open the scene of one measurement. Afterwards, remove all its processes and data.

        Args:
            mode: a part of its names.
            bridge: the bridge's options.
        """
        name = f"bench-{self._token}-{next(self._numbers)}-{mode.replace('_', '-')}"
        clock = self.directory / name
        clock.mkdir()
        setting = BenchSetting(
            mongo_url=self.mongo_url, redis_url=self.redis_url, name=name, mode=mode, clock=str(clock), bridge=bridge
        )
        scene = Scene(self, setting)
        scene.begin_now()
        try:
            yield scene
        finally:
            scene.end()


class Scene:
    """The processes, times and data of one measurement."""

    def __init__(self, stage: Stage, setting: BenchSetting) -> None:
        self._stage = stage
        self.setting = setting
        self._laps: dict[str, Laps] = {}
        # A killed worker leaves unacknowledged messages in keys that all apps of a Redis share.
        grace = 0.0 if "redis" in stage.server_pids else GRACE_SECONDS
        self._processes = Supervisor(Path(setting.clock), ChildProcess, grace=grace)

    @property
    def orders(self) -> Collection[dict[str, Any]]:
        """The collection that the modes watch."""
        return self.data["orders"]

    @property
    def data(self) -> Database[dict[str, Any]]:
        """The database of the measured processes."""
        return self._stage.client[self.setting.database]

    @property
    def state(self) -> Database[dict[str, Any]]:
        """The state database."""
        return self._stage.client[self.setting.state_database]

    @property
    def started(self) -> Laps:
        """The times at which handlers started."""
        return self.laps("started")

    def laps(self, kind: str) -> Laps:
        """The noted times of a kind."""
        return self._laps.setdefault(kind, Laps(Path(self.setting.clock), kind))

    def begin_now(self) -> None:
        """Let streams of new processes begin at the present time."""
        start = present_time(self._stage.client)
        self.setting = replace(self.setting, start=(start.time, start.inc))

    def lease(self) -> Mapping[str, Any]:
        """Return the bridge's lease document, or an empty one."""
        return self.state["leases"].find_one({"_id": self.setting.name}) or {}

    def committed(self) -> int:
        """Return the number of committed changes in the bridge's partition documents."""
        return sum(document["committed"] for document in self.state["partitions"].find({}, {"committed": 1}))

    def worker(self, app: str, queues: str | None = None) -> ChildProcess:
        """
        Start a Celery worker with the settings of all modes: prefork, with defaults except for its size.

        Args:
            app: the name of its module.
            queues: the queues that it consumes. By default all.
        """
        arguments = ["-c", "2", "-l", "WARNING", "--without-gossip", "--without-mingle"]
        arguments += ["--without-heartbeat", *(["-Q", queues] if queues else [])]
        return self._celery(app, "worker", *arguments, "-n", f"{self.setting.name}@{socket.gethostname()}")

    def listener(self, app: str) -> ChildProcess:
        """Start a listener of an app, by module name."""
        return self._celery(app, "listener", "-l", "WARNING")

    def program(self, module: str, *arguments: str) -> ChildProcess:
        """Start a module as a program, with arguments."""
        return self._processes.python(arguments[0], "-m", module, *arguments, environment=self._environment())

    def wait(self, what: str, condition: Callable[[], object], progress: Callable[[], object] | None = None) -> None:
        """
        Wait until a condition holds, as long as there is progress.

        Raises:
            BenchError: a process failed, or there was no progress for a minute.
        """
        last, until = None, time.monotonic() + _STALL_SECONDS_MAX
        while not condition():
            self.check()
            now = progress() if progress is not None else None
            if now != last:
                last, until = now, time.monotonic() + _STALL_SECONDS_MAX
            if time.monotonic() > until:
                logs = " / ".join(f"{process.name}: {process.last_words}" for process in self._processes.started)
                raise BenchError(f"{self.setting.name} waited too long for {what}. {logs}")
            pause(_LOOK_SECONDS)

    def check(self) -> None:
        """Raise BenchError if a process has failed."""
        failed = self._processes.failed()
        if failed is not None:
            raise BenchError(f"{failed.name} ended with status {failed.returncode}: {failed.last_words}")

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU time so far by process, with a worker's pool separate and without external servers."""
        used = {name: cpu_seconds([pid]) for name, pid in self._stage.server_pids.items()}
        for process in self._processes.started:
            children = process.children()
            name = f"{process.name}_parent" if children else process.name
            used[name] = used.get(name, 0.0) + cpu_seconds([process.pid])
            if children:
                pool = f"{process.name}_children"
                used[pool] = used.get(pool, 0.0) + cpu_seconds(children)
        return used

    def stop(self, process: ChildProcess) -> None:
        """End a process, and stop watching it."""
        self._processes.release(process)

    def end(self) -> None:
        """End all processes, and remove data, state and messages."""
        try:
            self._processes.end()
        finally:
            self._remove()

    def _remove(self) -> None:
        self._stage.client.drop_database(self.setting.database)
        self._stage.client.drop_database(self.setting.state_database)
        broker = self._stage.broker
        keys = [*broker.scan_iter(f"{self.setting.name}*"), *broker.scan_iter(f"_kombu.binding*.{self.setting.name}*")]
        if keys:
            broker.delete(*keys)

    def _celery(self, app: str, *arguments: str) -> ChildProcess:
        return self._processes.celery(app, *arguments, environment=self._environment())

    def _environment(self) -> dict[str, str]:
        """Return the environment for a new process. Streams may begin at another time than for the last one."""
        return {**self.setting.environment(), "PYTHONPATH": os.pathsep.join(_PATH)}
