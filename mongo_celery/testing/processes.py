"""Real workers for a test: `celery -A APP worker --listener`, as a process of its own that ends with the test."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from mongo_celery.arguments import Duration
from mongo_celery.bridge.handlers import Handler
from mongo_celery.bridge.options import BridgeOptions
from mongo_celery.embedded.processes import ChildProcess, Supervisor
from mongo_celery.testing.draining import Running, wait_until_handled
from mongo_celery.testing.runner import placed

_ENDING_SECONDS = 10.0
_STARTING_SECONDS = 60.0


class BridgeWorkers:
    """
    Starts workers on the servers of a test, and waits for them: a context manager.

    In this process the bridges have those servers meanwhile, so that what a worker does can be looked at.

    Args:
        bridges: that the workers run.
        mongodb_url: of the replica set.
        broker_url: of the broker.
        directory: for what the workers write.
    """

    def __init__(self, bridges: Sequence[Running], mongodb_url: str, broker_url: str, directory: Path) -> None:
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
