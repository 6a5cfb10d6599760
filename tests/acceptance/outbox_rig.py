"""The outbox project's processes on a database of its own, what went through the broker, and the judgement."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar
from uuid import uuid4

import redis
from pymongo import MongoClient
from pymongo.database import Database

from mongo_celery import Outbox
from tests.acceptance.chain_rig import QUIET
from tests.acceptance.outbox_project import EFFECT, EFFECTS, SWEEPS, configured
from tests.fixtures.mongo import empty
from tests.fixtures.process import PATIENCE_SECONDS, Processes, ProjectProcess, wait_for

Document = dict[str, Any]
T = TypeVar("T")

PROJECT = "tests.acceptance.outbox_project"
WORK = "work"
OPTIONS: Document = {"claim_ttl": 4.0, "sweep_after": 0.5, "sweep_every": 0.5, "at_once": "wait"}
"""A write waits for the dispatcher, so that a process that writes dies at a stated point of the delivery, too."""
_BEAT = ("-s", "/dev/null", "--scheduler", "celery.beat:Scheduler")
_DRIFTED: Document = {
    "$expr": {"$ne": ["$pendingEvents.count", {"$size": {"$ifNull": ["$pendingEvents.events", []]}}]},
    "pendingEvents": {"$exists": True},
}


class Shop:
    """
    The project on real servers.

    Args:
        processes: starts and ends the processes.
        client: of the replica set.
        url: of that set.
        broker: URL of the broker.
        options: of the outbox, over `OPTIONS`.
    """

    def __init__(
        self, processes: Processes, client: MongoClient[Document], url: str, broker: str, **options: Any
    ) -> None:
        self.name = f"outbox_{uuid4().hex[:8]}"
        self.broker = broker
        self.database: Database[Document] = client[self.name]
        self.items = self.database["items"]
        self._processes = processes
        self._client = client
        chosen = {**OPTIONS, **options}
        self._environment = {
            "OUTBOX_NAME": self.name,
            "OUTBOX_MONGO": url,
            "OUTBOX_BROKER": broker,
            "OUTBOX_OPTIONS": json.dumps(chosen),
        }
        self.app = configured(broker)
        state = f"{self.name}_state"
        self.outbox = Outbox(self.app, self.items, database=state, foreign_tasks=True, **chosen)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._processes.__exit__()
        self.outbox.backing.close()
        self.app.close()
        for name in (self.name, f"{self.name}_state"):
            empty(self._client, name)

    # -- processes ---------------------------------------------------------------------------------

    def program(self, *arguments: object, **options: Any) -> ProjectProcess:
        """Start one of the project's programs; does not wait."""
        environment = dict(self._environment)
        if options:
            environment["OUTBOX_OPTIONS"] = json.dumps({**OPTIONS, **options})
        return self._processes.python(str(arguments[0]), "-m", PROJECT, *map(str, arguments), environment=environment)

    def module(self, name: str, *arguments: object) -> ProjectProcess:
        """Start another module of the project as a program; does not wait."""
        short = name.rpartition(".")[2]
        return self._processes.python(short, "-m", name, *map(str, arguments), environment=self._environment)

    def worker(self, *queues: str, alone: bool = False, pool: str = "", **environment: str) -> ProjectProcess:
        """Start a worker with one child, and beat as another; or without beat one that works itself, or a pool."""
        arguments = ("-P", "solo") if alone else ("-P", pool, "-c", "10") if pool else ("-c", "1", "-B", *_BEAT)
        return self._processes.celery(
            PROJECT, "worker", *QUIET, *arguments, "-l", "INFO", "-n", f"{uuid4().hex[:6]}@here",
            "-Q", ",".join(queues or (SWEEPS, EFFECTS)), environment={**self._environment, **environment},
        )  # fmt: skip

    def beat(self) -> ProjectProcess:
        """Start beat; does not wait."""
        return self._processes.celery(PROJECT, "beat", *_BEAT, "-l", "INFO", environment=self._environment)

    # -- writes ------------------------------------------------------------------------------------

    def effect(self, key: str, n: object) -> Any:
        """The project's task by its name: a writer need not import it."""
        return self.app.signature(EFFECT, args=(key, n))

    def insert(self, key: str, *ns: object) -> None:
        """Insert a document through the outbox of this process."""
        self.outbox.insert_one({"_id": key, "ns": list(ns)}, tasks=[self.effect(key, n) for n in ns])

    def add(self, key: str, *ns: object, session: Any = None) -> bool:
        """Add numbers through the outbox of this process; whether the document was there."""
        push = {"$push": {"ns": {"$each": list(ns)}}}
        tasks = [self.effect(key, n) for n in ns]
        return bool(self.outbox.update_one({"_id": key}, push, tasks=tasks, session=session).matched_count)

    # -- what happened -----------------------------------------------------------------------------

    def committed(self) -> dict[str, list[Any]]:
        """What was written to each document, in order."""
        return {each["_id"]: each["ns"] for each in self.items.find() if each["ns"]}

    def effects(self) -> dict[str, list[Any]]:
        """What the tasks have done for each document, in the order of their first run."""
        return {each["_id"]: each["ns"] for each in self.database["effects"].find()}

    def pending(self) -> int:
        """How many entries wait; `count` and `events` agree in every document."""
        assert self.items.count_documents(_DRIFTED) == 0, "a count differs from its events"
        return self.outbox.status().pending

    def sweep_all(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Sweep in this process until nothing is pending."""

        def empty() -> bool:
            self.outbox.sweep(older_than=0.01)
            return not self.pending()

        wait_for(empty, seconds, lambda: f"{self.outbox.status()}")

    def settle(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until every write that was committed has had its effects, in order, and none other; nothing is left."""
        wait_for(
            lambda: not self.pending() and self.effects() == self.committed(),
            seconds,
            lambda: f"{self.outbox.status()}: {self.differences()}",
        )

    def agree(self, tap: Tap, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until what was published, in the order of the first time, is what was committed."""
        wait_for(lambda: tap.first() == self.committed(), seconds, lambda: f"{tap.first()} != {self.committed()}")

    def differences(self) -> list[tuple[str, Any, Any]]:
        """Documents whose effects are not what was written: key, written, effects."""
        written, done = self.committed(), self.effects()
        return [
            (key, written.get(key), done.get(key)) for key in {*written, *done} if written.get(key) != done.get(key)
        ]


class Tap:
    """Reads what was published for the effects, in order and with its ids, and hands it on to a queue for workers."""

    def __init__(self, url: str, *, handing_on: bool = False) -> None:
        self.published: list[tuple[str, Any]] = []
        self.ids: dict[tuple[str, Any], set[str]] = {}
        # A client that gives up on a frozen server loses what this pops for it afterwards: redis-py does so by default.
        self._client: Any = redis.Redis.from_url(url, socket_timeout=None)
        self._handing_on = handing_on
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tap", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._client.close()

    def first(self) -> dict[str, list[Any]]:
        """Per document, what was published, in the order of the first time."""
        found: dict[str, dict[Any, None]] = {}
        for key, n in list(self.published):
            found.setdefault(key, {})[n] = None  # a dict keeps the place of the first
        return {key: list(ns) for key, ns in found.items()}

    @property
    def duplicates(self) -> int:
        """How many messages were repetitions."""
        published = list(self.published)
        return len(published) - len(set(published))

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                message = self._next()
            except redis.exceptions.RedisError:  # stopped, or in between
                continue
            if message is not None:
                whole = json.loads(message)
                key, n = json.loads(base64.b64decode(whole["body"]))[0]
                self.ids.setdefault((key, n), set()).add(whole["headers"]["id"])
                self.published.append((key, n))

    def _next(self) -> Any:
        if self._handing_on:
            return self._client.blmove(EFFECTS, WORK, 0.1, "RIGHT", "LEFT")
        return (self._client.brpop(EFFECTS, 0.1) or (None, None))[1]


def within(seconds: float, call: Callable[[], T]) -> T:
    """What a call returns; the test fails if it has not returned in time."""
    answers: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again by the test's thread
            failures.append(error)

    thread = threading.Thread(target=run, name="bounded call", daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"no answer within {seconds} s"
    if failures:
        raise failures[0]
    return answers[0]


def said(process: ProjectProcess) -> list[Sequence[str]]:
    """The points at which the project's processes have got their signals: kind, number, point."""
    return [line.split("|") for line in process.text.splitlines() if line.count("|") == 2]
