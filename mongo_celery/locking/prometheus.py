"""
Open transactions that may keep documents locked, as Prometheus metrics; needs the extra `metrics`.

::

    from prometheus_client import REGISTRY
    from mongo_celery.locking.prometheus import LockCollector

    REGISTRY.register(LockCollector({"shop": client}))
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import pymongo
from pymongo.errors import PyMongoError

from mongo_celery.locking.holders import OpenTransaction, ended_count, open_transactions
from mongo_celery.mongo.opening import Client, client_of
from mongo_celery.mongo.redaction import short

if TYPE_CHECKING:
    from prometheus_client import Metric

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("metrics need prometheus-client: pip install 'mongo-celery[metrics]'") from error

logger = logging.getLogger("mongo_celery.locking")

_ANSWER_SECONDS = 5.0
_PREFIX = "mongo_celery_locks_"
_STATES = ("running", "silent", "dead")


class LockCollector(Collector):
    """
    Asks MongoDB at each scrape, once for each cluster; nothing is connected before.

    Gauges of the cluster, whichever process is scraped: `open`, transactions that have written, by state (`running`,
    `silent`, and `dead`, whose client is gone), and `silent_seconds`, for how long nothing was heard of the most silent
    one. A counter of this process: `ended_total`, transactions of dead clients that its waiters have ended. All names
    begin with `mongo_celery_locks_`. Where MongoDB does not answer within a few seconds, there is `up` 0, and nothing
    else of that cluster in that scrape. Without the right `inprog` on the cluster only those of the same user count.

    Args:
        clients: by the name of the cluster, which is the label `cluster`: clients, or callables that return them.
        answer_seconds: how long one may take.
    """

    def __init__(self, clients: Mapping[str, Client], *, answer_seconds: float = _ANSWER_SECONDS) -> None:
        self._clients = dict(clients)
        self._answer_seconds = answer_seconds

    def describe(self) -> list[Metric]:
        """The metrics without numbers: a registry that looks for duplicates must not connect."""
        return [*_families().values(), _ended()]

    def collect(self) -> Iterator[Metric]:
        """The metrics of this moment."""
        families, ended = _families(), _ended()
        for name, given in self._clients.items():
            found = self._found(name, given)
            families["up"].add_metric([name], 0 if found is None else 1)
            if found is None:
                continue
            for state in _STATES:
                families["open"].add_metric([name, state], sum(each.state == state for each in found))
            families["silent_seconds"].add_metric([name], max((each.inactive_seconds for each in found), default=0))
        ended.add_metric([], ended_count())
        yield from families.values()
        yield ended

    def _found(self, name: str, given: Client) -> list[OpenTransaction] | None:
        try:
            with pymongo.timeout(self._answer_seconds):
                return [each for each in open_transactions(client_of(given)) if each.wrote]
        except (PyMongoError, ValueError) as error:  # a URL that is none is a ValueError
            logger.warning(
                "locks of %s have no metrics now: %s", name, short(error), extra={"event": "metrics_missing"}
            )
            return None


def _families() -> dict[str, GaugeMetricFamily]:
    cluster = ("cluster",)
    return {
        "up": GaugeMetricFamily(_PREFIX + "up", "Whether MongoDB answered.", labels=cluster),
        "open": GaugeMetricFamily(_PREFIX + "open", "Open transactions that have written.", labels=(*cluster, "state")),
        "silent_seconds": GaugeMetricFamily(
            _PREFIX + "silent_seconds", "Since nothing was heard of the most silent of them.", labels=cluster
        ),
    }


def _ended() -> CounterMetricFamily:
    return CounterMetricFamily(_PREFIX + "ended", "Transactions of dead clients that this process has ended.")
