"""
What the app's outboxes and two-phase transactions count on is asked for while a listener leads, as beat would: workers
sweep and recover.

Whoever runs a bridge need not run beat. Where both run, more is asked for than is needed, which costs a few reads of
indexes: each entry, and each transaction, is claimed by one of them.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from mongo_celery.app import expiry, periods_of
from mongo_celery.broker.connection import bounded_connection
from mongo_celery.mongo.redaction import short

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger("mongo_celery.listener")

_BROKER_SECONDS = 5
_STOP_SECONDS = 1.0


class PeriodicRequests:
    """
    Asks during one term, from a thread of its own: nothing waits for it, and what fails is tried again.

    Args:
        app: the Celery app.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._every = periods_of(app)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mongo_celery-periodic-requests", daemon=True)

    def start(self) -> None:
        """Ask at once, and again and again; for nothing that something else sees to."""
        if self._every:
            self._thread.start()

    def stop(self) -> None:
        """Ask no more, and wait for that, unless the broker takes its time."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        due = dict.fromkeys(self._every, time.monotonic())
        while not self._stopping.wait(max(min(due.values()) - time.monotonic(), 0.0)):
            for call, at in due.items():
                if at <= time.monotonic():
                    self._ask(*call)
                    due[call] = time.monotonic() + self._every[call]

    def _ask(self, name: str, *arguments: str) -> None:
        try:
            task: Any = self._app.tasks[name]
            expires = expiry(self._every[name, *arguments])
            with bounded_connection(self._app, _BROKER_SECONDS) as connection:
                task.apply_async(arguments, expires=expires, connection=connection, retry=False)
        except Exception as error:  # noqa: BLE001 - of the broker's client, or no such task yet; the next one is soon
            logger.debug("%s could not be asked for: %s", name, short(error))
