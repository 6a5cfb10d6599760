"""
The transaction that is open when an app sends, for an `OutboxCollection` with `every_transaction=True`.

Each message is a write to one document of the transaction, by the transaction's own client. A plain client writes
immediately. An asyncio transaction writes when its body has ended, because `delay` cannot await.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

from bson import ObjectId
from celery import Celery
from celery.canvas import Signature
from pymongo.asynchronous.client_session import AsyncClientSession

from mongo_celery.errors import OutboxRefusedError
from mongo_celery.mongo.cluster import connections_in_transaction, is_same_cluster
from mongo_celery.mongo.steps import Session
from mongo_celery.mongo.transaction.scopes import after_commit, join_transaction, scope_of, sending_session
from mongo_celery.outbox.capture import FINDERS
from mongo_celery.outbox.entries import Entry
from mongo_celery.outbox.pending import append_entries, explain_refusals
from mongo_celery.outbox.runtime import OutboxRuntime

Make = Callable[[Sequence[object], Sequence[Any], None], list[Entry]]


class OpenTransaction:
    """
    Stores messages with a transaction, in the order of the calls.

    Args:
        outboxes: the runtimes of outboxes and their makers of entries. The first one of the cluster stores.
        session: the session of the transaction.
    """

    gives_results = True

    def __init__(self, outboxes: Sequence[tuple[OutboxRuntime, Make]], session: Session) -> None:
        self.ids: set[Any] = set()
        self.scope = scope_of(session)
        self._outboxes = outboxes
        self._session = ref(session)
        self._document_id = ObjectId()

    def take(self, signature: Signature) -> None:
        """
        Store one task.

        Raises:
            OutboxRefusedError: it cannot be stored, or the transaction belongs to a cluster without an outbox.
        """
        session: Any = self._session()
        for runtime, make in self._outboxes:
            if is_same_cluster(runtime.collection.database.client, session.client):
                self._store(runtime, make([signature], (), None), session)
                return
        raise OutboxRefusedError(
            f"{signature.task} was not sent. A transaction is open here, and its cluster has no outbox with "
            "every_transaction=True, so the task could not be stored with it. Add one there, or send the task with "
            "after_commit.",
            task=signature.task,
        )

    def _store(self, runtime: OutboxRuntime, entries: list[Entry], session: Any) -> None:
        namespace = runtime.collection.full_name
        collection = session.client[runtime.collection.database.name][runtime.collection.name]
        update = append_entries({}, entries)
        write = partial(collection.update_one, {"_id": self._document_id}, update, upsert=True, session=session)

        async def write_later() -> None:
            with explain_refusals(namespace):
                await write()

        if self.scope is not None and isinstance(session, AsyncClientSession):
            self.scope.writes.append(write_later)
        else:
            with join_transaction(session), explain_refusals(namespace):
                write()
        dispatch = partial(runtime.dispatch, [self._document_id], None)
        if not after_commit(dispatch, session):
            for connection in connections_in_transaction():
                if connection.session is session:
                    connection.on_commit(dispatch, robust=True)


class OpenTransactions:
    """Finds the transaction that is open when an app sends."""

    def __init__(self) -> None:
        self.outboxes: list[tuple[OutboxRuntime, Make]] = []
        self._known: WeakKeyDictionary[Session, OpenTransaction] = WeakKeyDictionary()

    def find(self) -> OpenTransaction | None:
        """Return the transaction to which a message from here belongs."""
        session = sending_session()
        if session is None:
            return None
        found = self._known.get(session)
        if found is None or found.scope is not scope_of(session):  # the session's earlier transaction
            found = self._known[session] = OpenTransaction(self.outboxes, session)
        return found


def store_in_every_transaction(app: Celery, runtime: OutboxRuntime, make: Make) -> None:
    """Have an outbox store what the app sends in any open transaction of its cluster."""
    finder = FINDERS.setdefault(app, OpenTransactions())
    assert isinstance(finder, OpenTransactions)
    finder.outboxes.append((runtime, make))
