"""
How a bridge that watches the collection delivers: a handler that dispatches what a change has left pending.

The bridge brings the position in the stream, the order and the repetition; the handler claims the document as
every relay does. A change whose entries the writer has dispatched meanwhile is passed over by the listener, by a
flag that the server computes from the document as it is when the change is read: what it no longer holds then
has been dispatched, and what is added later brings a change of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from mongo_celery.mongo.repeating import Pauses
from mongo_celery.outbox.pending import PendingField
from mongo_celery.outbox.relay import Relay

OPERATIONS = ("insert", "update", "replace")


def watched_fields(field: PendingField) -> tuple[str, ...]:
    """A claim changes other fields, so a delivery does not call for the next one."""
    return (field.count,)


def still_pending(field: PendingField) -> dict[str, Any]:
    """True of a change whose document has something pending when the change is read."""
    return {
        "$or": [
            {"$eq": [{"$type": "$fullDocument"}, "missing"]},  # a bridge that does not look documents up
            {"$gt": [f"$fullDocument.{field.count}", 0]},
        ],
    }


_BUSY = Pauses(first=2.0, longest=8.0)
"""Whoever holds a document is done in a moment, as a rule; on a busy machine he takes some seconds."""
_RETRIES_MAX = 1_000_000
"""No limit: to `retry`, None means the task's own, which is 3. A claim lapses, so this comes to an end."""


def delivery_handler(relay: Callable[[], Relay], namespace: str) -> Callable[[Any, Any], None]:
    """
    The function for `Bridge.on_change(..., bind=True)`.

    A document that another relay holds is tried again until it is empty or free: that relay may have crashed. An
    entry that cannot be published is left to the sweep, so that it does not hold up the partition.
    """

    def deliver(task: Any, change: Any) -> None:
        """Dispatch what is pending in the changed document."""
        document_id = change.document_key["_id"]
        delivery = relay().deliver(document_id)
        if not delivery.dispatched and relay().is_held(document_id):
            raise task.retry(countdown=_BUSY.nth(task.request.retries), max_retries=_RETRIES_MAX)

    deliver.__name__ = deliver.__qualname__ = "deliver_" + re.sub(r"\W", "_", namespace)
    deliver.__module__ = "mongo_celery.outbox"
    return deliver


def handler_name(namespace: str) -> str:
    """The subscription's name."""
    return ("outbox-" + re.sub(r"[^A-Za-z0-9_-]", "-", namespace))[:64]
