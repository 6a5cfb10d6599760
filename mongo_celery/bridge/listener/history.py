"""
Oplog gaps: the oplog no longer reaches a subscription's position.

This concerns each handler separately. If its place is in the oplog, it continues, whatever happens to others. For
other handlers, in this order:

1. If `on_history_lost`, by option or for this process, is `oldest` or `now`, the handler moves there. Its `gaps` record
   the skipped part.
2. If `start_from="oldest"` chose a place that fell off the oplog before anything was stored or claimed there, it
   chooses a place once more.
3. Otherwise the handler is blocked, with an error in the log, and `lost` in its document records time and place. The
   stream is opened without it. Its watermark and its partitions do not change. `changes reset` moves its position. A
   leading listener notices that within a second, and reads from there. It keeps its buffer, which the oplog may no
   longer have.

Positions are judged twice. Before the stream is opened, the oldest oplog entry decides, if it is readable. When the
server refuses the stream's place, the reading progress of each handler in this term decides, because buffered changes
are not lost: they run while the listener lives. Stored changes up to the watermark always run. Stored changes after it
wait for the decision, and run once the stream has passed them. If the oplog is not readable, only the handler with the
first position is surely lost. If that was not enough, the next refusal shows the next one.

If no handler can be read any more, the listener drains its buffer and ends with the error: there is nothing to lead,
and a supervisor's alarm is more noticeable than a log record.

An error of MongoDB can interrupt this. Then the stream is opened again where all stored positions can be read. If that
is not enough, the server refuses it again, and the gaps are judged again.

A start never moves back: not to the oldest entry if a handler's own start was pinned after it, and not for a handler
whose place is in the oplog.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from bson import Timestamp
from pymongo.errors import PyMongoError

from mongo_celery.bridge.listener.pacing import RetryGate
from mongo_celery.bridge.listener.renewal import Renewal
from mongo_celery.bridge.listener.starts import Start, open_position, read_starts, start_time
from mongo_celery.bridge.listener.subscription import Subscription
from mongo_celery.bridge.stream.cursor import Position
from mongo_celery.bridge.window import Mark
from mongo_celery.errors import HistoryLostError, LeaseLostError
from mongo_celery.mongo.opening import renew_connections
from mongo_celery.mongo.oplog import Oplog, oplog_or_none, time_of_token
from mongo_celery.mongo.verdicts import brief, raise_if_final
from mongo_celery.quantities import moment
from mongo_celery.signals import history_lost, send_signal

if TYPE_CHECKING:
    from mongo_celery.bridge.listener.watermarks import Watermarks
    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.listener")

_DECISION_SECONDS = 1.0

Subscriptions = Mapping[str, Subscription]


class LostHistory:
    """
    Finds the handlers with oplog gaps in one term, and resolves each gap.

    Args:
        wiring: the wiring of the bridge. Its client reads the reach of the oplog.
        decision: `halt`, `oldest` or `now`.
        fingerprint: the fingerprint of the current stream.

    Attributes:
        due_at: monotonic time of the next tick that may have something to do.
        is_unread: True if nothing is read, because a refusal is not settled.
    """

    def __init__(self, wiring: Wiring, renewal: Renewal, *, decision: str, fingerprint: str) -> None:
        self._wiring = wiring
        self._store, self._client = wiring.store, wiring.client
        self._renewal = renewal
        self._decision = decision
        self._fingerprint = fingerprint
        self._followed_at = 0.0
        self._error = HistoryLostError()
        self.due_at = 0.0
        self.is_unread = False
        self._refusal: HistoryLostError | None = None
        self._retry = RetryGate()

    # -- judgement -----------------------------------------------------------------------------------

    def begin(self, subscriptions: Subscriptions, starts: Mapping[str, Start]) -> Position | None:
        """
        Judge every place before the stream is opened.

        Returns:
            The position at which to open the stream: the smallest readable place. None if there is none.

        Raises:
            LeaseLostError: the term has ended.
            AccessError: the oldest entry is needed, and the right to read it is missing.
        """
        oplog = oplog_or_none(self._client)
        lost = []
        for name, start in starts.items():
            if subscriptions[name].is_stopped:
                continue
            if oplog is not None and (not oplog.holds(start.place[0]) or _is_of_another_set(start, oplog)):
                lost.append(name)
            elif start.lost is not None:
                if oplog is not None and _was_rolled_over(start.lost):  # a member with a longer or larger oplog
                    self._store.subscriptions.clear_lost(name, self._renewal.term.number)
                else:
                    lost.append(name)
        return self._settle(lost, starts, oplog, HistoryLostError(), subscriptions)

    def note_refusal(self, error: HistoryLostError) -> None:
        """Note that the server refuses the stream's place, so nothing is read any more."""
        self._refusal, self.is_unread, self.due_at = error, True, 0.0

    def tick(
        self,
        subscriptions: Subscriptions,
        watermarks: Watermarks,
        now: float,
        read_from: Callable[[Position | None], None],
    ) -> None:
        """
        Settle a refusal, or check whether a command has moved the handlers with oplog gaps.

        Args:
            read_from: called with the position to continue from, if it differs. None if no handler can be read.

        Raises:
            HistoryLostError, LeaseLostError, AccessError: as in `follow_moves` and `settle_refusal`.
        """
        if not self._retry.is_open(now):
            return
        try:
            if self.is_unread:
                refusal, self._refusal = self._refusal, None
                if refusal is not None:
                    position = self.settle_refusal(refusal, subscriptions, watermarks)
                else:  # an error has interrupted that
                    position = self.find_position(subscriptions)
                self.is_unread = False
                read_from(position)
            elif (position := self.follow_moves(subscriptions, now)) is not None:
                read_from(position)
        except PyMongoError as error:
            renew_connections(self._client, error)
            raise_if_final(error, self._wiring.state_concern)
            self._retry.note_failure()
            self.due_at = self._retry.opens_at
            logger.warning(
                "the listener could not resume after an oplog gap, and tries again: %s",
                brief(error),
                extra={"event": "history_unsettled"},
            )
            return
        if not any(each.lost for each in subscriptions.values()):
            self.due_at = math.inf

    def settle_refusal(
        self, error: HistoryLostError, subscriptions: Subscriptions, watermarks: Watermarks
    ) -> Position | None:
        """
        Judge which handlers have an oplog gap, after the server refused the stream's place.

        Returns:
            The position to continue from: the smallest readable place. None if there is none.

        Raises:
            LeaseLostError: the term has ended.
            AccessError: the oldest entry is needed, and the right to read it is missing.
        """
        watermarks.store(subscriptions.values(), 0.0)  # an older place must not decide about finished changes
        before = self._read_starts(subscriptions)
        reached = self._find_reached(subscriptions, before)
        oplog = oplog_or_none(self._client)
        smallest = min((start.place for start in reached.values()), default=None)
        # If no position is before the oldest entry, the server has refused the stream's start token.
        rolled = [name for name, start in reached.items() if oplog is not None and start.place[0] < oplog.first]
        lost = rolled or [name for name, start in reached.items() if start.place == smallest]
        return self._settle(lost, before, oplog, error, subscriptions)

    def follow_moves(self, subscriptions: Subscriptions, now: float) -> Position | None:
        """
        Find the blocked handlers that `changes reset` has moved. While there are any, query MongoDB once a second.

        Returns:
            The position to read from. None if no handler has an oplog gap.

        Raises:
            HistoryLostError: no handler can be read, nothing is left to run, and no handler was moved.
            LeaseLostError: the term has ended.
        """
        lost = [name for name, subscription in subscriptions.items() if subscription.lost]
        if not lost:
            return None
        is_runnable = any(subscription.is_runnable for subscription in subscriptions.values())
        is_over = len(lost) == len(subscriptions) and not is_runnable
        if now - self._followed_at < _DECISION_SECONDS and not is_over:  # before giving up, check for a decision
            return None
        self._followed_at = now
        position = self.find_position(subscriptions)
        moved = [name for name in lost if not subscriptions[name].lost]
        if not moved and is_over:
            raise self._error
        for name in moved:
            logger.warning(
                "handler %s continues at %s, after the oplog gap, because of a reset",
                name,
                subscriptions[name].plan.start.as_datetime().isoformat(),
                extra={"event": "gap_passed", "subscription": name},
            )
        return position if moved else None

    def find_position(self, subscriptions: Subscriptions) -> Position | None:
        """
        Return the position to continue from without a gap for any readable handler. None if no handler can be read.

        This also moves subscriptions whose start has changed.

        Raises:
            LeaseLostError: the term has ended.
        """
        starts = self._read_starts(subscriptions)
        for name, each in subscriptions.items():
            if starts[name].lost is None and (each.lost or starts[name].time != each.plan.start):
                each.move(starts[name].time)
        reached = self._find_reached(subscriptions, starts)
        return open_position(reached, self._fingerprint) if reached else None

    # -- consequences --------------------------------------------------------------------------------

    def _settle(
        self,
        lost: Iterable[str],
        starts: Mapping[str, Start],
        oplog: Oplog | None,
        error: HistoryLostError,
        subscriptions: Subscriptions,
    ) -> Position | None:
        """Move handlers for which an option decides, block the others, and log both."""
        places: dict[str, Timestamp] = {}  # by policy: each has one place for all its handlers
        for name in lost:
            policy = self._choose_policy(subscriptions[name], starts[name], oplog)
            if policy is not None and policy not in places:
                first = oplog.first if oplog is not None and policy == "oldest" else None
                places[policy] = first or start_time(self._client, policy)
            is_moved = policy is not None and self._try_to_move(
                subscriptions[name], policy, places[policy], starts[name], oplog, error
            )
            if not is_moved:
                self._mark_lost(subscriptions[name], starts[name], oplog, error)
        return self.find_position(subscriptions)

    def _choose_policy(self, subscription: Subscription, start: Start, oplog: Oplog | None) -> str | None:
        if self._decision != "halt":
            return self._decision
        is_oldest = start.is_first and subscription.plan.handler.start(self._wiring.options) == "oldest"
        if not is_oldest or oplog is None or subscription.window.seen:
            return None
        return None if self._store.partitions.are_touched(subscription.name) else "oldest"

    def _try_to_move(
        self,
        subscription: Subscription,
        policy: str,
        place: Timestamp,
        before: Start,
        oplog: Oplog | None,
        error: HistoryLostError,
    ) -> bool:
        """Move a handler to its policy's place. Return False if the server has refused that place itself."""
        name, version = subscription.name, self._renewal.term.number
        if before.watermark is None and before.place[0] >= place:
            return False
        start = max(place, before.place[0])
        self._store.partitions.forget_attempts(name, subscription.plan.layout.term)
        if not self._store.subscriptions.move_start(name, version, start, policy):
            return False
        unseen = "" if oplog is not None else ". This user cannot read the oplog, so the earliest handler was chosen"
        said = _quote(error)
        logger.error(
            "the oplog no longer reaches the position of handler %s. Changes are skipped, and the handler continues at "
            "%s (on_history_lost=%s)%s%s",
            name,
            start.as_datetime().isoformat(),
            policy,
            unseen,
            f": {said}" if said else "",
            extra={"event": "history_lost", "subscription": name},
        )
        self._send(name, _reason(before.place[0], oplog.first if oplog is not None else None, error), start)
        return True

    def _mark_lost(
        self, subscription: Subscription, start: Start, oplog: Oplog | None, error: HistoryLostError
    ) -> None:
        name, place = subscription.name, start.place[0]
        oldest = oplog.first if oplog is not None else None
        reason = _reason(place, oldest, error)
        # The stored position does not change: a person may be moving it now.
        if start.lost is None and not self._store.subscriptions.mark_lost(
            name, self._renewal.term.number, place, oldest, reason
        ):
            raise LeaseLostError
        subscription.lost = subscription.has_gap = True
        self.due_at = 0.0
        self._error = error
        logger.error(
            "handler %s is stopped: its position is %s, but %s. Changes in between are lost, and other handlers "
            "continue. Decide where this handler continues: `%s` or `%s`",
            name,
            place.as_datetime().isoformat(),
            reason,
            *(self._wiring.line.changes("reset", name, "--to", option) for option in ("oldest", "now")),
            extra={"event": "subscription_lost", "subscription": name},
        )
        if start.lost is None:  # otherwise an earlier term has found it
            self._send(name, reason)

    def _send(self, handler: str, reason: str, continues_at: Timestamp | None = None) -> None:
        send_signal(
            history_lost,
            self._wiring.name,
            handler=handler,
            reason=reason,
            continues_at=None if continues_at is None else continues_at.as_datetime(),
            command=self._wiring.line.changes("status"),
        )

    # -- positions ---------------------------------------------------------------------------------

    def _read_starts(self, subscriptions: Subscriptions) -> dict[str, Start]:
        return read_starts(self._store, list(subscriptions), self._renewal.term.number)

    def _find_reached(self, subscriptions: Subscriptions, starts: Mapping[str, Start]) -> dict[str, Start]:
        """Return each readable handler's reading progress, at least its start: no earlier change is missing."""
        return {
            name: max(starts[name], _find_read_end(subscription, starts[name]), key=lambda each: each.place)
            for name, subscription in subscriptions.items()
            if not (subscription.lost or subscription.is_stopped)
        }


