"""Real servers and workers for a test, and functions that wait for them."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from bson import Timestamp
from pymongo import MongoClient

from mongo_celery.arguments import Duration, positive
from mongo_celery.bridge.existing import place_after_time
from mongo_celery.bridge.handlers import Handler
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.bridge.state.partitions import Image, visible_state
from mongo_celery.bridge.state.subscriptions import layouts_in_force
from mongo_celery.bridge.wiring import Wiring
from mongo_celery.embedded.processes import ChildProcess, Supervisor
from mongo_celery.findings import list_some
from mongo_celery.mongo.oplog import operation_time
from mongo_celery.outbox.signing import COLLECTION as KEYS
from mongo_celery.outbox.signing import KEYS_OF_OUTBOXES
from mongo_celery.testing.runner import place_url

if TYPE_CHECKING:
    from mongo_celery import Bridge

_NOT_OURS = {"admin", "config", "local"}
_PAUSE_SECONDS = 0.05
_ENDING_SECONDS = 10.0
_STARTING_SECONDS = 60.0
_NAMED = 3

_FindLate = Callable[[Wiring, Timestamp], list[str]]
"""Returns the names of the handlers that are late at a time."""


class BridgeWorkers:
    """
    A context manager that starts workers on the servers of a test, and waits for their work.

    ::

        with BridgeWorkers([bridge], url, broker_url, directory) as workers:
            workers.start("shop", environment={"MONGODB_URL": url})
            orders.insert_one({"_id": 5, "total": 20})
            workers.drain()
        assert summaries.find_one({"_id": 5})["total"] == 20

    Inside the block, this process's bridges use the same servers, so that the test can inspect the results.

    Args:
        bridges: the bridges that the workers run.
        mongodb_url: URL of the replica set.
        broker_url: URL of the broker.
        directory: the directory for the output of the workers.
    """

    def __init__(self, bridges: Sequence[Bridge], mongodb_url: str, broker_url: str, directory: Path) -> None:
        self._bridges = bridges
        self._mongodb_url = mongodb_url
        path = os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path]))  # the test's import path
        environment = {**os.environ, "CELERY_BROKER_URL": broker_url, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        self._processes = Supervisor(directory, ChildProcess, environment=environment, grace=_ENDING_SECONDS)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for bridge in self._bridges:
                wiring = bridge.wiring
                wiring.app.loader.import_default_modules()
                wiring.app.finalize(auto=True)
                stack.enter_context(wiring.elsewhere(place_url(self._mongodb_url, wiring), _as_it_is))
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
        Start `celery -A APP worker --listener`, and wait until its listener leads. It delivers later changes.

        The worker gets the broker URL in `CELERY_BROKER_URL`, which overrides the app's.

        Args:
            app: the argument of `-A`.
            arguments: further arguments of the worker, such as `"-c", "2"`.
            environment: variables for the app, such as the MongoDB URL from the fixture.
            timeout: seconds or `timedelta`.

        Raises:
            ChildProcessError: the worker ended.
            TimeoutError: no listener leads in time. The notes contain the worker's output.
        """
        self._processes.celery(
            app, "worker", "--listener", *arguments, environment=environment or {}, directory=Path.cwd()
        )
        self._wait(timeout, _find_unread)

    def drain(self, timeout: Duration = 30.0) -> None:
        """
        Wait like `drain`, for all bridges, but not for a worker that has ended.

        Args:
            timeout: seconds or `timedelta`, for each bridge.

        Raises:
            ChildProcessError: a worker ended.
            TimeoutError: the time is used up. The notes contain the workers' output.
        """
        self._wait(timeout, _find_unhandled)

    def _wait(self, timeout: Duration, find_late: _FindLate) -> None:
        try:
            for bridge in self._bridges:
                wait_for_handlers(bridge, timeout, self._demand_workers, find_late)
        except TimeoutError as error:
            for process in self._processes.started:
                error.add_note(f"{process.name} wrote: {process.last_words}")
            raise

    @property
    def output(self) -> str:
        """The output of all workers."""
        return "\n".join(process.text for process in self._processes.started)

    def _demand_workers(self) -> None:
        for process in self._processes.started:
            if not process.running:
                raise ChildProcessError(
                    f"{process.name} ended with status {process.returncode}, and wrote: {process.last_words}"
                )


