"""
An outbox for what has no document of its own: tasks and events that go with a transaction.

::

    {_id: key as text, or an ObjectId, pendingEvents: {count, events: [entry ...], claim}}

A transaction without a key inserts a document. One with a key appends to the key's document, or creates it. So two
transactions of one key conflict, and one of them is repeated: the order of the entries is that of the commits. The
relay delivers these documents as it delivers any other, and deletes one that is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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

from mongo_celery.errors import OutboxRefusedError, TransactionRequiredError
from mongo_celery.mongo.opening import Source
from mongo_celery.mongo.transaction.scopes import scope_of
from mongo_celery.outbox.capture import capture_sends, install
from mongo_celery.outbox.entries import Entry, Home, asks_for_id, list_given
from mongo_celery.outbox.events import Event
from mongo_celery.outbox.options import SharedOptions
from mongo_celery.outbox.pending import explain_refusals
from mongo_celery.outbox.registry import AnyOutbox
from mongo_celery.outbox.stored_id import mentions_stored_id

_KEY_BYTES_MAX = 1024
_WRITE_SECONDS = 5.0
"""For so long a block that has met an error tries to write what was sent in it."""

Contents = dict[str | None, list[Entry]]
"""What one transaction is to send, by key, in the order in which it was added."""


class TransactionBuffer:
    """
    Takes what is to follow a transaction: of `OutboxCollection.collect`.

    Whatever the app sends in the body is put in automatically. `add` is for events, and for another key. With the end
    of the block the buffer is closed: what is sent into it later is refused.

    Args:
        contents: of the transaction.
        make: makes entries of tasks and events, for a key.
        key: under which is added what is given none.
    """

    gives_results = True

    def __init__(self, contents: Contents, make: Callable[..., list[Entry]], key: str | None) -> None:
        self._contents = contents
        self._make = make
        self._key = key
        self._is_closed = False

    def add(self, tasks: Sequence[object] = (), events: Sequence[Event] = (), *, key: object = None) -> None:
        """
        Add tasks and events to what is sent if the transaction is committed.

        Args:
            tasks: signatures, chains, groups.
            events: events.
            key: of what their order is that of the commits; by default the block's.

        Raises:
            OutboxRefusedError: something cannot be stored, or the block has ended; nothing was added.
        """
        self._refuse_if_closed()
        chosen = self._key if key is None else key_text(key)
        self._contents.setdefault(chosen, []).extend(self._make(tasks, events, chosen))

    def take(self, signature: Signature) -> None:
        """Add one task that the body sends."""
        self._refuse_if_closed(signature.task)
        self.add([signature])

    def close(self) -> None:
        """Take nothing more."""
        self._is_closed = True

    def _refuse_if_closed(self, name: Any = "this") -> None:
        if self._is_closed:
            raise OutboxRefusedError(
                f"{name} is sent by something that was started in a transaction's body and has outlived it, so it can "
                "no longer go with the commit; wait for it inside the body, or start it in a context of its own.",
            )


class OutboxCollection(AnyOutbox):
    """
    Saves tasks and events with a transaction, in a collection of their own: both, or neither.

    For tasks that belong to no document or to several, to deletes, or to documents whose shape is not yours to change.
    The price is a transaction, and one document more for each. What was stored is dispatched after the commit, by a
    thread of the same process, and by the sweep.

    ::

        outbox = OutboxCollection(app, lambda: client.shop.outbox)

        @app.task
        @transactional(lambda: client, outbox=outbox)
        def book(seat, *, session):
            client.shop.seats.delete_one({"_id": seat}, session=session)
            send_ticket.delay(seat)         # stored with the delete; sent after the commit, or never

    Entries of one key go out in the order of the commits. Transactions of one key that meet each other conflict, and
    one of them is repeated. Without a key there is an order within each transaction only.

    Not promised: that an entry is dispatched only once (see `once`); an order between keys.

    Args:
        app: the Celery app.
        collection: a PyMongo collection for the outbox alone, or a callable that returns one; it is asked once in each
            process, since prefork workers make their clients after the fork.
        options: see `SharedOptions`.

    Raises:
        ConfigurationError: an option is unknown or cannot work, or the app has an outbox of this name.
    """

    def __init__(self, app: Celery, collection: Source, **options: Unpack[SharedOptions]) -> None:
        super().__init__(app, collection, options, is_own=True)
        self._contents: WeakKeyDictionary[ClientSession, Contents] = WeakKeyDictionary()
        install(app)

    def add(
        self,
        tasks: Sequence[object] = (),
        events: Sequence[Event] = (),
        *,
        session: ClientSession | None = None,
        key: object = None,
    ) -> None:
        """
        Store tasks and events, to be dispatched if the transaction is committed.

        Args:
            tasks: signatures, chains, groups.
            events: events.
            session: of the transaction. Without one they are stored immediately, by a write of their own: sent for
                certain, and tied to nothing else.
            key: whose entries keep the order of the commits, such as the id of an order; text, a whole number, ObjectId
                or UUID.

        Raises:
            OutboxRefusedError: nothing was written; the message says why.
        """
        chosen = key_text(key)
        entries = self._entries(tasks, events, chosen)
        gathered = self._contents.get(session) if session is not None else None
        if gathered is not None:
            gathered.setdefault(chosen, []).extend(entries)
            return
        self.backing.indexes.ensure(patiently=False)  # one that is created later waits for this transaction
        self._write({chosen: entries}, session)

    @contextmanager
    def collect(self, session: ClientSession, *, key: object = None) -> Iterator[TransactionBuffer]:
        """
        Gather what is sent inside, and store it when the block ends, just before the commit.

        Inside, whatever this app sends (`delay`, `apply_async`, `send_task`, chains, groups) is put into the buffer,
        and its result object is returned as ever. Sent immediately, as without a block: what a thread sends that the
        body starts, and a `retry` or `replace` of the task that is running. A chord is refused: a task starts it. With
        `task_always_eager` tasks run in the body.

        What was sent has the fate of the transaction's writes, also where the block ends by an error: aborted, nothing
        of it is sent; where whoever began the transaction catches the error and commits, it was stored with the rest.

        Blocks may be nested, on one session with another key each; the outermost stores all of them.
        `transactional(client, outbox=...)` has such a block around its body.

        Args:
            session: of a transaction in progress.
            key: as of `add`, of what is sent inside.

        Raises:
            TransactionRequiredError: there is no transaction in progress.
            OutboxRefusedError: what was sent cannot be stored; nothing of the transaction may be committed.
        """
        chosen = key_text(key)
        if not session.in_transaction:
            raise TransactionRequiredError(
                "collect stores what is sent inside with a transaction; pass the session of one in progress, such as "
                "the one that transactional hands to the function."
            )
        self.backing.indexes.ensure(patiently=False)
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
            if outer is None and session.in_transaction:  # whoever began it may catch this, and commit
                self._write_after_error(contents, session)
            raise
        if outer is None and any(contents.values()):
            if not session.in_transaction:
                raise OutboxRefusedError(
                    "the transaction was ended inside the block that gathers what goes with it; nothing of that was "
                    "stored or sent. Let the block end first."
                )
            self._write(contents, session)

    @contextmanager
    def atomic(self, using: str | None = None, *, key: object = None) -> Iterator[TransactionBuffer]:
        """
        Django's transaction (django-mongodb-backend), with `collect` around its body.

        Args:
            using: alias of the database; by default Django's default, or where that is relational the one that is
                MongoDB's. What is written to others is no part of the transaction.
            key: as of `add`, of what is sent inside.

        Raises:
            OutboxRefusedError: as of `collect`; the transaction was rolled back, unless this is inside another
                `atomic`, which the error has to pass through, too.
        """
        from mongo_celery.outbox.django import transaction

        with transaction(using) as session, self.collect(session, key=key) as buffer:
            yield buffer

    # -- inside ------------------------------------------------------------------------------------

    def _entries(self, tasks: Sequence[object], events: Sequence[Event], key: str | None) -> list[Entry]:
        tasks, events = list_given(tasks), list_given(events)
        _refuse_ids(asks_for_id(each) for each in (*tasks, *events))
        found = self._maker.entries(tasks, (), Home())
        more = self._maker.entries((), events, Home() if key is None else Home(key))
        _refuse_ids(bool(entry.bind) for entry in found)
        _refuse_ids(mentions_stored_id(event.body) for event in events)
        return [*found, *more]

    def _write(self, contents: Contents, session: ClientSession | None) -> None:
        field = self.backing.field
        stored: list[Any] = []
        with explain_refusals(self.collection.full_name, field.name):
            for key, entries in contents.items():
                if entries:
                    where = {"_id": ObjectId() if key is None else key}
                    change = field.with_entries({}, entries)
                    self.collection.update_one(where, change, upsert=True, session=session)
                    stored.append(where["_id"])
        self.backing.dispatch(stored, session)

    def _write_after_error(self, contents: Contents, session: ClientSession) -> None:
        """Write what goes with a transaction that may be committed yet; one that the server has ended cannot be."""
        scope = scope_of(session)
        if scope is not None and scope.is_inherited:  # whoever began it writes that, too
            return
        try:
            with suppress(OperationFailure), pymongo.timeout(_WRITE_SECONDS):  # any of these ends it there
                self._write(contents, session)
        except PyMongoError as error:
            if scope is None:
                raise
            scope.mark_rollback_only(error)  # it is not committed without this, and ends by the block's own error


def key_text(key: object) -> str | None:
    """
    A key as it is stored; None stays None.

    Raises:
        OutboxRefusedError: it is none.
    """
    if key is None:
        return None
    if isinstance(key, bool) or not isinstance(key, (str, int, ObjectId, UUID)):
        raise OutboxRefusedError(
            f"key={key!r} must be text, a whole number, an ObjectId or a UUID: the id of what tasks are about."
        )
    text = str(key)
    try:
        size = len(text.encode())
    except UnicodeEncodeError:  # half of a surrogate pair
        size = 0
    if not 0 < size <= _KEY_BYTES_MAX:
        raise OutboxRefusedError(f"a key must be text of 1 to {_KEY_BYTES_MAX} bytes.")
    return text


def _refuse_ids(asked: Iterable[bool]) -> None:
    if any(asked):
        raise OutboxRefusedError(
            "STORED_ID and callables stand for the _id of the document that a task is stored in, and here it is stored "
            "with a transaction; pass the id itself."
        )
