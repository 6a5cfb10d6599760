"""
The sweep: delivers what a crash, a lost connection or a broker outage has left behind.

Outboxes take turns, a handful of documents each, so that a large backlog in one collection does not keep the
others waiting. After a turn in which nothing could be delivered those come first that nobody has tried, then those
whose last try is the longest ago: documents that cannot be delivered keep no others waiting, however many there are. A
broker that takes nothing ends the sweep: everything waits for the next. So does the soft time limit of its task, which
is about no entry: every claim is let go before it passes through.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from pymongo.errors import ConnectionFailure, PyMongoError

from mongo_celery.mongo.redaction import short
from mongo_celery.outbox import index
from mongo_celery.outbox.backing import Backing
from mongo_celery.outbox.commands import tell_undeliverable
from mongo_celery.outbox.delivery import Delivery
from mongo_celery.outbox.relay import Relay

logger = logging.getLogger("mongo_celery.outbox")

SWEEP_TASK = "mongo_celery.outbox.sweep"

_TURN = 50
"""Documents of one outbox before the next has its turn."""

_SWEEP_SECONDS = 60.0
"""After so long a sweep leaves the rest to the next, which beat has started meanwhile."""

_NOTE_SECONDS = 5.0
"""How often a process notes that it sweeps."""

_UNTRIED_TURN = 100
"""The same where the untried come first, for which all that is due must be looked at."""

_IDLE_TURNS_MAX = 3
"""After so many turns in a row in which nothing could be delivered an outbox waits for the next sweep."""

_OTHERS_SECONDS = 60.0
"""What has waited for another app for so long is told, and looked for no more often than this."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """
    What a sweep needs of one outbox.

    Attributes:
        name: gives what logs call it; asked for late, since the collection may not be open yet.
        backing: of the outbox.
        age: seconds after which an entry is due.
    """

    name: Callable[[], str]
    backing: Backing
    age: float


def sweep_one(backlog: Backlog, older_than: float, limit: int, *, untried_first: bool = False) -> Delivery:
    """Deliver documents of one outbox, the given number at most; the sum of what was done."""
    relay, backing = backlog.backing.relay, backlog.backing
    backing.sweeps.note(_NOTE_SECONDS)
    found = backing.due(older_than, limit, untried_first=untried_first)
    total = Delivery()
    for start in range(0, len(found), _TURN):
        total = total.and_(_deliver(backlog, relay, found[start : start + _TURN], older_than))
        if total.broker_down:
            break
    return total


def _deliver(backlog: Backlog, relay: Relay, document_ids: list[Any], older_than: float) -> Delivery:
    """Deliver some documents; one that nobody can make sense of stops no other."""
    try:
        return relay.deliver_all(document_ids, older_than=older_than)
    except (ConnectionFailure, SoftTimeLimitExceeded):
        raise
    except Exception as error:  # noqa: BLE001 - whatever is wrong with it
        if len(document_ids) > 1:
            total = Delivery()
            for document_id in document_ids:
                total = total.and_(_deliver(backlog, relay, [document_id], older_than))
            return total
        tell_undeliverable(backlog.name(), document_ids[0], error)
        return Delivery(left=1, error=short(error))


def _tell_of_others(backlog: Backlog) -> None:
    """What waits for another app waits in silence otherwise, since this process passes it over."""
    backing = backlog.backing
    if time.monotonic() < backing.others_told_at + _OTHERS_SECONDS:
        return
    backing.others_told_at = time.monotonic()
    found = index.waiting_for_others(backing.plain, backing.claims, _OTHERS_SECONDS)
    if found is not None:
        logger.warning(
            "outbox %s: document %r waits for another app, and this app (%s) does not deliver its entries; run that "
            "app's sweep, or make the outbox here with delivers=",
            backlog.name(), found["_id"], backing.app.main,
            extra={"event": "other_app"},
        )  # fmt: skip


def sweep_all(backlogs: Iterable[Backlog]) -> dict[str, Any]:
    """
    Deliver what is due in some outboxes, in turns.

    Returns:
        Per outbox `{"dispatched", "dead", "error"}`, as plain values for a task's result.
    """
    deadline = time.monotonic() + _SWEEP_SECONDS
    totals: dict[str, Delivery] = {}
    waiting = list(backlogs)
    for backlog in waiting:  # also those whose turn does not come, since the broker is down
        with suppress(PyMongoError):
            backlog.backing.sweeps.note(_NOTE_SECONDS)
    idle: Counter[str] = Counter()
    untried_first: set[str] = set()
    while waiting and time.monotonic() < deadline:
        for backlog in list(waiting):
            name = backlog.name()
            try:
                turn = _UNTRIED_TURN if name in untried_first else _TURN
                delivery = sweep_one(backlog, backlog.age, turn, untried_first=name in untried_first)
                _tell_of_others(backlog)
            except PyMongoError as error:  # MongoDB does not answer, or refuses the query
                logger.warning(
                    "outbox %s was not swept: %s", backlog.name(), short(error), extra={"event": "sweep_failed"}
                )
                delivery = Delivery(error=short(error))
            totals[name] = totals.get(name, Delivery()).and_(delivery)
            if delivery.dispatched + delivery.dead:
                idle[name] = 0
            else:
                idle[name] += 1
                untried_first.add(name)
            if (not delivery.left and not delivery.dispatched + delivery.dead) or idle[name] >= _IDLE_TURNS_MAX:
                waiting.remove(backlog)
            if delivery.broker_down:
                waiting.clear()
                break
    return {
        name: {"dispatched": total.dispatched, "dead": total.dead, "error": total.error}
        for name, total in totals.items()
    }