def _as_it_is(_options: BridgeOptions, handler: Handler) -> Handler:
    return handler


def drain(bridge: Bridge, timeout: Duration = 30.0) -> None:
    """
    Wait until listener and workers of a bridge have handled all changes from before the call.

    ::

        with BridgeWorkers([bridge], url, broker_url, directory) as workers:
            workers.start("shop", environment={"MONGODB_URL": url})
            orders.insert_one({"_id": 6, "total": 20})
            drain(bridge, timeout=60)
            assert summaries.find_one({"_id": 6})["total"] == 20

    Use it for bridges in other processes with the same URL, name and `database`. A change that became a dead letter, or
    was skipped, is finished. A halted, paused or retrying one is not. It does not wait for tasks that handlers send, or
    for changes that handlers write.

    Args:
        bridge: the bridge, with the same configuration and handlers in the test's process.
        timeout: seconds or `timedelta`.

    Raises:
        TimeoutError: the time is used up. The message names the late handlers and their blocked partitions.
    """
    wait_for_handlers(bridge, timeout, lambda: None, _find_unhandled)


def wait_for_handlers(bridge: Bridge, timeout: Duration, check: Callable[[], None], find_late: _FindLate) -> None:
    """Wait until no handler is late at the present time. Between two polls call `check`, which may raise."""
    wiring, until = bridge.wiring, time.monotonic() + positive(timeout, "timeout")
    aim = operation_time(wiring.client)
    while late := find_late(wiring, aim):
        check()
        if time.monotonic() > until:
            raise TimeoutError(
                f"Bridge {wiring.name} has not handled all changes within {positive(timeout, 'timeout'):g} s. "
                f"Not finished: {', '.join(late)}{_show_blocked(wiring)}. Check that a listener and a worker "
                "run on this MongoDB: `celery -A APP changes status`.",
            )
        time.sleep(_PAUSE_SECONDS)


def _find_unread(wiring: Wiring, aim: Timestamp) -> list[str]:
    """Return the handlers whose watermark is before a time. It may have passed changes that are only stored."""
    found: dict[str, Any] = {
        document["_id"]: document.get("clusterTime") for document in wiring.store.subscriptions.read_all()
    }
    places = ((handler.name, found.get(f"{wiring.name}/{handler.name}")) for handler in wiring.handlers)
    return [name for name, place in places if place is None or place < aim]


def _find_unhandled(wiring: Wiring, aim: Timestamp) -> list[str]:
    """
    Return the handlers with an unhandled change up to a time.

    The watermarks are read first: every change before them is then finished, halted, or stored and marked.
    """
    if late := _find_unread(wiring, aim):
        return late
    return sorted({image.subscription for image in _read_partitions(wiring) if _is_late(wiring, image, aim)})


def _is_late(wiring: Wiring, image: Image, aim: Timestamp) -> bool:
    until = place_after_time(aim)
    if image.head is not None and image.head["resumeToken"]["_data"] <= until:
        return True
    return image.stored is not None and wiring.store.backlog.first(image.id, image.data, until) is not None


def _read_partitions(wiring: Wiring) -> list[Image]:
    """Return the partitions of the bridge's handlers. Other stored handlers are not in this app."""
    layouts = layouts_in_force(wiring.store.subscriptions.read_all())
    served = {each.name for each in wiring.handlers}
    return wiring.store.partitions.of({name: each.term for name, each in layouts.items() if name in served})


def _show_blocked(wiring: Wiring) -> str:
    """Describe blocked partitions for the error message."""
    states = {image.id: visible_state(image) for image in _read_partitions(wiring)}
    blocked = [f"{name} is {state}" for name, state in states.items() if state != "flowing"]
    return f" ({list_some(blocked, _NAMED)})" if blocked else ""


def empty(client: MongoClient[dict[str, Any]]) -> None:
    """Remove all documents. Keep collections, indexes and the signing keys of outboxes."""
    for database in client.list_database_names():
        if database in _NOT_OURS:
            continue
        for name in client[database].list_collection_names(filter={"type": "collection"}):
            if not name.startswith("system."):
                # This process has cached them. A worker started later would not know its keys.
                client[database][name].delete_many({"$nor": [KEYS_OF_OUTBOXES]} if name == KEYS else {})
