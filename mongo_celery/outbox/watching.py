"""
Delivery by a bridge that watches the collection: a handler dispatches a changed document's pending entries.

The bridge provides the position in the stream, order and repetition. The handler claims the document like every relay.
If the writer has already dispatched a change's entries, the listener skips the change, by a flag that the server
computes from the document at the time of reading. Entries that are gone by then were dispatched, and later entries
cause their own change.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from mongo_celery.mongo.repeating import Pauses
from mongo_celery.outbox.pending import COUNT
from mongo_celery.outbox.relay import Relay

OPERATIONS = ("insert", "update", "replace")

TASK_PREFIX = "mongo_celery.outbox"
"""The beginning of a delivery's task name. The user cannot set options of such a task."""

WATCHED_FIELDS = (COUNT,)
"""A claim changes other fields, so a delivery does not cause the next one."""

STILL_PENDING: dict[str, Any] = {
    "$or": [
        {"$eq": [{"$type": "$fullDocument"}, "missing"]},  # a bridge without document lookup
        {"$gt": [f"$fullDocument.{COUNT}", 0]},
    ],
}
"""True for a change whose document has pending entries when it is read."""

_BUSY = Pauses(first=2.0, longest=8.0)
"""A relay usually finishes a document in a moment, and on a busy machine in some seconds."""
_RETRIES_MAX = 1_000_000
"""No limit: for `retry`, None means the task's own limit, 3. A claim lapses, so this ends."""


def delivery_handler(relay: Callable[[], Relay], namespace: str) -> Callable[[Any, Any], None]:
    """
    Return the function for `Bridge.on_change(..., bind=True)`.

    If another relay holds a document, it is tried again until it is empty or free, because that relay may have crashed.
    An entry that cannot be published is left to the sweep, so that it does not block the partition.
    """

    def deliver(task: Any, change: Any) -> None:
        """Dispatch the pending entries of the changed document."""
        document_id = change.document_key["_id"]
        delivery = relay().deliver(document_id)
        if not delivery.dispatched and relay().is_held(document_id):
            raise task.retry(countdown=_BUSY.nth(task.request.retries), max_retries=_RETRIES_MAX)

    deliver.__name__ = deliver.__qualname__ = "deliver_" + re.sub(r"\W", "_", namespace)
    deliver.__module__ = TASK_PREFIX
    return deliver


def handler_name(namespace: str) -> str:
    """The subscription's name."""
    return ("outbox-" + re.sub(r"[^A-Za-z0-9_-]", "-", namespace))[:64]
