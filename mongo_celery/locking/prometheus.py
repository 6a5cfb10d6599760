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

from mongo_celery.locking.freeing import ended_count
from mongo_celery.locking.holders import STATES, UNANSWERED, OpenTransaction, open_transactions
from mongo_celery.mongo.opening import Client, resolve_client
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


class LockCollector(Collector):
    """
    Asks MongoDB at each scrape, once for each cluster; nothing is connected before.

    Gauges of the cluster, whichever process is scraped: `open`, open transactions by state (`running`, `idle`, `lost`,
    whose client has no connection, and `dead`, which are lost and were silent for ten seconds), and `silent_seconds`,
    for how long at least nothing was heard of the most silent one, as far as this process has looked: from one scrape
    to the next. A counter of this process: `ended_total`, transactions of dead clients that its waiters have ended.
    All names begin with `mongo_celery_locks_`. Where MongoDB does not answer within a few seconds, there is `up` 0,
    and nothing else of that cluster in that scrape. Without the right `inprog` on the cluster only those of the same
    user count.

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
            for state in STATES:
                families["open"].add_metric([name, state], sum(each.state == state for each in found))
            families["silent_seconds"].add_metric([name], max((each.silent_seconds for each in found), default=0))
        ended.add_metric([], ended_count())
        yield from families.values()
        yield ended

    def _found(self, name: str, given: Client) -> list[OpenTransaction] | None:
        try:
            with pymongo.timeout(self._answer_seconds):
                return open_transactions(resolve_client(given))
        except (*UNANSWERED, ValueError) as error:  # a URL that is none is a ValueError
            logger.warning(
                "locks of %s have no metrics now: %s", name, short(error), extra={"event": "metrics_missing"}
            )
            return None


def _families() -> dict[str, GaugeMetricFamily]:
    cluster = ("cluster",)
    return {
        "up": GaugeMetricFamily(_PREFIX + "up", "Whether MongoDB answered.", labels=cluster),
        "open": GaugeMetricFamily(_PREFIX + "open", "Open transactions.", labels=(*cluster, "state")),
        "silent_seconds": GaugeMetricFamily(
            _PREFIX + "silent_seconds",
            "For how long at least nothing was heard of the most silent of them.",
            labels=cluster,
        ),
    }


def _ended() -> CounterMetricFamily:
    return CounterMetricFamily(_PREFIX + "ended", "Transactions of dead clients that this process has ended.")
