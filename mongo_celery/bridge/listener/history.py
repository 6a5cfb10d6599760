"""
History lost: the oplog no longer reaches back to the position of a subscription.

It concerns each handler for itself. One whose place is in the oplog continues, whatever happens to others. The rest, in
this order:

1. `on_history_lost`, the option or the one of the process, is `oldest` or `now`: it is moved there, and what it gave up
   is kept among its `gaps`.
2. `start_from="oldest"` has chosen a place that rolled away before anything was stored or claimed there: it is chosen
   again, once.
3. else it is blocked, loudly: `lost` in its document records since when and where. The stream is opened without it, and
   its watermark stays. Its partitions stay as they are. `changes reset` moves its position. A listener that leads sees
   that within a second, and reads from there. It keeps what it has buffered: the oplog may no longer have that.

Judged twice: before the stream is opened, by the oldest entry of the oplog where it may be read, and when the server
refuses the place at which the stream was opened. Then each is judged by how far it has been read in this term, since
what is buffered is not lost: it runs as long as the listener lives. What is stored at or below the watermark runs in
any case. What is stored behind it waits for the decision, and runs once the stream was read behind it. Where the
oplog may not be read, the one with the first position is lost for certain. If that was not all, the next refusal shows
the next one.

If no handler can be read any more, the listener drains what it has buffered and ends with the sentence: there is
nothing to lead, and a supervisor's alarm is louder than a record.

No start is ever lowered: neither by the oldest entry, if a handler's own start was pinned behind it, nor for a handler
whose place is in the oplog.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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

if TYPE_CHECKING:
    from mongo_celery.bridge.listener.watermarks import Watermarks
    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.listener")

_DECISION_SECONDS = 1.0

Subscriptions = Mapping[str, Subscription]


@dataclass(slots=True)
class _Gap:
    """
    A history that was lost, as far as it is settled. What an error has interrupted is taken up again.

    Attributes:
        left: who is not judged yet.
        before: the position of each one when the loss was found.
        places: at which some continue, by policy: each one means one place for all of them.
        moved: who was moved.
    """

    left: list[str]
    before: Mapping[str, Start]
    oplog: Oplog | None
    error: HistoryLostError
    places: dict[str, Timestamp] = field(default_factory=dict)
    moved: list[str] = field(default_factory=list)


class LostHistory:
    """
    Find the handlers that have lost their history in one term, and resolve each loss.

    Args:
        wiring: of the bridge. The oplog of its client is asked how far it reaches back.
        decision: `halt`, `oldest` or `now`.
        fingerprint: of the stream that is read.

    Attributes:
        due_at: monotonic time of the next tick that may have something to do.
        is_unread: whether nothing is read, since a refusal is not settled.
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
        self._gap: _Gap | None = None

    # -- when it is judged -------------------------------------------------------------------------

    def begin(self, subscriptions: Subscriptions, starts: Mapping[str, Start]) -> Position | None:
        """
        Judge every place before the stream is opened.

        Returns:
            Where to open it: at the smallest place of those that can be read. None when there is none.

        Raises:
            LeaseLostError: the term has ended.
            AccessError: the oldest entry is asked for and may not be read.
        """
        oplog = oplog_or_none(self._client)
        lost = []
        starts = {name: start for name, start in starts.items() if not subscriptions[name].is_stopped}
        for name, start in starts.items():
            if oplog is not None and (not oplog.holds(start.place[0]) or _is_of_another_set(start, oplog)):
                lost.append(name)
            elif start.lost is not None:
                if oplog is not None and _was_rolled_over(start.lost):  # a member with a longer oplog, or a larger one
                    self._store.subscriptions.clear_lost(name, self._renewal.term.number)
                else:
                    lost.append(name)
        if not lost:
            return open_position(starts, self._fingerprint) if starts else None
        return self._settle(_Gap(lost, starts, oplog, HistoryLostError()), subscriptions)

    def note_refusal(self, error: HistoryLostError) -> None:
        """Note that the server refuses the place at which the stream is read, so that nothing is read any more."""
        self._refusal, self.is_unread, self.due_at = error, True, 0.0

    def tick(
        self,
        subscriptions: Subscriptions,
        watermarks: Watermarks,
        now: float,
        read_from: Callable[[Position | None], None],
    ) -> None:
        """
        Settle a refusal, or see whether a command has moved those that have lost something.

        Args:
            read_from: called with the position to read on from, if that is another one. None if nobody can be read.

        Raises:
            HistoryLostError, LeaseLostError, AccessError: as `follow_moves` and `settle_refusal`.
        """
        if not self._retry.is_open(now):
            return
        try:
            if self._refusal is not None:
                position = self.settle_refusal(self._refusal, subscriptions, watermarks)
                self._refusal, self.is_unread = None, False
                read_from(position)
            elif (position := self.follow_moves(subscriptions, now)) is not None:
                read_from(position)
        except PyMongoError as error:
            renew_connections(self._client, error)
            raise_if_final(error, self._wiring.state_concern)
            self._retry.note_failure()
            self.due_at = self._retry.opens_at
            logger.warning(
                "resuming after an oplog gap failed, trying again: %s",
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
        The server refuses the place at which the stream is read: judge who has lost something by that.

        To be called again after a `PyMongoError`: it resumes where that came up, and judges nobody twice.

        Returns:
            Where to read on: at the smallest place of those that can be read. None when there is none.

        Raises:
            LeaseLostError: the term has ended.
            AccessError: the oldest entry is asked for and may not be read.
        """
        if self._gap is None:
            self._gap = self._find_gap(error, subscriptions, watermarks)
        position = self._settle(self._gap, subscriptions)
        self._gap = None
        return position

    def _find_gap(self, error: HistoryLostError, subscriptions: Subscriptions, watermarks: Watermarks) -> _Gap:
        watermarks.store(subscriptions.values(), 0.0)  # what is done is not judged by an older place
        before = self._read_starts(subscriptions)
        reached = self._find_reached(subscriptions, before)
        oplog = oplog_or_none(self._client)
        smallest = min((start.place for start in reached.values()), default=None)
        # If no position is before the oldest entry, the server has refused the token at which the stream was opened.
        rolled = [name for name, start in reached.items() if oplog is not None and start.place[0] < oplog.first]
        lost = rolled or [name for name, start in reached.items() if start.place == smallest]
        return _Gap(lost, before, oplog, error)

    def follow_moves(self, subscriptions: Subscriptions, now: float) -> Position | None:
        """
        Find the blocked handlers that `changes reset` has moved. Ask MongoDB once a second while there are any.

        Returns:
            The position to read from if it has. Else None.

        Raises:
            HistoryLostError: nobody is left who can be read, nothing is left to run, and nobody was moved.
            LeaseLostError: the term has ended.
        """
        lost = [name for name, subscription in subscriptions.items() if subscription.lost]
        if not lost:
            return None
        is_runnable = any(subscription.is_runnable for subscription in subscriptions.values())
        is_over = len(lost) == len(subscriptions) and not is_runnable
        if now - self._followed_at < _DECISION_SECONDS and not is_over:  # before giving up somebody may have decided
            return None
        self._followed_at = now
        starts = self._read_starts(subscriptions)
        moved = [name for name in lost if starts[name].lost is None]
        if not moved:
            if is_over:
                raise self._error
            return None
        for name in moved:
            subscriptions[name].move(starts[name].time)
            logger.warning(
                "handler %s continues at %s: a command has moved it over its lost history",
                name,
                starts[name].time.as_datetime().isoformat(),
                extra={"event": "gap_passed", "subscription": name},
            )
        return open_position(self._find_reached(subscriptions, starts), self._fingerprint)

    def find_position(self, subscriptions: Subscriptions) -> Position | None:
        """
        Return the place to read on, so that nobody who can be read misses anything. None if nobody can be read.

        Raises:
            LeaseLostError: the term has ended.
        """
        reached = self._find_reached(subscriptions, self._read_starts(subscriptions))
        return open_position(reached, self._fingerprint) if reached else None

    # -- what happens to it ------------------------------------------------------------------------

    def _settle(self, gap: _Gap, subscriptions: Subscriptions) -> Position | None:
        """Move those for whom an option has decided, let the others stay where they are, and say so."""
        for name in list(gap.left):
            start = gap.before[name]
            policy = self._choose_policy(subscriptions[name], start, gap.oplog)
            if policy is not None and self._try_to_move(subscriptions[name], policy, start, gap):
                gap.moved.append(name)
            else:
                self._mark_lost(subscriptions[name], start, gap.oplog, gap.error)
            gap.left.remove(name)
        after = self._read_starts(subscriptions)
        for name in gap.moved:
            subscriptions[name].move(after[name].time)
        reached = self._find_reached(subscriptions, after)
        return open_position(reached, self._fingerprint) if reached else None

    def _choose_policy(self, subscription: Subscription, start: Start, oplog: Oplog | None) -> str | None:
        if self._decision != "halt":
            return self._decision
        is_oldest = start.is_first and subscription.plan.handler.start(self._wiring.options) == "oldest"
        if not is_oldest or oplog is None or subscription.window.seen:
            return None
        return None if self._store.partitions.are_touched(subscription.name) else "oldest"

    def _try_to_move(self, subscription: Subscription, policy: str, before: Start, gap: _Gap) -> bool:
        """Move a handler to where its policy says. False if that place itself was refused, so that it cannot help."""
        name, version = subscription.name, self._renewal.term.number
        if policy not in gap.places:
            first = gap.oplog.first if gap.oplog is not None and policy == "oldest" else None
            gap.places[policy] = first or start_time(self._client, policy)
        if before.watermark is None and before.place[0] >= gap.places[policy]:
            return False
        start = max(gap.places[policy], before.place[0])
        self._store.partitions.forget_attempts(name, subscription.plan.layout.term)
        if not self._store.subscriptions.move_start(name, version, start, policy):
            return False
        unseen = "" if gap.oplog is not None else ". The oplog cannot be read here: the handler had the lowest position"
        said = _quote(gap.error)
        logger.error(
            "history of handler %s is lost; it continues at %s (on_history_lost=%s)%s%s",
            name,
            start.as_datetime().isoformat(),
            policy,
            unseen,
            f": {said}" if said else "",
            extra={"event": "history_lost", "subscription": name},
        )
        return True

    def _mark_lost(
        self, subscription: Subscription, start: Start, oplog: Oplog | None, error: HistoryLostError
    ) -> None:
        name, place = subscription.name, start.place[0]
        oldest = oplog.first if oplog is not None else None
        reason = _reason(place, oldest, error)
        # The stored position is left as it is: somebody may move it at this very moment.
        if start.lost is None and not self._store.subscriptions.mark_lost(
            name, self._renewal.term.number, place, oldest, reason
        ):
            raise LeaseLostError
        subscription.lost = subscription.has_gap = True
        self.due_at = 0.0
        self._error = error
        logger.error(
            "handler %s has lost its history: its position is %s, and %s. It is blocked until you decide. Others whose "
            "position can be read continue. Run `%s` or `%s`",
            name,
            place.as_datetime().isoformat(),
            reason,
            *(self._wiring.line.changes("reset", name, "--to", option) for option in ("oldest", "now")),
            extra={"event": "subscription_lost", "subscription": name},
        )

    # -- positions ---------------------------------------------------------------------------------

    def _read_starts(self, subscriptions: Subscriptions) -> dict[str, Start]:
        return read_starts(self._store, list(subscriptions), self._renewal.term.number)

    def _find_reached(self, subscriptions: Subscriptions, starts: Mapping[str, Start]) -> dict[str, Start]:
        """Up to where each one that can be read has been read. In front of its start nothing is owed."""
        return {
            name: max(starts[name], _find_read_end(subscription, starts[name]), key=lambda each: each.place)
            for name, subscription in subscriptions.items()
            if not (subscription.lost or subscription.is_stopped)
        }


def _reason(place: Timestamp, oldest: Timestamp | None, error: HistoryLostError) -> str:
    """Return the reason why a place cannot be read, as part of a sentence. If the server was asked, its answer."""
    reason = "the server refuses that place"
    if oldest is not None and place < oldest:
        reason = f"the oplog begins at {moment(oldest.as_datetime().isoformat())}"
    said = _quote(error)
    return f"{reason} ({said})" if said else reason


def _quote(error: HistoryLostError) -> str:
    """The server's own words. Empty where it was not asked."""
    return str(error).partition("The server said: ")[2]


def _is_of_another_set(start: Start, oplog: Oplog) -> bool:
    """
    Return True if somebody has read up to a place before the set was made: its state was restored from another one's.

    The server would begin with the first entry, and so with the restoring. A start that was given may be as early.
    """
    read = None if start.watermark is None else start.watermark.cluster_time
    return oplog.is_whole and read is not None and start.time < read < oplog.first


def _was_rolled_over(lost: Mapping[str, Any]) -> bool:
    """Return True if the oplog said so. A token that was refused is refused again."""
    return lost.get("oldest") is not None and lost["at"] < lost["oldest"]


def _find_read_end(subscription: Subscription, start: Start) -> Start:
    """
    Return the end of what was read for a subscription, as a place to read on.

    By its time, not by its token, of which only the comparable part is kept: what has that very time comes again and
    is not new.
    """
    seen = subscription.window.seen
    if not seen or (start.watermark is not None and seen <= start.watermark.data):
        return start
    return Start(start.time, Mark({"_data": seen}, seen, time_of_token({"_data": seen}, start.place[0])), None)
