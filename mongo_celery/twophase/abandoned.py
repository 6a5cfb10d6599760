"""The documents of transactions that were left: whose turn it is when somebody recovers."""

from __future__ import annotations

import heapq
from collections.abc import Collection as Container
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

from mongo_celery.mongo.expressions import literal
from mongo_celery.twophase.branches import Own
from mongo_celery.twophase.log import IS_OVERDUE, UNFINISHED, TransactionLog, age_key, is_abandoned, is_older
from mongo_celery.twophase.states import State

Document = dict[str, Any]

_AGAIN_SECONDS = 300.0
"""Between two attempts to give back what is owed beside a cluster that does not answer."""


@dataclass(frozen=True, slots=True)
class ReadUpTo:
    """
    Up to where transactions of one state were read, the oldest step first.

    Attributes:
        modified: when the last one of them had its last step.
        ids: of those that had it then; of all, before the first whose time is one.
    """

    modified: Any
    ids: tuple[Any, ...]

    @property
    def condition(self) -> Document:
        """What those meet that come behind."""
        since = {"lastModified": {"$gte": self.modified}} if isinstance(self.modified, datetime) else {}
        return {**since, "_id": {"$nin": list(self.ids)}}

    @staticmethod
    def beyond(passed: Mapping[State, ReadUpTo], found: Iterable[Mapping[str, Any]]) -> dict[State, ReadUpTo]:
        """Up to where it is, when these were read as well, in their order."""
        after = dict(passed)
        for each in found:
            modified = each.get("lastModified")
            for state in _states_of(each):
                before = after.get(state)
                is_later = isinstance(modified, datetime) and (before is None or before.modified != modified)
                ids = () if before is None or is_later else before.ids
                after[state] = ReadUpTo(modified, (*ids, each["_id"]))
        return after


class AbandonedTransactions:
    """
    Those of one log.

    Args:
        log: of the transactions.
    """

    def __init__(self, log: TransactionLog) -> None:
        self._log = log

    def find(
        self,
        older_than: float,
        *,
        any_application: bool,
        limit: int,
        passed: Mapping[State, ReadUpTo] | None = None,
        silent: Container[str] = (),
    ) -> list[Document]:
        """
        Documents that were left unfinished, the oldest step first: what recovery takes over.

        Args:
            older_than: seconds since the last step, by the server's clock. From the deadline on fewer count.
            any_application: also those of other applications.
            limit: how many at most.
            passed: behind which ones, by state.
            silent: clusters, none of whose transactions are wanted.
        """
        condition: Document = {} if any_application else self._log.ours()
        condition["$expr"] = is_abandoned(older_than)
        if silent:
            # By negation, so that whatever has no such fields is found.
            named = {"$nin": list(silent)}
            condition.update({"changes.cluster": named, "participants.cluster": named})
        # Each state is asked for apart: see LOG_INDEXES.
        found = []
        for state in (*UNFINISHED, State.INITIAL):
            more = self._log.unattended() if state is State.INITIAL else {}
            if passed and state in passed:
                more.update(passed[state].condition)
            found.append(self._log.of_state(state, {**condition, **more}, limit))
        return list(islice(heapq.merge(*found, key=age_key), limit))

    def owed(self, older_than: float, silent: Container[str], *, any_application: bool, limit: int) -> list[Document]:
        """
        Documents to be undone, or too late, beside clusters that do not answer: others may have something back.

        Args:
            older_than: as of `find`.
            silent: the clusters. Where one of them decides by its receipt, nothing can be taken back.
            any_application: also those of other applications.
            limit: how many at most.
        """
        named = {"$in": list(silent)}
        condition: Document = {
            "$and": [
                {"$or": [{"changes.cluster": named}, {"participants.cluster": named}]},
                {"$or": [{"own": str(Own.LAST)}, {"key": None}, {"$expr": _is_decided_by_others(silent)}]},
            ],
            **({} if any_application else self._log.ours()),
        }
        # What is being undone already has been so far as others answered: it is taken again after some minutes.
        tried = {**condition, "$expr": is_older(min(older_than, _AGAIN_SECONDS))}
        late = {**condition, "$expr": {"$and": [is_abandoned(older_than), IS_OVERDUE]}}
        found = [self._log.of_state(State.CANCELING, tried, limit), self._log.of_state(State.PENDING, late, limit)]
        return list(islice(heapq.merge(*found, key=age_key), limit))


def _is_decided_by_others(silent: Container[str]) -> Document:
    """Whether the last remote branch has markers, so that the log decides, or is in none of these; see `BranchPlan`."""
    named = {"$cond": [{"$isArray": "$changes.cluster"}, "$changes.cluster", []]}
    in_order = {
        "$reduce": {
            "input": {"$filter": {"input": named, "cond": {"$ne": ["$$this", None]}}},
            "initialValue": [],
            "in": {"$cond": [{"$in": ["$$this", "$$value"]}, "$$value", {"$concatArrays": ["$$value", ["$$this"]]}]},
        }
    }
    last = {"$arrayElemAt": [in_order, -1]}
    marked = {"$cond": [{"$isArray": "$marked"}, "$marked", []]}
    return {"$or": [{"$in": [last, marked]}, {"$not": [{"$in": [last, literal(list(silent))]}]}]}


def _states_of(document: Mapping[str, Any]) -> list[State]:
    """By which states the server finds a document: what damaged code has left may be a list of them."""
    stored = document.get("state")
    return [state for state in State if state == stored or (isinstance(stored, list) and state in stored)]
