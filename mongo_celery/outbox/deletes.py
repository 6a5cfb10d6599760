"""Deletes that deliver first: with a document what is pending in it would be gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.read_concern import ReadConcern
from pymongo.results import DeleteResult

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.outbox.delivery import Delivery
from mongo_celery.outbox.pending import PendingField

_ROUNDS = 3
_BATCH = 1000
"""Documents whose `_id`s are held at once while what is pending in them is delivered."""

_FINDING = ("collation", "hint", "let")
Document = dict[str, Any]


class Deletes:
    """
    Deletes in one collection.

    Args:
        collection: the user's, with majority writes.
        deliver: by the field of each outbox on the collection, what delivers a document's entries.
    """

    def __init__(self, collection: Collection[Any], deliver: Mapping[PendingField, Callable[[Any], Delivery]]) -> None:
        self._collection = collection
        self._latest = collection.with_options(read_concern=ReadConcern("local"))
        self._deliveries = deliver

    def one(self, filter: Mapping[str, Any], session: ClientSession | None, **options: Any) -> DeleteResult:  # noqa: A002
        """See `Outbox.delete_one`."""
        result: DeleteResult = self._one(
            filter,
            None,
            session,
            lambda where: self._collection.delete_one(where, session=session, **options),
            lambda result: bool(result.deleted_count),
            options,
        )
        return result

    def found(
        self,
        filter: Mapping[str, Any],  # noqa: A002
        sort: Any,
        session: ClientSession | None,
        **options: Any,
    ) -> Any:
        """See `Outbox.find_one_and_delete`."""

        def delete(where: Mapping[str, Any]) -> Any:
            return self._collection.find_one_and_delete(where, sort=sort, session=session, **options)

        return self._one(filter, sort, session, delete, lambda document: document is not None, options)

    def many(self, filter: Mapping[str, Any], session: ClientSession | None, **options: Any) -> DeleteResult:  # noqa: A002
        """See `Outbox.delete_many`."""
        deleted = 0
        for _ in range(_ROUNDS):
            self.deliver_all(filter, session, deleted=deleted, **options)
            where = self._guarded(filter)
            deleted += self._collection.delete_many(where, session=session, **options).deleted_count
            if self._waiting(filter, 1, session, options) == []:
                return DeleteResult({"n": deleted, "ok": 1.0}, acknowledged=True)
        raise self._kept_filling(deleted)

    def deliver_all(
        self,
        filter: Mapping[str, Any],  # noqa: A002
        session: ClientSession | None,
        *,
        deleted: int = 0,
        **options: Any,
    ) -> None:
        """
        Deliver what is pending in all documents of a filter.

        Raises:
            OutboxRefusedError: something is left.
        """
        seen: set[Any] | None = None
        rounds, bound = 0, _ROUNDS
        while waiting := self._waiting(filter, _BATCH, session, options):
            reason = _IN_TRANSACTION if _is_inside(session) else ""
            for document_id in [] if reason else waiting:
                reason = self._deliver(document_id) or reason
            rounds += 1
            if rounds == 1 and len(waiting) == _BATCH:
                bound += sum(1 for _ in self._found(filter, 0, session, options)) // _BATCH
            elif rounds > bound:
                raise self._kept_filling(deleted)
            now = {repr(each) for each in waiting}
            if reason or now == seen:
                raise OutboxRefusedError(
                    f"documents of {self._collection.full_name}, {waiting[0]!r} among them, have pending entries that "
                    f"could not be delivered ({reason or _HELD}); {deleted or 'none'} of the filter's documents were "
                    "deleted. Try again when they are.",
                    document=waiting[0],
                    retryable=True,
                )
            seen = now

    def _one(
        self,
        filter: Mapping[str, Any],  # noqa: A002
        sort: Any,
        session: ClientSession | None,
        delete: Callable[[Mapping[str, Any]], Any],
        is_done: Callable[[Any], bool],
        options: Mapping[str, Any],
    ) -> Any:
        reason, document_id = "", None
        for _ in range(_ROUNDS):
            # With an order, the condition would lead to another document than the first.
            first = None if sort is None else self._first(filter, sort, session, options)
            if sort is not None and first is None:
                return None
            result = delete(self._guarded(filter if first is None else {**filter, "_id": {"$eq": first["_id"]}}))
            if is_done(result):
                return result
            found = first or self._first(filter, None, session, options)
            if found is None:
                return result
            document_id = found["_id"]
            if _is_inside(session):
                reason = _IN_TRANSACTION
                break
            reason = self._deliver(document_id) or ""
        raise OutboxRefusedError(
            f"document {document_id!r} has pending entries that could not be delivered ({reason or _HELD}); it was not "
            "deleted. Try again when they are.",
            document=document_id,
            retryable=True,
        )

    def _first(
        self,
        filter: Mapping[str, Any],  # noqa: A002
        sort: Any,
        session: ClientSession | None,
        options: Mapping[str, Any],
    ) -> Any:
        return self._latest.find_one(filter, {"_id": 1}, sort=sort, session=session, **_alike(options))

    def _waiting(
        self,
        filter: Mapping[str, Any],  # noqa: A002
        limit: int,
        session: ClientSession | None,
        options: Mapping[str, Any],
    ) -> list[Any]:
        """The `_id`s of documents of a filter with something pending."""
        return [document["_id"] for document in self._found(filter, limit, session, options)]

    def _found(
        self,
        filter: Mapping[str, Any],  # noqa: A002
        limit: int,
        session: ClientSession | None,
        options: Mapping[str, Any],
    ) -> Any:
        waiting = [{field.count: {"$gt": 0}} for field in self._deliveries]
        where = {**filter, "$and": [*filter.get("$and", ()), {"$or": waiting}]}
        return self._latest.find(where, {"_id": 1}, limit=limit, session=session, **_alike(options))

    def _kept_filling(self, deleted: int) -> OutboxRefusedError:
        return OutboxRefusedError(
            f"documents of {self._collection.full_name} get new entries faster than they are delivered; {deleted} were "
            "deleted. Repeat the delete when nobody writes to them.",
            retryable=True,
        )

    def _guarded(self, filter: Mapping[str, Any]) -> Document:  # noqa: A002
        empty = [{field.count: {"$not": {"$gt": 0}}} for field in self._deliveries]
        return {**filter, "$and": [*filter.get("$and", ()), *empty]}

    def _deliver(self, document_id: Any) -> str | None:
        """Deliver what is pending in a document; return why something is left."""
        errors = [deliver(document_id).error for deliver in self._deliveries.values()]
        return next(filter(None, errors), None)


_HELD = "another relay holds them, or they wait to be tried again after a failure"
_IN_TRANSACTION = "nothing is delivered inside a transaction"


def _is_inside(session: ClientSession | None) -> bool:
    return session is not None and session.in_transaction


def _alike(options: Mapping[str, Any]) -> Document:
    return {name: options[name] for name in _FINDING if name in options}
