"""Pending outbox entries in the documents of a fenced collection: kept, or delivered before a delete."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kombu.exceptions import OperationalError
from pymongo.client_session import ClientSession
from pymongo.collection import Collection

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.writes import Body, Operators, Target

if TYPE_CHECKING:
    from mongo_celery.outbox import Outbox

KEPT_FILLING = "it gets new entries faster than they are delivered"
_IN_TRANSACTION = "nothing is delivered inside a transaction"
_HELD = "another relay holds them, or they wait to be tried again after a failure"
_BROKER = "the broker does not answer"
_HELD_SECONDS = 5.0
_PAUSES = Pauses(first=0.02, longest=0.5)
"""Another relay is done with a document in a moment, as a rule."""


class PendingTasks:
    """
    The pending entries in documents of one collection.

    Args:
        collection: the documents.
        outboxes: returns the outboxes that keep entries in them. Asked when a write could take entries away.
    """

    def __init__(self, collection: Collection[Any], outboxes: Callable[[], Sequence[Outbox]]) -> None:
        self._collection = collection
        self._find = outboxes
        self._found: Sequence[Outbox] | None = None

    @property
    def _outboxes(self) -> Sequence[Outbox]:
        if self._found is None:
            self._found = self._find()
        return self._found

    @property
    def none_pending(self) -> list[Mapping[str, Any]]:
        """Conditions of a document in which nothing is pending."""
        return [{outbox.field.count: {"$not": {"$gt": 0}}} for outbox in self._outboxes]

    def list_kept_fields(self, body: Body) -> Sequence[str]:
        """Return the fields that a write must not drop. None where it cannot."""
        return () if isinstance(body, Operators) else [outbox.field.name for outbox in self._outboxes]

    def refuse_entries(self, replacement: Body) -> None:
        """
        Refuse a new document that brings entries.

        Raises:
            OutboxRefusedError: it does. The message names what adds them instead.
        """
        for field in (outbox.field.name for outbox in self._outboxes):
            if replacement.find_name(field) is not None:
                raise OutboxRefusedError(
                    f"{field} belongs to an outbox of {self._collection.full_name}: a replacement that brings it would "
                    "drop what is pending there, so nothing was written. To replace a document and carry tasks, write "
                    "bulk_write([outbox.with_tasks(ReplaceOne(filter, document, upsert=True), tasks)]).",
                )

    def deliver(self, target: Target, session: ClientSession | None) -> bool:
        """
        Deliver what is pending in a document, and return True if there was anything.

        Raises:
            OutboxRefusedError: it cannot be delivered now, and may be later. If the broker is away, its cause says so.
        """
        there = [self._deliver(outbox, target.where(), session) for outbox in self._outboxes]
        return any(there)

    def _deliver(self, outbox: Outbox, where: Mapping[str, Any], session: ClientSession | None) -> bool:
        deadline, attempts = time.monotonic() + _HELD_SECONDS, 0
        while (document_id := self._waiting(outbox, where, session)) is not None:
            if session is not None and session.in_transaction:
                raise self.make_refusal(document_id[0], _IN_TRANSACTION)
            delivery = outbox.backing.deliver_now(document_id[0])
            if delivery.broker_down:
                raise self.make_refusal(document_id[0], _BROKER) from OperationalError(_BROKER)
            if delivery.error is not None or time.monotonic() > deadline:
                raise self.make_refusal(document_id[0], delivery.error or _HELD)
            if not delivery.dispatched:
                time.sleep(_PAUSES.nth(attempts))
            attempts += 1
        return attempts > 0

    def refuse_any(self, where: Mapping[str, Any], session: ClientSession) -> None:
        """
        Refuse to delete documents while something is pending in one of them.

        Raises:
            OutboxRefusedError: it is.
        """
        for outbox in self._outboxes:
            found = self._waiting(outbox, where, session)
            if found is not None:
                raise self.make_refusal(found[0], _IN_TRANSACTION)

    def make_refusal(self, document_id: Any, reason: str) -> OutboxRefusedError:
        """Return the error of a delete that would take pending entries away."""
        return OutboxRefusedError(
            f"document {document_id!r} of {self._collection.full_name} has pending entries that could not be delivered "
            f"({reason}); it was not deleted. Try again when they are.",
            document=document_id,
            retryable=True,
        )

    def _waiting(self, outbox: Outbox, where: Mapping[str, Any], session: ClientSession | None) -> tuple[Any] | None:
        """The `_id` of a document in which something is pending. In a tuple, since it may be null."""
        pending = {**where, "$and": [*where.get("$and", ()), {outbox.field.count: {"$gt": 0}}]}
        found = self._collection.find_one(pending, {"_id": 1}, session=session)
        return None if found is None else (found["_id"],)
