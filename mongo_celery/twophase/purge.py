"""
Removing transactions that are final, or that nobody has begun.

What is in progress or queued is never removed, nor what is younger than the deadline: until then somebody whose answer
was lost may ask for the same again, under the same id. What is being compensated stays until that is final: if that is
canceled, another attempt can be made. A compensation stays for as long as what it takes back is there: of one that is
gone nobody could tell whether it had been done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from mongo_celery.twophase.compensation import compensation_id
from mongo_celery.twophase.final import FinalTransactions, Page
from mongo_celery.twophase.log import TransactionLog
from mongo_celery.twophase.states import FINAL, State

Document = dict[str, Any]
Result = TypeVar("Result")

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
        initial: transactions that were stored, and that nobody has begun or queued.
        kept: compensations that are old enough, and stay, since what they take back is there, or they are being taken
            back themselves.
    """

    done: int
    canceled: int
    initial: int
    kept: int


class Purger:
    """
    Removes what is final, or was never begun, from one log.

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
        self._final = FinalTransactions(log, age, any_application=any_application)
        self._bounded = bounded
        self._is_trial = is_trial
        self._removed: Counter[State] = Counter()
        self._has_removed = False

    def purge(self) -> Purge:
        """Remove them: first what compensates nothing, then compensations of what is gone, and theirs."""
        self._pass(is_compensation=False)
        kept = self._pass(is_compensation=True)
        while kept and self._has_removed and not self._is_trial:
            kept = self._pass(is_compensation=True)
        done, canceled, initial = (self._removed[each] for each in (State.DONE, State.CANCELED, State.INITIAL))
        return Purge(done, canceled, initial, kept)

    def _pass(self, *, is_compensation: bool) -> int:
        """Remove what may go; how many were kept."""
        wanted = {_COMPENSATES: {"$exists": is_compensation}}
        before, kept = self._removed.total(), 0
        page = self._bounded(lambda: self._final.page(wanted, None))
        while page.last is not None:
            going = [
                each
                for each in page.found
                if not self._is_being_compensated(each) and (not is_compensation or self._may_go(each["_id"]))
            ]
            kept += len(page.found) - len(going)
            self._remove(going)
            page = self._behind(wanted, page.last)
        self._has_removed = self._removed.total() > before
        return kept

    def _behind(self, wanted: Mapping[str, Any], last: Document) -> Page:
        return self._bounded(lambda: self._final.page(wanted, last))

    def _is_being_compensated(self, found: Document) -> bool:
        if found.get("compensatedBy") is None:
            return False
        identity = compensation_id(found["_id"], found["compensatedBy"])
        return self._bounded(lambda: self._final.has_open(identity))

    def _may_go(self, compensation_id: Mapping[str, Any]) -> bool:
        """Whether what it takes back is gone; of a trial, whether it would be."""
        taken_back = compensation_id["compensates"]
        if not self._bounded(lambda: self._final.has_any(taken_back)):
            return True
        if not self._is_trial or not self._bounded(lambda: self._final.holds(taken_back)):
            return False
        is_one_itself = isinstance(taken_back, Mapping) and "compensates" in taken_back
        return not is_one_itself or self._may_go(taken_back)

    def _remove(self, going: Sequence[Mapping[str, Any]]) -> None:
        if going and not self._is_trial:
            ids = [each["_id"] for each in going]
            self._bounded(lambda: self._final.remove(ids))
        self._removed.update(FINAL.get(each["state"], State.INITIAL) for each in going)
