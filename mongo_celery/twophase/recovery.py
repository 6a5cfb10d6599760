"""
Recovery: finishing what a coordinator that died has left.

What is in the same clusters has a lane of its own, so that one cluster holds up nobody but those that need it. Each
cluster is asked for a sign of life when the first of its transactions is found; where that does not come, the lanes
of that cluster are left for the next recovery, and the others do not wait for it. What has to be undone there is taken
at the very end all the same, and nothing asked of that cluster: whoever answers has back what is theirs.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self

import pymongo
from bson import ObjectId
from pymongo.errors import PyMongoError

from mongo_celery.errors import ConfigurationError, TransactionStateError
from mongo_celery.mongo.opening import ANSWER_SECONDS
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.verdicts import is_unanswered
from mongo_celery.quantities import number
from mongo_celery.twophase.abandoned import AbandonedTransactions, ReadUpTo
from mongo_celery.twophase.across import likeness_of
from mongo_celery.twophase.completion import Completion, Way
from mongo_celery.twophase.coordinator import OvertakenError
from mongo_celery.twophase.log import TransactionLog
from mongo_celery.twophase.recoveries import GOING_ON_SECONDS, Recovery, RecoveryRecords
from mongo_celery.twophase.states import State, Transaction
from mongo_celery.twophase.values import to_text

logger = logging.getLogger("mongo_celery.twophase")

_BATCH = 200
"""How many are looked for at once: a lane whose cluster does not answer is known before all are read."""

_TOGETHER = 50
"""How many of those with receipts share a MongoDB transaction; one that cannot be applied sends all to take turns."""

_SIDE_BY_SIDE = 4
"""How many of a lane are finished at once: most of the time is waiting for a majority."""

_OWED_SECONDS = 60.0
"""For how long more are begun of what is owed beside clusters that do not answer."""

_NAMED = 3
"""How many of those that this process cannot recover are named."""

_ASKED_AT_ONCE = 16
"""How many clusters are asked at once whether they answer."""


class RecoveryLane:
    """
    What was left in the same clusters: finished side by side, and given up together once a cluster does not answer.

    Args:
        clusters: their aliases; None for the log's own.

    Attributes:
        clusters: these.
        waiting: documents, the oldest step first, with what they have in common.
        silence: why none of them is tried any more.
    """

    def __init__(self, clusters: frozenset[str | None]) -> None:
        self.clusters = clusters
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


class SignsOfClusters:
    """
    Which clusters answer, each asked once, by threads of their own; its `with` block ends when all have had their time.

    Args:
        ask: has a cluster answer once, within a bound.
    """

    def __init__(self, ask: Callable[[str], None]) -> None:
        self._ask = ask
        self._asked: dict[str, Future[None]] = {}
        self._threads = ThreadPoolExecutor(_ASKED_AT_ONCE, thread_name_prefix="mongo-celery-recovery-asks")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def want(self, clusters: Iterable[str | None]) -> None:
        """Ask those that were not asked yet. The log's own has answered already."""
        for each in clusters:
            if each is not None and each not in self._asked:
                self._asked[each] = self._threads.submit(self._ask, each)

    def are_known(self, clusters: Iterable[str | None]) -> bool:
        """Whether all of these have answered, or have had their time."""
        return all(self._asked[each].done() for each in clusters if each is not None)

    def silence_of(self, clusters: Iterable[str | None]) -> str | None:
        """Why what is in these is not tried; None if all answer. Waits for them."""
        for each in sorted(filter(None, clusters)):
            error = self._asked[each].exception()
            if error is not None and _is_of_silence(error):  # whatever else it says, the transactions will be told
                return f"not tried, since cluster {each!r} does not answer: {short(error)}"
        return None

    @property
    def silent(self) -> set[str]:
        """Those that are known not to have answered in time."""
        return {each for each, asked in self._asked.items() if asked.done() and self.silence_of([each]) is not None}


