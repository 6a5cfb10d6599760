"""
An outbox without its own documents: tasks and events belong to a transaction.

::

    {_id: key as text, or an ObjectId, pendingEvents: {count, events: [entry ...], claim}}

A transaction without a key inserts a document. One with a key appends to the key's document, or creates it. So two
transactions of one key conflict, one of them repeats, and the entries are in the order of the commits. The relay
delivers these documents like any others, and deletes empty ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Unpack
from uuid import UUID
from weakref import WeakKeyDictionary

import pymongo
from bson import ObjectId
from celery import Celery
from celery.canvas import Signature
from pymongo.client_session import ClientSession
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery.arguments import check_flags
from mongo_celery.errors import OutboxRefusedError, TransactionRequiredError
from mongo_celery.mongo.opening import Source
from mongo_celery.mongo.transaction.scopes import scope_of
from mongo_celery.outbox.canvas import has_stored_id, parse_signature
from mongo_celery.outbox.capture import capture_sends, install
from mongo_celery.outbox.entries import Entry, list_given
from mongo_celery.outbox.events import Event
from mongo_celery.outbox.open_transaction import store_in_every_transaction
from mongo_celery.outbox.options import SharedOptions
from mongo_celery.outbox.pending import append_entries, explain_refusals
from mongo_celery.outbox.registry import BaseOutbox
from mongo_celery.outbox.stored_id import mentions_stored_id

_KEY_BYTES_MAX = 1024
_WRITE_SECONDS = 5.0
"""Seconds for which a failed block tries to write its messages."""

Contents = dict[str | None, list[Entry]]
"""One transaction's entries by key, in the order of adding."""


class TransactionBuffer:
    """
    Collects the messages of a transaction, for `OutboxCollection.collect`.

    It takes everything that the app sends in the body. `add` is for events, and for other keys. The end of the block
    closes the buffer, which then refuses messages.

    Args:
        contents: the contents of the transaction.
        make: makes entries of tasks and events, for a key.
        key: the default key.
    """

    gives_results = True

    def __init__(self, contents: Contents, make: Callable[..., list[Entry]], key: str | None) -> None:
        self._contents = contents
        self._make = make
        self._key = key
        self._is_closed = False
        self.ids: set[Any] = set()

    def add(self, tasks: Sequence[object] = (), events: Sequence[Event] = (), *, key: object = None) -> None:
        """
        Add tasks and events that are sent if the transaction commits.

        Args:
            tasks: signatures, chains, groups.
            events: events.
            key: entries of one key are sent in the order of the commits. By default the block's key.

        Raises:
            OutboxRefusedError: an entry cannot be stored, or the block has ended. Nothing was added.
        """
        self._refuse_if_closed()
        chosen = self._key if key is None else key_text(key)
        self._contents.setdefault(chosen, []).extend(self._make(tasks, events, chosen))

    def take(self, signature: Signature) -> None:
        """Add one task from the body."""
        self._refuse_if_closed(signature.task)
        self.add([signature])

    def close(self) -> None:
        """Refuse further messages."""
        self._is_closed = True

    def _refuse_if_closed(self, name: Any = "this") -> None:
        if self._is_closed:
            raise OutboxRefusedError(
                f"{name} is sent after the end of its transaction, so it cannot be stored with it. The sender "
                "was started in the transaction's body. Wait for it inside the body, or start it in a new "
                "context.",
            )


