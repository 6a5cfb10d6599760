"""
The sweep: delivers what a crash, a lost connection or a broker outage has left behind.

Outboxes take turns, a handful of documents each, so that a large backlog in one collection does not keep the
others waiting. A broker that takes nothing ends the sweep: everything waits for the next.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pymongo.errors import ConnectionFailure, PyMongoError

from mongo_celery.mongo.redaction import short
from mongo_celery.outbox import index
from mongo_celery.outbox.backing import Backing
from mongo_celery.outbox.relay import Delivery

logger = logging.getLogger("mongo_celery.outbox")

SWEEP_TASK = "mongo_celery.outbox.sweep"

_TURN = 50
"""Documents of one outbox before the next has its turn."""

_SWEEP_SECONDS = 60.0
"""After so long a sweep leaves the rest to the next, which beat has started meanwhile."""

_REFUSALS_MAX = 3
"""So many documents in a row for which the broker did not answer end a sweep."""

_NOTE_SECONDS = 5.0
"""How often a process notes that it sweeps."""

_IDLE_TURNS_MAX = 3
"""So many turns in which nothing could be delivered end a sweep of one outbox: what failed is held back meanwhile."""


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


def sweep_one(backlog: Backlog, older_than: float, limit: int) -> Delivery:
    """Deliver documents of one outbox, the given number at most; the sum of what was done."""
    relay = backlog.backing.relay
    backlog.backing.sweeps.note(_NOTE_SECONDS)
    total, refusals = Delivery(), 0
    for document_id in index.due_documents(backlog.backing.plain, older_than, limit):
        try:
            delivery = relay.deliver(document_id, older_than=older_than)
        except ConnectionFailure:
            raise
        except Exception as error:  # noqa: BLE001 - one document that nobody can make sense of stops no other
            logger.error(
                "outbox %s: document %r cannot be delivered: %s",
                backlog.name(),
                document_id,
                short(error),
                extra={"event": "document_undeliverable"},
            )
            delivery = Delivery(left=1, error=short(error))
        total = _sum(total, delivery)
        refusals = refusals + 1 if delivery.broker_down else 0
        if refusals >= _REFUSALS_MAX:
            break
    return total


def sweep_all(backlogs: Iterable[Backlog]) -> dict[str, Any]:
    """
    Deliver what is due in some outboxes, in turns.

    Returns:
        Per outbox `{"dispatched", "dead", "error"}`, as plain values for a task's result.
    """
    deadline = time.monotonic() + _SWEEP_SECONDS
    totals: dict[str, Delivery] = {}
    waiting = list(backlogs)
    idle: Counter[str] = Counter()
    while waiting and time.monotonic() < deadline:
        for backlog in list(waiting):
            try:
                delivery = sweep_one(backlog, backlog.age, _TURN)
            except PyMongoError as error:  # MongoDB does not answer, or refuses the query
                logger.warning(
                    "outbox %s was not swept: %s", backlog.name(), short(error), extra={"event": "sweep_failed"}
                )
                delivery = Delivery(error=short(error))
            name = backlog.name()
            totals[name] = _sum(totals.get(name, Delivery()), delivery)
            idle[name] += delivery.dispatched + delivery.dead == 0
            if (not delivery.left and not delivery.dispatched + delivery.dead) or idle[name] >= _IDLE_TURNS_MAX:
                waiting.remove(backlog)
            if delivery.broker_down:
                waiting.clear()
                break
    return {
        name: {"dispatched": total.dispatched, "dead": total.dead, "error": total.error}
        for name, total in totals.items()
    }


def _sum(total: Delivery, one: Delivery) -> Delivery:
    return Delivery(
        total.dispatched + one.dispatched,
        total.dead + one.dead,
        total.left + one.left,
        total.broker_down or one.broker_down,
        one.error or total.error,
    )
