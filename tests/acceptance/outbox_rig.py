"""The outbox project's processes on a database of its own, what went through the broker, and the judgement."""

from __future__ import annotations

import base64
import json
import math
import threading
from collections.abc import Sequence
from typing import Any, Self
from uuid import uuid4

import redis
from pymongo import MongoClient

from mongo_celery import Outbox
from tests.acceptance.outbox_project import EFFECT, EFFECTS, SWEEPS, configured
from tests.fixtures.process import PATIENCE_SECONDS, Processes, ProjectProcess, wait_for
from tests.rig.project import QUIET, Project

Document = dict[str, Any]

OPTIONS: Document = {"claim_ttl": 4.0, "sweep_after": 0.5, "sweep_every": 0.5}
BEAT = ("-s", "/dev/null", "--scheduler", "celery.beat:Scheduler")
_DRIFTED: Document = {
    "$expr": {"$ne": ["$pendingEvents.count", {"$size": {"$ifNull": ["$pendingEvents.events", []]}}]},
    "pendingEvents": {"$exists": True},
}


class Shop(Project):
    """
    The project on real servers.

    Args:
        processes: starts and ends the processes.
        client: of the replica set.
        url: of that set.
        broker: URL of the broker.
        options: of the outbox, over `OPTIONS`.
    """

    app = "tests.acceptance.outbox_project"

    def __init__(
        self, processes: Processes, client: MongoClient[Document], url: str, broker: str, **options: Any
    ) -> None:
        chosen = {**OPTIONS, **options}
        super().__init__(processes, client, url, broker, PROJECT_OPTIONS=json.dumps(chosen))
        self.items = self.data["items"]
        self.writer = configured(broker)
        self.outbox = Outbox(self.writer, self.items, database=self.state.name, **chosen)

    def __exit__(self, *error: object) -> None:
        self.outbox.runtime.close()
        self.writer.close()
        super().__exit__(*error)

    # -- processes ---------------------------------------------------------------------------------

    def program(self, *arguments: object, module: str = "", **options: Any) -> ProjectProcess:
        """Start one of the project's programs, or another module as a program; does not wait."""
        more: dict[str, Any] = {"PROJECT_OPTIONS": json.dumps({**OPTIONS, **options})} if options else {}
        return self._processes.python(
            module.rpartition(".")[2] or str(arguments[0]), "-m", module or self.app, *map(str, arguments),
            environment=self.variables(**more),
        )  # fmt: skip

    def consume(self, *queues: str, pool: str = "", **variables: Any) -> ProjectProcess:
        """Start a worker with one child, and beat as another; or without beat a worker with a pool. Does not wait."""
        arguments = ("-P", pool, "-c", "10") if pool else ("-c", "1", "-B", *BEAT)
        queue = ("-Q", ",".join(queues or (SWEEPS, EFFECTS)), "-n", f"{uuid4().hex[:6]}@here")
        return self.start("worker", *QUIET, *arguments, *queue, "-l", "INFO", **variables)

    # -- writes ------------------------------------------------------------------------------------

    def effect(self, key: str, n: object) -> Any:
        return self.writer.signature(EFFECT, args=(key, n))

    def insert(self, key: str, *ns: object) -> None:
        self.outbox.insert_one({"_id": key, "ns": list(ns)}, tasks=[self.effect(key, n) for n in ns])

    def add(self, key: str, *ns: object, session: Any = None) -> bool:
        """Add numbers through the outbox of this process; whether the document was there."""
        push = {"$push": {"ns": {"$each": list(ns)}}}
        tasks = [self.effect(key, n) for n in ns]
        return bool(self.outbox.update_one({"_id": key}, push, tasks=tasks, session=session).matched_count)

    # -- what happened -----------------------------------------------------------------------------

    def committed(self) -> dict[str, list[Any]]:
        return {each["_id"]: each["ns"] for each in self.items.find() if each["ns"]}

    def effects(self) -> dict[str, list[Any]]:
        """What the tasks have done for each document, in the order of their first run."""
        return {each["_id"]: each["ns"] for each in self.data["effects"].find()}

    def pending(self) -> int:
        assert self.items.count_documents(_DRIFTED) == 0, "a count differs from its events"
        return self.outbox.status().pending

    def sweep_all(self) -> None:
        """Sweep until nothing is pending. A busy machine may take its time, as long as the entries become fewer."""
        left = math.inf

        def is_less() -> bool:
            self.outbox.sweep(older_than=0.01)
            return self.pending() < left

        while left:
            wait_for(is_less, PATIENCE_SECONDS, lambda: f"{self.outbox.status()}")
            left = self.pending()

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
    """Reads what was published for the effects, in order and with its ids."""

    def __init__(self, url: str) -> None:
        self.published: list[tuple[str, Any]] = []
        self.ids: dict[tuple[str, Any], set[str]] = {}
        # A client that gives up on a frozen server loses what this pops for it afterwards: redis-py does so by default.
        self._client: Any = redis.Redis.from_url(url, socket_timeout=None)
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
                _, message = self._client.brpop(EFFECTS, 0.1) or (None, None)
            except redis.exceptions.RedisError:  # stopped, or in between
                continue
            if message is not None:
                whole = json.loads(message)
                key, n = json.loads(base64.b64decode(whole["body"]))[0]
                self.ids.setdefault((key, n), set()).add(whole["headers"]["id"])
                self.published.append((key, n))


def said(process: ProjectProcess) -> list[Sequence[str]]:
    """The points at which the project's processes have got their signals: kind, number, point."""
    return [line.split("|") for line in process.text.splitlines() if line.count("|") == 2]
