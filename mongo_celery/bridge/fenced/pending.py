"""Pending outbox entries in the documents of a fenced collection. They are kept, or delivered before a delete."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kombu.exceptions import OperationalError
from pymongo.asynchronous.collection import AsyncCollection

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.repeating import Pauses
from mongo_celery.mongo.steps import AnyCollection, Session, Steps
from mongo_celery.mongo.writes import Body, Operators, Target
from mongo_celery.outbox.pending import COUNT, FIELD

if TYPE_CHECKING:
    from mongo_celery.outbox import Outbox

KEPT_FILLING = "it gets new entries faster than they are delivered"
_IN_TRANSACTION = "entries are not delivered inside a transaction"
_HELD = "another process is delivering them, or they wait for a retry after a failure"
_BROKER = "the broker does not answer"
_HELD_SECONDS = 5.0
_PAUSES = Pauses(first=0.02, longest=0.5)
"""Pauses between attempts. Another relay usually finishes with a document in a moment."""


class PendingTasks:
    """
    The pending entries in documents of one collection.

    Args:
        collection: the documents.
        outboxes: returns the outboxes that keep entries in them. Called when a write could remove entries.
    """

    def __init__(self, collection: AnyCollection, outboxes: Callable[[], Sequence[Outbox]]) -> None:
        self._collection: Any = collection
        self._find = outboxes
        self._found: Sequence[Outbox] | None = None

    @property
    def _outboxes(self) -> Sequence[Outbox]:
        if self._found is None:
            self._found = self._find()
        return self._found

    @property
    def none_pending(self) -> list[Mapping[str, Any]]:
        """Return the conditions of a document without pending entries."""
        return [{COUNT: {"$not": {"$gt": 0}}} for _ in self._outboxes]

    def list_kept_fields(self, body: Body) -> Sequence[str]:
        """Return the fields that a write must keep. Empty for operators, which never drop fields."""
        return () if isinstance(body, Operators) else [FIELD for _ in self._outboxes]

    def refuse_entries(self, replacement: Body) -> None:
        """
        Refuse a new document that contains entries.

        Raises:
            OutboxRefusedError: it contains entries. The message names the way to add them.
        """
        if self._outboxes and replacement.find_name(FIELD) is not None:
            raise OutboxRefusedError(
                f"The field {FIELD} is reserved for an outbox of {self._collection.full_name}. A replacement with this "
                "field would drop pending entries, so nothing was written. To replace a document and send tasks, use "
                "bulk_write([outbox.with_tasks(ReplaceOne(filter, document, upsert=True), tasks)]).",
            )

    def deliver(self, target: Target, session: Session | None) -> Steps[bool]:
        """
        Deliver the pending entries of a document, and return True if there were any.

        Raises:
            OutboxRefusedError: they cannot be delivered now, for example because the broker is down.
        """
        is_there = False
        for outbox in self._outboxes:
            is_there |= yield from self._deliver(outbox, target.where(), session)
        return is_there

    def _deliver(self, outbox: Outbox, where: Mapping[str, Any], session: Session | None) -> Steps[bool]:
        deadline, attempts = time.monotonic() + _HELD_SECONDS, 0
        while (document_id := (yield from self._waiting(where, session))) is not None:
            if session is not None and session.in_transaction:
                raise self.make_refusal(document_id[0], _IN_TRANSACTION)
            delivery = yield self._call(partial(outbox.runtime.deliver_now, document_id[0]))
            if delivery.broker_down:
                raise self.make_refusal(document_id[0], _BROKER) from OperationalError(_BROKER)
            if delivery.error is not None or time.monotonic() > deadline:
                raise self.make_refusal(document_id[0], delivery.error or _HELD)
            if not delivery.dispatched:
                yield self._call(partial(time.sleep, _PAUSES.nth(attempts)))
            attempts += 1
        return attempts > 0

    def refuse_any(self, where: Mapping[str, Any], session: Session) -> Steps[None]:
        """
        Refuse to delete documents if one of them has pending entries.

        Raises:
            OutboxRefusedError: one of them has pending entries.
        """
        found = (yield from self._waiting(where, session)) if self._outboxes else None
        if found is not None:
            raise self.make_refusal(found[0], _IN_TRANSACTION)

    def _call(self, blocking: Callable[[], Any]) -> Any:
        """Call a function that waits. For asyncio, return an awaitable of a thread that calls it."""
        return asyncio.to_thread(blocking) if isinstance(self._collection, AsyncCollection) else blocking()

    def make_refusal(self, document_id: Any, reason: str) -> OutboxRefusedError:
        """Return the error of a delete that would remove pending entries."""
        return OutboxRefusedError(
            f"document {document_id!r} of {self._collection.full_name} was not deleted, because its outbox entries "
            f"could not be delivered first: {reason}. Try again later.",
            document=document_id,
            retryable=True,
        )

    def _waiting(self, where: Mapping[str, Any], session: Session | None) -> Steps[tuple[Any] | None]:
        """Return the `_id` of a document with pending entries, in a tuple because an `_id` may be null."""
        pending = {**where, "$and": [*where.get("$and", ()), {COUNT: {"$gt": 0}}]}
        found = yield self._collection.find_one(pending, {"_id": 1}, session=session)
        return None if found is None else (found["_id"],)