class Recoverer:
    """
    Finishes what was left in one log.

    Args:
        log: of the transactions.
        completion: of transactions of this log.
        records: notes that this was done.
        age: seconds since the last step, by the server's clock.
        any_application: also those of other applications.
    """

    def __init__(
        self,
        log: TransactionLog,
        completion: Completion,
        records: RecoveryRecords,
        age: float,
        *,
        any_application: bool,
    ) -> None:
        self._log = log
        self._abandoned = AbandonedTransactions(log)
        self._completion = completion
        self._records = records
        self._age = age
        self._any_application = any_application
        self._lanes: dict[frozenset[str | None], RecoveryLane] = {}
        self._passed: dict[State, ReadUpTo] = {}
        self._seen: set[str] = set()
        self._noted = -math.inf
        self._unfit: list[tuple[Any, ConfigurationError]] = []

    def recover(self, limit: int) -> list[Recovery]:
        """
        Finish what was left: pending and applied go forward, canceling goes back.

        Args:
            limit: how many are taken over at most. What cannot be read does not count, nor what is in a cluster that
                does not answer: it stays the oldest, and would keep all others from their turn.
        """
        report: dict[str, Recovery] = {}
        silent: set[str] = set()
        try:
            with SignsOfClusters(self._completion.ask) as signs:
                self._recover(limit, signs, report)
                fallen = self._fallen_silent(signs)
                silent = signs.silent | fallen
                self._give_back(signs.silent | self._still_silent(fallen), limit, report)
        finally:  # also where a time limit ends it: what was done is done
            _tell_unfit(self._unfit)
            if math.isfinite(self._noted):
                self._records.note(list(report.values()), sorted(silent))
        return list(report.values())

    def _recover(self, limit: int, signs: SignsOfClusters, report: dict[str, Recovery]) -> None:
        left = limit
        while left > 0:
            wanted = min(left - self._waiting(), _BATCH)
            found = self._found(wanted, signs)
            self._note_going_on()  # whoever cannot read the log has not recovered
            for document in found:
                self._line_up(document, signs)
            is_last = len(found) < wanted
            for taken, became in self._in_lanes(signs, all_=is_last or self._waiting() >= left):
                left -= taken
                _add(report, became)
            if is_last:
                break

    def _note_going_on(self) -> None:
        """Note now and then that it has not ended; threads that race for it note it twice."""
        now = time.monotonic()
        if now - self._noted >= GOING_ON_SECONDS:
            self._noted = now
            self._records.note_going_on()

    def _waiting(self) -> int:
        """How many were found whose clusters have not answered yet."""
        return sum(len(lane.waiting) for lane in self._lanes.values())

    def _fallen_silent(self, signs: SignsOfClusters) -> set[str]:
        """Clusters that have answered at first, and not later: those of a lane that are in no other that goes on."""
        alive = {each for lane in self._lanes.values() if lane.silence is None for each in lane.clusters}
        given_up = [lane for lane in self._lanes.values() if lane.silence is not None]
        mute = {each for lane in given_up if signs.silence_of(lane.clusters) is None for each in lane.clusters}
        return {each for each in mute - alive if each is not None}

    def _still_silent(self, fallen: AbstractSet[str]) -> set[str]:
        """Which of several it was that fell silent: asked once more."""
        with SignsOfClusters(self._completion.ask) as signs:
            signs.want(fallen)
            return {each for each in fallen if signs.silence_of([each]) is not None}

    def _found(self, wanted: int, signs: SignsOfClusters) -> list[dict[str, Any]]:
        """The next ones; what is in clusters that are known not to answer is not even read."""
        with self._completion.bounded() as deadline:
            found = self._completion.until_answered(
                lambda: self._abandoned.find(
                    self._age,
                    any_application=self._any_application,
                    limit=wanted,
                    passed=self._passed,
                    silent=signs.silent,
                ),
                deadline,
                hint="recover again",
            )
        self._passed = ReadUpTo.beyond(self._passed, found)
        return found

    def _line_up(self, document: Mapping[str, Any], signs: SignsOfClusters) -> None:
        identity = to_text(document["_id"])
        if identity in self._seen:  # somebody has done a step of it since it was found
            return
        self._seen.add(identity)
        clusters: frozenset[str | None] = frozenset()
        likeness: Hashable = None
        with suppress(TransactionStateError, ConfigurationError):  # said where it is its turn
            read = self._log.read(document)
            clusters, likeness = frozenset(part.cluster for part in read.parts), likeness_of(read)
        signs.want(clusters)
        self._lanes.setdefault(clusters, RecoveryLane(clusters)).waiting.append((document, likeness))

    def _in_lanes(self, signs: SignsOfClusters, *, all_: bool) -> list[tuple[bool, Recovery | None]]:
        """Empty the lanes whose clusters are known to answer or not to; or all, and wait for the others' answers."""
        busy = [lane for lane in self._lanes.values() if lane.waiting and (all_ or signs.are_known(lane.clusters))]
        if not busy:
            return []
        with ThreadPoolExecutor(_SIDE_BY_SIDE * len(busy), thread_name_prefix="mongo-celery-recovery") as threads:
            runs = [threads.submit(self._run, lane, signs) for lane in busy for _ in range(_SIDE_BY_SIDE)]
            try:
                return [each for run in runs for each in run.result()]
            except BaseException:  # a soft time limit, or Ctrl-C: what is in hand is finished, and no more is begun
                for lane in busy:
                    lane.waiting.clear()
                raise

    def _run(self, lane: RecoveryLane, signs: SignsOfClusters) -> list[tuple[bool, Recovery | None]]:
        ended: list[tuple[bool, Recovery | None]] = []
        lane.silence = lane.silence or signs.silence_of(lane.clusters)
        while some := lane.next():
            self._note_going_on()
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

    def _give_back(self, silent: AbstractSet[str], limit: int, report: dict[str, Recovery]) -> None:
        """Take what is owed beside clusters that do not answer, when all others have had their turn."""
        if not silent:
            return
        until = time.monotonic() + _OWED_SECONDS
        with self._completion.bounded() as deadline:
            found = self._completion.until_answered(
                lambda: self._abandoned.owed(self._age, silent, any_application=self._any_application, limit=limit),
                deadline,
            )
        lane = RecoveryLane(frozenset(silent))
        lane.waiting.extend((each, None) for each in found)
        with ThreadPoolExecutor(_SIDE_BY_SIDE, thread_name_prefix="mongo-celery-recovery") as threads:
            runs = [threads.submit(self._give_some_back, lane, until) for _ in range(_SIDE_BY_SIDE)]
            try:
                for each in (each for run in runs for each in run.result()):
                    _add(report, each)
            except BaseException:
                lane.waiting.clear()
                raise

    def _give_some_back(self, lane: RecoveryLane, until: float) -> list[Recovery | None]:
        became: list[Recovery | None] = []
        while time.monotonic() < until and (some := lane.next()):
            self._note_going_on()
            became += [self._one(each, lane, away=lane.clusters)[1] for each in some]
        return became

    def _together(self, documents: Sequence[Mapping[str, Any]], lane: RecoveryLane) -> dict[str, Transaction]:
        """Take several over and finish them at once, as far as that goes; what is left is taken one by one."""
        taken: dict[str, Transaction] = {}
        ids, coordinator = [each["_id"] for each in documents], ObjectId()
        try:
            with self._completion.bounded() as deadline:
                self._completion.prepare_taking([self._log.read(each) for each in documents])
                mine = self._completion.until_answered(  # an answer that is lost: they are known by their coordinator
                    lambda: self._log.take_over_together(
                        ids, coordinator, lane.clusters, older_than=self._age, any_application=self._any_application
                    ),
                    deadline,
                )
                taken = {to_text(each.id): each for each in mine}
                if mine:
                    taken |= {to_text(each.id): each for each in self._completion.together(mine, deadline)}
        except Exception as error:  # noqa: BLE001 - each says by itself what is the matter with it
            self._note_silence(error, lane)
        return taken

    def _one(
        self,
        document: Mapping[str, Any],
        lane: RecoveryLane,
        taken: Transaction | None = None,
        *,
        away: AbstractSet[str | None] = frozenset(),
    ) -> tuple[bool, Recovery | None]:
        """Whether it was taken over, and what to report; nothing if another was faster."""
        identity, before = document["_id"], str(document["state"])
        try:
            with self._completion.bounded({each for each in away if each is not None}) as deadline:
                taken = taken or self._taken(document)
                if taken is None:
                    return False, None
                ended = self._completion.to_the_end(taken, deadline, any_application=self._any_application)
        except Exception as error:  # noqa: BLE001 - whatever one transaction does, the others have their turn
            if isinstance(error, ConfigurationError):  # there may be many, and the remedy is one
                self._unfit.append((identity, error))
            elif not away:  # that it gets no further is known
                logger.error(
                    "transaction %r could not be recovered: %s",
                    identity,
                    short(error),
                    extra={"event": "recovery_failed"},
                )
            self._note_silence(error, lane)
            after = _state_of(self._log, identity, before)
            stopped = isinstance(error, TransactionStateError | ConfigurationError)
            return taken is not None, Recovery(identity, before, after, short(error), stopped=stopped)
        return True, _recovered(identity, before, str(ended.state), overdue=taken.is_late)

    @staticmethod
    def _note_silence(error: BaseException, lane: RecoveryLane) -> None:
        if _is_of_silence(error):
            lane.silence = f"not tried, since a cluster that it shares with others did not answer: {short(error)}"

    def _taken(self, document: Mapping[str, Any]) -> Transaction | None:
        """What was left, in our hands; None if another was faster."""
        read, coordinator = self._log.read(document), self._completion.new_coordinator()
        if read.state is not State.INITIAL:
            self._completion.prepare_taking([read])
            return self._log.take_over(
                read, coordinator.identity, older_than=self._age, any_application=self._any_application
            )
        if "queuedAt" not in read.document:
            return self._log.expire(read)
        if self._completion.way_of(read) is not Way.DOCUMENTS:
            return read
        try:
            return coordinator.begin(read, any_application=self._any_application)
        except OvertakenError:
            return None


