"""An app of a test's own on given servers: its databases, processes and commands."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, ClassVar, Self, TypeVar
from uuid import uuid4

import pytest
from pymongo import MongoClient

from tests.fixtures.forked import run_celery
from tests.fixtures.mongo import empty
from tests.fixtures.process import Processes, ProjectProcess

Document = dict[str, Any]
Done = subprocess.CompletedProcess[str]

QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")
OPTIONS: Mapping[str, Any] = {
    "partitions": 4,
    "queues": 2,
    "lease_ttl": 2.0,
    "claim_ttl": 2.0,
    "dispatch_grace": 1.5,
    "commit_grace": 0.5,
}
"""Short times, so that nobody waits for them."""


class Project:
    """
    One app, which reads `PROJECT_MONGO`, `PROJECT_BROKER`, `PROJECT_NAMES` and `PROJECT_OPTIONS` from its environment.

    Attributes:
        app: the module with the app, as `celery -A` takes it.
        options: of the bridge.
        names: with which the names of all its databases begin.
    """

    app: ClassVar[str]
    options: Mapping[str, Any] = OPTIONS

    def __init__(
        self, processes: Processes, client: MongoClient[Document], url: str, broker: str, **variables: str
    ) -> None:
        self.names = f"{self.app.rpartition('.')[2]}_{uuid4().hex[:10]}"
        self.client = client
        self.url = url
        self.data = client[f"{self.names}_data"]
        self.state = client[f"{self.names}_state"]
        self.facts = client[f"{self.names}_facts"]
        self.environment = {
            "PROJECT_MONGO": url, "PROJECT_BROKER": broker, "PROJECT_NAMES": self.names, **variables,
        }  # fmt: skip
        self._processes = processes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._processes.__exit__()
        for database in (self.data, self.state, self.facts):
            empty(self.client, database)

    def url_of(self, process: str) -> str:  # noqa: ARG002 - some name their processes
        return self.url

    def variables(self, options: Mapping[str, Any] | None = None, **more: str) -> dict[str, str]:
        """Return the environment of a process with other options of the bridge, and with more variables."""
        return {"PROJECT_OPTIONS": json.dumps({**self.options, **(options or {})}), **self.environment, **more}

    def start(
        self,
        *arguments: str,
        name: str = "",
        awaited: str = "",
        app: str = "",
        options: Mapping[str, Any] | None = None,
        **variables: str,
    ) -> ProjectProcess:
        called = name or arguments[0]
        environment = {**self.variables(options), "PROJECT_MONGO": self.url_of(called), **variables}
        started = self._processes.celery(app or self.app, *arguments, name=called, environment=environment)
        if awaited:
            started.wait_for_output(awaited)
        return started

    def listener(self, name: str = "listener", *, level: str = "INFO", **given: Any) -> ProjectProcess:
        """Start a listener, and wait until it leads."""
        return self.start("listener", "-l", level, name=name, **{"awaited": "reading from", **given})

    def worker(
        self, *arguments: str, name: str = "worker", concurrency: int = 2, level: str = "INFO", **given: Any
    ) -> ProjectProcess:
        """Start a worker, and wait until it consumes."""
        own = ("worker", "-c", str(concurrency), "-n", f"{name}@%h", *QUIET, "-l", level, *arguments)
        return self.start(*own, name=name, **{"awaited": r" ready\.", **given})

    def run(self, *arguments: str, text: str = "", app: str = "", **variables: str) -> Done:
        return run_celery("-A", app or self.app, *arguments, environment=self.variables(None, **variables), text=text)

    def answer(self, *arguments: str, status: int = 0, **variables: str) -> Document:
        """Return what a command prints with `--json`; it ends with this status."""
        done = self.run(*arguments, "--json", **variables)
        assert done.returncode == status, done.stdout + done.stderr
        found: Document = json.loads(done.stdout)
        return found


P = TypeVar("P", bound=Project)
MakeProject = Callable[..., Any]


@pytest.fixture
def make_project(
    processes: Processes, mongo_client: MongoClient[Document], mongo_url: str, redis_url: str
) -> Iterator[Callable[[type[P]], P]]:
    """Give a function that makes a project of a class on the session's servers; nothing of it is started."""
    with ExitStack() as stack:

        def make(kind: type[P], **variables: str) -> P:
            made = kind(processes, mongo_client, mongo_url, redis_url, **variables)
            stack.enter_context(made)
            return made

        yield make
