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

from mongo_celery.mongo.redaction import short
from mongo_celery.outbox.registry import OUTBOXES, AnyOutbox

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

    Gauges (`pending`, `documents`, `failing_documents`, `stuck_documents`, `other_app_documents`, `oldest_age_seconds`,
    `dead_letters`) are of the collection, whichever process is scraped. Counters (`dispatched`, `failures`,
    `unsigned`, `passed_over`) are of the scraped process since it started, and so are the gauges of its dispatcher
    (`queued_documents`, `broker_down`); processes of a prefork pool count for themselves. All names begin with
    `mongo_celery_outbox_`, all have the label `outbox`.

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
            _add(families, "unsigned", name, counters.unsigned)
            dispatcher = outbox.backing.dispatcher.state
            _add(families, "queued_documents", name, dispatcher.queued)
            _add(families, "broker_down", name, int(dispatcher.broker_down))
            _add(families, "passed_over", name, dispatcher.passed_over)
            if status is not None:
                _add(families, "documents", name, status.documents)
                _add(families, "pending", name, status.pending)
                _add(families, "failing_documents", name, status.failing)
                _add(families, "stuck_documents", name, status.stuck)
                _add(families, "other_app_documents", name, status.other_apps)
                _add(families, "oldest_age_seconds", name, status.oldest_seconds or 0.0)
                _add(families, "dead_letters", name, status.dead_letters)
        yield from families.values()

    def _status(self, outbox: AnyOutbox) -> OutboxStatus | None:
        try:
            with pymongo.timeout(self._answer_seconds):
                return outbox.status()
        except Exception as error:  # noqa: BLE001 - one outbox that is broken does not hide the others
            logger.warning(
                "outbox %s has no metrics now: %s", outbox.name, short(error), extra={"event": "metrics_missing"}
            )
            return None


def _name(outbox: AnyOutbox) -> str | None:
    try:
        return outbox.name
    except Exception as error:  # noqa: BLE001 - a URL that is none, say; without a name there is nothing to label
        logger.warning("%r has no metrics: %s", outbox, short(error), extra={"event": "metrics_missing"})
        return None


def _families() -> _Families:
    gauges = {
        "up": "Whether MongoDB answered for this outbox.",
        "documents": "Documents with something pending.",
        "pending": "Entries that wait to be dispatched.",
        "failing_documents": "Documents whose next entry could not be published through its own fault.",
        "stuck_documents": "Documents whose next entry has failed max_attempts times.",
        "other_app_documents": "Documents whose next entry belongs to an app that this process does not deliver for.",
        "oldest_age_seconds": "Age of the oldest pending entry; 0 when nothing waits.",
        "dead_letters": "Entries that were set aside.",
        "queued_documents": "Documents in the queue of this process's dispatcher.",
        "broker_down": "Whether this process's dispatcher waits for the broker to come back.",
    }
    counters = {
        "dispatched": "Entries that this process has published.",
        "unsigned": "Entries that this process has set aside since the outbox had not signed them.",
        "failures": "Publishes of this process that failed, broker outages included.",
        "passed_over": "Documents that this process left to the sweep: its queue was full, or the broker down.",
    }
    return {
        **{name: GaugeMetricFamily(_PREFIX + name, text, labels=_LABELS) for name, text in gauges.items()},
        **{name: CounterMetricFamily(_PREFIX + name, text, labels=_LABELS) for name, text in counters.items()},
    }


def _add(families: _Families, metric: str, name: str, value: float) -> None:
    families[metric].add_metric([name], value)
