"""
The sweep: delivers what a crash, a lost connection or a broker outage has left behind.

Outboxes take turns, a handful of documents each, so that a large backlog in one collection does not keep the
others waiting. A broker that takes nothing ends the sweep: everything waits for the next.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from pymongo.errors import ConnectionFailure, PyMongoError

from mongo_celery.mongo.redaction import short
from mongo_celery.outbox import index
from mongo_celery.outbox.registry import outboxes_of
from mongo_celery.outbox.relay import Delivery

if TYPE_CHECKING:
    from celery import Celery

    from mongo_celery.outbox.outbox import Outbox

logger = logging.getLogger("mongo_celery.outbox")

_TURN = 50
"""Documents of one outbox before the next has its turn."""

_SWEEP_SECONDS = 60.0
"""After so long a sweep leaves the rest to the next, which beat has started meanwhile."""

_REFUSALS_MAX = 3
"""So many documents in a row for which the broker did not answer end a sweep."""

_IDLE_TURNS_MAX = 3
"""So many turns in which nothing could be delivered end a sweep of one outbox: what failed is held back meanwhile."""


def sweep_one(outbox: Outbox, older_than: float, limit: int) -> Delivery:
    """Deliver documents of one outbox, the given number at most; the sum of what was done."""
    relay = outbox.backing.relay
    total, refusals = Delivery(), 0
    for document_id in index.due_documents(outbox.backing.plain, older_than, limit):
        try:
            delivery = relay.deliver(document_id, older_than=older_than)
        except ConnectionFailure:
            raise
        except Exception as error:  # noqa: BLE001 - one document that nobody can make sense of stops no other
            logger.error("outbox %s: document %r cannot be delivered: %s", outbox.name, document_id, short(error))
            delivery = Delivery(left=1, error=short(error))
        total = _sum(total, delivery)
        refusals = refusals + 1 if delivery.broker_down else 0
        if refusals >= _REFUSALS_MAX:
            break
    return total


def sweep_all(app: Celery) -> dict[str, Any]:
    """
    Deliver what is due in all outboxes of an app, in turns.

    Returns:
        Per outbox `{"dispatched", "dead", "error"}`, as plain values for a task's result.
    """
    deadline = time.monotonic() + _SWEEP_SECONDS
    totals: dict[str, Delivery] = {}
    waiting = list(outboxes_of(app))
    idle: Counter[str] = Counter()
    while waiting and time.monotonic() < deadline:
        for outbox in list(waiting):
            try:
                delivery = sweep_one(outbox, outbox.sweep_after, _TURN)
            except PyMongoError as error:  # MongoDB does not answer, or refuses the query
                logger.warning("outbox %s was not swept: %s", outbox.name, short(error))
                delivery = Delivery(error=short(error))
            totals[outbox.name] = _sum(totals.get(outbox.name, Delivery()), delivery)
            idle[outbox.name] += delivery.dispatched + delivery.dead == 0
            if (not delivery.left and not delivery.dispatched + delivery.dead) or idle[outbox.name] >= _IDLE_TURNS_MAX:
                waiting.remove(outbox)
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
