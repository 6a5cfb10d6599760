"""
Two-phase transactions as Prometheus metrics; needs the extra `metrics`.

::

    from prometheus_client import REGISTRY
    from mongo_celery.twophase.prometheus import TransactionCollector

    REGISTRY.register(TransactionCollector(app))
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pymongo
from pymongo.errors import PyMongoError

from mongo_celery.mongo.redaction import short
from mongo_celery.twophase.log import UNFINISHED
from mongo_celery.twophase.states import State
from mongo_celery.twophase.twophase import TWO_PHASE_COMMITS, TwoPhaseCommit

if TYPE_CHECKING:
    from celery import Celery
    from prometheus_client import Metric

try:
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("metrics need prometheus-client: pip install 'mongo-celery[metrics]'") from error

logger = logging.getLogger("mongo_celery.twophase")

_ANSWER_SECONDS = 5.0
_PREFIX = "mongo_celery_transactions_"


class TransactionCollector(Collector):
    """
    Asks MongoDB at each scrape, once for each `TwoPhaseCommit` of an app; nothing is connected before.

    Gauges of the collection, whichever process is scraped: `unfinished`, by state, and `oldest_age_seconds` since the
    last step of the oldest. All names begin with `mongo_celery_transactions_`; the label `transactions` is the name.
    Where MongoDB does not answer within a few seconds, there is `up` 0, and nothing else in that scrape.

    Args:
        app: the Celery app.
        answer_seconds: how long one may take.
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
        for each in TWO_PHASE_COMMITS.of(self._app):
            standing = self._standing(each)
            families["up"].add_metric([each.name], 0 if standing is None else 1)
            if standing is None:
                continue
            for state in (State.INITIAL, *UNFINISHED):
                count, oldest = standing.get(state, (0, 0.0))
                families["unfinished"].add_metric([each.name, str(state)], count)
                families["oldest_age_seconds"].add_metric([each.name, str(state)], oldest)
        yield from families.values()

    def _standing(self, chosen: TwoPhaseCommit) -> dict[State, tuple[int, float]] | None:
        try:
            with pymongo.timeout(self._answer_seconds):
                return chosen.log.standing()
        except (PyMongoError, ValueError) as error:  # a URL that is none is a ValueError
            logger.warning(
                "transactions %s have no metrics now: %s", chosen.name, short(error), extra={"event": "metrics_missing"}
            )
            return None


def _families() -> dict[str, GaugeMetricFamily]:
    by_state = ("transactions", "state")
    return {
        "up": GaugeMetricFamily(_PREFIX + "up", "Whether MongoDB answered for these.", labels=("transactions",)),
        "unfinished": GaugeMetricFamily(_PREFIX + "unfinished", "Transactions that are not final.", labels=by_state),
        "oldest_age_seconds": GaugeMetricFamily(
            _PREFIX + "oldest_age_seconds", "Since the last step of the oldest of them; 0 without one.", labels=by_state
        ),
    }
