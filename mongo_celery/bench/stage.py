"""The stage of a run: servers, names that are used once, and the processes of one measurement."""

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
from pymongo.errors import PyMongoError

from mongo_celery.bench.errors import BenchError
from mongo_celery.bench.payload import present_time
from mongo_celery.bench.setting import BenchSetting
from mongo_celery.bench.stopwatch import Laps
from mongo_celery.bench.usage import Usage, cpu_seconds, machine_seconds
from mongo_celery.embedded import MongoReplicaSet, RedisServer
from mongo_celery.embedded.crew import GRACE_SECONDS, ChildProcess, Supervisor

_OPLOG_MB = 2048
_ANSWER_MILLISECONDS = 5_000
_STALL_SECONDS_MAX = 60.0
_LOOK_SECONDS = 0.01
_SERVERS = {"mongodb": "mongod"}
"""Of those programs whose name is another one."""
_PATH = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]


def pause(seconds: float) -> None:
    """Let time pass between two looks."""
    time.sleep(seconds)


class Stage:
    """
    Servers for a run: a context manager.

    Args:
        mongo_url: of a given replica set; an embedded one by default.
        redis_url: of a given Redis; an embedded one by default.
    """

    def __init__(self, mongo_url: str | None = None, redis_url: str | None = None) -> None:
        self._given = (mongo_url, redis_url)
        self._stack = contextlib.ExitStack()
        self._numbers = itertools.count(1)
        self._token = secrets.token_hex(3)
        self.mongo_url = self.redis_url = ""
        self.server_pids: dict[str, int] = {}

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            mongo_url, redis_url = self._given
            if mongo_url is None:
                mongo = stack.enter_context(MongoReplicaSet(oplog_mb=_OPLOG_MB))
                mongo_url = mongo.url
                self.server_pids["mongodb"] = mongo.pid
            if redis_url is None:
                server = stack.enter_context(RedisServer())
                redis_url = server.url
                self.server_pids["redis"] = server.pid
            self.mongo_url, self.redis_url = mongo_url, redis_url
            self.client: MongoClient[dict[str, Any]] = stack.enter_context(
                MongoClient(mongo_url, serverSelectionTimeoutMS=_ANSWER_MILLISECONDS)
            )
            self.broker = redis.Redis.from_url(redis_url)
            stack.callback(self.broker.close)
            self._greet()
            self.directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mongo_celery_bench_")))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def owns_broker(self) -> bool:
        """Whether the broker ends with this run."""
        return "redis" in self.server_pids

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Servers that were given, whose processor time is not known."""
        return tuple(_SERVERS.get(name, name) for name in ("mongodb", "redis") if name not in self.server_pids)

    def _greet(self) -> None:
        """Given servers must answer, and have an oplog: raise BenchError otherwise."""
        try:
            present_time(self.client)
        except PyMongoError as error:
            text = str(error).split(", Timeout:")[0]
            raise BenchError(f"MongoDB did not answer: {text}. Check --mongo-url and the server.") from error
        except KeyError:
            raise BenchError("A single mongod has no change streams; give --mongo-url of a replica set.") from None
        try:
            self.broker.ping()
        except redis.RedisError as error:
            raise BenchError(f"Redis did not answer: {error}. Check --redis-url and the server.") from error

    @contextlib.contextmanager
    def scene(
        self,
        mode: str,
        handler: Mapping[str, Any] | None = None,
        work: Mapping[str, float] | None = None,
        /,
        **bridge: Any,
    ) -> Iterator[Scene]:
        """
        One measurement: names of its own, and whatever it starts and writes is gone afterwards.

        Args:
            mode: part of its names.
            handler: options of the handler's decorator.
            work: what the handler does with a change.
            bridge: options of the bridge.
        """
        name = f"bench-{self._token}-{next(self._numbers)}-{mode}"
        clock = self.directory / name
        clock.mkdir()
        setting = BenchSetting(
            mongo_url=self.mongo_url,
            redis_url=self.redis_url,
            name=name,
            clock=str(clock),
            bridge=bridge,
            handler=handler or {},
            work=work or {},
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
        # A worker that is killed leaves what it has not acknowledged in keys that all apps of a Redis share.
        grace = 0.0 if stage.owns_broker else GRACE_SECONDS
        self._processes = Supervisor(Path(setting.clock), ChildProcess, grace=grace)

    @property
    def orders(self) -> Collection[dict[str, Any]]:
        """What the modes watch."""
        return self.data["orders"]

    @property
    def data(self) -> Database[dict[str, Any]]:
        """Where the measured processes keep their data."""
        return self._stage.client[self.setting.database]

    @property
    def state(self) -> Database[dict[str, Any]]:
        """Where the library keeps its state."""
        return self._stage.client[self.setting.state_database]

    @property
    def started(self) -> Laps:
        """When handlers started."""
        return self.laps("started")

    def laps(self, kind: str) -> Laps:
        """The noted times of a kind."""
        return self._laps.setdefault(kind, Laps(Path(self.setting.clock), kind))

    def begin_now(self) -> None:
        """Let streams that are opened by processes started from now on begin at the present time."""
        start = present_time(self._stage.client)
        self.setting = replace(self.setting, start=(start.time, start.inc))

    def lease(self) -> Mapping[str, Any]:
        """The bridge's lease document; empty before there is one."""
        return self._state("leases").find_one({"_id": self.setting.name}) or {}

    def committed(self) -> int:
        """How many changes the bridge's partition documents call committed."""
        return sum(document["committed"] for document in self._state("partitions").find({}, {"committed": 1}))

    def queued(self) -> int:
        """How many messages lie in the bridge's queues."""
        with self._stage.broker.pipeline(transaction=False) as pipeline:
            for index in range(self.setting.bridge.get("partitions", 16)):
                pipeline.llen(f"{self.setting.name}.{index}")
            return sum(pipeline.execute())

    def worker(self, app: str, queues: str | None = None, *, processes: int = 2, number: int = 1) -> ChildProcess:
        """
        A Celery worker as all modes use it: prefork, everything but its size at its default.

        Args:
            app: the name of its module.
            queues: which it takes from; all by default.
            processes: of its pool.
            number: tells it from others of this measurement.
        """
        arguments = ["-c", f"{processes}", "-l", "WARNING", "--without-gossip", "--without-mingle"]
        arguments += ["--without-heartbeat", *(["-Q", queues] if queues else [])]
        return self._celery(app, "worker", *arguments, "-n", f"{self.setting.name}-{number}@{socket.gethostname()}")

    def listener(self, app: str) -> ChildProcess:
        """A listener of an app, given as the name of its module."""
        return self._celery(app, "listener", "-l", "WARNING")

    def program(self, module: str, *arguments: str) -> ChildProcess:
        """A program of a module, by its name and arguments."""
        return self._processes.python(arguments[0], "-m", module, *arguments, environment=self._environment())

    def wait(self, what: str, condition: Callable[[], object], progress: Callable[[], object] | None = None) -> None:
        """
        Wait until something is true, as long as there is progress.

        Raises:
            BenchError: a process failed, or nothing went on for a minute.
        """
        last, until = None, time.monotonic() + _STALL_SECONDS_MAX
        while not condition():
            self.check()
            now = progress() if progress is not None else None
            if now != last:
                last, until = now, time.monotonic() + _STALL_SECONDS_MAX
            if time.monotonic() > until:
                logs = " / ".join(f"{process.name}: {process.last_words}" for process in self._processes.started)
                raise BenchError(f"{self.setting.name} waited in vain for {what}. {logs}")
            pause(_LOOK_SECONDS)

    def check(self) -> None:
        """Raise BenchError if a process has failed."""
        failed = self._processes.failed()
        if failed is not None:
            raise BenchError(f"{failed.name} ended with status {failed.returncode}: {failed.last_words}")

    def deliveries(self) -> int:
        """How many events MongoDB has given to the streams that are open on the data."""
        operations = self._stage.client.admin.aggregate(
            [
                {"$currentOp": {"idleCursors": True}},
                {"$match": {"ns": {"$regex": f"^{self.setting.database}\\."}, "cursor.tailable": True}},
                {"$project": {"count": "$cursor.nDocsReturned"}},
            ]
        )
        return sum(int(each.get("count", 0)) for each in operations)

    def usage(self) -> Usage:
        """Processor time so far: by process, a worker's pool apart, without given servers; and of the whole machine."""
        used = {_SERVERS.get(name, name): cpu_seconds([pid]) for name, pid in self._stage.server_pids.items()}
        for process in self._processes.started:
            children = process.children()
            name = f"{process.name}_parent" if children else process.name
            used[name] = used.get(name, 0.0) + cpu_seconds([process.pid])
            if children:
                pool = f"{process.name}_children"
                used[pool] = used.get(pool, 0.0) + cpu_seconds(children)
        return Usage(used, *machine_seconds())

    def stop(self, process: ChildProcess) -> None:
        """End a process; it is no longer watched."""
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

    def _state(self, collection: str) -> Collection[dict[str, Any]]:
        return self.state[collection]

    def _celery(self, app: str, *arguments: str) -> ChildProcess:
        return self._processes.celery(app, *arguments, environment=self._environment())

    def _environment(self) -> dict[str, str]:
        """Anew for each process: the time at which streams begin changes meanwhile."""
        return {**self.setting.environment(), "PYTHONPATH": os.pathsep.join(_PATH)}
