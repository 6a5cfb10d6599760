"""The state of the broker, as the dispatcher of an app knows it: down, on trial, or there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from mongo_celery.mongo.repeating import Pauses

logger = logging.getLogger("mongo_celery.outbox")

_PROBES = Pauses(first=0.5, longest=5.0)


class OutageWatch:
    """
    What one thread has seen of the broker; others may ask `is_down` at any time.

    ::

        there --(takes nothing)--> down --(takes a connection)--> on trial --(something went out)--> there
                                    ^                               |
                                    +------- (as from there) -------+

    A broker may take connections, and refuse every message: until something has gone out it is asked ever more rarely.
    """

    def __init__(self) -> None:
        self.down_until: float | None = None
        """When it is asked again; None where it is not down."""
        self.probes = 0
        self._is_on_trial = False

    @property
    def is_down(self) -> bool:
        """Whether nothing is to be published."""
        return self.down_until is not None

    def went_down(self) -> None:
        """It takes nothing; it is asked after a pause."""
        self.down_until = time.monotonic() + _PROBES.nth(self.probes)

    def probe(self, answers: Callable[[], bool]) -> bool:
        """Ask a broker that is down whether it takes a new connection; True if it is on trial now."""
        is_there = answers()
        self.probes += 1
        if not is_there:
            self.went_down()
            return False
        self.down_until, self._is_on_trial = None, True
        return True

    def went_out(self) -> None:
        """Something was published."""
        if self._is_on_trial:
            self._is_on_trial, self.probes = False, 0
            logger.info("outbox: the broker answers again; what waits is delivered", extra={"event": "broker_back"})
