"""
Outboxes as Prometheus metrics; needs the extra `metrics`.

::

    from prometheus_client import REGISTRY
    from mongo_celery.outbox.prometheus import OutboxCollector

    REGISTRY.register(OutboxCollector(app))
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pymongo
from pymongo.errors import PyMongoError

from mongo_celery.mongo.redaction import short
from mongo_celery.outbox.outbox import OUTBOXES, Outbox

if TYPE_CHECKING:
    from celery import Celery
    from prometheus_client import Metric

    from mongo_celery.outbox.backing import OutboxStatus

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("metrics need prometheus-client: pip install 'mongo-celery[metrics]'") from error

logger = logging.getLogger("mongo_celery.outbox")

_ANSWER_SECONDS = 5.0
_LABELS = ("outbox",)
_PREFIX = "mongo_celery_outbox_"

_Families = dict[str, GaugeMetricFamily | CounterMetricFamily]


class OutboxCollector(Collector):
    """
    Asks MongoDB at each scrape, once for each outbox of an app; nothing is connected before.

    Gauges (`pending`, `documents`, `failing_documents`, `oldest_age_seconds`, `dead_letters`) are of the collection,
    whichever process is scraped. Counters (`dispatched`, `failures`) are of the scraped process since it started;
    processes of a prefork pool count for themselves. All names begin with `mongo_celery_outbox_`, all have the label
    `outbox`.

    An outbox whose MongoDB does not answer within a few seconds has `up` 0 and no gauges in that scrape: no stale
    numbers. The others are not affected.

    Args:
        app: the Celery app.
        answer_seconds: how long one outbox may take.
    """

    def __init__(self, app: Celery, *, answer_seconds: float = _ANSWER_SECONDS) -> None:
        self._app = app
        self._answer_seconds = answer_seconds

    def describe(self) -> list[Metric]:
        """The metrics without numbers: a registry that looks for duplicates must not connect."""
        return list(_families().values())

    def collect(self) -> Iterator[Metric]:
        """The metrics of this moment."""
        families = _families()
        for outbox in OUTBOXES.of(self._app):
            name = _name(outbox)
            if name is None:
                continue
            status = self._status(outbox)
            _add(families, "up", name, 0 if status is None else 1)
            counters = outbox.backing.counters
            _add(families, "dispatched", name, counters.dispatched)
            _add(families, "failures", name, counters.failures)
            if status is not None:
                _gauges_of(families, name, status)
        yield from families.values()

    def _status(self, outbox: Outbox) -> OutboxStatus | None:
        try:
            with pymongo.timeout(self._answer_seconds):
                return outbox.status()
        except PyMongoError as error:
            logger.warning(
                "outbox %s has no metrics now: %s", outbox.name, short(error), extra={"event": "metrics_missing"}
            )
            return None


def _name(outbox: Outbox) -> str | None:
    try:
        return outbox.name
    except (PyMongoError, ValueError) as error:  # a URL that is none; without a name there is nothing to label
        logger.warning("%r has no metrics: %s", outbox, short(error), extra={"event": "metrics_missing"})
        return None


def _families() -> _Families:
    gauges = {
        "up": "Whether MongoDB answered for this outbox.",
        "documents": "Documents with something pending.",
        "pending": "Entries that wait to be dispatched.",
        "failing_documents": "Documents with an entry that could not be published.",
        "oldest_age_seconds": "Age of the oldest pending entry; 0 when nothing waits.",
        "dead_letters": "Entries that were set aside.",
    }
    counters = {
        "dispatched": "Entries that this process has published and removed.",
        "failures": "Publishes of this process that failed, broker outages included.",
    }
    return {
        **{name: GaugeMetricFamily(_PREFIX + name, text, labels=_LABELS) for name, text in gauges.items()},
        **{name: CounterMetricFamily(_PREFIX + name, text, labels=_LABELS) for name, text in counters.items()},
    }


def _gauges_of(families: _Families, name: str, status: OutboxStatus) -> None:
    _add(families, "documents", name, status.documents)
    _add(families, "pending", name, status.pending)
    _add(families, "failing_documents", name, status.failing)
    _add(families, "oldest_age_seconds", name, status.oldest_seconds or 0.0)
    _add(families, "dead_letters", name, status.dead_letters)


def _add(families: _Families, metric: str, name: str, value: float) -> None:
    families[metric].add_metric([name], value)
