"""
Prometheus metrics of two-phase transactions. They need the extra `metrics`.

::

    from prometheus_client import REGISTRY
    from mongo_celery.twophase.prometheus import TransactionCollector

    REGISTRY.register(TransactionCollector(app))
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import ClassVar

from pymongo.errors import OperationFailure

from mongo_celery.metrics import Sample, Table, TableCollector
from mongo_celery.twophase.log import StateCount
from mongo_celery.twophase.transaction import UNFINISHED, State
from mongo_celery.twophase.twophase import TWO_PHASE_COMMITS, TwoPhaseCommit, get_engine, get_recoveries


class TransactionCollector(TableCollector):
    """
    The metrics of each `TwoPhaseCommit` of an app. All names begin with `mongo_celery_transactions_`.

    The label `transactions` is the name of the `TwoPhaseCommit`. Metrics of recoveries begin with the first recovery.
    `recovered_total` counts by outcome: `done` or `canceled`.
    """

    registry = TWO_PHASE_COMMITS
    prefix = "mongo_celery_transactions_"
    label = "transactions"
    gauges: ClassVar[Table] = {
        "up": ("1 if MongoDB answered for these transactions, otherwise 0.", ""),
        "unfinished": ("Transactions that are not finished.", "state"),
        "abandoned": ("Transactions that recovery should already have finished.", "state"),
        "oldest_age_seconds": (
            "Seconds since the last step of the oldest late transaction. 0 if none is late.",
            "state",
        ),
        "recovery_age_seconds": ("Seconds since the last recovery.", ""),
        "stopped": ("Transactions that the last recovery could not finish.", ""),
        "silent_clusters": ("Clusters that did not answer the last recovery.", "cluster"),
    }
    counters: ClassVar[Table] = {"recovered": ("Transactions that recoveries have finished.", "outcome")}

    def read(self, thing: TwoPhaseCommit) -> Iterable[Sample]:
        """Count transactions by state, and read the last recovery."""
        counts = get_engine(thing).log.count_states()
        for state in (State.INITIAL, *UNFINISHED):
            found = counts.get(state, StateCount(0, 0.0, 0))
            yield "unfinished", found.count, str(state)
            yield "oldest_age_seconds", found.oldest_seconds, str(state)
            if state is not State.INITIAL:  # of these, recovery takes only queued ones
                yield "abandoned", found.abandoned, str(state)
        with suppress(OperationFailure):  # without the right to read the notes, show the rest
            last = get_recoveries(thing).last()
            if last is None:
                return
            yield "recovery_age_seconds", last.seconds
            yield "stopped", last.stopped
            for cluster in last.silent:
                yield "silent_clusters", 1, cluster
            for outcome, count in last.outcomes.items():
                yield "recovered", count, outcome
