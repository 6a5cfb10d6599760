"""
Periodic requests like beat's. While a listener leads, workers sweep the app's outboxes and recover its transactions.

With a bridge, beat is not needed. If both run, there are more requests than needed. That costs a few index reads,
because only one of them claims each entry and each transaction.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any

from mongo_celery.app import expiry, list_periods
from mongo_celery.broker.connection import bounded_connection
from mongo_celery.mongo.redaction import short

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger("mongo_celery.listener")

_BROKER_SECONDS = 5


class PeriodicRequests:
    """
    The requests of one term. If one fails, the next one follows after its period.

    Args:
        app: the Celery app.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._every = list_periods(app)
        self._due = dict.fromkeys(self._every, 0.0)

    def send_due(self) -> float:
        """Send one due request. Return the seconds until the next one, or infinity if there is none."""
        call = min(self._due, key=lambda each: self._due[each], default=None)
        if call is None:  # something else handles all of them
            return math.inf
        if self._due[call] <= time.monotonic():
            self._ask(*call)
            self._due[call] = time.monotonic() + self._every[call]
        return max(min(self._due.values()) - time.monotonic(), 0.0)

    def _ask(self, name: str, *arguments: str) -> None:
        try:
            task: Any = self._app.tasks[name]
            expires = expiry(self._every[name, *arguments])
            with bounded_connection(self._app, _BROKER_SECONDS) as connection:
                task.apply_async(arguments, expires=expires, connection=connection, retry=False)
        except Exception as error:  # noqa: BLE001 - of the broker's client, or no such task yet; the next one is soon
            logger.debug("the listener could not send %s, and sends it after its period: %s", name, short(error))