class OutboxCollection(BaseOutbox):
    """
    Saves tasks and events with a transaction, in its own collection: both, or neither.

    Use it for tasks of deletes, of several documents or of none, and of documents that you cannot change. It costs a
    transaction, and one more document per transaction. After the commit, a thread of this process dispatches the
    entries, or later the sweep.

    ::

        outbox = OutboxCollection(app, lambda: client.shop.outbox)

        @app.task
        @transactional(lambda: client, outbox=outbox)
        def book(seat, *, session):
            client.shop.seats.delete_one({"_id": seat}, session=session)
            send_ticket.delay(seat)         # stored with the delete; sent after the commit, or never

    Entries of one key are sent in the order of the commits. Concurrent transactions of one key conflict, and
    one of them is repeated. Without a key, only the entries of each transaction keep their order.

    An entry may be dispatched more than once (see `once`). There is no order between keys.

    Args:
        app: the Celery app.
        collection: a PyMongo collection for this outbox only, or a callable that returns one. The callable runs once in
            each process, because prefork workers make their clients after the fork.
        every_transaction: True to store what the app sends in any open transaction of this cluster: of `transactional`,
            also in asyncio, of a handler, and of Django's `atomic`. In a transaction of a cluster without such an
            outbox, sending is refused. With several in a cluster, the first one stores.
        options: see `SharedOptions`.

    Raises:
        ConfigurationError: an option is unknown or cannot work, or the app has an outbox of this name.
    """

    def __init__(
        self, app: Celery, collection: Source, *, every_transaction: bool = False, **options: Unpack[SharedOptions]
    ) -> None:
        check_flags(every_transaction=every_transaction)
        super().__init__(app, collection, options, is_own=True)
        self._contents: WeakKeyDictionary[ClientSession, Contents] = WeakKeyDictionary()
        install(app)
        if every_transaction:
            store_in_every_transaction(app, self.runtime, self._entries)

    def add(
        self,
        tasks: Sequence[object] = (),
        events: Sequence[Event] = (),
        *,
        session: ClientSession | None = None,
        key: object = None,
    ) -> None:
        """
        Store tasks and events, which are dispatched if the transaction commits.

        Args:
            tasks: signatures, chains, groups.
            events: events.
            session: the transaction's session. Without one, a separate write stores them immediately, and they are
                always sent.
            key: entries of one key are sent in the order of the commits. For example an order's id: text, a whole
                number, ObjectId or UUID.

        Raises:
            OutboxRefusedError: nothing was written. The message names the reason.
        """
        chosen = key_text(key)
        entries = self._entries(tasks, events, chosen)
        gathered = self._contents.get(session) if session is not None else None
        if gathered is not None:
            gathered.setdefault(chosen, []).extend(entries)
            return
        self.runtime.pending.indexes.ensure(patiently=False)  # an index created later would wait for this transaction
        self._write({chosen: entries}, session)

    def prepare(self) -> None:
        """
        Read the signing key and create the index now. An index that is created later conflicts with open transactions.

        Raises:
            DeploymentError, PyMongoError: the key could not be read.
        """
        super().prepare()
        self.runtime.pending.indexes.ensure(patiently=True)

    @contextmanager
    def collect(self, session: ClientSession, *, key: object = None) -> Iterator[TransactionBuffer]:
        """
        Collect the tasks sent in the block, and store them when it ends, just before the commit.

        Tasks that this app sends in the block (`delay`, `apply_async`, `send_task`, chains, groups) go into the buffer.
        Their result objects are returned as usual. Two kinds are still sent immediately: tasks from a thread that the
        body starts, and a `retry` or `replace` of the running task. A chord is refused: start it in a task. With
        `task_always_eager` tasks run in the body.

        The tasks are sent only if the transaction commits. This also applies if the block raises, and the code around
        it catches the error and commits.

        Blocks may be nested on one session, each with another key. The outermost block stores all tasks.
        `transactional(client, outbox=...)` has such a block around its body.

        Args:
            session: the session of a transaction in progress.
            key: as for `add`, for all tasks of the block.

        Raises:
            TransactionRequiredError: there is no transaction in progress.
            OutboxRefusedError: the tasks cannot be stored. Do not commit the transaction.
        """
        chosen = key_text(key)
        if not session.in_transaction:
            raise TransactionRequiredError(
                "collect stores tasks and events with a transaction, but this session has none in progress. "
                "Pass the session of one, such as the session that transactional passes to its function."
            )
        self.runtime.pending.indexes.ensure(patiently=False)
        outer = self._contents.get(session)
        contents: Contents = {} if outer is None else outer
        buffer = TransactionBuffer(contents, self._entries, chosen)
        self._contents[session] = contents
        try:
            try:
                with capture_sends(self.app, buffer):
                    yield buffer
            finally:
                buffer.close()
                if outer is None:
                    self._contents.pop(session, None)
        except BaseException:
            if outer is None and session.in_transaction:  # the owner of the transaction may catch this, and commit
                self._write_after_error(contents, session)
            raise
        if outer is None and any(contents.values()):
            if not session.in_transaction:
                raise OutboxRefusedError(
                    "The transaction ended inside the block that collects its tasks. None of them was stored or "
                    "sent. End the block before the transaction."
                )
            self._write(contents, session)

    @contextmanager
    def atomic(self, using: str | None = None, *, key: object = None) -> Iterator[TransactionBuffer]:
        """
        Open Django's transaction (django-mongodb-backend), with `collect` around its body.

        Args:
            using: alias of the database. By default Django's default or, if that is relational, the MongoDB database.
                Writes to other databases are not part of the transaction.
            key: as for `add`, for all tasks of the block.

        Raises:
            OutboxRefusedError: as for `collect`. The transaction was rolled back. Inside another `atomic`, do not catch
                the error there.
        """
        from mongo_celery.outbox.django import transaction

        with transaction(using) as session, self.collect(session, key=key) as buffer:
            yield buffer

    # -- inside ------------------------------------------------------------------------------------

    def _entries(self, tasks: Sequence[object], events: Sequence[Event], key: str | None) -> list[Entry]:
        tasks, events = list_given(tasks), list_given(events)
        if any(has_stored_id(parse_signature(self.app, task)) for task in tasks) or any(
            mentions_stored_id(getattr(event, "body", None)) for event in events
        ):
            raise OutboxRefusedError(
                "STORED_ID means the _id of the document that stores the task, but this task is stored with a "
                "transaction. Pass the id itself."
            )
        return self._make_entries(tasks, events, key)

    def _write(self, contents: Contents, session: ClientSession | None) -> None:
        stored: list[Any] = []
        with explain_refusals(self.collection.full_name):
            for key, entries in contents.items():
                if entries:
                    where = {"_id": ObjectId() if key is None else key}
                    change = append_entries({}, entries)
                    self.collection.update_one(where, change, upsert=True, session=session)
                    stored.append(where["_id"])
        self.runtime.dispatch(stored, session)

    def _write_after_error(self, contents: Contents, session: ClientSession) -> None:
        """Write the entries of a transaction that may still commit. One that the server has ended cannot."""
        scope = scope_of(session)
        try:
            with suppress(OperationFailure), pymongo.timeout(_WRITE_SECONDS):  # any of these ends it there
                self._write(contents, session)
        except PyMongoError as error:
            if scope is None:
                raise
            scope.mark_rollback_only(error)  # it cannot commit without this, and ends with the block's own error


def key_text(key: object) -> str | None:
    """
    Return a key in its stored form. None stays None.

    Raises:
        OutboxRefusedError: it is not a valid key.
    """
    if key is None:
        return None
    if isinstance(key, bool) or not isinstance(key, (str, int, ObjectId, UUID)):
        raise OutboxRefusedError(
            f"key={key!r} must be text, a whole number, an ObjectId or a UUID, such as the id of the order that "
            "the tasks handle."
        )
    text = str(key)
    try:
        size = len(text.encode())
    except UnicodeEncodeError:  # half of a surrogate pair
        size = 0
    if not 0 < size <= _KEY_BYTES_MAX:
        raise OutboxRefusedError(f"The key must be text of 1 to {_KEY_BYTES_MAX} bytes.")
    return text
