"""
Removing transactions that are final, for good.

What is not final is never removed, nor what is younger than the deadline: until then somebody whose answer was lost
may ask for the same again, under the same id. What is being compensated stays until that is final: if that is canceled,
another attempt can be made. A compensation stays for as long as what it takes back is there: of one
that is gone nobody could tell whether it had been done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from mongo_celery.twophase.compensation import compensation_id
from mongo_celery.twophase.log import FINAL, TransactionLog
from mongo_celery.twophase.states import State

Document = dict[str, Any]
Result = TypeVar("Result")

_BATCH = 1000
_COMPENSATES = "_id.compensates"


class Bounded(Protocol):
    """Makes one call to a server within the time of a call, repeated as long as that makes sense."""

    def __call__(self, attempt: Callable[[], Result]) -> Result:
        """What the attempt returns."""


@dataclass(frozen=True, slots=True)
class Purge:
    """
    What a purge has removed, or would remove.

    Attributes:
        done: transactions that were done.
        canceled: transactions that were canceled.
        kept: compensations that are old enough, and stay, since what they take back is there, or they are being taken
            back themselves.
    """

    done: int
    canceled: int
    kept: int


class Purger:
    """
    Removes what is final from one log.

    Args:
        log: of the transactions.
        bounded: makes one call to a server.
        age: seconds since the last step, by the server's clock.
        any_application: also those of other applications.
        is_trial: whether nothing is removed.
    """

    def __init__(
        self, log: TransactionLog, bounded: Bounded, age: float, *, any_application: bool, is_trial: bool
    ) -> None:
        self._log = log
        self._bounded = bounded
        self._condition = log.final_since(age, any_application=any_application)
        self._is_trial = is_trial
        self._removed: Counter[State] = Counter()
        self._has_removed = False

    def purge(self) -> Purge:
        """Remove them: first what compensates nothing, then compensations of what is gone, and theirs."""
        self._pass(is_compensation=False)
        kept = self._pass(is_compensation=True)
        while kept and self._has_removed and not self._is_trial:
            kept = self._pass(is_compensation=True)
        return Purge(self._removed[State.DONE], self._removed[State.CANCELED], kept)

    def _pass(self, *, is_compensation: bool) -> int:
        """Remove what may go; how many were kept."""
        condition = {**self._condition, _COMPENSATES: {"$exists": is_compensation}}
        before, kept = self._removed.total(), 0
        batch = self._found(condition)
        while batch:
            going = [
                each
                for each in batch
                if not self._is_being_compensated(each) and (not is_compensation or self._may_go(each["_id"]))
            ]
            kept += len(batch) - len(going)
            self._remove(going)
            batch = self._found(condition, batch[-1])
        self._has_removed = self._removed.total() > before
        return kept

    def _found(self, condition: Mapping[str, Any], last: Document | None = None) -> list[Document]:
        return self._bounded(lambda: self._log.batch(condition, last, _BATCH))

    def _is_being_compensated(self, found: Document) -> bool:
        if found.get("compensatedBy") is None:
            return False
        identity = compensation_id(found["_id"], found["compensatedBy"])
        return bool(self._found({"_id": {"$eq": identity}, "state": {"$nin": list(FINAL)}}))

    def _may_go(self, compensation_id: Mapping[str, Any]) -> bool:
        """Whether what it takes back is gone; of a trial, whether it would be."""
        taken_back = compensation_id["compensates"]
        if not self._found({"_id": {"$eq": taken_back}}):
            return True
        if not self._is_trial or not self._found({**self._condition, "_id": {"$eq": taken_back}}):
            return False
        is_one_itself = isinstance(taken_back, Mapping) and "compensates" in taken_back
        return not is_one_itself or self._may_go(taken_back)

    def _remove(self, batch: Sequence[Mapping[str, Any]]) -> None:
        if batch and not self._is_trial:
            ids = [each["_id"] for each in batch]
            self._bounded(lambda: self._log.remove({**self._condition, "_id": {"$in": ids}}))
        self._removed.update(FINAL[each["state"]] for each in batch)
