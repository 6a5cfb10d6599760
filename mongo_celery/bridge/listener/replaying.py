"""
The next dead letters to replay: one at a time in each partition, between its runs.

They come in stream order, with existing documents at their places, so the dead letters of one key keep their order. If
one waits for its retry or for a server, it delays only those of its key. Requests from an older partitioning are
withdrawn, and their dead letters stay.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pymongo.errors import PyMongoError

from mongo_celery.bridge.listener.pacing import RetryGate
from mongo_celery.mongo.redaction import short
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.verdicts import explain_error

if TYPE_CHECKING:
    from mongo_celery.bridge.listener.subscription import Subscription
    from mongo_celery.bridge.state.dead_letters import ReplayRequest
    from mongo_celery.bridge.wiring import Wiring

logger = logging.getLogger("mongo_celery.listener")

_POLL_SECONDS = 1.0
_PAUSE_SECONDS = 5.0
_INDEX_PAUSES = Pauses(first=600.0, longest=600.0)


class Replaying:
    """
    The replays of one term. One thread uses it.

    Args:
        wiring: the wiring of the bridge.

    Attributes:
        due_at: monotonic time of the next turn.
    """

    def __init__(self, wiring: Wiring) -> None:
        self._replays, self._line = wiring.store.replays, wiring.line
        self._concern = wiring.state_concern
        self.due_at = 0.0
        self._indexing = RetryGate(_INDEX_PAUSES)

    def turn(self, subscriptions: Mapping[str, Subscription], now: float) -> None:
        """Read the requests every second, and immediately after an end in a partition that has more."""
        for each in subscriptions.values():
            each.has_ended_replay = each.has_replays = False
            for partition in each.partitions.values():
                partition.replay = None
                partition.is_replaying = partition.is_replaying and partition.in_flight is not None
        if self._indexing.is_open(now):  # it may take long, and requests can be read without it
            self._indexing.note_failure()
            threading.Thread(target=self._create_index, name="mongo_celery-replays-index", daemon=True).start()
        try:
            self._read(subscriptions)
            self.due_at = now + _POLL_SECONDS
        except PyMongoError as error:  # nothing else waits for it
            self.due_at = now + _PAUSE_SECONDS
            logger.warning(
                "the listener could not read which dead letters to replay, and tries again: %s",
                explain_error(error, self._concern) or short(error),
                extra={"event": "replays_unread"},
            )

    def _create_index(self) -> None:
        try:
            self._replays.ensure_index()
            self._indexing.opens_at = math.inf
        except PyMongoError as error:
            if self._indexing.failures == 1:
                logger.warning(
                    "the index for replays could not be created, so the listener reads the whole collection "
                    "dead_letters each time. It tries to create the index again after %.0f s: %s",
                    _INDEX_PAUSES.longest,
                    explain_error(error, self._concern) or short(error),
                    extra={"event": "replays_unindexed"},
                )

    def _read(self, subscriptions: Mapping[str, Subscription]) -> None:
        waiting: dict[str, list[ReplayRequest]] = {}
        for replay in self._replays.read():
            waiting.setdefault(replay.subscription, []).append(replay)
        for name in waiting.keys() & subscriptions.keys():
            self._choose(subscriptions[name], waiting[name])

    def _choose(self, subscription: Subscription, waiting: Sequence[ReplayRequest]) -> None:
        """Give each partition of a subscription its next dead letter."""
        layout = subscription.plan.layout
        current = [each for each in waiting if each.term == layout.term]
        self._withdraw(subscription.name, layout.term, [each for each in waiting if each.term < layout.term])
        held: list[ReplayRequest] = []
        for replay in current:
            partition = subscription.partitions.get(replay.partition)
            if partition is None or partition.is_replaying:
                continue  # this one may be in flight
            if replay.due_in > 0:
                held.append(replay)
            elif partition.replay is None and not any(_is_successor(replay, first) for first in held):
                partition.replay, subscription.has_replays = replay, True

    def _withdraw(self, name: str, term: int, older: Sequence[ReplayRequest]) -> None:
        if older:
            self._replays.withdraw_older(name, term)
        for each in older:
            logger.warning(
                "the dead letter of %s was not replayed and stays, because its handler was repartitioned. Look at it "
                "with `%s`, and replay it again",
                each.key,
                self._line.changes("dead-letters", "list", each.subscription),
                extra={"event": "replay_withdrawn", "subscription": each.subscription},
            )


def _is_successor(replay: ReplayRequest, first: ReplayRequest) -> bool:
    """Return True if a dead letter may have the same key as one of the earlier ones."""
    if replay.partition != first.partition or replay.order <= first.order:
        return False
    return replay.hash == first.hash
