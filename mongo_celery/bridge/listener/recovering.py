"""
Two-phase transactions of the app are recovered while a listener leads: workers are asked for it, as beat would.

Whoever runs a bridge need not run beat. Where both run, more recoveries are asked for than are needed, which costs a
few reads of indexes: each transaction is taken over by one of them.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from mongo_celery.broker.connection import bounded_connection
from mongo_celery.mongo.redaction import short
from mongo_celery.twophase.steps import request_recovery
from mongo_celery.twophase.twophase import TWO_PHASE_COMMITS

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger("mongo_celery.listener")

_BROKER_SECONDS = 5
_STOP_SECONDS = 1.0


class RecoveryRequests:
    """
    Asks for recoveries during one term, from a thread of its own: nothing waits for it, and what fails is tried again.

    Args:
        app: the Celery app.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._every = {
            each.name: each.recover_every for each in TWO_PHASE_COMMITS.of(app) if each.recover_every is not None
        }
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mongo_celery-recovering", daemon=True)

    def start(self) -> None:
        """Ask at once, and again and again; for none that something else sees to."""
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
            for name, at in due.items():
                if at <= time.monotonic():
                    self._ask(name)
                    due[name] = time.monotonic() + self._every[name]

    def _ask(self, name: str) -> None:
        try:
            with bounded_connection(self._app, _BROKER_SECONDS) as connection:
                request_recovery(self._app, name, self._every[name], connection)
        except Exception as error:  # noqa: BLE001 - of the broker's client; the next one is soon
            logger.debug("a recovery of transactions %s could not be asked for: %s", name, short(error))
