"""An outbox for what has no document of its own: tasks and events that go with a transaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Unpack
from weakref import WeakKeyDictionary

import pymongo
from celery import Celery
from pymongo.client_session import ClientSession
from pymongo.errors import OperationFailure, PyMongoError

from mongo_celery.errors import OutboxRefusedError, TransactionRequiredError
from mongo_celery.locking import after_commit
from mongo_celery.mongo.opening import Source
from mongo_celery.mongo.transaction.scopes import scope_of
from mongo_celery.outbox.box import Box, Contents
from mongo_celery.outbox.capture import captured, install
from mongo_celery.outbox.entries import Entry, Home, asks_for_id, listed
from mongo_celery.outbox.events import Event
from mongo_celery.outbox.options import SharedOptions, options_of
from mongo_celery.outbox.parcel_backing import ParcelBacking
from mongo_celery.outbox.parcels import key_text
from mongo_celery.outbox.registry import AnyOutbox
from mongo_celery.outbox.stored_id import mentions_stored_id

_NOWHERE = Home()
"""Of what is stored in no document of the user's."""

_WRITE_SECONDS = 5.0
"""For so long a block that has met an error tries to write what was sent in it."""


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

    Entries of one key go out in the order of the commits, for transactions that follow each other or that write a
    document in common; two others may go out in either order. Without a key there is an order within each transaction
    only.

    Not promised: that an entry is dispatched only once (see `once`); an order between keys. It needs MongoDB 5.0 (an
    older one is refused when something is to be stored), and the right to read and write its collection and the one
    beside it (`<name>_keys`, for `serialize`).

    Args:
        app: the Celery app.
        collection: a PyMongo collection for the outbox alone, or a callable that returns one; it is asked once in each
            process, since prefork workers make their clients after the fork.
        options: see `SharedOptions`.

    Raises:
        ConfigurationError: an option is unknown or cannot work, or the app has an outbox of this name.
    """

    backing: ParcelBacking

    def __init__(self, app: Celery, collection: Source, **options: Unpack[SharedOptions]) -> None:
        super().__init__(app, collection, options_of(options), ParcelBacking)
        self._contents: WeakKeyDictionary[ClientSession, Contents] = WeakKeyDictionary()
        install(app)

    # -- writes ------------------------------------------------------------------------------------

    def add(
        self,
        tasks: Sequence[object] = (),
        events: Sequence[Event] = (),
        *,
        session: ClientSession | None = None,
        key: object = None,
        serialize: bool = False,
    ) -> None:
        """
        Store tasks and events, to be dispatched if the transaction is committed.

        Args:
            tasks: signatures, chains, groups, chords.
            events: events.
            session: of the transaction. Without one they are stored at once, by a write of their own: sent for certain,
                and tied to nothing else.
            key: whose entries keep their order, such as the id of an order; text, a whole number, ObjectId or UUID.
            serialize: have transactions of this key follow each other: one that meets another fails as after a
                write conflict, and is repeated. Then the order of the key is that of the commits without exception.

        Raises:
            OutboxRefusedError: nothing was written; the message says why.
        """
        chosen = key_text(key)
        self.backing.prepare()
        if serialize and (chosen is None or session is None or not session.in_transaction):
            raise OutboxRefusedError("serialize=True orders the transactions of a key; give key= and session=.")
        entries = self._entries(tasks, events, chosen)
        gathered = self._contents.get(session) if session is not None else None
        if gathered is not None:
            gathered.add(chosen, entries, serialize=serialize)
            return
        contents = Contents()
        contents.add(chosen, entries, serialize=serialize)
        self._write(contents, session)

    @contextmanager
    def collect(self, session: ClientSession, *, key: object = None, serialize: bool = False) -> Iterator[Box]:
        """
        Gather what is sent inside, and store it when the block ends, just before the commit.

        Inside, whatever this app sends (`delay`, `apply_async`, `send_task`, chains, groups) is put into the box, and
        its result object is returned as ever. Sent at once, as without a block: what a thread sends that the body
        starts, and a `retry` or `replace` of the task that is running. A chord is put into the box as a whole, with
        `box.add([chord(...)])`. With `task_always_eager` tasks run in the body.

        What was sent has the fate of the transaction's writes, also where the block ends by an error: aborted, nothing
        of it is sent; where whoever began the transaction catches the error and commits, it was stored with the rest.

        Blocks may be nested, on one session with another key each; the outermost stores all of them.
        `transactional(client, outbox=...)` has such a block around its body.

        Args:
            session: of a transaction in progress.
            key: as of `add`, of what is sent inside.
            serialize: as of `add`.

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
        if serialize and chosen is None:
            raise OutboxRefusedError("serialize=True orders the transactions of a key; give key=.")
        self.backing.prepare()
        outer = self._contents.get(session)
        contents = outer or Contents()
        box = Box(contents, self._entries, chosen, serialize=serialize)
        self._contents[session] = contents
        try:
            try:
                with captured(self.app, box):
                    yield box
            finally:
                box.close()
                if outer is None:
                    self._contents.pop(session, None)
        except BaseException:
            if outer is None and session.in_transaction:  # whoever began it may catch this, and commit
                self._write_after_error(contents, session)
            raise
        if outer is None and contents.entries:
            if not session.in_transaction:
                raise OutboxRefusedError(
                    "the transaction was ended inside the block that gathers what goes with it; nothing of that was "
                    "stored or sent. Let the block end first."
                )
            self._write(contents, session)

    @contextmanager
    def atomic(self, using: str | None = None, *, key: object = None, serialize: bool = False) -> Iterator[Box]:
        """
        Django's transaction (django-mongodb-backend), with `collect` around its body.

        Args:
            using: alias of the database; by default Django's default, or where that is relational the one that is
                MongoDB's. What is written to others is no part of the transaction.
            key: as of `add`, of what is sent inside.
            serialize: as of `add`.

        Raises:
            OutboxRefusedError: as of `collect`; the transaction was rolled back, unless this is inside another
                `atomic`, which the error has to pass through, too.
        """
        from mongo_celery.outbox.django import transaction

        with transaction(using) as session, self.collect(session, key=key, serialize=serialize) as box:
            yield box

    # -- inside ------------------------------------------------------------------------------------

    def _entries(self, tasks: Sequence[object], events: Sequence[Event], key: str | None) -> list[Entry]:
        tasks, events = listed(tasks), listed(events)
        _refuse_ids(asks_for_id(each) for each in (*tasks, *events))
        found = self._maker.entries(tasks, (), _NOWHERE)
        more = self._maker.entries((), events, _NOWHERE if key is None else Home(key))
        _refuse_ids(bool(entry.bind) for entry in found)
        _refuse_ids(mentions_stored_id(event.body) for event in events)
        return [*found, *more]

    def _write(self, contents: Contents, session: ClientSession | None) -> None:
        if not contents.entries:
            return
        in_transaction = session is not None and session.in_transaction
        ids = self.backing.insert(contents, session)
        if session is None or not in_transaction:
            self.backing.dispatch_parcels(ids)
        elif not after_commit(lambda: self.backing.dispatch_parcels(ids), session):
            self.backing.dispatcher.expect()

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


def _refuse_ids(asked: Iterable[bool]) -> None:
    if any(asked):
        raise OutboxRefusedError(
            "STORED_ID and callables stand for the _id of the document that a task is stored in, and here it is stored "
            "with a transaction; pass the id itself."
        )
