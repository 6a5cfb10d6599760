"""Real servers and workers for a test, and the wait for what they do."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from bson import Timestamp
from pymongo import MongoClient

from mongo_celery.arguments import Duration, positive
from mongo_celery.bridge.handlers import Handler
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.wiring import Wiring
from mongo_celery.embedded import MongoReplicaSet, RedisServer
from mongo_celery.embedded.processes import ChildProcess, Supervisor
from mongo_celery.mongo.oplog import operation_time
from mongo_celery.outbox.signing import COLLECTION as KEYS
from mongo_celery.outbox.signing import KEYS_OF_OUTBOXES
from mongo_celery.testing.runner import Wired, placed

_NOT_OURS = {"admin", "config", "local"}
_PAUSE_SECONDS = 0.05
_ENDING_SECONDS = 10.0
_STARTING_SECONDS = 60.0


class BridgeWorkers:
    """
    Starts workers on the servers of a test, and waits for them: a context manager.

    ::

        with BridgeWorkers([bridge], url, broker_url, directory) as workers:
            workers.start("shop", environment={"MONGODB_URL": url})
            orders.insert_one({"_id": 5, "total": 20})
            workers.drain()
        assert summaries.find_one({"_id": 5})["total"] == 20

    In this process the bridges have those servers meanwhile, so that what a worker does can be looked at.

    Args:
        bridges: that the workers run.
        mongodb_url: of the replica set.
        broker_url: of the broker.
        directory: for what the workers write.
    """

    def __init__(self, bridges: Sequence[Wired], mongodb_url: str, broker_url: str, directory: Path) -> None:
        self._bridges = bridges
        self._mongodb_url = mongodb_url
        path = os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path]))  # what the test imports
        environment = {**os.environ, "CELERY_BROKER_URL": broker_url, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        self._processes = Supervisor(directory, ChildProcess, environment=environment, grace=_ENDING_SECONDS)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for bridge in self._bridges:
                wiring = bridge.wiring
                wiring.app.loader.import_default_modules()
                wiring.app.finalize(auto=True)
                stack.enter_context(wiring.elsewhere(placed(self._mongodb_url, wiring), _as_it_is))
            stack.enter_context(self._processes)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def start(
        self,
        app: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        timeout: Duration = _STARTING_SECONDS,
    ) -> None:
        """
        Start `celery -A APP worker --listener`, and wait until its listener leads: what is written then is delivered.

        The broker's URL is handed on as `CELERY_BROKER_URL`, which Celery prefers to the app's own.

        Args:
            app: as behind `-A`.
            arguments: more of the worker's, such as `"-c", "2"`.
            environment: variables by which the app finds MongoDB, with the fixture's URL.
            timeout: seconds or `timedelta`.

        Raises:
            ChildProcessError: it ended.
            TimeoutError: no listener leads within the time; with what the worker wrote.
        """
        self._processes.celery(
            app, "worker", "--listener", *arguments, environment=environment or {}, directory=Path.cwd()
        )
        self.drain(timeout)

    def drain(self, timeout: Duration = 30.0) -> None:
        """
        As `drain`, for all bridges; it does not wait for a worker that has ended.

        Args:
            timeout: seconds or `timedelta`, for each bridge.

        Raises:
            ChildProcessError: a worker ended.
            TimeoutError: it took longer; with what the workers wrote.
        """
        try:
            for bridge in self._bridges:
                wait_until_handled(bridge, timeout, self._demand_workers)
        except TimeoutError as error:
            for process in self._processes.started:
                error.add_note(f"{process.name} wrote: {process.last_words}")
            raise

    @property
    def output(self) -> str:
        """All that the workers wrote."""
        return "\n".join(process.text for process in self._processes.started)

    def _demand_workers(self) -> None:
        for process in self._processes.started:
            if not process.running:
                raise ChildProcessError(
                    f"{process.name} ended with status {process.returncode}, and wrote: {process.last_words}"
                )


def _as_it_is(_options: BridgeOptions, handler: Handler) -> Handler:
    return handler


def drain(bridge: Wired, timeout: Duration = 30.0) -> None:
    """
    Wait until the listener and the workers of a bridge have handled all that was written before the call.

    ::

        with BridgeWorkers([bridge], url, broker_url, directory) as workers:
            workers.start("shop", environment={"MONGODB_URL": url})
            orders.insert_one({"_id": 6, "total": 20})
            drain(bridge, timeout=60)
            assert summaries.find_one({"_id": 6})["total"] == 20

    For processes: they run the bridge with the same URL, name and `database`. Not waited for: tasks that handlers have
    sent, and what handlers write.

    Args:
        bridge: of which the process of the test has the configuration and the handlers.
        timeout: seconds or `timedelta`.

    Raises:
        TimeoutError: it took longer; with the handlers that are behind, and what is said of their partitions.
    """
    wait_until_handled(bridge, timeout, lambda: None)


def wait_until_handled(bridge: Wired, timeout: Duration, check: Callable[[], None]) -> None:
    """As `drain`; between two looks `check` is called, which may raise."""
    wiring, until = bridge.wiring, time.monotonic() + positive(timeout, "timeout")
    aim = operation_time(wiring.client)
    while behind := _behind(wiring, aim):
        check()
        if time.monotonic() > until:
            raise TimeoutError(
                f"bridge {wiring.name} has not handled everything within {positive(timeout, 'timeout'):g} s: "
                f"{', '.join(behind)} behind{_standing(wiring)}; do a listener and a worker run on this MongoDB? "
                "`celery -A APP changes status` tells more.",
            )
        time.sleep(_PAUSE_SECONDS)


def _behind(wiring: Wiring, aim: Timestamp) -> list[str]:
    """Handlers whose watermark has not passed a time."""
    found: dict[str, Any] = {
        document["_id"]: document.get("clusterTime") for document in wiring.store.subscriptions.read_all()
    }
    places = ((handler.name, found.get(f"{wiring.name}/{handler.name}")) for handler in wiring.handlers)
    return [name for name, place in places if place is None or place < aim]


def _standing(wiring: Wiring) -> str:
    """What stands, for the error."""
    partitions = wiring.client[wiring.options.database]["partitions"]
    found: Iterable[dict[str, Any]] = partitions.find(
        {"_id": {"$regex": f"^{wiring.name}/"}, "state": {"$ne": "flowing"}}, limit=3
    )
    said = [f"{each['_id']} is {each['state']}" for each in found]
    return f" ({', '.join(said)})" if said else ""


@contextlib.contextmanager
def serving_mongodb(url: str) -> Iterator[str]:
    """
    The given URL, or that of a replica set that runs inside.

    Raises:
        EmbeddedServerError: there is no program for it, or it does not start.
    """
    if url:
        yield url
        return
    with MongoReplicaSet() as started:
        yield started.url


@contextlib.contextmanager
def serving_redis(url: str) -> Iterator[str]:
    """
    The given URL, or that of a Redis that runs inside.

    Raises:
        EmbeddedServerError: there is no program for it, or it does not start.
    """
    if url:
        yield url
        return
    with RedisServer() as started:
        yield started.url


def empty(client: MongoClient[dict[str, Any]]) -> None:
    """Remove all documents; collections and their indexes stay, and so do the keys by which outboxes sign."""
    for database in client.list_database_names():
        if database in _NOT_OURS:
            continue
        for name in client[database].list_collection_names(filter={"type": "collection"}):
            if not name.startswith("system."):
                # This process has read them, and would sign with keys that a worker started later does not know.
                client[database][name].delete_many({"$nor": [KEYS_OF_OUTBOXES]} if name == KEYS else {})
