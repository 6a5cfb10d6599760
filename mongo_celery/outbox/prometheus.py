"""
Prometheus metrics of outboxes. They need the extra `metrics`.

::

    from prometheus_client import REGISTRY
    from mongo_celery.outbox.prometheus import OutboxCollector

    REGISTRY.register(OutboxCollector(app))
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from mongo_celery.metrics import Sample, Table, TableCollector
from mongo_celery.outbox.registry import OUTBOXES, BaseOutbox


class OutboxCollector(TableCollector):
    """
    The metrics of an app's outboxes. All names begin with `mongo_celery_outbox_`, and all have the label `outbox`.

    Gauges describe the collection, whichever process is scraped. Counters, and the gauges `queued_documents` and
    `broker_down` of the dispatcher, describe the scraped process since its start. Each process of a prefork pool counts
    separately.
    """

    registry = OUTBOXES
    prefix = "mongo_celery_outbox_"
    label = "outbox"
    gauges: ClassVar[Table] = {
        "up": ("1 if MongoDB answered for this outbox, otherwise 0.", ""),
        "documents": ("Documents with pending entries.", ""),
        "pending": ("Entries that wait to be dispatched.", ""),
        "failing_documents": ("Documents whose next entry could not be published, although the broker answers.", ""),
        "stuck_documents": ("Documents whose next entry has failed max_attempts times.", ""),
        "oldest_age_seconds": ("Age in seconds of the oldest pending entry. 0 if none is pending.", ""),
        "dead_letters": ("Entries that were moved to the dead letters.", ""),
        "queued_documents": ("Documents in the dispatcher's queue of this process.", ""),
        "broker_down": ("1 while the dispatcher of this process waits for the broker, otherwise 0.", ""),
    }
    counters: ClassVar[Table] = {
        "dispatched": ("Entries that this process has published.", ""),
        "unsigned": ("Unsigned entries that this process has moved to the dead letters.", ""),
        "failures": ("Failed publishes of this process, including those of broker outages.", ""),
        "passed_over": (
            "Documents that this process left to the sweep, because its queue was full or the broker was down.",
            "",
        ),
    }

    def read(self, thing: BaseOutbox) -> Iterable[Sample]:
        """Read the pending entries."""
        status = thing.status()
        return [
            ("documents", status.documents),
            ("pending", status.pending),
            ("failing_documents", status.failing),
            ("stuck_documents", status.stuck),
            ("oldest_age_seconds", status.oldest_seconds or 0.0),
            ("dead_letters", status.dead_letters),
        ]

    def count(self, thing: BaseOutbox) -> Iterable[Sample]:
        """Return the counters of this process, and its dispatcher's state."""
        counters, dispatcher = thing.runtime.counters, thing.runtime.dispatcher.state
        return [
            ("dispatched", counters.dispatched),
            ("failures", counters.failures),
            ("unsigned", counters.unsigned),
            ("queued_documents", dispatcher.queued),
            ("broker_down", int(dispatcher.broker_down)),
            ("passed_over", dispatcher.passed_over),
        ]
