"""Recovery: finishing what a coordinator that died has left."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bson import ObjectId
from pymongo.errors import PyMongoError

from mongo_celery.errors import TransactionStateError
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.verdicts import is_unanswered
from mongo_celery.twophase.across import likeness_of
from mongo_celery.twophase.completion import Completion, Way
from mongo_celery.twophase.coordinator import OvertakenError
from mongo_celery.twophase.log import TransactionLog
from mongo_celery.twophase.states import State, Transaction
from mongo_celery.twophase.values import to_text

logger = logging.getLogger("mongo_celery.twophase")

_BATCH = 200
"""How many are looked for at once: a lane whose cluster does not answer is known before all are read."""

_TOGETHER = 50
"""How many of those with receipts share a MongoDB transaction; one that cannot be applied sends all to take turns."""

_SIDE_BY_SIDE = 4
"""How many of a lane are finished at once: most of the time is waiting for a majority."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """
    What became of one abandoned transaction.

    Attributes:
        id: its `_id`.
        before: its state when it was found.
        after: its state now; the same if it got no further.
        error: why not, in words; None if it is done, or canceled as it should be.
    """

    id: Any
    before: str
    after: str
    error: str | None = None


class RecoveryLane:
    """
    What was left in the same clusters: finished side by side, and given up together once a cluster does not answer.

    Attributes:
        waiting: documents, the oldest step first, with what they have in common.
        silence: why none of them is tried any more.
    """

    def __init__(self) -> None:
        self.waiting: deque[tuple[Mapping[str, Any], Hashable]] = deque()
        self.silence: str | None = None
        self._lock = threading.Lock()

    def next(self) -> list[Mapping[str, Any]]:
        """The next one, or several that are alike; none if nothing is left."""
        with self._lock:
            if not self.waiting:
                return []
            document, likeness = self.waiting.popleft()
            taken = [document]
            while likeness is not None and len(taken) < _TOGETHER and self.waiting and self.waiting[0][1] == likeness:
                taken.append(self.waiting.popleft()[0])
            return taken


class Recoverer:
    """
    Finishes what was left in one log.

    Args:
        log: of the transactions.
        completion: of transactions of this log.
        age: seconds since the last step, by the server's clock.
        any_application: also those of other applications.
    """

    def __init__(self, log: TransactionLog, completion: Completion, age: float, *, any_application: bool) -> None:
        self._log = log
        self._completion = completion
        self._age = age
        self._any_application = any_application
        self._lanes: dict[frozenset[str | None], RecoveryLane] = {}
        self._seen: list[Any] = []

    def recover(self, limit: int) -> list[Recovery]:
        """
        Finish what was left: pending and applied go forward, canceling goes back.

        Args:
            limit: how many are taken over at most. What cannot be read does not count, nor what is in a cluster that
                does not answer: it stays the oldest, and would keep all others from their turn.
        """
        report: list[Recovery] = []
        left = limit
        while left > 0:
            wanted = min(left, _BATCH)
            found = self._found(wanted)
            for document in found:
                self._seen.append(document["_id"])
                self._line_up(document)
            for taken, became in self._in_lanes():
                left -= taken
                if became is not None:
                    report.append(became)
            if len(found) < wanted:
                break
        return report

    def _found(self, wanted: int) -> list[dict[str, Any]]:
        with self._completion.bounded() as deadline:
            return self._completion.until_answered(
                lambda: self._log.abandoned(
                    self._age, any_application=self._any_application, limit=wanted, without=self._seen
                ),
                deadline,
                hint="recover again",
            )

    def _line_up(self, document: Mapping[str, Any]) -> None:
        clusters: frozenset[str | None] = frozenset()
        likeness: Hashable = None
        with suppress(TransactionStateError):  # said where it is its turn
            read = self._log.read(document)
            clusters, likeness = frozenset(part.cluster for part in read.parts), likeness_of(read)
        self._lanes.setdefault(clusters, RecoveryLane()).waiting.append((document, likeness))

    def _in_lanes(self) -> list[tuple[bool, Recovery | None]]:
        busy = [lane for lane in self._lanes.values() if lane.waiting]
        if not busy:
            return []
        with ThreadPoolExecutor(_SIDE_BY_SIDE * len(busy), thread_name_prefix="mongo-celery-recovery") as threads:
            runs = [threads.submit(self._run, lane) for lane in busy for _ in range(_SIDE_BY_SIDE)]
            return [each for run in runs for each in run.result()]

    def _run(self, lane: RecoveryLane) -> list[tuple[bool, Recovery | None]]:
        ended: list[tuple[bool, Recovery | None]] = []
        while some := lane.next():
            taken = self._together(some, lane) if len(some) > 1 and lane.silence is None else {}
            for document in some:
                identity, before = document["_id"], str(document["state"])
                mine = taken.get(to_text(identity))
                if mine is not None and mine.state.is_final:
                    ended.append((True, _recovered(identity, before, str(mine.state))))
                elif lane.silence is None:
                    ended.append(self._one(document, lane, mine))
                else:
                    ended.append((False, Recovery(identity, before, before, lane.silence)))
        return ended

    def _together(self, documents: Sequence[Mapping[str, Any]], lane: RecoveryLane) -> dict[str, Transaction]:
        """Take several over and finish them at once, as far as that goes; what is left is taken one by one."""
        taken: dict[str, Transaction] = {}
        try:
            with self._completion.bounded() as deadline:
                mine = self._log.take_over_together(
                    [each["_id"] for each in documents],
                    ObjectId(),
                    older_than=self._age,
                    any_application=self._any_application,
                )
                taken = {to_text(each.id): each for each in mine}
                if mine:
                    taken |= {to_text(each.id): each for each in self._completion.together(mine, deadline)}
        except Exception as error:  # noqa: BLE001 - each says by itself what is the matter with it
            self._note_silence(error, lane)
        return taken

    def _one(
        self, document: Mapping[str, Any], lane: RecoveryLane, taken: Transaction | None = None
    ) -> tuple[bool, Recovery | None]:
        """Whether it was taken over, and what to report; nothing if another was faster."""
        identity, before = document["_id"], str(document["state"])
        try:
            with self._completion.bounded() as deadline:
                taken = taken or self._taken(document)
                if taken is None:
                    return False, None
                ended = self._completion.to_the_end(taken, deadline, any_application=self._any_application)
                after = str(ended.state)
        except Exception as error:  # noqa: BLE001 - whatever one transaction does, the others have their turn
            logger.error(
                "transaction %r could not be recovered: %s", identity, short(error), extra={"event": "recovery_failed"}
            )
            self._note_silence(error, lane)
            return taken is not None, Recovery(identity, before, _state_of(self._log, identity, before), short(error))
        return True, _recovered(identity, before, after)

    @staticmethod
    def _note_silence(error: BaseException, lane: RecoveryLane) -> None:
        if _is_of_silence(error):
            lane.silence = f"not tried, since a cluster that it shares with others did not answer: {short(error)}"

    def _taken(self, document: Mapping[str, Any]) -> Transaction | None:
        """What was left, in our hands; None if another was faster."""
        read, coordinator = self._log.read(document), self._completion.new_coordinator()
        if read.state is not State.INITIAL:
            return self._log.take_over(
                read, coordinator.identity, older_than=self._age, any_application=self._any_application
            )
        if self._completion.way_of(read) is not Way.DOCUMENTS:
            return read
        try:
            return coordinator.begin(read, any_application=self._any_application)
        except OvertakenError:
            return None


def _recovered(identity: Any, before: str, after: str) -> Recovery:
    logger.warning(
        "transaction %r was recovered: %s, now %s", identity, before, after, extra={"event": "transaction_recovered"}
    )
    return Recovery(identity, before, after)


def _is_of_silence(error: BaseException | None) -> bool:
    """Whether a server has not answered, at the bottom of whatever was made of that."""
    while error is not None:
        if is_unanswered(error):
            return True
        error = error.__cause__
    return False


def _state_of(log: TransactionLog, identity: Any, before: str) -> str:
    try:
        found = log.collection.find_one({"_id": {"$eq": identity}}, {"state": 1})
    except PyMongoError:
        return before
    return str((found or {}).get("state", before))