def _reason(place: Timestamp, oldest: Timestamp | None, error: HistoryLostError) -> str:
    """Return the reason why a place cannot be read, as part of a sentence. It includes the server's answer, if any."""
    reason = "MongoDB refuses to read from there"
    if oldest is not None and place < oldest:
        reason = f"the oplog begins at {moment(oldest.as_datetime().isoformat())}"
    said = _quote(error)
    return f"{reason} ({said})" if said else reason


def _quote(error: HistoryLostError) -> str:
    """Return the server's own words, or an empty string without an answer."""
    return str(error).partition("The server said (")[2].replace("): ", ": ", 1)


def _is_of_another_set(start: Start, oplog: Oplog) -> bool:
    """
    Return True if a place is older than the replica set, so that its state was restored from another set.

    The server would begin at its first entry, which is of the restore. A configured start may also be that early.
    """
    read = None if start.watermark is None else start.watermark.cluster_time
    return oplog.is_whole and read is not None and start.time < read < oplog.first


def _was_rolled_over(lost: Mapping[str, Any]) -> bool:
    """Return True if the age of the oplog shows the gap. Otherwise the server has refused the token."""
    return lost.get("oldest") is not None and lost["at"] < lost["oldest"]


def _find_read_end(subscription: Subscription, start: Start) -> Start:
    """
    Return the last place that a subscription has read, to continue from there.

    It is a time, because only the comparable part of the token is stored. Changes of exactly that time come again, and
    are not new.
    """
    seen = subscription.window.seen
    if not seen or (start.watermark is not None and seen <= start.watermark.data):
        return start
    return Start(start.time, Mark({"_data": seen}, seen, time_of_token({"_data": seen}, start.place[0])), None)