def _add(report: dict[str, Recovery], became: Recovery | None) -> None:
    """What has become of one last counts: what is owed beside a silent cluster is reported twice."""
    if became is not None:
        report[to_text(became.id)] = became


def _tell_unfit(failed: Sequence[tuple[Any, ConfigurationError]]) -> None:
    """Say once which transactions this process cannot recover as it is set up."""
    ids = list(dict.fromkeys(repr(identity) for identity, _ in failed))
    if ids:
        logger.error(
            "%s could not be recovered by this process, among them %s: %s",
            number(len(ids), "transaction", "transactions"),
            ", ".join(ids[:_NAMED]),
            short(failed[0][1]),
            extra={"event": "recovery_failed"},
        )


def _recovered(identity: Any, before: str, after: str, *, overdue: bool = False) -> Recovery:
    logger.warning(
        "transaction %r was recovered: %s, now %s", identity, before, after, extra={"event": "transaction_recovered"}
    )
    return Recovery(identity, before, after, overdue=overdue and after == State.CANCELED)


def _is_of_silence(error: BaseException | None) -> bool:
    """Whether a server has not answered, at the bottom of whatever was made of that."""
    while error is not None:
        if is_unanswered(error):
            return True
        error = error.__cause__
    return False


def _state_of(log: TransactionLog, identity: Any, before: str) -> str:
    try:
        with pymongo.timeout(ANSWER_SECONDS):
            found = log.collection.find_one({"_id": {"$eq": identity}}, {"state": 1})
    except PyMongoError:
        return before
    return str((found or {}).get("state", before))
