"""Whether the broker takes messages, as a dispatcher knows it: down, on trial, or there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from mongo_celery.mongo.repeating import Pauses
from mongo_celery.outbox.delivery import PublishedPart
from mongo_celery.outbox.failures import FailureKind

logger = logging.getLogger("mongo_celery.outbox")

_REFUSALS_MAX = 3
"""So many documents in a row that a broker has refused with all others are an outage, too."""

_PROBES = Pauses(first=0.5, longest=5.0)


class OutageWatch:
    """
    What one thread has seen of the broker; others may ask `is_down` at any time.

    ::

        there --(no answer, three refusals)--> down --(takes a connection)--> on trial --(something went out)--> there
                                             ^                               |
                                             +-------- (as from there) ------+

    A broker may take connections, and refuse every message: until something has gone out it is asked ever more rarely.

    Args:
        name: gives what logs call the outbox.
        answers: whether the broker takes a new connection; may take some seconds.
    """

    def __init__(self, name: Callable[[], str], answers: Callable[[], bool]) -> None:
        self._name = name
        self._answers = answers
        self.down_until: float | None = None
        """When it is asked again; None where it is not down."""
        self.probes = 0
        self._is_on_trial = False
        self._refusals = 0

    @property
    def is_down(self) -> bool:
        """Whether nothing is to be published."""
        return self.down_until is not None

    def takes_nothing(self, part: PublishedPart) -> bool:
        """Whether the broker does not answer, or has refused some documents in a row, of which this is the last."""
        refused = part.verdict is not None and part.verdict.kind is FailureKind.WAIT_FOR_BROKER
        self._refusals = self._refusals + 1 if refused else 0
        return part.is_outage or self._refusals >= _REFUSALS_MAX

    def went_down(self) -> None:
        """It takes nothing; it is asked after a pause."""
        self._refusals = 0
        self.down_until = time.monotonic() + _PROBES.nth(self.probes)

    def probe(self) -> bool:
        """Ask a broker that is down whether it is back, if it is time; whether it is on trial now."""
        if self.down_until is None or time.monotonic() < self.down_until:
            return False
        answers = self._answers()
        self.probes += 1
        if not answers:
            self.down_until = time.monotonic() + _PROBES.nth(self.probes)
            return False
        self.down_until, self._is_on_trial = None, True
        return True

    def went_out(self) -> None:
        """Something was published."""
        if self._is_on_trial:
            self._is_on_trial, self.probes = False, 0
            logger.info(
                "outbox %s: the broker answers again; what waits is delivered",
                self._name(),
                extra={"event": "broker_back"},
            )
