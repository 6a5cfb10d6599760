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

from mongo_celery.bench.actors import Actor, cpu_seconds, pause
from mongo_celery.bench.answers import answers, forget_answers
from mongo_celery.bench.errors import BenchError
from mongo_celery.bench.payload import present_time
from mongo_celery.bench.setting import Setting
from mongo_celery.bench.stopwatch import Laps
from mongo_celery.embedded import MongoReplicaSet, RedisServer

_OPLOG_MB = 2048
_ANSWER_MILLISECONDS = 5_000
_PATIENCE_SECONDS = 60.0
_LOOK_SECONDS = 0.01


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
    def scene(self, mode: str, **bridge: Any) -> Iterator[Scene]:
        """
        One measurement: names of its own, and whatever it starts and writes is gone afterwards.

        Args:
            mode: part of its names.
            bridge: options of the bridge.
        """
        name = f"bench-{self._token}-{next(self._numbers)}-{mode}"
        clock = self.directory / name
        clock.mkdir()
        setting = Setting(
            mongo_url=self.mongo_url, redis_url=self.redis_url, name=name, clock=str(clock), bridge=bridge
        )
        scene = Scene(self, setting)
        scene.begin_now()
        try:
            yield scene
        finally:
            scene.end()


class Scene:
    """The processes, times and data of one measurement."""

    def __init__(self, stage: Stage, setting: Setting) -> None:
        self._stage = stage
        self.setting = setting
        self._laps: dict[str, Laps] = {}
        self._actors: list[Actor] = []

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

    def waiting(self) -> int:
        """How many messages lie in the default queue of the measured app."""
        count: Any = self._stage.broker.llen(self.setting.name)
        return int(count)

    def worker(self, app: str, queues: str | None = None) -> Actor:
        """A Celery worker as all modes use it: prefork, two processes, everything else at its default."""
        arguments = ["-m", "celery", "-A", f"mongo_celery.bench.{app}", "worker", "-c", "2", "-l", "WARNING"]
        arguments += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        arguments += ["-Q", queues] if queues else []
        return self._start("worker", [*arguments, "-n", f"{self.setting.name}@{socket.gethostname()}"])

    def listener(self, app: str = "bridge_app") -> Actor:
        """A listener."""
        return self._start("listener", ["-m", "celery", "-A", f"mongo_celery.bench.{app}", "listener", "-l", "WARNING"])

    def program(self, name: str, count: int) -> Actor:
        """One of `programs`."""
        return self._start(name, ["-m", "mongo_celery.bench.programs", name, str(count)])

    def begin(self, module: str, *arguments: str) -> Actor:
        """One of the programs of another module of this package, by its name and arguments."""
        return self._start(f"{arguments[0]}-{len(self._actors)}", ["-m", f"mongo_celery.bench.{module}", *arguments])

    def ask(self, module: str, *arguments: str) -> dict[str, Any]:
        """Run such a program alone to its end; what it answers."""
        actor = self.begin(module, *arguments)
        self.wait(f"an answer of {arguments[0]}", lambda: answers(self.setting), self.laps("progress").count)
        (answer,) = answers(self.setting)
        self.stop(actor)
        forget_answers(self.setting)
        return answer

    def wait(self, what: str, condition: Callable[[], object], progress: Callable[[], object] | None = None) -> None:
        """
        Wait until something is true, as long as there is progress.

        Raises:
            BenchError: a process failed, or nothing went on for a minute.
        """
        last, until = None, time.monotonic() + _PATIENCE_SECONDS
        while not condition():
            self.check()
            now = progress() if progress is not None else None
            if now != last:
                last, until = now, time.monotonic() + _PATIENCE_SECONDS
            if time.monotonic() > until:
                logs = " / ".join(f"{actor.name}: {actor.quotation()}" for actor in self._actors)
                raise BenchError(f"{self.setting.name} waited in vain for {what}. {logs}")
            pause(_LOOK_SECONDS)

    def check(self) -> None:
        """Raise BenchError if a process has failed."""
        for actor in self._actors:
            actor.check()

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time so far of every process, servers that are not embedded excepted."""
        used = {name: cpu_seconds([pid]) for name, pid in self._stage.server_pids.items()}
        for actor in self._actors:
            used[actor.name] = actor.cpu_seconds()
        return used

    def stop(self, actor: Actor) -> None:
        """End a process; it is no longer watched."""
        self._actors.remove(actor)
        actor.stop()

    def end(self) -> None:
        """End all processes, and remove data, state and messages."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._remove)
            for actor in self._actors:
                stack.callback(actor.stop)
        self._actors.clear()

    def _remove(self) -> None:
        self._stage.client.drop_database(self.setting.database)
        self._stage.client.drop_database(self.setting.state_database)
        broker = self._stage.broker
        keys = [*broker.scan_iter(f"{self.setting.name}*"), *broker.scan_iter(f"_kombu.binding*.{self.setting.name}*")]
        if keys:
            broker.delete(*keys)

    def _state(self, collection: str) -> Collection[dict[str, Any]]:
        return self.state[collection]

    def _start(self, name: str, arguments: list[str]) -> Actor:
        log = Path(self.setting.clock) / f"{name}.log"
        environment = {**self.setting.environment(), "PYTHONPATH": os.pathsep.join(_PATH)}
        actor = Actor(name, arguments, environment, log)
        self._actors.append(actor)
        return actor


_PATH = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
