"""
Two-phase transactions as Prometheus metrics; needs the extra `metrics`.

::

    from prometheus_client import REGISTRY
    from mongo_celery.twophase.prometheus import TransactionCollector

    REGISTRY.register(TransactionCollector(app))
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pymongo
from pymongo.errors import OperationFailure

from mongo_celery.mongo.redaction import short
from mongo_celery.twophase.log import UNFINISHED, Standing
from mongo_celery.twophase.recoveries import LastRecovery
from mongo_celery.twophase.states import State
from mongo_celery.twophase.twophase import TWO_PHASE_COMMITS, TwoPhaseCommit

if TYPE_CHECKING:
    from celery import Celery
    from prometheus_client import Metric

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("metrics need prometheus-client: pip install 'mongo-celery[metrics]'") from error

logger = logging.getLogger("mongo_celery.twophase")

_ANSWER_SECONDS = 5.0
_PREFIX = "mongo_celery_transactions_"


class TransactionCollector(Collector):
    """
    Asks MongoDB at each scrape, once for each `TwoPhaseCommit` of an app; nothing is connected before.

    Of the collection, whichever process is scraped: the gauges `unfinished`, by state, `abandoned`, those of them that
    recovery should have taken by now, and `oldest_age_seconds` since the last step of the oldest. Of recoveries, as
    they have noted themselves: `recovery_age_seconds` since the last one, `stopped`, how many it found that wait for a
    person, `silent_clusters`, 1 for each cluster that did not answer it, and the counter `recovered_total`, by outcome
    (`done`, `canceled`, or `overdue`: canceled since the deadline had passed). All names begin with
    `mongo_celery_transactions_`; the label `transactions` is the name. Where MongoDB does not answer within a few
    seconds, there is `up` 0, and nothing else in that scrape; before the first recovery, nothing of recoveries.

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
            found = self._asked(each)
            families["up"].add_metric([each.name], 0 if found is None else 1)
            if found is not None:
                standing, last = found
                _add_standing(families, each.name, standing)
                if last is not None:
                    _add_recoveries(families, each.name, last)
        yield from families.values()

    def _asked(self, chosen: TwoPhaseCommit) -> tuple[dict[State, Standing], LastRecovery | None] | None:
        try:
            with pymongo.timeout(self._answer_seconds):
                return chosen.log.standing(), _last_recovery(chosen)
        except Exception as error:  # noqa: BLE001 - one that is broken does not hide the others
            logger.warning(
                "transactions %s have no metrics now: %s", chosen.name, short(error), extra={"event": "metrics_missing"}
            )
            return None


def _last_recovery(chosen: TwoPhaseCommit) -> LastRecovery | None:
    try:
        return chosen.recoveries.last()
    except OperationFailure:  # whoever may not read the notes sees the rest
        return None


def _add_standing(families: Mapping[str, Any], name: str, standing: Mapping[State, Standing]) -> None:
    for state in (State.INITIAL, *UNFINISHED):
        each = standing.get(state, Standing(0, 0.0, 0))
        families["unfinished"].add_metric([name, str(state)], each.count)
        families["oldest_age_seconds"].add_metric([name, str(state)], each.oldest_seconds)
        if state is not State.INITIAL:  # what nobody has begun is taken only where it was queued
            families["abandoned"].add_metric([name, str(state)], each.abandoned)


def _add_recoveries(families: Mapping[str, Any], name: str, last: LastRecovery) -> None:
    families["recovery_age_seconds"].add_metric([name], last.seconds)
    families["stopped"].add_metric([name], last.stopped)
    for cluster in last.silent:
        families["silent_clusters"].add_metric([name, cluster], 1)
    for outcome, count in last.outcomes.items():
        families["recovered"].add_metric([name, outcome], count)


def _families() -> dict[str, Any]:
    by_state = ("transactions", "state")
    gauges = {
        "up": ("Whether MongoDB answered for these.", ("transactions",)),
        "unfinished": ("Transactions that are not final.", by_state),
        "abandoned": ("Transactions that recovery should have taken by now.", by_state),
        "oldest_age_seconds": ("Since the last step of the oldest of them; 0 without one.", by_state),
        "recovery_age_seconds": ("Since the last recovery.", ("transactions",)),
        "stopped": ("Transactions that the last recovery could not get any further.", ("transactions",)),
        "silent_clusters": ("Clusters that did not answer the last recovery.", ("transactions", "cluster")),
    }
    families: dict[str, Any] = {
        name: GaugeMetricFamily(_PREFIX + name, words, labels=labels) for name, (words, labels) in gauges.items()
    }
    families["recovered"] = CounterMetricFamily(
        _PREFIX + "recovered", "Transactions that recoveries have finished.", labels=("transactions", "outcome")
    )
    return families
