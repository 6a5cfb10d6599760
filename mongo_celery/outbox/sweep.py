"""
The sweep: delivers what a crash, a lost connection or a broker outage has left behind.

Outboxes take turns, a handful of documents each, so that a large backlog in one collection does not keep the others
waiting. Documents come in the order of the index. One that may still be due after its turn is passed over until all
others have had theirs. After a turn in vain they come by lot: MongoDB may refuse all that stand in front, each time.

A broker that takes nothing ends the sweep: everything waits for the next. So does the soft time limit of its task,
which is about no entry: every claim is let go before it passes through.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from bson import ObjectId
from celery.exceptions import SoftTimeLimitExceeded
from pymongo.errors import ConnectionFailure, PyMongoError

from mongo_celery.mongo.opening import renew_connections
from mongo_celery.mongo.redaction import short
from mongo_celery.outbox.backing import Backing
from mongo_celery.outbox.commands import tell_undeliverable
from mongo_celery.outbox.delivery import Delivery
from mongo_celery.outbox.index import waiting_for_others
from mongo_celery.outbox.relay import Relay

logger = logging.getLogger("mongo_celery.outbox")

SWEEP_TASK = "mongo_celery.outbox.sweep"

_TURN = 50
"""Documents of one outbox before the next has its turn."""

_SWEEP_SECONDS = 60.0
"""After so long a sweep leaves the rest to the next, which beat has started meanwhile."""

_NOTE_SECONDS = 5.0
"""How often a process notes that it sweeps."""

_IN_VAIN_MAX = 250
"""After so many documents, in turns in which nothing could be delivered, an outbox waits for the next sweep."""

_SEEN_MAX = 1000
"""Documents that are passed over; with more of them the first ones may have a second turn before others."""

_OTHERS_SECONDS = 60.0
"""What has waited for another app for so long is told, and looked for no more often than this."""


@dataclass(frozen=True, slots=True)
class SweepTarget:
    """
    An outbox to sweep.

    Attributes:
        name: gives what logs call it; asked for late, since the collection may not be open yet.
        backing: of the outbox.
        age: seconds after which an entry is due.
    """

    name: Callable[[], str]
    backing: Backing
    age: float


class OutboxSweep:
    """
    One outbox in one sweep.

    Args:
        target: the outbox to sweep.
        older_than: seconds that the oldest entry of a document must have waited.
        limit: how many documents at most, each in one turn, not counting turns in which nothing was delivered; None
            for no limit, and as many turns as it takes.
    """

    def __init__(self, target: SweepTarget, older_than: float, limit: int | None = None) -> None:
        self.target = target
        self.id: ObjectId | None = None
        self.total = Delivery()
        self._older_than = older_than
        self._room = limit
        self._in_vain = 0
        self._seen: list[Any] = []
        self._has_moved = False

    def turn(self, deadline: float = math.inf) -> bool:
        """
        Deliver some documents; whether it is to have another turn.

        Args:
            deadline: moment of the monotonic clock from which on documents that go one by one are left.

        Raises:
            PyMongoError: MongoDB did not answer, or refused the query.
        """
        relay = self.target.backing.relay
        self.target.backing.sweeps.note(_NOTE_SECONDS, self.id)
        found = self._due()
        if not found and self._has_moved and self._seen and self._room is None:  # all others have had their turn
            self._seen, self._has_moved = [], False
            found = self._due()
        if not found:
            return False
        delivery = _deliver(self.target, relay, found, self._older_than, deadline)
        self.total = self.total.and_(delivery)
        done = delivery.dispatched + delivery.dead
        if done < len(found) or delivery.left or delivery.error:
            self._seen = [*self._seen, *found][-_SEEN_MAX:]
        self._in_vain = 0 if done else self._in_vain + len(found)
        self._has_moved = self._has_moved or done > 0
        if self._room is not None and done:
            self._room -= len(found)
        return not delivery.broker_down and self._in_vain < _IN_VAIN_MAX and self._room != 0

    def _due(self) -> list[Any]:
        limit = _TURN if self._room is None else min(_TURN, self._room)
        return self.target.backing.due(self._older_than, limit, passing_over=self._seen, by_lot=self._in_vain > 0)


def take_turns(
    sweeps: Iterable[OutboxSweep], failed: Callable[[OutboxSweep, PyMongoError], object], seconds: float = math.inf
) -> None:
    """
    Deliver what is due in some outboxes, until nothing is, or nothing can be; what was done stands in each.

    Args:
        sweeps: of the outboxes.
        failed: is told of those that MongoDB does not answer for, or refuses; the others go on.
        seconds: after which the rest is left to the next sweep.
    """
    deadline = time.monotonic() + seconds
    waiting = list(sweeps)
    while waiting and time.monotonic() < deadline:
        for sweep in list(waiting):
            if time.monotonic() >= deadline:
                return
            try:
                goes_on = sweep.turn(deadline)
            except PyMongoError as error:
                goes_on = False
                renew_connections(sweep.target.backing.collection.database.client, error)
                failed(sweep, error)
            if sweep.total.broker_down:
                return
            if not goes_on:
                waiting.remove(sweep)


def sweep_one(target: SweepTarget, older_than: float, limit: int) -> Delivery:
    """Deliver documents of one outbox, the given number at most; the sum of what was done."""
    sweep = OutboxSweep(target, older_than, limit)
    while sweep.turn():
        pass
    return sweep.total


def _deliver(
    target: SweepTarget, relay: Relay, document_ids: list[Any], older_than: float, deadline: float
) -> Delivery:
    """Deliver some documents; one that nobody can make sense of stops no other."""
    try:
        return relay.deliver_all(document_ids, older_than=older_than)
    except (ConnectionFailure, SoftTimeLimitExceeded):
        raise
    except Exception as error:  # noqa: BLE001 - whatever is wrong with it
        if len(document_ids) > 1:
            total = Delivery()
            for place, document_id in enumerate(document_ids):
                if time.monotonic() >= deadline:
                    return total.and_(Delivery(left=len(document_ids) - place))
                total = total.and_(_deliver(target, relay, [document_id], older_than, deadline))
            return total
        tell_undeliverable(target.name(), document_ids[0], error)
        return Delivery(left=1, error=short(error))


def _report_others(target: SweepTarget) -> None:
    """What waits for another app waits in silence otherwise, since this process passes it over."""
    backing = target.backing
    if time.monotonic() < backing.others_told_at + _OTHERS_SECONDS:
        return
    backing.others_told_at = time.monotonic()
    found = waiting_for_others(backing.plain, backing.claims, _OTHERS_SECONDS)
    if found is not None:
        logger.warning(
            "outbox %s: document %r waits for another app, and this app (%s) does not deliver its entries; run that "
            "app's sweep, or make the outbox here with delivers=",
            target.name(), found["_id"], backing.app.main,
            extra={"event": "other_app"},
        )  # fmt: skip


def sweep_all(targets: Iterable[SweepTarget]) -> dict[str, Any]:
    """
    Deliver what is due in some outboxes, in turns; nothing of one that another sweep of the app is delivering.

    Returns:
        Per outbox `{"dispatched", "dead", "error"}`, as plain values for a task's result.
    """
    sweeps, begun = [OutboxSweep(target, target.age) for target in targets], list[OutboxSweep]()
    try:
        for sweep in sweeps:  # also those whose turn does not come, since the broker is down
            sweep.id = ObjectId()
            with suppress(PyMongoError):
                if not sweep.target.backing.sweeps.note(0.0, sweep.id):
                    continue
                _report_others(sweep.target)
            begun.append(sweep)
        take_turns(begun, _report_failure, _SWEEP_SECONDS)
    finally:
        for sweep in begun:
            with suppress(PyMongoError):
                sweep.target.backing.sweeps.end(cast(ObjectId, sweep.id))
    return {
        sweep.target.name(): {
            "dispatched": sweep.total.dispatched,
            "dead": sweep.total.dead,
            "error": sweep.total.error,
        }
        for sweep in sweeps
    }


def _report_failure(sweep: OutboxSweep, error: PyMongoError) -> None:
    """MongoDB does not answer, or refuses the query."""
    logger.warning("outbox %s was not swept: %s", sweep.target.name(), short(error), extra={"event": "sweep_failed"})
    sweep.total = sweep.total.and_(Delivery(error=short(error)))
